"""Each kernel called directly and compared with float64, in every case that its features declare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kernel_compat
from kernel_compat.diagnostics import numerics as check
from kernel_compat.kernels import reference

pytestmark = pytest.mark.gpu


def test_check_finds_it_right(
    name: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    (result,) = [r for r in check.run([name]).names if r.name == name]
    assert result.verdict == "right", result
    largest = max(case.errors["output"] for case in result.cases if case.errors)
    kernel = request.node.callspec.params["kernel"]
    record_property("figure", {"name": f"largest error, {kernel}", "value": largest, "unit": ""})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_sinks(kernel: str, dtype: torch.dtype) -> None:
    """The sinks' gradients too if the features declare them; otherwise an error, and with frozen sinks the other gradients."""
    found = kernel_compat.known_kernels()[kernel]
    functions, features = found.load(), found.features
    if not features.sinks or not features.backward:
        pytest.skip(f"{kernel} has no gradients of sinks")
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 33, 4, 64), (2, 33, 2, 64), (2, 33, 2, 64), (4,))
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator).to(dtype)

    def gradients(function: object, dtype: torch.dtype, device: str, count: int) -> list[torch.Tensor]:
        inputs = [x.to(device, dtype).requires_grad_(index < count) for index, x in enumerate(given)]
        out = function(*inputs[:3], causal=True, s_aux=inputs[3])  # type: ignore[operator]
        return [x.double().cpu() for x in torch.autograd.grad(out, inputs[:count], weight.to(device, dtype))]

    count = 4
    if "sinks" in features.forward_only:
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="gradients of attention sinks"):
            gradients(functions.flash_attn_func, dtype, "cuda", 4)
        count = 3
    try:
        ours = gradients(functions.flash_attn_func, dtype, "cuda", count)
    except RuntimeError as error:  # a package may be built for fewer dtypes than there are
        if "not built" not in str(error):
            raise
        pytest.skip(str(error))
    right = gradients(reference.flash_attn_func, torch.float64, "cpu", count)
    for what, x, y in zip(("dq", "dk", "dv", "the sinks'"), ours, right, strict=False):
        assert (x - y).norm() <= 2 * torch.finfo(dtype).eps * y.norm(), what

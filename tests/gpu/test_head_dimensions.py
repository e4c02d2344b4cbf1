"""Every kernel in every range of head dimensions, forward and backward, compared with float64."""

from __future__ import annotations

import pytest
import torch

import kernel_compat
from kernel_compat.kernels import reference

pytestmark = pytest.mark.gpu

LENGTHS = (33, 1, 64, 129)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("dim", [8, 16, 20, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 224, 256, 264, 512])
def test_head_dimensions(kernel: str, dim: int, causal: bool) -> None:
    """Output and gradients of packed sequences are right, or the head dimension is refused."""
    found = kernel_compat.known_kernels()[kernel]
    function, features = found.load().flash_attn_varlen_func, found.features
    generator = torch.Generator().manual_seed(0)
    total, longest = sum(LENGTHS), max(LENGTHS)
    q, k, v, weight = (torch.randn(total, heads, dim, generator=generator).bfloat16() for heads in (4, 2, 2, 4))

    def results(function: object, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        inputs = [x.to(device, dtype).requires_grad_(features.backward) for x in (q, k, v)]
        offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
        out = function(*inputs, offsets, offsets, longest, longest, causal=causal)  # type: ignore[operator]
        gradients = torch.autograd.grad(out, inputs, weight.to(device, dtype)) if features.backward else ()
        return [x.double().cpu() for x in (out, *gradients)]

    if dim > (features.max_head_dim or dim) and features.pair(dim, dim) is None:
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="head dimension"):
            results(function, torch.bfloat16, "cuda")
        return
    try:
        ours = results(function, torch.bfloat16, "cuda")
    except RuntimeError as error:  # a package may be built for fewer head dimensions than there are
        if "not built" not in str(error):
            raise
        pytest.skip(str(error))
    right = results(reference.flash_attn_varlen_func, torch.float64, "cpu")
    for what, x, y in zip(("output", "dq", "dk", "dv"), ours, right, strict=False):
        off = float((x - y).norm() / y.norm())
        assert off <= 2 * torch.finfo(torch.bfloat16).eps, f"{what} is off by {off:.2e}"

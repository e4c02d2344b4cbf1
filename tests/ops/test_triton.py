"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for the GPUs that they support."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreted
import pytest
import torch

triton = pytest.importorskip("triton")

from kernel_compat_ops.kernels import triton_load_balancing, triton_rms_norm, triton_rotary, triton_swiglu  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("file", ["interpreted_triton.py", "interpreted_liger.py"])
def test_interpreted(file: str) -> None:
    if "liger" in file:
        pytest.importorskip("liger_kernel")
    interpreted.run(f"tests/ops/{file}")


POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Compiling:
    """Compiles a kernel for the arguments of each launch, and doesn't run it."""

    def __init__(self, kernel: Any, capability: int, ptx: list[str]) -> None:
        self.kernel, self.capability, self.ptx = kernel, capability, ptx

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False))
        given |= {name: options.pop(name) for name in names[len(args) :]}
        signature, constants, attributes = {}, {}, {}
        for i, (name, value) in enumerate(given.items()):
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            specialized = not self.kernel.params[i].do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif name.isupper() or value is None or (value == 1 and specialized):
                signature[name], constants[(i,)] = "constexpr", value
            else:
                signature[name] = "i32"
            if signature[name][0] in "*i" and number % 16 == 0 and specialized:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        target = triton.backends.compiler.GPUTarget("cuda", self.capability, 32)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.asm["cubin"]
        self.ptx.append(compiled.asm["ptx"])


@pytest.fixture(params=[80, 90])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The PTX of the kernels launched in a test, which are compiled for a compute capability and not run."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx: list[str] = []
    for module in (triton_rms_norm, triton_rotary, triton_load_balancing, triton_swiglu):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Compiling(getattr(module, name), request.param, ptx))
    return ptx


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_compiles(compiled: list[str], dtype: torch.dtype) -> None:
    triton_swiglu.swiglu_backward(*torch.empty(3, 3, 5, dtype=dtype))
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "gemma"), [(False, False), (True, True)])
def test_rms_norm_compiles(compiled: list[str], offset: bool, gemma: bool) -> None:
    x, weight = torch.empty(3, 5120, dtype=torch.bfloat16), torch.empty(5120, dtype=torch.bfloat16)
    out, rstd = triton_rms_norm._forward(x, weight, 1e-6, offset, gemma)
    triton_rms_norm._backward(out, x, weight, rstd, offset, gemma)
    assert len(compiled) == 2


def test_rms_norm_compiles_to_the_same_for_any_batch(compiled: list[str]) -> None:
    """So a row's result doesn't depend on the other rows."""
    weight = torch.empty(512)
    for rows in (1, 7, 16, 5000):
        storage = torch.empty(rows * 515 + 1, dtype=torch.bfloat16)
        x = storage[rows % 2 :][: rows * 515].view(rows, 515)[:, :512]  # aligned for vectorized loads or not
        out, rstd = triton_rms_norm._forward(x, weight, 1e-6, False, False)
        triton_rms_norm._backward(out, x, weight, rstd, False, False)
    assert len(compiled) == 8
    assert len(set(compiled)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rotary"), [(torch.bfloat16, 128), (torch.float32, 50)])
def test_rotary_compiles(compiled: list[str], dtype: torch.dtype, rotary: int) -> None:
    for shape, transposed in (((2, 32, 5, 128), False), ((1, 1, 1, 128), True)):
        cos = torch.empty(1, shape[2], rotary, dtype=dtype)
        triton_rotary._rotate(torch.empty(shape, dtype=dtype), cos, cos, dtype, transposed)
    assert len(compiled) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "top_k", "mask"), [(128, 8, torch.ones(40)), (5000, 60, None)], ids=["mask", "no mask"]
)
def test_load_balancing_compiles(compiled: list[str], experts: int, top_k: int, mask: torch.Tensor | None) -> None:
    logits = [torch.empty(1 if mask is None else 40, experts, dtype=torch.bfloat16)]
    loss, slope = triton_load_balancing._forward(logits, mask, top_k, True)
    triton_load_balancing._backward(loss, logits, mask, slope)
    assert len(compiled) == 2

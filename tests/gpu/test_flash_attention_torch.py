"""torch's own kernel on each of its backends, compared with the reference in float32.

The tolerance is that of `check`: in 16 bits a correct kernel is off by about one unit roundoff, and four are allowed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernel_compat
from kernel_compat.kernels import reference

pytestmark = pytest.mark.gpu

TORCH = Version(torch.__version__)
#: The (query, key) lengths of each sequence.
SAME = ((33, 33), (1, 1), (64, 64), (129, 129))
SHORTER = ((1, 33), (7, 70), (64, 65), (0, 5), (128, 300))
LONGER = ((33, 20), (5, 1), (200, 130))


@pytest.fixture(params=["torch's own", "FA3", "FA4"])
def backend(request: pytest.FixtureRequest) -> Iterator[str | None]:
    if request.param == "torch's own":
        yield None
        return
    with kernel_compat.installed():
        try:
            handle = kernel_compat.use_torch_flash_backend(request.param)
        except kernel_compat.KernelUnavailableError as error:
            pytest.skip(str(error))
        with handle:
            yield request.param


def varlen(*args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = kernel_compat.known_kernels()["flash_attention_torch"].load().flash_attn_varlen_func(*args, **kwargs)
    return out


def compare(
    lengths: tuple[tuple[int, int], ...],
    dim: int = 64,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.bfloat16,
    function: Any = varlen,
    **options: Any,
) -> None:
    """Compare the forward and backward pass with the reference kernel in float32."""
    generator = torch.Generator("cuda").manual_seed(0)
    q_total, k_total = (sum(n[i] for n in lengths) for i in (0, 1))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    inputs = random(q_total, heads[0], dim), random(k_total, heads[1], dim), random(k_total, heads[1], dim)
    weight = random(q_total, heads[0], dim)
    offsets = [torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0).to("cuda", torch.int32) for i in (0, 1)]
    longest = [max(n[i] for n in lengths) for i in (0, 1)]
    results = []
    for call, precision in ((function, dtype), (reference.flash_attn_varlen_func, torch.float32)):
        leaves = [x.to(precision).detach().requires_grad_() for x in inputs]
        out = call(*leaves, *offsets, *longest, **options)
        results.append((out, *torch.autograd.grad(out, leaves, weight.to(precision))))
    for what, found, expected in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        error = float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))
        if float(expected.norm()) == 0:
            error = float(found.float().norm())
        assert error <= 2 * torch.finfo(dtype).eps, f"{what} is off by {error:.2e}"


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_and_dtypes(backend: str | None, heads: tuple[int, int], dtype: torch.dtype) -> None:
    compare(SAME, heads=heads, dtype=dtype, causal=True)


@pytest.mark.parametrize("lengths", [SAME, SHORTER, LONGER], ids=["same", "shorter", "longer"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": True},
        {"causal": True, "window_size": (7, 0)},
        {"causal": True, "window_size": (7, 7)},
        {"causal": True, "window_size": (0, 0)},
        {"causal": False, "window_size": (7, 7)},
        {"causal": False, "window_size": (5, 9)},
        {"causal": False, "window_size": (-1, 3)},
        {"causal": False, "window_size": (3, -1)},
    ],
    ids=str,
)
def test_masks(backend: str | None, lengths: tuple[tuple[int, int], ...], options: dict[str, Any]) -> None:
    if lengths is LONGER and options.get("window_size") == (3, -1):
        # FlashAttention-2 is wrong there (see the next test), so the name refuses it on every backend.
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="without a limit to the right"):
            compare(lengths, **options)
    else:
        compare(lengths, **options)


def test_a_window_to_the_left_alone_is_wrong_upstream() -> None:
    """FlashAttention-2, both torch's and its own package, with more queries than keys."""
    from torch.nn.attention.varlen import varlen_attn

    def left_alone(*args: Any, window_size: tuple[int, int]) -> Tensor:
        out: Tensor = varlen_attn(*args, window_size=window_size)
        return out

    with pytest.raises(AssertionError, match="output is off by"):
        compare(LONGER, heads=(4, 4), function=left_alone, window_size=(3, -1))
    flash_attn = pytest.importorskip("flash_attn")
    if not hasattr(flash_attn, "flash_attn_varlen_func"):
        return  # only FlashAttention-4 is installed
    with pytest.raises(AssertionError, match="output is off by"):
        compare(LONGER, heads=(4, 4), function=flash_attn.flash_attn_varlen_func, window_size=(3, -1))


@pytest.mark.parametrize("scale", [1 / 12, 0.1, 1.0, 2**-4, 0.0, -0.125])
def test_scales(backend: str | None, scale: float) -> None:
    compare(SAME, softmax_scale=scale, causal=True)


def test_deterministic(backend: str | None) -> None:
    """With torch's deterministic switch the gradients are bitwise reproducible."""
    q = torch.randn(2048, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 1000, 2048], device="cuda", dtype=torch.int32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(4):
            out = varlen(q, q, q, offsets, offsets, 1048, 1048, causal=True, deterministic=True)
            found.append(torch.autograd.grad(out.float().square().sum(), q)[0])
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(backend: str | None, dim: int, causal: bool) -> None:
    """SDPA runs on the chosen backend."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, v, is_causal=causal).transpose(1, 2)[0]

    compare(((200, 200),), dim=dim, heads=(4, 4), function=sdpa, causal=causal)


def test_varlen_attn_itself(backend: str | None) -> None:
    """A direct call of torch's function by other code, with a head dimension that FA4's own backward computes wrong."""
    from torch.nn.attention.varlen import varlen_attn

    def theirs(*args: Any, causal: bool) -> Tensor:
        out: Tensor = varlen_attn(*args, window_size=(-1, 0))
        return out

    compare(SAME, dim=48, heads=(4, 4), function=theirs, causal=True)


def test_which_kernel_runs(backend: str | None) -> None:
    q = torch.randn(256, 4, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 256], device="cuda", dtype=torch.int32)
    varlen(q, q, q, offsets, offsets, 256, 256, causal=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        varlen(q, q, q, offsets, offsets, 256, 256, causal=True)
    names = [event.key for event in profile.key_averages()]
    own = [name for name in names if "pytorch_flash" in name]
    cute = [name for name in names if "flash_attncute" in name]
    if backend == "FA4":
        assert not own, names
        assert cute, names
    else:
        assert not cute, names


def paged(function: Any, heads: tuple[int, int], q_len: int) -> float:
    """The largest error of `function(q, k_cache, v_cache, lengths, block_table)` over four sequences."""
    generator = torch.Generator("cuda").manual_seed(0)
    lengths, size, width, dim = (6, 13, 300, 700), 256, 4, 64

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    k_cache, v_cache = random(16, size, heads[1], dim), random(16, size, heads[1], dim)
    q = random(len(lengths), q_len, heads[0], dim)
    table = torch.randperm(16, generator=torch.Generator().manual_seed(0)).view(-1, width).to("cuda", torch.int32)
    for row, length in enumerate(lengths):
        table[row, -(-length // size) :] = -1
    found = function(q, k_cache, v_cache, torch.tensor(lengths, device="cuda", dtype=torch.int32), table)
    errors = []
    for row, length in enumerate(lengths):
        pages = table[row][table[row] >= 0].long()
        k, v = (cache[pages].flatten(0, 1)[None, :length].float() for cache in (k_cache, v_cache))
        expected = reference.flash_attn_func(q[row][None].float(), k, v, causal=True)[0]
        errors.append(float((found[row].float() - expected).norm() / expected.norm()))
    return max(errors) if all(error == error for error in errors) else float("inf")


@pytest.mark.skipif(Version("2.13") > TORCH, reason="flash_attention_torch has a paged cache from torch 2.13 on")
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_paged(heads: tuple[int, int], q_len: int) -> None:
    kvcache = kernel_compat.known_kernels()["flash_attention_torch"].load().flash_attn_with_kvcache
    assert kvcache is not None

    def ours(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Any:
        assert kvcache is not None
        return kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)

    assert paged(ours, heads, q_len) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.skipif(TORCH.release[:2] != (2, 13), reason="seen with torch 2.13")
def test_paged_is_wrong_upstream_where_it_splits() -> None:
    from torch.nn.attention.varlen import varlen_attn

    def theirs(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, *, splits: int | None) -> Any:
        offsets = torch.arange(len(q) + 1, device="cuda", dtype=torch.int32)
        k_offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        options = {"window_size": (-1, 0), "seqused_k": lengths, "block_table": table, "num_splits": splits}
        return varlen_attn(q[:, 0], k, v, offsets, k_offsets, 1, 1024, **options)[:, None]

    assert paged(lambda *args: theirs(*args, splits=None), (4, 4), 1) > 0.5
    assert paged(lambda *args: theirs(*args, splits=1), (4, 4), 1) <= 2 * torch.finfo(torch.bfloat16).eps


def test_flash_attention_3_forward_alone_is_not_enough() -> None:
    environment = kernel_compat.Environment.detect()
    if "fa3-fwd" not in environment.packages or "flash-attn-3" in environment.packages:
        pytest.skip("fa3-fwd without flash-attn-3 is not what is installed here")
    with pytest.raises(kernel_compat.KernelUnavailableError, match="needs the full package, flash-attn-3"):
        kernel_compat.use_torch_flash_backend("FA3")


def run(code: str) -> str:
    """Run code in a separate process, because its changes of the process can't be undone."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_SDPA) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_SDPA = """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel, activate_flash_attention_impl
    import kernel_compat
    def sdpa():
        q = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            out.sum().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "works"
"""


@pytest.fixture
def fa4() -> None:
    reasons = kernel_compat.known_kernels()["flash_attention_4"].unavailable_because(kernel_compat.Environment.detect())
    if reasons or Version("2.11") > TORCH:
        pytest.skip("; ".join(reasons) or "torch 2.10 has no activate_flash_attention_impl")


@pytest.mark.skipif(Version("2.14") <= TORCH, reason="torch takes any number of results from 2.14 on")
def test_fa4_breaks_the_process_upstream(fa4: None) -> None:
    assert "too many values to unpack" in run("activate_flash_attention_impl('FA4'); print(sdpa())")


def test_fa4_is_refused_before_install_and_nothing_breaks(fa4: None) -> None:
    found = run("""
        try:
            kernel_compat.use_torch_flash_backend("FA4")
        except kernel_compat.KernelUnavailableError as error:
            print(error)
        print(kernel_compat.status().torch_flash_backend, sdpa())
    """)
    assert "kernel_compat.install()" in found
    assert found.endswith("None works")


@pytest.mark.parametrize("order", ["install, activate", "activate, install"])
def test_fa4_after_install_and_after_uninstall(fa4: None, order: str) -> None:
    steps = {"install": "kernel_compat.install()", "activate": "activate_flash_attention_impl('FA4')"}
    found = run(
        "; ".join(steps[step] for step in order.split(", "))
        + "\nprint(kernel_compat.status().torch_flash_backend, sdpa())"
        + "\nkernel_compat.uninstall()\nprint(sdpa())"
    )
    assert found.splitlines() == ["FA4 works", "works"]


def test_check_on_fa4(fa4: None) -> None:
    from kernel_compat.diagnostics import numerics as check

    report = check.run(["flash_attention_torch"], torch_flash_backend="FA4")
    assert report.torch_flash_backend == "FA4"
    assert [result.verdict for result in report.names] == ["right"], report.names
    assert kernel_compat.status().torch_flash_backend is None

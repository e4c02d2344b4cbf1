"""FlashAttention-3 and -4 behind torch's own attention: when they may be activated, and the shims FA4 needs.

flash-attn-4 is replaced by functions with its arguments, number of results and mistakes; torch is real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from sites import Site
from stand_in import cpu_flash_attention, fa4_lengths
from tiny import distance
from torch import Tensor
from torch.nn.attention import varlen

import kernel_compat
from kernel_compat import Device, Environment, KernelUnavailableError, use_torch_flash_backend
from kernel_compat.kernels import reference
from kernel_compat.policy.torch_backend import unavailable_because

TORCH = Version(torch.__version__).release
needs_activation = pytest.mark.skipif(TORCH < (2, 11), reason="torch 2.10 has no backend to activate")

HOPPER, BLACKWELL, AMPERE, CONSUMER = (9, 0), (10, 0), (8, 0), (12, 0)


def environment(capability: tuple[int, int] | None, torch: str = "2.11.0", **packages: str) -> Environment:
    imports = {
        "flash_attn_3": "flash_attn_interface",
        "fa3_fwd": "fa3_fwd_interface",
        "flash_attn_4": "flash_attn.cute",
    }
    names = {name: name.replace("_", "-") for name in packages}
    return Environment(
        packages={"torch": torch, **{names[name]: version for name, version in packages.items()}},
        imports={"torch": ("torch",), **{imports[name]: (names[name],) for name in packages}},
        devices=() if capability is None else (Device("GPU", capability),),
    )


@pytest.mark.parametrize(
    ("backend", "where", "reason"),
    [
        ("FA4", environment(HOPPER, flash_attn_4="4.0.0b36"), None),
        ("FA4", environment(BLACKWELL, flash_attn_4="4.0.0b36"), None),
        ("FA3", environment(HOPPER, flash_attn_3="3.0.0"), None),
        ("FA4", environment(HOPPER), "flash-attn-4 is not installed"),
        ("FA4", environment(None, flash_attn_4="4.0.0b36"), "no CUDA device is visible"),
        ("FA4", environment(AMPERE, flash_attn_4="4.0.0b36"), "compute capability 9.0 or greater"),
        ("FA4", environment(CONSUMER, flash_attn_4="4.0.0b36"), "needs compute capability 9.x or 10.x"),
        ("FA4", environment(HOPPER, torch="2.10.0", flash_attn_4="4.0.0b36"), "torch 2.10.0 is older than 2.11"),
        ("FA3", environment(BLACKWELL, flash_attn_3="3.0.0"), "compute capability 9.0 to 9.x"),
        ("FA3", environment(HOPPER, fa3_fwd="0.0.3"), "torch needs the full package, flash-attn-3"),
        ("FA3", environment(HOPPER), "flash-attn-3 is not installed"),
    ],
)
def test_where_it_can_be_activated(backend: Any, where: Environment, reason: str | None) -> None:
    found = unavailable_because(backend, where)
    if reason is None:
        assert found == []
    else:
        assert any(reason in because for because in found), found


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'FA5' is no flash backend of torch; there are: 'FA3', 'FA4', None"):
        use_torch_flash_backend("FA5")  # type: ignore[arg-type]


def test_what_is_missing_is_said_with_the_command() -> None:
    with pytest.raises(KernelUnavailableError, match="pip install --pre flash-attn-4"):
        use_torch_flash_backend("FA4")
    with pytest.raises(KernelUnavailableError, match="build it from the hopper folder"):
        use_torch_flash_backend("FA3")
    assert kernel_compat.status().torch_flash_backend is None


def test_torchs_own_is_always_there() -> None:
    with use_torch_flash_backend(None):
        assert kernel_compat.status().torch_flash_backend is None


@pytest.fixture
def fa4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flash-attn-4 installed beside the real torch, on a supported device."""
    source = "from stand_in import fa4_backward as _flash_attn_bwd, fa4_forward as _flash_attn_fwd\n"
    site = Site(tmp_path / "fa4")
    files = {"flash_attn/cute/__init__.py": "", "flash_attn/cute/interface.py": source}
    site.install("flash-attn-4", "4.0.0b36", files)
    monkeypatch.syspath_prepend(site.path)
    monkeypatch.setattr("kernel_compat.environment._devices", lambda: (Device("H200", HOPPER),))
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    from torch.nn.attention import _fa4

    original = _fa4._fa4_import_module
    original.cache_clear()
    monkeypatch.setattr(_fa4, "_fa4_common_support_error", lambda *args, **kwargs: None)  # it requires CUDA tensors
    monkeypatch.setattr(_fa4, "_get_device_major", lambda device: 9)
    yield
    use_torch_flash_backend(None)
    kernel_compat.uninstall()
    assert _fa4._fa4_import_module is original
    original.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


@pytest.fixture
def on_the_cpu() -> Iterator[Callable[[], None]]:
    """Registers FA4's implementations, which activation registers for CUDA, for the CPU."""
    libraries = []

    def register() -> None:
        from torch.nn.attention import _fa4

        library = torch.library.Library("aten", "IMPL")
        library.impl("_flash_attention_forward", _fa4._fa4_flash_attention_forward_impl, "CPU")
        library.impl("_flash_attention_backward", _fa4._fa4_flash_attention_backward_impl, "CPU")
        libraries.append(library)

    yield register
    for library in libraries:
        library._destroy()


def attend(dim: int = 64, window: tuple[int, int] = (-1, -1)) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of torch's `varlen_attn` and of the reference in float32."""
    torch.manual_seed(0)
    inputs = [torch.randn(60, 2, dim).bfloat16() for _ in range(3)]
    weight = torch.randn(60, 2, dim).bfloat16()
    offsets = torch.tensor([0, 20, 25, 60], dtype=torch.int32)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs]
        if dtype == torch.bfloat16:
            out = varlen.varlen_attn(q, k, v, offsets, offsets, 35, 35, window_size=window)
        else:
            out = reference.flash_attn_varlen_func(q, k, v, offsets, offsets, 35, 35, window_size=window)
        results.append([out, *torch.autograd.grad(out, leaves, weight.to(dtype))])
    return results[0], results[1]


@needs_activation
def test_what_upstream_does(fa4: None, on_the_cpu: Callable[[], None]) -> None:
    """Up to 2.13 every call with FA4 active raises; from 2.14 on a gradient is silently wrong."""
    torch.nn.attention.activate_flash_attention_impl("FA4")
    on_the_cpu()
    if TORCH < (2, 14):
        with pytest.raises(ValueError, match="too many values to unpack"):
            attend()
    else:
        found, expected = attend(dim=48)
        assert distance(found[0], expected[0]) < 0.01
        assert distance(found[1], expected[1]) > 1


@needs_activation
@pytest.mark.parametrize("order", ["install first", "activate first"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (5, 5)], ids=str)
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_the_shim_makes_it_work(
    fa4: None, on_the_cpu: Callable[[], None], dim: int, window: tuple[int, int], order: str
) -> None:
    if order == "activate first":
        torch.nn.attention.activate_flash_attention_impl("FA4")
    report = kernel_compat.install()
    assert [shim.state for shim in report.shims if shim.name.startswith("torch")].count("applied") == 1
    assert report.ok, report
    with use_torch_flash_backend("FA4"):
        on_the_cpu()
        found, expected = attend(dim, window)
    for what, ours, theirs in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        # One unit roundoff for the output and one for each 16-bit input of a product.
        assert distance(ours, theirs) <= 2 * torch.finfo(torch.bfloat16).eps, what
        assert ours.is_contiguous(), what  # which torch.compile takes for granted
    assert fa4_lengths[-1] == (35, 35)  # without max lengths the planner takes all tokens for one sequence
    assert kernel_compat.status().torch_flash_backend == ("FA4" if order == "activate first" else None)


@needs_activation
def test_it_is_refused_before_install(fa4: None) -> None:
    with pytest.raises(KernelUnavailableError, match=r"kernel_compat\.install\(\) is called"):
        use_torch_flash_backend("FA4")
    assert kernel_compat.status().torch_flash_backend is None


@needs_activation
def test_it_is_refused_without_the_shim(fa4: None) -> None:
    (name,) = [s.name for s in kernel_compat.status().shims if s.name.startswith("torch") and s.state == "pending"]
    kernel_compat.install(skip=[name])
    with pytest.raises(KernelUnavailableError, match=f"the shim {name} is skipped"):
        use_torch_flash_backend("FA4")


@needs_activation
def test_handles_and_blocks(fa4: None) -> None:
    def active() -> str | None:
        return kernel_compat.status().torch_flash_backend

    kernel_compat.install()
    handle = use_torch_flash_backend("FA4")
    assert active() == "FA4"
    with use_torch_flash_backend(None):
        assert active() is None
    assert active() == "FA4"
    handle.undo()
    assert active() is None
    handle.undo()
    assert active() is None

    handle = use_torch_flash_backend("FA4")
    torch.nn.attention.restore_flash_attention_impl()  # deactivated by other code
    handle.undo()
    assert active() is None

    with pytest.raises(RuntimeError, match="inside"), use_torch_flash_backend("FA4"):
        raise RuntimeError("inside")
    assert active() is None


@needs_activation
def test_what_was_active_stays_where_activation_fails(fa4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compat.install()
    with use_torch_flash_backend("FA4"):
        monkeypatch.setattr("kernel_compat.policy.torch_backend.unavailable_because", lambda backend: [])
        with pytest.raises(KernelUnavailableError, match="it can't be activated"):
            use_torch_flash_backend("FA3")  # its package isn't installed
        assert kernel_compat.status().torch_flash_backend == "FA4"


@needs_activation
def test_uninstalling_leaves_no_broken_attention(fa4: None, caplog: pytest.LogCaptureFixture) -> None:
    kernel_compat.install()
    use_torch_flash_backend("FA4")
    kernel_compat.uninstall()
    if TORCH < (2, 14):
        assert kernel_compat.status().torch_flash_backend is None
        assert "is deactivated" in caplog.text
    else:
        assert kernel_compat.status().torch_flash_backend == "FA4"


@needs_activation
def test_flash_attention_torch_runs_on_it(fa4: None) -> None:
    """torch 2.14 and later prefer cuDNN, which doesn't accept `num_splits`: passing it selects FA4."""
    kernel_compat.install()
    q = torch.randn(6, 2, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 6], dtype=torch.int32)
    kernel = kernel_compat.known_kernels()["flash_attention_torch"].load()
    with use_torch_flash_backend("FA4"), cpu_flash_attention() as calls:
        kernel.flash_attn_varlen_func(q, q, q, offsets, offsets, 6, 6)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            if TORCH >= (2, 15):
                with pytest.raises(RuntimeError, match="CUDNN_ATTENTION was requested"):  # no cuDNN on a CPU
                    kernel.flash_attn_varlen_func(q, q, q, offsets, offsets, 6, 6)
            else:
                kernel.flash_attn_varlen_func(q, q, q, offsets, offsets, 6, 6)
    if TORCH >= (2, 12):
        assert calls[0]["num_splits"] == 0


@needs_activation
def test_the_command_line_shows_it(fa4: None, capsys: pytest.CaptureFixture[str]) -> None:
    from kernel_compat import cli

    kernel_compat.install()
    with use_torch_flash_backend("FA4"):
        assert cli.main(["status"]) == 0
        assert "torch runs on      FA4" in capsys.readouterr().out
        assert cli.main(["status", "--json"]) == 0
        assert '"torch_flash_backend": "FA4"' in capsys.readouterr().out
    assert cli.main(["status"]) == 0
    assert "torch runs on" not in capsys.readouterr().out


def test_a_check_on_a_backend_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    from kernel_compat import cli

    assert cli.main(["check", "flash_attention_reference", "--torch-flash-backend", "FA4"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Problem: torch's FA4 backend is not usable here:" in out
    assert "flash_attention_reference right" in out

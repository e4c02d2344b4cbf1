"""Which FlashAttention torch's own attention runs on: the one it is built with, or FA3 or FA4 in its place."""

from __future__ import annotations

import threading
from typing import Literal

from ..api import status
from ..environment import Environment, torch_flash_backend
from ..errors import KernelUnavailableError
from ..kernels.catalog import FA3_FWD, TORCH_BACKENDS
from ..patching.handle import Handle
from ..versions import within

__all__ = ["use_torch_flash_backend"]

Backend = Literal["FA3", "FA4"]

#: What the shims replace that FA4 needs.
_FA4_SEAM = "torch.nn.attention._fa4:_fa4_import_module"

_lock = threading.RLock()


def use_torch_flash_backend(backend: Backend | None) -> Handle:
    """Run torch's own flash attention on FlashAttention-3 or -4, for the whole process, until the handle is undone.

    That is ``flash_attention_torch``, every other caller of ``varlen_attn``, and what ``scaled_dot_product_attention`` runs on
    its flash backend. Wraps torch's ``activate_flash_attention_impl``; that of torch 2.10, which has FA4 alone, is not supported.

    Args:
        backend: ``"FA3"`` (flash-attn-3, compute capability 9.x), ``"FA4"`` (flash-attn-4, 9.x and 10.x; after `install()`)
            or None for the FlashAttention-2 that torch is built with.

    Returns:
        A handle whose ``undo()`` brings back the backend that was active before, unless another has been activated since;
        as a context manager it does so at the end of the block.

    Raises:
        KernelUnavailableError: it can't run here; the message says why. The active backend stays active.
        ValueError: `backend` is none of these.
    """
    if backend is not None and backend not in TORCH_BACKENDS:
        raise ValueError(f"{backend!r} is no flash backend of torch; there are: 'FA3', 'FA4', None")
    if backend is not None and (reasons := unavailable_because(backend)):
        absent = any("is not installed" in reason for reason in reasons)
        raise KernelUnavailableError(
            f"torch's {backend} backend", reasons, TORCH_BACKENDS[backend].install if absent else ""
        )
    with _lock:
        previous = torch_flash_backend()
        _activate(backend, previous)

    def undo() -> None:
        with _lock:
            if torch_flash_backend() == backend:
                _activate(previous, backend)

    return Handle(undo)


def unavailable_because(backend: Backend, environment: Environment | None = None) -> list[str]:
    """Why a backend can't be activated here; empty when it can."""
    report = status()
    environment = environment or report.environment
    package = TORCH_BACKENDS[backend].package
    reasons = package.unavailable_because(environment)
    torch = environment.version("torch")
    if torch is not None and within(torch, "<2.11"):
        reasons.append(f"torch {torch} is older than 2.11, the first whose backends are supported")
    forward = FA3_FWD.distribution
    if backend == "FA3" and forward in environment.packages and package.distribution not in environment.packages:
        reasons.append(f"{forward} is FA3's forward alone, and torch needs the full package, {package.distribution}")
    majors = TORCH_BACKENDS[backend].capabilities
    if not reasons and not any(device.capability[0] in majors for device in environment.devices):
        wanted = " or ".join(f"{major}.x" for major in majors)
        present = ", ".join(map(str, environment.devices))
        reasons.append(f"torch's {backend} backend needs compute capability {wanted}, and there is {present}")
    if backend == "FA4" and not reasons:
        for shim in report.shims:
            if _FA4_SEAM not in shim.seams or shim.state == "applied":
                continue
            advice = f"is {shim.state}: {shim.reason}"
            if shim.state == "pending":
                advice = f"mends, once kernel_compat.install() is called: {shim.reason}"
            reasons.append(f"it would break what the shim {shim.name} {advice}")
    return reasons


def _activate(backend: str | None, current: str | None) -> None:
    from torch.nn import attention

    if backend is None:
        if current is not None:
            attention.restore_flash_attention_impl()
        return
    try:
        attention.activate_flash_attention_impl(backend)
    except Exception as error:  # a package built for another torch fails in any way it likes
        # Upstream takes the previous one away before it tries.
        _activate(current, None)
        reason = f"it can't be activated ({type(error).__name__}: {error})"
        raise KernelUnavailableError(f"torch's {backend} backend", [reason]) from error

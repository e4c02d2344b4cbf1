"""What settings do in a process: names are registered, the library is installed, and ops are bound to each model that is built."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import kernel_compat
from kernel_compat.attention.names import upstream_owner
from kernel_compat.environment import Environment
from kernel_compat.errors import KernelCompatError, KernelCompatWarning, KernelUnavailableError
from kernel_compat.kernels import as_kernel, known_kernels

from .settings import Settings, SettingsError

if TYPE_CHECKING:
    from kernel_compat import ContextParallel
    from kernel_compat.ops import OpsConfig

__all__ = ["DEFAULT_NAME", "apply", "check"]

#: The name that is there where the settings have none: of any kernel. Behind an underscore and a kernel's name, of that kernel.
DEFAULT_NAME = "kernel_compat"


def apply(settings: Settings) -> str:
    """Register the names, install the library and have ops applied in this process; returns a line that says so.

    Imports torch and transformers.

    Raises:
        KernelCompatError, ValueError, OSError: as `check`; and a name isn't in transformers' tables.
    """
    config = check(settings)
    report = kernel_compat.install(unproven=settings.unproven)
    for name in _names(settings):
        if (state := report.attention[name]) != "available":
            raise KernelCompatError(f"the attention name {name!r} can't be used: {state}")
    if settings.ops is not None:
        from kernel_compat import ops

        ops.use_everywhere(config)
    applied = sum(shim.state == "applied" for shim in report.shims)
    parts = [*described(settings), f"{applied} shims on transformers {report.environment.version('transformers')}"]
    return f"kernel-compat: {'; '.join(parts)}"


def check(settings: Settings) -> OpsConfig | None:
    """Register the names in this process, and check that everything can be honoured in this environment.

    Returns:
        The config of a file of ops.

    Raises:
        KernelUnavailableError: a kernel can't run here, as when a model is loaded under a name of it.
        MissingExtraError: a part of the library isn't installed that the settings need.
        ValueError: a name is taken or malformed, or a kernel doesn't exist: as of ``kernel_compat.register_attention``; or a
            file of ops chooses nothing.
        OSError: the file can't be read.
    """
    over = _context_parallel(settings.context_parallel)
    for name, kernel in _names(settings).items():
        _register(name, kernel, settings, over)
    environment = Environment.detect()
    for kernels in settings.attention.values():
        kernel = as_kernel(_argument(kernels))
        if reasons := kernel.unavailable_because(environment):
            raise KernelUnavailableError(kernel.name, reasons, kernel.provider(environment).install_hint(environment))
    return None if settings.ops is None else _ops(settings.ops)


def _register(name: str, kernel: Any, settings: Settings, over: ContextParallel | None) -> None:
    if name == "eager":
        raise SettingsError("attention: 'eager' is the code of each model, which no name replaces")
    override = upstream_owner(name) is not None  # `sdpa=auto`, for a framework that takes no other names
    with warnings.catch_warnings():
        if override or name == DEFAULT_NAME:  # without 'flash' in it, which docs/run.md explains
            warnings.simplefilter("ignore", KernelCompatWarning)
        kernel_compat.register_attention(
            name, kernel=kernel, padding_free=settings.padding_free, context_parallel=over, override=override
        )


def described(settings: Settings) -> list[str]:
    """What would be installed, in words: the names with a kernel that can run here, and the other settings."""
    environment = Environment.detect()
    names = [
        f"{name} ({'any kernel' if kernel == 'auto' else ', '.join([kernel] if isinstance(kernel, str) else kernel)})"
        for name, kernel in _names(settings).items()
        if not as_kernel(kernel).unavailable_because(environment)
    ]
    others = {name: value for name, value in settings.values().items() if name != "attention"}
    if isinstance(ranks := others.get("context_parallel"), tuple):
        others["context_parallel"] = "x".join(map(str, ranks))
    return [
        f"attention {', '.join(names)}",
        *(name if value is True else f"{name} {value}" for name, value in others.items()),
    ]


def _names(settings: Settings) -> dict[str, Any]:
    """The kernels by attention name, as `register_attention` takes them."""
    if settings.attention:
        return {name: _argument(kernels) for name, kernels in settings.attention.items()}
    return {DEFAULT_NAME: "auto", **{f"{DEFAULT_NAME}_{kernel}": kernel for kernel in known_kernels()}}


def _argument(kernels: tuple[str, ...]) -> Any:
    return kernels[0] if len(kernels) == 1 else kernels


def _ops(file: str) -> OpsConfig | None:
    from kernel_compat.ops import OpsConfig

    if file == "auto":
        return None
    config = OpsConfig.from_yaml(file)
    if config == OpsConfig.eager():
        raise SettingsError(f"ops: {file} has no kernel under model.ops_implementation")
    return config


def _context_parallel(ranks: str | tuple[int, int] | None) -> ContextParallel | None:
    if ranks is None:
        return None
    from kernel_compat import ContextParallel, accelerate_mesh

    if ranks == "world":
        # Right for a program that gives each rank the slice of its number, and for one that calls `shard`.
        return ContextParallel(True, split="contiguous")
    if ranks == "accelerate":
        return ContextParallel(accelerate_mesh)

    def mesh() -> Any:
        import torch.distributed as dist

        found = accelerate_mesh()
        shape = () if found is None else tuple(found.mesh.shape)
        if (found is not None or dist.is_initialized()) and (*shape, 1)[:2] != ranks:
            there = f"has {'x'.join(map(str, shape))}" if shape else "hasn't been made"
            raise SettingsError(
                f"context_parallel is {'x'.join(map(str, ranks))}, and the mesh of accelerate's ranks {there}"
            )
        return found

    return ContextParallel(mesh)

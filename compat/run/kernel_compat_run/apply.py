"""What settings do in a process: names are registered, and the library is installed."""

from __future__ import annotations

from typing import Any

from .settings import Settings, SettingsError

__all__ = ["DEFAULT_NAME", "apply", "check", "register"]

#: The name that is there where the settings have none: of any kernel. Behind an underscore and a kernel's name, of that kernel.
DEFAULT_NAME = "kernel_compat"


def apply(settings: Settings) -> str:
    """Register the names and install the library in this process; returns a line that says so.

    Imports torch and transformers. Called again with the same settings it changes nothing.

    Raises:
        KernelCompatError, ValueError, OSError: as `check`.
    """
    import kernel_compat
    from kernel_compat.errors import KernelCompatError

    check(settings)
    report = kernel_compat.install(unproven=settings.unproven)
    for name in _names(settings):
        if (state := report.attention[name]) != "available":
            raise KernelCompatError(f"the attention name {name!r} isn't there: {state}")
    applied = sum(shim.state == "applied" for shim in report.shims)
    version = report.environment.version("transformers")
    parts = [
        f"attention {', '.join(_usable_names(settings))}",
        *(f"{name} {value}" for name, value in settings.values().items() if name != "attention"),
    ]
    return f"kernel-compat: {'; '.join(parts)}; {applied} shims on transformers {version}"


def check(settings: Settings) -> None:
    """Register the names in this process, and check that everything can be honoured in this environment.

    Raises:
        KernelUnavailableError: a kernel can't run here, as when a model is loaded under a name of it.
        MissingExtraError: a part of the library isn't installed that the settings need.
        ValueError: a name is taken or malformed, or a kernel doesn't exist: as of ``kernel_compat.register_attention``.
        OSError: the file of ops can't be read.
    """
    from kernel_compat.environment import Environment
    from kernel_compat.errors import KernelUnavailableError
    from kernel_compat.kernels import as_kernel

    if settings.ops or settings.context_parallel:
        raise SettingsError("ops and context_parallel aren't here yet")
    register(settings)
    environment = Environment.detect()
    for kernels in settings.attention.values():
        kernel = as_kernel(_argument(kernels))
        if reasons := kernel.unavailable_because(environment):
            raise KernelUnavailableError(kernel.name, reasons, kernel.provider(environment).install_hint(environment))


def register(settings: Settings) -> None:
    """Register the attention names of settings in this process."""
    import warnings

    import kernel_compat
    from kernel_compat.errors import KernelCompatWarning

    for name, kernel in _names(settings).items():
        with warnings.catch_warnings():
            if name == DEFAULT_NAME:  # its 'no flash in it' is documented
                warnings.simplefilter("ignore", KernelCompatWarning)
            kernel_compat.register_attention(name, kernel=kernel, padding_free=settings.padding_free)


def _names(settings: Settings) -> dict[str, Any]:
    """The kernels by attention name, as `register_attention` takes them."""
    from kernel_compat.kernels import known_kernels

    if settings.attention:
        return {name: _argument(kernels) for name, kernels in settings.attention.items()}
    return {DEFAULT_NAME: "auto", **{f"{DEFAULT_NAME}_{kernel}": kernel for kernel in known_kernels()}}


def _usable_names(settings: Settings) -> list[str]:
    from kernel_compat.environment import Environment
    from kernel_compat.kernels import as_kernel

    environment = Environment.detect()
    return [name for name, kernel in _names(settings).items() if not as_kernel(kernel).unavailable_because(environment)]


def _argument(kernels: tuple[str, ...]) -> Any:
    return kernels[0] if len(kernels) == 1 else kernels

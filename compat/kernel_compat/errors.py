"""Every error this library raises on purpose."""

from __future__ import annotations

__all__ = ["KernelCompatError", "KernelUnavailableError", "SeamError", "UnknownNameError", "UnsupportedFeatureError"]


class KernelCompatError(Exception):
    """Base class of every error of this library."""


class KernelUnavailableError(KernelCompatError, ImportError):
    """A kernel can't run in this environment; the message says why and which command installs it."""

    def __init__(self, kernel: str, reasons: list[str], install: str = "") -> None:
        self.kernel = kernel
        self.reasons = list(reasons)
        self.install = install
        message = f"{kernel} is not usable here: {'; '.join(reasons)}."
        if install:
            message += f" {install}"
        super().__init__(message)


class UnsupportedFeatureError(KernelCompatError, ValueError):
    """A request a kernel can't honour: names the feature, the kernel and what would work."""

    def __init__(self, feature: str, kernel: str, instead: str) -> None:
        self.feature = feature
        self.kernel = kernel
        super().__init__(f"{kernel} does not support {feature}. {instead}")


class SeamError(KernelCompatError, RuntimeError):
    """An attribute of somebody else's module is missing, or is not what a replacement needs it to be."""

    def __init__(self, seam: str, expected: str, found: str, version: str) -> None:
        self.seam = seam
        self.expected = expected
        self.found = found
        self.version = version
        super().__init__(f"{seam} ({version}): expected {expected}, found {found}")


class UnknownNameError(KernelCompatError, ValueError):
    """An attention name that nothing defines in this environment; the message lists the names that exist."""

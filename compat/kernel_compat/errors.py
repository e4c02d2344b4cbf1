"""The errors of this library."""

from __future__ import annotations

__all__ = [
    "AttentionRefusedError",
    "KernelCompatError",
    "KernelUnavailableError",
    "SeamError",
    "UnknownNameError",
    "UnsupportedFeatureError",
]


class KernelCompatError(Exception):
    """Base class of every error of this library."""


class KernelUnavailableError(KernelCompatError, ImportError):
    """A kernel can't run in this environment; the message gives the reasons and the command that installs it."""

    def __init__(self, kernel: str, reasons: list[str], install: str = "") -> None:
        self.kernel = kernel
        self.reasons = list(reasons)
        self.install = install
        message = f"{kernel} is not usable here: {'; '.join(reasons)}."
        if install:
            message += f" {install}"
        super().__init__(message)


class UnsupportedFeatureError(KernelCompatError, ValueError):
    """A request that a kernel can't honour; the message names the feature, the kernel and the kernels that have it."""

    def __init__(self, feature: str, kernel: str, instead: str) -> None:
        self.feature = feature
        self.kernel = kernel
        super().__init__(f"{kernel} does not support {feature}. {instead}")


class AttentionRefusedError(UnsupportedFeatureError):
    """An attention name that a model, or a part of one, can't be loaded or computed with.

    Attributes:
        name: the attention name.
        part: the class of the model or of its part.
        reason: what the part doesn't support under the name.
    """

    def __init__(self, name: str, part: str, reason: str, instead: str) -> None:
        self.name = name
        self.part = part
        self.reason = reason
        super().__init__(reason, part, instead)


class SeamError(KernelCompatError, RuntimeError):
    """An attribute of another project's module is missing, or differs from the one a replacement expects."""

    def __init__(self, seam: str, expected: str, found: str, version: str) -> None:
        self.seam = seam
        self.expected = expected
        self.found = found
        self.version = version
        super().__init__(f"{seam} ({version}): expected {expected}, found {found}")


class UnknownNameError(KernelCompatError, ValueError):
    """An attention name that nothing defines in this environment; the message lists the names that exist."""

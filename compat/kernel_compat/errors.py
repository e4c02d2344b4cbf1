"""The errors of this library."""

from __future__ import annotations

import copyreg
import warnings

__all__ = [
    "AttentionRefusedError",
    "KernelCompatError",
    "KernelCompatWarning",
    "KernelUnavailableError",
    "MissingExtraError",
    "RenamedWarning",
    "SeamError",
    "UnknownNameError",
    "UnprotectedError",
    "UnprotectedWarning",
    "UnprovenWarning",
    "UnsupportedFeatureError",
]


class KernelCompatError(Exception):
    """Base class of every error of this library. Its copies and pickles have the message and the attributes."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class KernelUnavailableError(KernelCompatError, ImportError, ValueError):
    """A kernel can't run in this environment; the message gives the reasons and the command that installs it.

    By release and reason, transformers raises an ImportError or a ValueError for a flash attention that isn't available.
    Frameworks catch either, and load the model under another name where the message has the words "does not support".
    """

    def __init__(self, kernel: str, reasons: list[str], install: str = "", *, in_call: bool = False) -> None:
        self.kernel = kernel
        self.reasons = list(reasons)
        self.install = install
        message = f"{kernel} is not usable here: {'; '.join(reasons)}."
        if not in_call:  # of a model that is loaded already
            message += " This environment does not support it."
        if install:
            message += f" {install}"
        super().__init__(message)


class MissingExtraError(KernelCompatError, ImportError):
    """A part of this library that is a package of its own isn't installed; the message has the command that installs it."""


class UnsupportedFeatureError(KernelCompatError, ValueError):
    """A request that can't be honoured; the message names the feature, what doesn't support it, and what to use instead.

    Attributes:
        feature: what was requested, in words.
        subject: what doesn't support it: a kernel, an attention name, a model's class, or a description of one.
    """

    def __init__(self, feature: str, subject: str, instead: str) -> None:
        self.feature = feature
        self.subject = subject
        super().__init__(f"{subject} does not support {feature}. {instead}")

    @property
    def kernel(self) -> str:
        """Deprecated: `subject`."""
        warnings.warn("UnsupportedFeatureError.kernel is now subject", RenamedWarning, stacklevel=2)
        return self.subject


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


class UnprotectedError(KernelCompatError, RuntimeError):
    """A call is refused because a shim that protects it could not be applied; the message names the seam and what to do.

    Attributes:
        shim: the name of the shim.
        protects: what would be wrong without it, perhaps silently.
        reason: why it isn't applied: the seam, what was expected, and what is there.
    """

    def __init__(self, shim: str, protects: str, reason: str) -> None:
        self.shim = shim
        self.protects = protects
        self.reason = reason
        super().__init__(
            f"{protects} could be silently wrong, because the shim {shim} is not applied: {reason}. Remove that change before "
            "kernel_compat.install(), use 'eager' or 'sdpa', or pass install(broken='allow') to run unprotected."
        )

    def again(self) -> UnprotectedError:
        """The same error, without the traceback of an earlier call."""
        return UnprotectedError(self.shim, self.protects, self.reason)


class KernelCompatWarning(UserWarning):
    """Base class of the warnings of this library."""


class UnprotectedWarning(KernelCompatWarning):
    """`install()` could not apply a shim."""


class UnprovenWarning(KernelCompatWarning):
    """A model is loaded under a registered name, and nothing proves that it computes the same as with eager attention."""


class RenamedWarning(KernelCompatWarning, FutureWarning):
    """A public name under which something was known before; the message has the new one. The old one goes with 1.0."""


class UnknownNameError(KernelCompatError, ValueError):
    """An attention name that nothing defines in this environment; the message lists the names that exist."""

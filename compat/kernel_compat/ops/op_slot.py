"""A place for a kernel in one's own modeling code."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from . import registry
from .spec import EAGER, require_variant

__all__ = ["OpSlot", "active"]

#: The `OpsConfig` of the `use` block that this thread is in.
active: ContextVar[Any] = ContextVar("kernel_compat_ops", default=None)


class OpSlot:
    """A named place for a kernel, filled when a model is built or by `apply_ops`; a forward looks nothing up.

    As an attribute of a module it belongs to that module: it is filled where the module is built under `use`, and by
    `apply_ops` on a model with the module in it, which then doesn't change the module's forward. As a global of a
    modeling file it belongs to the process, and `bind` fills it.

    An example is in docs/kernel-selection.md.

    Attributes:
        op: one of `OPS`.
        variant: the formula that the code around it computes.
        value: the config's value of its kernel; ``eager`` while it is empty.
        use_non_eager_impl: whether it is filled.

    Raises:
        ValueError: an unknown op or variant.
        KernelUnavailableError: the active config's kernel doesn't import.
    """

    value: str
    use_non_eager_impl: bool
    kernel: Callable[..., Any]

    def __init__(self, op: str, variant: str) -> None:
        require_variant(op, variant)
        self.op = op
        self.variant = variant
        self._fill(EAGER, _empty)
        if (config := active.get()) is not None:
            self.bind(config)

    def bind(self, choice: Any) -> None:
        """Fill it with the kernel that an `OpsConfig`, or a value of its field, chooses; ``eager`` empties it.

        Raises:
            ValueError: no kernel of that name is for its variant.
            KernelUnavailableError: it can't run here.
        """
        value = choice if isinstance(choice, str) else choice[self.op]
        if value == EAGER:
            self._fill(EAGER, _empty)
            return
        registry.require(self.op, value, registry.detect())
        specs = {spec.variant: spec for spec in registry.registered_kernels(self.op, value)}
        if self.variant not in specs:
            raise ValueError(f"{self.op} has no kernel {value!r} for the variant {self.variant!r}")
        self._fill(value, specs[self.variant].load())

    @staticmethod
    def contents(value: str, kernel: Callable[..., Any]) -> dict[str, Any]:
        """The attributes of a slot that is filled with a kernel, or with none for ``eager``."""
        return {"value": value, "use_non_eager_impl": value != EAGER, "kernel": kernel}

    def _fill(self, value: str, kernel: Callable[..., Any]) -> None:
        vars(self).update(self.contents(value, kernel))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel.

        Raises:
            RuntimeError: it is empty.
        """
        return self.kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"OpSlot({self.op!r}, {self.variant!r}): {self.value}"


def _empty(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this OpSlot is empty: check its use_non_eager_impl before calling it")

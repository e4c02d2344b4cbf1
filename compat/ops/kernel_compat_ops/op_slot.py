"""A place for a kernel in one's own modeling code."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from .registry import OpRegistry, default
from .spec import EAGER

__all__ = ["OpSlot", "active"]

#: The `OpsConfig` of the `use` block that this thread is in.
active: ContextVar[Any] = ContextVar("kernel_compat_ops", default=None)


class OpSlot:
    """A named place for a kernel, filled when a model is built or by `apply_ops`; a forward looks nothing up.

    As an attribute of a module it belongs to that module: it is filled where the module is built under `use`, and by
    `apply_ops` on a model with the module in it, which then doesn't change the module's forward. As a global of a
    modeling file it belongs to the process: `bind` fills it, and all models of that file share its kernel. Code that stored the
    result of `bound_kernel()` keeps that kernel.

    An example is in docs/kernel-selection.md.

    Args:
        registry: the kernels that it can be filled with; default: those of `register_kernel`.

    Attributes:
        op: the name of an op.
        variant: the formula that the code around it computes.
        value: the config's value of its kernel; ``eager`` while it is empty.
        is_bound: whether a kernel, or ``eager``, has been chosen for it.
        use_non_eager_impl: whether it is filled.
        use_eager_impl: whether ``eager`` has been chosen for it; False for a slot that nothing has been chosen for.

    Raises:
        ValueError: an unknown op or variant, or the active config's value has no kernel for the variant.
        KernelUnavailableError: the active config's kernel for the variant can't run here, or doesn't import.
    """

    value: str
    is_bound: bool
    use_non_eager_impl: bool
    use_eager_impl: bool
    kernel: Callable[..., Any]

    def __init__(self, op: str, variant: str, registry: OpRegistry = default) -> None:
        registry.require_variant(op, variant)
        self.op = op
        self.variant = variant
        self.registry = registry
        vars(self).update(self.contents(None))
        if (config := active.get()) is not None and config.registry is registry:
            self.bind(config)

    @property
    def op_name(self) -> str:
        """`op`, by VeOmni's name."""
        return self.op

    def bind(self, choice: Any) -> None:
        """Fill it with the kernel that an `OpsConfig`, or a value of its field, chooses; ``eager`` empties it.

        Raises:
            ValueError: no kernel of that name is for its variant.
            KernelUnavailableError: that kernel can't run here, though the value's kernels for other variants may.
        """
        value = choice if isinstance(choice, str) else choice[self.op]
        if value in (EAGER, self.registry.op(self.op).default):
            vars(self).update(self.contents(EAGER))
            return
        spec = self.registry.require_kernel(self.op, self.variant, value, self.registry.detect())
        vars(self).update(self.contents(value, spec.load()))

    def bound_kernel(self) -> Callable[..., Any] | None:
        """The kernel, for a module that keeps it whatever the slot is bound to later; None where it is empty."""
        return self.kernel if self.use_non_eager_impl else None

    def contents(self, value: str | None, kernel: Callable[..., Any] | None = None) -> dict[str, Any]:
        """The attributes of a slot that is filled with a kernel, or with none for ``eager``; of a new one for None."""
        filled = value not in (None, EAGER)
        return {
            "value": value or EAGER,
            "is_bound": value is not None,
            "use_non_eager_impl": filled,
            "use_eager_impl": value == EAGER,
            "kernel": kernel if filled else partial(_empty, self.op, self.variant),
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel.

        Raises:
            RuntimeError: it is empty.
        """
        return self.kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"OpSlot({self.op!r}, {self.variant!r}): {self.value if self.is_bound else 'unbound'}"


def _empty(op: str, variant: str, /, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"the OpSlot for {op}, {variant} is empty: call its bind, or check its use_non_eager_impl before calling it"
    )

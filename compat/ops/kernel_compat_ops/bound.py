"""The record of the kernels that are bound to a model, and the way back."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from kernel_compat.errors import KernelCompatWarning

from .config import OpsConfig
from .instances import Change, undo
from .spec import Binding

__all__ = ["RECORD", "BoundOps", "lock"]

#: The attribute of a model that holds the report of `apply_ops`: in the model itself, so that a copy has its own.
RECORD = "_kernel_compat_ops"

#: Held while kernels are bound to a model or undone.
lock = threading.RLock()


@dataclass(eq=False)
class BoundOps:
    """The kernels that `apply_ops` has bound to a model. The end of the outermost ``with`` block undoes them.

    Attributes:
        config: the config that was applied.
        bindings: every kernel that was bound.
        notes: the ops of the config that the model doesn't have, and other parts that stay eager.
    """

    config: OpsConfig
    bindings: tuple[Binding, ...]
    notes: tuple[str, ...] = ()
    model: Any = field(default=None, repr=False)
    _changes: list[Change] = field(default_factory=list, repr=False)
    _whole: BoundOps | None = field(default=None, repr=False)
    _blocks: int = field(default=0, repr=False)

    @property
    def active(self) -> bool:
        """Whether this report has not been undone."""
        return self.model is not None

    @property
    def replaced(self) -> tuple[str, ...]:
        """Attribute paths that other code has overwritten since `apply_ops`, as ``kernels.kernelize`` and liger-kernel do.

        Empty where every kernel is in force, and where they have been undone.
        """
        if self.model is None:
            return ()
        from .hub import Layers

        layers = Layers(self.model)
        paths = {id(module): path for path, module in self.model.named_modules()}
        overwritten = []
        for change in self._changes:
            path = paths.get(id(change.module), type(change.module).__name__)
            if not change.in_force or layers.around(path):
                overwritten.append(change.label or f"{path}.{change.attribute}".strip("."))
        return tuple(dict.fromkeys(overwritten))

    def undo(self) -> None:
        """Restore the attributes that were there before.

        An attribute that other code has overwritten since stays as it is, with a warning that names it; where that code puts
        ours back, another call restores it.
        """
        with lock:
            if self._whole is not None and self._whole.active:
                warnings.warn(
                    "these kernels belong to the report of the whole model by now: undo that one",
                    KernelCompatWarning,
                    stacklevel=2,
                )
                return
            if self.model is not None and vars(self.model).get(RECORD) is self:
                del vars(self.model)[RECORD]
            self.model = None
            self._changes = undo(self._changes)
            left = [
                f"{change.label or change.attribute} of a {type(change.module).__name__}" for change in self._changes
            ]
        for attribute in left:
            warnings.warn(
                f"{attribute} has been replaced since apply_ops: it is left as it is", KernelCompatWarning, stacklevel=2
            )

    def absorb(self, path: str, part: BoundOps) -> None:
        """Take over the report of a part of the model, whose kernels were bound before the model's."""
        inside = (replace(binding, path=f"{path}.{binding.path}".rstrip(".")) for binding in part.bindings)
        self.bindings = (*inside, *self.bindings)
        self._changes[:0] = part._changes
        vars(part.model).pop(RECORD)
        part.model, part._changes, part._whole = None, [], self

    def __enter__(self) -> BoundOps:
        with lock:
            self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with lock:
            self._blocks -= 1
            if not self._blocks:
                self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundOps:
        other = BoundOps(self.config, self.bindings, self.notes)
        memo[id(self)] = other
        other.model = copy.deepcopy(self.model, memo)
        other._changes = copy.deepcopy(self._changes, memo)
        return other

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # an unpickled model has its class's methods

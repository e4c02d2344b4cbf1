"""Attributes of a module instance that shadow its class's, and the way back.

A method that is put into an instance is bound to it, so that `copy.deepcopy` binds the copy's to the copy, and pickling the
module leaves it out: what is unpickled is the class's own again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from ..errors import UnsupportedFeatureError
from ..patching import swap
from ..patching.wrapping import covered, put_beneath

#: On functions of ours: the ops that they are for, with the config's value.
MARK = "__kernel_compat_op__"


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class Change:
    """One attribute of one instance. Knows its way back once it is made.

    Attributes:
        module: whose.
        name: of the attribute.
        value: the new value; a function is bound to the module.
    """

    module: Any
    name: str
    value: Any
    _slot: str = ""
    _before: Any = swap.ABSENT
    _after: Any = None

    def make(self) -> None:
        """Set the attribute."""
        attributes = vars(self.module)
        self._slot = slot(self.module) if self.name == "forward" else self.name
        self._after = MethodType(self.value, self.module) if isinstance(self.value, FunctionType) else self.value
        beneath = covered(self.module) if self._slot == "forward" else swap.ABSENT
        if beneath is not swap.ABSENT:
            self._before = swap.ABSENT if beneath is None else beneath
            put_beneath(self.module, beneath, self._after)
        else:
            change = swap.Change(attributes, self._slot, self._after)
            swap.make([change])
            self._before = change.before

    def undo(self) -> bool:
        """Restore the value before ours; False where other code has overwritten ours, which stays theirs."""
        for name in dict.fromkeys((self._slot, "_old_forward" if self.name == "forward" else self._slot)):
            before = self._before
            if before is swap.ABSENT and name != self._slot:  # a hook was put over ours
                class_: Any = type(self.module)
                before = MethodType(class_.forward, self.module)
            if not swap.undo([swap.Change(vars(self.module), name, self._after, before)]):
                return True
        before = None if self._before is swap.ABSENT else self._before
        return self.name == "forward" and put_beneath(self.module, self._after, before)

    @property
    def in_force(self) -> bool:
        """Whether our method is still called, directly or by a wrapper around it; True for other values."""
        if not isinstance(self.value, FunctionType):
            return True
        found = _own(self.module) if self.name == "forward" else vars(self.module).get(self.name)
        function = getattr(found, "__func__", found)
        while function is not None and function is not self.value:
            function = getattr(function, "__wrapped__", None)  # accelerate's, for mixed precision
        return function is not None


def require_module(model: Any) -> None:
    """Check that something is a module that kernels can be bound to.

    Raises:
        TypeError: not a module, or a compiled one.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if "_orig_mod" in model._modules:
        raise TypeError("model is compiled already: apply the ops to the model itself, then compile it")


def slot(module: Any) -> str:
    """Where an instance's forward is: under accelerate's hook, where one is in place."""
    hooked = "_hf_hook" in vars(module) and isinstance(_top(module), partial)
    return "_old_forward" if hooked else "forward"


def replaced(module: Any) -> Any:
    """The forward that an instance has of its own, None where its class's is in force."""
    found = _own(module)
    if isinstance(found, MethodType) and found.__self__ is module:
        return None if found.__func__ is getattr(type(module), "forward", None) else found
    return found


def ops_of(module: Any, method: str = "forward") -> Mapping[str, str]:
    """The ops of the kernels that this library has bound to a module's method, with the config's values."""
    found = _own(module) if method == "forward" else vars(module).get(method)
    return getattr(getattr(found, "__func__", found), MARK, {})


def _own(module: Any) -> Any:
    name = slot(module)
    return _top(module) if name == "forward" else vars(module).get(name)


def _top(module: Any) -> Any:
    beneath = covered(module)
    return vars(module).get("forward") if beneath is swap.ABSENT else beneath


def require_unreplaced(module: Any, path: str, op: str, kernel: str) -> None:
    """Check that the class's forward is in force.

    Raises:
        UnsupportedFeatureError: the instance has another.
    """
    found = replaced(module)
    if found is None:
        return
    raise UnsupportedFeatureError(
        f"{path or 'the model'} ({type(module).__name__}), whose forward has been replaced by {whose(found)}",
        f"{op} {kernel!r}",
        "Undo that, or leave the op eager: one of the two can be in force.",
    )


def whose(method: Any) -> str:
    """Where a method comes from, for people."""
    function = getattr(method, "__func__", method)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(method).__name__)}"


def ours(function: F, op: str, value: str) -> F:
    """Mark a function, or another value, as this library's, for `op` besides the ops that it is marked for."""
    setattr(function, MARK, {**getattr(function, MARK, {}), op: value})
    return function

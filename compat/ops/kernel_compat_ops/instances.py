"""Attributes of a module instance that shadow its class's, and the way back.

A method that is put into an instance is bound to it, so that `copy.deepcopy` binds the copy's to the copy, and pickling the
module leaves it out: what is unpickled is the class's own again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from kernel_compat.patching import swap
from kernel_compat.patching.wrapping import forwards_of, functions_beneath

#: The attribute of a bound function that holds its ops, each with the config's value.
MARK = "__kernel_compat_op__"

F = TypeVar("F", bound=Callable[..., Any])


class Change(swap.Change):
    """One attribute of a module, or of its config or slot. A forward goes beneath accelerate's hook and our wrappers.

    Attributes:
        module: the owner of the attribute.
        attribute: its name.
        label: its path in messages, where that isn't the module's path and the attribute.
    """

    def __init__(self, module: Any, attribute: str, value: Any, label: str = "") -> None:
        owner, name = _place(module) if attribute == "forward" else (module, attribute)
        super().__init__(owner, name, value)
        self.module, self.attribute, self.label = module, attribute, label

    def follow(self) -> None:
        """Look our forward up again: hooks and wrappers that came later may have moved it."""
        if self.attribute != "forward" or self.in_place:
            return
        wrappers = [(wrapper, "inner") for wrapper in forwards_of(self.module)]
        places = [(self.module, "forward"), (self.module, "_old_forward"), *wrappers]
        for owner, name in places:
            if swap.Change(owner, name, self.replacement).in_place:
                self.owner, self.name = owner, name
                if name == "_old_forward" and self.before is swap.ABSENT:  # the hook calls it
                    self.before = MethodType(type(self.module).forward, self.module)
                return

    @property
    def in_force(self) -> bool:
        """Whether our value is in place, or is called by a function that wraps it, as accelerate's for mixed precision."""
        if self.attribute.startswith("_kernel_compat"):  # private to us; the loss's own code changes them
            return True
        if not isinstance(self.replacement, MethodType):
            return self.in_place
        current = _function(self.module, self.attribute)
        return any(function is self.replacement.__func__ for function in functions_beneath(current))


def undo(changes: list[Change]) -> list[Change]:
    """Restore the values before ours, the last first; returns the changes that other code has overwritten."""
    for change in changes:
        change.follow()
    return swap.undo(changes[::-1])[::-1]


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


def replaced(module: Any) -> Any:
    """The forward that shadows the class's in an instance; None where the class's is in force."""
    forward = _own(module, "forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return None if forward.__func__ is getattr(type(module), "forward", None) else forward
    return forward


def ops_of(module: Any, method: str = "forward") -> Mapping[str, str]:
    """The ops of the kernels that this library has bound to a module's method, with the config's values."""
    return getattr(_function(module, method), MARK, {})


def qualified_name(method: Any) -> str:
    """The module and qualified name of a method, for messages."""
    function = getattr(method, "__func__", method)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(method).__name__)}"


def mark_as_bound(function: F, op: str, value: str) -> F:
    """Record on a function that it has a kernel for an op, besides the ops that are recorded on it; returns the function."""
    setattr(function, MARK, {**getattr(function, MARK, {}), op: value})
    return function


def _place(module: Any) -> tuple[Any, str]:
    """The object and attribute that hold an instance's forward: beneath our wrapper or accelerate's hook, if there is one."""
    present = vars(module).get("forward")
    owner, name = (present, "inner") if present in forwards_of(module) else (module, "forward")
    if "_hf_hook" in vars(module) and isinstance(swap.Change(owner, name).current, partial):
        return module, "_old_forward"
    return owner, name


def _own(module: Any, method: str) -> Any:
    """The method that shadows the class's in an instance; None for none."""
    owner, name = _place(module) if method == "forward" else (module, method)
    current = swap.Change(owner, name).current
    return None if current is swap.ABSENT else current


def _function(module: Any, method: str) -> Any:
    """The function of the method that shadows the class's in an instance; None for none."""
    own = _own(module, method)
    return getattr(own, "__func__", own)

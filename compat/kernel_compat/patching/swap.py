"""Sets attributes and dict entries of other projects, and restores them: the only place that does.

One rule for a value that other code has overwritten since: it stays theirs when ours is undone, and is reported. It is ours
again where they put our value back, and `reclaim` restores it then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, TypeVar

__all__ = ["ABSENT", "Change", "make", "reclaim", "swap", "undo"]


#: Packages that import no project that is patched but their own. Most module-level names of a process are theirs.
_FOUNDATIONS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "mpmath"})


class _Absent:
    """A class, because `copy.deepcopy` leaves classes as they are."""


#: The value of an attribute or entry that doesn't exist.
ABSENT: Any = _Absent


@dataclass(eq=False)
class Change:
    """One value of another project, and ours.

    Attributes:
        owner: the module or class that has the attribute, or the dict that has the entry. The dict of an instance, too.
        name: of the attribute, or the key of the entry.
        replacement: our value.
        before: the value that `undo` restores; `ABSENT` deletes it.
    """

    owner: Any
    name: str
    replacement: Any = None
    before: Any = ABSENT

    @property
    def current(self) -> Any:
        """The value that is there now; `ABSENT` if there is none."""
        return _read(self.owner, self.name)

    @property
    def in_place(self) -> bool:
        """Whether the value is still ours."""
        return _same(self.current, self.replacement)


C = TypeVar("C", bound=Change)


def make(changes: Sequence[Change]) -> None:
    """Note the present values as those to restore, and set ours. All or nothing."""
    for change in changes:
        change.before = change.current
    swap((change.owner, change.name, change.replacement) for change in changes)


def undo(changes: Iterable[C]) -> list[C]:
    """Restore the values that are still ours, in this order, and every module-level name that is bound to our replacement.

    Returns:
        The changes that other code has overwritten: they stay theirs.
    """
    changes = list(changes)
    left = [change for change in changes if not change.in_place]
    swap(
        [(change.owner, change.name, change.before) for change in changes if change not in left],
        [(change.replacement, change.before) for change in changes if isinstance(change.owner, ModuleType)],
    )
    return left


def reclaim(left: Iterable[C]) -> list[C]:
    """Restore the values that other code has put back to ours since `undo` left them as theirs.

    Returns:
        The changes that are still overwritten. One whose value is as it was before ours is none any more.
    """
    left = list(left)
    while ours := next((change for change in left if change.in_place), None):
        undo([ours])
        left.remove(ours)
    # Any of their earlier values will do: ours may have been there twice, beneath and above a patch of theirs.
    earlier = [(change.owner, change.name, change.before) for change in left]
    return [
        change
        for change in left
        if not any(
            owner is change.owner and name == change.name and before is change.current
            for owner, name, before in earlier
        )
    ]


def swap(assignments: Iterable[tuple[Any, str, Any]], aliases: Iterable[tuple[Any, Any]] = ()) -> None:
    """Set each ``(owner, name, value)``, or delete it where the value is `ABSENT`; rebind every module-level name that is bound to an alias' first to its second.

    ``from module import function`` binds a second name to the function: replacing the module's attribute alone
    would leave callers that did so with the original. All or nothing: an error restores every value set before it.
    """
    # One pass over the modules for all aliases. Keyed by identity: equality is theirs to define.
    renamed = {id(old): (old, new) for old, new in aliases}
    homes = {str(getattr(old, "__module__", "")).partition(".")[0] for old, _ in renamed.values()}
    skipped = _FOUNDATIONS - homes if all(homes) else frozenset()
    done: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in assignments:
            before = _read(owner, name)
            _write(owner, name, value)
            done.append((owner, name, before))
        for path, module in list(sys.modules.items()) if renamed else []:
            if path.partition(".")[0] in skipped:
                continue
            if not issubclass(type(module), ModuleType):  # isinstance would call the object's own __class__
                continue
            if renamed.keys().isdisjoint(map(id, tuple(vars(module).values()))):
                continue  # nearly always
            for name, bound in list(vars(module).items()):
                match = renamed.get(id(bound))
                if match is not None and match[0] is bound:
                    setattr(module, name, match[1])
                    done.append((module, name, bound))
    except BaseException:
        for owner, name, before in reversed(done):
            _write(owner, name, before)
        raise


def _read(owner: Any, name: str) -> Any:
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is not ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one; each access to a method makes a new object of it."""
    return one is other or (type(one) is type(other) is MethodType and one == other)

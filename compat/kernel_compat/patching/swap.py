"""Sets attributes and dict entries of other projects, and restores them: the only place that does.

One rule for a value that other code has overwritten since: it stays theirs when ours is undone, and is reported. Where they
put our value back, the next `undo` restores the one before it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, TypeVar

__all__ = ["ABSENT", "Change", "Changes", "make", "swap", "undo"]


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
        """The present value; `ABSENT` if the attribute or entry doesn't exist."""
        return _read(self.owner, self.name)

    @property
    def in_place(self) -> bool:
        """Whether the value is still ours."""
        ours, current = self.replacement, self.current
        # Each access to a method makes a new object of it.
        return current is ours or (type(current) is type(ours) is MethodType and bool(current == ours))

    @property
    def target(self) -> str:
        """The path of the attribute for messages: ``package.module:Class.attribute``."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"
        return (
            f"{self.owner.__name__}:{self.name}" if isinstance(self.owner, ModuleType) else f"the entry {self.name!r}"
        )


C = TypeVar("C", bound=Change)


def make(changes: Sequence[Change]) -> None:
    """Note the present values as those to restore, and set ours. All or nothing."""
    for change in changes:
        change.before = change.current
    swap((change.owner, change.name, change.replacement) for change in changes)


def undo(changes: Iterable[C]) -> list[C]:
    """Restore the values that are still ours, in this order, and every module-level name that is bound to our replacement.

    Returns:
        The changes that other code has overwritten, which stay as they are. Called again with them, it restores the values
        that are ours again by then. A value that equals the one before ours isn't listed.
    """
    left = list(changes)
    aliases = [(c.replacement, c.before) for c in left if isinstance(c.owner, ModuleType) and c.before is not ABSENT]
    while (ours := [change for change in left if change.in_place]) or aliases:
        swap([(change.owner, change.name, change.before) for change in ours], aliases)
        aliases = []
        left = [change for change in left if change not in ours]
    # Skip values equal to any value recorded before ours: ours may be recorded twice, once before and once after other code's.
    earlier = [(change.owner, change.name, change.before) for change in left]
    return [c for c in left if not any(o is c.owner and n == c.name and v is c.current for o, n, v in earlier)]


class Changes:
    """Changes that are made one by one while they are active, and undone together. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, str], Change] = {}
        self.active = False

    def activate(self) -> Callable[[], list[Change]]:
        """Make changes from now on. Returns the function that undoes them, which returns the same as `undo`."""
        self.active = True
        return self.undo

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Set a value. Does nothing while inactive, or where a value has been set already."""
        with self._lock:
            if self.active and (id(owner), name) not in self._made:
                change = Change(owner, name, value)
                make([change])
                self._made[id(owner), name] = change

    def undo(self) -> list[Change]:
        """Undo all changes; returns the same as `undo`."""
        with self._lock:
            self.active = False
            changes, self._made = self._made, {}
            return undo(reversed(changes.values()))


def swap(assignments: Iterable[tuple[Any, str, Any]], aliases: Iterable[tuple[Any, Any]] = ()) -> None:
    """Set each ``(owner, name, value)``, or delete it where the value is `ABSENT`; rebind every module-level name that is bound to an alias' first to its second.

    ``from module import function`` binds a second name to the function: replacing the module's attribute alone
    would leave callers that did so with the original. All or nothing: an error restores every value set before it.
    """
    # One pass over the modules for all aliases. Keyed by identity: other projects define equality.
    renamed = {id(old): (old, new) for old, new in aliases}
    done: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in assignments:
            before = _read(owner, name)
            _write(owner, name, value)
            done.append((owner, name, before))
        for module in list(sys.modules.values()) if renamed else ():
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

"""What a scan of a project finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Guard", "Kind", "Scan", "Use"]

Kind = Literal["import", "access", "patch", "call"]
Guard = Literal["", "try", "check", "typing"]


@dataclass(frozen=True, order=True)
class Use:
    """A place that names something of another package.

    Attributes:
        path: the file, relative to the project.
        line: from 1.
        column: from 1.
        name: ``package.module.Class.attribute``; of an entry in a table, the table.
        kind: ``call`` is reported for the functions that a scan looks for.
        how: the syntax: ``import``, ``assignment``, ``setattr``, ``mock.patch``, ``item`` and the like; of a function of the project
            that patches what it is given, its name with ``()``.
        guard: ``try``, if the code goes on where the name is missing; ``check``, if it runs under a condition on versions or on what
            there is; ``typing``, if only type checkers read it.
        deferred: whether it is in a function: it runs when that is called.
    """

    path: str
    line: int
    column: int
    name: str
    kind: Kind
    how: str
    guard: Guard = ""
    deferred: bool = False

    @property
    def adds(self) -> bool:
        """Whether it is a patch that also works, and has no effect, where the name is missing."""
        return self.kind == "patch" and not self.how.startswith(("mock", "monkeypatch", "del", "item"))


@dataclass(frozen=True)
class Scan:
    """The uses in a project, by place, and the files that can't be parsed, with the reason."""

    uses: tuple[Use, ...]
    unread: dict[str, str]
    files: int

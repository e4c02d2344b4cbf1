"""Places in a source tree, and the conditions under which their code runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from .scopes import Scope
from .uses import Guard, Kind, Use

__all__ = ["CATCH_ALL", "Context", "Place"]

CATCH_ALL = frozenset({"Exception", "BaseException"})


@dataclass(frozen=True)
class Context:
    """Where code is, and the conditions that it runs under.

    Attributes:
        import_caught: whether the code goes on where a module, or an imported name, is missing.
        attribute_caught: whether it goes on where an attribute is missing.
        checked: whether it runs under a condition on versions or on what there is.
        typing: whether only type checkers read it.
        deferred: whether it is in a function.
    """

    scope: Scope
    import_caught: bool = False
    attribute_caught: bool = False
    checked: bool = False
    typing: bool = False
    deferred: bool = False

    def catching(self, caught: Iterable[str]) -> Context:
        """The same where these exceptions are caught."""
        names = frozenset(caught)
        return replace(
            self,
            import_caught=self.import_caught or bool(names & (CATCH_ALL | {"ImportError", "ModuleNotFoundError"})),
            attribute_caught=self.attribute_caught or bool(names & (CATCH_ALL | {"AttributeError"})),
        )

    def guard(self, kind: Kind) -> Guard:
        """The guard of a use."""
        caught = self.import_caught if kind == "import" else self.attribute_caught
        return "typing" if self.typing else "try" if caught else "check" if self.checked else ""


class Place(NamedTuple):
    """A statement or an expression in a file."""

    path: str
    line: int
    column: int
    context: Context

    def use(self, name: str, kind: Kind, how: str) -> Use:
        """The use of a name here."""
        context = self.context
        return Use(self.path, self.line, self.column, name, kind, how, context.guard(kind), context.deferred)

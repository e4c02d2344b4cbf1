"""How other packages enter the library: entry-point groups, and what each entry must be.

The library imports none of them by name. Its own neighbours, such as kernel-compat-ops and kernel-compat-prove, use the same groups as any other project's package.

| group | entry | what it adds |
|---|---|---|
| ``kernel_compat.commands`` | a module, see `Command` | a command of ``kernel-compat`` |
| ``kernel_compat.load_gates`` | a `LoadGate` | a check of each model that is loaded under a registered name |
| ``kernel_compat.diagnoses`` | a `Diagnose` | what is wrong with an installed package, for ``kernel-compat explain`` |
| ``kernel_compat.plans`` | a `Plan` | what the package would do here, for ``kernel-compat plan`` |
| ``kernel_compat.public`` | any object | a public name of the library whose code is in that package |

Shims (``kernel_compat.shims``) and attention names (``kernel_compat.attention``) have groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .errors import MissingExtraError

if TYPE_CHECKING:
    import argparse

    from .environment import Environment

__all__ = [
    "COMMANDS",
    "DIAGNOSES",
    "LOAD_GATES",
    "PLANS",
    "PUBLIC",
    "Claim",
    "Command",
    "Diagnose",
    "Finding",
    "LoadGate",
    "Plan",
    "entries",
    "in_order",
    "install_hint",
    "package_of",
    "public",
]

COMMANDS = "kernel_compat.commands"
LOAD_GATES = "kernel_compat.load_gates"
DIAGNOSES = "kernel_compat.diagnoses"
PLANS = "kernel_compat.plans"
PUBLIC = "kernel_compat.public"

#: The claims about a model that a `LoadGate` checks: ``attention``, that it computes the same under a registered name as with eager
#: attention, and ``padding_free``, that it computes the same without its padding.
Claim = Literal["attention", "padding_free"]


class Command(Protocol):
    """A module of the group ``kernel_compat.commands``; the entry's name is the command's.

    It may have ``as_json(found)``, which makes the document that ``--json`` prints; without it `find` returns the document.
    """

    #: A line for ``kernel-compat --help``.
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def find(self, arguments: argparse.Namespace) -> Any:
        """Do the work; what it returns is printed by `show` or as JSON."""

    def show(self, result: Any) -> None:
        """Print what `find` returned."""


class LoadGate(Protocol):
    """Called with each model that is loaded under a registered name and that the table of proofs doesn't have."""

    def __call__(self, model: Any, name: str, claim: Claim, *, by_name: bool) -> str | None:
        """Whether the claim holds for a model.

        Args:
            model: a model that is being built; its weights aren't there yet.
            name: the attention name.
            claim: what must hold.
            by_name: for ``padding_free``: whether the attention name wants it, so that it needn't apply to the model.

        Returns:
            None if it holds; why it can't be decided, as the end of the sentence "... isn't proven to compute the same:".

        Raises:
            KernelCompatError: it doesn't hold.
        """


class Finding(Protocol):
    """Something that is wrong with an installed package: `breaks` if it can't work, a remark otherwise."""

    package: str
    file: str
    problem: str
    command: str
    breaks: bool


class Diagnose(Protocol):
    """Finds what is wrong with an installed distribution."""

    def __call__(self, distribution: str, environment: Environment) -> Sequence[Finding]:
        """The findings; empty if it is well, or isn't installed."""


class Plan(Protocol):
    """Called by ``kernel-compat plan``, which prints what it returns behind its own plan."""

    def __call__(self) -> Mapping[str, Any]:
        """A document with the lines to print, ``text``, and whether the plan can be carried out, ``ok``."""


def in_order(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Entry points in an order that is the same on every machine: by name, then by value."""
    return sorted(points, key=lambda point: (point.name, point.value))


def entries(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; of several of one name, the first in order."""
    first: dict[str, EntryPoint] = {}
    for point in in_order(entry_points(group=group)):
        first.setdefault(point.name, point)
    return first


def package_of(point: EntryPoint) -> str:
    """The distribution that an entry point comes from; its top-level package where that isn't known."""
    return point.dist.name if point.dist else point.module.partition(".")[0]


def install_hint(extra: str) -> str:
    """The sentence that says how to install an extra of kernel-compat."""
    return f'Install it with: pip install "kernel-compat[{extra}]"'


def public(name: str, extra: str) -> Any:
    """A public name of this library that another package brings.

    Args:
        name: the name of its entry point.
        extra: the extra that installs the package.

    Raises:
        MissingExtraError: an ImportError: no installed package has it; the message has the command that installs one.
    """
    point = entries(PUBLIC).get(name)
    if point is None:
        raise MissingExtraError(f"kernel_compat's {name} is in a package of its own. {install_hint(extra)}")
    return point.load()

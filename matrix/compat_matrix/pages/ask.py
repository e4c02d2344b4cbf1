"""The first page's parameters: the filters of the grid, and the question *does my combination work?*, whose form `ask.js` reads."""

from collections.abc import Container, Iterable, Mapping

from ..cells import OLD, Cell, spelled
from ..errors import MatrixError
from ..versions import release
from ..views.common import SIGNS
from ..views.verdicts import Closeness, Verdict, wanted

#: Stands for every value of a facet.
ALL = "all"

#: The old parameters of the form.
_FORM = ("tf", "pt", "fa", "on", "py")
#: The choices of the grid that were beside them.
_GRID = ("flash_attention", "device", "python")

#: The fields of the form, by axis, each with an example.
FIELDS = {
    "transformers": "5.9.1",
    "torch": "2.11.0+cu130",
    "flash_attention": "flash-attn 2.8.3",
    "device": "any",
    "python": "3.12",
}

#: The parameters. The first ones are the fields of the form, of which the last three also choose a grid; those of a project's own
#: axes follow.
NAMES = (*map(spelled, FIELDS), "only", "state", "run")

#: The state, the headline and the word of each verdict.
HEADLINES: Mapping[Verdict, tuple[str, str, str]] = {
    "passed": ("passed", "It works", "ok"),
    "flaky": ("flaky", "It works, but a test is flaky", "flaky"),
    "known": ("known", "It works but for failures that are known", "known"),
    "wrong": ("wrong", "It computes something else", ""),
    "failed": ("failed", "It fails", ""),
    "refused": ("refused", "It is excluded", ""),
    "unknown": ("not run", "It was never run", ""),
}

#: How exact an answer is.
CLOSENESS: Mapping[Closeness, str] = {
    "patch": "Exactly these releases were tested.",
    "minor": "The releases that were tested are below.",
    "rule": "The project doesn't test it, for this reason:",
    "neighbour": "The nearest combinations that were tested are below.",
    "none": "Nothing was tested yet.",
}


def read(given: Iterable[tuple[str, str]], own: Iterable[str] = ()) -> dict[str, str]:
    """Every filter, those of a project's own axes included, with its value in an address; an empty one stands for the default.

    Raises:
        MatrixError: a parameter is unknown, repeated or too long, or there is no such state.
    """
    filters = dict.fromkeys([*NAMES, *sorted(own)], "")
    for name, value in given:
        if name not in filters:
            raise MatrixError(f"{name!r} isn't a filter; the filters are {', '.join(filters)}")
        if filters[name]:
            raise MatrixError(f"{name} is given twice")
        if len(value) > 500:
            raise MatrixError(f"{name} is longer than 500 characters")
        filters[name] = value.strip()
    if filters["state"] and filters["state"] not in SIGNS:
        raise MatrixError(f"{filters['state']!r} isn't a state; the states are {', '.join(SIGNS)}")
    return filters


def own_axes(cells: Iterable[Cell]) -> dict[str, str]:
    """The project's own axes of cells, each with one of its values."""
    return {axis: value for cell in cells for axis, value in cell.extra}


def renamed(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The parameters of an address, old spellings as today's. A field of the form was another parameter than a choice of the grid: it counts.

    Raises:
        MatrixError: one is there with different values in two spellings.
    """
    pairs = [(name, value) for name, value in given if value]
    chosen = {OLD.get(name, name): value for name, value in pairs if name not in _FORM}
    asked = {OLD[name]: value for name, value in pairs if name in _FORM}
    said: dict[str, str] = {}
    for name, value in pairs:
        axis = OLD.get(name, name)
        if not (name in _GRID and axis in asked) and said.setdefault(axis, value) != value:
            raise MatrixError(
                f"{axis} is given in two spellings, as {said[axis][:100]!r} and as {value[:100]!r}: give it once"
            )
    return chosen | ({"transformers": ""} | asked if asked else {})


def fields(own: Mapping[str, str] = {}) -> dict[str, str]:
    """The fields of the form, with those of a project's own axes, each with an example."""
    return FIELDS | {axis: own[axis] for axis in sorted(own)}


def asked(filters: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The combination in the parameters of the form."""
    values = {axis: filters[spelled(axis)] for axis in fields(own)}
    return wanted({axis: value if value not in ("", ALL) else None for axis, value in values.items()})


def is_question(asked: Mapping[str, str], given: Container[str]) -> bool:
    """Whether parameters are from the form, which has transformers even if it is empty; else they only choose a grid."""
    return bool(asked) and ("transformers" in given or not asked.keys() <= {"flash_attention", "device", "python"})


def minor(version: str) -> str:
    """The minor release of a version, as cells are named."""
    return ".".join(map(str, release(version)[:2]))

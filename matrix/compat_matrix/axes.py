"""The axes file: the cells, the packages in a cell and the tests it runs. docs/matrix.md describes its fields."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from functools import cached_property
from itertools import combinations, product
from math import prod
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import tomli
from allpairspy import AllPairs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kernel_compat import releases

from .cells import AXES, LONGEST, OLD, WORD, Cell, Device, FlashAttention, axis_of, shard, spelled, values_of
from .errors import MatrixError
from .expressions import Expression, is_release, release
from .gpus import SHARES

#: Where a project has its file.
PLACES = (Path("matrix", "axes.toml"), Path("axes.toml"))
#: This project's file, the default.
OWN = Path(__file__).parent.parent / "axes.toml"


def _accepted_by(check: Callable[[str], object]) -> AfterValidator:
    """A text that a function accepts: it raises `ValueError`, or returns what is true."""
    return AfterValidator(lambda text: check(text) and text)


def _condition(given: Any, info: ValidationInfo) -> Expression:
    if isinstance(given, str):
        return Expression(given, info.context)
    if not isinstance(given, Expression):
        raise ValueError("Input should be a valid string")
    return given


def _distinct(values: list[str]) -> list[str]:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"{', '.join(twice)} is listed twice")
    return values


def _supported(listed: dict[str, str]) -> BeforeValidator:
    """``"supported"`` stands for the minor releases that kernel-compat supports."""
    return BeforeValidator(lambda value: releases.minors(listed) if value == "supported" else value)


#: Words of expressions, and the names of other fields and filters where results are written or queried by axis.
_RESERVED = {
    *("and", "in", "not", "or"),
    *("arguments", "attempt", "cell", "cells", "cursor", "kind", "limit", "name", "only", "reason", "run", "seconds"),
    *("started", "state", "tests"),
    *("before", "extra", "live", "text", *OLD),
}


def _axis(name: str) -> str:
    if near := get_close_matches(name, [*map(spelled, AXES), *AXES], 1, 0.9):
        raise ValueError(f"there is no such axis; is it {spelled(near[0])}?")
    if not re.fullmatch(WORD, name) or name in _RESERVED:
        form = "a word of at most 40 lower-case letters, digits and underscores, such as peft"
        raise ValueError(f"the name of an axis is {form}, and none of {', '.join(sorted(_RESERVED))}")
    return name


def _alike(values: list[str]) -> list[str]:
    if len({*map(is_release, values)}) > 1:
        raise ValueError(f"the values of an axis are releases, or words, not both: {', '.join(values)}")
    if wrong := [value for value in values if not is_release(value) and not re.fullmatch(WORD, value)]:
        form = "a release such as 0.17, or a word of lower-case letters, digits and underscores"
        raise ValueError(f"a value is {form}, not {wrong[0]!r}")
    return values


Condition = Annotated[Expression, PlainValidator(_condition)]
T = TypeVar("T", bound=str)
Distinct = Annotated[list[T], Field(min_length=1), AfterValidator(_distinct)]
Text = Annotated[str, Field(min_length=1)]
Day = Annotated[date, Field(strict=False)]
Releases = Distinct[Annotated[str, _accepted_by(release)]]
OwnAxis = Annotated[str, _accepted_by(_axis)]
OwnValues = Annotated[Distinct[str], AfterValidator(_alike)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Conditional(_Table):
    when: Condition | None = None

    def holds(self, cell: Cell) -> bool:
        return self.when is None or self.when(cell)


#: As the axis is written, and as it was.
_FLASH_ATTENTION = AliasChoices("flash-attn", "flash_attention", "flash_attn")


class Values(_Table, extra="allow"):
    """The values of each axis, in the order in which they are run and shown. Other names are axes of the project's own."""

    __pydantic_extra__: dict[OwnAxis, OwnValues] = Field(init=False)

    python: Distinct[Annotated[str, Field(pattern=r"^[0-9]\.[0-9]{1,3}$")]]
    transformers: Annotated[Releases, _supported(releases.TRANSFORMERS)] = [""]
    torch: Annotated[Releases, _supported(releases.TORCH)] = [""]
    flash_attention: Annotated[Distinct[FlashAttention], Field(validation_alias=_FLASH_ATTENTION)] = ["none"]
    device: Distinct[Device] = ["cpu"]

    @model_validator(mode="after")
    def _names_are_short(self) -> Values:
        cell = Cell.of({axis: max(values, key=len) for axis, values in self})
        if len(cell.name) > LONGEST:
            raise ValueError(f"the names of cells would be longer than {LONGEST} characters: {cell}")
        return self


class Exclude(_Table):
    """A rule that excludes cells."""

    when: Condition
    because: Text


#: The most combinations of a matrix, excluded ones included. Every command makes all of them: 10 µs and 1 kB each.
MOST = 200_000


def _bounded(tables: list[Values]) -> list[Values]:
    number = sum(prod(len(values) for _, values in table) for table in tables)
    if number > MOST:
        said = f"{number:,} combinations, and a matrix has at most {MOST:,}"
        raise ValueError(f"{said}: leave values out, or write several tables that don't combine all of them")
    return tables


def _inside(member: str) -> str:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"a member is a folder in the project's, such as compat/doctor, not {member!r}")
    return str(path)  # the same for every spelling


class Project(_Table):
    """The tested project: its folder, relative to the axes file's, and the extras that every cell has.

    Its members are folders in its own, of other distributions that are installed with it.
    """

    path: str = "."
    extras: list[str] = []
    members: Annotated[list[Annotated[str, AfterValidator(_inside)]], AfterValidator(_distinct)] = []


class Packages(_Conditional):
    """Requirements of the cells that match a condition, in their base or in their layer."""

    requires: Annotated[list[Annotated[str, _accepted_by(Requirement)]], Field(min_length=1)]
    part: Literal["base", "layer"] = "base"

    @model_validator(mode="after")
    def _part_is_known(self) -> Packages:
        """The condition may only use the part's axes, as all cells with the same values of these share the part."""
        axes = self.when.axes if self.when else set()
        if self.part == "base":
            others, may = axes - {"python", "torch", "flash_attention"}, "torch and flash-attn"
        else:
            others, may = axes & {"torch", "flash_attention", "device"}, "transformers and the project's own axes"
        if others:
            named = ", ".join(sorted(map(spelled, others)))
            raise ValueError(f"the {self.part} of a cell depends on python, {may} only, not on {named}")
        return self


class Tests(_Conditional):
    """The tests that the cells matching a condition run. The memory is in GiB."""

    __test__ = False

    command: Annotated[list[str], Field(min_length=1)]
    suite: str = "default"
    minutes: Annotated[float, Field(gt=0, strict=False)] = 30
    gpus: Annotated[float, Field(ge=0)] = 0
    memory: Annotated[float, Field(gt=0, strict=False)] = 4
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$")] | None = None
    environment: dict[str, str] = {}
    watch: str | None = None

    @field_validator("gpus")
    @classmethod
    def _gpus_can_be_leased(cls, gpus: float) -> float:
        if not (gpus * (SHARES if gpus < 1 else 1)).is_integer():
            raise ValueError(f"a whole number, or for a share of a GPU a multiple of {1 / SHARES:g}, not {gpus:g}")
        return gpus

    @field_validator("watch")
    @classmethod
    def _watched_axis_is_known(cls, axis: str | None, info: ValidationInfo) -> str | None:
        own = [name for name, values in (info.context or {}).items() if all(map(is_release, values))]
        if axis not in (None, "transformers", "torch", *own):
            raise ValueError(f"an axis of releases: {', '.join(['transformers', 'torch', *own])}, not {axis!r}")
        return axis


class Known(_Conditional):
    """Failures that are tied to an issue: in the cells that match a condition, they don't fail the run."""

    test: Text
    issue: Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=500)]
    until: Day
    because: Text

    def matches(self, nodeid: str) -> bool:
        """Whether `test` matches a node id."""
        return re.fullmatch(".*".join(map(re.escape, self.test.split("*"))), nodeid, re.DOTALL) is not None


class Axes(_Table):
    """An axes file, with its path."""

    version: Literal[1]
    axes: Annotated[
        list[Values],
        Field(min_length=1),
        BeforeValidator(lambda given: given if isinstance(given, list) else [given]),
        AfterValidator(_bounded),
    ]
    tests: Annotated[list[Tests], Field(min_length=1)]
    exclude: list[Exclude] = []
    packages: list[Packages] = []
    known: list[Known] = []
    project: Project = Project()
    exclude_newer: Day | None = None
    path: Path = Field(default=OWN, exclude=True)

    @cached_property
    def all_cells(self) -> dict[Cell, str]:
        """Every combination, with the reason if it is excluded, else an empty string."""
        found = {}
        for table in self.axes:
            names = [*AXES, *sorted(table.model_extra or ())]
            for values in product(*(dict(table)[name] for name in names)):
                cell = Cell.of(dict(zip(names, values, strict=True)))
                found[cell] = next((rule.because for rule in self.exclude if rule.when(cell)), "")
        return found

    @cached_property
    def own(self) -> dict[str, list[str]]:
        """The project's own axes and their values."""
        return {axis: values for axis, values in values_of(self.all_cells).items() if axis not in AXES}

    @cached_property
    def distributions(self) -> dict[str, str]:
        """The axes whose values are releases of a distribution, with the names of the distributions."""
        axes = {axis: values for axis, values in values_of(self.all_cells).items() if axis != "python" and values}
        return {axis: canonicalize_name(axis) for axis, values in axes.items() if is_release(values[0])}

    @model_validator(mode="after")
    def _tables_agree(self) -> Axes:
        """An axis has releases in all tables, or words."""
        if mixed := next((axis for axis, values in self.own.items() if len({*map(is_release, values)}) > 1), None):
            raise ValueError(f"{mixed}: the values of an axis are releases, or words, not both")
        return self

    @property
    def cells(self) -> list[Cell]:
        """The combinations that aren't excluded."""
        return [cell for cell, because in self.all_cells.items() if not because]

    def select(
        self, only: str | None = None, names: Sequence[str] = (), pairwise: bool = False, part: str | None = None
    ) -> list[Cell]:
        """Select cells that aren't excluded, by a condition and by names, all or a `cover`; of these a part such as ``3/8``.

        Raises:
            MatrixError: the condition or a name is invalid, a named cell is excluded, or no cell remains.
        """
        known = {cell.name: because for cell, because in self.all_cells.items()} if names else {}
        for name in names:
            if name not in known:
                raise MatrixError(f"there is no cell {name!r} in {self.path.name}")
            if known[name]:
                raise MatrixError(f"{name} is excluded: {known[name]}")
        condition = self._condition(only)
        cells = [cell for cell in self.cells if condition(cell) and (not names or cell.name in names)]
        if not cells:
            reasons = "; ".join(dict.fromkeys(self.excluded(only).values()))
            what = "is left by its rules" if only is None else f"matches {only!r}"
            raise MatrixError(f"no cell of {self.path.name} {what}{reasons and f': {reasons}'}")
        cells = cover(cells) if pairwise else cells
        if part is not None and not (cells := shard(cells, part)):
            raise MatrixError(f"the part {part} has no cells")
        return cells

    def excluded(self, only: str | None = None) -> dict[Cell, str]:
        """The excluded cells of a selection, with the reasons."""
        condition = self._condition(only)
        return {cell: because for cell, because in self.all_cells.items() if because and condition(cell)}

    def _condition(self, only: str | None) -> Callable[[Cell], bool]:
        return Expression(only, self.own) if only is not None else lambda cell: True

    def tests_of(self, cell: Cell, suite: str = "default") -> Tests | None:
        """The first tests of a suite that match a cell, or None; raises `MatrixError` if there is no such suite."""
        suites = sorted({tests.suite for tests in self.tests})
        if suite not in suites:
            raise MatrixError(f"{self.path.name} has the suites {', '.join(suites)}, not {suite!r}")
        return next((tests for tests in self.tests if tests.suite == suite and tests.holds(cell)), None)

    @property
    def folder(self) -> Path:
        """The tested project's folder."""
        return (self.path.parent / self.project.path).resolve()

    @property
    def project_name(self) -> str:
        """The name of the tested project in its pyproject.toml; empty if it has none there, which nothing needs."""
        try:
            name = tomli.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        except (OSError, ValueError, LookupError, TypeError):
            return ""
        return name if isinstance(name, str) else ""

    @property
    def folders(self) -> list[Path]:
        """The folders of the tested project and of its members."""
        return [self.folder, *(self.folder / member for member in self.project.members)]

    @property
    def pins(self) -> Path:
        """The folder of the pins, beside the axes file."""
        return self.path.parent / "pins"


def cover(cells: Sequence[Cell]) -> list[Cell]:
    """A small subset of the cells: every two values of different axes that share a cell also share one of the subset."""
    axes = values_of(cells)
    rows = {tuple(cell.axes.get(axis, "") for axis in axes): cell for cell in cells}
    possible = {row[:length] for row in rows for length in range(1, len(row) + 1)}
    values = [[*dict.fromkeys(column)] for column in zip(*rows, strict=True)]
    chosen = {tuple(row) for row in AllPairs(values, filter_func=lambda row: tuple(row) in possible)} if rows else set()
    # allpairspy gives up on a pair if every third value that it tries is excluded.
    pairs = {row: {*combinations(enumerate(row), 2)} for row in rows}
    missing = set().union(*pairs.values()).difference(*(pairs[row] for row in chosen))
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [cell for row, cell in rows.items() if row in chosen]


def axes_in(folder: Path) -> Path | None:
    """The axes file of a project in a folder; None if it has none."""
    return next((path for place in PLACES if (path := folder / place).is_file()), None)


def load(path: Path | None = None) -> Axes:
    """Read an axes file, by default the one of this folder; raises `MatrixError`, with the line, if it isn't valid."""
    path = path or axes_in(Path()) or (OWN if OWN.exists() else PLACES[0])
    try:
        text = path.read_text(encoding="utf-8")
        found = tomli.loads(text)
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path} isn't UTF-8 text: {error}") from None
    except (OSError, tomli.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return Axes.model_validate({**found, "path": path.resolve()}, context=_own_axes(found.get("axes")))
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            place = problem["loc"]
            if place[:1] == ("axes",) and not isinstance(found.get("axes"), list):
                place = place[:1] + place[2:]
            said = [*filter(None, [".".join(map(str, place))]), problem["msg"].removeprefix("Value error, ")]
            problems.append(": ".join([f"{path}:{_line_of(text, place)}", *said]))
        raise MatrixError("\n".join(problems)) from None


def _own_axes(given: Any) -> dict[str, list[str]]:
    """The own axes in tables that aren't validated yet, with their values."""
    found: dict[str, list[str]] = {}
    for table in given if isinstance(given, list) else [given]:
        for axis, values in table.items() if isinstance(table, dict) else ():
            if axis_of(axis) not in AXES and isinstance(values, list):
                found.setdefault(axis, []).extend(map(str, values))
    return found


def _line_of(text: str, place: Sequence[int | str]) -> int:
    """The line, from 1, of a path of keys such as ``("exclude", 2, "when")`` in a TOML text, or of its nearest parent."""
    lines = text.splitlines(keepends=True)

    def depth(number: int) -> int:
        """The number of keys of the path that the first lines have, up to the last one after which the text can be closed."""
        for end, closing in product(range(number, 0, -1), ("", "]", "}", "}]")):
            with suppress(tomli.TOMLDecodeError):
                return _depth(tomli.loads("".join(lines[:end]) + closing), place)
        return 0

    return bisect_left(range(len(lines)), depth(len(lines)), key=depth) or 1


def _depth(found: Any, place: Sequence[int | str]) -> int:
    """The number of keys of a path that exist."""
    with suppress(LookupError, TypeError):
        return 1 + _depth(found[place[0]], place[1:])
    return 0

"""The axes file: the cells, the excluded ones with reasons, the packages in a cell and the tests it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, Literal

import packaging.requirements
import tomli
from allpairspy import AllPairs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kernel_compat import releases

from .cells import AXES, DEVICES, FLASH_ATTENTION, VERSIONED, Cell
from .errors import MatrixError
from .expressions import Expression, release

#: This project's file, the default.
OWN = Path(__file__).parent.parent / "axes.toml"


def _release(text: str) -> str:
    try:
        release(text)
    except MatrixError as error:
        raise ValueError(str(error)) from None
    return text


def _day(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        raise ValueError(f"a day such as 2026-11-15, not {text!r}")
    date.fromisoformat(text)
    return text


def _condition(text: str) -> str:
    try:
        Expression(text)
    except MatrixError as error:
        raise ValueError(str(error)) from None
    return text


def _distinct(values: list[str]) -> list[str]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is listed twice")
    return values


def _supported(listed: dict[str, str]) -> BeforeValidator:
    """``"supported"`` stands for the minor releases that kernel-compat supports."""
    return BeforeValidator(lambda value: releases.minors(listed) if value == "supported" else value)


def _requirement(text: str) -> str:
    try:
        packaging.requirements.Requirement(text)
    except packaging.requirements.InvalidRequirement as error:
        raise ValueError(f"{text!r} isn't a requirement: {error}".splitlines()[0]) from None
    return text


#: The axes that determine the packages of a part.
PART_AXES = {
    "base": frozenset({"python", "torch", "flash_attention"}),
    "layer": frozenset({"python", "transformers"}),
}

Requirement = Annotated[str, AfterValidator(_requirement)]
Condition = Annotated[str, AfterValidator(_condition)]
Releases = Annotated[list[Annotated[str, AfterValidator(_release)]], Field(min_length=1), AfterValidator(_distinct)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def holds(self, cell: Cell) -> bool:
        when: str | None = getattr(self, "when", None)
        return when is None or _expression(when)(cell)


class Values(_Table):
    """The values of each axis, in the order in which they are run and shown.

    ``transformers = "supported"`` and ``torch = "supported"`` are the lists of `kernel_compat.releases`.
    """

    python: Releases
    transformers: Annotated[Releases, _supported(releases.TRANSFORMERS)]
    torch: Annotated[Releases, _supported(releases.TORCH)]
    flash_attention: Annotated[
        list[Literal["none", "fa2", "fa3", "fa4", "torch"]], Field(min_length=1), AfterValidator(_distinct)
    ] = ["none"]
    device: Annotated[list[Literal["cpu", "cuda"]], Field(min_length=1), AfterValidator(_distinct)] = ["cpu"]


class Exclude(_Table):
    """A rule that excludes cells."""

    when: Condition
    because: Annotated[str, Field(min_length=1)]


class Project(_Table):
    """The tested project. It is installed from its folder, with its requirements.

    Attributes:
        path: its folder, relative to the axes file's.
        extras: its extras that are installed in every cell.
    """

    path: str = "."
    extras: list[str] = []


class Packages(_Table):
    """Requirements of the cells that match a condition.

    Attributes:
        part: ``"base"``, with torch, or ``"layer"``, with transformers: required if it depends on transformers or on one of its
            requirements.
    """

    requires: Annotated[list[Requirement], Field(min_length=1)]
    part: Literal["base", "layer"] = "base"
    when: Condition | None = None

    @model_validator(mode="after")
    def _part_is_known(self) -> Packages:
        """The condition may only use the part's axes, as all cells with the same values of these share the part."""
        if self.when is not None:
            allowed = PART_AXES[self.part]
            others = sorted(_expression(self.when).axes - allowed)
            if others:
                raise ValueError(
                    f"the {self.part} of a cell depends on {', '.join(sorted(allowed))} only, not on {', '.join(others)}"
                )
        return self


class Tests(_Table):
    """The tests that the cells matching a condition run.

    Attributes:
        suite: the name for ``run --suite``.
        command: the arguments; if the first is ``pytest``, the cell's Python runs it, with the plugins that collect results.
        minutes: the time limit.
        gpus: the number of GPUs that a cell leases; each gets a pytest worker.
        memory: the memory in GiB, for schedulers.
        accelerator: the type of these GPUs, as Ray names it; without Ray it has no effect.
        environment: environment variables in addition to the runner's.
        watch: an axis; on its new releases `watch` runs this suite too, in the last cell of each release.
    """

    __test__ = False

    command: Annotated[list[str], Field(min_length=1)]
    suite: str = "default"
    when: Condition | None = None
    minutes: Annotated[float, Field(gt=0, strict=False)] = 30
    gpus: Annotated[int, Field(ge=0)] = 0
    memory: Annotated[float, Field(gt=0, strict=False)] = 4
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$")] | None = None
    environment: dict[str, str] = {}
    watch: Literal["transformers", "torch"] | None = None


class Axes(_Table):
    """An axes file.

    Attributes:
        version: the version of the file format: 1.
        exclude_newer: a day such as ``"2026-11-15"``; pins are resolved from the releases that existed at its start.
        path: the path of the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))

    version: Literal[1]
    axes: Values
    tests: Annotated[list[Tests], Field(min_length=1)]
    exclude: list[Exclude] = []
    packages: list[Packages] = []
    project: Project = Project()
    exclude_newer: Annotated[str, AfterValidator(_day)] | None = None
    path: Path = Field(default=OWN, exclude=True)

    @cached_property
    def all_cells(self) -> dict[Cell, str]:
        """Every combination, with the reason if it is excluded, else an empty string."""
        conditions = [(_expression(rule.when), rule.because) for rule in self.exclude]
        values = (getattr(self.axes, axis) for axis in AXES)
        return {
            cell: next((because for condition, because in conditions if condition(cell)), "")
            for cell in (Cell(*combination) for combination in product(*values))
        }

    @property
    def cells(self) -> list[Cell]:
        """The combinations that aren't excluded."""
        return [cell for cell, because in self.all_cells.items() if not because]

    def select(self, only: str | None = None, names: Sequence[str] = (), pairwise: bool = False) -> list[Cell]:
        """Select cells that aren't excluded.

        Args:
            only: an `Expression`.
            names: the names of the cells; empty for all.
            pairwise: reduce the selection to a small one in which every two values that share a cell still do.

        Raises:
            MatrixError: the condition or a name is invalid, a named cell is excluded, or no cell remains.
        """
        cells = self.cells
        if names:
            known = {cell.name: because for cell, because in self.all_cells.items()}
            for name in names:
                if name not in known:
                    raise MatrixError(f"there is no cell {name!r} in {self.path.name}")
                if known[name]:
                    raise MatrixError(f"{name} is excluded: {known[name]}")
            cells = [cell for cell in cells if cell.name in names]
        if only is not None:
            condition = Expression(only)
            cells = [cell for cell in cells if condition(cell)]
            if not cells:
                refused = [because for cell, because in self.all_cells.items() if because and condition(cell)]
                raise MatrixError(
                    f"no cell of {self.path.name} matches {only!r}" + (f": {refused[0]}" if refused else "")
                )
        if not cells:
            raise MatrixError(f"the rules of {self.path.name} exclude every cell")
        return cover(cells) if pairwise else cells

    def excluded(self, only: str | None = None) -> dict[Cell, str]:
        """The excluded cells of a selection, with the reasons."""
        wanted = Expression(only) if only else None
        return {cell: why for cell, why in self.all_cells.items() if why and (wanted is None or wanted(cell))}

    def tests_of(self, cell: Cell, suite: str = "default") -> Tests | None:
        """The tests of a cell in a suite: the first entry that matches; None if none does.

        Raises:
            MatrixError: there is no such suite.
        """
        suites = sorted({tests.suite for tests in self.tests})
        if suite not in suites:
            raise MatrixError(f"{self.path.name} has the suites {', '.join(suites)}, not {suite!r}")
        return next((tests for tests in self.tests if tests.suite == suite and tests.holds(cell)), None)

    @property
    def folder(self) -> Path:
        """The tested project's folder."""
        return (self.path.parent / self.project.path).resolve()


_expressions: dict[str, Expression] = {}


def _expression(text: str) -> Expression:
    if text not in _expressions:
        _expressions[text] = Expression(text)
    return _expressions[text]


def cover(cells: Sequence[Cell]) -> list[Cell]:
    """A small subset of the cells: every two values of different axes that share a cell also share one of the subset."""
    if not cells:
        return []
    fields = [list(dict.fromkeys(getattr(cell, axis) for cell in cells)) for axis in AXES]
    varied = [i for i, values in enumerate(fields) if len(values) > 1]
    if len(varied) < 2:
        return list(cells)  # each value needs its own cell
    there = {_values(cell) for cell in cells}
    fixed = tuple(values[0] for values in fields)

    def complete(row: Sequence[str]) -> tuple[str, ...]:
        whole = list(fixed)
        for index, value in zip(varied, row, strict=True):
            whole[index] = value
        return tuple(whole)

    prefixes = {tuple(cell[i] for i in varied)[:n] for cell in there for n in range(1, len(varied) + 1)}
    rows = AllPairs([fields[i] for i in varied], filter_func=lambda row: tuple(row) in prefixes)
    chosen = {complete(row.pairs if hasattr(row, "pairs") else row) for row in rows}
    # allpairspy gives up on a pair if every third value that it tries is excluded.
    pairs = {cell: set(combinations(enumerate(_values(cell)), 2)) for cell in cells}
    missing = set().union(*pairs.values()).difference(*(pairs[cell] for cell in cells if _values(cell) in chosen))
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        chosen.add(_values(best))
        missing -= pairs[best]
    return [cell for cell in cells if _values(cell) in chosen]


def _values(cell: Cell) -> tuple[str, ...]:
    return tuple(getattr(cell, axis) for axis in AXES)


def load(path: Path) -> Axes:
    """Read an axes file.

    Raises:
        MatrixError: it can't be read or isn't a valid axes file; the message has the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = tomli.loads(text)
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path} isn't UTF-8 text: {error}") from None
    except tomli.TOMLDecodeError as error:
        raise MatrixError(f"{path}: {error}") from None
    try:
        return Axes.model_validate({**found, "path": path.resolve()})
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            message = problem["msg"].removeprefix("Value error, ")
            where = ".".join(str(part) for part in problem["loc"])
            problems.append(f"{path}:{line_of(text, problem['loc'])}: {where}: {message}")
        raise MatrixError("\n".join(problems)) from None


def line_of(text: str, location: tuple[Any, ...]) -> int:
    """The line, from 1, of a key path such as ``("exclude", 2, "when")`` in a TOML text, or of its nearest existing parent."""
    lines = text.splitlines()
    start, end = 0, len(lines)
    best = 1
    rest = list(location)
    if rest:
        table = re.escape(str(rest[0]))
        number = rest[1] if len(rest) > 1 and isinstance(rest[1], int) else 0
        headers = [i for i, line in enumerate(lines) if re.match(rf"\s*\[\[?\s*{table}\s*\]", line)]
        if number < len(headers):
            start = headers[number]
            best = start + 1
            end = next((i for i in range(start + 1, len(lines)) if re.match(r"\s*\[\[?\s*\w", lines[i])), len(lines))
            rest = rest[2:] if len(rest) > 1 and isinstance(rest[1], int) else rest[1:]
        else:
            end = next((i for i, line in enumerate(lines) if re.match(r"\s*\[", line)), len(lines))
    if rest:
        key = re.compile(rf"\s*{re.escape(str(rest[0]))}\s*=")
        found = next((i for i in range(start, end) if key.match(lines[i])), None)
        if found is None:
            return best
        best = found + 1
        if len(rest) > 1 and isinstance(rest[1], int):
            seen = -1
            for i in range(found, end):
                code = re.split(r"=", lines[i], maxsplit=1)[-1] if i == found else lines[i]
                seen += len(re.findall(r"\"[^\"]*\"|'[^']*'|(?<![\w.])-?\d+(?:\.\d+)?", code.split("#")[0]))
                if seen >= rest[1]:
                    return i + 1
    return best


__all__ = ["AXES", "DEVICES", "FLASH_ATTENTION", "OWN", "VERSIONED", "Axes", "Tests", "cover", "line_of", "load"]

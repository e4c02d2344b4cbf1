"""The form that submits a run: the cells that it selects, how long such cells took, and the cells that are excluded."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..cells import Cell, axis_of, spelled
from ..errors import MatrixError
from ..expressions import Expression, is_release
from ..results import ENDED
from ..store import Store
from ..views import common

#: The fields besides the check boxes of the axes. The last one differs in every form that is sent to a browser.
OTHERS = ("only", "all", "suite", "label", "form")

#: The number of runs whose results tell how long the cells of a suite take, except for the default one.
_RUNS = 20

#: The most cells that are listed by name.
_LISTED = 100


class Form(NamedTuple):
    """What a form has, and by the name of a field what is wrong with it.

    Attributes:
        chosen: the values that are ticked, by axis.
        only: a further condition on cells.
        every: all cells.
        number: of this form, in order to submit it once.
    """

    chosen: Mapping[str, Sequence[str]]
    only: str
    every: bool
    suite: str
    label: str
    number: str
    errors: dict[str, str]

    @property
    def condition(self) -> str | None:
        """The condition on cells; None if nothing is chosen."""
        ticked = [
            f"{spelled(axis)}=={values[0]}" if len(values) == 1 else f"{spelled(axis)} in ({', '.join(values)})"
            for axis, values in self.chosen.items()
        ]
        only = [f"({self.only})" if ticked and "or" in self.only.split() else self.only] if self.only else []
        return " and ".join([*ticked, *only]) or None


def read(given: Iterable[tuple[str, str]], axes: Mapping[str, Collection[str]]) -> Form:
    """The form with these fields; `axes` are those of the cells, with their values."""
    chosen: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    others = dict.fromkeys(OTHERS, "") | {"suite": "default"}
    for name, value in given:
        axis = axis_of(name)
        if name in others:
            others[name] = value.strip()
        elif axis in axes and value in axes[axis]:
            chosen.setdefault(axis, []).append(value)
        elif axis in axes:
            errors[axis] = f"There is no cell with {name} {common.one_line(value, 40)}."
    ordered = {axis: chosen[axis] for axis in axes if axis in chosen}
    suite, label, number = (others[one] for one in OTHERS[2:])
    form = Form(ordered, others["only"], bool(others["all"]), suite, label, number, errors)
    if form.only:
        try:
            Expression(form.only, axes)
        except MatrixError as error:
            errors["only"] = str(error)
    if form.every and form.condition:
        errors["all"] = "Either all cells, or those that are chosen: untick this, or the others."
    return form


def choices(axes: Mapping[str, Collection[str]], form: Form) -> dict[str, tuple[str, list[tuple[str, str, bool]]]]:
    """The check boxes of each axis with several values: its label, and the values, their labels and whether they are ticked."""
    names = {"flash_attention": common.KERNELS, "device": common.DEVICES}
    found = {}
    for axis, values in axes.items():
        if axis in OTHERS or (len(values) < 2 and axis not in form.chosen):
            continue
        some = common.by_version(values)[::-1] if all(map(is_release, values)) else values
        boxes = [(one, names.get(axis, {}).get(one, one), one in form.chosen.get(axis, ())) for one in some]
        found[axis] = (spelled(axis), boxes)
    return found


def plan(
    store: Store, suite: str, cells: Sequence[Cell], excluded: Mapping[Cell, str], jobs: int | None
) -> dict[str, Any]:
    """What a run of these cells would be: the excluded ones by their reasons, and how long cells took, `jobs` at a time."""
    runs = None if suite == "default" else [one.id for one in store.runs(500) if one.suite == suite][:_RUNS]
    past = {one.cell: one.summary for one in ([] if runs == [] else store.newest(runs))}
    took = {cell: one.seconds for cell, one in past.items() if one.verdict in ENDED}
    own = [took[cell] for cell in cells if cell in took]
    times = own or [*took.values()]
    seconds = median(times) if times else None
    why: dict[str, list[Cell]] = {}
    for cell in common.ordered(excluded):
        why.setdefault(excluded[cell], []).append(cell)
    return {
        "number": len(cells),
        "cells": common.ordered(cells)[:_LISTED],
        "why": [(reason, len(some), some[:_LISTED]) for reason, some in why.items()],
        "seconds": seconds,
        "known": len(own),
        "others": len(took),
        "whole": seconds and jobs and seconds * max(1, -(-len(cells) // jobs)),
        "jobs": jobs,
    }

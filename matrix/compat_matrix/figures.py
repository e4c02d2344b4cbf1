"""The figures that tests recorded, from pytest's report log. An invalid figure fails its test, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from .results import Better, Figure, Test

#: The name of the property that is a figure.
PROPERTY = "figure"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} has characters that can't be printed")
    return text


class Recorded(BaseModel):
    """A figure as a test records it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
    value: Annotated[float, Field(allow_inf_nan=False)]
    unit: Annotated[str, Field(max_length=40), AfterValidator(_printable)]
    better: Better | None = "lower"


def with_figures(test: Test, properties: Any, skipped: int = 0) -> Test:
    """A test with the figures in its properties, as the report log has them; failed if one is invalid.

    Args:
        skipped: the number of properties at the beginning that don't count.
    """
    if isinstance(properties, str):  # pytest-reportlog writes properties as one text if one of them isn't JSON
        unreadable = f"('{PROPERTY}'," in properties
        return _failed(test, [f"its figures aren't JSON: {properties}"]) if unreadable else test
    found, problems = [], []
    for entry in properties[skipped:] if isinstance(properties, list) else ():
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == PROPERTY:  # a project may append anything
            try:
                found.append(Figure(**Recorded.model_validate(entry[1]).model_dump()))
            except ValidationError as error:
                problems += [f"the figure {repr(entry[1])[:200]} is invalid: {_said(one)}" for one in error.errors()]
    test = replace(test, figures=tuple(found))
    return _failed(test, problems) if problems else test


def distinct(tests: Iterable[Test]) -> list[Test]:
    """The tests with figures of different names: a test that repeats the name of an earlier figure fails."""
    first: dict[str, tuple[str, Figure]] = {}
    checked = []
    for one in tests:
        kept, problems = [], []
        for figure in one.figures:
            if figure.name not in first:
                first[figure.name] = (one.nodeid, figure)
                kept.append(figure)
            else:
                nodeid, other = first[figure.name]
                units = f", in {other.unit!r} there and in {figure.unit!r} here" * (other.unit != figure.unit)
                problems.append(f"the figure {figure.name!r} was recorded before, by {nodeid}{units}")
        test = replace(one, figures=tuple(kept))
        checked.append(_failed(test, problems) if problems else test)
    return checked


def _failed(test: Test, problems: Iterable[str]) -> Test:
    outcome = test.outcome if test.outcome in ("failed", "error") else "failed"
    return replace(test, outcome=outcome, message="\n".join([*problems, *filter(None, [test.message])]))


def _said(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"

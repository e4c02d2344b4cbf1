"""The question of the first page, *does my combination work?*: its fields, and the words of its answer. `ask.js` reads the form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..cells import Cell
from ..versions import release
from ..views.verdicts import Closeness, Judged, Verdict, wanted

#: The fields of the form, by the axis that they are about: the parameter, the label and an example.
FIELDS = {
    "transformers": ("tf", "transformers", "5.9.1"),
    "torch": ("pt", "torch", "2.11.0+cu130"),
    "flash_attention": ("fa", "FlashAttention", "flash-attn 2.8.3"),
    "python": ("py", "Python", "3.12"),
}

#: The state, the headline and the word of each verdict.
HEADLINES: Mapping[Verdict, tuple[str, str, str]] = {
    "passed": ("passed", "It works", "ok"),
    "flaky": ("flaky", "It works, but a test is flaky", "flaky"),
    "known": ("known", "It works but for failures that are known", "known"),
    "wrong": ("wrong", "It computes something else", ""),
    "failed": ("failed", "It fails", ""),
    "refused": ("refused", "It is excluded", ""),
    "unknown": ("not run", "It was not tested", ""),
}

#: How exact an answer is.
CLOSENESS: Mapping[Closeness, str] = {
    "patch": "Exactly these releases were tested.",
    "minor": "These minor releases were tested; the patch releases are below.",
    "rule": "A rule of the axes says so, for every patch release.",
    "neighbour": "Only its neighbours were tested: the nearest are below.",
    "none": "Nothing was tested yet.",
}


def own_axes(cells: Iterable[Cell]) -> dict[str, str]:
    """The project's own axes of cells, each with one of its values."""
    return {axis: value for cell in cells for axis, value in cell.extra}


def fields(own: Mapping[str, str] = {}) -> dict[str, tuple[str, str, str]]:
    """The fields of the form, with those of a project's own axes, each with an example."""
    return FIELDS | {axis: (axis, axis, own[axis]) for axis in sorted(own)}


def asked(filters: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The combination in the parameters of the form.

    Raises:
        MatrixError: an axis never has such a value.
    """
    return wanted({axis: filters[name] or None for axis, (name, *_) in fields(own).items()})


def answer(judged: Judged) -> dict[str, Any]:
    """The values of the template of an answer."""
    state, headline, _ = HEADLINES[judged.verdict]
    kind = judged.found[0].kind if judged.verdict == "failed" else None
    return {
        "state": state,
        "headline": f"{headline}: {kind}" if kind else headline,
        "closeness": judged.closeness,
        "reason": judged.reason,
        "evidence": judged.shown,
        "works": judged.works,
    }


def minor(version: str) -> str:
    """The minor release of a version, as cells are named."""
    return ".".join(map(str, release(version)[:2]))

"""A cell: one combination of Python, transformers, torch, FlashAttention, device and a project's own axes, and its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, get_args

from .errors import MatrixError

#: The axes that every matrix may have, in the order of a cell's fields. The values of the first three are versions, those of the
#: others words. A project's own axes follow them.
AXES = ("python", "transformers", "torch", "flash_attention", "device")
VERSIONED = AXES[:3]

#: The axes as people write them, where that isn't the name of the field; and the other spellings that are accepted.
_SPELLED = {"flash_attention": "flash-attn", "flash_attn_package": "flash-attn package"}
OLD = {"tf": "transformers", "pt": "torch", "fa": "flash-attn", "py": "python", "on": "device"}
OLD |= {"flash_attention": "flash-attn", "flash_attn": "flash-attn"}

FlashAttention = Literal["none", "fa2", "fa3", "fa4", "torch"]
Device = Literal["cpu", "cuda"]
#: The values of the axes that always have these words.
WORDS: Mapping[str, tuple[str, ...]] = {"flash_attention": get_args(FlashAttention), "device": get_args(Device)}

#: The packages of FlashAttention, each with its value of that axis.
PACKAGES: Mapping[str, FlashAttention] = {
    "flash-attn": "fa2",
    "flash-attn-3": "fa3",
    "fa3-fwd": "fa3",
    "flash-attn-4": "fa4",
}

#: A release as a value of an axis.
VERSION = r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,4}"
#: The name of an axis of a project's own, and a value of it that isn't a version.
WORD = r"[a-z][a-z0-9_]{0,39}"
_OWN = re.compile(rf"(?:^|-)({WORD})=({VERSION}|{WORD})(?=-|$)")

#: The form of a cell's name, in which the own axes may be in any order: `parse` refuses all but one.
NAME = (
    rf"py([0-9])([0-9]{{1,3}})(?:-tf({VERSION}))?(?:-torch({VERSION}))?(?:-(fa2|fa3|fa4|fatorch))?(?:-(cuda))?"
    rf"((?:-{WORD}=(?:{VERSION}|{WORD}))*)"
)
#: The largest length of a name.
LONGEST = 150

T = TypeVar("T")


def spelled(axis: str) -> str:
    """An axis as people write it: ``flash-attn`` for `Cell.flash_attention`."""
    return _SPELLED.get(axis, axis)


def axis_of(name: str) -> str:
    """The axis of `AXES`, or of the project's own, in any spelling."""
    name = OLD.get(name, name)
    return next((axis for axis, written in _SPELLED.items() if written == name), name)


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the matrix.

    Versions are as in the axes file: ``"5.23"`` is the newest patch of that minor release, which the pins name; ``"5.23.0"``
    is exactly that release. Without the axis, transformers and torch are empty. `extra` has the project's own axes and their
    values, sorted by axis.
    """

    python: str
    transformers: str = ""
    torch: str = ""
    flash_attention: str = "none"
    device: str = "cpu"
    extra: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, axes: Mapping[str, str]) -> Cell:
        """The cell with these values; names that aren't in `AXES` are the project's own axes."""
        extra = tuple(sorted((axis, value) for axis, value in axes.items() if axis not in AXES))
        return cls(**{axis: axes[axis] for axis in AXES}, extra=extra)

    @cached_property
    def axes(self) -> Mapping[str, str]:
        """The values of the axes that the cell has, by axis."""
        return {axis: value for axis in AXES if (value := getattr(self, axis))} | dict(self.extra)

    @cached_property
    def base(self) -> str:
        """The name of the base: the environment without transformers and the packages installed with it."""
        python, _, torch, kernel, *_ = self._parts
        return _joined(python, torch or "base", kernel.removesuffix("fatorch"))

    @cached_property
    def layer(self) -> str:
        """The name of the layer on top of the base: transformers, the own axes, and the packages installed with them."""
        python, transformers, *_, own = self._parts
        return _joined(python, _joined(transformers, own) or "layer")

    @cached_property
    def name(self) -> str:
        """``py311-tf5.23-torch2.15-fa4-cuda-peft=0.18``; without FlashAttention and on a CPU ``py311-tf5.23-torch2.15``."""
        return _joined(*self._parts)

    @property
    def own(self) -> str:
        """The project's own axes as in the name: ``backend=gloo-peft=0.18``; empty without any."""
        return _joined(*(f"{axis}={value}" for axis, value in self.extra))

    @property
    def _parts(self) -> tuple[str, str, str, str, str, str]:
        return (
            f"py{self.python.replace('.', '')}",
            self.transformers and f"tf{self.transformers}",
            self.torch and f"torch{self.torch}",
            {"none": "", "torch": "fatorch"}.get(self.flash_attention, self.flash_attention),
            "" if self.device == "cpu" else self.device,
            self.own,
        )

    def __str__(self) -> str:
        return self.name


def _joined(*parts: str) -> str:
    return "-".join(filter(None, parts))


def parse(name: str) -> Cell:
    """Parse the name of a cell; raises `MatrixError` if it isn't one."""
    if len(name) <= LONGEST and (match := re.fullmatch(NAME, name)):
        major, minor, transformers, torch, kernel, device, own = match.groups("")
        kernel = {"": "none", "fatorch": "torch"}.get(kernel, kernel)
        cell = Cell(f"{major}.{minor}", transformers, torch, kernel, device or "cpu", parse_own(own))
        if cell.name == name:  # else the own axes aren't in order, or one of them is there twice
            return cell
    raise MatrixError(f"{name[:200]!r} isn't the name of a cell, such as py311-tf5.23-torch2.15-fa4-cuda")


def parse_own(text: str) -> tuple[tuple[str, str], ...]:
    """The project's own axes in a cell's name, or in `Cell.own`."""
    return tuple(sorted(dict(_OWN.findall(text)).items()))


def values_of(cells: Collection[Cell]) -> dict[str, list[str]]:
    """The axes of cells, each with the values that occur."""
    axes = dict.fromkeys([*AXES, *(axis for cell in cells for axis in cell.axes)])
    return {axis: [*dict.fromkeys(cell.axes[axis] for cell in cells if axis in cell.axes)] for axis in axes}


def one_and_more(names: Sequence[str]) -> str:
    """The first name, with the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def shard(cells: Sequence[T], text: str) -> list[T]:
    """The part ``"3/8"`` of the cells: every eighth one, from the third on, so that all parts are alike."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise MatrixError(f"--shard takes a part such as 3/8, from 1/8 to 8/8, not {text!r}")
    return list(cells[int(match[1]) - 1 :: int(match[2])])

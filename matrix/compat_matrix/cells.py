"""A cell: one combination of Python, transformers, torch, FlashAttention and device, and its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .errors import MatrixError

#: The axes in the order of a cell's fields. The values of the first three are versions, those of the others words.
AXES = ("python", "transformers", "torch", "flash_attention", "device")
VERSIONED = AXES[:3]

FLASH_ATTENTION = ("none", "fa2", "fa3", "fa4", "torch")
DEVICES = ("cpu", "cuda")

_NAME = re.compile(
    r"py(?P<major>\d)(?P<minor>\d+)-tf(?P<transformers>\d+(?:\.\d+)*)-torch(?P<torch>\d+(?:\.\d+)*)"
    r"(?:-(?P<flash_attention>fa2|fa3|fa4|fatorch))?(?:-(?P<device>cuda))?",
    re.ASCII,
)

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the matrix.

    Attributes:
        python, transformers, torch: versions as in the axes file: ``"5.23"`` is the newest patch of that minor release, which
            the pins name; ``"5.23.0"`` is exactly that release.
        flash_attention: ``"none"``, ``"fa2"``, ``"fa3"``, ``"fa4"`` or ``"torch"``.
        device: ``"cpu"`` or ``"cuda"``.
    """

    python: str
    transformers: str
    torch: str
    flash_attention: str = "none"
    device: str = "cpu"

    @property
    def base(self) -> str:
        """The name of the base: the environment without transformers and the packages installed with it."""
        kernel = "" if self.flash_attention == "torch" else self._kernel
        return f"py{self.python.replace('.', '')}-torch{self.torch}{kernel}"

    @property
    def layer(self) -> str:
        """The name of the layer on top of the base: transformers and the packages installed with it."""
        return f"py{self.python.replace('.', '')}-tf{self.transformers}"

    @property
    def name(self) -> str:
        """``py311-tf5.23-torch2.15-fa4-cuda``; without FlashAttention and on a CPU ``py311-tf5.23-torch2.15``."""
        device = "" if self.device == "cpu" else f"-{self.device}"
        return f"{self.layer}-torch{self.torch}{self._kernel}{device}"

    @property
    def _kernel(self) -> str:
        return {"none": "", "torch": "-fatorch"}.get(self.flash_attention, f"-{self.flash_attention}")

    def __str__(self) -> str:
        return self.name


def parse(name: str) -> Cell:
    """Parse the name of a cell.

    Raises:
        MatrixError: it isn't the name of a cell.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise MatrixError(f"{name!r} isn't the name of a cell, such as py311-tf5.23-torch2.15-fa4-cuda")
    kernel = match["flash_attention"] or "none"
    return Cell(
        python=f"{match['major']}.{match['minor']}",
        transformers=match["transformers"],
        torch=match["torch"],
        flash_attention="torch" if kernel == "fatorch" else kernel,
        device=match["device"] or "cpu",
    )


def one_and_more(names: Sequence[str]) -> str:
    """The first name, with the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def many(count: int, noun: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shard(cells: Sequence[T], text: str) -> list[T]:
    """The part ``"3/8"`` of the cells: every eighth one, from the third on, so that all parts are alike.

    Raises:
        MatrixError: the part isn't of the form ``NUMBER/OF``, or is out of range.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise MatrixError(f"--shard takes a part such as 3/8, from 1/8 to 8/8, not {text!r}")
    return list(cells[int(match[1]) - 1 :: int(match[2])])

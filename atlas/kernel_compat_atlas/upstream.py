"""Names in other projects, from ``upstream.toml``: the seams that the library relies on, and the patches that it makes unnecessary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from itertools import islice

import tomli
from packaging.utils import canonicalize_name

from kernel_compat.patching.shim import Shim

_INSTALL = "kernel_compat.install()"


@dataclass(frozen=True)
class Replacement:
    """A call of kernel-compat that makes a patch unnecessary.

    Attributes:
        call: as a line of Python.
        gives: what the call does, and what the patch must be for where the name alone doesn't show it.
        patterns: of the names that are patched or called, as ``package.module.attribute``.
        called: whether these are functions that are patches themselves.
    """

    call: str
    gives: str
    patterns: tuple[str, ...] = ()
    called: bool = False


_table = tomli.loads((files(__package__) / "upstream.toml").read_text("utf-8"))
#: The attributes that the library relies on, by distribution.
SEAMS: Mapping[str, Sequence[str]] = _table["seams"]
#: Patterns of old names that transformers 5 serves though no source defines them, with their new ones.
SERVED: Mapping[str, str] = _table["served"]
#: The top-level packages of the distributions that projects use.
PACKAGES = ("transformers", "torch", "flash_attn")
#: The first that matches counts.
REPLACEMENTS = [Replacement(**{**one, "patterns": tuple(one["patterns"])}) for one in _table["replacements"]]


def distribution_of(target: str) -> str:
    """The distribution that installs the module of a seam or of a dotted name."""
    if re.match(r"flash_attn\.cute\b", target):
        return "flash-attn-4"
    return canonicalize_name(re.split("[.:]", target)[0])


def replacements(names: Iterable[str], shims: Sequence[Shim]) -> list[Replacement]:
    """What makes a patch unnecessary: the shims that replace the same attribute, and a public call.

    Args:
        names: the names of the patched attribute: as the project names it, and the place of its definition.
        shims: those of the releases that were read.
    """
    known = list(names)
    replacing = [shim.name for shim in shims if any(seam.target.replace(":", ".") in known for seam in shim.seams)]
    found = [Replacement(_INSTALL, f"replaces it itself: {', '.join(replacing)}")] if replacing else []
    matching = (one for one in REPLACEMENTS if any(fnmatchcase(n, p) for n in known for p in one.patterns))
    return [*found, *(one for one in islice(matching, 1) if not (found and one.call == _INSTALL))]

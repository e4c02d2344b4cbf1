"""The templates, and what they have in common."""

from __future__ import annotations

import shlex
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import tomli
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..axes import Axes
from ..cells import Cell
from ..store import Past
from ..views import common
from ..words import clean, plural
from . import ask
from .grid import entry
from .links import Links

#: The name in the header for a project that has none.
NAME = "kernel-compat-matrix"


def project_name(axes: Axes | None) -> str:
    """The name of the tested project, from its pyproject.toml."""
    if axes is None:
        return NAME
    try:
        name = tomli.loads(Path(axes.folder, "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, ValueError, LookupError, TypeError):  # the axes don't need it
        return NAME
    return name if isinstance(name, str) and name else NAME


def render(template: str, links: Links, project: str, **values: Any) -> str:
    """A page, or a part of one."""
    here = template.removesuffix(".html")
    return environment().get_template(template).render(links=links, project=project, here=here, **values)


@cache
def environment() -> Environment:
    """The templates, with their filters and global names."""
    made = Environment(
        loader=PackageLoader("compat_matrix", "pages/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_fit,
    )
    made.filters |= {one.__name__: one for one in (common.moment, common.duration, common.counted, plural)}
    made.filters["shell"] = shlex.join
    made.globals |= {"one_line": common.one_line, "kernel_name": common.kernel_name, "KERNELS": common.KERNELS}
    made.globals |= {"SIGNS": ask.STATES, "FIELDS": ask.FIELDS}
    made.globals |= {"HEADLINES": ask.HEADLINES, "CLOSENESS": ask.CLOSENESS}
    made.globals |= {"label_of": _label, "entry_of": lambda *past: entry(Past(*past))}
    return made


@lru_cache(10_000)
def _label(cell: Cell) -> str:
    """The axes of a cell that the title of its grid hasn't."""
    shared = ("python", "flash_attention", "device")
    return ", ".join(f"{axis} {value}" for axis, value in cell.axes.items() if axis not in shared)


def _fit(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value

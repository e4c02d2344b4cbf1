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
from ..words import plural
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
        project = tomli.loads(Path(axes.folder, "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError):
        return NAME
    name = project.get("name") if isinstance(project, dict) else None
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
    made.filters |= {
        "moment": common.moment,
        "duration": common.duration,
        "counted": common.counted,
        "dashed": lambda text: text.replace(" ", "-"),
        "plural": plural,
        "shell": shlex.join,
    }
    made.globals |= {
        "entry_of": lambda run, summary: entry(Past(run, summary)),
        "kernel_name": common.kernel_name,
        "label_of": _label,
        "one_line": common.one_line,
        "SIGNS": ask.STATES,
        "FIELDS": ask.FIELDS,
        "HEADLINES": ask.HEADLINES,
        "CLOSENESS": ask.CLOSENESS,
        "KERNELS": common.KERNELS,
    }
    return made


@lru_cache(10_000)
def _label(cell: Cell) -> str:
    """The axes of a cell that the title of its grid hasn't."""
    shared = ("python", "flash_attention", "device")
    return ", ".join(f"{axis} {value}" for axis, value in cell.axes.items() if axis not in shared)


def _fit(value: Any) -> Any:
    return common.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value

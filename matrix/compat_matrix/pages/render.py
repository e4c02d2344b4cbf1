"""The templates, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..axes import Axes
from ..cells import Cell
from ..results import Test
from ..views import common
from ..words import plural
from . import ask
from .filters import STATES
from .grid import Entry
from .links import Links

#: The name in the header for a project that has none.
NAME = "kernel-compat-matrix"

#: The classes of cells by their word, besides their state.
_LOOKS = {"excluded": " never", "never": " quiet"}
#: The axes that the title of a grid has.
_SHARED = ("python", "flash_attention", "device")


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
    }
    made.globals |= {
        "named": common.named,
        "kernel_name": common.kernel_name,
        "one_line": common.one_line,
        "rows": _rows,
        "cells_of": _cells,
        "SIGNS": STATES,
        "CLOSENESS": ask.CLOSENESS,
    }
    return made


def _rows(tests: Iterable[Test]) -> Markup:
    """The lines of a list, which may be thousands; a template takes five times as long."""
    lines = []
    for one in tests:
        said = f'<br><span class="note">{escape(common.one_line(one.message, 300))}</span>' if one.message else ""
        name = escape(common.clean(one.nodeid))
        lines.append(f'<li><code>{name}</code> <span class="note">{one.seconds:.2f} s</span>{said}</li>')
    return Markup("".join(lines))


def _cells(cells: Iterable[Cell | None], entries: Mapping[Cell, Entry], links: Links, run: str) -> Markup:
    """The cells of a row of the grid: a page may have thousands of these, too."""
    parts = []
    for cell in cells:
        if cell is None:
            parts.append("<td></td>")
            continue
        one = entries[cell]
        began = one.past.summary.started if one.past else None
        day = f" {began:%Y-%m-%d}" if began else ""
        activity = one.activity if one.activity != one.state else ""
        look = f"c {one.state.replace(' ', '-')}{_LOOKS.get(one.word, '')}"
        hint = escape(common.one_line(one.reason, 200) if one.reason else common.moment(began))
        word = escape(common.clean(one.word))
        said = f'<i aria-hidden="true">{STATES[one.state]}</i> {word}'
        said += f' <b class="{activity}">{STATES[activity]}</b>' if activity else ""
        said += f"<small>{day}</small>" if day else ""
        if address := links("cells", cell.name, run=run):
            own = (f"{axis} {value}" for axis, value in cell.axes.items() if axis not in _SHARED)
            label = common.clean(f"{one.word}{day}{', ' * bool(activity)}{activity}: {', '.join(own)}")
            said = f'<a class="{look}" href="{escape(address)}" aria-label="{escape(label)}" title="{hint}">{said}</a>'
        else:
            said = f'<span class="{look}" title="{hint}">{said}</span>'
        parts.append(f"<td>{said}</td>")
    return Markup("".join(parts))


def _fit(value: Any) -> Any:
    return common.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value

"""The templates, the addresses in them, and the files that they load."""

import re
import shlex
from collections.abc import Mapping
from functools import cache, lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from ..cells import Cell, spelled
from ..store import Past
from ..views import common
from ..words import clean, plural
from . import ask
from .grid import Entry, entry
from .shared import if_marked, marked

#: The name in the header for a project that has none.
NAME = "kernel-compat-matrix"

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Links:
    """The addresses of pages: those of a service, below the path of a proxy; or the files of a report, below the way to its folder.

    Args:
        report: the file of each address; None for a service.
    """

    def __init__(self, root: str = "", report: Mapping[str, str] | None = None) -> None:
        self.live = report is None  # a service answers, which updates pages and takes forms
        self.root, self._report = root.rstrip("/") if self.live else root, report or {}

    def __call__(self, /, *path: str, **query: object) -> str:
        """The address of a page by the parts of its path and its query without empty values; empty if a report lacks it."""
        given = {name: value for name, value in query.items() if value}
        address = "/" + "/".join(map(_quoted, path)) + (f"?{urlencode(given)}" if given else "")
        if self.live:
            return self.root + address
        return self.root + self._report[address] if address in self._report else ""

    def static(self, name: str) -> str:
        """A file of the templates. The address changes with its content, so that clients may keep it forever."""
        if not self.live:
            return self.root + name
        return f"{self.root}/static/{name}?v={sha256(static_files()[name][0]).hexdigest()[:12]}"


@lru_cache(10_000)  # a grid has a link for each cell
def _quoted(part: str) -> str:
    return quote(part, safe="")


def file_name(begin: str, name: str) -> str:
    """The name of a file; whatever a store of unknown origin has in a name, it stays in the folder."""
    return begin + re.sub(r"[^\w.+=-]", "_", name, flags=re.ASCII) + ".html"


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """The files that templates load, and their types, by name."""
    return {
        file.name: (file.read_bytes(), _TYPES[kind])
        for file in files("compat_matrix").joinpath("pages/static").iterdir()
        if (kind := file.name.rpartition(".")[2]) in _TYPES
    }


def render(name: str, links: Links, project: str, *, live: bool = False, **values: Any) -> str:
    """A page, or a part of one; with `live` only the part that changes while somebody looks at it, if there is one."""
    template = environment().select_template([f"{name}_live.html"] * live + [f"{name}.html"])
    return template.render(links=links, project=project, here=name, **values)


@cache
def environment() -> Environment:
    """The templates, with their filters and global names."""
    made = Environment(
        loader=PackageLoader("compat_matrix", "pages/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    made.filters |= {
        one.__name__: one for one in (common.moment, common.duration, common.counted, plural, code, broken)
    }
    made.filters |= {"shell": shlex.join, "shared": _shared, "if_shared": if_marked}
    made.globals |= {
        "one_line": common.one_line,
        "kernel_name": common.kernel_name,
        "KERNELS": common.KERNELS,
        "DEVICES": common.DEVICES,
    }
    made.globals |= {"SIGNS": common.SIGNS, "spelled": spelled}
    made.globals |= {"HEADLINES": ask.HEADLINES, "CLOSENESS": ask.CLOSENESS}
    made.globals |= {"grid_cell": _grid_cell, "entry_of": lambda *past: entry(Past(*past))}
    return made


def code(text: str) -> Markup:
    """A text as HTML, in which what stands between backticks is code."""
    return Markup(re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", str(escape(clean(text)))))


def broken(name: str) -> Markup:
    """A qualified name as HTML that a narrow page breaks between its words."""
    return Markup(re.sub(r"(?<=[.:_])(?=[^.:_])|(?<=[a-z])(?=[A-Z])", "<wbr>", str(escape(clean(name)))))


@pass_context
def _shared(context: Context, piece: str, wanted: bool = True) -> str:
    """A piece of a page that others may repeat; a report keeps it once, if that is wanted."""
    return marked(piece) if wanted and not context["links"].live else piece


def _grid_cell(address: str, cell: Cell, entry: Entry, usual: str) -> Markup:
    """A cell of the grid: a link to its page, with the axes that the title of the grid hasn't, and the day if it isn't the usual one.

    A page has hundreds. As a macro of the templates they took a fifth of the time for the first page.
    """
    began = entry.past.summary.started if entry.past else None
    day = f" {began:%Y-%m-%d}" if began and f"{began:%Y-%m-%d}" != usual else ""
    also = entry.running and entry.state != "running"
    look = entry.state.replace(" ", "-") + {"excluded": " never", "never": " quiet"}.get(entry.word, "")
    hint = escape(common.one_line(entry.reason, 200) if entry.reason else common.moment(began))
    word = escape(clean(entry.word))
    tag, about = "span", ""
    if address:
        tag = "a"
        label = f"{word}{day}{', running' if also else ''}: {_label(cell)}"
        about = f' href="{escape(address)}" aria-label="{label}"'
    running = f' <b class="running">{common.SIGNS["running"]}</b>' if also else ""
    small = f"<small>{day}</small>" if day else ""
    sign = f'<i aria-hidden="true">{common.SIGNS[entry.state]}</i>'
    return Markup(f'<{tag} class="c {look}"{about} title="{hint}">{sign} {word}{running}{small}</{tag}>')


@lru_cache(10_000)
def _label(cell: Cell) -> Markup:
    """The axes of a cell that the title of its grid hasn't."""
    shared = ("python", "flash_attention", "device")
    return escape(clean(", ".join(f"{axis} {value}" for axis, value in cell.axes.items() if axis not in shared)))

"""``kernel-compat-matrix report``: write the pages as files, which need neither a server nor a network."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..axes import Axes, axes_in, load
from ..cells import WORDS, Cell, values_of
from ..errors import MatrixError
from ..store import Past, Store
from ..views import architectures, common
from ..views.ranges import ranges
from ..views.rules import Rules
from ..views.verdicts import PACKAGE, Judge, Known
from . import ask, grid, runs, seams
from . import cell as cell_page
from .render import NAME, Links, file_name, render, static_files
from .shared import Shared

#: The file that marks a folder as a report and lists its files.
MANIFEST = ".kernel-compat-matrix-report"

#: The script with what several pages repeat, and the licence of the library that draws plots.
_LINES, _LICENCE = "lines.js", "uPlot-LICENSE.txt"


class _Page(NamedTuple):
    """A page that a service shows at these addresses, and a report has as a file."""

    file: str
    template: str
    addresses: list[str]
    values: Callable[[], Mapping[str, Any]]


def run(arguments: argparse.Namespace) -> int:
    """Write the site and print the path of its first page; returns the exit code."""
    axes = None
    with suppress(*([] if arguments.axes else [MatrixError])):  # a report needs no axes file
        if path := arguments.axes or axes_in(Path()):
            axes = load(path)
    with Store.open(arguments.store, create=False) as store:
        if axes and not arguments.axes and store.project not in ("", axes.project_name):
            axes = None  # this folder is another project's
        names = arguments.runs and [store.resolve(name) for name in arguments.runs]
        write(store, arguments.folder, names, axes)
    print(Path(arguments.folder, "index.html"))
    return 0


def write(store: Store, folder: Path, runs: Sequence[str] | None = None, axes: Axes | None = None) -> None:
    """Write the report of all runs, or of the given ones. If that fails, an older report stays as it was.

    Args:
        axes: the rules by which it answers, and the project's name.

    Raises:
        MatrixError: `folder` contains anything other than a report, or can't be written.
    """
    folder = folder.resolve()
    try:
        _refuse_others(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            made, old, names = Path(beside, "new"), Path(beside, "old"), [MANIFEST, _LINES]
            shared = Shared()
            for name, text in _Report(store, runs, axes).files():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
                names.append(name)
                shared.add(text)
            for path in made.rglob("*.html"):
                path.write_text(shared.replaced(path.read_text(encoding="utf-8")), encoding="utf-8")
            code = static_files()[_LINES][0].decode()
            (made / _LINES).write_text(shared.script(code), encoding="utf-8")
            (made / MANIFEST).write_text("\n".join(names) + "\n", encoding="utf-8")
            if folder.exists():
                folder.rename(old)
            try:
                made.rename(folder)
            except OSError:
                if old.exists():
                    old.rename(folder)
                raise
    except OSError as error:
        raise MatrixError(f"the report {folder} can't be written: {error.strerror or error}") from error


def _refuse_others(folder: Path) -> None:
    """Refuse a path at the first thing in it that isn't of a report: a walk of ``/usr`` takes a minute."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise MatrixError(f"{folder} isn't a folder")
    manifest = folder / MANIFEST
    if manifest.is_file():
        listed = {*manifest.read_text(encoding="utf-8", errors="replace").split("\n")}
        files = (os.path.relpath(Path(at, name), folder) for at, _, names in os.walk(folder) for name in names)
        other = next((name for name in files if name not in listed), None)
    else:
        other = next((path.name for path in folder.iterdir()), None)
    if other is not None:
        raise MatrixError(
            f"{folder} contains files that aren't part of a report, such as {other}: choose a folder of its own for the report"
        )


class _Report:
    """The pages of a service, as files."""

    def __init__(self, store: Store, names: Sequence[str] | None, axes: Axes | None) -> None:
        self.store, self.newest, self.address = store, sorted(store.newest(names)), Links()
        self.axes, self.judge = axes, Judge(store, Rules.of(axes) if axes else None, self.newest)
        every = runs.newest_first(store.runs())
        self.runs = [one for one in every if (not one.partial if names is None else one.whole in names)]
        self.entries = grid.newest(self.newest, axes.all_cells if axes and names is None else {})
        self.own, self.grids = ask.own_axes(self.entries), dict[str, grid.Facet]()

    def files(self) -> Iterator[tuple[str, str]]:
        """The name and the content of each file."""
        project = (self.axes and self.axes.project_name) or self.store.project or NAME
        pages = [*self._grids(), *self._others()]
        at = {address: page.file for page in pages for address in page.addresses}
        for name, (content, _) in static_files().items():
            if not name.startswith("htmx") and name != _LINES:  # the one is for a service alone, the other for a report
                yield name, content.decode()
        yield _LICENCE, (files("compat_matrix") / "pages/static" / _LICENCE).read_text(encoding="utf-8")
        yield "answers.js", answers(self.judge, Links("", at), self.grids)
        for page in pages:
            links = Links("../" * page.file.count("/"), at)
            yield page.file, render(page.template, links, project, **page.values())

    def _grids(self) -> Iterable[_Page]:
        """The grid of each facet, found by following the tabs from the first page on."""
        todo: list[Mapping[str, str]] = [ask.read([], self.own)]
        every = grid.counted(self.entries)
        default, _ = grid.choose(todo[0], every)
        pages: dict[str, _Page] = {}
        seen = set()
        for filters in todo:
            address = self.address(**filters)
            chosen, tabs = grid.choose(filters, every)
            if address in seen or len(chosen) > 1:
                continue
            seen.add(address)
            file = "index.html" if chosen == default else file_name("grid-", "-".join(*chosen))
            pages.setdefault(file, _Page(file, "home", [], partial(self._home, filters)))
            pages[file].addresses.append(address)
            self.grids.update((file, one) for one in chosen)
            todo += [tab.filters for some in tabs.values() for tab in some]
        return pages.values()

    def _home(self, filters: Mapping[str, str]) -> dict[str, Any]:
        newest = next((one for one in self.runs if one.state != "interrupted"), None)
        fixed = {"fields": ask.fields(self.own), "answer": None, "run": None, "active": False}
        return grid.home(filters, {}, self.entries) | {"last": runs.row_of(newest, self.runs), **fixed}

    def _others(self) -> Iterator[_Page]:
        store, address = self.store, self.address
        listed = runs.batches(store, runs.by_commit(self.runs))
        values: Callable[[], Mapping[str, Any]] = partial(dict, batches=listed, more=False, before="")
        yield _Page("runs.html", "runs", [address("runs")], values)
        for run in self.runs:
            values = partial(runs.of_one, store, run)
            yield _Page(file_name("runs/", run.id), "run", [address("runs", run.id)], values)
        two = runs.last_two(store, self.runs)
        own = [address("diff", new=two[1].id)] if two else []
        yield _Page("diff.html", "diff", [address("diff"), *own], partial(runs.changes, store, two))
        for number, (name, shown) in enumerate(seams.values(store).items()):
            if name:
                file = file_name("seams-", name) if number else "seams.html"
                addresses = [address("seams", distribution=name), *([] if number else [address("seams")])]
                yield _Page(file, "seams", addresses, partial(dict, shown))
        yield _Page("types.html", "types", [address("types")], architectures.values)
        # By time: what later results share comes after what earlier ones do, whose pages stay as they are.
        ended = ((past.summary.started, past) for past in self.newest if past.summary.started)
        for _, past in sorted(ended):
            name, parts = past.cell.name, [one.id for one in self.runs if one.whole == past.run.whole]
            addresses = [address("cells", name, run=one) for one in ("", *parts)]
            addresses.append(address("cells", name, run=past.run.id, attempt=past.summary.attempt))
            yield _Page(file_name("cells/", name), "cell", addresses, partial(self._cell, past))

    def _cell(self, past: Past) -> dict[str, Any]:
        history = [one for one in self.store.history(past.cell) if one.run in self.runs]
        return cell_page.values(self.store, past.cell, past, history)


def answers(judge: Judge, links: Links, grids: Mapping[str, grid.Facet] = {}) -> str:
    """A script with what the judge knows, in which `ask.js` finds the answer to a question, and with the facet of each grid by its file."""
    store, rules = judge.store, judge.rules
    ended = [one for one in judge.known if one.ended]
    exact = [one.exact for one in ended]
    earlier = map(Known.of, store.in_each_environment(one.past.cell for one in ended))
    other = [one for one in earlier if one.exact not in exact and links("runs", one.past.run.id)]
    other.sort(key=lambda one: (one.past.cell, str(one.past.summary.started)))
    known, other = ([judge.packaged(one) for one in some] for some in (judge.known, other))
    packages = sorted({one.axes[PACKAGE] for one in known if PACKAGE in one.axes})
    data = {
        "cells": [_known(one, store, links) for one in known],
        "earlier": [_known(one, store, links) for one in other],
        "rules": [{"clause": one.clause, "because": one.because} for one in rules.rules],
        "all": [*_boxes(rules.cells)],
        "torchs_own": rules.torchs_own,
        "values": {**rules.values, PACKAGE: packages} if rules.values else {},
        "words": WORDS,
        "order": judge.axes,
        "headlines": ask.HEADLINES,
        "closeness": ask.CLOSENESS,
        "devices": common.DEVICES,
        "kernels": common.KERNELS,
        "signs": common.SIGNS,
        "grids": [
            {"file": file, "name": f"{common.kernel_name(kernel, device)}, Python {python}"}
            | {"axes": {"flash_attention": kernel, "device": device, "python": python}}
            for file, (kernel, device, python) in grids.items()
        ],
    }
    return f"const MATRIX = {json.dumps(data, separators=(',', ':'))};\n".replace("<", "\\u003c")


def _boxes(cells: Mapping[Cell, str]) -> Iterator[Mapping[str, object]]:
    """The cells as boxes, each with the values of its axes and the reason if they are excluded."""
    kinds: dict[common.Kind, dict[Cell, str]] = {}
    for cell, because in cells.items():
        kinds.setdefault(common.kind(cell), {})[cell] = because
    for some in kinds.values():
        for one in ranges(some):
            axes = {axis: values for axis, values in values_of(one.cells).items() if values}
            yield {"axes": axes, "because": one.has}


def _known(one: Known, store: Store, links: Links) -> Mapping[str, object]:
    """A cell in the script, with its evidence as HTML if its tests ran."""
    summary = one.past.summary
    found = {"cell": one.axes, "verdict": one.verdict, "kind": summary.kind, "reason": common.one_line(one.reason, 400)}
    if not one.ended:
        return found
    began = summary.started and summary.started.isoformat()
    html = render("evidence", links, "", one=one.tested().detailed(store)).strip()
    return found | {"began": began, "exact": one.exact, "html": html}

"""``kernel-compat-matrix report``: write the pages as files, which need neither a server nor a network."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ..axes import axes_in, load
from ..errors import MatrixError
from ..store import Newest, Store
from ..views import architectures, common
from ..views.verdicts import ORDER, Tested, in_order
from . import ask, grid, runs, seams
from . import cell as cell_page
from .links import Links, file_name, static_files
from .render import NAME, project_name, render

#: The file that marks a folder as a report and lists its files.
MANIFEST = ".kernel-compat-matrix-report"

#: The files of the templates that only a service needs.
_OF_SERVICE = ("htmx-4.0.1.min.js",)


def run(arguments: argparse.Namespace) -> int:
    """Write the site and print the path of its first page; returns the exit code."""
    project = project_name(load(arguments.axes)) if arguments.axes else _project_here()
    with common.open_store(arguments.store) as store:
        names = arguments.runs and [store.resolve(name) for name in arguments.runs]
        write(store, arguments.folder, names, project)
    print(Path(arguments.folder, "index.html"))
    return 0


def _project_here() -> str:
    """The name of the project whose axes file is in this folder, if there is one that can be read."""
    with suppress(MatrixError):
        return project_name(load(path)) if (path := axes_in(Path())) else NAME
    return NAME


def write(store: Store, folder: Path, runs: Sequence[str] | None = None, project: str = NAME) -> None:
    """Write the report of all runs, or of the given ones. If that fails, an older report stays as it was.

    Raises:
        MatrixError: `folder` contains anything other than a report, or can't be written.
    """
    folder = folder.resolve()
    _refuse_others(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            made, old, names = Path(beside, "new"), Path(beside, "old"), [MANIFEST]
            for name, text in _Report(store, runs, project).files():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
                names.append(name)
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
    if not folder.exists():
        return
    if not folder.is_dir():
        raise MatrixError(f"{folder} isn't a folder")
    there = {os.path.relpath(Path(at, name), folder) for at, _, names in os.walk(folder) for name in names}
    listed = (folder / MANIFEST).read_text(encoding="utf-8").split("\n") if MANIFEST in there else []
    if others := sorted(there.difference(listed)):
        raise MatrixError(
            f"{folder} contains files that aren't part of a report, such as {others[0]}: choose a folder of its own for the report"
        )


class _Report:
    """The pages of a service, as files. `at` has the file of each address that has one."""

    def __init__(self, store: Store, names: Sequence[str] | None, project: str) -> None:
        self.store, self.project, self.address = store, project, Links()
        self.newest = sorted(store.newest(names))
        self.runs = [one for one in store.runs() if (not one.partial if names is None else one.whole in names)]
        self.compared = runs.last_two(store, self.runs)
        self.seams = seams.values(store)
        self.entries = {one.cell: grid.entry(one.past) for one in self.newest}
        self.ended = [one for one in self.newest if one.past.summary.verdict is not None]
        self.own = ask.own_axes(self.entries)
        self.grids, self.at = self._grids()
        self.at |= self._addresses()

    def _grids(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """The filters of each grid by its file, and the files by the addresses that lead to one."""
        every = ask.read([], self.own)
        facets = {grid.facet(cell) for cell, one in self.entries.items() if one.word != "excluded"}
        default = grid.choose(every, self.entries)[0]
        files = {one: "index.html" if default == {one} else file_name("grid-", "-".join(one)) for one in facets}
        grids, at = {"index.html": every}, {self.address(): "index.html"}
        for one, name in files.items():
            only = every | dict(zip(("flash_attention", "device", "python"), one, strict=True))
            grids.setdefault(name, only)
            at[self.address(**only)] = name
        for shown in grids.values():
            for tab in (tab for some in grid.choose(shown, self.entries)[1].values() for tab in some):
                if (address := self.address(**tab.filters)) not in at:
                    chosen = [*grid.choose(tab.filters, self.entries)[0]]
                    if len(chosen) == 1:
                        at[address] = files[chosen[0]]
        return grids, at

    def _addresses(self) -> Iterator[tuple[str, str]]:
        for page in ("runs", "diff", "types"):
            yield self.address(page), f"{page}.html"
        for one in self.runs:
            yield self.address("runs", one.id), file_name("runs/", one.id)
        old, new = self.compared
        if old and new:
            yield self.address("runs", f"{old.id}...{new.id}"), "diff.html"
        for number, name in enumerate(filter(None, self.seams)):
            file = file_name("seams-", name) if number else "seams.html"
            yield self.address("seams", distribution=name), file
            if not number:
                yield self.address("seams"), file
        for cell, past, _ in self.ended:
            file = file_name("cells/", cell.name)
            yield self.address("cells", cell.name), file
            yield self.address("cells", cell.name, run=past.run.id, attempt=past.summary.attempt), file
            for part in (part for part in self.runs if part.whole == past.run.whole):
                yield self.address("cells", cell.name, run=part.id), file

    def files(self) -> Iterator[tuple[str, str]]:
        """The name and the content of each file."""
        for name, (content, _) in static_files().items():
            if name not in _OF_SERVICE:
                yield name, content.decode()
        yield "answers.js", answers(self.newest, Links("", self.at))
        newest = self.runs[0] if self.runs else None
        home = {"newest": newest, "before": newest and runs.before(newest, self.runs), "fields": ask.fields(self.own)}
        for name, chosen in self.grids.items():
            shown = grid.home(chosen, {}, self.entries)
            yield self._page(name, "home.html", {**home, **shown, "answer": None, "run": None, "active": False})
        totals = self.store.totals(one.id for one in self.runs)
        yield self._page("runs.html", "runs.html", {"runs": self.runs, "totals": totals, "more": False, "before": ""})
        for number, one in enumerate(self.runs):
            shown = runs.of_one(one, self.store.summary(one.id), self.runs[number + 1 :])
            yield self._page(file_name("runs/", one.id), "run.html", {**shown, "leased": (), "can": ""})
        yield self._page("diff.html", "diff.html", runs.changes(self.store, *self.compared))
        for name, shown in self.seams.items():
            if name:
                yield self._page(self.at[self.address("seams", distribution=name)], "seams.html", shown)
        yield self._page("types.html", "types.html", architectures.values())
        for found in self.ended:
            yield self._page(file_name("cells/", found.cell.name), "cell.html", self._cell(found))

    def _page(self, name: str, template: str, values: Mapping[str, object]) -> tuple[str, str]:
        links = Links("../" * name.count("/"), self.at)
        return name, render(template, links, self.project, **values)

    def _cell(self, found: Newest) -> dict[str, object]:
        past, cell = found.past, found.cell
        result = self.store.result(past.run.id, cell, past.summary.attempt, log=False)
        history = [one for one in self.store.history(cell) if one.run in self.runs]
        return cell_page.values(self.store, cell, result, past, history)


def answers(newest: Sequence[Newest], links: Links) -> str:
    """A script with the newest result of every cell, in which `ask.js` finds the answer to a question."""
    data = {
        "cells": [_tested(Tested.newest(one), links) for one in sorted(newest)],
        "order": in_order([*ORDER, *ask.own_axes(one.cell for one in newest)]),
        "headlines": ask.HEADLINES,
        "closeness": ask.CLOSENESS,
        "signs": ask.STATES,
    }
    return f"const MATRIX = {json.dumps(data)};\n".replace("<", "\\u003c")


def _tested(one: Tested, links: Links) -> Mapping[str, object]:
    """A cell in the script, with its evidence as HTML if its tests ran."""
    found = {
        "cell": one.cell.axes,
        "verdict": one.verdict,
        "kind": one.kind,
        "reason": common.one_line(one.reason, 400),
    }
    if not one.ended:
        return found
    return found | {
        "began": one.started and one.started.isoformat(),
        "exact": {axis: one[axis] for axis in (*ORDER, *one.extra)},
        "html": render("evidence.html", links, "", one=one),
    }

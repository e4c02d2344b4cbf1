"""``kernel-compat-matrix report``: write the pages as files, which need neither a server nor a network."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

from ..axes import load
from ..cells import Cell
from ..errors import MatrixError
from ..options import AXES
from ..store import Newest, Run, Store
from ..views import architectures, common
from ..views.compatibility import add_run_argument
from ..views.verdicts import Wanted, judge
from ..views.verdicts import newest as newest_of
from . import ask, runs, seams
from . import cell as cell_page
from .filters import Filters
from .grid import Entry, choose, facet, grid, of_all, tallies
from .links import Files, Links, file_name, static_files
from .render import NAME, project_name, render

#: The file that marks a folder as a report and lists its files.
MANIFEST = ".kernel-compat-matrix-report"

#: The files of the templates that only a service needs.
_OF_SERVICE = ("htmx-4.0.1.min.js",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to write: a new one, or an older report's")
    parser.add_argument(
        "--axes", type=Path, metavar="FILE", help=f"the axes file of the project whose name the pages have ({AXES})"
    )
    add_run_argument(parser)


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
    for path in (AXES, Path("axes.toml")):
        with suppress(MatrixError):
            if path.exists():
                return project_name(load(path))
    return NAME


def write(store: Store, folder: Path, runs: Sequence[str] | None = None, project: str = NAME) -> None:
    """Write the report of all runs, or of the given ones. If that fails, an older report stays as it was.

    Raises:
        MatrixError: `folder` contains anything other than a report, or can't be written.
    """
    folder = folder.resolve()
    _refuse_others(folder)
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    old = made.with_name(f"{made.name}.old")
    try:
        for name in ("cells", "runs"):
            (made / name).mkdir(parents=True)
        names = [MANIFEST]
        for name, text in _pages(store, runs, project):
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
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


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


def _pages(store: Store, names: Sequence[str] | None, project: str) -> Iterator[tuple[str, str]]:
    newest = newest_of(store, names)
    known = [one for one in store.runs() if (not one.partial if names is None else one.whole in names)]
    compared = runs.last_two(store, known)
    atlas = seams.stored(store)
    distributions = [one.distribution for one in atlas.timelines] if atlas else []
    entries = of_all({one.cell: one.past for one in newest})
    grids = _grids(entries)
    results = {
        one.cell: (one.past.run.id, one.past.summary.attempt) for one in newest if one.past.summary.verdict is not None
    }

    def links(up: str = "") -> Files:
        return Files(
            up, grids, results, {one.id: one.whole for one in known}, [one.id for one in compared if one], distributions
        )

    for name, (content, _) in static_files().items():
        if name not in _OF_SERVICE:
            yield name, content.decode()
    yield "answers.js", _answers(store, newest, links())
    for filters in {name: filters for filters, name in reversed(grids.items())}.values():
        yield grids[filters], render("home.html", links(), project, **_home(filters, entries, known))
    yield (
        "runs.html",
        render(
            "runs.html",
            links(),
            project,
            runs=known,
            totals=store.totals(one.id for one in known),
            more=False,
            before="",
        ),
    )
    for one in known:
        values = runs.of_one(one, store.summary(one.id))
        values |= {"before": runs.before(one, known[known.index(one) + 1 :]), "leased": [], "as_grid": "", "part": ""}
        yield file_name("runs/", one.id), render("run.html", links("../"), project, **values)
    yield "diff.html", render("diff.html", links(), project, **runs.changes(store, *compared))
    for name in distributions:
        page = Path(links().seams(name)).name
        yield page, render("seams.html", links(), project, **seams.values(atlas, name))
    yield "types.html", render("types.html", links(), project, **architectures.values())
    for cell, (run_name, attempt) in results.items():
        yield file_name("cells/", cell.name), _cell(store, cell, run_name, attempt, known, links("../"), project)


def _grids(entries: Mapping[Cell, Entry]) -> dict[Filters, str]:
    """The file of each facet, by the filters that lead to it."""
    known = {one: tally for one, tally in tallies(entries).items() if tally.there}
    default = choose(Filters(), known).facets
    found = {Filters(): "index.html"}
    for kernel, device, python in known:
        one = (kernel, device, python)
        name = "index.html" if [one] == default else file_name("grid-", "-".join(one))
        filters = Filters(flash_attention=kernel, device=device)
        found[filters.but(python=python)] = name
        if choose(filters, known).facets == [one]:
            found[filters] = name
        if default and one[:2] == default[0][:2]:
            found[Filters(python=python)] = name
    return found


def _home(filters: Filters, entries: Mapping[Cell, Entry], known: Sequence[Run]) -> dict[str, object]:
    choice = choose(filters, tallies(entries))
    own = {cell: one for cell, one in entries.items() if facet(cell) in choice.facets}
    return {
        "filters": filters,
        "question": ask.question(Filters()),
        "answer": None,
        "grid": grid(filters, choice, own),
        "yours": ("", ""),
        "run": None,
        "newest": known[0] if known else None,
        "before": runs.before(known[0], known[1:]) if known else None,
        "active": False,
        "part": "",
    }


def _answers(store: Store, newest: Sequence[Newest], links: Links) -> str:
    """A script with the answer for every combination of minor releases, which `ask.js` looks up."""
    values = {
        axis: common.by_version({ask.minor(version) for one in newest if (version := getattr(one.cell, axis))})
        for axis in ("transformers", "torch", "python")
    }
    kernels = sorted(
        {one.cell.flash_attention for one in newest}, key=lambda kernel: common.kernel_place((kernel, "", ()))
    )
    answers = {}
    for key in product(
        values["transformers"] or [""], values["torch"] or [""], ["", *kernels], ["", *values["python"]]
    ):
        transformers, torch, kernel, python = key
        wanted = Wanted(*(value or None for value in (python, transformers, torch, kernel)))
        judged = judge(store, wanted, newest)
        if judged.found or judged.near or judged.refusals:
            shown = ask.shown(wanted, judged, most=2)
            answers["|".join(key)] = render("answer.html", links, "", answer=shown)
    data = {"values": {**values, "flash_attention": kernels}, "answers": answers, "closeness": ask.CLOSENESS}
    return f"const MATRIX = {json.dumps(data, sort_keys=True)};\n"


def _cell(
    store: Store, cell: Cell, run_name: str, attempt: int, known: Sequence[Run], links: Links, project: str
) -> str:
    found = store.result(run_name, cell, attempt, log=False)
    every = [one for one in store.history(cell) if one.run in known]
    past = next(one for one in every if (one.run.id, one.summary.attempt) == (run_name, attempt))
    values = cell_page.values(store, cell, found, past, every[: cell_page.HISTORY])
    older = max(0, len(every) - cell_page.HISTORY)
    kernel, device, python = facet(cell)
    facets = links.home(Filters(flash_attention=kernel, device=device, python=python))
    return render("cell.html", links, project, **values, activity="", older=older, in_matrix=facets)

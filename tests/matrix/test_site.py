"""The published site: the report in it, of the results in docs/compatibility.sqlite.xz, as the session `site` of nox and the workflow make it."""

from __future__ import annotations

import dataclasses
import html
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote

import pytest
import requests
from report_site import Page, pages_of, shown
from served import served
from stored import START, cells, passed, stored
from waiting import LONG

from compat_matrix.axes import load
from compat_matrix.cells import Cell
from compat_matrix.pages import cell as cell_page
from compat_matrix.pages import report
from compat_matrix.pages.render import Links, render
from compat_matrix.results import Test
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store
from kernel_compat.proofs import table

ROOT = Path(__file__).parents[2]

#: The most bytes of all its files.
MOST = 5_000_000


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "results.sqlite"
    path.write_bytes(lzma.decompress((ROOT / "docs" / "compatibility.sqlite.xz").read_bytes()))
    return path


def made(results: Path, folder: Path, seed: str = "0") -> Path:
    command = [sys.executable, "-m", "compat_matrix", "report", "--store", str(results), str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(results, tmp_path_factory.mktemp("published") / "site")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return pages_of(site)


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_it_is_small(site: Path) -> None:
    assert sum(path.stat().st_size for path in files_of(site)) <= MOST


def test_the_same_results_make_the_same_bytes(results: Path, site: Path, tmp_path: Path) -> None:
    again = made(results, tmp_path / "again", seed="1")
    first, second = ({path.relative_to(one): path.read_bytes() for path in files_of(one)} for one in (site, again))
    assert first == second


def _html(data: object) -> Iterator[str]:
    """The HTML in JSON."""
    if isinstance(data, dict):
        if "html" in data:
            yield data["html"]
        data = [*data.values()]
    for one in data if isinstance(data, list) else []:
        yield from _html(one)


def test_every_link_leads_to_a_place_in_it_and_nothing_is_loaded_from_elsewhere(
    site: Path, pages: dict[Path, Page]
) -> None:
    answers = site / "answers.js"
    script = answers.read_text(encoding="utf-8").removeprefix("const MATRIX = ").rstrip(";\n")
    linked = set()
    for path, page in [*pages.items(), (answers, Page("".join(_html(json.loads(script)))))]:
        for link in page.links:
            file, _, fragment = link.partition("#")
            target = (path.parent / unquote(file)).resolve() if file else path
            assert target.is_relative_to(site), f"{path}: {link}"
            assert target.is_file(), f"{path}: {link}"
            assert not fragment or fragment in pages[target].ids, f"{path}: {link}"
            linked.add(target)
    assert {*files_of(site)} - linked == {site / report.MANIFEST, site / "uPlot-LICENSE.txt"}
    for path in files_of(site):
        if path.suffix in (".css", ".svg"):
            assert not re.search(r"@import|url\(|href=", path.read_text(encoding="utf-8")), path


def test_every_page_has_a_strict_policy_and_no_script_of_its_own(pages: dict[Path, Page]) -> None:
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'self' file:; base-uri 'none'; form-action 'none'\">"
    for path, page in pages.items():
        assert policy in path.read_text(encoding="utf-8")
        assert "in the page" not in page.scripts
        assert not {"style", "iframe", "object", "embed"} & {*page.tags}


def _text(page: str) -> str:
    """What a page says between its tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", page.replace("<wbr>", "")).split())


def test_a_cell_says_what_the_page_of_a_service_says(results: Path, site: Path) -> None:
    with Store.open(str(results), create=False) as store:
        for past in [one for one in store.newest() if one.summary.verdict][::100]:
            history = store.history(past.cell, limit=cell_page.HISTORY + 1)
            values = cell_page.values(store, past.cell, past, history)
            of_service = render("cell", Links(), "kernel-compat", **values)
            of_site = re.sub(r"<noscript>.*?</noscript>", "", shown(site, f"cells/{past.cell}.html"))
            theirs, own = (_text(page.partition("</header>")[2]) for page in (of_service, of_site))
            assert own == theirs
            assert " Pins The requirement files " in own


def _shown_cells(page: str) -> list[str]:
    """What a first page says of cells: the ranges, the numbers of each state, the grid and the reasons."""
    parts = r'<section class="line.*?</section>|<p class="counts.*?</p>|<table.*?</table>'
    return [*map(_text, re.findall(parts, page, re.DOTALL))]


def test_the_grids_are_those_of_a_service(results: Path, site: Path) -> None:
    """Also of cells that were never run, or are excluded: it starts from the cells of the axes."""
    axes = load(ROOT / "matrix" / "axes.toml")
    every = {
        (cell.flash_attention, cell.device, cell.python) for cell, excluded in axes.all_cells.items() if not excluded
    }
    with Store.open(str(results), create=False) as store, served(create_app(store, axes, Settings())) as address:
        for kernel, device, python in every:
            query = {"flash-attn": kernel, "device": device, "python": python}
            of_service = requests.get(address, query, timeout=LONG).text
            name = f"grid-{kernel}-{device}-{python}.html"
            of_site = shown(site, name if (site / name).exists() else "index.html")
            assert _shown_cells(of_site) == _shown_cells(of_service), query


def test_it_has_the_atlas_the_architectures_and_the_figures_of_each_cell(results: Path, site: Path) -> None:
    read = _text((site / "seams.html").read_text(encoding="utf-8")).partition("What is read")[2]
    names = re.findall(
        r"^\| `\w+` \| `(\S+)` \|(?: `(\w+)`)? \|", (ROOT / "docs" / "names.md").read_text(), re.MULTILINE
    )
    assert len(names) > 90
    for target, name in names:
        assert f" transformers.{target} {name}{' ' * bool(name)}" in read
    types = (site / "types.html").read_text(encoding="utf-8").replace("<wbr>", "")
    every = [name for release in table.releases() for name in table.known(release)]
    assert len({*every}) > 300
    for name in {*every}:
        assert f'<th scope="row">{name}</th>' in types
    with Store.open(str(results), create=False) as store:
        ran = [one.cell for one in store.newest() if one.summary.verdict]
        assert {path.name for path in (site / "cells").iterdir()} == {f"{cell}.html" for cell in ran}
        for cell in ran:
            page = html.unescape(shown(site, f"cells/{cell}.html"))
            assert all(one.figure.name in page for one in store.series(cell))


def test_a_line_is_kept_once_only_if_several_pages_have_it(tmp_path: Path) -> None:
    first, second = cells(["5.0", "5.1"], ["2.11"])
    tests = [Test("t.py::test_both", "passed", 0.0), Test("t.py::test_timed", "passed", 0.5)]
    forged = Test("t.py::test_\x02<b>\x03", "passed", 0.0)
    with Store.open(str(tmp_path / "store.db")) as store:
        stored(store, [passed(first, tests=[*tests, forged]), passed(second, tests=tests[:1])])
        report.write(store, tmp_path / "site")
    lines = (tmp_path / "site" / "lines.js").read_text(encoding="utf-8")
    pages = [(tmp_path / "site" / "cells" / f"{cell}.html").read_text(encoding="utf-8") for cell in (first, second)]
    assert lines.count("test_both") == 1
    assert not any("test_both" in page for page in pages)
    assert "test_timed" in pages[0]
    assert "test_timed" not in lines
    assert "t.py::test_\N{REPLACEMENT CHARACTER}&lt;b&gt;\N{REPLACEMENT CHARACTER}" in pages[0]
    for cell, page in zip((first, second), pages, strict=True):
        assert "test_both" in shown(tmp_path / "site", f"cells/{cell}.html")
        assert "\x02" not in page


def test_later_results_leave_the_earlier_pages_as_they_are(tmp_path: Path) -> None:
    later, earlier = cells(["5.0", "5.1"], ["2.11"]), cells(["5.2", "5.3"], ["2.11"])
    site = tmp_path / "site"

    def report_of(own: list[Cell], of_them: str, days: int) -> str:
        tests = [Test(f"t.py::test_{name}", "passed", 0.0) for name in ("all", of_them)]
        with Store.open(str(tmp_path / "store.db")) as store:
            found = (dataclasses.replace(passed(cell, tests=tests), started=START + timedelta(days)) for cell in own)
            stored(store, found)
            report.write(store, site)
        return (site / "lines.js").read_text(encoding="utf-8").partition("\n];")[0]

    lines = report_of(earlier, "earlier", 0)
    pages = {path: path.read_bytes() for path in (site / "cells").iterdir()}
    more = report_of(later, "later", 1)
    assert more.startswith(lines)
    assert more.count("test_") == lines.count("test_") + 1
    assert {path: path.read_bytes() for path in pages} == pages

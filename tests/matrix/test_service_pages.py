"""The pages of the service over HTTP; test_service_browser.py has the tests that need a browser."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urljoin

import pytest
from waiting import LONG

pytest.importorskip("fastapi", reason="the service needs kernel-compat-matrix[service]")

import requests
import service_demo
from report_site import shown
from served import served
from stored import START, cells, failed, passed, stored

from compat_matrix import words
from compat_matrix.axes import load
from compat_matrix.cells import Cell
from compat_matrix.errors import MatrixError
from compat_matrix.pages import ask, grid, report
from compat_matrix.pages.render import Links, code
from compat_matrix.results import CellResult, Figure, Test
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Run, Store, documents, inserts, submissions
from compat_matrix.store.models import SUBMISSION
from compat_matrix.views.common import SIGNS

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[31mred\x1b]0;t\x07\x00\x1b[2J\udc80\u202e{{7*7}}"
)
OLD = cells()
#: The address of the log of a cell in a run.
LOG = "/api/v1/runs/{}/cells/{}/log"

Get = Callable[..., requests.Response]


class Page(HTMLParser):
    """A page's text, and its elements with their attributes; a page that isn't well formed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        self.text += " " * (tag != "wbr")
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "br", "input", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def links(self) -> list[str]:
        return [one["href"] for one in self.all("a")]

    def cell(self, name: str) -> str:
        """The label of a cell's link in the grid."""
        labels = [one["aria-label"] for one in self.all("a") if "aria-label" in one and one["href"] == f"/cells/{name}"]
        assert len(labels) == 1, labels
        return labels[0]


def _page(response: requests.Response, status: int = 200) -> Page:
    assert response.status_code == status, response.text[:2000]
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src" in response.headers["content-security-policy"]
    return Page(response.text)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "store.db")) as store:
        yield store


@pytest.fixture
def get(store: Store) -> Iterator[Get]:
    """Gets a page of a service without axes."""
    with served(create_app(store, None, Settings())) as address, requests.Session() as session:
        yield lambda path, **more: session.get(address + path, timeout=LONG, **more)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Get, service_demo.Demo, Store]]:
    folder = tmp_path_factory.mktemp("demo")
    with Store.open(str(folder / "store.db")) as store:
        made = service_demo.fill(store, folder)
        app = create_app(store, load(folder / "axes.toml"), Settings())
        with served(app) as address, requests.Session() as session:
            yield lambda path, **more: session.get(address + path, timeout=LONG, **more), made, store


# All pages.


def test_every_link_leads_somewhere(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    todo = ["/", "/?flash-attn=all&python=all", f"/?run={made.runs['gpu']}", "/seams?distribution=torch"]
    seen: set[str] = set()
    most = 20  # how many pages of cells are visited
    while todo:
        address = todo.pop()
        cell = address.startswith("/cells/")
        if address in seen or (cell and most == 0):
            continue
        seen.add(address)
        most -= cell
        response = get(address)
        assert response.status_code == 200, address
        if not response.headers["content-type"].startswith("text/html"):
            continue
        page = Page(response.text)
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids)), address
        labels = [attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes]
        assert not set(labels) - set(ids), address
        assert all(one.get("scope") in ("row", "col") for one in page.all("th")), address
        assert len(page.all("h1")) == 1, address
        assert "`" not in page.text, address
        for link in [
            *page.links,
            *(one["src"] for one in page.all("script")),
            *(one["href"] for one in page.all("link")),
        ]:
            if link.startswith("#"):
                assert link[1:] in ids, (address, link)
                continue
            assert link.startswith("/"), (address, link)
            # Each facet combined with each filter would be a thousand pages.
            if ("state=" not in link and "=all" not in link) or address == "/":
                todo.append(link)
    assert {"/runs", "/diff", "/seams", "/types", "/status", "/api"} <= seen
    assert len([address for address in seen if address.endswith("attempt=1")]) > 5


@pytest.mark.slow
def test_the_pages_of_both_databases_are_the_same(url: str, tmp_path: Path) -> None:
    with Store.open(url) as store:
        made = service_demo.fill(store, tmp_path)
        app = create_app(store, load(tmp_path / "axes.toml"), Settings())
        running = submissions.running(made.store)[0].cell
        with served(app) as address:
            for path, said in (
                ("/", "3 of 87 tests are off"),
                (f"/?run={made.runs['new']}", "3 of 87 tests are off"),
                ("/cells/py312-tf5.23-torch2.15", "Greatest absolute difference: 0.31"),
                (f"/cells/{running}", "running"),
                ("/runs", "\N{CHECK MARK} 140"),
                (f"/diff?old={made.runs['old']}&new={made.runs['new']}", "Broke: 10"),
                ("/seams", "lazy_import_flash_attention"),
                ("/types", "no tiny model could be made"),
                ("/status", "5 cells."),
            ):
                assert said in " ".join(_page(requests.get(address + path, timeout=LONG)).text.split()), path
            log = requests.get(f"{address}{LOG.format(made.runs['new'], 'py312-tf5.23-torch2.15')}", timeout=LONG).text
            assert log.startswith("test session starts\ncollected 87 items\n")


def test_nothing_runs_within_a_page_or_comes_from_elsewhere(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    for address in (
        "/",
        "/runs",
        f"/runs/{made.runs['running']}",
        "/diff",
        "/seams",
        "/types",
        "/status",
        "/cells/py312-tf5.23-torch2.15",
    ):
        page = _page(get(address))
        for tag, attributes in page.elements:
            assert tag not in ("style", "iframe", "object", "base"), address
            assert not [name for name in attributes if name.startswith("on") or name == "style"], (address, attributes)
        assert all(one.get("src") for one in page.all("script"))
        assert "http" not in "".join([*page.links, *(one["src"] for one in page.all("script"))])


def test_the_library_is_the_one_that_was_published() -> None:
    static = files("compat_matrix").joinpath("pages/static")
    content = static.joinpath("htmx-4.0.1.min.js").read_bytes()
    # The hash of dist/htmx.min.js in the npm package htmx.org 4.0.1.
    assert hashlib.sha256(content).hexdigest() == "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130"
    assert "Zero-Clause BSD" in static.joinpath("htmx-LICENSE.txt").read_text()
    # Those of dist/uPlot.iife.min.js and dist/uPlot.min.css in the npm package uplot 1.6.32.
    for name, digest in (
        ("uPlot-1.6.32.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uPlot-1.6.32.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    ):
        assert hashlib.sha256(static.joinpath(name).read_bytes()).hexdigest() == digest
    assert "The MIT License" in static.joinpath("uPlot-LICENSE.txt").read_text()


def test_files_are_kept_for_ever_until_they_change(get: Get) -> None:
    icon = get("/favicon.ico")
    assert icon.content == get(Links().static("icon.svg")).content
    assert "immutable" not in icon.headers.get("cache-control", "")
    address = Links().static("style.css")
    response = get(address)
    assert response.headers["content-type"].startswith("text/css")
    assert "immutable" in response.headers["cache-control"]
    for name in ("nothing.css", "../pages.py", "..%2Fpages.py", "htmx-LICENSE.txt"):
        assert get(f"/static/{name}").status_code == 404


def test_behind_a_proxy_that_cuts_a_prefix_off(store: Store) -> None:
    stored(store, [passed(OLD[0])], label="x")
    app = create_app(store, None, Settings())
    with served(app, "/matrix") as address:
        # The proxy removes the prefix, but ASGI's path includes it.
        page = _page(requests.get(f"{address}/", timeout=LONG))
        assert page.links
        for link in page.links:
            assert link.startswith(("/matrix/", "#")), link
        moved = requests.get(f"{address}/runs/x", timeout=LONG, allow_redirects=False)
        assert moved.headers["location"] == f"/matrix/runs/{store.resolve('x')}"


# The grid.


def test_what_a_cell_can_be(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    page = _page(get("/?python=3.12&flash-attn=none&device=cpu"))
    said = {
        "py312-tf5.21-torch2.15": "ok: transformers 5.21, torch 2.15",
        "py312-tf5.22-torch2.15": "wrong: transformers 5.22, torch 2.15",
        "py312-tf5.17-torch2.12": "timeout: transformers 5.17, torch 2.12",
        "py312-tf5.0-torch2.11": "test 3: transformers 5.0, torch 2.11",
        "py312-tf5.23-torch2.10": "seam: transformers 5.23, torch 2.10",
        "py312-tf5.12-torch2.13": "install: transformers 5.12, torch 2.13",
    }
    running = [one["aria-label"] for one in page.all("a") if ", running:" in one.get("aria-label", "")]
    assert len(running) == 3
    for name, label in said.items():
        assert page.cell(name) == label
    page = _page(get("/?python=3.13"))
    assert page.cell("py313-tf5.23-torch2.15") == "waiting: transformers 5.23, torch 2.15"
    assert page.cell("py313-tf5.22-torch2.15") == "never: transformers 5.22, torch 2.15"
    page = _page(get("/?python=3.12&flash-attn=fa4&device=cuda"))
    labels = [one.get("aria-label", "") for one in page.all("a")]
    assert sum(label.startswith("not run: ") for label in labels) == 5
    page = _page(get("/?python=3.12&flash-attn=fa2&device=cuda&state=refused"))
    assert page.cell("py312-tf5.23-torch2.15-fa2-cuda") == "excluded: transformers 5.23, torch 2.15"
    assert "flash-attn compiles as C++17, and torch 2.14 and later need C++20" in page.text


def test_no_state_is_told_by_colour_alone(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    text = get("/?flash-attn=all&python=all").text
    shown = re.findall(r'<a class="c ([\w-]+)[^"]*"[^>]*><i aria-hidden="true">(.)</i> ([^<]+)', text)
    assert len(shown) > 1000
    signs: dict[str, set[str]] = {}
    for state, sign, word in shown:
        assert word.strip()
        signs.setdefault(sign, set()).add(state)
    assert {sign: states for sign, states in signs.items() if len(states) > 1} == {}
    assert signs.keys() == set(SIGNS.values())


def test_counts_and_facets(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, store = demo
    page = _page(get("/"))
    # By default it shows the first kernel with results, and the newest Python that has some.
    assert [one for one in page.all("a") if one.get("aria-current") == "true"] == [
        {"href": "/?flash-attn=none&device=cpu#grid", "aria-current": "true"},
        {"href": "/?python=3.12#grid", "aria-current": "true"},
    ]
    current = {
        cell: past.summary for cell, past in store.current().items() if cell.python == "3.12" and cell.device == "cpu"
    }
    bad = sum(one.verdict == "failed" for one in current.values())
    assert sum(one.verdict == "passed" for one in current.values()) == int(_count(page, "passed"))
    assert sum(int(_count(page, state)) for state in ("wrong", "failed")) == bad


def _count(page: Page, state: str) -> str:
    found = re.search(rf"(\d+) {state}", " ".join(page.text.split()).partition(" Show ")[2])
    assert found
    return found[1]


def _lines(page: Page) -> dict[str, str]:
    """The text of each line of ranges, by its title."""
    text = " ".join(page.text.partition("What works")[2].partition("Every cell")[0].split())
    titles = ("no FlashAttention, CPU", "FlashAttention-2, GPU", "FlashAttention-4, GPU")
    found = re.split(f"({'|'.join(titles)})", text)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_the_first_page_begins_with_what_works_on_every_device(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    page = _page(get("/"))
    assert page.text.index("What works") < page.text.index("Every cell")
    lines = _lines(page)
    assert " Python 3.12: 150 cells, 10 failed " in lines["no FlashAttention, CPU"]
    assert "✓ works transformers 4.57 to 5.22 on torch 2.14 " in lines["no FlashAttention, CPU"]
    assert "✗ crash transformers 5.2 on torch 2.11 " in lines["no FlashAttention, CPU"]
    assert "/cells/py312-tf5.2-torch2.11" in page.links
    assert " Python 3.12: 150 cells, 5 not run " in lines["FlashAttention-4, GPU"]
    assert "○ not run transformers 5.0 on torch 2.11 " in lines["FlashAttention-4, GPU"]
    assert "○ not run transformers 4.57 to 5.23 on torch 2.10 to 2.13 " in lines["FlashAttention-2, GPU"]
    assert (
        "⊘ excluded transformers 4.57 to 5.23 on torch 2.14, 2.15 flash-attn compiles" in lines["FlashAttention-2, GPU"]
    )
    # Of a Python, or of all.
    assert "waiting transformers 5.23 on torch" in _lines(_page(get("/?python=3.13")))["no FlashAttention, CPU"]
    every = _lines(_page(get("/?python=all")))["no FlashAttention, CPU"]
    assert " Python 3.13, 3.12, 3.11: 450 cells, 10 failed, 150 not run " in every
    assert "✗ crash transformers 5.2 on torch 2.11 with Python 3.12 " in every


def test_ranges_have_every_cell_once(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    _, _, store = demo
    axes = service_demo.write_axes(Path(store.url.removeprefix("sqlite:///")).parent)
    entries = {cell: grid.entry(None, excluded=why) for cell, why in axes.all_cells.items()}
    entries |= {one.cell: grid.entry(one) for one in store.newest()}
    filters = {**ask.read([]), "python": "all"}
    cells = [
        (cell, part.word)
        for line in grid.lines(filters, (), entries, grid.counted(entries))
        for part in line.parts
        for _, some in part.ranges
        for cell in some
    ]
    shown = {cell for cell in entries if cell.device == "cuda" or cell.flash_attention == "none"}
    shown -= {cell for cell in shown if cell.device == "cuda" and cell.flash_attention == "none"}
    assert sorted(cell for cell, _ in cells) == sorted(shown)
    for cell, word in cells:
        kinds = {"works": "ok", "test": "test 3"}
        assert entries[cell].word in (
            {"not run", "never", "unfinished"} if word == "not run" else {kinds.get(word, word)}
        )


def test_chips_have_the_counts_of_the_cells_that_they_show(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    for address in ("/", "/?python=all", "/?flash-attn=all", "/?flash-attn=fa4&device=cuda"):
        text = "".join(re.findall('<nav class="tabs".*?</nav>', get(address).text, re.DOTALL))
        chips = re.findall(r'<li><a href="([^"]+)#grid"[^>]*>(.*?)</a></li>', text, re.DOTALL)
        assert len(chips) == 4 + 4
        for link, chip in chips:
            counts = {word: int(count) for count, word in re.findall(r"(\d+)<span class=\"hidden\"> ([a-z ]+)<", chip)}
            grid_of = get(unquote(link).replace("&amp;", "&")).text.partition('<div id="live"')[2]
            labels = [one for one in re.findall(r'<a class="c [^>]*aria-label="([^":]+)', grid_of) if one != "excluded"]
            open_ones = [one for one in labels if re.match("never|not run|waiting|unfinished|running", one)]
            bad = [one for one in labels if one not in open_ones and not re.match("ok|flaky|known", one)]
            found = {"cells": len(labels), "failed": len(bad), "not run": len(open_ones)}
            assert counts == {word: count for word, count in found.items() if count}, (address, link)


def test_a_day_is_shown_where_it_is_not_the_usual(store: Store, get: Get) -> None:
    day = timedelta(days=1)
    results = [dataclasses.replace(passed(one), started=START + day * (n == 2)) for n, one in enumerate(OLD)]
    stored(store, results)
    text = get("/").text
    assert f"Tested on {START:%Y-%m-%d}, except where a cell says another day." in text
    assert re.findall(r"<small>(.*?)</small>", text) == [f" {START + day:%Y-%m-%d}"]


def test_filters_are_in_the_address(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    page = _page(get("/", params={"only": "transformers>=5.22 and torch==2.15", "state": "wrong"}))
    assert [unquote(link) for link in page.links if link.startswith("/cells/")][:2] == [
        "/cells/py312-tf5.23-torch2.15",
        "/cells/py312-tf5.22-torch2.15",
    ]
    form = {one.get("name"): one.get("value") for one in page.all("input")}
    assert form["only"] == "transformers>=5.22 and torch==2.15"
    assert [one["name"] for one in page.all("select")] == ["device", "state"]
    # The facets keep the other filters; the form keeps the facets.
    assert "/?python=3.11&only=transformers%3E%3D5.22+and+torch%3D%3D2.15&state=wrong#grid" in page.links
    assert {"name": "python", "value": "3.11", "type": "hidden"} in _page(get("/?python=3.11")).all("input")
    # As a browser sends a form with empty fields.
    page = _page(get(f"/?only=&state=&run={made.runs['gpu']}"))
    assert f"/cells/py312-tf5.0-torch2.15-fa4-cuda?run={made.runs['gpu']}" in page.links
    assert _page(get("/?only=torch==1.0")).text.count("No cell matches.") == 1


@pytest.mark.parametrize(
    ("query", "allowed"),
    [
        ("pyton=3.12", "the filters are transformers, torch, flash-attn, device, python, only, state, run"),
        ("python=3.9", "there are 3.11, 3.12, 3.13, all"),
        ("device=tpu", "device is one of cpu, cuda, not"),
        ("flash-attn=fa3", "there are none, fa2, fa4, all"),
        (
            "flash-attn=fa9",
            "flash-attn is one of none, fa2, fa3, fa4, torch, or a package such as flash-attn 2.8.3, not",
        ),
        ("state=green", "the states are passed, flaky, known, wrong, failed, refused, not run, running, waiting"),
        ("only=torch==", ""),
        ("only=peft>=0.17", "there is no axis"),
        ("only=" + "not " * 120 + "torch", "more than 100 conditions inside one another"),
        ("only=" + "(" * 400, ""),
        ("only=" + "x" * 501, "longer than 500"),
        ("python=3.12&python=3.11", "twice"),
        ("only=%00<script>", ""),
    ],
)
def test_a_bad_filter_is_refused_with_what_is_allowed(
    demo: tuple[Get, service_demo.Demo, Store], query: str, allowed: str
) -> None:
    page = _page(demo[0](f"/?{query}"), 422)
    assert allowed in page.text
    assert not [one for one in page.all("script") if not one["src"].startswith("/static/")]


def test_what_does_not_exist_is_not_found(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    for address in (
        "/nothing",
        "/cells/py312-tf9.0-torch2.15",
        "/cells/<script>",
        "/cells/..%2F..%2Fetc%2Fpasswd",
        "/runs/20200101-000000-0000",
        "/diff?old=a&new=b",
        "/?run=nothing",
        f"/cells/py312-tf5.23-torch2.15?run={made.runs['gpu']}",
        "/cells/py312-tf5.23-torch2.15?attempt=7",
        "/runs?before=nothing",
    ):
        page = _page(get(address), 404)
        assert "/" in page.links
    for address in ("/cells/py312-tf5.23-torch2.15?attempt=x", "/cells/py312-tf5.23-torch2.15?x=1"):
        _page(get(address), 422)
    assert get("/api/v1/nothing").headers["content-type"] == "application/json"


def test_a_page_is_not_sent_twice(store: Store, get: Get) -> None:
    run = stored(store, [passed(OLD[0])])
    first = get("/")
    assert first.headers["content-encoding"] == "gzip"
    assert get("/", headers={"accept-encoding": "identity"}).text == first.text
    again = get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    live = next(one["hx-get"] for _, one in Page(first.text).elements if "hx-get" in one)
    assert get(live).status_code == 204
    store.add(run, failed(OLD[1], "seam", "f is gone"))
    changed = get(live)
    assert changed.status_code == 200
    assert changed.text.startswith('<div id="live"')
    assert "f is gone" in changed.text
    assert get("/", headers={"if-none-match": first.headers["etag"]}).status_code == 200
    assert "etag" not in get("/nothing").headers


def test_a_store_of_nothing(get: Get) -> None:
    assert "No run has been stored yet" in _page(get("/")).text
    assert "no two runs" in _page(get("/diff")).text
    assert "There are none." in _page(get("/runs")).text
    assert "kernel-compat-matrix adopt --store" in _page(get("/seams")).text
    assert "No cell runs." in _page(get("/status")).text


# A cell.


def test_a_cell(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    page = _page(get("/cells/py312-tf5.23-torch2.15"))
    text = " ".join(page.text.split())
    assert "≠ wrong" in text
    assert "3 of 87 tests are off, by up to 0.31" in text
    assert "13 passed, 3 failed, 1 skipped" in text
    assert "kernel-compat-matrix run py312-tf5.23-torch2.15" in text
    assert "Greatest absolute difference: 0.31" in page.text
    assert "tests/integration/test_decoders.py::test_generate[mistral-0]" in text
    assert "tf5 applied transformers 5 transformers.masking_utils.f(config)" in text
    assert "torch2_11 not needed needs torch 2.11" in text
    assert "transformers 5.23.1" in text
    assert "torch==2.15.0 --hash=sha256:" in text
    assert "no GPU" in text
    assert f"{LOG.format(made.runs['new'], 'py312-tf5.23-torch2.15')}?attempt=1" in page.links
    history = [link for link in page.links if "attempt=1" in link and "/log" not in link]
    # A strip, the oldest first, and a table, the newest first.
    order = ("old", "new", "new", "old")
    assert history == [f"/cells/py312-tf5.23-torch2.15?run={made.runs[name]}&attempt=1" for name in order]
    older = _page(get(history[0]))
    assert "✓ ok" in older.text
    assert "not its newest result" in older.text


def test_a_cell_is_told_in_the_order_of_what_matters(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    text = get("/cells/py312-tf5.23-torch2.15").text
    headings = re.findall(r"<h2[^>]*>([^<]+)</h2>", text)
    assert headings == [
        "Installed",
        "Failed tests",
        "History",
        "Figures",
        "Shims",
        "Environment",
        "Tests",
        "Pins",
        "Log",
    ]
    assert text.index("3 of 87 tests are off") < text.index("Installed") < text.index("5.23.1")
    # The numbers of a failed test are there without opening its report.
    numbers = re.findall(r'<pre class="said">([^<]+)</pre>', text.partition("Failed tests")[2])
    assert numbers[0].splitlines()[-1].startswith("Greatest absolute difference: 0.31")


def test_the_name_in_the_header_is_the_projects(demo: tuple[Get, service_demo.Demo, Store], get: Get) -> None:
    assert '<a class="brand" href="/">tested</a>' in demo[0]("/").text
    assert '<a class="brand" href="/">kernel-compat-matrix</a>' in get("/").text


def test_the_history_is_in_the_order_of_the_starts(store: Store, get: Get) -> None:
    days = {
        stored(store, [dataclasses.replace(passed(OLD[0]), started=START + timedelta(days=n))]): n for n in (3, 1, 2)
    }
    strip = get(f"/cells/{OLD[0]}").text.partition('<ol class="strip"')[2].partition("</ol>")[0]
    assert [days[run] for run in re.findall(r"run=([\w-]+)", strip)] == [1, 2, 3]


def test_a_cell_that_is_running(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    running = submissions.running(made.store)[0]
    page = _page(get(f"/cells/{running.cell}"))
    assert f"running in {running.run}, since {running.since:%Y-%m-%d %H:%M} UTC" in " ".join(page.text.split())
    part = get(f"/cells/{running.cell}?live=1")
    assert part.text.startswith('<p id="activity"')
    live = next(one["hx-get"] for _, one in page.elements if one.get("id") == "activity")
    assert get(live).status_code == 204
    assert get("/cells/py312-tf5.21-torch2.15?live=1").headers["hx-refresh"] == "true"


def test_a_cell_without_a_result(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    page = _page(get("/cells/py313-tf5.0-torch2.15"))
    assert "never" in page.text
    assert "kernel-compat-matrix run py313-tf5.0-torch2.15" in page.text
    page = _page(get("/cells/py312-tf5.23-torch2.15-fa2-cuda"))
    assert "excluded" in page.text
    assert "flash-attn compiles as C++17" in page.text
    assert "kernel-compat-matrix run" not in page.text


def test_an_attempt(store: Store, get: Get) -> None:
    run = stored(store, [failed(OLD[0], "crash", "the first"), failed(OLD[0], "timeout", "the second", attempt=2)])
    assert "the second" in _page(get(f"/cells/{OLD[0]}")).text.partition("History")[0]
    page = _page(get(f"/cells/{OLD[0]}?run={run}&attempt=1"))
    assert "the first" in page.text.partition("History")[0]
    assert "the second" not in page.text.partition("History")[0]
    assert get(f"{LOG.format(run, OLD[0])}?attempt=2").text == "collected\nfailed\n"


def test_what_only_a_partial_run_has(store: Store, get: Get) -> None:
    run = store.new_run([OLD[0]], partial=True)
    store.add(run, failed(OLD[0]))
    page = _page(get(f"/cells/{OLD[0]}"))
    assert "a partial run" in page.text
    assert f"/runs/{run}" in page.links
    assert "No cell matches." in _page(get("/")).text
    assert "test 1" in _page(get(f"/?run={run}")).text


# The question.


def test_does_my_combination_work(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    page = _page(
        get("/", params={"transformers": "5.23.1", "torch": "2.15.0+cu130", "flash-attn": "none", "python": "3.12"})
    )
    text = " ".join(page.text.split())
    assert "≠ 1 tested combination computes something else, 1 is excluded Exactly these releases were tested." in text
    assert "CPU: ≠ It computes something else GPU: ⊘ It is excluded" in text
    assert f"/runs/{made.runs['new']}" in page.links
    assert "The nearest combination that works" in text
    names = ("transformers", "torch", "flash-attn", "python")
    assert {one["name"]: one["value"] for one in page.all("input") if one.get("id") in names} == {
        "transformers": "5.23.1",
        "torch": "2.15.0+cu130",
        "flash-attn": "none",
        "python": "3.12",
    }
    # The grid is the reader's, whose row, column and cell are marked.
    page = _page(get("/", params={"transformers": "5.9", "torch": "2.11", "flash-attn": "fa4"}))
    assert "Python 3.12, FlashAttention-4, GPU" in page.text
    columns = [one["data-value"] for one in page.all("th") if "data-value" in one and one["scope"] == "col"]
    assert columns == ["2.15", "2.14", "2.13", "2.12", "2.11", "2.10"]
    assert [one["data-value"] for one in page.all("th") if one.get("class") == "yours"] == ["2.11", "5.9"]
    assert len([one for one in page.all("td") if one.get("class") == "yours"]) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tf=5.9", "transformers=5.9"),
        (
            "tf=5.9.1&pt=2.11&fa=fa4&py=3.12&on=cuda",
            "transformers=5.9.1&torch=2.11&flash-attn=fa4&python=3.12&device=cuda",
        ),
        ("flash_attention=fa4&device=cuda&python=3.12", "flash-attn=fa4&device=cuda&python=3.12"),
        ("fa=fa4&tf=", "transformers=&flash-attn=fa4"),
        ("tf=5.9&transformers=5.9", "transformers=5.9"),
        ("flash_attn=fa4&state=&only=torch==2.11", "flash-attn=fa4&only=torch%3D%3D2.11"),
        # A choice of the grid was kept beside a question; the question counts.
        ("flash_attention=fa2&python=3.11&tf=5.9&fa=fa4&py=3.12", "flash-attn=fa4&python=3.12&transformers=5.9"),
    ],
)
def test_old_spellings_lead_to_todays(demo: tuple[Get, service_demo.Demo, Store], old: str, new: str) -> None:
    get = demo[0]
    moved = get(f"/?{old}", allow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, f"/?{new}")
    assert get(f"/?{old}").text == get(f"/?{new}").text


@pytest.mark.parametrize("twice", ["tf=5.9&transformers=5.8", "torch=2.11&pt=2.12", "fa=fa4&flash-attn=fa2"])
def test_two_spellings_with_two_values_are_an_error(demo: tuple[Get, service_demo.Demo, Store], twice: str) -> None:
    page = _page(demo[0](f"/?{twice}", allow_redirects=False), 422)
    assert "is given in two spellings" in page.text
    assert all(f"'{one.partition('=')[2]}'" in page.text for one in twice.split("&"))


def test_the_form_s_own_examples_are_answered_without_its_script(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, *_ = demo
    example = {
        "transformers": "5.9.1",
        "torch": "2.11.0+cu130",
        "flash-attn": "flash-attn 2.8.3",
        "device": "",
        "python": "3.12",
    }
    page = _page(get("/", params=example))
    assert "The nearest combinations that were tested are below." in page.text
    assert {one["name"]: one["value"] for one in page.all("input") if one.get("id") == "flash-attn"} == {
        "flash-attn": "flash-attn 2.8.3"
    }
    assert "FlashAttention-2, GPU" in page.text


def test_an_excluded_combination_has_a_grid_of_cells_that_exist(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    page = _page(demo[0]("/?transformers=5.9&flash-attn=fa2&device=cpu"))
    assert "It is excluded" in page.text
    assert "There is no such cell" not in page.text
    assert "FlashAttention-2, GPU" in page.text.partition("Every cell")[2]


def test_a_choice_of_grids_is_no_question(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get = demo[0]
    text = get("/?flash-attn=fa4&device=cuda").text
    assert 'class="verdict"' not in text
    assert 'class="line chosen"' in text
    assert "What works with it is below." in text
    # As the form sends it, with empty fields.
    assert 'class="verdict"' in get("/?transformers=&torch=&flash-attn=fa4&device=cuda&python=").text
    assert 'class="verdict"' in get("/?transformers=5.9").text
    # A question may be about what no cell has; its grid is the default one.
    page = _page(get("/?transformers=5.9&flash-attn=fa3&python=3.9"))
    assert "the matrix has no flash-attn fa3 and no python 3.9" in page.text
    assert "Python 3.12, no FlashAttention, CPU" in page.text


def test_the_answer_is_for_the_device_that_is_given_or_for_each(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo

    def answer(address: str) -> str:
        return " ".join(_page(get(address)).text.partition("An empty field stands for any.")[2].split()).partition(
            " What works"
        )[0]

    never = answer("/?transformers=5.9&torch=2.11&flash-attn=fa2")
    assert (
        "○ 3 combinations were never run, 3 are excluded The nearest combinations that were tested are below." in never
    )
    assert "CPU: ⊘ It is excluded FlashAttention has kernels for CUDA alone" in never
    assert "GPU: ○ It was never run" in never
    assert "GPU: ○ It was never run" not in (
        on_cpu := answer("/?transformers=5.9&torch=2.11&flash-attn=fa2&device=cpu")
    )
    assert "⊘ It is excluded The project doesn't test it, for this reason: FlashAttention has kernels" in on_cpu
    for address in ("/?torch=2.14&flash-attn=fa2", "/?torch=2.15.1&flash-attn=fa2&device=cuda&python=3.12"):
        assert "for this reason: flash-attn compiles as C++17" in answer(address)
    assert "It was never run" in (outside := answer("/?transformers=5.40"))
    assert "the matrix has no transformers 5.40" in outside
    _page(get("/?device=tpu"), 422)


def test_a_release_that_is_none_is_refused(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    assert "a release such as 5.9.0" in _page(get("/?torch=%3E%3D2"), 422).text
    assert (
        "flash-attn is one of none, fa2, fa3, fa4, torch, or a package such as flash-attn 2.8.3, not 'fa9'"
        in _page(get("/?torch=2.11&flash-attn=fa9"), 422).text
    )
    _page(get(f"/?transformers={'x' * 600}"), 422)


def test_the_form_asks_for_a_projects_own_axes(store: Store, get: Get) -> None:
    own = [Cell("3.12", "5.0", "2.10", extra=(("peft", peft),)) for peft in ("0.9", "0.10")]
    stored(store, [passed(own[0]), failed(own[1], "crash", "it died")])
    page = _page(get("/"))
    assert [one["name"] for one in page.all("input") if one.get("id")][:5] == [
        *("transformers", "torch", "flash-attn", "python", "peft")
    ]
    page = _page(get("/?transformers=5.0&peft=0.10"))
    assert "It fails: crash" in page.text
    assert "Python 3.12, no FlashAttention, CPU, peft 0.10" in page.text
    assert "CPU, peft 0.9" not in page.text
    assert "a release such as" in _page(get("/?peft=%3E0.9"), 422).text


# Escaping of results.


def test_text_of_results_is_text(store: Store, get: Get) -> None:
    cell = Cell("3.12", "5.0<b>", "2.1/..?x=\"'&#", "javascript:alert(1)", "cpu&")
    shims = {HOSTILE: {"state": HOSTILE, "reason": HOSTILE, "seams": [HOSTILE]}, "odd": 5, "odder": {"seams": 5}}
    environment = {"packages": {HOSTILE: HOSTILE}, "device": HOSTILE, "shims": shims, HOSTILE: HOSTILE}
    tests = [Test(HOSTILE, outcome, 0.1, HOSTILE) for outcome in ("failed", "passed", "skipped", "error", "xfailed")]
    runs = []
    for verdict in (failed, passed):
        result = dataclasses.replace(
            verdict(cell),
            reason=HOSTILE,
            tests=tuple(tests),
            environment=environment,
            log=HOSTILE,
            pins=HOSTILE,
            command=(HOSTILE,),
        )
        text = HOSTILE.replace("\udc80", "").replace("\x00", "")
        runs.append(store.new_run([cell], label=text, command=text, host=text, revision=text, excluded={OLD[1]: text}))
        store.add(runs[-1], result)
    old, new = runs
    store.add(new, dataclasses.replace(result, verdict="failed", kind="test", attempt=2))
    name = quote(cell.name, safe="")
    documents.keep(store, "atlas", json.dumps(_hostile_atlas()))
    for address in (
        "/",
        "/?flash-attn=all",
        f"/?run={old}",
        "/runs",
        f"/runs/{old}",
        f"/diff?old={old}&new={new}",
        f"/cells/{name}",
        f"/cells/{name}?run={old}&attempt=1",
        f"/cells/{OLD[1]}",
        "/seams",
        "/status",
        f"/?only={quote(HOSTILE.replace(chr(0xDC80), ''))}",
    ):
        response = get(address)
        page = _page(response, 422 if "only" in address else 200)
        assert {one["src"].partition("?")[0] for one in page.all("script")} == {
            "/static/htmx-4.0.1.min.js",
            "/static/keys.js",
            *(["/static/ask.js"] if address.startswith("/") and page.all("textarea") else []),
        }
        assert not page.all("img"), address
        assert not page.all("b") or address.startswith("/?"), address
        assert "\x1b" not in response.text
        assert "\x00" not in response.text
        assert "\u202e" not in response.text
        assert "{{" not in response.text or "{{7*7}}" in response.text
        for tag, attributes in page.elements:
            assert not [attribute for attribute in attributes if attribute.startswith("on")], (tag, attributes)
            for value in (
                attributes.get("href"),
                attributes.get("src"),
                attributes.get("action"),
                attributes.get("hx-get"),
            ):
                assert value is None or re.match(r"/(?!/)|#", value), (address, value)
    for link in _page(get("/?flash-attn=all")).links:
        if link.startswith("/cells/"):
            assert get(link).status_code == 200, link
    store.add(new, dataclasses.replace(passed(OLD[0]), log=HOSTILE))
    log = get(LOG.format(new, OLD[0]))
    assert log.text == words.clean(HOSTILE)
    assert log.headers["content-type"] == "text/plain; charset=utf-8"
    assert log.headers["x-content-type-options"] == "nosniff"
    # The copied command runs the cell and nothing else.
    assert "kernel-compat-matrix run 'py312" in _page(get(f"/cells/{name}")).text


def _hostile_atlas() -> dict[str, object]:
    text = HOSTILE.replace("\udc80", "")  # not valid in JSON
    event = {"release": text, "what": text, "text": text, "new": [text], "gone": [text]}
    seam = {"distribution": text, "target": text, "shims": [text], "history": [event]}
    read = {"distribution": text, "shim": text, "target": text, "name": text, "releases": [text, "of no release"]}
    return {"releases": {text: [{"version": text}]}, "seams": [seam], "reads": [read], "notes": [text]}


def test_a_log_of_100_mb(store: Store, get: Get) -> None:
    line = "\x1b[32mtests/test_it.py::test_it[<b>] PASSED\x1b[0m and so on, for a hundred characters in each line\n"
    times = 100 * 2**20 // len(line)
    log = f"the beginning\n{line * times}the end\n"
    stored(store, [dataclasses.replace(failed(OLD[0]), log=log)])
    response = get(f"/cells/{OLD[0]}")
    page = _page(response)
    assert len(response.text) < 400_000
    assert "the end" in page.text
    assert "the beginning" not in page.text
    assert "100.0 MiB" in page.text
    digest, size = hashlib.sha256(), 0
    with get(LOG.format("latest", OLD[0]), stream=True) as streamed:
        for piece in streamed.iter_content(2**20):
            digest.update(piece)
            size += len(piece)
    clean = words.clean(line)
    assert digest.hexdigest() == hashlib.sha256(f"the beginning\n{clean * times}the end\n".encode()).hexdigest()


def test_a_log_without_a_line(store: Store, get: Get) -> None:
    log = "x\x1b]0;" * 100_000 + "é" * 300_000
    stored(store, [dataclasses.replace(failed(OLD[0]), log=log)])
    shown = get(LOG.format("latest", OLD[0])).text
    assert "\x1b" not in shown
    assert shown.endswith("é" * 300_000)
    assert _page(get(f"/cells/{OLD[0]}")).text.count("é") >= 40_000


def test_many_tests(store: Store, get: Get) -> None:
    tests = [
        Test(f"tests/test_it.py::test_{n}", "failed" if n % 2 else "passed", 0.1, f"E  no {n}\n" * 3_500)
        for n in range(600)
    ]
    stored(store, [failed(OLD[0], tests=tests)])
    response = get(f"/cells/{OLD[0]}")
    assert len(response.text) < 6_000_000
    page = _page(response)
    assert all(f"test_{n}" in page.text for n in range(600))
    assert "characters are left out" in page.text


def test_an_error_of_many_tests_is_shown_once(store: Store, get: Get) -> None:
    tests = [Test(f"test_{n}", "failed", 0.1, f"in line {n}\nE   no kernel\n") for n in range(9)]
    stored(store, [failed(OLD[0], tests=tests)])
    text = " ".join(_page(get(f"/cells/{OLD[0]}")).text.split())
    assert text.count("no kernel") == 2  # the second is in the whole report
    assert "8 more tests with the same error" in text
    assert all(f"test_{n}" in text for n in range(9))


# The rest.


def test_runs(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, store = demo
    page = _page(get("/runs"))
    assert [link for link in page.links if link.startswith("/runs/")] == [
        f"/runs/{made.runs[name]}" for name in ("running", "new", "gpu", "old")
    ]
    assert "✓ 140 passed" in " ".join(page.text.split())
    page = _page(get("/runs/latest"))
    assert f"Run {made.runs['running']}" in page.text
    assert "5 running" in page.text
    page = _page(get(f"/runs/{made.runs['new']}"))
    assert f"/diff?new={made.runs['new']}" in page.links
    assert "3 of 87 tests are off" in page.text
    assert f"/cells/py312-tf5.17-torch2.12?run={made.runs['new']}" in page.links
    part = get(f"/runs/{made.runs['new']}?live=1")  # of a run that ended before the eyes of a reader
    assert part.text.startswith('<div id="live" hx-get="/runs/')
    assert "Run what failed" in part.text
    assert store.runs()[0].id == made.runs["running"]


def test_runs_of_a_commit_are_a_row_in_the_order_of_their_start(store: Store, get: Get) -> None:
    """Whatever the order in which the store received them."""
    begins = {"late": 3, "early": 1, "between": 2}
    runs = {}
    with store.writing() as connection:
        for name, hours in begins.items():
            run = Run(f"2026-{name}", START + timedelta(hours=hours), None, "running", name, "run", "", "", False, "")
            inserts.new_run(connection, run, "", dict.fromkeys(OLD))
            runs[name] = run.id
    shards = [
        store.new_run(OLD[n : n + 2], label="shard", revision="0b46ac130aaa", command=f"run --shard {n}")
        for n in (0, 2)
    ]
    figures = store.new_run(
        OLD[:1], label="shard", revision="0b46ac130aaa", command="run --suite figures", partial=True
    )
    for n, cell in enumerate(OLD[:2]):
        store.add(shards[0], failed(cell, "wrong", f"{n + 1} of 9 tests are off, by up to 0.{n + 1}"))
    store.add(shards[1], passed(OLD[2]))
    store.add(figures, passed(OLD[0]))
    text = get("/runs").text
    rows = re.findall(r"<tr id=.*?</tr>", text, re.DOTALL)
    assert [re.findall(r"<strong>(.*?)</strong>", row) for row in rows] == [["shard"], ["late"], ["between"], ["early"]]
    assert {*re.findall(r'href="/runs/([^"]+)"', rows[0])} == {*shards, figures}
    said = " ".join(Page(f"<table>{rows[0]}</table>").text.split())
    assert "running, 3 runs" in said
    assert "✓ 1 passed ✗ 2 failed … 1 unfinished" in said  # the figures aren't among them
    assert said.count("≠ wrong 1 of 9 tests are off, by up to 0.1: 2 cells") == 1
    assert said.endswith("✓ 1 passed suite figures")
    assert f"/runs/{shards[1]}" in _page(get(f"/runs/{shards[0]}")).links
    store.add(shards[1], passed(OLD[1]))  # repeated in another part
    row = get("/runs").text.partition("<tbody>")[2].partition("</tr>")[0]
    assert f'by up to 0.1: <a href="/cells/{OLD[0]}?run={shards[0]}">' in row
    assert get(f"/cells/{OLD[0]}?run={shards[0]}").status_code == 200


def test_a_cancelled_run_is_not_the_last_one(store: Store, get: Get, tmp_path: Path) -> None:
    kept = stored(store, [passed(OLD[0])], label="kept")
    cancelled = stored(store, [passed(OLD[1])], label="cancelled", state="interrupted")
    report.write(store, tmp_path / "site")
    for text in (get("/").text, (tmp_path / "site" / "index.html").read_text()):
        last = text.partition("Last run:")[2].partition("</p>")[0]
        assert kept in last
        assert cancelled not in last
    assert cancelled in get("/runs").text


def test_many_runs(store: Store, get: Get) -> None:
    every = [store.new_run([]) for _ in range(60)][::-1]
    page = _page(get("/runs"))
    listed = [unquote(link).partition("/runs/")[2] for link in page.links if link.startswith("/runs/")]
    assert len(listed) == 25
    while older := [link for link in page.links if "before" in link]:
        page = _page(get(older[0]))
        listed += [unquote(link).partition("/runs/")[2] for link in page.links if link.startswith("/runs/")]
    assert sorted(listed) == sorted(every)


def test_what_changed(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    old, new = made.runs["old"], made.runs["new"]
    page = _page(get("/diff", params={"old": old, "new": new}))
    assert "Broke: 10" in page.text
    assert "Only in the earlier run: 150" in page.text
    assert f"/cells/py312-tf5.17-torch2.12?run={new}" in page.links
    assert _page(get(f"/diff?new={new}")).text == page.text
    assert "Mended: 10" in _page(get("/diff", params={"old": new, "new": old})).text
    assert "Nothing changed." in _page(get("/diff", params={"old": new, "new": new})).text
    assert made.runs["new"] in _page(get("/diff")).text
    assert made.runs["running"] in _page(get(f"/diff?old={old}")).text


def test_what_changed_is_between_rows_of_the_list(store: Store, get: Get, tmp_path: Path) -> None:
    """The parts of a commit's run have different cells, which says nothing, and cells of a new release have no earlier run."""

    def run(revision: str, *of: Cell, suite: str = "") -> str:
        command = f"run --suite {suite}" if suite else "run"
        name = store.new_run(of, label="nightly", revision=revision, command=command)
        for cell in of:
            store.add(name, passed(cell))
        return name

    new = cells(["5.1"], ["2.11"], ["3.11", "3.12"])
    earlier = run("1f0c7d2ab9e4", *OLD[:4])
    own = [run("52754fa0c1d2", *OLD[:3]), run("52754fa0c1d2", *OLD[2:4])]
    lone = [run("0b46ac130aaa", *of) for of in (new[:1], new)]
    report.write(store, tmp_path / "site")
    for text in (get("/diff").text, (tmp_path / "site" / "diff.html").read_text()):
        said = text.partition('<p class="lead">')[2].partition("</p>")[0]
        assert re.findall(r"/([-\w]+)(?:\.html)?\"", said) in [[earlier, one] for one in own]
    page = _page(get(f"/diff?new={lone[1]}"))
    assert f"No earlier run of another commit has a cell of {lone[1]}" in " ".join(page.text.split())
    assert {one["value"] for one in page.all("option")} >= {earlier, *lone}
    site = (tmp_path / "site" / "index.html").read_text()
    for text in (get("/").text, site):
        last = text.partition("Last runs:")[2].partition("</p>")[0]
        assert "2 runs</a> of one commit, nightly, the last begun" in last
        address, _, place = re.findall(r'href="([^"]*)"', last)[0].partition("#")
        assert address in ("/runs", "runs.html")
        row = get("/runs").text.partition(f'<tr id="{place}">')[2].partition("</tr>")[0]
        assert all(one in row for one in lone)


def test_tests_that_changed(store: Store, get: Get) -> None:
    stored(store, [failed(OLD[0], tests=[Test("a", "failed", 1), Test("b", "passed", 1)])])
    stored(store, [failed(OLD[0], tests=[Test("a", "passed", 1), Test("b", "failed", 1)])])
    text = " ".join(_page(get("/diff")).text.split())
    assert "Tests that broke in cells that failed both times py312-tf4.57-torch2.10 b" in text
    assert "Tests that were mended in cells that failed both times py312-tf4.57-torch2.10 a" in text


def test_seams(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, _ = demo
    page = _page(get("/seams"))
    spans = [int(one["colspan"]) for one in page.all("td") if "colspan" in one]
    assert spans == [1, 31, 5, 2, 4, 21, 8, 19, 5, 32]
    assert sum(spans) == 4 * 32
    text = " ".join(page.text.split())
    assert "gone from 5.19.0" in text
    assert "(implementation, ...) \N{BALLOT X} certain nothing" in text
    assert "+attention_wrapper +allow_all_kernels \N{MINUS SIGN}force_import" in text
    assert ">=3.9, >=3.10 since 5.0.0, >=3.11 since 5.21.0" in text
    read = page.text.partition("What is read")[2]
    names = re.findall(r"transformers.cache_utils:Cache.update\s+(.*)\s+reads_models", read)
    assert names == ["layer_idx 5.0.0 to 5.23.0", "cache_kwargs 5.0.0, 5.3.0 to 5.7.0", "5.23.0"]
    text = " ".join(_page(get("/seams?distribution=torch")).text.split())
    assert "certain" not in text  # that is of transformers
    assert "since 2.10.0 or before (query" in text
    assert "without is_causal" in text
    page = _page(get("/seams?distribution=numpy"), 422)
    assert "There are transformers, torch." in page.text


def test_the_status(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, made, _ = demo
    page = _page(get("/status"))
    text = " ".join(page.text.split())
    assert "5 cells." in text
    assert f"{made.runs['running']} " in text
    assert " h200-4 " in text
    assert [(one["max"], one["value"]) for one in page.all("progress")] == [("18", "1")]
    for one in submissions.running(made.store):
        assert one.cell.name in text
        assert f"/runs/{one.run}" in page.links


def test_the_status_while_environments_are_made(store: Store, get: Get) -> None:
    run = store.new_run(OLD[:2])
    with store.writing() as connection:
        inserts.submit(connection, inserts.key(connection, run), "default", "", {})
    assert "No cell runs." in _page(get("/status")).text
    with store.writing() as connection:
        connection.execute(SUBMISSION.update().values(host="here"))
    assert "No cell runs yet: their environments are made first." in _page(get("/status")).text


def test_the_api_has_a_page(get: Get) -> None:
    text = " ".join(_page(get("/api")).text.split())
    for path, operations in get("/api/v1/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in text
    assert "A release such as 5.9.0, or 5.9 for any of its patches." in text
    assert "none, fa2, fa3, fa4, torch" in text
    assert "<code>next</code> of the page before." in get("/api").text


def test_what_stands_between_backticks_is_code() -> None:
    assert code("as of `adopt --store`, such as ``peft=0.18``: `a` b") == (
        "as of <code>adopt --store</code>, such as <code>peft=0.18</code>: <code>a</code> b"
    )
    assert code("one ` alone") == "one ` alone"
    made = str(code(f"`{HOSTILE}` {HOSTILE}"))
    assert "<script" not in made
    assert "<img" not in made
    assert not set(made) & {"\x1b", "\x07", "\x00"}


def test_the_document_of_the_api_has_every_schema_that_it_refers_to(get: Get) -> None:
    found = get("/api/v1/openapi.json")
    named = {*re.findall(r'"#/components/schemas/(.+?)"', found.text)}
    assert named <= found.json()["components"]["schemas"].keys()


def test_the_database_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(str(path)) as store:
        stored(store, [passed(OLD[0])])
        app = create_app(store, None, Settings())
        with served(app) as address:
            _page(requests.get(address, timeout=LONG))
            store.close()  # open connections of the pool would still answer
            kept = path.read_bytes()
            path.write_bytes(b"gone" * 1000)
            for page in ("/runs", "/?state=passed", "/status", f"/cells/{OLD[0]}", "/diff"):
                response = requests.get(address + page, timeout=LONG)
                assert "the database doesn't answer" in _page(response, 503).text
                assert response.headers["retry-after"] == "5"
                assert str(tmp_path) not in response.text
            path.write_bytes(kept)
            time.sleep(1.1)
            _page(requests.get(f"{address}/runs", timeout=LONG))


def test_reading_writes_nothing(demo: tuple[Get, service_demo.Demo, Store]) -> None:
    get, _, store = demo
    for path in ("/", "/runs", "/status"):
        assert requests.post(urljoin(get(path).url, path), timeout=LONG).status_code in (401, 403)
        head = requests.head(get(path).url, timeout=LONG)
        assert head.status_code == 200
    assert isinstance(store.runs()[0], Run)


# Flaky tests, known failures, figures, and parts of a run.


def _verdict(cell: Cell, verdict: Literal["flaky", "known"]) -> CellResult:
    tests = [Test("t.py::test_a", verdict, 0.1, "E   TimeoutError", (Figure("step time", 10.5, "ms", "lower"),))]
    return dataclasses.replace(passed(cell, tests=tests), verdict=verdict, reason=f"because {verdict}")


def test_flaky_and_known_are_told_everywhere(store: Store, get: Get, tmp_path: Path) -> None:
    flaky, known = OLD[:2]
    run = stored(store, [_verdict(flaky, "flaky"), _verdict(known, "known")])
    report.write(store, tmp_path / "site")
    for text in (get("/").text, (tmp_path / "site" / "index.html").read_text()):
        assert "a test failed, and passed when repeated" in text
        assert re.search(r'class="c flaky"[^>]*><i aria-hidden="true">~</i> flaky', text)
        assert re.search(r'class="c known"[^>]*><i aria-hidden="true">!</i> known', text)
        assert "because known" in text
    asked = get(f"/?transformers={flaky.transformers}&torch={flaky.torch}").text
    assert "It works, but a test is flaky" in asked
    assert "The nearest combination that works" not in asked
    assert (
        "It works but for failures that are known"
        in get(f"/?transformers={known.transformers}&torch={known.torch}").text
    )
    page = " ".join(_page(get(f"/cells/{flaky}")).text.split())
    assert "1 flaky" in page
    assert "10.5 ms, lower is better" in page
    assert "uPlot" not in get(f"/cells/{flaky}").text  # a single value is no line
    for text in (get("/runs").text, get(f"/runs/{run}").text):
        assert re.search(r'class="s known"', text)


def test_figures_are_tables_that_a_script_plots(store: Store, get: Get) -> None:
    for n in range(3):
        names = ("step time, fa4", "step time, torch")[: n + 1]
        figures = tuple(Figure(name, n + 0.125, "ms") for name in names)
        run = store.new_run([OLD[0]], label="nightly", revision=f"{n}" * 12)
        store.add(run, passed(OLD[0], tests=[Test("t", "passed", 0.1, figures=figures)]))
    text = get(f"/cells/{OLD[0]}").text
    assert "uPlot-1.6.32.iife.min.js" in text
    assert not re.search("[\N{LOWER ONE EIGHTH BLOCK}-\N{FULL BLOCK}]", text)
    plot = text.partition('<section class="plot">')[2].partition("</section>")[0]
    assert "step time, ms" in plot
    assert re.findall(r'<th scope="col"[^>]*>(.*?)</th>', plot) == ["run", "fa4", "torch"]
    assert [part for part, _ in re.findall(r'data-label="(\d+)\|([\d-]+)"', plot)] == ["2" * 8, "1" * 8, "0" * 8]
    assert re.findall(r'data-value="(.*?)"', plot) == ["2.125", "2.125", "1.125", "1.125", "0.125"]
    assert "<details open>" in plot  # without the script


def test_a_report_that_can_not_be_moved_leaves_the_older_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, [passed(OLD[0])])
    site = tmp_path / "site"
    report.write(store, site)
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(MatrixError, match="can't be written: No space left on device"):
        report.write(store, site)
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    assert [*tmp_path.glob(".site.*")] == []


def test_a_run_of_two_parts_leads_to_the_results_of_both(store: Store, get: Get, tmp_path: Path) -> None:
    runs = [stored(store, [failed(one)], label="sharded") for one in OLD[:2]]
    assert [store.run(one).whole for one in runs] == [runs[0], runs[0]]
    for run in runs:
        page = _page(get(f"/runs/{run}"))
        links = [one for one in page.links if one.startswith("/cells/")]
        assert len(links) == 2
        for link in links:
            assert get(link).status_code == 200
    assert "no two runs" in _page(get("/diff")).text
    report.write(store, tmp_path / "site", [runs[0]])
    for run in runs:
        text = shown(tmp_path / "site", f"runs/{run}.html")
        assert len(re.findall(r'href="\.\./cells/', text)) == 2

"""The pages in a real browser: Debian's Chromium, driven by Playwright, with axe for accessibility.

KERNEL_COMPAT_SCREENSHOTS=docs/service pytest tests/matrix/test_service_browser.py updates the documentation's
screenshots.
"""

from __future__ import annotations

import dataclasses
import lzma
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("fastapi", reason="the service needs kernel-compat-matrix[service]")
pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")

import service_demo
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright
from report_site import folder_served, shown
from served import served
from stored import cells, failed, passed, stored, unfinished
from waiting import LONG

from compat_matrix.axes import load
from compat_matrix.cells import Cell
from compat_matrix.pages import report
from compat_matrix.results import Figure, Test
from compat_matrix.service import tokens
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store, inserts, submissions

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

SCREENSHOTS = os.environ.get("KERNEL_COMPAT_SCREENSHOTS")

#: Includes axe's rules for best practices.
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]},
    "resultTypes": ["violations"],
}

#: The rules that other colours or another width can break.
LOOKS = {
    "runOnly": {
        "type": "rule",
        "values": ["color-contrast", "target-size", "scrollable-region-focusable", "link-in-text-block"],
    },
    "resultTypes": ["violations"],
}

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

#: The elements and the text of this page, and those of a text, without plots, and what is for browsers without JavaScript.
CONTENTS = """(text) => [document, new DOMParser().parseFromString(text, "text/html")].map((one) => {
    one.querySelectorAll("noscript, .plot > div, .zoom").forEach((hidden) => hidden.remove());
    const names = [...one.body.querySelectorAll("*")].map((element) => element.tagName);
    return [names.join(" "), one.body.textContent.replace(/\\s+/g, "")];
})"""

DOCS = Path(__file__).parents[2] / "docs"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=LONG * 1000)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, service_demo.Demo]]:
    folder = tmp_path_factory.mktemp("demo")
    with Store.open(str(folder / "store.db")) as store:
        made = service_demo.fill(store, folder)
        app = create_app(store, load(folder / "axes.toml"), Settings())
        with served(app) as address:
            yield address, made


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address in its own window; a message on the page's console fails the test."""
    contexts: list[BrowserContext] = []
    said: list[str] = []

    def failed_request(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left during the request
            said.append(f"{request.url}: {request.failure}")

    def open_page(address: str, **more: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP} | more)
        context.set_default_timeout(LONG * 1000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", failed_request)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def _addresses(made: service_demo.Demo) -> dict[str, str]:
    runs = made.runs
    return {
        "grid": "/",
        "answer": "/?transformers=5.23.1&torch=2.15.0&flash-attn=none",
        "grid-all": "/?flash-attn=all&python=all&only=transformers>=5.23",
        "grid-failed": "/?state=failed",
        "cell": "/cells/py312-tf5.23-torch2.15",
        "cell-running": f"/cells/{submissions.running(made.store)[0].cell}",
        "cell-refused": "/cells/py312-tf5.23-torch2.15-fa2-cuda",
        "runs": "/runs",
        "submit": "/submit?transformers=5.23&transformers=5.22&torch=2.15",
        "submit-refused": "/submit?only=torch==&torch=9&all=yes&suite=none",
        "sign-in": "/sign-in",
        "run": f"/runs/{runs['new']}",
        "run-running": f"/runs/{runs['running']}",
        "diff": f"/diff?old={runs['old']}&new={runs['new']}",
        "seams": "/seams",
        "types": "/types",
        "status": "/status",
        "api": "/api",
    }


@pytest.mark.parametrize(
    ("scheme", "size", "rules"),
    [("light", DESKTOP, RULES), ("dark", DESKTOP, LOOKS), ("dark", PHONE, LOOKS)],
    ids=["light", "dark", "phone"],
)
def test_every_page_is_accessible(
    open_page: Open, demo: tuple[str, service_demo.Demo], scheme: str, size: dict[str, int], rules: dict[str, Any]
) -> None:
    address, made = demo
    axe = Axe()
    page = open_page(address, color_scheme=scheme, viewport=size)
    for name, path in _addresses(made).items():
        page.goto(address + path)
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        found = axe.run(page, options=rules)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
        # Wide content scrolls within its own element.
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name


def test_an_error_is_accessible(browser: Browser, demo: tuple[str, service_demo.Demo]) -> None:
    address, _ = demo
    page = browser.new_page()
    for path in ("/nothing", "/?python=1", "/?transformers=five&torch=>2"):
        page.goto(address + path)
        assert Axe().run(page, options=RULES).violations_count == 0
    page.close()


def test_keys_alone(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    address, _ = demo
    page = open_page(address)

    def focused() -> str:
        return str(page.evaluate("document.activeElement.getAttribute('href') || document.activeElement.id"))

    page.keyboard.press("Tab")
    assert focused() == "#content"
    assert page.get_by_text("Skip to the content").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    while focused() != "#grid":
        page.keyboard.press("Tab")
    assert page.get_by_text("Skip to every cell").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        if focused().startswith("/cells/"):
            break
    assert focused() == "/cells/py312-tf5.23-torch2.15"
    for key, cell in (
        ("ArrowRight", "py312-tf5.23-torch2.14"),
        ("ArrowDown", "py312-tf5.22-torch2.14"),
        ("End", "py312-tf5.22-torch2.10"),
        ("ArrowRight", "py312-tf5.22-torch2.10"),
        ("ArrowUp", "py312-tf5.23-torch2.10"),
        ("ArrowLeft", "py312-tf5.23-torch2.11"),
        ("Home", "py312-tf5.23-torch2.15"),
        ("ArrowUp", "py312-tf5.23-torch2.15"),
    ):
        page.keyboard.press(key)
        assert focused() == f"/cells/{cell}", key
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/cells/py312-tf5.23-torch2.15")
    assert page.locator("h1").inner_text() == "py312-tf5.23-torch2.15"


def test_on_a_phone_the_releases_stay_in_sight(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    address, _ = demo
    page = open_page(address, viewport=PHONE)
    table = page.locator(".scroll:has(.grid)")
    release = page.locator(".grid tbody th").first
    before = release.bounding_box()
    assert table.evaluate("(one) => one.scrollWidth > one.clientWidth")
    page.locator(".grid tbody tr").first.locator("a").last.focus()
    assert table.evaluate("(one) => one.scrollLeft") > 100
    assert release.bounding_box()["x"] == before["x"]
    cell = page.evaluate("document.activeElement.getBoundingClientRect().toJSON()")
    assert cell["left"] >= before["x"] + before["width"] - 1
    assert cell["right"] <= PHONE["width"]


@pytest.mark.parametrize("path", ["/runs", "/"])
def test_on_a_phone_no_column_of_runs_and_no_range_is_lost(
    open_page: Open, demo: tuple[str, service_demo.Demo], path: str
) -> None:
    page = open_page(demo[0] + path, viewport=PHONE)
    wide = page.locator(".scroll:has(.runs), .line")
    assert wide.count() == (1 if path == "/runs" else 3)
    for one in wide.all():
        assert one.evaluate("(one) => one.scrollWidth <= one.clientWidth")
        for part in one.locator("a, .s, td, li").all():
            box = part.bounding_box()
            assert box is None or box["x"] + box["width"] <= PHONE["width"], part.inner_text()


def _with_figures(store: Store, runs: int) -> Cell:
    """A cell with a figure in each of some runs."""
    (cell,) = cells(["5.0"], ["2.11"])
    for n in range(runs):
        run = store.new_run([cell], revision=f"{n:08d}0000")
        values = {"fa4": n * 1e-6, "torch": 41.23456}
        figures = tuple(Figure(f"step time, {name}", value, "ms") for name, value in values.items())
        store.add(run, passed(cell, tests=[Test("t", "passed", 0.1, figures=figures)]))
    return cell


def test_on_a_phone_names_break_between_their_words(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    page = open_page(f"{demo[0]}/seams", viewport=PHONE)
    names = page.locator(".timeline th a, h3 code, th code").all()
    assert len(names) == 11
    for name in names:
        lines = name.evaluate(
            """(name) => [...name.childNodes].filter((one) => one.data).map((one) => {
                const range = document.createRange();
                range.selectNode(one);
                return range.getClientRects().length;
            })"""
        )
        assert {*lines} == {1}


def test_figures_are_plotted_with_commits_and_zoom(open_page: Open, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        cell = _with_figures(store, 40)
        with served(create_app(store, None, Settings())) as address:
            page = open_page(f"{address}/cells/{cell}")
            plot = page.locator(".plot .uplot")
            assert plot.count() == 1
            assert page.locator(".plot details").get_attribute("open") is None
            assert page.locator(".plot .u-label").all_inner_texts() == ["run", "fa4", "torch"]

            def shown() -> str:
                """What the plot says at its left end."""
                over = page.locator(".u-over")
                over.hover(position={"x": 30, "y": 50})
                return page.locator(".plot .u-value").first.inner_text()

            def painted() -> str:
                return str(page.locator(".uplot canvas").evaluate("(one) => one.toDataURL()"))

            assert shown().startswith("00000001")
            every, last = painted(), page.get_by_role("button", name="the last 10")
            last.focus()
            page.keyboard.press("Enter")
            assert shown().startswith("00000030")
            assert page.locator(".plot .u-value").all_inner_texts()[1:] == ["3e-5", "41.23"]
            assert painted() != every
            box = page.locator(".u-over").bounding_box()
            page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40)
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40, steps=5)
            page.mouse.up()
            assert shown()[:8] in ("00000035", "00000036")
            page.locator(".u-over").dblclick(position={"x": 60, "y": 60})
            page.mouse.move(0, 0)
            page.get_by_role("button", name="all 40").click()
            assert shown().startswith("00000001")
            light = painted()
            page.emulate_media(color_scheme="dark")
            page.wait_for_function(
                "(light) => document.querySelector('.uplot canvas').toDataURL() !== light", arg=light
            )
            assert plot.count() == 1
            assert Axe().run(page, options=RULES).violations_count == 0
            page.set_viewport_size(PHONE)
            while page.locator(".uplot").bounding_box()["width"] > PHONE["width"]:
                page.wait_for_timeout(50)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            # Without JavaScript the table has the values.
            page = open_page(f"{address}/cells/{cell}", java_script_enabled=False)
            row = page.locator(".plot tbody tr").first
            assert row.inner_text().split()[-3:] == ["00000039", "3.9e-05", "41.23"]
            assert row.is_visible()
            report.write(store, tmp_path / "site")
            page = open_page((tmp_path / "site" / "cells" / f"{cell}.html").as_uri())
            assert page.locator(".uplot canvas").count() == 1


def test_a_history_is_read_by_a_screen_reader(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    address, made = demo
    page = open_page(f"{address}/cells/py312-tf5.23-torch2.15")
    read = page.get_by_role("list", name="Results, the oldest first").aria_snapshot()
    links = re.findall(r'link "(\w+), ([\d-]+ [\d:]+ UTC), (\S+) nightly"', read)
    assert [(state, run) for state, _, run in links] == [("ok", made.runs["old"]), ("wrong", made.runs["new"])]


def test_without_javascript(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    address, made = demo
    page = open_page(address, java_script_enabled=False)
    page.get_by_label("Only").fill("transformers>=5.22 and torch==2.15")
    page.get_by_label("State").select_option("wrong")
    page.get_by_role("button", name="Show").click()
    assert (
        unquote(page.url).endswith("/?only=transformers>%3D5.22+and+torch%3D%3D2.15&state=wrong") or "only=" in page.url
    )
    assert page.locator(".grid a").count() == 2
    page.locator(".grid a").first.click()
    assert page.locator("h1").inner_text() == "py312-tf5.23-torch2.15"
    page.get_by_text("As plain text").click()
    assert "collected 87 items" in page.locator("body").inner_text()
    page.goto(f"{address}/runs")
    page.get_by_label("From").select_option(made.runs["old"])
    page.get_by_label("to", exact=True).select_option(made.runs["new"])
    page.get_by_role("button", name="What changed").click()
    assert "Broke: 10" in page.locator("main").inner_text()


def test_a_running_cell_ends_before_the_eyes_of_the_reader(open_page: Open, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        made = service_demo.fill(store, tmp_path)
        run = made.runs["running"]
        app = create_app(store, load(tmp_path / "axes.toml"), Settings())
        with served(app) as address:
            cell, second = unfinished(store, run)[-2:]
            service_demo.run_now(store, run, [cell])
            query = f"/?python={cell.python}"
            page = open_page(address + query)
            shown = page.locator(f".grid a[href='/cells/{cell}']")
            assert "running" in shown.get_attribute("aria-label")
            shown.focus()
            other = open_page(f"{address}/cells/{cell}")
            assert f"running in {run}" in " ".join(other.locator("main").inner_text().split())
            status = open_page(f"{address}/status")
            assert str(cell) in status.locator("main").inner_text()
            service_demo.report(store, run, service_demo.passed(cell, datetime.now(timezone.utc)))
            expect(shown).to_have_attribute(
                "aria-label",
                f"ok: transformers {cell.transformers}, torch {cell.torch}",
            )
            # The page isn't reloaded: the focus stays.
            assert page.evaluate("document.activeElement.getAttribute('href')") == f"/cells/{cell}"
            expect(other.locator(".verdict")).to_contain_text("ok")
            expect(other.locator("#activity")).to_have_count(0)
            expect(status.locator("main")).not_to_contain_text(cell.name)
            # Later changes are shown too.
            service_demo.run_now(store, run, [second])
            expect(page.locator(f".grid a[href='/cells/{second}']")).to_have_attribute(
                "aria-label", re.compile("running")
            )
            for one in (page, other, status):  # closed while the service still answers them
                one.context.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Store, str]]:
    """The address of a service with the demo's data, its store, and a token."""
    with Store.open(str(tmp_path / "store.db")) as store:
        service_demo.fill(store, tmp_path)
        secret = tokens.add(store, "me", ["submit"])
        with served(create_app(store, load(tmp_path / "axes.toml"), Settings())) as address:
            yield address, store, secret


@pytest.mark.parametrize("script", [True, False], ids=["script", "plain"])
def test_a_run_is_submitted_watched_and_cancelled_on_a_phone(
    browser: Browser, site: tuple[str, Store, str], script: bool
) -> None:
    address, store, secret = site
    before = [one.id for one in store.runs()]
    axe = Axe()
    with browser.new_context(viewport=PHONE, java_script_enabled=script) as context:
        context.set_default_timeout(LONG * 1000)
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda one: asked.append(f"{one.url} {one.headers}"))

        def check() -> None:
            assert page.locator("body").bounding_box()["width"] <= PHONE["width"]
            if script:
                found = axe.run(page, options=RULES)
                assert found.violations_count == 0, found.generate_report()
                assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]

        page.goto(f"{address}/runs")
        page.get_by_role("link", name="Submit a run").click()
        page.get_by_role("group", name="transformers").get_by_label("5.23").check()
        page.get_by_role("group", name="device").get_by_label("CPU").check()
        condition = page.get_by_label("Further condition")
        condition.fill("python==3.12 and (")
        if not script:
            page.get_by_role("button", name="Only show the cells").click()
        expect(page.locator("#only-error")).to_contain_text("this isn't a condition on cells")
        expect(page.locator("#planned")).to_have_text("Nothing can run yet: see above.")
        check()
        condition.fill("python==3.12")
        page.get_by_label("Label").fill("mine")
        if not script:
            page.get_by_role("button", name="Only show the cells").click()
        expect(page.locator("#only-error")).to_have_text("")
        expect(page.locator("#planned")).to_contain_text("6 cells would run.")
        expect(page.locator("#planned")).to_contain_text(
            "the median of the newest results of 6 of them. 1 run comes first."
        )
        assert "FlashAttention has kernels for CUDA alone" in page.locator("#plan").inner_text()
        check()
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_label("Token").fill(secret[1:])
        check()
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#token-error")).to_have_text("This token is wrong, has expired or was revoked.")
        check()
        page.get_by_label("Token").fill(secret)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/submit?*")
        expect(page.get_by_role("group", name="transformers").get_by_label("5.23")).to_be_checked()
        expect(page.get_by_label("Label")).to_have_value("mine")
        page.get_by_role("button", name="Run", exact=True).dblclick()
        page.wait_for_url("**/runs/2*")
        run = page.url.rpartition("/")[2]
        assert [one.id for one in store.runs()] == [run, *before]
        assert (store.run(run).label, len(unfinished(store, run))) == ("mine", 6)
        first, second = unfinished(store, run)[:2]
        service_demo.run_now(store, run, [first, second], log="collected 3 items")
        if not script:
            page.reload()
        expect(page.get_by_label(f"The end of the log of {first}")).to_have_text(
            "collected 3 items", timeout=LONG * 1000
        )
        service_demo.report(store, run, service_demo.passed(first, datetime.now(timezone.utc)))
        if not script:
            page.reload()
        expect(page.locator("#live")).to_contain_text("1 of 6 cells is done", timeout=LONG * 1000)
        check()
        page.get_by_text("Cancel this run").click()
        page.get_by_role("button", name="Yes, cancel it").click()
        expect(page.get_by_role("button", name="again")).to_be_visible()
        assert store.run(run).state == "interrupted"
        check()
        page.get_by_role("link", name="me").click()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("link", name="Sign in")).to_be_visible()
        assert secret not in "".join(asked) + page.content()


def test_a_run_ends_before_the_eyes_of_the_reader(open_page: Open, site: tuple[str, Store, str]) -> None:
    address, store, _ = site
    run = store.runs(1, state="running")[0].id
    page = open_page(f"{address}/runs/{run}")
    page.evaluate("window.same = true")
    page.get_by_text("Cancel this run").click()
    cells = unfinished(store, run)
    service_demo.run_now(store, run, cells[:1], log="another line")
    expect(page.locator("#live")).to_contain_text("another line", timeout=LONG * 1000)
    assert page.get_by_role("button", name="Yes, cancel it").is_visible()  # what was opened stays so
    for cell in cells:
        store.add(run, service_demo.passed(cell, datetime.now(timezone.utc)))
    with store.writing() as connection:
        submissions.remove(connection, inserts.key(connection, run))
        inserts.finish(connection, inserts.key(connection, run), "finished")
    expect(page.get_by_role("status")).to_contain_text("finished:", timeout=LONG * 1000)
    assert page.get_by_role("button", name="Yes, cancel it").count() == 0
    assert page.get_by_role("button", name="again").is_visible()
    assert page.evaluate("window.same") is True
    page.context.close()


def test_a_run_is_submitted_with_keys_alone(browser: Browser, site: tuple[str, Store, str]) -> None:
    address, store, secret = site
    with browser.new_context() as context:
        context.set_default_timeout(LONG * 1000)
        page = context.new_page()

        def tab_to(what: str) -> None:
            for _ in range(90):
                page.keyboard.press("Tab")
                name = "(document.activeElement.labels?.[0] ?? document.activeElement).innerText.trim()"
                if page.evaluate(name) == what:
                    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
                    return
            raise AssertionError(f"no key leads to {what}")

        page.goto(f"{address}/sign-in")
        tab_to("Token")
        page.keyboard.type(secret)
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs")
        page.goto(f"{address}/submit")
        tab_to("5.23")
        page.keyboard.press("Space")
        tab_to("2.15")
        page.keyboard.press("Space")
        expect(page.locator("#planned")).to_contain_text("6 cells would run")
        assert "2.15" in page.evaluate("document.activeElement.parentElement.innerText")  # the focus stays
        tab_to("Run")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/2*")
        assert store.runs()[0].command == "run '--only=transformers==5.23 and torch==2.15'"
        tab_to("Cancel this run")
        page.keyboard.press("Enter")
        tab_to("Yes, cancel it")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="again")).to_be_visible()


def test_an_open_page_ends_with_the_token(browser: Browser, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store, browser.new_context() as context:
        context.set_default_timeout(LONG * 1000)
        run = service_demo.fill(store, tmp_path).runs["running"]
        secret = tokens.add(store, "me", ["read"])
        with served(create_app(store, load(tmp_path / "axes.toml"), Settings(read="token"))) as address:
            page = context.new_page()
            page.goto(f"{address}/runs/{run}")
            page.get_by_label("Token").fill(secret)
            page.get_by_role("button", name="Sign in").click()
            expect(page.locator("#live")).to_contain_text("1 of 18 cells is done")
            tokens.revoke(store, "me")
            expect(page.get_by_label("Token")).to_be_visible(timeout=LONG * 1000)
            assert run not in page.locator("main").inner_text()
            page.close()


def test_a_form_of_another_site_does_nothing(browser: Browser, site: tuple[str, Store, str]) -> None:
    """The browser has a session, and sends its cookie with no form of another site; with a link it does."""
    address, store, secret = site
    before = [one.id for one in store.runs()]
    with browser.new_context() as context:
        context.set_default_timeout(LONG * 1000)
        page = context.new_page()
        page.goto(f"{address}/sign-in")
        page.get_by_label("Token").fill(secret)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/runs")
        assert page.evaluate("document.cookie") == ""  # no script reads it
        form = (
            f'<form action="{address}/runs" method="post"><input name="all" value="yes"><button>Win</button></form>'
            f'<a href="{address}/runs">Look</a>'
        )
        for origin in ("http://evil.example/", address.replace("127.0.0.1", "localhost") + "/evil"):
            page.route(origin, lambda route: route.fulfill(body=form, content_type="text/html"))
            page.goto(origin)
            page.get_by_role("button", name="Win").click()
            assert "this form was sent by another site" in page.locator("main").inner_text()
        page.goto("http://evil.example/")
        page.get_by_role("link", name="Look").click()
        expect(page.get_by_role("link", name="me")).to_be_visible()
        assert [one.id for one in store.runs()] == before


def test_the_question_on_a_phone(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    address, _ = demo
    page = open_page(address, viewport=PHONE)
    page.get_by_label("transformers", exact=True).fill("v5.9")
    page.get_by_text("or paste what is installed").click()
    page.get_by_label("pip freeze").fill("torch>=2.4\n")
    page.get_by_role("button", name="Check").click()
    assert page.locator("#text-error").inner_text() == "torch>=2.4 is a range: type the release that you have"
    assert page.get_by_label("pip freeze").input_value() == "torch>=2.4\n"
    page.get_by_label("pip freeze").fill("torch==2.11.0+cu130\n")
    page.get_by_role("button", name="Check").click()
    page.wait_for_url("**transformers=5.9**")
    assert "2 tested combinations work, 1 was never run, 3 are excluded" in page.locator("#answer").inner_text()
    # The reader's column is in sight, and at its place.
    assert page.locator(".grid thead th").nth(5).get_attribute("data-value") == "2.11"
    column = page.locator(".grid thead th.yours").bounding_box()
    releases = page.locator(".grid tbody th").first.bounding_box()
    assert column["x"] >= releases["x"] + releases["width"] - 1
    assert column["x"] + column["width"] <= PHONE["width"]
    # A field alone is a question, too.
    page.goto(address)
    page.get_by_label("flash-attn", exact=True).fill("flash-attn-4 4.0.0b36")
    page.get_by_role("button", name="Check").click()
    page.wait_for_url("**transformers=&flash-attn=fa4+4.0.0b36")
    assert "were never run" in page.locator("#answer").inner_text()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_report_works_without_a_server(open_page: Open, tmp_path: Path, size: dict[str, int]) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        made = service_demo.fill(store, tmp_path)
        report.write(store, tmp_path / "site", axes=load(tmp_path / "axes.toml"))
    index = (tmp_path / "site" / "index.html").as_uri()
    page = open_page(index, viewport=size)
    assert page.locator("h1").inner_text() == "Does my combination work?"
    page.get_by_label("transformers", exact=True).fill("v5.23.1")
    page.get_by_label("torch", exact=True).fill(">=2")
    page.get_by_role("button", name="Check").click()
    assert page.locator("#torch-error").inner_text().startswith("'>=2' is a range")
    assert page.get_by_label("torch", exact=True).input_value() == ">=2"
    page.get_by_label("torch", exact=True).fill("2.14.0+cu130")
    page.get_by_label("flash-attn", exact=True).fill("none")
    page.get_by_role("textbox", name="python").fill("3.12")
    page.keyboard.press("Enter")
    answer = page.locator("#answer").inner_text()
    assert "1 tested combination computes something else, 1 is excluded Exactly these" in " ".join(answer.split())
    assert page.locator(".grid thead th").nth(1).get_attribute("data-value") == "2.15"  # no column moves
    assert page.locator(".grid thead th.yours").get_attribute("data-value") == "2.14"
    assert page.locator(".grid td.yours").inner_text().split()[1] == "wrong"
    for kernel, marked in (("fa4", 0), ("", 3)):  # this is the grid of no FlashAttention
        page.get_by_label("flash-attn", exact=True).fill(kernel)
        page.keyboard.press("Enter")
        assert page.locator(".yours").count() == marked
        assert page.get_by_text("Its grid: FlashAttention-4, GPU, Python 3.12").count() == (kernel == "fa4")
    page.get_by_text("or paste what is installed").click()
    page.get_by_label("pip freeze").fill("torch==2.14.0\ntransformers==5.21.0\n")
    page.get_by_label("transformers", exact=True).fill("")
    page.get_by_label("torch", exact=True).fill("")
    page.get_by_role("button", name="Check").click()
    answer = " ".join(page.locator("#answer").inner_text().split())
    assert "The releases that were tested are below." in answer
    axe, rules = Axe(), RULES | {"preload": False}  # a page of a file can't read its own styles
    for path in ("index.html", "runs.html", "diff.html", "seams.html", "types.html", f"runs/{made.runs['new']}.html"):
        page.goto(f"{index.removesuffix('index.html')}{path}")
        found = axe.run(page, options=rules)
        assert found.violations_count == 0, f"{path}: {found.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], path
    page.goto(index)
    page.locator(".grid a").first.click()
    assert page.locator("h1").inner_text() == "py312-tf5.23-torch2.15"
    assert axe.run(page, options=rules).violations_count == 0
    page = open_page(index, java_script_enabled=False)
    assert page.locator("#ask").is_hidden()
    assert "Find its transformers and its torch in the grid." in page.locator("main").inner_text()


@pytest.mark.parametrize("below", ["file", "path"])
def test_the_published_site(open_page: Open, browser: Browser, tmp_path: Path, below: str) -> None:
    """The pages of the committed results, as files and below a path of a server."""
    site, results = tmp_path / "some" / "site", tmp_path / "results.sqlite"
    results.write_bytes(lzma.decompress((DOCS / "compatibility.sqlite.xz").read_bytes()))
    with Store.open(str(results), create=False) as store:
        report.write(store, site, axes=load(DOCS.parent / "matrix" / "axes.toml"))
    axe, rules = Axe(), RULES | {"preload": below == "path"}  # a page of a file can't read its own styles
    with folder_served(tmp_path) as address:
        first = f"{address}/some/site/index.html" if below == "path" else (site / "index.html").as_uri()
        root = first.removesuffix("index.html")
        page = open_page(first)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        # A page of each kind: the first page, the grid of a kernel, a cell with figures, one that has none, those of runs ...
        kinds = {re.sub(r"-.*|\d.*", "", str(path.relative_to(site))): path for path in sorted(site.rglob("*.html"))}
        for path in [*kinds.values(), max((site / "cells").iterdir(), key=lambda one: one.stat().st_size)]:
            name = path.relative_to(site).as_posix()
            page.goto(f"{root}{name}")
            page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            found = axe.run(page, options=rules)
            assert found.violations_count == 0, f"{name}: {found.generate_report()}"
            assert page.evaluate("document.documentElement.scrollWidth") <= DESKTOP["width"], name
            assert page.locator("template").count() == 0
            # What pages share is at its place.
            here, expected = page.evaluate(CONTENTS, shown(site, name))
            assert here == expected, name
        assert asked
        assert all(one.startswith(root) for one in asked)
        page.goto(first)
        page.get_by_label("transformers", exact=True).fill("5.9.1")
        page.get_by_label("torch", exact=True).fill("2.11.0")
        page.get_by_role("button", name="Check").click()
        assert "It was never run; it works with transformers 5.9.0" in page.locator("#answer").inner_text()
        page.locator("#answer a").first.click()
        assert page.locator("h1").inner_text().startswith("py312-tf5.9-torch2.11")
        page = open_page(page.url, java_script_enabled=False)
        assert "kernel-compat-matrix explain prints them." in " ".join(page.locator("main").inner_text().split())


def test_what_a_result_says_does_nothing(open_page: Open, tmp_path: Path) -> None:
    hostile = '<img src=x onerror=alert(1)><script>alert(1)</script>" autofocus onfocus=alert(1) x="'
    with Store.open(str(tmp_path / "store.db")) as store:
        (cell,) = cells(["5.0"], ["2.11"])
        result = dataclasses.replace(failed(cell, reason=hostile), log=hostile)
        stored(store, [result], label=hostile)
        with served(create_app(store, None, Settings())) as address:
            page = open_page(address)
            page.on("dialog", lambda dialog: pytest.fail(dialog.message))
            for path in ("/", f"/cells/{cell}", "/runs", f"/runs/{store.runs()[0].id}"):
                page.goto(address + path)
                assert page.locator("img").count() == 0
                assert hostile[:20] in page.locator("body").inner_text()


def test_the_screenshots(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    if not SCREENSHOTS:
        pytest.skip("KERNEL_COMPAT_SCREENSHOTS names no folder to write them into")
    address, made = demo
    folder = Path(SCREENSHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    at = _addresses(made)
    for name, path, scheme, size in (
        ("grid", at["grid"], "light", {"width": 1100, "height": 1150}),
        ("grid-dark", at["grid"], "dark", {"width": 1100, "height": 1150}),
        ("grid-phone", at["grid"], "light", {"width": 390, "height": 1500}),
        ("answer", at["answer"], "light", {"width": 1100, "height": 560}),
        ("answer-phone", at["answer"], "light", PHONE),
        ("cell", at["cell"], "light", {"width": 1100, "height": 1300}),
        ("diff", at["diff"], "light", {"width": 1100, "height": 560}),
        ("seams", at["seams"], "light", {"width": 1100, "height": 560}),
        ("status", at["status"], "light", {"width": 1100, "height": 460}),
        ("runs", at["runs"], "light", {"width": 1100, "height": 600}),
        ("runs-phone", at["runs"], "light", PHONE),
        ("submit", at["submit"], "light", {"width": 1100, "height": 1000}),
        ("run", at["run-running"], "light", {"width": 1100, "height": 620}),
    ):
        page = open_page(address + path, color_scheme=scheme, viewport=size)
        page.screenshot(path=folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size < 200_000


def test_a_thousand_cells_are_painted(open_page: Open, demo: tuple[str, service_demo.Demo]) -> None:
    """Only that they are painted: benchmarks measure how fast, because another load here would fail a bound."""
    address, _ = demo
    began = time.monotonic()
    page = open_page(f"{address}/?flash-attn=all&python=all")
    assert page.locator(".grid td a").count() > 1000
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert 0 < painted / 1000 < time.monotonic() - began

"""A report as a reader sees it: the pages with what they share, their links, and what they load."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

__all__ = ["Page", "folder_served", "pages_of", "shown"]

_SHARED = re.compile(r'<template data-lines="([^"]*)"></template>')


def shown(folder: Path, name: str) -> str:
    """The text of a page of a report, with the lines that it shares with others, as `lines.js` puts them in."""
    script = (folder / "lines.js").read_text(encoding="utf-8")
    lines = json.loads(script.removeprefix("const LINES = ").partition("\n];\n")[0] + "]")

    def put_in(match: re.Match[str]) -> str:
        found, following = [], 0
        for ahead, _, more in (one.partition("+") for one in match[1].split()):
            first = following + int(ahead)
            following = first + int(more or 0) + 1
            found += lines[first:following]
        return "".join(found)

    return _SHARED.sub(put_in, (folder / name).read_text(encoding="utf-8"))


class Page(HTMLParser):
    """A page's links and ids, and whether every table has a label."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.unscoped = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.scripts += [given.get("src") or "in the page"] if tag == "script" else []
        assert not [name for name in given if name.startswith("on") or name == "style"]
        self.links += [given[name] or "" for name in ("href", "src") if name in given]
        self.ids += [given["id"] or ""] if "id" in given else []
        self.labels += [given["aria-labelledby"] or ""] if "aria-labelledby" in given else []
        self.unscoped += tag == "th" and given.get("scope") not in ("row", "col")
        if tag not in ("meta", "link", "br", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def pages_of(folder: Path) -> dict[Path, Page]:
    """Every page of a report."""
    return {path: Page(shown(folder, str(path.relative_to(folder)))) for path in folder.rglob("*.html")}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(ConnectionError):  # the browser has left the page
            super().copyfile(source, outputfile)


@contextmanager
def folder_served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; yields the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()

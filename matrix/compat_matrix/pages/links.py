"""The addresses of pages: the only difference between a service and a folder of files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from urllib.parse import quote, urlencode

from ..cells import Cell
from .filters import Filters

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Links:
    """The addresses of a service. An empty one stands for a page that isn't there.

    Args:
        root: the path at which a proxy serves the service, such as /matrix.

    Attributes:
        live: whether a service answers, which updates pages and has the pages that `Files` lacks.
    """

    live = True

    def __init__(self, root: str = "") -> None:
        self.root = root.rstrip("/")

    def menu(self) -> dict[str, tuple[str, str]]:
        """The name and the address of the pages in the header, by template."""
        found = {
            "home": ("Matrix", self.home()),
            "runs": ("Runs", self.runs()),
            "diff": ("What changed", self.diff()),
            "seams": ("Seams", self.seams()),
            "types": ("Model types", self.types()),
            "status": ("Status", self.status()),
            "api": ("API", self.api()),
        }
        return {name: page for name, page in found.items() if page[1]}

    def static(self, name: str) -> str:
        """A file of the templates. The address changes with its content, so that clients may keep it forever."""
        return f"{self.root}/static/{name}?v={sha256(static_files()[name][0]).hexdigest()[:12]}"

    def home(self, filters: Filters | None = None) -> str:
        """The first page."""
        filters = filters or Filters()
        return f"{self.root}/{filters.query}"

    def check(self) -> str:
        """The address that reads the form of the first page."""
        return f"{self.root}/check"

    def cell(self, cell: Cell, run: str = "", attempt: int = 0) -> str:
        """The page of a cell, with its newest result or with the one of a run."""
        query = urlencode({"run": run} | ({"attempt": attempt} if attempt else {})) if run else ""
        return f"{self.root}/cells/{_quoted(cell.name)}" + (f"?{query}" if query else "")

    def log(self, cell: Cell, run: str, attempt: int) -> str:
        """The log of a result as plain text."""
        return f"{self.root}/cells/{_quoted(cell.name)}/log?{urlencode({'run': run, 'attempt': attempt})}"

    def runs(self, before: str = "") -> str:
        """The list of runs."""
        return f"{self.root}/runs" + (f"?{urlencode({'before': before})}" if before else "")

    def run(self, name: str) -> str:
        """The page of a run."""
        return f"{self.root}/runs/{_quoted(name)}"

    def diff(self, old: str = "", new: str = "") -> str:
        """The changes between two runs, or between the last two."""
        return f"{self.root}/runs/{_quoted(old)}...{_quoted(new)}" if old and new else f"{self.root}/diff"

    def seams(self, distribution: str = "") -> str:
        """The seams of a distribution over its releases."""
        return f"{self.root}/seams" + (f"?{urlencode({'distribution': distribution})}" if distribution else "")

    def types(self) -> str:
        """The proofs of the model types."""
        return f"{self.root}/types"

    def status(self) -> str:
        """What is running."""
        return f"{self.root}/status"

    def api(self) -> str:
        """The documentation of the API."""
        return f"{self.root}/api"

    def feed(self) -> str:
        """The feed of what broke."""
        return f"{self.root}/api/v1/feed.atom"


class Files(Links):
    """The addresses within a folder of files, which work from file://.

    Args:
        up: the way from the page to the folder: "" or "../".
        grids: the file of each grid, by its filters.
        results: the run and the attempt that the page of a cell shows.
        runs: the runs with a page, each with the id of the run that it is a part of.
        compared: the two runs that are compared.
        distributions: the distributions with seams, the first one first.
    """

    live = False

    def __init__(
        self,
        up: str,
        grids: Mapping[Filters, str],
        results: Mapping[Cell, tuple[str, int]],
        runs: Mapping[str, str],
        compared: Collection[str],
        distributions: Collection[str],
    ) -> None:
        super().__init__()
        self._up, self._grids, self._results = up, grids, results
        self._runs, self._compared, self._distributions = runs, compared, [*distributions]

    def static(self, name: str) -> str:
        """A file of the templates."""
        return f"{self._up}{name}"

    def home(self, filters: Filters | None = None) -> str:
        """The first page, for the filters that have a file."""
        filters = filters or Filters()
        return f"{self._up}{self._grids[filters]}" if filters in self._grids else ""

    def check(self) -> str:
        """There is nobody who reads the form: a script does."""
        return ""

    def cell(self, cell: Cell, run: str = "", attempt: int = 0) -> str:
        """The page of a cell that has a result."""
        shown = self._results.get(cell)
        if shown is None or (attempt and (run, attempt) != shown):
            return ""
        if run and self._runs.get(run, run) != self._runs.get(shown[0], shown[0]):
            return ""
        return f"{self._up}{file_name('cells/', cell.name)}"

    def log(self, cell: Cell, run: str, attempt: int) -> str:
        """A page has both ends of a log; the rest is in the store."""
        return ""

    def runs(self, before: str = "") -> str:
        """The list of runs."""
        return "" if before else f"{self._up}runs.html"

    def run(self, name: str) -> str:
        """The page of a run."""
        return f"{self._up}{file_name('runs/', name)}" if name in self._runs else ""

    def diff(self, old: str = "", new: str = "") -> str:
        """The changes between the last two runs that share cells."""
        return f"{self._up}diff.html" if not old or [old, new] == [*self._compared] else ""

    def seams(self, distribution: str = "") -> str:
        """The seams of a distribution; without any there is no page."""
        if distribution in self._distributions[1:]:
            return f"{self._up}{file_name('seams-', distribution)}"
        return f"{self._up}seams.html" if self._distributions else ""

    def types(self) -> str:
        """The proofs of the model types."""
        return f"{self._up}types.html"

    def status(self) -> str:
        """Nothing is running."""
        return ""

    def api(self) -> str:
        """There is no API."""
        return ""

    def feed(self) -> str:
        """There is no feed."""
        return ""


def file_name(begin: str, name: str) -> str:
    """The name of a file; whatever a store of unknown origin has in a name, it stays in the folder."""
    return begin + re.sub(r"[^\w.+=-]", "_", name, flags=re.ASCII) + ".html"


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """The files of the templates and their types, by name."""
    found = {}
    for file in files("compat_matrix").joinpath("pages/static").iterdir():
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind:
            found[file.name] = (file.read_bytes(), kind)
    return found


def _quoted(name: str) -> str:
    return quote(name, safe="")

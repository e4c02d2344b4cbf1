"""The addresses of pages, and the files that templates load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from urllib.parse import quote, urlencode

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Links:
    """The addresses of pages: those of a service, below the path of a proxy; or the files of a report, below the way to its folder.

    Args:
        report: the file of each address; None for a service.
    """

    def __init__(self, root: str = "", report: Mapping[str, str] | None = None) -> None:
        self.root, self._report = root.rstrip("/") if report is None else root, report

    @property
    def live(self) -> bool:
        """Whether a service answers, which updates pages and takes forms."""
        return self._report is None

    def __call__(self, /, *path: str, **query: object) -> str:
        """The address of a page by the parts of its path and its query without empty values; empty if a report lacks it."""
        given = urlencode({name: value for name, value in query.items() if value})
        address = "/" + "/".join(quote(part, safe="") for part in path) + (f"?{given}" if given else "")
        if self._report is None:
            return self.root + address
        return self.root + self._report[address] if address in self._report else ""

    def static(self, name: str) -> str:
        """A file of the templates. The address changes with its content, so that clients may keep it forever."""
        if self._report is not None:
            return self.root + name
        return f"{self.root}/static/{name}?v={sha256(static_files()[name][0]).hexdigest()[:12]}"


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

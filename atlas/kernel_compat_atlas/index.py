"""Package indexes: the files of a distribution and their locations."""

from __future__ import annotations

import configparser
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

import requests
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from platformdirs import PlatformDirs
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    NoSuchProjectError,
    ProjectPage,
    PyPISimple,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from .errors import AtlasError

#: The number of files that are read at a time.
THREADS = 16
#: Seconds to connect, and between two parts of a response.
TIMEOUT = (10, 60)


@dataclass(frozen=True)
class File:
    """A published file, as its index describes it."""

    filename: str
    url: str
    sha256: str | None = None
    requires_python: str | None = None
    yanked: bool = False
    uploaded: datetime | None = None

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel rather than an sdist."""
        return self.filename.endswith(".whl")

    @property
    def identity(self) -> tuple[NormalizedName, Version] | None:
        """The distribution and its version; None for a file that isn't a wheel or source distribution, or has an invalid name."""
        if not self.filename.endswith((".whl", ".tar.gz")):
            return None
        try:
            return parse_wheel_filename(self.filename)[:2] if self.is_wheel else parse_sdist_filename(self.filename)
        except (InvalidWheelFilename, InvalidSdistFilename):
            return None

    @property
    def local_path(self) -> Path | None:
        """Its path, if its URL is that of a local file; else None."""
        parts = urlsplit(self.url)
        return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


class Index:
    """All indexes that pip or uv would use, merged: the default index, extra ones, and folders of wheels."""

    def __init__(self) -> None:
        default = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or _pip("index-url")
        self._urls = [
            _index_url(default or PYPI_SIMPLE_ENDPOINT),
            *map(_index_url, _listed("UV_INDEX", "UV_EXTRA_INDEX_URL", pip="extra-index-url")),
        ]
        self._folders = _listed("UV_FIND_LINKS", pip="find-links")
        self.session = requests.Session()
        self.session.verify = os.environ.get("SSL_CERT_FILE") or _pip("cert") or True
        retry = Retry(3, connect=1, backoff_factor=0.3, status_forcelist=(429, 502, 503, 504), raise_on_status=False)
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs a warning at each retry
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=THREADS, max_retries=retry))

    def files(self, distribution: str) -> dict[Version, list[File]]:
        """The files of each release, oldest first.

        Raises:
            AtlasError: no index has it, or an index can't be reached.
        """
        there = [file for url in self._urls for file in self._page(url, distribution)]
        there += [file for folder in self._folders for file in _in_folder(folder)]
        found: dict[Version, list[File]] = {}
        for file in {one.filename: one for one in reversed(there)}.values():  # the first index counts
            if file.identity is not None and file.identity[0] == distribution:
                found.setdefault(file.identity[1], []).append(file)
        if not found:
            raise AtlasError(f"no release of {distribution} in {', '.join(map(shown, [*self._urls, *self._folders]))}")
        return dict(sorted(found.items()))

    def fetchable(self, file: File) -> str:
        """The address of a file, with the credentials of an index on the same host."""
        parts = urlsplit(file.url)
        for index in map(urlsplit, self._urls):
            host = index.netloc.rpartition("@")[2]
            if index.username and (index.scheme, host) == (parts.scheme, parts.netloc):
                return urlunsplit(parts._replace(netloc=index.netloc))
        return file.url

    def download(self, file: File, output: IO[bytes], started: Callable[[str], object] = str) -> None:
        """Write a whole file.

        Args:
            started: called with its size in words before it is fetched.

        Raises:
            AtlasError: it can't be fetched, or has another hash than `file`.
        """
        digest = hashlib.sha256()
        try:
            for chunk in self._chunks(file, started):
                digest.update(chunk)
                output.write(chunk)
        except requests.RequestException as error:
            raise AtlasError(f"{file.filename} can't be fetched: {reason(error)}") from error
        if file.sha256 not in (None, digest.hexdigest()):
            raise AtlasError(
                f"{file.filename} is not the file of its index: it has another sha256, {digest.hexdigest()}"
            )

    def _chunks(self, file: File, started: Callable[[str], object]) -> Iterator[bytes]:
        if file.local_path is not None:
            with file.local_path.open("rb") as content:
                yield from iter(partial(content.read, 1 << 20), b"")
            return
        with self.session.get(self.fetchable(file), stream=True, timeout=TIMEOUT) as response:
            response.raise_for_status()
            size = response.headers.get("Content-Length")
            started(f"{int(size) / 1e6:.1f} MB" if size else "of unknown size")
            yield from response.iter_content(1 << 20)

    def _page(self, index: str, distribution: str) -> list[File]:
        parts = urlsplit(index)
        try:
            if parts.scheme == "file":
                path = Path(url2pathname(parts.path), distribution, "index.html")
                page = ProjectPage.from_html(distribution, path.read_text("utf-8"), base_url=path.as_uri())
            else:
                page = PyPISimple(index, session=self.session).get_project_page(distribution, timeout=TIMEOUT)
        except (NoSuchProjectError, FileNotFoundError):
            return []
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError, ValueError) as error:
            what = type(error).__name__
            raise AtlasError(f"{shown(index)} has no readable page of {distribution} ({what})") from error
        except OSError as error:
            raise AtlasError(f"{shown(index)} can't be queried for {distribution}: {reason(error)}") from error
        return [
            File(
                package.filename,
                shown(package.url.partition("#")[0]),
                package.digests.get("sha256"),
                package.requires_python,
                package.is_yanked,
                package.upload_time,
            )
            for package in page.packages
        ]


def reason(error: OSError) -> str:
    """A short reason for an error; the messages of requests' errors may contain credentials."""
    if not isinstance(error, requests.RequestException):
        return str(error)
    if error.response is not None:
        return f"it responds with {error.response.status_code}"
    if isinstance(error, requests.exceptions.SSLError):
        return "its certificate isn't trusted"
    if isinstance(error, requests.Timeout):
        return "it doesn't respond in time"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return type(error).__name__


def shown(url: str) -> str:
    """An address without credentials."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _in_folder(folder: str) -> Iterator[File]:
    """The files in a folder of wheels. Pages of links aren't read."""
    path = Path(url2pathname(urlsplit(folder).path) if folder.startswith("file:") else folder)
    for entry in sorted(path.glob("*")) if path.is_dir() else ():
        yield File(entry.name, entry.absolute().as_uri())


def _index_url(text: str) -> str:
    """The address of an index as in pip's and uv's options: an address, ``name=address`` (uv), or a folder."""
    name, _, address = text.partition("=")
    url = address if name.replace("-", "").replace("_", "").isalnum() and address else text
    if "://" not in url:
        url = Path(url).absolute().as_uri()
    try:
        if urlsplit(url).scheme in ("http", "https", "file"):
            return url
    except ValueError:
        pass
    raise AtlasError("the configured address of a package index is invalid")


def _listed(*variables: str, pip: str) -> list[str]:
    values = [os.environ.get(variable, "") for variable in variables]
    return list(dict.fromkeys(" ".join([*values, _pip(pip)]).replace(",", " ").split()))


def _pip(option: str) -> str:
    """An option of pip, from the environment or its configuration files; empty if it isn't set."""
    value = os.environ.get("PIP_" + option.upper().replace("-", "_"))
    if value is not None:
        return value
    given = os.environ.get("PIP_CONFIG_FILE", "")
    system = PlatformDirs("pip", appauthor=False, multipath=True)
    sites = reversed(system.site_config_dir.split(os.pathsep))
    folders = [*sites, "/etc", f"{Path.home()}/.pip", system.user_config_dir, sys.prefix]
    paths = [*(f"{folder}/pip.conf" for folder in folders), given]
    parser = configparser.RawConfigParser()
    try:
        parser.read([] if given == os.devnull else paths, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise AtlasError(f"a configuration file of pip can't be read: {error}") from error
    # Of an option that has underscores, too, the last one counts.
    sections = [parser[section] for section in ("global", "install") if parser.has_section(section)]
    found = [value for section in sections for key, value in section.items() if key.replace("_", "-") == option]
    return found[-1] if found else ""

"""A folder of results that the service doesn't have yet. They survive the end of the worker and failures of the network."""

from __future__ import annotations

import re
import time
from pathlib import Path

from pydantic import ValidationError

from ..errors import MatrixError
from ..results import CellResult
from .protocol import Result

#: Seconds after which an incomplete result counts as abandoned.
_LEFT = 24 * 3600.0
_LEASE = re.compile(r"[A-Za-z0-9_-]{20,64}")


class UploadQueue:
    """Two files for each result, the log and then the result, named by the lease.

    Several workers may share a folder: a report that is sent twice counts once.

    Raises:
        MatrixError: the folder isn't writable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in [
                *folder.glob("*.part"),
                *folder.glob("*.log"),
            ]:  # left by a worker that was killed while writing
                if time.time() - path.stat().st_mtime > _LEFT and not path.with_suffix(".json").exists():
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise MatrixError(f"results can't be kept in {folder}: {error.strerror}") from None

    def put(self, lease: str, found: CellResult) -> None:
        """Store a result until it is dropped.

        Raises:
            MatrixError: it can't be written, for example because the disk is full.
        """
        part = self.folder / f"{lease}.part"
        try:
            self.log(lease).write_bytes(found.log.encode("utf-8", "surrogatepass"))
            part.write_text(Result.of(found).model_dump_json(exclude_unset=True), encoding="utf-8")
            part.replace(self._path(lease))
        except OSError as error:
            raise MatrixError(f"the result of {found.cell} can't be kept in {self.folder}: {error.strerror}") from None

    def leases(self) -> list[str]:
        """The leases that have a result, oldest first."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                found.append((path.stat().st_mtime, path.stem))
            except FileNotFoundError:  # another worker has sent it
                continue
        return [lease for _, lease in sorted(found) if _LEASE.fullmatch(lease)]

    def get(self, lease: str) -> Result | None:
        """A result; None if it has been dropped.

        Raises:
            MatrixError: it isn't a result of this version.
        """
        try:
            return Result.model_validate_json(self._path(lease).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise MatrixError(f"{self._path(lease)} isn't a result: {error.errors()[0]['msg']}") from None

    def log(self, lease: str) -> Path:
        """The path of a lease's log."""
        return self.folder / f"{lease}.log"

    def drop(self, lease: str) -> None:
        """Delete a result and its log."""
        self._path(lease).unlink(missing_ok=True)
        self.log(lease).unlink(missing_ok=True)

    def set_aside(self, lease: str) -> None:
        """Rename a result that the service refuses, so that it isn't sent again."""
        for path in (self._path(lease), self.log(lease)):
            if path.exists():
                path.replace(path.with_name(f"{path.name}.refused"))

    def _path(self, lease: str) -> Path:
        return self.folder / f"{lease}.json"

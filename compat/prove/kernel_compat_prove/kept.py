"""Proofs kept in the user's cache, found by one process of those that need them at a time.

A proof has no time limit and depends on nothing but its key, the code that is proven and what is installed. So every process has
the same verdict, whether it reads it or, on a node with a cache of its own, finds it. Which process proves is settled by a lock
and not by ranks: the rank with a certain number may load no model, and not every launcher gives numbers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .outcomes import Proof

__all__ = ["kept_or_made"]


def kept_or_made(key: str, make: Callable[[], Proof]) -> Proof:
    """The proof of a key: kept by an earlier process, or by one that this process has waited for, or made now.

    Args:
        key: a name for a file; proofs of the same key are equal.
        make: makes the proof.
    """
    folders = _folders()
    proof = _read(folders, key)
    if proof is None:
        with _locked(folders, key):
            proof = _read(folders, key)
            if proof is None:
                proof = Proof.from_json(make().to_json())  # as the others read it
                _keep(folders, key, proof)
    return proof


def _folders() -> list[Path]:
    """The user's cache, and the folder of this node for a cache that can't be written."""
    folders = []
    with suppress(RuntimeError):  # no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(cache / "kernel-compat" / "proofs")
    if hasattr(os, "getuid"):
        own = Path(tempfile.gettempdir()) / f"kernel-compat-{os.getuid()}"
        with suppress(OSError):
            own.mkdir(mode=0o700, exist_ok=True)
            status = own.lstat()
            # A folder that nobody else can write to.
            if status.st_uid == os.getuid() and status.st_mode & 0o170022 == 0o040000:
                folders.append(own)
    return folders


def _read(folders: list[Path], key: str) -> Proof | None:
    for folder in folders:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Proof.from_json(json.loads((folder / f"{key}.json").read_text()))
    return None


def _keep(folders: list[Path], key: str, proof: Proof) -> None:
    for folder in folders:
        written = folder / f"{key}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(proof.to_json()))
            written.replace(folder / f"{key}.json")
            return
        except OSError:
            with suppress(OSError):
                written.unlink()


@contextmanager
def _locked(folders: list[Path], key: str) -> Iterator[None]:
    """Hold the lock of a key, in the first folder that has locks. The kernel releases it when its holder dies.

    POSIX locks, which children don't inherit and NFS has.
    """
    with suppress(ImportError):
        import fcntl

        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = (folder / f"{key}.lock").open("a")
            except OSError:
                continue
            with file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX)
                except OSError:  # a file system without locks
                    continue
                yield
                return
    yield

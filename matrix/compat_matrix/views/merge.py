"""``kernel-compat-matrix merge``: copy the runs of other stores."""

from __future__ import annotations

import argparse

from ..store import Store


def run(arguments: argparse.Namespace) -> int:
    """Copy the missing runs and print their ids; returns the exit code."""
    with Store.open(arguments.store) as store:
        for url in arguments.stores:
            print(f"{url}: {', '.join(merge(store, url)) or 'nothing new'}")
    return 0


def merge(store: Store, path: str) -> list[str]:
    """Copy everything that a store lacks from another one; returns the ids of the copied runs.

    Args:
        path: the other store, which may be from anywhere: a file or a SQLAlchemy URL.

    Raises:
        MatrixError: it can't be read, or a part of it isn't valid. Then nothing has been copied.
    """
    with Store.open(path, create=False, foreign=True) as other:
        return store.merge(other)

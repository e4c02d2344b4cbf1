"""Imported by ``kernel_compat_run.pth`` as Python starts, where the environment variable is set.

It imports neither torch nor transformers: the settings are applied as soon as transformers has been imported, before any other code
uses it. Not as late as its models, which are half imported then, and not as late as a framework that reads its list of names. A setting that can't be honoured ends the process, because an exception here would be printed by `site` and
forgotten, and one in an import would be caught by code that can do without transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import ModuleType

import wrapt

from .settings import Settings
from .sources import VARIABLE, is_on, resolve

__all__ = ["ending", "start"]


def start(settings: Settings) -> None:
    """Have the settings applied once transformers is imported: now, where it has been."""
    wrapt.register_post_import_hook(partial(_imported, settings), "transformers")


def _imported(settings: Settings, module: ModuleType) -> None:
    with ending():
        line = _apply(settings.to_json())
    if _is_first_rank():
        print(line, file=sys.stderr, flush=True)


@cache
def _apply(text: str) -> str:
    """`apply`, once a process."""
    import json

    from .apply import apply

    return apply(Settings.of(json.loads(text)))


def _is_first_rank() -> bool:
    """Whether this process is rank 0, or none of several. A process of `multiprocessing` isn't first: its parent was."""
    for variable in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if rank := os.environ.get(variable):
            return rank == "0"
    process = sys.modules.get("multiprocessing.process")
    return process is None or process.current_process().name == "MainProcess"


@contextmanager
def ending() -> Iterator[None]:
    """Ends the process at an exception in the block: nothing may be trained without what was asked for."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            sys.stdout.flush()
        print(f"kernel-compat: error: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _start_of_process() -> None:
    value = os.environ.get(VARIABLE)
    if not is_on(value):
        return
    with ending():
        settings = resolve(variable=value).settings
        # Children may have another working directory.
        os.environ[VARIABLE] = settings.to_json()
        start(settings)


_start_of_process()

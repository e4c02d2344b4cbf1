"""Imported by ``kernel_compat_run.pth`` as Python starts, where the environment variable is set.

It imports neither torch nor transformers: the settings are applied as soon as transformers has been imported, before any other code
uses it. (With its models it would be too late: of a model that imports them a half is there, and frameworks have read their lists of
names.) A setting that can't be honoured ends the process, because an exception here would be printed by `site` and forgotten, and
one in an import would be caught by code that can do without transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

import wrapt

from .settings import Settings, SettingsError
from .sources import SHOWN, VARIABLE, Resolved, is_on, resolve, variables_of

__all__ = ["ending", "is_first_rank", "resolved", "start"]


class _Process:
    """The settings of this process, which are applied once."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        #: With their origins, where they are those of the environment variable.
        self.resolved: Resolved | None = None
        self.applied = False

    def start(self, settings: Settings) -> None:
        if self.settings is not None:
            if self.settings != settings:
                raise SettingsError(
                    f"this process has other settings already: {self.settings.to_json()}, and not {settings.to_json()}"
                )
            return
        self.settings = settings
        os.environ.update({**variables_of(settings, os.environ), VARIABLE: settings.to_json()})
        wrapt.register_post_import_hook(self.apply, "transformers")
        if settings.context_parallel is not None:  # which an `Accelerator` reads as it is made
            wrapt.register_post_import_hook(self.apply, "accelerate")

    def apply(self, module: ModuleType) -> None:
        if self.settings is None or self.applied:
            return
        self.applied = True  # before it imports the other module
        with ending():
            from .apply import apply

            line = apply(self.settings)
        if is_first_rank() and SHOWN not in os.environ:
            os.environ[SHOWN] = "1"
            print(line, file=sys.stderr, flush=True)


_process = _Process()


def start(settings: Settings) -> None:
    """Have settings applied in this process and its children once transformers is imported: now, where it has been.

    Raises:
        SettingsError: the process has other settings already, or its environment variables contradict them.
    """
    _process.start(settings)


def resolved() -> Resolved | None:
    """The settings that the environment variable had as this process started, None for none: `start` replaces its value."""
    return _process.resolved


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


def is_first_rank() -> bool:
    """Whether this process is rank 0, or none of several. A process of `multiprocessing` isn't first: its parent was."""
    for variable in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if rank := os.environ.get(variable):
            return rank == "0"
    process = sys.modules.get("multiprocessing.process")
    return process is None or process.current_process().name == "MainProcess"


def _start_of_process() -> None:
    value = os.environ.get(VARIABLE)
    if is_on(value):
        with ending():
            resolved = resolve(variable=value)
            start(resolved.settings)
            _process.resolved = resolved


_start_of_process()

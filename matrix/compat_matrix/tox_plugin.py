"""A tox plugin: `tox -e py311-tf5.23-torch2.15` runs that cell in the same environment as `kernel-compat-matrix run`.

Arguments after ``--`` go to pytest. tox creates no environment of its own for a cell.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.config.types import Command, EnvList
from tox.execute.local_sub_process import LocalSubProcessExecutor
from tox.plugin import impl
from tox.report import HandledError
from tox.session.state import State
from tox.tox_env.api import ToxEnv
from tox.tox_env.installer import Installer
from tox.tox_env.package import Package
from tox.tox_env.register import ToxEnvRegister
from tox.tox_env.runner import RunToxEnv

from .axes import Axes, load
from .errors import MatrixError
from .options import axes_in

_RUNNER = "kernel-compat-matrix"


class CellEnv(RunToxEnv):
    """A tox environment that runs a command and installs nothing."""

    @staticmethod
    def id() -> str:
        """The name of this kind of environment."""
        return _RUNNER

    @property
    def executor(self) -> LocalSubProcessExecutor:
        """Runs commands as processes of this machine."""
        return LocalSubProcessExecutor(self.options.is_colored)

    @property
    def installer(self) -> Installer[ToxEnv]:
        """Installs nothing."""
        return _Nothing(self)

    @property
    def runs_on_platform(self) -> str:
        """This platform."""
        return sys.platform

    def _register_package_conf(self) -> bool:
        return False

    def _build_packages(self) -> list[Package]:
        return []

    @property
    def _package_tox_env_type(self) -> str:
        return "virtualenv-pep-517"

    @property
    def _external_pkg_tox_env_type(self) -> str:
        return "virtualenv-cmd-builder"


class _Nothing(Installer[ToxEnv]):
    def _register_config(self) -> None:
        pass

    def installed(self) -> list[str]:
        return []

    def install(self, arguments: Any, section: str, of_type: str) -> None:
        pass


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Register the environments of cells; the default of other environments stays."""
    default = register.default_env_runner
    register.add_run_env(CellEnv)
    if default:
        register.default_env_runner = default


@impl
def tox_extend_envs() -> Iterable[str]:
    """The names of the cells."""
    axes = axes_of()
    return [cell.name for cell in axes.cells] if axes else []


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Configure an environment for each cell."""
    axes = axes_of()
    if axes is None:
        return
    if getattr(state.conf.options, "list_envs", False):
        # `tox -l` lists the default environments, not the whole matrix.
        cells = EnvList([*_configured(core_conf, state), *(cell.name for cell in axes.cells)])
        core_conf.loaders.insert(0, MemoryLoader(env_list=cells))
    more = state.conf.pos_args(None)
    for cell in axes.cells:
        command = [sys.executable, "-m", "compat_matrix", "run", "--axes", str(axes.path), cell.name]
        if more:
            command.append(f"--pytest={shlex.join(more)}")
        loader = MemoryLoader(
            runner=_RUNNER,
            description="a cell of the matrix",
            commands=[Command(command)],
            change_dir=axes.folder,
            pass_env=["*"],
            allowlist_externals=[sys.executable],
        )
        state.conf.memory_seed_loaders[cell.name].append(loader)


def _configured(core_conf: ConfigSet, state: State) -> list[str]:
    """The environments in the project's own tox configuration."""
    for loader in core_conf.loaders:
        with suppress(KeyError):
            found = loader.load_raw("env_list", state.conf, None)
            return found if isinstance(found, list) else re.split(r"[\s,]+", str(found).strip())
    return []


@cache
def axes_of() -> Axes | None:
    """The axes of the project around the current folder; None if there are none."""
    here = Path.cwd()
    try:
        return next((load(path) for folder in (here, *here.parents) if (path := axes_in(folder))), None)
    except MatrixError as error:
        raise HandledError(str(error)) from None

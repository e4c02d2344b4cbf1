"""A tox plugin: `tox -e py311-tf5.23-torch2.15` runs that cell in the same environment as `kernel-compat-matrix run`."""

import shlex
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.config.types import Command
from tox.execute.local_sub_process import LocalSubProcessExecutor
from tox.plugin import impl
from tox.report import HandledError
from tox.session.state import State
from tox.tox_env.api import ToxEnv
from tox.tox_env.installer import Installer
from tox.tox_env.package import Package
from tox.tox_env.register import ToxEnvRegister
from tox.tox_env.runner import RunToxEnv

from .axes import Axes, axes_in, load
from .errors import MatrixError


class CellEnv(RunToxEnv):
    """A tox environment that runs a command and installs nothing."""

    runs_on_platform = sys.platform
    # Only environments with packages have these.
    installer: Installer[ToxEnv] = NotImplemented
    _package_tox_env_type = _external_pkg_tox_env_type = ""

    @staticmethod
    def id() -> str:
        """The name of this kind of environment."""
        return "kernel-compat-matrix"

    @property
    def executor(self) -> LocalSubProcessExecutor:
        """Runs commands as processes of this machine."""
        return LocalSubProcessExecutor(self.options.is_colored)

    def _register_package_conf(self) -> bool:
        return False

    def _build_packages(self) -> list[Package]:
        return []


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Register the environments of cells."""
    register.add_run_env(CellEnv)


@impl
def tox_extend_envs() -> Iterable[str]:
    """The names of the cells."""
    return [*cells()]


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Configure an environment for each cell."""
    more = shlex.join(state.conf.pos_args(None) or ())
    for name, axes in cells().items():
        command = [sys.executable, "-m", "compat_matrix", "run", "--axes", str(axes.path), name]
        loader = MemoryLoader(
            runner=CellEnv.id(),
            description="a cell of the matrix",
            commands=[Command([*command, f"--pytest={more}"])],
            change_dir=axes.folder,
            pass_env=["*"],
            allowlist_externals=[sys.executable],
        )
        state.conf.memory_seed_loaders[name].append(loader)


@cache
def cells() -> dict[str, Axes]:
    """The cells of the project around the current folder, by name, with its axes; none if there are none."""
    here = Path.cwd()
    path = next(filter(None, map(axes_in, (here, *here.parents))), None)
    try:
        axes = load(path) if path else None
    except MatrixError as error:
        raise HandledError(str(error)) from None
    return {cell.name: axes for cell in axes.cells} if axes else {}

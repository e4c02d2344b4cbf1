"""Where settings come from: options, the environment variable, and a file of the working directory, in this order."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .settings import Settings, SettingsError

__all__ = ["SHOWN", "VARIABLE", "Resolved", "is_on", "resolve", "variables_of"]

#: The environment variable that turns this package on: ``1``, the path of a file, or the settings as YAML on one line.
VARIABLE = "KERNEL_COMPAT"

#: Set once the line of what was installed has been printed, so that the children of a launcher that imports transformers don't repeat it.
SHOWN = "KERNEL_COMPAT_SHOWN"

#: What the names of accelerate's variables begin with.
_SIZES = "PARALLELISM_CONFIG"

#: The files that are read in the working directory; the other one's settings are in its table ``tool.kernel-compat``.
YAML, TOML = "kernel-compat.yaml", "pyproject.toml"


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each of them is from.

    Attributes:
        settings: the settings.
        origins: for each setting that has a value in one of them, the option, the variable or the file that the value is from.
        file: the file that was read; None for none.
    """

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None = None


def is_on(value: str | None) -> bool:
    """Whether a value of the environment variable, None for no value, turns this package on. ``start.pth`` has the same test."""
    return value not in (None, "", "0")


def resolve(
    options: Mapping[str, Any] | None = None, variable: str | None = None, folder: Path | None = None
) -> Resolved:
    """The settings of a run: each from the first that has it, an option, the environment variable or the file.

    A variable that has settings or the path of a file is in the place of the file in the working directory, not beside it.

    Args:
        options: settings by name, for those of a command line.
        variable: the value of the environment variable; None or ``1`` for the file alone.
        folder: the working directory; default: that of the process.

    Raises:
        SettingsError: a file can't be read, there are two, or a setting is unknown or has a value that it can't have.
    """
    folder = folder or Path.cwd()
    base, file, where, values = _base(variable, folder)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer, relative_to in ((where, values, base), ("", options, folder)):
        settings = _absolute(Settings.of(layer, origin or "options"), relative_to)
        for name in (name for name, value in (layer or {}).items() if value is not None):
            merged[name] = getattr(settings, name)
            origins[name] = origin or f"--{name.replace('_', '-')}"
    return Resolved(Settings(**merged), origins, file)


def _base(variable: str | None, folder: Path) -> tuple[Path, Path | None, str, Any]:
    """What options are put over: the folder of its paths, its file, the words for it, and its settings."""
    if is_on(variable) and variable is not None and variable != "1":
        if not (folder / variable).is_file():
            _require_inline(variable)
            where = f"the variable {VARIABLE}"
            return folder, None, where, _parse(variable, where)
        file: Path | None = folder / variable
    else:
        file = _file_in(folder)
    if file is None:
        return folder, None, "", None
    return file.parent, file, str(file), _read(file)


def variables_of(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables by which accelerate makes the ``ParallelismConfig`` of settings with numbers of ranks.

    Args:
        settings: the settings.
        environment: the variables that are set.

    Raises:
        SettingsError: one of them has another value.
    """
    if not isinstance(settings.context_parallel, tuple):
        return {}
    keys, heads = map(str, settings.context_parallel)
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", f"{_SIZES}_CP_SIZE": keys, f"{_SIZES}_SP_SIZE": heads}
    for name, value in variables.items():
        if environment.get(name, value) != value:
            raise SettingsError(f"context_parallel is {keys}x{heads}, and the variable {name} is {environment[name]}")
    return variables


def _require_inline(variable: str) -> None:
    if not variable.lstrip().startswith("{") and ": " not in variable and "\n" not in variable:
        raise SettingsError(
            f"the variable {VARIABLE} is {variable!r}: there is no such file, and it is neither 1 nor settings as YAML, such as "
            "'padding_free: true'"
        )


def _file_in(folder: Path) -> Path | None:
    """The file with settings in a folder; None for none."""
    own, project = folder / YAML, folder / TOML
    in_project = project.is_file() and _table(project) is not None
    if own.is_file() and in_project:
        raise SettingsError(f"{own} and {project} both have settings: keep them in one of the two")
    return own if own.is_file() else project if in_project else None


def _read(file: Path) -> Any:
    if file.suffix == ".toml":
        return _table(file)
    try:
        return _parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} can't be read: {error}") from None


def _table(file: Path) -> Any:
    """The table ``tool.kernel-compat`` of a TOML file; None for none."""
    try:
        text = file.read_text(encoding="utf-8")
        if "kernel-compat" not in text:
            return None
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        return tomllib.loads(text).get("tool", {}).get("kernel-compat")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} can't be read: {error}") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)  # the form that `kernel-compat run` sets, without the import of yaml
    except ValueError:
        import yaml

        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            raise SettingsError(f"{where} is no YAML: {error}") from None


def _absolute(settings: Settings, base: Path) -> Settings:
    """Settings whose file of ops doesn't depend on the working directory."""
    if settings.ops in (None, "auto"):
        return settings
    return Settings(**{**settings.values(), "ops": str(base.absolute() / settings.ops)})

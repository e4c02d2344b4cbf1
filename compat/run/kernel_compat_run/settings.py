"""The settings of a run: one schema for the options, the environment variable and the file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kernel_compat.errors import KernelCompatError

__all__ = ["Settings", "SettingsError"]

#: The values of `Settings.unproven`, those of ``kernel_compat.install(unproven=...)``.
UNPROVEN = ("warn", "refuse", "allow")
#: The words for `Settings.context_parallel`; otherwise it is numbers of ranks.
GROUPS = ("accelerate", "world")


class SettingsError(KernelCompatError, ValueError):
    """A setting that doesn't exist or has a value that it can't have; the message names it, where it is, and the choices."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is installed in every process of a run.

    Examples:
        >>> Settings.of({"attention": {"my_flash": "flash_attention_4,auto"}, "padding_free": True}).to_json()
        '{"attention": {"my_flash": ["flash_attention_4", "auto"]}, "padding_free": true}'

    Attributes:
        attention: attention names with their kernels, of which each call gets the first that computes it. Without any:
            ``kernel_compat``, for any kernel, and ``kernel_compat_KERNEL`` for each.
        ops: the YAML file of an `OpsConfig`, or ``auto``, which is applied to each model that is built; None for none.
        padding_free: whether models under the names compute padded batches without their padding.
        context_parallel: the ranks that sequences are spread over, under all of the names: ``accelerate``, those of its
            ``ParallelismConfig``; ``world``, all, each of which gets the slice of its rank; N, or (N, M): a ``ParallelismConfig``
            with so many ranks along which keys travel and that share heads. None for none.
        unproven: as of ``kernel_compat.install``.
    """

    attention: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ops: str | None = None
    padding_free: bool = False
    context_parallel: str | tuple[int, int] | None = None
    unproven: str | None = None

    @classmethod
    def of(cls, values: Any, where: str = "the settings") -> Settings:
        """From a mapping, as it is in a file.

        Args:
            values: the settings by name.
            where: where they are from, for messages.

        Raises:
            SettingsError: they are no mapping, or a setting is unknown or has a value that it can't have.
        """
        if values is None:
            return cls()
        if not isinstance(values, Mapping):
            raise SettingsError(f"{where} is no mapping of settings, but {values!r}: there are {_listed(_NAMES)}")
        checked: dict[str, Any] = {}
        for name, value in values.items():
            if name not in _CHECKS:
                near = difflib.get_close_matches(str(name).replace("-", "_"), _NAMES, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise SettingsError(f"{where}: {name!r} is no setting: there are {_listed(_NAMES)}{hint}")
            if value is not None:
                try:
                    checked[name] = _CHECKS[name](value)
                except ValueError as error:
                    raise SettingsError(f"{where}: {name} {error}") from None
        return cls(**checked)

    def values(self) -> dict[str, Any]:
        """The settings that don't have their default, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in ({}, None, False)}

    def to_json(self) -> str:
        """The settings on one line, which is YAML, too."""
        return json.dumps(self.values())


def _listed(words: Any) -> str:
    return ", ".join(words)


def _attention(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"is a mapping of attention names to kernels, not {value!r}")
    return {str(name): _kernels(str(name), kernels) for name, kernels in value.items()}


def _kernels(name: str, value: Any) -> tuple[str, ...]:
    kernels = value.split(",") if isinstance(value, str) else value
    if not isinstance(kernels, (list, tuple)) or not all(isinstance(kernel, str) for kernel in kernels):
        raise ValueError(f"{name!r} has the name of a kernel, or several, not {value!r}")
    kernels = tuple(kernel.strip() for kernel in kernels)
    if not all(kernels):
        raise ValueError(f"{name!r} has no kernel: name one, several with commas between them, or 'auto'")
    return kernels


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"is the path of a file or 'auto', not {value!r}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"is true or false, not {value!r}")
    return value


def _ranks(value: Any) -> str | tuple[int, int] | None:
    """The words as they are; ``N``, ``NxM`` and lists of one or two numbers as two numbers."""
    if value is False:
        return None
    if value is True or value in GROUPS:
        return GROUPS[0] if value is True else str(value)
    if isinstance(value, str) and re.fullmatch(r"\d+(x\d+)?", value):
        value = [int(number) for number in value.split("x")]
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if len(numbers) not in (1, 2) or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"is {', '.join(GROUPS)}, a number of ranks N, or two, NxM, not {value!r}")
    keys, heads = (*numbers, 1)[:2]
    if keys < 2:
        raise ValueError(f"has {keys} rank along which keys travel: it takes 2 or more")
    return keys, heads


def _unproven(value: Any) -> str:
    if value not in UNPROVEN:
        raise ValueError(f"is {', '.join(UNPROVEN)}, not {value!r}")
    return str(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "attention": _attention,
    "ops": _text,
    "padding_free": _flag,
    "context_parallel": _ranks,
    "unproven": _unproven,
}
_NAMES = tuple(_CHECKS)

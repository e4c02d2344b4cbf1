"""Attention names, the strings of ``attn_implementation=``, and the kernel that each is bound to."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ..environment import Environment
from ..kernels import Kernel, as_kernel, known_kernels
from .sequence_parallel.ulysses import process_group

__all__ = ["UPSTREAM", "AttentionName", "AttentionRegistry", "Tables", "check_name", "upstream_owner"]

#: Names that transformers has had itself on any supported release; ``flash_attention_4`` came with 5.4.
UPSTREAM = frozenset(
    {
        "eager",
        "sdpa",
        "flex_attention",
        "flash_attention_2",
        "flash_attention_3",
        "paged_attention",
        "sdpa_paged",
        "eager_paged",
    }
)


@dataclass(frozen=True, eq=False)
class AttentionName:
    """A registered name. Equal to itself alone: a forward need not be hashable.

    Attributes:
        name: the value of ``attn_implementation=``.
        kernel: computes it.
        forward: the attention function transformers calls; None for the library's own.
        mask: the mask function transformers calls; None for the library's own.
        override: whether it may replace a name that transformers has itself.
        builtin: whether the library registered it itself.
        handles_context_parallel: whether it is right under context parallelism.
        sequence_parallel: the group that `ulysses` spreads the forward over, None for the default one; False for none.
    """

    name: str
    kernel: Kernel
    forward: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    override: bool = False
    builtin: bool = False
    handles_context_parallel: bool = False
    sequence_parallel: Any = False

    @property
    def spreads(self) -> bool:
        """Whether the tokens of a sequence are spread over ranks."""
        return self.sequence_parallel is not False or hasattr(self.forward, "ulysses_group")

    def same_as(self, other: AttentionName) -> bool:
        """Whether both were registered with the same arguments."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))


class Tables(Protocol):
    """Where a registry enters its names while it is attached."""

    def add(self, entry: AttentionName) -> str | None:
        """Enter a name; returns why not, where another project has entered it."""

    def remove(self, entry: AttentionName) -> None:
        """Withdraw a name."""


class AttentionRegistry:
    """Attention names by registration, and their entries in the tables that the registry is attached to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[str, AttentionName] = {}
        self._builtins: dict[str, AttentionName] = {}
        self._tables: Tables | None = None
        self._entered: dict[str, AttentionName] = {}
        self._refused: dict[str, str] = {}

    def register(
        self,
        name: str,
        kernel: str | Kernel | Any,
        forward: Callable[..., Any] | None = None,
        mask: Callable[..., Any] | None = None,
        *,
        override: bool = False,
        handles_context_parallel: bool = False,
        sequence_parallel: Any = False,
    ) -> None:
        """`kernel_compat.register_attention` for this registry."""
        check_name(name)
        for argument, value in (("forward", forward), ("mask", mask)):
            if value is not None and not callable(value):
                raise TypeError(f"{argument} must be callable or None, not {value!r}")
        if sequence_parallel is True:
            sequence_parallel = None
        if sequence_parallel is not False:
            process_group(sequence_parallel)
        entry = AttentionName(
            name,
            as_kernel(kernel),
            forward,
            mask,
            override,
            handles_context_parallel=handles_context_parallel,
            sequence_parallel=sequence_parallel,
        )
        with self._lock:
            previous = self._names.get(name)
            if not override:
                if previous is not None and not previous.builtin and not previous.same_as(entry):
                    raise ValueError(f"{name!r} is registered already; pass override=True to replace it")
                if owner := upstream_owner(name):
                    raise ValueError(f"{name!r} belongs to {owner}; pass override=True to replace it")
            if "flash" not in name:
                warnings.warn(
                    f"{name!r} has no 'flash' in it: from transformers 5.0 on, models take their non-flash code paths "
                    "for such a name (4D masks, vision towers in chunks). Choose a name that contains 'flash'.",
                    stacklevel=3,  # the caller of register_attention
                )
            self._put(name, entry)
            if problem := self._refused.get(name):
                self._put(name, previous)
                raise ValueError(f"{name!r} {problem}; pass override=True to replace it")

    def unregister(self, name: str) -> None:
        """`kernel_compat.unregister_attention` for this registry."""
        with self._lock:
            if name not in self._names:
                raise ValueError(f"{name!r} is not registered; registered are: {', '.join(self._names) or 'none'}")
            if self._names[name].builtin:
                raise ValueError(f"{name!r} is the library's own and goes with uninstall()")
            self._put(name, None)

    def names(self) -> dict[str, AttentionName]:
        """The entries by name, in the order of registration."""
        with self._lock:
            return dict(self._names)

    def resolve(self, name: object) -> AttentionName | None:
        """`kernel_compat.attention.defaults.resolve` for this registry."""
        return self._entered.get(name.removeprefix("paged|")) if isinstance(name, str) else None

    def states(self, waiting: str) -> dict[str, str]:
        """By name: available, why the tables don't have it, or `waiting` while the registry is attached to none."""
        with self._lock:
            return {
                name: "available" if name in self._entered else self._refused.get(name, waiting) for name in self._names
            }

    def attach(self, tables: Tables, environment: Environment) -> None:
        """Register the kernels' own names, and enter every name in `tables`, later ones too until `detach`."""
        with self._lock:
            if self._tables is None:
                # `flash_attention_reference` everywhere, `flash_attention_4` before transformers 5.4.
                self._builtins = {
                    name: AttentionName(name, kernel, builtin=True)
                    for name, kernel in known_kernels().items()
                    if upstream_owner(name, environment) is None
                }
            self._tables = tables
            self._enter()

    def detach(self) -> None:
        """Withdraw every name from the tables, and forget the kernels' own."""
        with self._lock:
            for entry in reversed(list(self._entered.values())):
                if self._tables is not None:
                    self._tables.remove(entry)
            self._names = {name: entry for name, entry in self._names.items() if not entry.builtin}
            self._tables, self._builtins, self._entered, self._refused = None, {}, {}, {}

    def _put(self, name: str, entry: AttentionName | None) -> None:
        """Replace the entry of a name, None for none, here and in the tables."""
        if self._tables is not None and (entered := self._entered.pop(name, None)):
            self._tables.remove(entered)
        self._refused.pop(name, None)
        if entry is None:
            self._names.pop(name, None)
        else:
            self._names[name] = entry
        self._enter()

    def _enter(self) -> None:
        if self._tables is None:
            return
        for name, entry in self._builtins.items():
            self._names.setdefault(name, entry)
        self._refused.clear()
        for name, entry in self._names.items():
            if name not in self._entered:
                problem = self._tables.add(entry)
                if problem is None:
                    self._entered[name] = entry
                else:
                    self._refused[name] = problem


def check_name(name: object) -> None:
    """Check that a name can be registered.

    Raises:
        TypeError: it is not a string.
        ValueError: it is empty, a hub kernel's, or has other characters than letters, digits, '_', '-' and '.'.
    """
    if not isinstance(name, str):
        raise TypeError(f"an attention name must be a string, not {name!r}")
    if not name.strip():
        raise ValueError("an attention name must not be empty")
    if "/" in name:
        raise ValueError(
            f"{name!r} looks like a hub kernel (org/repo), which transformers would download: choose a name without '/'"
        )
    if not re.fullmatch(r"[\w.\-]+", name):
        raise ValueError(f"{name!r} may contain letters, digits, '_', '-' and '.' alone")


def upstream_owner(name: str, environment: Environment | None = None) -> str | None:
    """The transformers that has this name itself in an environment, e.g. ``transformers 5.23.0``; None where the name is free."""
    if name in UPSTREAM:
        return "transformers"
    if name == "flash_attention_4":
        version = (environment or Environment.detect()).version("transformers")
        if version is not None and version.release >= (5, 4):
            return f"transformers {version}"
    return None

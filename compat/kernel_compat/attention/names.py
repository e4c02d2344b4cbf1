"""Attention names, the strings of ``attn_implementation=``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..environment import Environment
from ..kernels import Features, Kernel
from ..versions import within
from .sequence_parallel.ulysses import default_group, group_source

__all__ = ["UPSTREAM", "AttentionName", "check_name", "upstream_owner"]

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
        padding_free: whether models under it compute padded batches without their padding.
        features: those declared of the forward; None for the kernel's.
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
    padding_free: bool = False
    features: Features | None = None

    @property
    def supported(self) -> Features:
        """The features that were declared of its forward, or else its kernel's here."""
        return self.features or self.kernel.features

    @property
    def spreads(self) -> bool:
        """Whether the tokens of a sequence may be spread over ranks."""
        return self.sequence_parallel is not False or hasattr(self.forward, "ulysses_group")

    @property
    def group(self) -> Any:
        """The group that they are spread over, as `ulysses` takes it."""
        return self.sequence_parallel if self.sequence_parallel is not False else self.forward.ulysses_group  # type: ignore[union-attr]

    def is_spread(self) -> bool:
        """Whether they are in calls that are made now: not where a function that returns the group returns None."""
        if not self.spreads:
            return False
        source = group_source(self.group)
        return source is default_group or source() is not None


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
    """The transformers that has this name itself in an environment, such as ``transformers 5.23.0``; None if it is free."""
    if name in UPSTREAM:
        return "transformers"
    if name == "flash_attention_4":
        version = (environment or Environment.detect()).version("transformers")
        if version is not None and within(version, ">=5.4"):
            return f"transformers {version}"
    return None

"""Attention names, the strings of ``attn_implementation=``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..environment import Environment
from ..errors import RenamedWarning
from ..kernels import Features, Kernel
from ..versions import within
from .parallel.groups import default_group, group_source
from .parallel.sharding import ContextParallel
from .protocols import AttentionForward, MaskFunction

__all__ = ["UPSTREAM", "AttentionName", "ForwardSpec", "check_name", "upstream_owner"]

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


@dataclass(frozen=True)
class ForwardSpec:
    """A forward of your own and what it can do: the `forward` of `register_attention`.

    Examples:
        >>> from kernel_compat import ForwardSpec, register_attention, unregister_attention
        >>> def ring(module, query, key, value, attention_mask, **kwargs):
        ...     raise NotImplementedError
        >>> forward = ForwardSpec(ring, features={"varlen", "gqa", "backward"}, handles_context_parallel=True)
        >>> register_attention("my_ring_flash", forward=forward)
        >>> unregister_attention("my_ring_flash")

    Attributes:
        function: the forward. None for the library's own, of which `handles_context_parallel` can be declared.
        features: of the forward: a `Features`, or names of its boolean fields, such as ``{"varlen", "window", "backward"}``; it has
            no others then. Without them it has those of the name's kernel, and none without a kernel. What chooses an attention, and
            what checks a model, goes by them.
        handles_context_parallel: attention under the name is right under context parallelism, because the forward, or code around
            it, exchanges keys and values between the ranks. `kernel_compat.policy.plan_attention` keeps such a name instead of
            choosing sdpa.
    """

    function: AttentionForward | None = None
    features: Features | Collection[str] | None = None
    handles_context_parallel: bool = False


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
        spread_over: a `ContextParallel`; or the group that `ulysses` is put around the forward for, as it takes it; None for none.
    """

    name: str
    kernel: Kernel
    forward: AttentionForward | None = None
    mask: MaskFunction | None = None
    override: bool = False
    builtin: bool = False
    handles_context_parallel: bool = False
    padding_free: bool = False
    features: Features | None = None
    spread_over: Any = None

    @property
    def supported(self) -> Features:
        """The features that were declared of its forward, or else its kernel's here."""
        return self.features or self.kernel.features

    @property
    def group(self) -> Any:
        """The group that the tokens of a sequence may be spread over, as `ulysses` takes it; None for none."""
        if isinstance(self.spread_over, ContextParallel):
            return self.spread_over.source
        return self.spread_over if self.spread_over is not None else getattr(self.forward, "ulysses_group", None)

    @property
    def spreads(self) -> bool:
        """Whether the tokens of a sequence may be spread over ranks."""
        return self.group is not None

    @property
    def is_context_parallel(self) -> bool:
        """Whether the tokens of a sequence may be spread by a `ContextParallel`."""
        return isinstance(self.spread_over, ContextParallel)

    def is_spread(self) -> bool:
        """Whether they are in calls that are made now: not where a function that returns the group returns None, or one of one rank."""
        if not self.spreads:
            return False
        import torch.distributed as dist  # torch stays unloaded until here

        source = group_source(self.group)
        if source is default_group and not dist.is_initialized():  # the call says so
            return True
        group = source()
        return group is not None and dist.get_world_size(group) > 1

    @property
    def sequence_parallel(self) -> Any:
        """Deprecated: `spread_over`, with False for none and None for the default group."""
        message = "AttentionName.sequence_parallel is now spread_over: None for none, True for the default group"
        warnings.warn(message, RenamedWarning, stacklevel=2)
        if self.spread_over is None:
            return False
        return None if self.spread_over is True else self.spread_over


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

"""Attention names: what a user writes in ``attn_implementation=``, and what each is bound to."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..environment import Environment
from ..kernels import Kernel, as_kernel, known_kernels
from .sequence_parallel.ulysses import process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AttentionName", "register_attention", "registered_attention", "resolve", "unregister_attention"]

#: Names transformers has had itself on any supported release; ``flash_attention_4`` came with 5.4.
_UPSTREAM = frozenset(
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
        name: as it is written in ``attn_implementation=``.
        kernel: what computes it.
        forward: the attention function transformers calls; None for the library's own.
        mask: the mask function transformers calls; None for the library's own.
        override: whether it may take the place of a name that transformers has itself.
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


_lock = threading.RLock()
_registered: dict[str, AttentionName] = {}
_published: dict[str, AttentionName] = {}
_refused: dict[str, str] = {}
_unreachable: list[str] = []


def register_attention(
    name: str,
    kernel: str | Kernel | Any,
    forward: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    *,
    override: bool = False,
    handles_context_parallel: bool = False,
    sequence_parallel: ProcessGroup | DeviceMesh | bool | None = False,
) -> None:
    """Make `name` usable as ``attn_implementation=name`` once `install()` is called, or at once where it is.

    The kernel need not be usable here: a model that asks for the name fails then, when it is loaded, with a
    `KernelUnavailableError`.

    Args:
        name: any string but a hub kernel's (``org/repo``). One that has no ``flash`` in it warns, because from
            transformers 5.0 on models choose their flash code path by that substring.
        kernel: a kernel's name (``flash_attention_2``, ``_3``, ``_4``, ``_reference``), a `Kernel`, or any object with
            a ``flash_attn_varlen_func`` that takes FA2's keywords, such as a module. It has the features whose keywords
            are named parameters, or those of its attribute `features`, a `Features`.
        forward: replaces the library's attention function. Called as transformers calls its own:
            ``forward(module, query, key, value, attention_mask, *, scaling, dropout, **kwargs)`` with query, key and
            value of shape (batch, heads, length, head_dim); returns ``(output, None)`` with the output of shape
            (batch, length, heads, head_dim). It may call transformers' ``_flash_attention_forward`` with
            ``attn_implementation=name`` and gets this kernel on every release.
        mask: replaces the library's mask function; called as those of transformers' ``ALL_MASK_ATTENTION_FUNCTIONS``.
        override: allow a name that transformers owns, or that is registered already.
        handles_context_parallel: your word that the ranks of context parallelism exchange what attention under this name
            needs, in `forward` or around it; `kernel_compat.policy.resolve_preload` keeps such a name where it would
            choose sdpa.
        sequence_parallel: a ``torch.distributed`` group whose ranks each hold a slice of the tokens, True or None for the
            default group, which need not be there yet: `ulysses` is put around the forward, and the library's mask function
            gathers the slices of a padding mask. One of your own must make masks of the full sequence.

    Raises:
        TypeError: `name` is not a string, `forward` or `mask` is not callable, `kernel` is no kernel, or
            `sequence_parallel` no group that this rank is in.
        ValueError: `name` is empty, malformed, taken, or `kernel` is an unknown name.
    """
    _check_name(name)
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
    with _lock:
        if not override:
            if name in _registered and not _registered[name].builtin and not _registered[name].same_as(entry):
                raise ValueError(f"{name!r} is registered already; pass override=True to replace it")
            if owner := upstream_owner(name):
                raise ValueError(f"{name!r} belongs to {owner}; pass override=True to replace it")
        if "flash" not in name:
            warnings.warn(
                f"{name!r} has no 'flash' in it: from transformers 5.0 on, models take their non-flash code paths for "
                "such a name (4D masks, vision towers in chunks). Choose a name that contains 'flash'.",
                stacklevel=2,
            )
        previous = _registered.get(name)
        _registered[name] = entry
        if _is_installed():
            _withdraw_one(name)
            publish()
            if problem := _refused.get(name):
                _restore(name, previous)
                raise ValueError(f"{name!r} {problem}; pass override=True to replace it")


def unregister_attention(name: str) -> None:
    """Forget a registered name, also in transformers.

    Raises:
        ValueError: the name is not registered, or the library's own.
    """
    with _lock:
        if name not in _registered:
            raise ValueError(f"{name!r} is not registered; registered are: {', '.join(_registered) or 'none'}")
        if _registered[name].builtin:
            raise ValueError(f"{name!r} is the library's own and goes with uninstall()")
        _restore(name, None)


def registered_attention() -> dict[str, AttentionName]:
    """The registered names in the order of registration; while installed, those of the library included."""
    with _lock:
        return dict(_registered)


def resolve(name: object) -> AttentionName | None:
    """The registered name that transformers means by `name` while the library is installed, or None.

    This is what shims ask. ``paged|NAME``, transformers' form for continuous batching, means NAME.
    """
    if not isinstance(name, str):
        return None
    return _published.get(name.removeprefix("paged|"))


def publish() -> None:
    """Tell transformers every registered name it doesn't know from us yet. Imports transformers.

    Where that fails the names stay unpublished, and `states()` says why.
    """
    with _lock:
        _register_builtins()
        _refused.clear()
        _unreachable.clear()
        try:
            from . import tables as interface

            interface.tables()
        except Exception as error:  # a broken install fails in any way it likes
            _unreachable.append(f"transformers does not import ({type(error).__name__}: {error})")
            return
        for name, entry in _registered.items():
            if name in _published:
                continue
            problem = interface.add(entry)
            if problem is None:
                _published[name] = entry
            else:
                _refused[name] = problem


def withdraw() -> list[str]:
    """Take every published name out of transformers again; answer those that are somebody else's by now."""
    with _lock:
        left = [name for name in reversed(list(_published)) if not _withdraw_one(name)]
        for name in [name for name, entry in _registered.items() if entry.builtin]:
            del _registered[name]
        _refused.clear()
        return [f"the attention function of {name!r}" for name in left]


def states(installed: bool) -> dict[str, str]:
    """By registered name: available, pending, or why transformers doesn't know it."""
    with _lock:
        waiting = "pending" if not installed else (*_unreachable, "transformers is not installed")[0]
        return {name: "available" if name in _published else _refused.get(name, waiting) for name in _registered}


def _check_name(name: object) -> None:
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
    """Which transformers has this name itself, in an environment; None where it is free."""
    if name in _UPSTREAM:
        return "transformers"
    if name == "flash_attention_4":
        version = (environment or Environment.detect()).version("transformers")
        if version is not None and version.release >= (5, 4):
            return f"transformers {version}"
    return None


def _register_builtins() -> None:
    """The kernels' own names: ``flash_attention_reference`` everywhere, ``flash_attention_4`` before transformers 5.4."""
    for name, kernel in known_kernels().items():
        if name not in _registered and upstream_owner(name) is None:
            _registered[name] = AttentionName(name, kernel, builtin=True)


def _is_installed() -> bool:
    from ..patching.installation import _state

    return _state.installed and "transformers" in sys.modules


def _withdraw_one(name: str) -> bool:
    entry = _published.pop(name, None)
    if entry is None:
        return True
    from . import tables as interface

    return interface.remove(entry)


def _restore(name: str, previous: AttentionName | None) -> None:
    """Put `previous` back in the place of `name`'s entry, here and in transformers."""
    _withdraw_one(name)
    _registered.pop(name, None)
    _refused.pop(name, None)
    if previous is not None:
        _registered[name] = previous
    if _is_installed():
        publish()

"""Attention names: which ones exist, which kernel each is bound to, and whether it can run here.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..attention.defaults import registered_attention
from ..attention.registry import upstream_owner
from ..choosing.capabilities import kernel_of
from ..environment import Environment
from ..kernels import known_kernels

__all__ = ["NameStatus", "attention_names", "name_status"]


@dataclass(frozen=True)
class NameStatus:
    """One attention name.

    Attributes:
        name: the name, as in ``attn_implementation=``.
        kernel: the name of its kernel; None if transformers computes this attention itself.
        owner: who defines the name in transformers' tables. If that is transformers and a kernel has the same name, then
            the kernel is the one that `register_attention` takes under this name.
        reasons: why the kernel can't run here; empty if it can.
        install: a sentence with the command that installs the kernel, if that would help.
    """

    name: str
    kernel: str | None
    owner: Literal["transformers", "kernel-compat", "registered"]
    reasons: tuple[str, ...] = ()
    install: str = ""


def attention_names(environment: Environment) -> tuple[NameStatus, ...]:
    """Every kernel's name, then every other registered name."""
    return tuple(name_status(name, environment) for name in {**known_kernels(), **registered_attention()})


def name_status(name: str, environment: Environment) -> NameStatus:
    """The status of a name; one without a kernel counts as transformers' own."""
    kernel = kernel_of(name)
    if kernel is None:
        return NameStatus(name, None, "transformers")
    entry = registered_attention().get(name)
    if entry is not None:
        owner: Literal["transformers", "kernel-compat", "registered"] = (
            "kernel-compat" if entry.builtin else "registered"
        )
    else:
        owner = "transformers" if upstream_owner(name, environment) else "kernel-compat"
    provider = kernel.provider(environment)
    reasons = tuple(provider.unavailable_because(environment))
    return NameStatus(name, kernel.name, owner, reasons, provider.install_hint(environment))

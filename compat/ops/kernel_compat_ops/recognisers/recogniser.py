"""The two kinds of recognisers: of modules, by their forwards, and of functions that methods call as globals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["FunctionRecogniser", "ModuleRecogniser"]


@dataclass(frozen=True)
class ModuleRecogniser:
    """How the modules of one op are found, proven, and given a kernel.

    Attributes:
        is_candidate: whether a module may compute one of the op's formulas, by its parameters and its forward's signature.
        prove: the formula of a candidate, with its `variant`; raises `Unproven`.
        bind: a forward that calls a kernel, made from a formula and the kernel.
        is_required: whether a candidate, at a path, is refused where it isn't proven; else it stays eager.
        unlike: why a module at a path that isn't a candidate is refused; empty where it stays eager.
        note: the note on a module that isn't a candidate, behind its class's name; empty for none.
    """

    is_candidate: Callable[[nn.Module], bool]
    prove: Callable[[nn.Module], Any]
    bind: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
    is_required: Callable[[str, nn.Module], bool] = lambda path, module: True
    unlike: Callable[[str, nn.Module], str] = lambda path, module: ""
    note: Callable[[nn.Module], str] = lambda module: ""


@dataclass(frozen=True)
class FunctionRecogniser:
    """How the functions of one op are found, proven, and replaced.

    Attributes:
        names: the global names under which methods call them.
        prove: the formula of a function, with its `variant`; raises `Unproven`.
        bind: the replacement of a function, made from a formula and a kernel.
        require: checks that a model is one for which a formula, and a kernel's `KernelSpec.assumes`, hold; raises `Unproven`.
    """

    names: re.Pattern[str]
    prove: Callable[[Any], Any]
    bind: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
    require: Callable[[nn.Module], None] = lambda model: None

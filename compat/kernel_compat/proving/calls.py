"""A kernel that counts its calls and can be silenced, to tell a model that never comes to it, or doesn't heed it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..kernels import Functions, Kernel

__all__ = ["Counted"]


class Counted:
    """A kernel's copy.

    Attributes:
        kernel: computes what the original does.
        calls: how many times one of its functions was called.
        silent: whether its outputs are zero.
    """

    def __init__(self, original: Kernel) -> None:
        self.calls = 0
        self.silent = False
        functions = original.load()
        self.kernel = Kernel(original.name, original.providers)
        counted = (None if function is None else self._count(function) for function in functions)
        self.kernel.preload(original.features, Functions(*counted))  # type: ignore[arg-type]

    def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            output = function(*args, **kwargs)
            return output * 0 if self.silent else output

        return call

"""Which kernels exist for which op, and whether they run here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from packaging.requirements import Requirement

from ..environment import Environment
from ..errors import KernelUnavailableError
from .builtin import SPECS
from .spec import EAGER, OPS, KernelSpec

__all__ = ["OPS", "OpRegistry", "register_kernel", "registered_kernels", "unregister_kernel"]

F = TypeVar("F", bound=Callable[..., Any])


class OpRegistry:
    """Kernels by op, variant and name. Safe to use from several threads.

    Args:
        specs: the kernels to begin with.
        group: an entry-point group whose entries are a `KernelSpec` or several; read at the first use.
    """

    def __init__(self, specs: Iterable[KernelSpec] = (), group: str = "") -> None:
        self._lock = threading.RLock()
        self._specs: dict[tuple[str, str, str], KernelSpec] = {}
        self._broken: dict[str, str] = {}
        self._group = group
        for spec in specs:
            self._add(spec)

    def register(
        self, op: str, variant: str, name: str, *, override: bool = False, **attributes: Any
    ) -> Callable[[F], F]:
        """Decorate a factory, so that configs can choose the kernel that it returns as the value `name` for `op`.

        A distribution registers its kernels by the entry-point group ``kernel_compat.ops``, whose entries are a
        `KernelSpec` or several.

        Args:
            override: replace the kernel of the same name for this variant.
            attributes: the other attributes of `KernelSpec`.

        Raises:
            ValueError: an unknown op or variant, or the name is taken.
        """

        def register(factory: F) -> F:
            self._discover()
            self._add(KernelSpec(op, variant, name, factory, **attributes), override)
            return factory

        return register

    def unregister(self, op: str, variant: str, name: str) -> None:
        """Remove a kernel. Models that it is bound to keep it.

        Raises:
            ValueError: no such kernel is registered.
        """
        with self._lock:
            self._discover()
            if self._specs.pop((op, variant, name), None) is None:
                raise ValueError(f"{op} has no kernel {name!r} for the variant {variant!r}")

    def kernels(self, op: str | None = None, name: str | None = None) -> tuple[KernelSpec, ...]:
        """All kernels, or those of one op, or of one of its values, in the order of their registration."""
        with self._lock:
            self._discover()
            return tuple(s for s in self._specs.values() if op in (None, s.op) and name in (None, s.name))

    def broken(self) -> dict[str, str]:
        """The entry points that failed, with the error."""
        with self._lock:
            self._discover()
            return dict(self._broken)

    def detect(self) -> Environment:
        """This environment, with every distribution that a kernel requires."""
        return Environment.detect(Requirement(text).name for spec in self.kernels() for text in spec.requires)

    def choices(self, op: str) -> tuple[str, ...]:
        """The values that an op's field may have, ``eager`` first."""
        return (EAGER, *dict.fromkeys(spec.name for spec in self.kernels(op)))

    def require(self, op: str, value: str, environment: Environment) -> None:
        """Check that a value names a kernel that runs in an environment, for one variant at least.

        Raises:
            ValueError: no kernel has this name.
            KernelUnavailableError: none of its variants runs there.
        """
        allowed = self.choices(op)
        if value not in allowed:
            raise ValueError(f"{op}_implementation={value!r}: the values are {', '.join(allowed)}")
        specs = self.kernels(op, value)
        reasons = [spec.unavailable_because(environment) for spec in specs]
        if all(reasons):
            hint = specs[0].install_hint(environment)
            raise KernelUnavailableError(f"{op}_implementation={value!r}", reasons[0], hint)

    def _add(self, spec: KernelSpec, override: bool = False) -> None:
        key = (spec.op, spec.variant, spec.name)
        with self._lock:
            if not override and key in self._specs:
                raise ValueError(
                    f"{spec.op} has a kernel {spec.name!r} for the variant {spec.variant!r} already: "
                    "pass override=True to replace it"
                )
            self._specs[key] = spec

    def _discover(self) -> None:
        with self._lock:
            group, self._group = self._group, ""
            if not group:
                return
            for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
                try:
                    loaded = point.load()
                    specs: Iterable[Any] = (loaded,) if isinstance(loaded, KernelSpec) else tuple(loaded)
                    for spec in specs:
                        if not isinstance(spec, KernelSpec):
                            raise TypeError(f"{point.value} holds {spec!r}, which is not a KernelSpec")
                        self._add(spec)
                except Exception as error:  # another distribution's code
                    self._broken[point.name] = f"{type(error).__name__}: {error}"


#: The registry that configs use.
default = OpRegistry(SPECS, "kernel_compat.ops")

register_kernel = default.register
unregister_kernel = default.unregister
registered_kernels = default.kernels
broken = default.broken
detect = default.detect
choices = default.choices
require = default.require

"""Which ops there are, which kernels exist for each, and whether they run here."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from packaging.requirements import Requirement

from kernel_compat.environment import Environment
from kernel_compat.errors import KernelUnavailableError
from kernel_compat.gates import in_order

from .builtin import SPECS
from .spec import EAGER, OPS, KernelSpec, Op

__all__ = [
    "OPS",
    "OpRegistry",
    "did_you_mean",
    "register_kernel",
    "register_op",
    "registered_kernels",
    "registered_ops",
    "unregister_kernel",
    "unregister_op",
]

F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error's sentence that names the nearest known word; empty where none is near."""
    word, words = str(name), list(known)
    near = [longer for longer in words if word and longer.startswith(word)] or difflib.get_close_matches(
        word, words, 1, 0.4
    )
    return f"; did you mean {near[0]}?" if near else ""


class OpRegistry:
    """Ops, and their kernels by op, variant and name. Safe to use from several threads.

    A copy of a registry is the registry itself. Only the default one can be pickled, and slots and configs only with it.

    A registry of one's own begins with the library's ops and without its kernels, so that its kernels can have the same names
    and be called in another way:

    >>> mine = OpRegistry()
    >>> mine.register_op("group_norm", ("standard",))
    >>> @mine.register("group_norm", "standard", "ours")
    ... def factory():
    ...     return lambda x, groups: x
    >>> mine.choices("group_norm"), mine.choices("rms_norm")
    (('eager', 'ours'), ('eager',))

    Args:
        specs: the kernels to begin with.
        group: an entry-point group whose entries are an `Op` or a `KernelSpec`, or several; read at the first use.
    """

    def __init__(self, specs: Iterable[KernelSpec] = (), group: str = "") -> None:
        self._lock = threading.RLock()
        self._ops = dict(_BUILTIN)
        self._specs: dict[tuple[str, str, str], KernelSpec] = {}
        self._broken: dict[str, str] = {}
        self._group = group
        for spec in specs:
            self._add(spec)

    def __reduce__(self) -> str:
        return "default"  # pickled by name: another registry can't be

    def register_op(
        self,
        name: str,
        variants: Iterable[str] = (),
        *,
        values: Iterable[str] = (),
        field: str | None = None,
        default: str | None = None,
    ) -> None:
        """Register an op, or add variants and values to one that is there; adding nothing new is no error.

        Configs then have its field, and its kernels can be registered. Kernels are bound to its slots, `OpSlot`.

        Args:
            name: an identifier.
            variants: formulas, each of which its kernels compute or not.
            values: values of the field that choose no kernel: your code reads them from the config.
            field: the config's field; by default `name` with ``_implementation``. Ops may share a field.
            default: the value of the field where it is left out; by default ``eager``.

        Raises:
            ValueError: it is registered with another field or default, its field is another op's with another default, a value
                is the name of a kernel or the default, or `name` or `field` is no identifier.
            TypeError: variants or values that aren't strings.
        """
        with self._lock:
            self._discover()
            known = self._ops.get(name)
            settings = field or (known.field if known else ""), default or (known.default if known else EAGER)
            for argument, texts in (("variants", variants), ("values", values)):
                if isinstance(texts, str):
                    raise TypeError(f"{name}: {argument} are several strings, not {texts!r}")
            self._add_op(Op(name, tuple(variants), tuple(values), *settings))

    def unregister_op(self, name: str) -> None:
        """Remove an op with its kernels, or from one of the library's what other code has added.

        Configs, slots and models that were made before keep what they have.

        Raises:
            ValueError: no such op is registered, or nothing was added to it.
        """
        with self._lock:
            self._discover()
            original = _BUILTIN.get(name)
            if self.op(name) == original:
                raise ValueError(f"{name} is the library's own, and no variant or value was added to it")
            if original is None:
                del self._ops[name]
            else:
                self._ops[name] = original
            left = original.variants if original else ()
            self._specs = {key: spec for key, spec in self._specs.items() if spec.op != name or spec.variant in left}

    def ops(self) -> dict[str, Op]:
        """The ops by name: the library's, then the others in the order of their registration."""
        with self._lock:
            self._discover()
            return dict(self._ops)

    def op(self, name: str) -> Op:
        """An op.

        Raises:
            ValueError: no such op is registered.
        """
        registered = self._ops.get(name) or self.ops().get(name)
        if registered is None:
            raise ValueError(f"{name!r} is no op: there are {', '.join(self._ops)}{did_you_mean(name, self._ops)}")
        return registered

    def fields(self) -> dict[str, tuple[Op, ...]]:
        """The fields of a config besides attention, each with its ops."""
        fields: dict[str, tuple[Op, ...]] = {}
        for op in self.ops().values():
            fields[op.field] = (*fields.get(op.field, ()), op)
        return fields

    def require_variant(self, name: str, variant: str) -> None:
        """Check that an op has a variant.

        Raises:
            ValueError: there is no such op, or it has no such variant.
        """
        op = self.op(name)
        if variant not in op.variants and variant not in self.ops()[name].variants:
            known = ", ".join(op.variants) or "none"
            raise ValueError(f"{name} has no variant {variant!r}: it has {known}{did_you_mean(variant, op.variants)}")

    def register(
        self, op: str, variant: str, name: str, *, override: bool = False, **attributes: Any
    ) -> Callable[[F], F]:
        """Decorate a factory, so that configs can choose the kernel that it returns as the value `name` for `op`.

        A distribution registers its ops and kernels by the entry-point group ``kernel_compat.ops``, whose entries are an `Op` or
        a `KernelSpec`, or several, each op before its kernels.

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
        names = {Requirement(text).name for spec in self.kernels() for text in spec.requires}
        return Environment.detect(names.union(*(spec.hardware.packages for spec in self.kernels())))

    def choices(self, op: str) -> tuple[str, ...]:
        """The values that an op's field may have, the one that chooses no kernel first.

        Raises:
            ValueError: no such op is registered.
        """
        registered = self.op(op)
        return tuple(dict.fromkeys((registered.default, *registered.values, *(spec.name for spec in self.kernels(op)))))

    def require(self, op: str, value: str, environment: Environment) -> None:
        """Check that a value names a kernel that runs in an environment, for one variant at least.

        Raises:
            ValueError: no kernel has this name.
            KernelUnavailableError: none of its variants runs there.
        """
        self.require_value(self.op(op).field, value, environment, (op,))

    def require_value(
        self, field: str, value: str, environment: Environment | None, names: Iterable[str] | None = None
    ) -> None:
        """Check that one op of a field has a value, and a kernel of that name that runs in an environment.

        Args:
            environment: None to check the value alone.
            names: the ops, instead of all of the field.

        Raises:
            ValueError: none has the value.
            KernelUnavailableError: none of its kernels runs there.
        """
        ops = [op.name for op in self.fields().get(field, ())] if names is None else list(names)
        allowed = tuple(dict.fromkeys(choice for op in ops for choice in self.choices(op)))
        if value not in allowed:
            hint = did_you_mean(value, allowed)
            raise ValueError(f"{field}={value!r}: the values are {', '.join(allowed) or 'none'}{hint}")
        specs = [spec for op in ops for spec in self.kernels(op, value)]
        if environment is None or not specs:
            return
        reasons = [spec.unavailable_because(environment) for spec in specs]
        if all(reasons):
            raise KernelUnavailableError(f"{field}={value!r}", reasons[0], specs[0].install_hint(environment))

    def require_kernel(self, op: str, variant: str, value: str, environment: Environment | None) -> KernelSpec:
        """The kernel that a value names for one variant, which runs in an environment, whatever the value's others do.

        Args:
            environment: None to check the value and the variant alone.

        Raises:
            ValueError: no kernel has this name, or none for the variant.
            KernelUnavailableError: it doesn't run there.
        """
        self.require_value(self.op(op).field, value, None, (op,))
        specs = {spec.variant: spec for spec in self.kernels(op, value)}
        if variant not in specs:
            variants = ", ".join(specs) or "none"
            raise ValueError(
                f"{op} has no kernel {value!r} for the variant {variant!r}: there are those for {variants}"
            )
        spec = specs[variant]
        if environment is not None and (reasons := spec.unavailable_because(environment)):
            hint = spec.install_hint(environment)
            raise KernelUnavailableError(f"{op} {value!r} for the variant {variant!r}", reasons, hint)
        return spec

    def _add_op(self, op: Op) -> None:
        with self._lock:
            merged = self._ops[op.name].with_more(op) if op.name in self._ops else op
            for other in self._ops.values():
                if other.field == op.field and other.default != op.default:
                    raise ValueError(
                        f"{op.name}: the field {op.field} is that of {other.name}, whose default is {other.default!r}, "
                        f"not {op.default!r}"
                    )
            taken = {merged.default, *(spec.name for spec in self._specs.values() if spec.op == op.name)}
            if known := taken & set(merged.values):
                raise ValueError(f"{op.name}: {sorted(known)[0]!r} is the default or a kernel's name already")
            self._ops[op.name] = merged

    def _add(self, spec: KernelSpec, override: bool = False) -> None:
        key = (spec.op, spec.variant, spec.name)
        with self._lock:
            self.require_variant(spec.op, spec.variant)
            op = self._ops[spec.op]
            if spec.name in (op.default, *op.values):
                raise ValueError(f"{spec.name!r} is a value of {op.field} that chooses no kernel: choose another name")
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
            for point in in_order(entry_points(group=group)):
                try:
                    loaded = point.load()
                    entries: Iterable[Any] = (loaded,) if isinstance(loaded, (Op, KernelSpec)) else tuple(loaded)
                    for entry in entries:
                        if isinstance(entry, Op):
                            self._add_op(entry)
                        elif isinstance(entry, KernelSpec):
                            self._add(entry)
                        else:
                            raise TypeError(f"{point.value} holds {entry!r}, which is neither an Op nor a KernelSpec")
                except Exception as error:  # another distribution's code
                    self._broken[point.name] = f"{type(error).__name__}: {error}"


#: The library's ops, which every registry begins with.
_BUILTIN: Mapping[str, Op] = {name: Op(name, variants) for name, variants in OPS.items()}

#: The registry that configs use.
default = OpRegistry(SPECS, "kernel_compat.ops")

register_op = default.register_op
unregister_op = default.unregister_op
registered_ops = default.ops
register_kernel = default.register
unregister_kernel = default.unregister
registered_kernels = default.kernels
broken = default.broken
detect = default.detect
choices = default.choices

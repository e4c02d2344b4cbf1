"""transformers 5: this library's kernels for mixtures of experts as values of ``experts_implementation``.

`get_correct_experts_implementation` (huggingface/transformers#42697) accepts transformers' own names only; from 5.8 on registered
names too (#45577). Each value is ``kernel_compat_`` and a value of ``moe_implementation``.
Delete the seam when the oldest supported transformers is 5.8; the registration stays, because it is a feature.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim
from kernel_compat.patching.swap import Change, make, undo

#: The start of every name; the rest is a value of ``moe_implementation``.
PREFIX = "kernel_compat_"

#: The names of the library's own kernels, which are entered without importing them.
BUILT_IN = tuple(PREFIX + value for value in ("fused_triton", "fused_quack", "fused_npu"))

#: The attribute of a module that holds its proven forwards by value of ``moe_implementation``.
_PROVEN = "_kernel_compat_experts"


class _Forwards(dict[str, Callable[..., Any]]):
    """Proven forwards. A copy of the module shares them; an unpickled module starts with none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forwards:
        return _Forwards(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


def _unpickled() -> _Forwards:
    _entries.enter()  # the module looks its name up without a request for it
    return _Forwards()


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["get_correct_experts_implementation"]

    @wraps(original)
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> Any:
        if requested_experts in (None, "eager") or requested_experts not in _entries.enter():
            return original(self, requested_experts)
        from kernel_compat.ops import OpsConfig

        OpsConfig(moe_implementation=requested_experts.removeprefix(PREFIX))
        return requested_experts

    return {"get_correct_experts_implementation": get_correct_experts_implementation}


class _Entries:
    """Our names in transformers' table. Those that others have registered are entered when a name is first requested."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: dict[str, Any] | None = None
        self._changes: dict[str, Change] = {}

    def activate(self) -> Callable[[], None]:
        self._table = type(import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS)._global_mapping
        self._enter(BUILT_IN)
        return self._undo

    def enter(self) -> Collection[str]:
        """Enter the names that are registered by now; returns them, none while the shim isn't applied."""
        if self._table is None:
            return ()
        from kernel_compat.ops import registered_kernels

        self._enter(dict.fromkeys(PREFIX + spec.name for spec in registered_kernels("moe")))
        return tuple(self._changes)

    def _enter(self, names: Iterable[str]) -> None:
        with self._lock:
            if self._table is not None:
                added = [Change(self._table, name, _function(name)) for name in names if name not in self._changes]
                make(added)
                self._changes |= {change.name: change for change in added}

    def _undo(self) -> None:
        with self._lock:
            undo(self._changes.values())
            self._table, self._changes = None, {}


_entries = _Entries()


def _function(name: str) -> Callable[..., Any]:
    value = name.removeprefix(PREFIX)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = getattr(self, _PROVEN, None)
        if known is None or value not in known:
            _prove(self, name, value)
            known = getattr(self, _PROVEN)
        return known[value](self, *args, **kwargs)

    return forward


def _prove(module: Any, name: str, value: str) -> None:
    import torch

    from kernel_compat.ops import registered_kernels
    from kernel_compat.ops.recognisers import experts
    from kernel_compat.ops.recognisers.probing import Unproven

    feature, instead = f"experts_implementation={name!r}", "Use 'eager' or 'grouped_mm'."
    if torch.compiler.is_compiling():
        raise UnsupportedFeatureError(
            "torch.compile before the first forward", feature, "Run the model once, then compile it."
        )
    try:
        found = experts.prove(module)
    except Unproven as error:
        raise UnsupportedFeatureError(f"{type(module).__name__}: {error}", feature, instead) from None
    specs = {spec.variant: spec for spec in registered_kernels("moe") if spec.name == value}
    if found.variant not in specs:
        experts_class = f"{type(module).__name__}, which is of the variant {found.variant!r} ({found}),"
        raise UnsupportedFeatureError(experts_class, feature, f"It is for {', '.join(specs)}. {instead}")
    forwards = vars(module).setdefault(_PROVEN, _Forwards())
    forwards[value] = experts.forward_of(found, specs[found.variant].load())


SHIM = Shim(
    name="tf5_experts",
    distribution="transformers",
    versions=">=5.0,<6",
    reason="transformers has no name for these kernels, and up to 5.7 refuses every name but its own",
    upstream="huggingface/transformers#42697, huggingface/transformers#45577",
    delete_when="the oldest supported transformers is 5.8: registering the names stays and needs no seam",
    seams=(
        Seam(
            "transformers.modeling_utils:PreTrainedModel.get_correct_experts_implementation",
            ("self", "requested_experts"),
        ),
    ),
    replace=_replace,
    complete=_entries.activate,
)

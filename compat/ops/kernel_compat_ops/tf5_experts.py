"""transformers 5: this library's kernels for mixtures of experts as values of ``experts_implementation``.

`get_correct_experts_implementation` (huggingface/transformers#42697) accepts transformers' own names only; from 5.8 on registered
names too (#45577).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each
from kernel_compat.patching.swap import Change, Changes

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
    _enter_registered()  # the module looks its name up without a request for it
    return _Forwards()


def _replace(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> Any:
        if requested_experts in (None, "eager") or requested_experts not in _enter_registered():
            return original(self, requested_experts)
        from .config import OpsConfig

        OpsConfig(moe_implementation=requested_experts.removeprefix(PREFIX))
        return requested_experts

    return get_correct_experts_implementation


#: Our names in transformers' table. Those that others have registered are entered when a name is first requested.
_entries = Changes()


def _activate() -> Callable[[], list[Change]]:
    undo = _entries.activate()
    _enter(BUILT_IN)
    return undo


def _enter_registered() -> Collection[str]:
    """Enter the names that are registered by now; returns them, none while the shim isn't applied."""
    if not _entries.active:
        return ()
    from .registry import registered_kernels

    return _enter(PREFIX + spec.name for spec in registered_kernels("moe"))


def _enter(names: Iterable[str]) -> Collection[str]:
    table = type(import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS)._global_mapping
    names = tuple(names)
    for name in names:
        _entries.add(table, name, _function(name))
    return names


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

    from .recognisers import experts
    from .recognisers.probing import Unproven
    from .registry import registered_kernels

    feature, instead = f"experts_implementation={name!r}", "Use 'eager' or 'grouped_mm'."
    if torch.compiler.is_compiling():
        raise UnsupportedFeatureError(
            "torch.compile before the first forward", feature, "Run the model once, then compile it."
        )
    try:
        formula = experts.prove(module)
    except Unproven as error:
        raise UnsupportedFeatureError(f"{type(module).__name__}: {error}", feature, instead) from None
    specs = {spec.variant: spec for spec in registered_kernels("moe") if spec.name == value}
    if formula.variant not in specs:
        experts_class = f"{type(module).__name__}, which is of the variant {formula.variant!r} ({formula}),"
        raise UnsupportedFeatureError(experts_class, feature, f"It is for {', '.join(specs)}. {instead}")
    forwards = vars(module).setdefault(_PROVEN, _Forwards())
    forwards[value] = experts.forward_of(formula, specs[formula.variant].load())


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
    replace=each(_replace),
    complete=_activate,
)

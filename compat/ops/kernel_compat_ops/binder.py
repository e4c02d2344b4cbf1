"""Binding a model to the kernels of a config: the modules of each op, the formula of each, and the kernel for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kernel_compat.attention.roles import implementation_of
from kernel_compat.environment import Environment
from kernel_compat.errors import KernelCompatError, KernelUnavailableError, UnsupportedFeatureError
from kernel_compat.patching import rewriting, swap
from kernel_compat.policy.capabilities import is_over_ranks

from . import hub
from .instances import Change, mark_as_bound, ops_of, qualified_name, replaced, undo
from .losses import causal as losses
from .op_slot import OpSlot
from .recognisers import balancing, experts, mlps, norms, rotary
from .recognisers.probing import Unproven, kind
from .recognisers.recogniser import FunctionRecogniser, ModuleRecogniser
from .registry import OpRegistry, default
from .spec import EAGER, Binding, KernelSpec

__all__ = ["Binder", "refusal"]

#: In the order in which a model is changed: a fused loss wraps the forward that a balancing loss is in.
_RECOGNISERS: dict[str, ModuleRecogniser | FunctionRecogniser | None] = {
    "moe": experts.RECOGNISER,
    "rms_norm": norms.RMS,
    "rms_norm_gated": norms.GATED,
    "layer_norm": norms.LAYER,
    "swiglu_mlp": mlps.RECOGNISER,
    "rotary_pos_emb": rotary.RECOGNISER,
    "load_balancing_loss": balancing.RECOGNISER,
    "cross_entropy_loss": None,
}

#: The attribute of transformers' configs that holds the attention name.
_ATTENTION = "_attn_implementation_internal"


def refusal(model: Any, op: str, value: str, environment: Environment | None = None) -> str:
    """The reason why a kernel would be refused for a model; empty where it wouldn't.

    Args:
        environment: of another machine, where no kernel can be loaded; default: this one.
    """
    try:
        Binder(model, {f"{op}_implementation": value}, dry=environment is not None, environment=environment)
    except (UnsupportedFeatureError, KernelUnavailableError, ValueError) as error:
        return str(error)
    return ""


class Binder:
    """The changes that a config makes to a model: all are made out, or refused, before anything is changed.

    Args:
        config: values by field, as of an `OpsConfig`.
        dry: load no kernels, to see what would be bound; `bind` must not be called then.
        registry: the ops and kernels that the values choose from.
        environment: kernels are refused that don't run in it; default: this one, or any if `dry`.

    Attributes:
        changes: the changes that `bind` makes; it adds the ones that are only known then.
        bindings: the kernels that they bind.
        notes: the ops that the model doesn't have, and the parts that stay eager.
        shared: ops for which a part of the model has the same kernel already.

    Raises:
        UnsupportedFeatureError, KernelUnavailableError, ValueError: as `apply_ops`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, str | None],
        dry: bool = False,
        registry: OpRegistry = default,
        environment: Environment | None = None,
    ) -> None:
        self.model: Any = model
        self.changes: list[Change] = []
        self.bindings: list[Binding] = []
        self.notes: list[str] = []
        self.shared: set[str] = set()
        self._registry = registry
        self._environment = None if dry and environment is None else environment or registry.detect()
        self._loss: tuple[losses.CausalLoss, KernelSpec] | None = None
        self._hub = hub.Layers(model)
        self._kernel: Callable[[KernelSpec], Any] = functools.cache(lambda spec: None if dry else spec.load())
        ops = registry.ops()
        for op in dict.fromkeys((*_RECOGNISERS, *ops)):
            self.add(op, config.get(ops[op].field) or ops[op].default)
        self._attention = config.get("attn_implementation")
        if self._attention is not None and not hasattr(model, "set_attn_implementation"):
            self._attention = None
            self.notes.append("attn: this is no model of transformers")
        if self._attention is not None:
            self._require_spread(self._attention)
            self.bindings.append(Binding("", "attn", "", self._attention))

    def add(self, op: str, value: str) -> list[Binding]:
        """Add the changes of one more op, and return its bindings. After an error the binder can't be used any more."""
        registered = self._registry.op(op)
        if value in (EAGER, registered.default):
            self._empty_slots(op)
            return []
        if not self._registry.kernels(op, value):  # another op of the field may have one
            self._registry.require_value(registered.field, value, None)
            if value in registered.values:
                self.notes.append(f"{op}: {value!r} chooses no kernel here: the code that registered the op reads it")
            return []
        first, notes = len(self.bindings), len(self.notes)
        self._slots(op, value)
        recogniser = _RECOGNISERS.get(op)
        if isinstance(recogniser, ModuleRecogniser):
            self._modules(op, value, recogniser)
        elif isinstance(recogniser, FunctionRecogniser):
            self._functions(op, value, recogniser)
        elif op == "cross_entropy_loss":
            self._losses(op, value)
        bindings = self.bindings[first:]
        if not bindings and op not in self.shared and len(self.notes) == notes:
            absent = "none" if op in _RECOGNISERS else "no module with an OpSlot for it"
            self.notes.append(f"{op}: this model has {absent}")
        return bindings

    def bind(self) -> None:
        """Make the changes. After an error the model is as it was.

        Raises:
            UnsupportedFeatureError: its loss on a probe differs with the kernel.
        """
        self.changes += self._hub.guards([change.module for change in self.changes])
        eager = self._eager_loss()
        try:
            swap.make(self.changes)
            if self._attention is not None:
                self._set_attention(self._attention)
            if self._loss and eager is not None:
                _compare(*self._loss, eager)
        except BaseException:
            undo(self.changes)
            raise

    def _eager_loss(self) -> float | None:
        """The model's own loss on a probe; None, with a note that says why, where the model isn't run or fails."""
        if self._loss is None:
            return None
        loss, spec = self._loss
        reason = losses.unrun_because(loss.model, spec, [getattr(config, _ATTENTION) for config in self._configs()])
        if not reason:
            try:
                return losses.probe(loss.model)
            except (Unproven, UnsupportedFeatureError) as error:
                reason = str(error)
        self.notes.append(
            f"cross_entropy_loss: the first forward with labels shows whether the model calls its loss: {reason}"
        )
        return None

    def _configs(self) -> list[Any]:
        """The configs in the model that hold an attention name."""
        owners = [module.config for module in self.model.modules() if hasattr(module, "config")]
        owners += [getattr(owner, part, None) for owner in owners for part in getattr(owner, "sub_configs", ())]
        return [*{id(owner): owner for owner in owners if _ATTENTION in getattr(owner, "__dict__", ())}.values()]

    def _require_spread(self, name: str) -> None:
        """Refuse an attention name that computes within a rank for a model whose attention spreads over several."""
        for config in self._configs():
            before = getattr(config, _ATTENTION)
            if is_over_ranks(before) and not is_over_ranks(name):
                raise UnsupportedFeatureError(
                    f"a model that was loaded with {before!r}, whose sequences are spread over ranks: each rank would attend "
                    "to its own tokens alone",
                    f"attn_implementation={name!r}",
                    f"Leave attn_implementation out, or load the model with {name!r}.",
                )

    def _set_attention(self, name: str) -> None:
        """Have transformers set the attention name, and note the configs that it is set in."""
        changes = [Change(config, _ATTENTION, None, "attn_implementation") for config in self._configs()]
        self.changes += changes
        for change in changes:
            change.before = change.replacement = change.current
        before = implementation_of(self.model)
        try:
            self.model.set_attn_implementation(name)
        finally:
            for change in changes:
                change.replacement = change.current
        if implementation_of(self.model) == before != name:  # transformers logs a warning alone
            raise UnsupportedFeatureError(
                f"{type(self.model).__name__}, in which transformers sets no other attention",
                f"attn_implementation={name!r}",
                f"Load the model with {name!r}.",
            )

    # The modules of each op

    def _slots(self, op: str, value: str) -> None:
        for path, module, name, slot in self._slots_for(op):
            if slot.value == value:  # it was filled when the module was built
                self.shared.add(op)
                continue
            with _refusing(op, value, path, module):
                kernel = self._kernel(self._spec(op, value, slot.variant))
            label = f"{path}.{name}".strip(".")
            self.changes += [Change(slot, key, content, label) for key, content in slot.contents(value, kernel).items()]
            self.bindings.append(Binding(label, op, slot.variant, value, "an OpSlot"))

    def _empty_slots(self, op: str) -> None:
        """Set the slots that nothing was chosen for to ``eager``."""
        for path, _, name, slot in self._slots_for(op):
            if not slot.is_bound:
                label = f"{path}.{name}".strip(".")
                self.changes += [Change(slot, key, content, label) for key, content in slot.contents(EAGER).items()]

    def _slots_for(self, op: str) -> Iterator[tuple[str, nn.Module, str, OpSlot]]:
        """The slots for an op that this binder's registry fills: the path of the module, the module, the attribute, the slot."""
        for path, module in self.model.named_modules():
            for name, slot in vars(module).items():
                if isinstance(slot, OpSlot) and slot.op == op and slot.registry is self._registry:
                    yield path, module, name, slot

    def _modules(self, op: str, value: str, recogniser: ModuleRecogniser) -> None:
        proven: dict[Any, Any] = {}
        noted: dict[str, set[str]] = {}
        for path, module in self.model.named_modules():
            if self._has(module, op, value):
                continue
            with _refusing(op, value, path, module):
                if not recogniser.is_candidate(module):
                    if reason := recogniser.unlike(path, module):
                        raise Unproven(reason)
                    if note := recogniser.note(module):
                        noted.setdefault(note, set()).add(type(module).__name__)
                    continue
                if (key := kind(module)) not in proven:
                    proven[key] = _attempt(recogniser.prove, module)
                if isinstance(formula := proven[key], Unproven):
                    if recogniser.is_required(path, module):
                        raise formula
                    continue
                forward = recogniser.bind(formula, self._kernel(self._spec(op, value, formula.variant)))
                _require_unreplaced(module)
                self._bind(module, forward, Binding(path, op, formula.variant, value, str(formula)))
        self.notes += [f"{op}: {', '.join(sorted(names))} {note}" for note, names in noted.items()]

    def _functions(self, op: str, value: str, recogniser: FunctionRecogniser) -> None:
        callers: Callable[..., Any] = functools.cache(rewriting.callers)

        @functools.cache
        def replacement(name: str, function: Any) -> tuple[str, Callable[..., Any]]:
            try:
                formula = recogniser.prove(hub.unkernelized(function))
            except Unproven as error:
                raise Unproven(f"{name}: {error}") from None
            spec = self._spec(op, value, formula.variant)
            if spec.assumes or getattr(formula, "needs_equal_halves", False):
                recogniser.require(self.model)
            return spec.variant, recogniser.bind(formula, self._kernel(spec))

        @functools.cache
        def rewritten(function: FunctionType, replacements: tuple[tuple[str, Any], ...]) -> FunctionType:
            try:
                return rewriting.with_globals(function, dict(replacements))
            except KernelCompatError as error:
                raise Unproven(str(error)) from error

        for path, module in self.model.named_modules():
            for method, functions in callers(type(module), recogniser.names).items():
                if self._has(module, op, value, method):
                    continue
                with _refusing(op, value, path, module):
                    replacements = {name: replacement(name, function) for name, function in functions.items()}
                    variant = "+".join(dict.fromkeys(variant for variant, _ in replacements.values()))
                    original = self._taken_back(module, method) or inspect.getattr_static(type(module), method)
                    function = rewritten(original, tuple((name, kernel) for name, (_, kernel) in replacements.items()))
                    if method == "forward":
                        _require_unreplaced(module)
                    where = path if method == "forward" else f"{path}.{method}".strip(".")
                    self._bind(module, function, Binding(where, op, variant, value, ", ".join(replacements)), method)

    def _losses(self, op: str, value: str) -> None:
        part = losses.find(self.model)
        if part is None:
            return
        path, module = part
        if self._has(module, op, value) or self._has(module, op, value, "_loss_function"):
            return
        with _refusing(op, value, path, module):
            loss = losses.prove(module)
            over_logits = any(spec.variant == "causal_logits" for spec in self._registry.kernels(op, value))
            spec = self._spec(op, value, "causal_logits" if over_logits else "causal")
            kernel = self._kernel(spec)
            self._loss = loss, spec
            binding = Binding(path, op, spec.variant, value, "causal cross-entropy")
            if over_logits:
                function = mark_as_bound(losses.over_logits(kernel, loss.extras), op, value)
                self.changes.append(Change(module, "_loss_function", function))
                self.bindings.append(binding)
                return
            inner = self._taken_back(module, "forward") or type(module).forward
            if (own := replaced(module)) is not None:
                self.changes.append(Change(module, losses.INNER, (own,)))
                inner = _inner_of(inner)
            head_forward = mark_as_bound(losses.head_forward(kernel), op, value)
            self.changes += [
                Change(loss.head, "forward", MethodType(head_forward, loss.head)),
                Change(loss.head, losses.FORWARD, None),
                Change(module, losses.HEAD, (loss.head,)),
                Change(module, "_loss_function", losses.Loss(losses.over_hidden_states, loss.extras)),
            ]
            self._bind(module, losses.model_forward(loss, value, inner), binding)

    # Shared by the ops

    def _spec(self, op: str, value: str, variant: str) -> KernelSpec:
        variants = [spec.variant for spec in self._registry.kernels(op, value)]
        if variant not in variants:
            raise Unproven(f"it is of the variant {variant!r}, and the kernel is for {', '.join(variants) or 'none'}")
        return self._registry.require_kernel(op, variant, value, self._environment)

    def _has(self, module: nn.Module, op: str, value: str, method: str = "forward") -> bool:
        """Whether the module has a kernel for the op already.

        Raises:
            ValueError: that of another value.
        """
        bound = ops_of(module, method).get(op)
        if bound is None:
            return any(
                slot.op == op and slot.registry is self._registry
                for slot in vars(module).values()
                if isinstance(slot, OpSlot)
            )
        if bound != value:
            raise ValueError(
                f"a {type(module).__name__} has the kernel {bound!r} for {op} already, applied to it or to a model that it is "
                f"a part of: undo that before applying {value!r}"
            )
        self.shared.add(op)
        return True

    def _taken_back(self, module: nn.Module, method: str) -> Any:
        """The function that a change binds as a method of the module, without that change from now on; None if none does."""
        for change in self.changes:
            if change.module is module and change.attribute == method:
                self.changes.remove(change)
                return change.replacement.__func__
        return None

    def _bind(self, module: nn.Module, function: Callable[..., Any], binding: Binding, method: str = "forward") -> None:
        if method == "forward" and (reason := self._hub.refuse(binding.path)):
            raise Unproven(reason)
        function = mark_as_bound(function, binding.op, binding.kernel)
        self.changes.append(Change(module, method, MethodType(function, module)))
        self.bindings.append(binding)


@contextmanager
def _refusing(op: str, value: str, path: str, module: nn.Module) -> Iterator[None]:
    """Turn an `Unproven` into an `UnsupportedFeatureError` that names the module."""
    try:
        yield
    except Unproven as error:
        where = f"{path or 'the model'} ({type(module).__name__})"
        raise UnsupportedFeatureError(
            f"{where}: {error}", f"{op} {value!r}", f"Set {op}_implementation='eager'."
        ) from error


def _attempt(prove: Callable[[Any], Any], subject: Any) -> Any:
    try:
        return prove(subject)
    except Unproven as error:
        return error


def _require_unreplaced(module: nn.Module) -> None:
    if (own := replaced(module)) is not None:
        raise Unproven(
            f"its forward has been replaced by {qualified_name(own)}, and only one of the two can be in force"
        )


def _inner_of(like: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls the one that the instance had before ours; with the signature of `like`."""

    @functools.wraps(like)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, losses.INNER)[0](*args, **kwargs)

    return forward


def _compare(loss: losses.CausalLoss, spec: KernelSpec, eager: float) -> None:
    """Raise an `UnsupportedFeatureError` if the loss on a probe with the kernel isn't `eager`, but for rounding."""
    half = next(loss.model.parameters()).dtype in (torch.float16, torch.bfloat16)
    with _refusing(spec.op, spec.name, "", loss.model):
        off = abs(losses.probe(loss.model) - eager) / max(abs(eager), 1e-6)
        if not off < (2e-2 if half else 1e-4):
            raise Unproven(f"the loss of a probe is off by {off:.1e}")

"""From a config to the changes of a model: the modules of an op, the formula of each, and the kernel for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..errors import KernelCompatError, KernelUnavailableError, UnsupportedFeatureError
from . import hub, registry, rewriting
from .instances import Change, ops_of, ours, replaced, require_module, require_unreplaced
from .losses import causal as losses
from .op_slot import OpSlot
from .recognisers import balancing, experts, gated, layer_norms, mlps, norms, rotary
from .recognisers.probing import Unproven, kind
from .recognisers.recogniser import FunctionRecogniser, ModuleRecogniser
from .spec import EAGER, Binding, KernelSpec

__all__ = ["Plan", "refusal"]

#: In the order in which a model is changed: a fused loss wraps the forward that a balancing loss is in.
_RECOGNISERS: dict[str, ModuleRecogniser | FunctionRecogniser | None] = {
    "moe": experts.RECOGNISER,
    "rms_norm": norms.RECOGNISER,
    "rms_norm_gated": gated.RECOGNISER,
    "layer_norm": layer_norms.RECOGNISER,
    "swiglu_mlp": mlps.RECOGNISER,
    "rotary_pos_emb": rotary.RECOGNISER,
    "load_balancing_loss": balancing.RECOGNISER,
    "cross_entropy_loss": None,
}


def refusal(model: Any, op: str, value: str) -> str:
    """The reason why a kernel would be refused for a model; empty where it wouldn't.

    Raises:
        TypeError: not a module, or a compiled one.
    """
    require_module(model)
    try:
        Plan(model, {f"{op}_implementation": value})
    except (UnsupportedFeatureError, KernelUnavailableError, ValueError) as error:
        return str(error)
    return ""


class Plan:
    """The changes that a config makes to a model: complete, or refused, before anything is changed.

    Args:
        config: values by field, as of an `OpsConfig`.
        dry: load no kernels and check no device, to see what would be bound; such a plan must not be made.

    Attributes:
        changes: in the order in which they are made.
        notes: the ops that the model doesn't have, and the parts that stay eager.
        shared: the ops that a part of the model has the same kernels for already.

    Raises:
        UnsupportedFeatureError, KernelUnavailableError, ValueError: as `apply_ops`.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, str | None], dry: bool = False) -> None:
        self.model = model
        self.dry = dry
        self.changes: list[Change | _Attention | _Filling] = []
        self.bindings: list[Binding] = []
        self.notes: list[str] = []
        self.shared: set[str] = set()
        self._kernels: dict[KernelSpec, Callable[..., Any]] = {}
        self._environment = registry.detect()
        self._loss: tuple[losses.CausalLoss, KernelSpec] | None = None
        self._hub = hub.Layers(model)
        for op in _RECOGNISERS:
            self.add(op, config.get(f"{op}_implementation") or EAGER)
        name = config.get("attn_implementation")
        if name is not None and hasattr(model, "set_attn_implementation"):
            self.changes.append(_Attention(model, name))
            self.bindings.append(Binding("", "attn", "", name))
        elif name is not None:
            self.notes.append("attn: this is no model of transformers")

    def add(self, op: str, value: str) -> list[Binding]:
        """Plan one op more, and return its bindings. After an error the plan is useless."""
        if value == EAGER:
            return []
        first, notes = len(self.bindings), len(self.notes)
        self._slots(op, value)
        recogniser = _RECOGNISERS[op]
        if isinstance(recogniser, ModuleRecogniser):
            self._modules(op, value, recogniser)
        elif isinstance(recogniser, FunctionRecogniser):
            self._functions(op, value, recogniser)
        else:
            self._losses(op, value)
        bindings = self.bindings[first:]
        if not bindings and op not in self.shared and len(self.notes) == notes:
            self.notes.append(f"{op}: this model has none")
        return bindings

    def make(self) -> None:
        """Change the model.

        Raises:
            UnsupportedFeatureError: its loss is another with the kernel. As after every error, nothing is changed.
        """
        self.changes += self._hub.guards([change.module for change in self.changes])
        done = []
        try:
            eager = _probe(*self._loss, bound=False) if self._loss else None
            for change in self.changes:
                change.make()
                done.append(change)
            if eager is not None and self._loss is not None:
                self._compare(*self._loss, eager)
        except BaseException:
            for change in reversed(done):
                change.undo()
            raise
        if self._loss and eager is None:
            self.notes.append(
                "cross_entropy_loss: the first forward with labels shows whether the model calls its loss"
            )

    def _compare(self, loss: losses.CausalLoss, spec: KernelSpec, eager: float) -> None:
        half = next(loss.model.parameters()).dtype in (torch.float16, torch.bfloat16)
        try:
            found = _probe(loss, spec, bound=True)
        except UnsupportedFeatureError:
            raise
        except Exception as error:
            why = f"its forward failed on a probe ({type(error).__name__}: {error})"
            raise self._refused(spec.op, spec.name, "", loss.model, why) from error
        off = abs((float("nan") if found is None else found) - eager) / max(abs(eager), 1e-6)
        if not off < (2e-2 if half else 1e-4):
            why = f"the loss of a probe is off by {off:.1e}"
            raise self._refused(spec.op, spec.name, "", loss.model, why)

    # The modules of each op.

    def _slots(self, op: str, value: str) -> None:
        for path, module in self.model.named_modules():
            for name, slot in vars(module).items():
                if not isinstance(slot, OpSlot) or slot.op != op:
                    continue
                if slot.value == value:  # it was filled when the module was built
                    self.shared.add(op)
                    continue
                spec = self._spec(op, value, slot.variant, path, module)
                self.changes.append(_Filling(slot, value, self._kernel(spec)))
                self.bindings.append(Binding(f"{path}.{name}".strip("."), op, slot.variant, value, "an OpSlot"))

    def _modules(self, op: str, value: str, recogniser: ModuleRecogniser) -> None:
        proven: dict[Any, Any] = {}
        noted: dict[str, set[str]] = {}
        for path, module in self.model.named_modules():
            if self._has(module, op, value):
                continue
            if not recogniser.is_candidate(module):
                if why := recogniser.unlike(path, module):
                    raise self._refused(op, value, path, module, why)
                if note := recogniser.note(module):
                    noted.setdefault(note, set()).add(type(module).__name__)
                continue
            key = kind(module)
            if key not in proven:
                proven[key] = _attempt(recogniser.prove, module)
            found = proven[key]
            if isinstance(found, Unproven):
                if recogniser.is_required(path, module):
                    raise self._refused(op, value, path, module, str(found))
                continue
            spec = self._spec(op, value, found.variant, path, module)
            require_unreplaced(module, path, op, value)
            self._bind(path, module, spec, recogniser.bind(found, self._kernel(spec)), str(found))
        self.notes += [f"{op}: {', '.join(sorted(names))} {note}" for note, names in noted.items()]

    def _functions(self, op: str, value: str, recogniser: FunctionRecogniser) -> None:
        proven: dict[int, Any] = {}
        callers: dict[type, dict[str, dict[str, Any]]] = {}
        bound: dict[Any, Callable[..., Any]] = {}
        made: dict[Any, FunctionType] = {}
        model_proven: Any = None
        for path, module in self.model.named_modules():
            if type(module) not in callers:
                callers[type(module)] = rewriting.callers(type(module), recogniser.names)
            for method, functions in callers[type(module)].items():
                if self._has(module, op, value, method):
                    continue
                replacements, variants = {}, []
                for name, function in functions.items():
                    if id(function) not in proven:
                        proven[id(function)] = _attempt(recogniser.prove, hub.unkernelized(function))
                    found = proven[id(function)]
                    if isinstance(found, Unproven):
                        raise self._refused(op, value, path, module, f"{name}: {found}")
                    spec = self._spec(op, value, found.variant, path, module)
                    if spec.assumes or getattr(found, "needs_equal_halves", False):
                        if model_proven is None:
                            model_proven = _attempt(recogniser.require, self.model) or True
                        if isinstance(model_proven, Unproven):
                            raise self._refused(op, value, path, module, str(model_proven))
                    if (found, spec) not in bound:
                        bound[found, spec] = recogniser.bind(found, self._kernel(spec))
                    replacements[name] = bound[found, spec]
                    variants.append(found.variant)
                if method == "forward":
                    require_unreplaced(module, path, op, value)
                self._rewrite(path, module, method, replacements, made, spec, "+".join(dict.fromkeys(variants)))

    def _losses(self, op: str, value: str) -> None:
        found = losses.find(self.model)
        if found is None:
            return
        path, module = found
        if self._has(module, op, value) or self._has(module, op, value, "_loss_function"):
            return
        try:
            loss = losses.prove(module)
        except Unproven as error:
            raise self._refused(op, value, path, module, str(error)) from None
        over_logits = any(spec.variant == "causal_logits" for spec in self._specs(op, value))
        spec = self._spec(op, value, "causal_logits" if over_logits else "causal", path, module)
        kernel = self._kernel(spec)
        if over_logits:
            self.changes.append(Change(module, "_loss_function", ours(losses.over_logits(kernel), op, value)))
            self.bindings.append(Binding(path, op, spec.variant, value, "causal cross-entropy"))
        else:
            self._fuse(path, module, loss, spec, kernel)
        self._loss = loss, spec

    def _fuse(
        self, path: str, module: Any, loss: losses.CausalLoss, spec: KernelSpec, kernel: Callable[..., Any]
    ) -> None:
        pending = self._pending(module, "forward")
        inner: Callable[..., Any] = type(module).forward
        if pending is not None:
            inner = pending.value
            self.changes.remove(pending)
        elif (own := replaced(module)) is not None:
            self.changes.append(Change(module, losses.INNER, (own,)))
            inner = _inner_of(inner)
        self.changes += [
            Change(loss.head, "forward", ours(losses.head_forward(kernel), spec.op, spec.name)),
            Change(loss.head, losses.FORWARD, None),
            Change(module, losses.HEAD, (loss.head,)),
            Change(module, "_loss_function", losses.Loss(losses.over_hidden_states)),
        ]
        self._bind(path, module, spec, losses.model_forward(loss, spec.name, inner), "causal cross-entropy")

    # What they share.

    def _specs(self, op: str, value: str) -> list[KernelSpec]:
        return [spec for spec in registry.registered_kernels(op) if spec.name == value]

    def _spec(self, op: str, value: str, variant: str, path: str, module: nn.Module) -> KernelSpec:
        specs = {spec.variant: spec for spec in self._specs(op, value)}
        if variant not in specs:
            there = ", ".join(specs) or "none"
            raise self._refused(
                op, value, path, module, f"it is of the variant {variant!r}, and the kernel is for {there}"
            )
        spec = specs[variant]
        if not self.dry and (reasons := spec.unavailable_because(self._environment)):
            hint = spec.install_hint(self._environment)
            raise KernelUnavailableError(f"{op} {value!r} for the variant {variant!r}", reasons, hint)
        return spec

    def _kernel(self, spec: KernelSpec) -> Callable[..., Any]:
        if self.dry:
            return _never
        if spec not in self._kernels:
            self._kernels[spec] = spec.load()
        return self._kernels[spec]

    def _has(self, module: nn.Module, op: str, wanted: str, method: str = "forward") -> bool:
        """Whether a module has the kernel already.

        Raises:
            ValueError: it has another one for the op.
        """
        found = ops_of(module, method).get(op)
        if found is None:
            return any(isinstance(value, OpSlot) and value.op == op for value in vars(module).values())
        if found != wanted:
            raise ValueError(
                f"a {type(module).__name__} has the kernel {found!r} for {op} already, applied to it or to a model that it is "
                f"a part of: undo that before applying {wanted!r}"
            )
        self.shared.add(op)
        return True

    def _bind(self, path: str, module: nn.Module, spec: KernelSpec, forward: Callable[..., Any], proven: str) -> None:
        if why := self._hub.refuse(path):
            raise self._refused(spec.op, spec.name, path, module, why)
        self.changes.append(Change(module, "forward", ours(forward, spec.op, spec.name)))
        self.bindings.append(Binding(path, spec.op, spec.variant, spec.name, proven))

    def _rewrite(
        self,
        path: str,
        module: nn.Module,
        method: str,
        replacements: dict[str, Callable[..., Any]],
        made: dict[Any, FunctionType],
        spec: KernelSpec,
        variant: str,
    ) -> None:
        pending = self._pending(module, method)
        function = pending.value if pending is not None else inspect.getattr_static(type(module), method)
        key = (function, *sorted((name, id(value)) for name, value in replacements.items()))
        if key not in made:
            try:
                made[key] = ours(rewriting.with_globals(function, replacements), spec.op, spec.name)
            except KernelCompatError as error:
                raise self._refused(spec.op, spec.name, path, module, str(error)) from error
        if pending is not None:
            self.changes.remove(pending)
        self.changes.append(Change(module, method, made[key]))
        where = f"{path}.{method}".strip(".") if method != "forward" else path
        self.bindings.append(Binding(where, spec.op, variant, spec.name, ", ".join(replacements)))

    def _pending(self, module: nn.Module, name: str) -> Change | None:
        return next((c for c in self.changes if isinstance(c, Change) and c.module is module and c.name == name), None)

    def _refused(self, op: str, value: str, path: str, module: nn.Module, why: str) -> UnsupportedFeatureError:
        where = f"{path or 'the model'} ({type(module).__name__})"
        return UnsupportedFeatureError(f"{where}: {why}", f"{op} {value!r}", f"Set {op}_implementation='eager'.")


class _Attention:
    """Another attention name for a model of transformers, and the way back."""

    name = "attn_implementation"

    def __init__(self, model: Any, value: str) -> None:
        self.module = model
        self._value = value
        self._before: list[tuple[Any, str]] = []
        self._after: list[str] = []

    def make(self) -> None:
        configs = {id(m.config): m.config for m in self.module.modules() if hasattr(m, "config")}
        self._before = [
            (c, c._attn_implementation)
            for c in configs.values()
            if getattr(c, "_attn_implementation", None) is not None
        ]
        self.module.set_attn_implementation(self._value)
        self._after = [config._attn_implementation for config, _ in self._before]

    @property
    def in_force(self) -> bool:
        return self._after == [config._attn_implementation for config, _ in self._before]

    def undo(self) -> bool:
        in_force = self.in_force
        for (config, before), after in zip(self._before, self._after, strict=True):
            if config._attn_implementation == after:
                config._attn_implementation = before
        return in_force


class _Filling:
    """A kernel for a slot, and the way back."""

    def __init__(self, slot: OpSlot, value: str, kernel: Callable[..., Any]) -> None:
        self.module = slot
        self.name = slot.op
        self._after = (value, kernel)
        self._before = (slot.value, slot.kernel)

    def make(self) -> None:
        self.module.fill(*self._after)

    @property
    def in_force(self) -> bool:
        return (self.module.value, self.module.kernel) == self._after

    def undo(self) -> bool:
        if not self.in_force:
            return False
        self.module.fill(*self._before)
        return True


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a dry plan binds nothing")


def _attempt(prove: Callable[[Any], Any], subject: Any) -> Any:
    try:
        return prove(subject)
    except Unproven as error:
        return error


def _inner_of(like: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the forward that an instance had of its own; with the signature of its class's."""

    @functools.wraps(like)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, losses.INNER)[0](*args, **kwargs)

    return forward


def _probe(loss: losses.CausalLoss, spec: KernelSpec, *, bound: bool) -> float | None:
    """The loss of a model on six tokens; None where it can't be run as it is, or needs more than tokens."""
    model = loss.model
    parameters = list(model.parameters())
    plain = all(type(p) in (torch.Tensor, nn.Parameter) and not p.is_meta and not p.is_inference() for p in parameters)
    sharded = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if not parameters or not plain or sharded or getattr(model, "main_input_name", "") != "input_ids":
        return None
    device = model.get_input_embeddings().weight.device
    if spec.hardware.device not in ("any", device.type) and not spec.hardware.interpreted:
        return None
    # Kernels compute the loss where gradients are on.
    with _evaluating(model), torch.inference_mode(False), torch.set_grad_enabled(bound):
        tokens = (torch.arange(6, device=device) % (model.get_output_embeddings().out_features - 1) + 1).unsqueeze(0)
        labels = tokens.clone()
        labels[0, 2] = -100
        try:
            value = model(input_ids=tokens, labels=labels).loss
        except Exception:  # it needs images, or another kind of tokens
            if bound:
                raise
            return None
    return None if value is None else float(value.detach())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

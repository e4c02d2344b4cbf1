"""From a config to the changes of a model: which modules an op is about, what each computes, which kernel that allows."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..errors import KernelUnavailableError, UnsupportedFeatureError
from . import hub, registry, rewriting
from .apply import Binding
from .config import EAGER
from .instances import Change, ops_of, ours, replaced, require_unreplaced
from .losses import causal as losses
from .op_slot import OpSlot
from .recognisers import balancing, experts, gated, mlps, norms, rotary
from .recognisers.probing import Unproven, kind
from .registry import KernelSpec


class Plan:
    """What a config changes in a model. Made whole, or refused, before anything is changed.

    Attributes:
        changes: in the order in which they are made.
        notes: ops of the config that the model doesn't have.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, str | None], dry: bool = False) -> None:
        """
        Args:
            config: values by field, those of an `OpsConfig`.
            dry: load no kernels and ask for no device, to see what would be bound: such a plan isn't to be made.
        """
        self.model = model
        self.config = config
        self.dry = dry
        self.changes: list[Change | _Attention | _Filling] = []
        self.bindings: list[Binding] = []
        self.notes: list[str] = []
        self._kernels: dict[KernelSpec, Callable[..., Any]] = {}
        self._functions: dict[Any, Any] = {}
        self._found: dict[Any, dict[str, dict[str, Any]]] = {}
        self._bound: set[str] = set()
        self._environment = registry.detect()
        self._loss: losses.CausalLoss | None = None
        self._hub = hub.Layers(model)
        for op, find in _FINDERS.items():
            value = config.get(f"{op}_implementation") or EAGER
            if value != EAGER:
                self._slots(op, value)
                find(self, op, value)
                there = any(binding.op == op for binding in self.bindings) or op in self._bound
                if not there and not any(note.startswith(op) for note in self.notes):
                    self.notes.append(f"{op}: this model has none")
        name = config.get("attn_implementation")
        if name is not None and hasattr(model, "set_attn_implementation"):
            self.changes.append(_Attention(model, name))
            self.bindings.append(Binding("", "attn", "", name))
        elif name is not None:
            self.notes.append("attn: this is no model of transformers")
        self.changes += self._hub.guards([change.module for change in self.changes])

    def make(self) -> None:
        """Change the model.

        Raises:
            UnsupportedFeatureError: its loss is another with the kernel. As after every error, nothing is changed.
        """
        done = []
        try:
            eager = _probe(self._loss.model, bound=False) if self._loss else None
            for change in self.changes:
                change.make()
                done.append(change)
            if eager is not None and self._loss is not None:
                self._compare(eager)
        except BaseException:
            for change in reversed(done):
                change.undo()
            raise
        if self._loss and eager is None:
            self.notes.append(
                "cross_entropy_loss: it shows at the first forward with labels whether the model calls its loss"
            )

    def _compare(self, eager: float) -> None:
        assert self._loss is not None
        model = self._loss.model
        half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
        try:
            found = _probe(model, bound=True)
        except UnsupportedFeatureError:
            raise
        except Exception as error:
            raise self._unlike(f"its forward failed on a probe ({type(error).__name__}: {error})") from error
        off = abs((float("nan") if found is None else found) - eager) / max(abs(eager), 1e-6)
        if not off < (2e-2 if half else 1e-4):
            raise self._unlike(f"the loss of a probe is off by {off:.1e}")

    def _unlike(self, why: str) -> UnsupportedFeatureError:
        assert self._loss is not None
        value = str(self.config["cross_entropy_loss_implementation"])
        return self._refused("cross_entropy_loss", value, "", self._loss.model, why)

    # What each op is about.

    def _slots(self, op: str, value: str) -> None:
        for path, module in self.model.named_modules():
            for name, slot in vars(module).items():
                if not isinstance(slot, OpSlot) or slot.op != op:
                    continue
                if slot.value == value:  # it was filled when the module was built
                    self._bound.add(op)
                    continue
                spec = self._spec(op, value, slot.variant, path, module)
                self.changes.append(_Filling(slot, value, self._kernel(spec)))
                self.bindings.append(Binding(f"{path}.{name}".strip("."), op, slot.variant, value, "an OpSlot"))

    def _norms(self, op: str, value: str) -> None:
        proven: dict[Any, norms.RmsNorm | Unproven] = {}
        weightless = set()
        for path, module in self.model.named_modules():
            named = norms.calls_itself_one(module)
            if self._has(module, op):
                continue
            if not norms.is_candidate(module):
                if named and "parametrizations" in module._modules:
                    raise self._refused(op, value, path, module, "its weight is parametrized")
                if named and not any(p is not None for p in module._parameters.values()):
                    weightless.add(type(module).__name__)
                continue
            key = kind(module)
            if key not in proven:
                proven[key] = _attempt(norms.prove, module)
            found = proven[key]
            if isinstance(found, Unproven):
                if named:
                    raise self._refused(op, value, path, module, str(found))
                continue
            spec = self._spec(op, value, found.variant, path, module)
            require_unreplaced(module, path, op, value)
            self._bind(
                path,
                module,
                spec,
                norms.forward_of(found, self._kernel(spec)),
                f"eps {found.eps:g}, {found.casting} casting",
            )
        if weightless:
            self.notes.append(f"{op}: {', '.join(sorted(weightless))} without a weight stays eager")

    def _gated_norms(self, op: str, value: str) -> None:
        proven: dict[Any, gated.GatedNorm | Unproven] = {}
        theirs: set[str] = set()
        for path, module in self.model.named_modules():
            if type(module).__module__.startswith("fla."):  # transformers takes it by itself where it is installed
                theirs.add(type(module).__name__)
            if self._has(module, op) or not gated.is_candidate(module):
                continue
            key = kind(module)
            if key not in proven:
                proven[key] = _attempt(gated.prove, module)
            found = proven[key]
            if isinstance(found, Unproven):
                raise self._refused(op, value, path, module, str(found))
            spec = self._spec(op, value, "standard", path, module)
            require_unreplaced(module, path, op, value)
            self._bind(path, module, spec, gated.forward_of(found, self._kernel(spec)), f"eps {found.eps:g}")
        if theirs:
            self.notes.append(f"{op}: {', '.join(sorted(theirs))} is flash-linear-attention's already")

    def _mlps(self, op: str, value: str) -> None:
        proven: dict[Any, mlps.SwiGlu | Unproven] = {}
        for path, module in self.model.named_modules():
            if self._has(module, op) or not mlps.is_candidate(module):
                continue
            key = kind(module)
            if key not in proven:
                proven[key] = _attempt(mlps.prove, module)
            found = proven[key]
            if isinstance(found, Unproven):
                if mlps.calls_itself_one(module):
                    raise self._refused(op, value, path, module, str(found))
                continue
            spec = self._spec(op, value, "standard", path, module)
            require_unreplaced(module, path, op, value)
            self._bind(
                path,
                module,
                spec,
                mlps.forward_of(found, self._kernel(spec)),
                f"{found.down}(silu({found.gate}) * {found.up})"
                if found.up
                else f"{found.down}(silu(one half of {found.gate}) * the other)",
            )

    def _experts(self, op: str, value: str) -> None:
        proven: dict[Any, experts.Experts | Unproven] = {}
        for path, module in self.model.named_modules():
            named = experts.calls_itself_one(path, module)
            if self._has(module, op):
                continue
            if not experts.is_candidate(module):
                if named and (why := experts.unlike_because(module)):
                    raise self._refused(op, value, path, module, why)
                continue
            key = kind(module)
            if key not in proven:
                proven[key] = _attempt(experts.prove, module)
            found = proven[key]
            if isinstance(found, Unproven):
                if named:
                    raise self._refused(op, value, path, module, str(found))
                continue
            spec = self._spec(op, value, found.variant, path, module)
            require_unreplaced(module, path, op, value)
            self._bind(path, module, spec, experts.forward_of(found, self._kernel(spec)), str(found))

    def _rotary(self, op: str, value: str) -> None:
        proven: dict[int, rotary.Rotary] = {}
        made: dict[Any, FunctionType] = {}
        equal: Unproven | bool | None = None
        for path, module in self.model.named_modules():
            for method, functions in self._callers(module, rotary.NAMES).items():
                if self._has(module, op, method):
                    continue
                replacements = {}
                variants = []
                for name, function in functions.items():
                    if id(function) not in proven:
                        try:
                            proven[id(function)] = rotary.prove(hub.unkernelized(function))
                        except Unproven as error:
                            raise self._refused(op, value, path, module, f"{name}: {error}") from None
                    found = proven[id(function)]
                    spec = self._spec(op, value, found.variant, path, module)
                    if found.needs_equal_halves or "equal_halves" in spec.assumes:
                        if equal is None:
                            equal = _attempt(rotary.require_equal_halves, self.model) or True
                        if isinstance(equal, Unproven):
                            raise self._refused(op, value, path, module, str(equal))
                    replacements[name] = self._rotary_function(found, spec)
                    variants.append(found.variant)
                if method == "forward":
                    require_unreplaced(module, path, op, value)
                self._rewrite(path, module, method, replacements, made, spec, "+".join(dict.fromkeys(variants)))

    def _rotary_function(self, found: rotary.Rotary, spec: KernelSpec) -> Callable[..., Any]:
        function: Callable[..., Any] | None = self._functions.get((found, spec))
        if function is None:
            function = self._functions[found, spec] = rotary.function_of(found, self._kernel(spec))
        return function

    def _balancing(self, op: str, value: str) -> None:
        made: dict[Any, FunctionType] = {}
        for path, module in self.model.named_modules():
            for method, functions in self._callers(module, balancing.NAMES).items():
                if self._has(module, op, method):
                    continue
                for function in functions.values():
                    try:
                        balancing.prove(function)
                    except Unproven as error:
                        raise self._refused(op, value, path, module, str(error)) from None
                spec = self._spec(op, value, "standard", path, module)
                function = self._functions.setdefault(spec, balancing.function_of(self._kernel(spec)))
                replacements = dict.fromkeys(functions, function)
                self._rewrite(path, module, method, replacements, made, spec, "standard")

    def _losses(self, op: str, value: str) -> None:
        found = losses.find(self.model)
        if found is None:
            return
        path, module = found
        if self._has(module, op):
            return
        try:
            loss = losses.prove(module)
        except Unproven as error:
            raise self._refused(op, value, path, module, str(error)) from None
        spec = self._spec(op, value, "causal", path, module)
        kernel = self._kernel(spec)
        pending = self._pending(module, "forward")
        inner: Callable[..., Any] = type(module).forward
        if pending is not None:
            inner = pending.value
            self.changes.remove(pending)
        elif (own := replaced(module)) is not None:
            self.changes.append(Change(module, losses.INNER, (own,)))
            inner = _inner_of(inner)
        self.changes += [
            Change(loss.head, "forward", ours(losses.head_forward(kernel), op, value)),
            Change(loss.head, losses.FORWARD, None),
            Change(module, losses.HEAD, (loss.head,)),
            Change(module, "_loss_function", losses.Loss(module)),
        ]
        self._bind(path, module, spec, losses.model_forward(loss, value, inner), "causal cross-entropy")
        self._loss = loss

    # What they share.

    def _callers(self, module: nn.Module, names: re.Pattern[str]) -> dict[str, dict[str, Any]]:
        key = (type(module), names)
        if key not in self._found:
            self._found[key] = rewriting.callers(type(module), names)
        return self._found[key]

    def _spec(self, op: str, value: str, variant: str, path: str, module: nn.Module) -> KernelSpec:
        specs = {spec.variant: spec for spec in registry.registered_kernels(op) if spec.name == value}
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

    def _has(self, module: nn.Module, op: str, method: str = "forward") -> bool:
        """Whether a part of the model was bound before it.

        Raises:
            ValueError: to another kernel.
        """
        found = ops_of(module, method).get(op)
        wanted = self.config[f"{op}_implementation"]
        if found is None:
            return any(isinstance(value, OpSlot) and value.op == op for value in vars(module).values())
        if found != wanted:
            raise ValueError(
                f"a {type(module).__name__} has the kernel {found!r} for {op} already, by apply_ops on what it is a part of: "
                f"undo that before applying {wanted!r}"
            )
        self._bound.add(op)
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
            made[key] = ours(rewriting.with_globals(function, replacements), spec.op, spec.name)
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
        self._before = (slot.value, slot._kernel)

    def make(self) -> None:
        self.module.fill(*self._after)

    @property
    def in_force(self) -> bool:
        return (self.module.value, self.module._kernel) == self._after

    def undo(self) -> bool:
        if not self.in_force:
            return False
        self.module.fill(*self._before)
        return True


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a plan that is made dry binds nothing")


def _attempt(prove: Callable[[Any], Any], module: nn.Module) -> Any:
    try:
        return prove(module)
    except Unproven as error:
        return error


def _inner_of(like: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the forward that an instance had of its own; with the signature of its class's."""

    @functools.wraps(like)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, losses.INNER)[0](*args, **kwargs)

    return forward


def _probe(model: Any, bound: bool) -> float | None:
    """The loss of a model on six tokens; None where it can't be run as it is, or needs more than tokens."""
    parameters = list(model.parameters())
    plain = all(type(p) in (torch.Tensor, nn.Parameter) and not p.is_meta and not p.is_inference() for p in parameters)
    sharded = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    if not parameters or not plain or sharded or getattr(model, "main_input_name", "") != "input_ids":
        return None
    device = model.get_input_embeddings().weight.device
    # Kernels compute the loss where gradients are on.
    with _evaluating(model), torch.inference_mode(False), torch.set_grad_enabled(bound):
        tokens = (torch.arange(6, device=device) % (model.get_output_embeddings().out_features - 1) + 1).unsqueeze(0)
        labels = tokens.clone()
        labels[0, 2] = -100
        try:
            loss = model(input_ids=tokens, labels=labels).loss
        except Exception:  # it needs images, or another kind of tokens
            if bound:
                raise
            return None
    return None if loss is None else float(loss.detach())


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


_FINDERS: dict[str, Callable[[Plan, str, str], None]] = {
    "moe": Plan._experts,
    "rms_norm": Plan._norms,
    "rms_norm_gated": Plan._gated_norms,
    "swiglu_mlp": Plan._mlps,
    "rotary_pos_emb": Plan._rotary,
    "load_balancing_loss": Plan._balancing,
    "cross_entropy_loss": Plan._losses,
}

"""liger-kernel's own patch of a built model, with errors where it has silence, and with a way back."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any, NamedTuple

from ..environment import importable
from ..errors import KernelCompatError, KernelUnavailableError, SeamError, UnsupportedFeatureError
from ..patching.handle import Handle
from ..patching.seam import Seam
from ..patching.wrapping import put_beneath

__all__ = ["use_liger_kernel"]

NAME = "liger_kernel"
INSTALL = "Install it with: pip install liger-kernel (with transformers 4: pip install 'liger-kernel<0.8.5')"
TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"
ENTRY = Seam("liger_kernel.transformers.monkey_patch:_apply_liger_kernel_to_instance", ("model",))

#: Where a model keeps its patch. In the model itself, so that both go together: what Liger has replaced may refer to
#: the model, and a registry of ours that held it would keep the model alive.
RECORD = "_kernel_compat_liger"


def use_liger_kernel(model: Any, **options: Any) -> Handle:
    """Patch a model with liger-kernel, as liger-kernel itself does it: `_apply_liger_kernel_to_instance`.

    That replaces methods of the instance, and with them attributes that the process shares: functions and classes
    of the model type's modeling module (``apply_rotary_pos_emb``, the norm and MLP classes); for some model types
    and options ``torch.nn.functional.cross_entropy``, ``torch.nn.CrossEntropyLoss`` or ``torch.nn.LayerNorm``; in
    releases before 0.6.2 the names of the norm and MLP classes and the forward of the model's class. These reach
    other models too, those that exist and those that are built, until every patched model that asked for them is
    unpatched or collected. What was made meanwhile keeps what it got: a model built with Liger's classes, a module
    that imported a replaced name, a `copy.deepcopy` of a patched model.

    Undoing restores exactly what Liger changed, except what somebody else has replaced since. Called again on a
    patched model with the same options, it returns one more handle; the last one undoes the patch.

    Args:
        model: a model of transformers, or a PEFT model around one. Patch it before it is wrapped or compiled.
        options: those of Liger's function for the model type, such as ``rope``, ``rms_norm``, ``swiglu``,
            ``cross_entropy``, ``fused_linear_cross_entropy``; Liger's defaults for the others.

    Raises:
        TypeError: not a module with ``config.model_type``, or a compiled one.
        KernelUnavailableError: liger-kernel is missing, or doesn't import with this transformers and torch.
        SeamError: this release of liger-kernel patches instances in another way, or not at all.
        UnsupportedFeatureError: Liger has nothing for the model type; or it would replace a forward that isn't
            upstream's or computes something else, such as an MLP with another activation, or give a language modelling
            loss to a model without the head for it, with a bias on it, or with a loss function of its own.
        ValueError: an option that Liger doesn't have for the model type, and would drop; other options than those the
            model is patched with; a part of the model is patched already, through another one.
        KernelCompatError: Liger failed, or lost a submodule. As after every error, nothing is changed.
    """
    model, model_type = _target(model)
    liger = _load()
    defaults = liger.options(model_type)
    unknown = sorted(options.keys() - defaults.keys())
    if unknown:
        raise ValueError(
            f"liger-kernel has no option {', '.join(unknown)} for the model type {model_type!r}: "
            f"it has {', '.join(sorted(defaults))}"
        )
    chosen = {**defaults, **options}
    with _locked():
        patch = _find(model)
        if patch is None:
            patch = _apply(model, liger, options, chosen)
        elif patch.options != chosen:
            raise ValueError(
                f"this {type(model).__name__} is patched already, with {_written(patch.options)}: "
                f"undo that before patching it with {_written(chosen)}"
            )
        patch.holders += 1
        return Handle(partial(_release, weakref.ref(patch)))


# What to patch, and with what.


def _target(model: Any) -> tuple[Any, str]:
    """The module to patch and its model type; of a PEFT model, the one that it wraps."""
    unwrap = getattr(model, "get_base_model", None)
    if callable(unwrap):
        model = unwrap()
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if "_orig_mod" in model._modules:
        raise TypeError("model is compiled already: patch the model itself, then compile it")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(f"{type(model).__name__} has no config.model_type, by which Liger knows what to patch")
    return model, model_type


@dataclass(frozen=True)
class _Liger:
    """The parts of liger-kernel that are used here.

    Attributes:
        apply: patches an instance.
        functions: what patches each model type.
    """

    apply: Callable[..., None]
    functions: Mapping[str, Callable[..., None]]

    def options(self, model_type: str) -> dict[str, Any]:
        """The options for a model type, with their defaults."""
        if model_type not in self.functions:
            known = f"liger-kernel {_version()} supports: {', '.join(sorted(self.functions))}."
            raise UnsupportedFeatureError(f"the model type {model_type!r}", NAME, known)
        parameters = inspect.signature(self.functions[model_type]).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {p.name: p.default for p in parameters if p.kind not in variadic and p.name != "model"}


def _load() -> _Liger:
    if not importable(NAME):
        raise KernelUnavailableError(NAME, ["liger-kernel is not installed"], INSTALL)
    try:
        module = importlib.import_module(ENTRY.module)
    except Exception as error:  # no triton, another transformers than it was written for, ...
        reason = f"liger-kernel {_version()} is installed but does not import ({type(error).__name__}: {error})"
        raise KernelUnavailableError(NAME, [reason], INSTALL) from error
    version = f"liger-kernel {_version()}"
    apply = ENTRY.locate(version).original
    functions = vars(module).get(TABLE)
    if not isinstance(functions, Mapping):
        found = "nothing of that name" if functions is None else type(functions).__name__
        raise SeamError(f"{ENTRY.module}:{TABLE}", "functions by model type", found, version)
    return _Liger(apply, functions)


def _version() -> str:
    for name in ("liger-kernel", "liger-kernel-nightly"):
        with suppress(Exception):  # no metadata, or broken metadata: it is for messages only
            return importlib.metadata.version(name)
    return "of an unknown version"


def _written(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


# The patch of one model.


class _Change(NamedTuple):
    """One entry of one owner that Liger changed.

    Attributes:
        owner: a module's globals or a class, which the process shares; of the model, an instance (for its class) or one
            of its dicts.
        module: the submodule that the owner is a part of; None for what the process shares.
    """

    owner: Any
    name: str
    before: Any
    after: Any
    module: Any


@dataclass(eq=False)
class _Patch:
    """What is in force on one model.

    Attributes:
        token: what `_shared` knows it by.
        options: all of Liger's options, defaults included.
        changes: those of the model itself.
        root: the model's attributes, among which this is.
        holders: handles that haven't been undone.
    """

    token: int
    options: dict[str, Any]
    changes: list[_Change]
    root: dict[str, Any]
    finalizer: Any
    holders: int = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copy of the model has no patch of its own to undo


def _find(model: Any) -> _Patch | None:
    patch = vars(model).get(RECORD)
    return patch if patch is not None and patch.root is vars(model) else None  # else a shallow copy's


def _apply(model: Any, liger: _Liger, options: Mapping[str, Any], chosen: dict[str, Any]) -> _Patch:
    modules = list(model.modules())
    if any(module in claim.modules for claim in _shared.claims.values() for module in modules):
        what = f"a part of this {type(model).__name__} is patched already, through another model"
        raise ValueError(f"{what}: undo that first")
    token = next(_tokens)
    photographs: list[_Photograph] = []
    with _shared.lifted():
        try:
            photographs += _of_model(modules)
            photographs += _of_process(modules)
            _import_what_liger_changes(liger, modules)
            known = {id(photograph.owner) for photograph in photographs}
            photographs += (late for late in _of_process(modules) if id(late.owner) not in known)
            liger.apply(model, **options)
            changes = [change for photograph in photographs for change in photograph.changes()]
            _refuse_losses(changes)
            _require_same(changes)
            own = [change for change in changes if change.module is not None]
            _shared.claim(token, [change for change in changes if change.module is None], (c.module for c in own))
            patch = _Patch(token, chosen, own, vars(model), weakref.finalize(model, _collected, token))
            patch.finalizer.atexit = False
            vars(model)[RECORD] = patch
            return patch
        except BaseException as error:
            _shared.claims.pop(token, None)
            _restore(change for photograph in photographs for change in photograph.changes())
            if isinstance(error, KernelCompatError) or not isinstance(error, Exception):
                raise
            raise KernelCompatError(
                f"liger-kernel {_version()} failed on {type(model).__name__} ({type(error).__name__}: {error}). "
                "The model is as it was."
            ) from error


def _release(reference: weakref.ref[_Patch]) -> None:
    """What a handle does."""
    with _locked():
        patch = reference()
        if patch is None:  # the model is gone, and the patch with it
            return
        patch.holders -= 1
        if patch.holders:
            return
        patch.finalizer.detach()
        patch.root.pop(RECORD, None)
        _restore(patch.changes)
        with _shared.lifted():
            _shared.claims.pop(patch.token, None)


def _import_what_liger_changes(liger: _Liger, modules: Iterable[Any]) -> None:
    """Liger imports modeling modules as it goes, and changes them at once: what was in them has to be known before.

    With every option off and without a model, its functions import, and do nothing else.
    """
    configs = (vars(module).get("config") for module in modules)
    for model_type in dict.fromkeys(getattr(config, "model_type", None) for config in configs):
        if isinstance(model_type, str) and model_type in liger.functions:
            with suppress(Exception):  # the same comes again where it matters
                liger.functions[model_type](**dict.fromkeys(liger.options(model_type), False))


def _refuse_losses(changes: Iterable[_Change]) -> None:
    """Raise where Liger has replaced what it doesn't stand in for: the model would compute something else."""
    for change in changes:
        module, what = change.module, type(change.module).__name__
        if module is None:
            continue
        if change.owner is module._modules and change.after is None and change.before is not _MISSING:
            raise KernelCompatError(
                f"liger-kernel {_version()} removed {change.name} from {what}. The model is as it was: "
                "turn off the option that does so, or use another release."
            )
        if change.owner is not vars(module) or change.name != "forward":
            continue
        if _somebodys(module, change.before):
            raise UnsupportedFeatureError(
                f"{what} with a forward that isn't upstream's, which it would replace",
                NAME,
                "Patch the model before its forward is replaced, or turn off the option that replaces it: "
                "fused_linear_cross_entropy for the whole model's.",
            )
        head = getattr(module, "get_output_embeddings", None)
        if callable(head) and head() is None:
            raise UnsupportedFeatureError(
                f"a fused loss of {what}, which has no language modelling head",
                NAME,
                "Pass fused_linear_cross_entropy=False.",
            )


def _require_same(changes: Iterable[_Change]) -> None:
    """Raise where Liger computes something else than what it stands in for, or where that isn't known."""
    from ..ops.recognisers.probing import Unproven
    from .liger_proof import key, require_same, require_same_activation

    proven = set()
    for change in changes:
        module, after = change.module, change.after
        what, function = type(module).__name__, getattr(after, "__func__", after)
        try:
            if module is None:
                continue
            if change.owner is module._modules and _top(type(after)) == "liger_kernel":
                what = type(change.before).__name__
                require_same_activation(change.before, after)
            elif change.owner is not vars(module) or change.name != "forward" or _top(function) != "liger_kernel":
                continue
            elif ".model." in function.__module__:
                _require_loss(module)
            elif _top(type(module)) != "liger_kernel" and (alike := key(module, function)) not in proven:
                require_same(module, function)
                proven.add(alike)
        except Unproven as unproven:
            option = _option(getattr(function, "__qualname__", type(after).__name__))
            raise UnsupportedFeatureError(
                f"{what}, in the place of which it would put something else: {unproven}",
                NAME,
                f"Turn off the option that does so{option}.",
            ) from None


def _require_loss(model: Any) -> None:
    """Check that Liger's forward with a fused loss is for this very model."""
    from ..ops.recognisers.probing import Unproven

    own = next(c for c in type(model).__mro__ if "forward" in vars(c))
    packages = {c.__module__.rpartition(".")[0] for c in type(getattr(model, "config", None)).__mro__}
    if _top(own) != "transformers" or own.__module__.rpartition(".")[0] not in packages:
        raise Unproven(f"{own.__module__}.{own.__qualname__} is not transformers' model of this type")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(head, "bias", None) is not None:
        raise Unproven("its head has a bias, which the fused loss leaves out")
    loss = getattr(model, "loss_function", None)
    if loss is not None and getattr(loss, "__name__", None) != "ForCausalLMLoss":
        raise Unproven(f"its loss_function is {getattr(loss, '__qualname__', loss)}, which the fused loss ignores")


def _option(name: str) -> str:
    """Which option is responsible for what Liger calls so."""
    words = {
        "RMSNorm": "rms_norm",
        "LayerNorm": "layer_norm",
        "GEGLU": "geglu",
        "SwiGLU": "swiglu",
        "MLP": "swiglu",
        "Experts": "swiglu",
        "ReLU": "relu_squared",
        "forward": "fused_linear_cross_entropy",
    }
    return next((f", {option}" for word, option in words.items() if word in name), "")


def _somebodys(module: Any, forward: Any) -> bool:
    """Whether the forward that an instance had (`_MISSING`: its class's) is an override of upstream's."""
    if forward is _MISSING:
        classes = [c for c in type(module).__mro__ if "forward" in vars(c)]
        upstream = any(_top(c) == "transformers" for c in classes)
        return upstream and _top(vars(classes[0])["forward"]) not in ("transformers", "liger_kernel", "kernels")
    if "_hf_hook" in vars(module):
        return False  # accelerate's hooks move tensors: without them the result is the same, or an error
    return _top(getattr(forward, "__func__", forward)) != "liger_kernel"


def _top(thing: Any) -> str:
    return str(getattr(thing, "__module__", None)).partition(".")[0]


# What was there before, and what is there now. For any model type: Liger has fifty functions, new ones in each release.


_MISSING: Any = object()

#: What Python or transformers adds to modules and classes by itself, at any time.
_INCIDENTAL = ("__annotations__", "__annotations_cache__", "__slotnames__", "__warningregistry__")


class _Photograph:
    """What was in an owner."""

    def __init__(self, owner: Any, module: Any = None) -> None:
        self.owner = owner
        self.module = module
        self.contents = _contents(owner)

    def changes(self) -> list[_Change]:
        before, now = self.contents, _contents(self.owner)
        names = [name for name, value in now.items() if before.get(name, _MISSING) is not value]
        names += before.keys() - now.keys()
        changes = (
            _Change(self.owner, name, before.get(name, _MISSING), now.get(name, _MISSING), self.module)
            for name in names
        )
        return [change for change in changes if self.module is not None or not _incidental(change)]


def _incidental(change: _Change) -> bool:
    """Whether an addition to what the process shares is an import's, of this thread or another."""
    if change.before is not _MISSING:
        return False
    lazy = isinstance(change.owner, ModuleType) and type(change.owner) is not ModuleType
    return lazy or change.name in _INCIDENTAL or isinstance(change.after, ModuleType)


def _of_model(modules: Iterable[Any]) -> Iterator[_Photograph]:
    for module in modules:
        attributes = vars(module)
        yield _Photograph(module, module)
        yield _Photograph(attributes, module)
        for value in attributes.values():
            if isinstance(value, dict):  # parameters, buffers, submodules, hooks
                yield _Photograph(value, module)


def _of_process(modules: Iterable[Any]) -> Iterator[_Photograph]:
    """transformers and torch.nn as far as they are imported: globals, classes defined there, and those of `modules`."""
    classes = {id(c): c for kind in {type(module) for module in modules} for c in kind.__mro__ if c is not object}
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType) or not f"{name}.".startswith(("transformers.", "torch.nn.")):
            continue
        photograph = _Photograph(module)
        yield photograph
        for value in photograph.contents.values():
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                classes[id(value)] = value
    yield from map(_Photograph, classes.values())


def _contents(owner: Any) -> dict[str, Any]:
    if isinstance(owner, dict):
        return dict(owner)
    if isinstance(owner, type):
        return {**vars(owner).copy(), "__name__": owner.__name__, "__qualname__": owner.__qualname__}
    if isinstance(owner, ModuleType):
        return vars(owner).copy()
    return {"__class__": type(owner)}


def _read(owner: Any, name: str) -> Any:
    return _contents(owner).get(name, _MISSING)


def _write(owner: Any, name: str, value: Any) -> None:
    if _read(owner, name) is value:
        return
    if isinstance(owner, dict):
        if value is _MISSING:
            del owner[name]
        else:
            owner[name] = value
    elif value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one; each access to a method makes a new object of it."""
    return one is other or (type(one) is type(other) is MethodType and one == other)


def _restore(changes: Iterable[_Change]) -> None:
    for change in changes:
        if _same(_read(change.owner, change.name), change.after):
            _write(change.owner, change.name, change.before)
        elif change.name == "forward" and change.module is not None and change.owner is vars(change.module):
            put_beneath(change.module, change.after, None if change.before is _MISSING else change.before)


# What the process shares.


class _Claim(NamedTuple):
    """What one patch has changed: the process, by owner and name, and which modules of its model."""

    values: dict[tuple[Any, str], Any]
    modules: weakref.WeakSet[Any]


class _Shared:
    """What Liger changed in modules and classes, for whom. One patch's claim holds nothing of its model.

    Attributes:
        originals: what was there before the first patch, by owner and name.
        claims: by the token of the patch, in the order of the patches. The last has its value in place.
    """

    def __init__(self) -> None:
        self.originals: dict[tuple[Any, str], Any] = {}
        self.claims: dict[int, _Claim] = {}

    def claim(self, token: int, changes: Iterable[_Change], modules: Iterable[Any]) -> None:
        values = {}
        for change in changes:
            values[change.owner, change.name] = change.after
            self.originals.setdefault((change.owner, change.name), change.before)
        self.claims[token] = _Claim(values, weakref.WeakSet(modules))

    def wanted(self, slot: tuple[Any, str]) -> Any:
        values = (claim.values[slot] for claim in reversed(self.claims.values()) if slot in claim.values)
        return next(values, self.originals[slot])

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Everything as it was before the first patch, so that a block can patch or drop a claim; then as claimed.

        A model that runs in another thread meanwhile computes with upstream's functions.
        """
        for slot in [slot for slot in self.originals if not _same(_read(*slot), self.wanted(slot))]:
            del self.originals[slot]  # somebody has patched over it: theirs from now on
            for claim in self.claims.values():
                claim.values.pop(slot, None)
        try:
            for slot, original in self.originals.items():
                _write(*slot, original)
            yield
        finally:
            for slot in list(self.originals):
                _write(*slot, self.wanted(slot))
                if not any(slot in claim.values for claim in self.claims.values()):
                    del self.originals[slot]


_shared = _Shared()
_tokens = itertools.count()
_lock = threading.Lock()

#: Tokens of patches whose models are gone.
_gone: deque[int] = deque()


@contextmanager
def _locked() -> Iterator[None]:
    try:
        with _lock:
            yield
    finally:
        _sweep()


def _collected(token: int) -> None:
    """A model has gone without being unpatched. Called by the garbage collector: at any time, in any thread."""
    _gone.append(token)
    _sweep()


def _sweep() -> None:
    while _gone and _lock.acquire(blocking=False):  # where it is taken, the holder sweeps after it
        try:
            with _shared.lifted():
                while _gone:
                    _shared.claims.pop(_gone.popleft(), None)
        finally:
            _lock.release()

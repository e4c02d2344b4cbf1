"""Load a model with an attention name, or with the next of the ladder if that name is not supported."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

from ..attention.defaults import registered_attention
from ..environment import Environment
from ..errors import KernelUnavailableError, UnsupportedFeatureError
from ..patching.swap import Change, make, undo
from .capabilities import capabilities, kernel_of, require_features
from .ladder import next_fallback, steps_from
from .support import implementations, needs

__all__ = ["load_with_fallback"]

_logger = logging.getLogger("kernel_compat.policy")

T = TypeVar("T")


def load_with_fallback(load: Callable[[str], T], name: str | None, *, requires: Collection[str] = ()) -> T:
    """Load a model with `name`, or with the next of the ladder if that is not supported here.

    While `load` runs, each part of the model is checked against its config as it is built, before its weights are read. These
    errors lead to the next step: a `KernelUnavailableError` or an `UnsupportedFeatureError` about the attention, and the
    errors by which transformers refuses the name for the model, the installation or the device. All others are raised
    unchanged. After the first, names that can't be used here are skipped. Each step is logged as a warning, once a process.

    A model that needs a feature which the name ignores silently (attention sinks; softcap under ``sdpa``) counts as not
    supported.

    Args:
        load: called with an attention name; returns the model, a tuple that begins with it, or any other object.
        name: the first name to try. None, as in a `Preload`, begins at ``sdpa``, as transformers does.
        requires: features that the name must have, as in `best_available`.

    Returns:
        The object that `load` returned. A model's ``config._attn_implementation`` is the name it was loaded with.

    Raises:
        KernelUnavailableError: no name from `name` down to ``eager`` is supported; the message has the reason for each.
        TypeError: `name` is neither a string nor None.
        ValueError: `requires` names no feature.
    """
    name = "sdpa" if name is None else name
    environment = Environment.detect()
    reasons: list[str] = []
    cause: Exception | None = None
    for step in steps_from(name, environment, requires):
        following = next_fallback(step.name)
        reason: str | None = step.reason
        # The first is tried although it may be unknown here: a hub kernel, or a name that other code has registered.
        if step.usable or (step.name == name and _may_be_tried(name, environment, requires)):
            with _building.watched(environment) as refusals:
                try:
                    model = load(step.name)
                except Exception as error:
                    refused = any(error is one for one in refusals) or _is_refusal(error, step.name)
                    if not refused or (following is None and not reasons):
                        raise
                    # The frames of its traceback would keep the loaded objects alive.
                    reason, cause = " ".join(str(error).split()), error.with_traceback(None)
                else:
                    reason = _unsupported_because(model, step.name, environment)
                    if reason is None:
                        return model
                    del model
        reasons.append(f"{step.name}: {reason}")
        if following:
            _warn_once(f"attn_implementation={step.name!r} is not supported here, trying {following!r}: {reason}")
    raise KernelUnavailableError(name, reasons) from cause


def _may_be_tried(name: str, environment: Environment, requires: Collection[str]) -> bool:
    """Whether to call `load` with a first name that `step_of` does not call usable."""
    name = name.removeprefix("paged|")
    found = capabilities(name, environment)
    if found is None:
        return True
    kernel = kernel_of(name, environment)
    # A kernel that loads where it can't run would fail only in the first forward.
    fails_late = kernel is not None and bool(found.unusable) and not kernel[1].unloadable_because(environment)
    return not fails_late and not found.features.lacking(requires)


def _unsupported_because(loaded: object, requested: str, environment: Environment) -> str | None:
    """Why a loaded model doesn't run right under its attention names, or None. Warns of names that were not requested."""
    model = loaded[0] if isinstance(loaded, tuple) and loaded else loaded  # output_loading_info=True
    kind = type(model).__name__
    names = implementations(model)
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    for name in names:
        if table is not None and not name.endswith("eager") and name not in table:
            return f"transformers loaded {kind} with {name!r}, for which it has no function"
    try:
        for name, feature in needs(model):
            require_features(name, {feature}, kind, environment)
    except UnsupportedFeatureError as error:
        return str(error)
    if names and requested not in names:
        _warn_once(f"{kind} was loaded with {' and '.join(map(repr, names))} instead of {requested!r}")
    return None


def _is_refusal(error: Exception, name: str) -> bool:
    """Whether an error, raised outside a model's check of its attention name, says that the name is not supported."""
    if isinstance(error, (KernelUnavailableError, UnsupportedFeatureError)):
        # `load` may apply model patches: their errors name another kernel.
        bare = name.removeprefix("paged|")
        entry = registered_attention().get(bare)
        return error.kernel in (name, bare, entry and entry.kernel.name) or repr(bare) in getattr(error, "feature", "")
    return _can_refuse(error) and _refused_by_config(error, name)


def _can_refuse(error: Exception) -> bool:
    # The hub's errors for files that are not in its cache are ValueErrors and OSErrors.
    return isinstance(error, (ImportError, ValueError)) and not isinstance(error, OSError)


def _refused_by_config(error: Exception, name: str) -> bool:
    """Whether a config class raises the same error when the name is set: GPT-OSS's in 5.0 to 5.2, HRM-Text's from 5.9."""
    module = sys.modules.get("transformers.configuration_utils")
    base = getattr(module, "PreTrainedConfig", None) or getattr(module, "PretrainedConfig", None)
    classes = [] if base is None else [base]
    for kind in classes:  # grows
        classes += kind.__subclasses__()
        if not {"__setattr__", "_attn_implementation"}.isdisjoint(vars(kind)) and kind is not base:
            try:
                kind.__new__(kind)._attn_implementation = name
            except Exception as found:
                if type(found) is type(error) and str(found) == str(error):
                    return True
    return False


class _Building:
    """Notes the errors by which models refuse an attention name while `load_with_fallback` runs.

    `PreTrainedModel.__init__` and `set_attn_implementation` are replaced as long as any thread is loading; the replacements do
    nothing in a thread that isn't.
    """

    _CHECK = "_check_and_adjust_attn_implementation"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading = 0
        self._changes: list[Change] = []
        self._current: ContextVar[tuple[list[Exception], Environment] | None] = ContextVar("current", default=None)

    @contextmanager
    def watched(self, environment: Environment) -> Iterator[list[Exception]]:
        """The errors noted in this thread until the end of the block."""
        refusals: list[Exception] = []
        with self._lock:
            if not self._loading:
                self._replace()
            self._loading += 1
        token = self._current.set((refusals, environment))
        try:
            yield refusals
        finally:
            self._current.reset(token)
            refusals.clear()  # their tracebacks refer to frames that refer to this list
            with self._lock:
                self._loading -= 1
                if not self._loading:
                    undo(self._changes)
                    self._changes = []

    def _replace(self) -> None:
        if importlib.util.find_spec("transformers") is None:
            return
        try:
            from transformers import PreTrainedModel

            init, set_name = PreTrainedModel.__init__, PreTrainedModel.set_attn_implementation
        except Exception:  # a broken installation, or no torch: `load` raises the same error if it needs them
            return

        @wraps(init)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            if self._current.get() is None:
                init(model, *args, **kwargs)
                return
            # On the instance, so that it also comes before the checks that model classes define.
            vars(model)[self._CHECK] = lambda *args, **kwargs: self._check(model, *args, **kwargs)
            try:
                init(model, *args, **kwargs)
            finally:
                vars(model).pop(self._CHECK, None)

        @wraps(set_name)
        def set_attn_implementation(model: Any, *args: Any, **kwargs: Any) -> Any:
            with self._noting():
                return set_name(model, *args, **kwargs)

        self._changes = [Change(PreTrainedModel, f.__name__, f) for f in (__init__, set_attn_implementation)]
        make(self._changes)

    def _check(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a model's own check, and refuse a name that lacks a feature which the config needs."""
        with self._noting() as environment:
            name = getattr(type(model), self._CHECK)(model, *args, **kwargs)
            if environment is not None and isinstance(name, str):
                # Its layers do not exist yet: these are the needs of the config.
                require_features(name, {feature for _, feature in needs(model)}, type(model).__name__, environment)
            return name

    @contextmanager
    def _noting(self) -> Iterator[Environment | None]:
        refusals, environment = self._current.get() or ([], None)
        try:
            yield environment
        except Exception as error:
            if _can_refuse(error):
                refusals.append(error)
            raise


_building = _Building()


@cache
def _warn_once(message: str) -> None:
    _logger.warning(message)

"""Load a model with an attention name, or with the next of the ladder if that name is not supported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

from ..attention.defaults import registered_attention
from ..environment import Environment
from ..errors import KernelUnavailableError, UnsupportedFeatureError
from ..patching.installation import Installation
from ..patching.seam import Seam
from ..patching.shim import Shim
from .capabilities import capabilities, require_features
from .ladder import ladder
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
    steps = ladder(name, environment, requires)
    for step, following in zip(steps, (*(step.name for step in steps[1:]), None), strict=True):
        reason: str | None = step.reason
        # The first is tried although it may be unknown here: a hub kernel, or a name that other code has registered.
        if step.usable or (step.name == name and _may_be_tried(name, environment, requires)):
            refusals: list[Exception] = []
            token = _loading.set((environment, refusals))
            try:
                with _checked_models.installed():
                    model = load(step.name)
            except Exception as error:
                if not (error in refusals or _is_refusal(error, step.name)) or (following is None and not reasons):
                    raise
                # The frames of its traceback would keep the loaded objects alive.
                reason, cause = " ".join(str(error).split()), error.with_traceback(None)
            else:
                reason = _unsupported_because(model, step.name, environment)
                if reason is None:
                    return model
                del model
            finally:
                _loading.reset(token)
                refusals.clear()  # their tracebacks refer to frames that refer to this list
        reasons.append(f"{step.name}: {reason}")
        if following:
            _warn_once(f"attn_implementation={step.name!r} is not supported here, trying {following!r}: {reason}")
    raise KernelUnavailableError(name, reasons) from cause


def _may_be_tried(name: str, environment: Environment, requires: Collection[str]) -> bool:
    """Whether to call `load` with a first name that `step_of` does not call usable."""
    found = capabilities(name, environment)
    if found is None:
        return True
    # A kernel that loads where it can't run would fail only in the first forward.
    fails_late = found.kernel and found.unusable and not found.kernel[1].unloadable_because(environment)
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
        _check_needs(model, environment)
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


#: In a thread that is in `load_with_fallback`: its environment, and the errors by which models refused the name.
_loading: ContextVar[tuple[Environment, list[Exception]] | None] = ContextVar("_loading", default=None)

_CHECK = "_check_and_adjust_attn_implementation"


@contextmanager
def _noting_refusals() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (loading := _loading.get()) and _can_refuse(error):
            loading[1].append(error)
        raise


def _check_needs(model: Any, environment: Environment) -> None:
    """Refuse a model that needs a feature which its attention name lacks: of its config, if its layers do not exist yet."""
    for name, feature in needs(model):
        require_features(name, {feature}, type(model).__name__, environment)


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    init, set_name = originals["__init__"], originals["set_attn_implementation"]

    @wraps(init)
    def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
        loading = _loading.get()
        if loading is None:
            init(model, *args, **kwargs)
            return

        def check(*args: Any, **kwargs: Any) -> Any:
            with _noting_refusals():
                name = getattr(type(model), _CHECK)(model, *args, **kwargs)
                if isinstance(name, str):
                    _check_needs(model, loading[0])
                return name

        vars(model)[_CHECK] = check  # on the instance, so that it also replaces the checks that model classes define
        try:
            init(model, *args, **kwargs)
        finally:
            vars(model).pop(_CHECK, None)

    @wraps(set_name)
    def set_attn_implementation(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _noting_refusals():
            return set_name(model, *args, **kwargs)

    return {"__init__": __init__, "set_attn_implementation": set_attn_implementation}


_MODEL = "transformers.modeling_utils:PreTrainedModel"

_SHIM = Shim(
    "checked_models",
    "transformers",
    ">=4",
    "an error doesn't say that it is about the attention name",
    seams=(
        Seam(f"{_MODEL}.__init__", ("self", "config")),
        Seam(f"{_MODEL}.set_attn_implementation", ("self", "attn_implementation")),
    ),
    replace=_replace,
)

#: Installed while any thread is in `load_with_fallback`.
_checked_models = Installation(discover=lambda: ([_SHIM], {}))


@cache
def _warn_once(message: str) -> None:
    _logger.warning(message)

"""Load a model with an attention name, or with the next of the ladder if that name is not supported."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
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
            token = _loading_in.set(environment)
            try:
                with _checked_models.installed():
                    model = load(step.name)
            except Exception as error:
                if not _is_refusal(error, step.name) or (following is None and not reasons):
                    raise
                # The frames of its traceback would keep the loaded objects alive.
                reason, cause = " ".join(str(error).split()), error.with_traceback(None)
            else:
                reason = _unsupported_because(model, step.name, environment)
                if reason is None:
                    return model
                del model
            finally:
                _loading_in.reset(token)
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


#: The environment, in threads that are in `load_with_fallback`.
_loading_in: ContextVar[Environment | None] = ContextVar("_loading_in", default=None)


def _check_needs(model: Any, environment: Environment) -> None:
    """Refuse a model that needs a feature which its attention name lacks: of its config, if its layers do not exist yet."""
    for name, feature in needs(model):
        require_features(name, {feature}, type(model).__name__, environment)


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    init = originals["__init__"]

    @wraps(init)
    def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)
        if environment := _loading_in.get():
            _check_needs(model, environment)

    return {"__init__": __init__}


_checked_models = Installation(
    discover=lambda: (
        [
            Shim(
                name="checked_models",
                distribution="transformers",
                versions=">=4",
                reason="a model that needs softcap reads its weights before anything refuses its attention",
                seams=(Seam("transformers.modeling_utils:PreTrainedModel.__init__", ("self", "config")),),
                replace=_replace,
            )
        ],
        {},
    )
)

#: The methods by which models check their attention, and the property by which HRM-Text's config does.
_CHECKS = frozenset(
    {"_check_and_adjust_attn_implementation", "set_attn_implementation", "_attn_implementation", "_check_needs"}
)


def _is_refusal(error: Exception, name: str) -> bool:
    """Whether an error says that the attention name is not supported."""
    if isinstance(error, (KernelUnavailableError, UnsupportedFeatureError)):
        # `load` may apply model patches: their errors name another kernel.
        bare = name.removeprefix("paged|")
        entry = registered_attention().get(bare)
        if error.kernel in (name, bare, entry and entry.kernel.name) or repr(bare) in getattr(error, "feature", ""):
            return True
    # The hub's errors for files that are not in its cache are ValueErrors and OSErrors.
    if isinstance(error, OSError) or not isinstance(error, (ImportError, ValueError)):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        method = frame.f_code.co_name
        # GPT-OSS's config, in 5.0 to 5.2, checks every value that is set.
        if method in _CHECKS or (method == "__setattr__" and "_attn_implementation" in str(frame.f_locals.get("key"))):
            return True
    return False


@cache
def _warn_once(message: str) -> None:
    _logger.warning(message)

"""Load a model with an attention name, or with the next of the ladder if that name is not supported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

from ..api import registered_attention
from ..attention.layer_kinds import is_encoder
from ..attention.roles import IMPLEMENTATION
from ..environment import Environment
from ..errors import AttentionRefusedError, KernelUnavailableError, UnsupportedFeatureError
from ..patching.installation import Installation
from ..patching.seam import Seam
from ..patching.shim import Shim
from .capabilities import capabilities, lacking_because, require_features
from .fallback import ladder
from .support import implementations, needs

__all__ = ["load_with_fallback"]

_logger = logging.getLogger(__name__)

T = TypeVar("T")


def load_with_fallback(
    load: Callable[[Any], T],
    name: str | Mapping[str, str] | None,
    *,
    requires: Collection[str] = (),
    prefer: Sequence[str] = (),
    exclude: Collection[str] = (),
    is_refusal: Callable[[Exception], bool] = lambda error: False,
) -> T:
    """Load a model with `name`, or with the next of the ladder if that is not supported here.

    While `load` runs, each part of the model is checked against its config as it is built, before its weights are read. These
    errors lead to the next step: a `KernelUnavailableError` or an `UnsupportedFeatureError` about the name or its kernel, and the
    errors by which transformers refuses the name for the model, the installation or the device. All others are raised
    unchanged. After the first, names that can't be used here are skipped. Each step is logged as a warning, once a process.

    A model that needs a feature which the name ignores silently (attention sinks; softcap under ``sdpa``) counts as not
    supported.

    Args:
        load: called with an attention name, or a dict of names if `name` is one; returns the model, a tuple that begins with it,
            or any other object.
        name: the first name to try. None, as in an `AttentionPlan`, begins at ``sdpa``, as transformers does. A dict has a name for each
            part of a composite model, by sub-config; the part whose name is refused goes on to its next one.
        requires: features that the name must have, as in `best_available`. Of a dict, those of encoders of images and sound
            needn't have them.
        prefer: names to try after the first and before the others, in this order.
        exclude: names not to try.
        is_refusal: called with an error that `load` raised, of any other kind; returns whether it means that the attention is
            not supported, as an error of the model's own may.

    Returns:
        The object that `load` returned. A model's ``config._attn_implementation`` is the name it was loaded with.

    Raises:
        KernelUnavailableError: no name from `name` down to ``eager`` is supported; the message has the reason for each.
        TypeError: `name` is neither a string, a dict of them nor None; or `prefer` or `exclude` is a string.
        ValueError: `requires` names no feature, or `name` is excluded or an empty dict.
        UnknownNameError: `prefer` or `exclude` has an unknown name.
    """
    requested: Mapping[str, str] = name if isinstance(name, Mapping) else {"": "sdpa" if name is None else name}
    if not requested:
        raise ValueError("name is an empty dict: it has the name of no part")
    environment = Environment.detect()
    parts = [
        _Part(key, first, environment, () if is_encoder(key) else requires, prefer, exclude)
        for key, first in requested.items()
    ]
    reasons: list[str] = []
    cause: Exception | None = None

    def step_down(part: _Part, reason: str) -> None:
        label = f"{part.key}: " if part.key else ""
        tried = part.name
        reasons.append(f"{label}{tried}: {reason}")
        if not part.advance():
            raise KernelUnavailableError(str(requested.get("", dict(requested))), reasons) from cause
        _warn_once(f"{label}attn_implementation={tried!r} is not supported here, trying {part.name!r}: {reason}")

    while True:
        for part in parts:
            while not part.may_be_tried:
                step_down(part, part.step.reason)
        names = [part.name for part in parts]
        keys: Collection[str] = ()
        loading = _Loading(environment)
        token = _loading.set(loading)
        try:
            with _checked_models.installed():
                model = load({part.key: part.name for part in parts} if isinstance(name, Mapping) else names[0])
        except Exception as error:
            noted = next((refusal for refusal in loading.refusals if refusal.error is error), None)
            refused = noted.name if noted else next((name for name in names if _is_refusal(error, name)), None)
            if noted is None and refused is None and not is_refusal(error):
                raise
            keys = noted.keys if noted else ()
            if not reasons and all(part.is_last for part in parts):
                raise
            # The frames of its traceback would keep the loaded objects alive.
            reason, cause = " ".join(str(error).split()), error.with_traceback(None)
        else:
            unsupported = _unsupported_because(model, names, environment)
            if unsupported is None:
                return model
            refused, reason = unsupported
            del model
        finally:
            _loading.reset(token)
            loading.refusals.clear()  # their tracebacks refer to frames that refer to this list
        blamed = [part for part in parts if part.name == refused] or parts
        blamed = [part for part in blamed if part.key in keys] or blamed
        for part in [part for part in blamed if not part.is_last] or blamed:
            step_down(part, reason)


class _Part:
    """The names that are left for a model, or for a part of a composite model.

    Attributes:
        key: the part's sub-config; empty for a whole model.
        step: the step of the ladder to try next.
    """

    def __init__(
        self,
        key: str,
        name: str,
        environment: Environment,
        requires: Collection[str],
        prefer: Sequence[str],
        exclude: Collection[str],
    ) -> None:
        self.key = key
        self.step, *self._following = ladder(name, environment, requires, prefer=prefer, exclude=exclude)
        # The first is tried although it may be unknown here: a hub kernel, or a name that other code has registered.
        self.may_be_tried = bool(self.step.usable) or _may_be_tried(name, environment, requires)

    @property
    def name(self) -> str:
        """The name to try next."""
        return self.step.name

    @property
    def is_last(self) -> bool:
        """Whether no name follows."""
        return not self._following

    def advance(self) -> bool:
        """Go on to the next name; returns whether there is one."""
        if self._following:
            self.step = self._following.pop(0)
            self.may_be_tried = bool(self.step.usable)
            return True
        return False


def _may_be_tried(name: str, environment: Environment, requires: Collection[str]) -> bool:
    """Whether to call `load` with a first name that `step_of` does not call usable."""
    capability = capabilities(name, environment)
    if capability is None:
        return True
    # A kernel that loads where it can't run would fail only in the first forward.
    fails_late = capability.kernel and capability.unusable and not capability.kernel[1].unloadable_because(environment)
    return not fails_late and not lacking_because(capability.features, requires, environment)


def _unsupported_because(
    loaded: object, requested: Collection[str], environment: Environment
) -> tuple[str, str] | None:
    """An attention name under which a loaded model doesn't run right, and why; or None. Warns of names that were not requested."""
    model = loaded[0] if isinstance(loaded, tuple) and loaded else loaded  # output_loading_info=True
    kind = type(model).__name__
    names = implementations(model)
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    for name in names:
        if table is not None and not name.endswith("eager") and name not in table:
            return name, f"transformers loaded {kind} with {name!r}, for which it has no function"
    try:
        _check_needs(model, environment)
    except UnsupportedFeatureError as error:
        return error.subject, str(error)
    if names and set(requested).isdisjoint(names):
        wanted = " and ".join(map(repr, requested))
        _warn_once(f"{kind} was loaded with {' and '.join(map(repr, names))} instead of {wanted}")
    return None


def _is_refusal(error: Exception, name: str) -> bool:
    """Whether an error, raised outside a model's check of its attention name, says that the name is not supported."""
    bare = name.removeprefix("paged|")
    if isinstance(error, AttentionRefusedError):
        return error.name == bare
    if isinstance(error, (KernelUnavailableError, UnsupportedFeatureError)):
        # `load` may apply model patches: their errors name another kernel.
        entry = registered_attention().get(bare)
        subject = error.subject if isinstance(error, UnsupportedFeatureError) else error.kernel
        return subject in (name, bare, entry and entry.kernel.name)
    return _can_refuse(error) and _raised_by_config(error, name)


def _can_refuse(error: Exception) -> bool:
    # The hub's errors for files that are not in its cache are ValueErrors and OSErrors.
    return isinstance(error, (ImportError, ValueError)) and not isinstance(error, OSError)


def _raised_by_config(error: Exception, name: str) -> bool:
    """Whether a config class raised an error as the name was set: GPT-OSS's does in 5.0 to 5.2, HRM-Text's from 5.9."""
    module = sys.modules.get("transformers.configuration_utils")
    base = getattr(module, "PreTrainedConfig", None) or getattr(module, "PretrainedConfig", None)
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
        values = [frame.f_locals.get(parameter) for parameter in code.co_varnames[: code.co_argcount]]
        if code.co_name == "__setattr__" and len(values) == 3:
            config, attribute, value = values
        elif code.co_name in IMPLEMENTATION.spellings and len(values) == 2:
            (config, value), attribute = values, code.co_name
        else:
            continue
        if base and isinstance(config, base) and str(attribute).startswith(IMPLEMENTATION.spellings) and value == name:
            return True
    return False


class _Refusal(NamedTuple):
    """An error by which a model refused an attention name, and the sub-configs that the model's may be."""

    error: Exception
    name: object
    keys: frozenset[str]


@dataclass
class _Loading:
    """A call of `load` in this thread.

    Attributes:
        environment: the environment.
        root: the config of the first model that was built.
        refusals: the errors by which models refused a name.
    """

    environment: Environment
    root: Any = None
    refusals: list[_Refusal] = field(default_factory=list)


_loading: ContextVar[_Loading | None] = ContextVar("_loading", default=None)

_CHECK = "_check_and_adjust_attn_implementation"


@contextmanager
def _noting_refusals(model: Any, name: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (loading := _loading.get()) and _can_refuse(error):
            keys = getattr(loading.root, "sub_configs", ())
            alike = frozenset(key for key in keys if type(getattr(loading.root, key, None)) is type(model.config))
            loading.refusals.append(_Refusal(error, name, alike))
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
        if loading.root is None:
            loading.root = args[0] if args else kwargs.get("config")

        def check(*args: Any, **kwargs: Any) -> Any:
            with _noting_refusals(model, args[0] if args else kwargs.get("attn_implementation")):
                name = getattr(type(model), _CHECK)(model, *args, **kwargs)
                if isinstance(name, str):
                    _check_needs(model, loading.environment)
                return name

        vars(model)[_CHECK] = check  # on the instance, so that it also replaces the checks that model classes define
        try:
            init(model, *args, **kwargs)
        finally:
            vars(model).pop(_CHECK, None)

    @wraps(set_name)
    def set_attn_implementation(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _noting_refusals(model, args[0] if args else kwargs.get("attn_implementation")):
            return set_name(model, *args, **kwargs)

    return {"__init__": __init__, "set_attn_implementation": set_attn_implementation}


_MODEL = "transformers.modeling_utils:PreTrainedModel"

_SHIM = Shim(
    "checked_models",
    "transformers",
    ">=4.54,<6",
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

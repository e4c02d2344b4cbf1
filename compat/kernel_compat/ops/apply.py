"""Binding the kernels of a config to a model, and taking them back."""

from __future__ import annotations

import copy
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ..errors import KernelUnavailableError, UnsupportedFeatureError
from ..patching.seam import Seam
from . import registry
from .config import OpsConfig

__all__ = ["Binding", "Report", "applied", "apply_ops", "refusal", "use"]

#: Where a model keeps what is bound to it: in itself, so that a copy has its own.
RECORD = "_kernel_compat_ops"

POST_INIT = Seam("transformers.modeling_utils:PreTrainedModel.post_init", ("self",))


@dataclass(frozen=True)
class Binding:
    """One kernel in one module.

    Attributes:
        path: of the module in the model; empty for the model itself.
        kernel: the config's value.
        proven: what the module was found to compute, for people.
    """

    path: str
    op: str
    variant: str
    kernel: str
    proven: str = ""


@dataclass(eq=False)
class Report:
    """What `apply_ops` did to a model. At the end of the outermost ``with`` block it is undone.

    Attributes:
        config: what was asked for.
        bindings: every kernel that was bound.
        notes: what wasn't, and why that is right: an op that the model doesn't have.
    """

    config: OpsConfig
    bindings: tuple[Binding, ...]
    notes: tuple[str, ...] = ()
    _model: Any = field(default=None, repr=False)
    _changes: list[Any] = field(default_factory=list, repr=False)
    _whole: Report | None = field(default=None, repr=False)
    _blocks: int = field(default=0, repr=False)

    @property
    def active(self) -> bool:
        """Whether the kernels are still bound as far as this report is concerned."""
        return self._model is not None

    @property
    def replaced(self) -> tuple[str, ...]:
        """In whose place somebody else has put something since, as ``kernels.kernelize`` and liger-kernel do: attributes by path.

        Empty where every kernel is in force, and where they have been undone.
        """
        if self._model is None:
            return ()
        from .hub import Layers

        layers = Layers(self._model)
        paths = {id(module): path for path, module in self._model.named_modules()}
        found = []
        for change in self._changes:
            path = paths.get(id(change.module), type(change.module).__name__)
            if not change.in_force or layers.around(path):
                found.append(f"{path}.{change.name}".strip("."))
        return tuple(found)

    def undo(self) -> None:
        """Put back what was there before; a second call does nothing.

        What somebody else has replaced since stays as it is, with a warning that names it.
        """
        with _lock:
            model, self._model = self._model, None
            if model is None and self._whole is not None and self._whole.active:
                warnings.warn(
                    "these kernels are among those of the report of the whole model by now: undo that one", stacklevel=2
                )
            if model is None:
                return
            vars(model).pop(RECORD, None)
            changes, self._changes = self._changes, []
            left = [change for change in reversed(changes) if not change.undo()]
        for change in left:
            warnings.warn(
                f"{change.name} of a {type(change.module).__name__} has been replaced since apply_ops: it is left as it is",
                stacklevel=2,
            )

    def __enter__(self) -> Report:
        with _lock:
            self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            self._blocks -= 1
            if not self._blocks:
                self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        other = Report(self.config, self.bindings, self.notes)
        memo[id(self)] = other
        other._model = copy.deepcopy(self._model, memo)
        other._changes = copy.deepcopy(self._changes, memo)
        return other

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # what is unpickled has its class's code


_lock = threading.RLock()


def apply_ops(model: Any, config: OpsConfig) -> Report:
    """Bind the kernels of a config to a model: to this instance, and to no other of its class.

    What each module computes is proven first, on a few random inputs. A model whose loss is replaced runs once, on six
    tokens, unless its weights are on the meta device or sharded; then the first forward with labels tells. All or
    nothing: where anything is refused, the model is as it was.

    Called again with an equal config it returns the report of the first call. A `copy.deepcopy` has the kernels too, and a
    report of its own: `applied`.

    Args:
        model: a `torch.nn.Module`, before or after it is wrapped by FSDP2, PEFT or activation checkpointing; before it is compiled.

    Raises:
        TypeError: not a module, or a compiled one; or no `OpsConfig`.
        UnsupportedFeatureError: a module of the model isn't what the kernel computes, or has been replaced.
        KernelUnavailableError: a kernel doesn't import, or the model is on a device that it doesn't run on.
        ValueError: the model, or a part of it, has the kernels of another config.
    """
    if not isinstance(config, OpsConfig):
        raise TypeError(f"config must be an OpsConfig, not {config!r}")
    _require_module(model)
    with _lock:
        record = vars(model).get(RECORD)
        if record is not None:
            if record.config != config:
                raise ValueError(
                    f"this {type(model).__name__} has the kernels of {record.config}: undo that before applying {config}"
                )
            if replaced := record.replaced:
                raise ValueError(
                    f"replaced since the kernels were applied: {', '.join(replaced)}; undo the report first"
                )
            return record  # type: ignore[no-any-return]
        from .plan import Plan

        inner = _records_inside(model, config)
        plan = Plan(model, config.values())
        plan.make()
        report = Report(config, tuple(plan.bindings), tuple(plan.notes), model, list(plan.changes))
        for path, part in inner:
            report.bindings = (
                *(Binding(f"{path}.{b.path}".rstrip("."), b.op, b.variant, b.kernel, b.proven) for b in part.bindings),
                *report.bindings,
            )
            report._changes[:0] = part._changes
            vars(part._model).pop(RECORD)
            part._model, part._whole = None, report
        vars(model)[RECORD] = report
        return report


def applied(model: Any) -> Report | None:
    """The report of what is bound to a model; None where nothing is."""
    found = vars(model).get(RECORD)
    return found if isinstance(found, Report) and found._model is model else None


def refusal(model: Any, op: str, value: str) -> str:
    """Why a kernel would be refused for a model; empty where it wouldn't. Changes nothing.

    Raises:
        TypeError: not a module, or a compiled one.
    """
    _require_module(model)
    from .plan import Plan

    try:
        Plan(model, {f"{op}_implementation": value})
    except (UnsupportedFeatureError, KernelUnavailableError, ValueError) as error:
        return str(error)
    return ""


def _require_module(model: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if "_orig_mod" in model._modules:
        raise TypeError("model is compiled already: apply the ops to the model itself, then compile it")


def _records_inside(model: Any, config: OpsConfig) -> list[tuple[str, Report]]:
    found = []
    for path, module in model.named_modules():
        record = vars(module).get(RECORD)
        if module is not model and record is not None:
            if record.config != config:
                raise ValueError(f"{path} has the kernels of {record.config}: undo that before applying {config}")
            found.append((path, record))
    return found


def active() -> OpsConfig | None:
    """The config of the `use` block that this thread is in."""
    return _active.get()


_active: ContextVar[OpsConfig | None] = ContextVar("kernel_compat_ops", default=None)


@contextmanager
def use(config: OpsConfig) -> Iterator[None]:
    """Apply a config to every model of transformers that is built in the block, by this thread, as soon as it is built.

    Also by ``from_pretrained``, before the weights are loaded. The models keep the kernels behind the block;
    `applied` gives their reports. Imports transformers.

    Raises:
        TypeError: no `OpsConfig`.
        SeamError: this release builds models in another way.
    """
    if not isinstance(config, OpsConfig):
        raise TypeError(f"config must be an OpsConfig, not {config!r}")
    _post_init.enter()
    token = _active.set(config)
    try:
        yield
    finally:
        _active.reset(token)
        _post_init.leave()


class _PostInit:
    """What `PreTrainedModel.post_init` is while somebody uses a config; every model calls it when it is built."""

    def __init__(self) -> None:
        self.users = 0
        self.located: Any = None

    def enter(self) -> None:
        with _lock:
            if not self.users:
                importlib.import_module(POST_INIT.module)
                self.located = POST_INIT.locate(f"transformers {registry.detect().version('transformers')}")
                original: Callable[..., Any] = self.located.original

                def post_init(self: Any) -> None:
                    original(self)
                    if (config := active()) is not None:
                        apply_ops(self, config)

                self.located.replacement = post_init
                self.located.owner.post_init = post_init
            self.users += 1

    def leave(self) -> None:
        with _lock:
            self.users -= 1
            if not self.users and self.located.in_place:
                self.located.owner.post_init = self.located.original


_post_init = _PostInit()

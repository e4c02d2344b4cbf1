"""Binding the kernels of a config to a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..patching.seam import Seam
from . import registry
from .config import OpsConfig
from .instances import require_module
from .op_slot import active
from .report import RECORD, Report, lock

__all__ = ["applied", "apply_ops", "refusal", "use"]

POST_INIT = Seam("transformers.modeling_utils:PreTrainedModel.post_init", ("self",))


def apply_ops(model: Any, config: OpsConfig) -> Report:
    """Bind the kernels of a config to a model: to this instance, and to no other of its class.

    The formula that each module computes is proven first, on a few random inputs. A model whose loss is replaced runs once,
    on six tokens, unless its weights are on the meta device, sharded, or on a device that the kernel doesn't run on; then
    the first forward with labels shows whether the loss is used. All or nothing: after an error the model is as it was.

    Called again with an equal config it returns the report of the first call. A `copy.deepcopy` has the kernels too, and a
    report of its own: `applied`.

    Examples:
        >>> import torch
        >>> from kernel_compat.ops import OpsConfig
        >>> report = apply_ops(torch.nn.Linear(2, 2), OpsConfig(cross_entropy_loss_implementation="chunk_loss"))
        >>> report.notes
        ('cross_entropy_loss: this model has none',)

    Args:
        model: a `torch.nn.Module`, before or after it is wrapped by FSDP2, PEFT or activation checkpointing; before it is compiled.

    Raises:
        TypeError: not a module, or a compiled one; or no `OpsConfig`.
        UnsupportedFeatureError: a module of the model computes another formula than the kernel, or has been replaced.
        KernelUnavailableError: a kernel doesn't import, or doesn't run on a device of this machine.
        ValueError: the model, or a part of it, has the kernels of another config.
    """
    if not isinstance(config, OpsConfig):
        raise TypeError(f"config must be an OpsConfig, not {config!r}")
    require_module(model)
    with lock:
        record: Report | None = vars(model).get(RECORD)
        if record is not None:
            if record.config != config:
                raise ValueError(
                    f"this {type(model).__name__} has the kernels of {record.config}: undo that before applying {config}"
                )
            if replaced := record.replaced:
                raise ValueError(
                    f"replaced since the kernels were applied: {', '.join(replaced)}; undo the report first"
                )
            return record
        from .plan import Plan

        inner = _records_inside(model, config)
        plan = Plan(model, config.values())
        plan.make()
        report = Report(config, tuple(plan.bindings), tuple(plan.notes), model, list(plan.changes))
        for path, part in inner:
            report.absorb(path, part)
        vars(model)[RECORD] = report
        return report


def applied(model: Any) -> Report | None:
    """The report of the kernels that are bound to a model; None where `apply_ops` has bound none."""
    found = vars(model).get(RECORD)
    return found if isinstance(found, Report) and found.model is model else None


def refusal(model: Any, op: str, value: str) -> str:
    """The reason why a kernel would be refused for a model; empty where it wouldn't. Changes nothing.

    Raises:
        TypeError: not a module, or a compiled one.
    """
    require_module(model)
    from .plan import refusal

    return refusal(model, op, value)


def _records_inside(model: Any, config: OpsConfig) -> list[tuple[str, Report]]:
    found = []
    for path, module in model.named_modules():
        record = vars(module).get(RECORD)
        if module is not model and record is not None:
            if record.config != config:
                raise ValueError(f"{path} has the kernels of {record.config}: undo that before applying {config}")
            found.append((path, record))
    return found


@contextmanager
def use(config: OpsConfig) -> Iterator[None]:
    """Apply a config to every model of transformers that is built in the block, by this thread, as soon as it is built.

    Also by ``from_pretrained``, before the weights are loaded. The models keep the kernels after the block;
    `applied` gives their reports. Imports transformers.

    Raises:
        TypeError: no `OpsConfig`.
        SeamError: this release builds models in another way.
    """
    if not isinstance(config, OpsConfig):
        raise TypeError(f"config must be an OpsConfig, not {config!r}")
    _post_init.enter()
    token = active.set(config)
    try:
        yield
    finally:
        active.reset(token)
        _post_init.leave()


class _PostInit:
    """`PreTrainedModel.post_init`, which every model calls when it is built, while a `use` block is open in any thread."""

    def __init__(self) -> None:
        self.users = 0
        self.located: Any = None

    def enter(self) -> None:
        with lock:
            if not self.users:
                importlib.import_module(POST_INIT.module)
                self.located = POST_INIT.locate(f"transformers {registry.detect().version('transformers')}")
                original: Callable[..., Any] = self.located.original

                def post_init(self: Any) -> None:
                    original(self)
                    if (config := active.get()) is not None:
                        apply_ops(self, config)

                self.located.replacement = post_init
                self.located.owner.post_init = post_init
            self.users += 1

    def leave(self) -> None:
        with lock:
            self.users -= 1
            if not self.users and self.located.in_place:
                self.located.owner.post_init = self.located.original


_post_init = _PostInit()

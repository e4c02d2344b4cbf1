"""Binding the kernels of a config to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..patching import swap
from ..patching.seam import Seam
from . import registry
from .config import OpsConfig
from .instances import require_module, undo
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
    _require_config(config)
    require_module(model)
    with lock:
        records = {path: vars(module).get(RECORD) for path, module in model.named_modules()}
        inside = {path: record for path, record in records.items() if record is not None}
        for path, record in inside.items():
            if record.config != config:
                where = path or f"this {type(model).__name__}"
                raise ValueError(f"{where} has the kernels of {record.config}: undo that before applying {config}")
        if "" in inside:
            found: Report = inside[""]
            if replaced := found.replaced:
                raise ValueError(
                    f"replaced since the kernels were applied: {', '.join(replaced)}; undo the report first"
                )
            return found
        from .plan import Plan

        plan = Plan(model, config.values())
        plan.make()
        report = Report(config, tuple(plan.bindings), tuple(plan.notes), model, list(plan.changes))
        for path, part in inside.items():
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


@contextmanager
def use(config: OpsConfig) -> Iterator[None]:
    """Apply a config to every model of transformers that is built in the block, by this thread, as soon as it is built.

    Also by ``from_pretrained``, before the weights are loaded. The models keep the kernels after the block;
    `applied` gives their reports. Imports transformers.

    Raises:
        TypeError: no `OpsConfig`.
        SeamError: this release builds models in another way.
    """
    _require_config(config)
    _post_init.enter()
    token = active.set(config)
    try:
        yield
    finally:
        active.reset(token)
        _post_init.leave()


def _require_config(config: Any) -> None:
    if not isinstance(config, OpsConfig):
        raise TypeError(f"config must be an OpsConfig, not {config!r}")


class _PostInit:
    """`PreTrainedModel.post_init`, which every model calls when it is built, while a `use` block is open in any thread."""

    def __init__(self) -> None:
        self.users = 0
        #: Our value, and the earlier ones that other code had overwritten when they were undone.
        self.changes: list[swap.Change] = []

    def enter(self) -> None:
        with lock:
            if not self.users:
                self.changes = undo(self.changes)
                located = POST_INIT.locate(f"transformers {registry.detect().version('transformers')}")
                original = located.original

                def post_init(self: Any) -> None:
                    original(self)
                    if (config := active.get()) is not None:
                        apply_ops(self, config)

                located.replacement = post_init
                swap.make([located])
                self.changes.append(located)
            self.users += 1

    def leave(self) -> None:
        with lock:
            self.users -= 1
            if not self.users:
                self.changes = undo(self.changes)


_post_init = _PostInit()

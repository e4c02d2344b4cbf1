"""Binding the kernels of a config to a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kernel_compat.errors import SeamError, UnsupportedFeatureError
from kernel_compat.patching.handle import Handle
from kernel_compat.patching.installation import Installation
from kernel_compat.patching.report import InstallationReport
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim
from kernel_compat.proofs.underway import is_proving

from .bound import RECORD, BoundOps, lock
from .config import OpsConfig
from .instances import require_module
from .op_slot import active
from .spec import EAGER

__all__ = ["applied", "apply_ops", "refusal", "use", "use_everywhere"]

POST_INIT = Seam("transformers.modeling_utils:PreTrainedModel.post_init", ("self",))


def apply_ops(model: Any, config: OpsConfig) -> BoundOps:
    """Bind the kernels of a config to a model: to this instance, and to no other of its class.

    The formula that each module computes is proven first, on a few random inputs. A model whose loss is replaced runs once,
    on six tokens, unless it may wait for other ranks (it is on one of several, or its attention name is registered as one over
    ranks or with a forward of its own), its weights are on the meta device, sharded, or on a device that the kernel doesn't run
    on, or the run fails; the report notes which, and the first forward with labels shows whether the loss is used. All or
    nothing: after an error the model is as it was.

    The model keeps the attention that it was loaded with, unless the config sets another `attn_implementation`. The one that
    `OpsConfig.auto` proposes isn't set.

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
        UnsupportedFeatureError: a module of the model computes another formula than the kernel, or has been replaced; or the
            config's attention can't be set in the model, or isn't one over several ranks as the model's is.
        KernelUnavailableError: a kernel of the config, whether or not the model needs it, isn't installed here or doesn't run on a
            device of this machine; or a kernel doesn't import.
        ValueError: the model, or a part of it, has the kernels of another config.
    """
    _require_config(config)
    require_module(model)
    proposed = config.attn_implementation if config.attn_implementation == config.proposed else None
    if proposed is not None:
        values = {**config.values(), "attn_implementation": None}
        config = OpsConfig.from_dict(values, deferred=True, registry=config.registry)
    with lock:
        records = {path: vars(module).get(RECORD) for path, module in model.named_modules()}
        inside = {path: record for path, record in records.items() if record is not None}
        for path, record in inside.items():
            if record.config != config:
                where = path or f"this {type(model).__name__}"
                registry = "" if record.config.registry is config.registry else " of another registry"
                raise ValueError(
                    f"{where} has the kernels of {record.config}: undo that before applying {config}{registry}"
                )
        if "" in inside:
            applied_before: BoundOps = inside[""]
            if replaced := applied_before.replaced:
                raise ValueError(
                    f"replaced since the kernels were applied: {', '.join(replaced)}; undo the report first"
                )
            return applied_before
        from .binder import Binder

        config.require()
        binder = Binder(model, config.values(), registry=config.registry)
        binder.bind()
        if proposed is not None:
            binder.notes.append(f"attn: {proposed!r} is to load a model with, and isn't set in one that is there")
        report = BoundOps(config, tuple(binder.bindings), tuple(binder.notes), model, list(binder.changes))
        for path, part in inside.items():
            report.absorb(path, part)
        vars(model)[RECORD] = report
        return report


def applied(model: Any) -> BoundOps | None:
    """The report of the kernels that are bound to a model; None where `apply_ops` has bound none."""
    record = vars(model).get(RECORD)
    return record if isinstance(record, BoundOps) and record.model is model else None


def refusal(model: Any, op: str, value: str) -> str:
    """The reason why a kernel would be refused for a model; empty where it wouldn't. Changes nothing.

    Raises:
        TypeError: not a module, or a compiled one.
    """
    require_module(model)
    from .binder import refusal

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
    with _building.installed() as report:
        _require_applied(report)
        token = active.set(config)
        try:
            yield
        finally:
            active.reset(token)


def use_everywhere(config: OpsConfig | None) -> Handle:
    """Apply a config to every model of transformers that this process builds from now on, in any thread; else as `use`.

    A block of `use` comes before it. Imports transformers.

    Args:
        config: None for `OpsConfig.auto` of each model.

    Returns:
        The handle that ends it. The models keep the kernels.

    Raises:
        TypeError: neither an `OpsConfig` nor None.
        ValueError: the process uses another config already.
        SeamError: as of `use`.
    """
    if config is not None:
        _require_config(config)
    _process.begin(config)
    return Handle(_process.end)


class _Process:
    """The config of `use_everywhere`."""

    def __init__(self) -> None:
        self.used = False
        self.config: OpsConfig | None = None

    def begin(self, config: OpsConfig | None) -> None:
        with lock:
            if self.used:
                raise ValueError(
                    f"this process uses {self.config or 'OpsConfig.auto'} for all models already: undo that first"
                )
            _require_applied(_building.install())
            self.used, self.config = True, config

    def end(self) -> bool:
        with lock:
            self.used = False
            return bool(_building.uninstall().left_alone)


_process = _Process()


def _require_applied(report: InstallationReport) -> None:
    if report[_SHIM.name].state != "applied":
        raise SeamError(
            POST_INIT.target, "a method that is called with self", report[_SHIM.name].reason, "transformers"
        )


def _require_config(config: Any) -> None:
    if not isinstance(config, OpsConfig):
        raise TypeError(f"config must be an OpsConfig, not {config!r}")


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["post_init"]

    def post_init(self: Any) -> None:
        original(self)
        config = active.get()
        if config is not None or (_process.used and not is_proving()):
            _apply_to_built(self, config or _process.config)

    return {"post_init": post_init}


def _apply_to_built(model: Any, config: OpsConfig | None) -> None:
    """Apply a config to a model that has just been built; None for the best of it, in place of the best of its parts."""
    quantized = getattr(model.config, "quantization_config", None) is not None
    if config is None:
        for module in model.modules():
            if (part := applied(module)) is not None:
                part.undo()
        config = OpsConfig.auto(model=model)
        if quantized:
            config = OpsConfig.from_dict({**config.values(), "moe_implementation": EAGER})
    report = apply_ops(model, config)
    if quantized and any(binding.op == "moe" for binding in report.bindings):
        report.undo()
        raise UnsupportedFeatureError(
            "weights that are quantized after it is built",
            f"moe_implementation={config['moe']!r}",
            f"Load the {type(model).__name__} with moe_implementation='eager'.",
        )


_SHIM = Shim(
    "ops_use", "transformers", ">=4", "a config waits for models to be built", seams=(POST_INIT,), replace=_replace
)

#: `PreTrainedModel.post_init`, which every model calls when it is built, replaced while any thread is in `use`.
_building = Installation(discover=lambda: ([_SHIM], {}))

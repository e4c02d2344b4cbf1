"""accelerate 1.12 and later: parallelism over a sequence takes transformers' names alone, and drops their masks.

Sequence parallelism takes FlashAttention-2 and -3, sdpa and hub kernels, and refuses any other name. The check is in the dataclass, before
a model exists. DeepSpeed looks the name up in transformers' table afterwards.

Context parallelism replaces sdpa, whatever the name is, and splits buffers that have no names. It excludes sequence parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.parallel.accelerate_mesh import MESH
from kernel_compat.attention.parallel.sharding import ContextParallel
from kernel_compat.attention.roles import implementation_of
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import check_of

CONFIG = "accelerate.parallelism_config:ParallelismConfig"
SUBJECT = "accelerate's context parallelism"
#: Of a config: how many of its ``cp_size`` ranks share the heads of a slice.
ULYSSES = "ulysses_size"


def context_parallel_of(model: Any) -> ContextParallel | None:
    """The `ContextParallel` that a model's name was registered with."""
    entry = resolve(implementation_of(model))
    return entry.spread_over if entry is not None and entry.is_context_parallel else None


def _of_the_environment() -> str | None:
    return os.environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")


def _size(value: int | None, name: str) -> int:
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) if value is None else value


def _post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(original)
    def __post_init__(self: Any) -> None:
        keys, heads = _size(self.cp_size, "CP"), _size(self.sp_size, "SP")
        setattr(self, ULYSSES, heads if keys > 1 else 1)
        if keys > 1 and heads > 1:
            # accelerate then shards models over all of them, and gives all of them the same batches.
            self.cp_size, self.sp_size = keys * heads, 1
        original(self)

    return __post_init__


class _LikeDevices:
    """An `Accelerator` of processes on CPUs, which a config refuses although gloo makes its meshes."""

    multi_device = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _validate(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(original)
    def _validate_accelerator(self: Any, accelerator: Any) -> None:
        on_cpus = self.cp_enabled and accelerator.device.type == "cpu"
        original(self, _LikeDevices(accelerator) if on_cpus else accelerator)
        if self.cp_enabled:
            setattr(accelerator.state, MESH, _mesh(self, accelerator))

    return _validate_accelerator


def _mesh(config: Any, accelerator: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    heads = getattr(config, ULYSSES, 1)
    if heads == 1:
        return accelerator.torch_device_mesh["cp"]
    ranks = config.cp_size * config.tp_size
    shape = (accelerator.num_processes // ranks, config.cp_size // heads, heads, config.tp_size)
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "cp", "sp", "tp"))["cp", "sp"]


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _prepare_cp(self: Any, *args: Any) -> Any:
        if not _is_ours(self, [*args, *self._models]):
            return original(self, *args)
        self._cp_context = _refused
        return args

    return _prepare_cp


def _is_ours(accelerator: Any, objects: Iterable[Any]) -> bool:
    """Whether the models among objects are spread by the library; raises where neither it nor accelerate can spread one."""
    from torch.nn import Module

    ours = False
    for model in objects:
        if not isinstance(model, Module):
            continue
        over, name = context_parallel_of(model), implementation_of(model)
        if over is not None:
            _require_same_ranks(over, accelerator, name)
            ours = True
            continue
        entry = resolve(name)
        of_a_name = entry is not None and not entry.handles_context_parallel
        if of_a_name or getattr(accelerator.parallelism_config, ULYSSES, 1) > 1 or accelerator.device.type == "cpu":
            instead = "Register one with context_parallel=ContextParallel(accelerate_mesh)."
            feature = f"attn_implementation={name!r}" if of_a_name else f"{name!r} on CPUs, or beside an sp_size"
            raise UnsupportedFeatureError(feature, SUBJECT, instead)
    return ours


def _require_same_ranks(over: ContextParallel, accelerator: Any, name: Any) -> None:
    """Check that a name is spread over the ranks that get the same batches."""
    import torch.distributed as dist

    group, mesh = over.source(), accelerator.torch_device_mesh["cp"].mesh
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    if sorted(ranks) != sorted(mesh.tolist()):
        raise ValueError(
            f"{name!r} is spread over the ranks {ranks}, and accelerate's context parallelism over {mesh.tolist()}: register it "
            "with context_parallel=ContextParallel(accelerate_mesh)"
        )


def _refused(**buffers: Any) -> Any:
    instead = "Leave it out, and pass the model ContextParallel.shard(batch, reduction='mean')."
    raise UnsupportedFeatureError("buffers of unknown contents (maybe_context_parallel)", "ContextParallel", instead)


SHIMS = (
    Shim(
        name="accelerate_sequence_parallel",
        distribution="accelerate",
        versions=">=1.12,<2",
        reason="sequence parallelism refuses every attention name but those of its own list and hub kernels",
        upstream="huggingface/accelerate#3959; accelerate 1.15.0, DeepSpeedSequenceParallelConfig.__post_init__",
        delete_when="the oldest supported accelerate takes any name of transformers' table",
        seams=(Seam("accelerate.utils.dataclasses:DeepSpeedSequenceParallelConfig.__post_init__", ("self",)),),
        replace=each(check_of("sp_attn_implementation", _of_the_environment)),
    ),
    Shim(
        name="accelerate_context_parallel",
        distribution="accelerate",
        versions=">=1.12,<2",
        reason="context parallelism drops masks, and splits sequences that attention isn't spread over; it excludes sequence parallelism",
        protects="context parallelism of accelerate with attention under a registered name",
        upstream="accelerate 1.15.0, ParallelismConfig and Accelerator._prepare_cp",
        delete_when="the oldest supported accelerate lets an attention name spread sequences, and share heads beside it",
        seams=(
            Seam(f"{CONFIG}.__post_init__", ("self",)),
            Seam(f"{CONFIG}._validate_accelerator", ("self", "accelerator")),
            Seam("accelerate.accelerator:Accelerator._prepare_cp", ("self", "args")),
        ),
        replace=lambda originals: {
            "__post_init__": _post_init(originals["__post_init__"]),
            "_validate_accelerator": _validate(originals["_validate_accelerator"]),
            "_prepare_cp": _prepare(originals["_prepare_cp"]),
        },
        on_import=True,
    ),
)

"""FSDP2 on processes of a CPU, where accelerate leaves it out."""

from __future__ import annotations

import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def set_fsdp2() -> None:
    """Make accelerate's state that of a run which shards the layers of a Llama."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    AcceleratorState._shared_state |= {"fsdp_plugin": plugin, "distributed_type": DistributedType.FSDP}
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


class ShardingTrainer(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose model accelerate shards."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        set_fsdp2()
        self.is_fsdp_enabled = True

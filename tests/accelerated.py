"""A Trainer and a loop of accelerate's over processes on CPUs, whose sequences the library spreads, and the same in one process.

As a program: `accelerated.py FOLDER RANKS` runs all cases on a number of processes, and saves the results in FOLDER.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from fsdp2 import set_fsdp2
from ranks import KERNEL
from small_mixers import InDouble
from tiny import NAME, SHAPE, VOCAB
from torch import Tensor

import kernel_compat
from kernel_compat import ContextParallel, accelerate_mesh

OVER = ContextParallel(accelerate_mesh)
#: No number of ranks divides it.
LENGTH = 29


@dataclass(frozen=True)
class Case:
    """How a model is trained: by which sizes of a config, sharded or replicated, on what batches."""

    sizes: tuple[tuple[str, int], ...]
    sharded: bool = True
    padded: bool = False

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    @property
    def rows(self) -> int:
        """In a batch of a rank: as many in all as on one process."""
        return 4 // dict(self.sizes).get("dp_shard_size", 1)


CASES = {
    "keys": Case((("cp_size", 2),)),
    "keys, replicated": Case((("cp_size", 2),), sharded=False),
    "keys, padded": Case((("cp_size", 2),), padded=True),
    "keys and heads": Case((("cp_size", 2), ("sp_size", 2))),
    "keys and heads, replicated": Case((("cp_size", 2), ("sp_size", 2)), sharded=False, padded=True),
    "keys and data": Case((("dp_shard_size", 2), ("cp_size", 2))),
}


def rows(padded: bool, count: int = 24) -> list[dict[str, Tensor]]:
    """Rows with labels that are ignored: of packed sequences, or each with padding."""
    chance = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=chance)
        cut = int(torch.randint(3, LENGTH - 3, (), generator=chance))
        row = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            row["attention_mask"] = (torch.arange(LENGTH) < cut).long()
            row["labels"][cut:] = -100
        else:
            row["position_ids"] = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            row["labels"][cut] = -100
        row["labels"][1:3] = -100  # a prompt
        found.append(row)
    return found


def model(name: str = NAME) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).double()


def fresh(sharded: bool) -> None:
    """Forget the last `Accelerator`; the next one shards models with FSDP2 on CPUs, which accelerate does on devices alone."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    AcceleratorState.__init__ = _sharding if sharded else _init


_init = AcceleratorState.__init__


def _sharding(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if "fsdp_plugin" not in AcceleratorState._shared_state:
        set_fsdp2()


def trainer(case: Case, folder: Path, alone: bool = False, name: str = NAME, **more: Any) -> Any:
    """transformers' own Trainer, as it is."""
    fresh(case.sharded and not alone)
    data = rows(case.padded)
    arguments = transformers.TrainingArguments(
        str(folder / "trainer"),
        max_steps=3,
        per_device_train_batch_size=4 if alone else case.rows,
        per_device_eval_batch_size=4 if alone else case.rows,
        gradient_accumulation_steps=2,
        max_grad_norm=0.3,
        learning_rate=0.3,
        optim="sgd",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        parallelism_config=None if alone else ParallelismConfig(**dict(case.sizes)),
        **more.pop("arguments", {}),
    )
    of_all = {"train_dataset": data, "eval_dataset": data[:8], **more}
    return transformers.Trainer(model(name), arguments, **of_all)


def trained(case: Case, folder: Path, alone: bool = False) -> dict[str, Tensor]:
    """The losses, the norms of the gradients, a loss of an evaluation, and the parameters."""
    run = trainer(case, folder, alone)
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    found = {key: torch.tensor([entry[key] for entry in logs], dtype=torch.float64) for key in ("loss", "grad_norm")}
    found["eval_loss"] = torch.tensor(run.evaluate()["eval_loss"], dtype=torch.float64)
    return found | whole(run.model_wrapped)


def both(name: str, case: Case, folder: Path, alone: bool = False) -> dict[str, dict[str, Tensor]]:
    """Of a Trainer, and of a loop. transformers' losses are left in the model's precision."""
    with InDouble():
        return {name: trained(case, folder, alone), f"{name}, a loop": looped(case, alone)}


def whole(trained_model: Any) -> dict[str, Tensor]:
    sharded, parameters = False, {}
    for key, value in trained_model.named_parameters():
        sharded |= hasattr(value, "full_tensor")
        parameters[key.removeprefix("module.")] = getattr(value, "full_tensor", lambda value=value: value)().detach()
    return {**parameters, "sharded": torch.tensor(sharded)}


def looped(case: Case, alone: bool = False) -> dict[str, Tensor]:
    """The same of a loop with accelerate, in which the batch is split by a line of the user's."""
    fresh(case.sharded and not alone)
    config = None if alone else ParallelismConfig(**dict(case.sizes))
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=2)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    loader = torch.utils.data.DataLoader(rows(case.padded), batch_size=4 if alone else case.rows)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**OVER.shard(batch, reduction="mean"), use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(net.parameters(), 0.3)
                norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean())
    return {"loss": torch.stack(losses), "grad_norm": torch.stack(norms), **whole(net)}


def refused(folder: Path) -> dict[str, str]:
    """The messages of what can't be spread, and would be wrong, on four ranks."""
    data, heads = CASES["keys and data"], CASES["keys and heads"]
    kernel_compat.register_attention("my_flash_alone", KERNEL)
    kernel_compat.register_attention("my_flash_over_all", KERNEL, context_parallel=ContextParallel())

    def prepare(case: Case, name: str) -> Accelerator:
        fresh(True)
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**dict(case.sizes)))
        net = model(name)
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        return accelerator

    def with_buffers() -> None:
        accelerator = prepare(data, NAME)
        accelerator.prepare(torch.utils.data.DataLoader(rows(False)))
        with accelerator.maybe_context_parallel(buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
            pass

    def with_trainer(case: Case = data, **more: Any) -> Any:
        return trainer(case, folder, **more)

    smoothed, of_each = {"label_smoothing_factor": 0.1}, {"average_tokens_across_devices": False}
    runs: dict[str, Callable[[], Any]] = {
        "not spread": lambda: prepare(data, "my_flash_alone"),
        "buffers": with_buffers,
        "label smoothing": lambda: with_trainer(arguments=smoothed).train(),
        "a loss function": lambda: with_trainer(compute_loss_func=lambda *args, **kwargs: None).train(),
        "a mean of each rank": lambda: with_trainer(arguments=of_each).train(),
        "metrics": lambda: with_trainer(CASES["keys and heads, replicated"], compute_metrics=lambda of: {}).evaluate(),
        "a Trainer, not spread": lambda: with_trainer(name="my_flash_alone").train(),
        "another group": lambda: prepare(data, "my_flash_over_all"),
        "sdpa and heads": lambda: prepare(heads, "sdpa"),
        "a Trainer, sdpa and heads": lambda: with_trainer(heads, name="sdpa").train(),
    }
    messages = {}
    for what, run in runs.items():
        try:
            run()
        except ValueError as error:
            messages[what] = str(error)
    return messages


def work(rank: int, ranks: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group is there before accelerate looks for it
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/accelerated-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    kernel_compat.register_attention(NAME, KERNEL, context_parallel=OVER)
    assert kernel_compat.install().ok
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.ranks == ranks:
            results |= both(name, case, folder)
    if ranks == 4:
        results["refused"] = [None] * ranks
        dist.all_gather_object(results["refused"], refused(folder))
    if rank == 0:
        torch.save(results, folder / f"accelerated-{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


def start(folder: Path, ranks: int) -> dict[str, Any]:
    """The results of all cases on a number of ranks, in processes of their own."""
    command = [sys.executable, __file__, str(folder), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    results: dict[str, Any] = torch.load(folder / f"accelerated-{ranks}.pt")
    return results


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.PrinterCallback.on_log = lambda *args, **kwargs: None
    target, count = Path(sys.argv[1]), int(sys.argv[2])
    model("eager")
    for module in (
        "peft",
        "torch.distributed.fsdp",
    ):  # which a Trainer imports: before the fork, once for all processes
        if importlib.util.find_spec(module):
            importlib.import_module(module)
    gc.freeze()  # a Trainer runs the garbage collector, which needn't look at the modules
    torch.multiprocessing.start_processes(work, (count, target), count, start_method="fork")

"""Frameworks over two processes: `framework_ranks.py CASE FOLDER` runs one case on two ranks, and saves what rank 0 has found.

The folder has the tiny model of `frameworks.saved_model` in ``model``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from frameworks import load, sentences
from packaging.version import Version
from tiny import NAME, VOCAB
from torch import Tensor

import kernel_compat

LENGTH = 24
#: Sequences that begin and end within a rank's tokens, and one that goes on from one rank to the next.
OFFSETS = [0, 5, 9, 20, 24]


def batch(packed: bool) -> dict[str, Tensor]:
    """One row of tokens, their positions, and the target of each token."""
    torch.manual_seed(0)
    ids = torch.randint(4, VOCAB, (1, LENGTH))
    positions = torch.arange(LENGTH)
    if packed:
        positions -= torch.tensor(OFFSETS[:-1]).repeat_interleave(torch.tensor(OFFSETS).diff())
    targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    if packed:
        targets[:, [offset - 1 for offset in OFFSETS[1:]]] = -100
    return {"input_ids": ids, "position_ids": positions[None], "targets": targets}


def step(model: Any, given: dict[str, Tensor], where: slice = slice(None)) -> dict[str, Tensor]:
    """The summed loss of some of the tokens, and the gradients of all parameters."""
    part = {key: value[:, where] for key, value in given.items()}
    logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), reduction="sum")
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def ulysses(folder: Path) -> dict[str, dict[str, Tensor]]:
    """DeepSpeed's sequence parallelism around a registered name, as its `register_with_transformers` sets it up."""
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile for two minutes
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    found = {}
    given = {"sequence_parallel_size": 2, "micro_batch_size": 1, "seq_length_is_variable": True}
    if Version(deepspeed.__version__) < Version("0.19"):
        with kernel_compat.installed(skip=["deepspeed_ulysses"]), pytest.raises(ValueError, match=NAME):
            UlyssesSPAttentionHF.register_with_transformers(folder / "model", NAME, **given)
        # Set before the name is looked at.
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    with kernel_compat.installed() as report:
        assert report.ok, report
        model = load(folder / "model", NAME)
        UlyssesSPAttentionHF.register_with_transformers(model, NAME, **given)
        half, rank = LENGTH // 2, dist.get_rank()
        for case in ("one sequence", "packed"):
            model.zero_grad()
            ours = step(model, batch(case == "packed"), slice(rank * half, (rank + 1) * half))
            for value in ours.values():
                dist.all_reduce(value)
            found[case] = ours
    return found


def over_groups(folder: Path, sources: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """A model over the ranks of frameworks' groups: the loss and the gradients, summed."""
    found = {}
    for what, source in sources.items():
        over = kernel_compat.ContextParallel(source)
        kernel_compat.register_attention(NAME, "flash_attention_reference", context_parallel=over, override=True)
        model = load(folder / "model", NAME)
        loss = model(**over.shard(with_labels(), reduction="sum"), use_cache=False).loss
        loss.backward()
        found[what] = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
        for value in found[what].values():
            dist.all_reduce(value)
    return found


def with_labels() -> dict[str, Tensor]:
    given = batch(True)
    labels = given["input_ids"].masked_fill(given["position_ids"] == 0, -100)
    return {"input_ids": given["input_ids"], "position_ids": given["position_ids"], "labels": labels}


def deepspeed_groups(folder: Path) -> dict[str, dict[str, Tensor]]:
    """DeepSpeed's engine, with the library in the place of `UlyssesSPAttentionHF`: the parameters after a step, by stage."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
    over = kernel_compat.ContextParallel(parallel_state_sp.get_sequence_parallel_group)
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference", context_parallel=over)
    found = {}
    with kernel_compat.installed():
        for stage in (1, 2, 3):
            model = load(folder / "model", NAME)
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "sequence_parallel_size": 2,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            }
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp)
            share = over.shard(with_labels(), reduction="mean" if stage == 3 else "sum")
            engine.backward(engine(**share, use_cache=False).loss)
            engine.step()
            with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
                found[f"stage {stage}"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def veomni_groups(folder: Path) -> dict[str, dict[str, Tensor]]:
    from veomni.distributed.parallel_state import clear_parallel_state, get_parallel_state, init_parallel_state

    found: dict[str, dict[str, Tensor]] = {}
    with kernel_compat.installed():
        for name in ("ulysses_size", "cp_size"):
            clear_parallel_state()
            init_parallel_state(**{name: 2}, device_type="cpu")
            found |= over_groups(folder, {name: lambda: get_parallel_state().sp_group})
    return found


def nemo_meshes(folder: Path) -> dict[str, dict[str, Tensor]]:
    from nemo_automodel.components.distributed.mesh_utils import create_ring_ulysses_mesh
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    meshes = {"cp": mesh["cp"]}
    for ring in (1, 2):
        meshes[f"ring {ring}"] = create_ring_ulysses_mesh(mesh, ring_degree=ring, ulysses_degree=2 // ring)
    with kernel_compat.installed():
        return over_groups(folder, meshes)


def train(folder: Path, name: str, fsdp2: bool) -> dict[str, Tensor]:
    """The loss of every step of a Trainer, and the parameters after them."""
    from fsdp2 import ShardingTrainer

    words = transformers.AutoTokenizer.from_pretrained(folder / "model")
    rows = [words(text, padding="max_length", max_length=16, truncation=True) for text in sentences()]
    for row in rows:
        row["labels"] = [-100 if token == words.pad_token_id else token for token in row["input_ids"]]
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        seed=0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    losses: list[Tensor] = []

    base: Any = ShardingTrainer if fsdp2 else transformers.Trainer

    class Recording(base):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            losses.append(super().training_step(*args, **kwargs).detach())
            return losses[-1]

    trainer = Recording(model=load(folder / "model", name), args=args, train_dataset=rows)
    trainer.train()
    found = {"losses": torch.stack(losses)}
    for key, value in trainer.model_wrapped.named_parameters():
        found[key] = value.full_tensor().detach() if hasattr(value, "full_tensor") else value.detach()
    found["sharded"] = torch.tensor(any(hasattr(p, "full_tensor") for p in trainer.model_wrapped.parameters()))
    return found


def with_trainer(folder: Path) -> dict[str, dict[str, Tensor]]:
    """transformers' Trainer, by name and by whether the model is replicated or sharded by accelerate's FSDP2."""
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    with kernel_compat.installed() as report:
        assert report.ok, report
        return {
            f"{how} {name}": train(folder, name, how == "fsdp2") for how in ("ddp", "fsdp2") for name in ("eager", NAME)
        }


CASES: dict[str, Callable[[Path], Any]] = {
    case.__name__: case for case in (ulysses, with_trainer, deepspeed_groups, veomni_groups, nemo_meshes)
}


def work(rank: int, case: str, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        result = CASES[case](folder)
        if rank == 0:
            torch.save(result, folder / f"{case}.pt")
    finally:
        dist.destroy_process_group()


def run(case: str, folder: Path) -> Any:
    """What a case finds on two ranks, in processes of its own."""
    command = [sys.executable, __file__, case, str(folder)]
    with socket.socket() as free:  # other suites may run at the same time
        free.bind(("127.0.0.1", 0))
        environment = {**os.environ, "MASTER_PORT": str(free.getsockname()[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / f"{case}.pt")


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1], Path(sys.argv[2])), nprocs=2)

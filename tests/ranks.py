"""Tiny models over a sequence that is split over processes, and over the same sequence in one process.

As a program: `ranks.py FOLDER BACKEND RANKS...` runs all cases on each number of processes, and saves the results in FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from tiny import CAUSAL_LMS, TRANSFORMERS, VOCAB, load, saved
from torch import Tensor

import kernel_compat
from kernel_compat.attention.forward import attention_forward
from kernel_compat.attention.parallel.ulysses import gathering_mask_function

KERNEL = "flash_attention_reference"
#: Names of the kernel: over all ranks, over the ranks of a mesh, without all-to-alls, and with a user's forward.
SPREAD, MESH, ALONE, OWN = "my_flash_spread", "my_flash_mesh", "my_flash_alone", "my_flash_own"
WRAPPED = "my_flash_wrapped"
LENGTH = 24
MODULE = torch.nn.Module()

# The sequences begin and end both within and at the boundaries of the slices of 2 and of 4 ranks.
OFFSETS, LONGEST = [0, 7, 9, 12, 24], 12

#: Models whose experts' function doesn't support float64.
EXPERTS = ("gpt_oss_sinks", "deepseek_value_dim")


@dataclass
class Case:
    """A batch of full sequences. Each rank gets its slice of the inputs, except for the mask if `whole_mask`."""

    model: str
    batch: int = 1
    padding: dict[int, slice] = field(default_factory=dict)
    """By row of the batch, where it has no tokens."""
    packed: bool = False
    ones: bool = False
    whole_mask: bool = False
    name: str = SPREAD
    compiled: bool = False
    checkpointed: bool = False

    def inputs(self) -> dict[str, Any]:
        torch.manual_seed(0)
        ids = torch.randint(3, VOCAB, (self.batch, LENGTH))
        given: dict[str, Any] = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None]}
        if self.padding or self.ones:
            mask = given["attention_mask"] = torch.ones_like(ids)
            for row, where in self.padding.items():
                mask[row, where] = 0
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if self.packed:
            starts = torch.tensor(OFFSETS[:-1]).repeat_interleave(torch.tensor(OFFSETS).diff())
            given["position_ids"] = (torch.arange(LENGTH) - starts).repeat(self.batch, 1)
            rows = [row * LENGTH + offset for row in range(self.batch) for offset in OFFSETS[:-1]]
            offsets = torch.tensor([*rows, self.batch * LENGTH], dtype=torch.int32)
            given |= {
                "cu_seq_lens_q": offsets,
                "cu_seq_lens_k": offsets,
                "max_length_q": LONGEST,
                "max_length_k": LONGEST,
            }
        return given


CASES = {
    "causal": Case("llama", batch=2),
    "fewer key heads": Case("llama_gqa", batch=2),
    "a mask of ones": Case("llama_gqa", batch=2, ones=True),
    # Row 0 has no tokens in the first of four slices, row 1 none in the last.
    "padded": Case("llama_gqa", batch=3, padding={0: slice(0, 7), 1: slice(15, 24)}),
    "padded on one rank": Case("llama", padding={0: slice(21, 24)}),
    "padded, the whole mask": Case("llama_gqa", batch=2, padding={0: slice(0, 7)}, whole_mask=True),
    "packed": Case("llama_gqa", packed=True),
    "packed in two rows": Case("llama", batch=2, packed=True),
    "a window": Case("mistral_window", batch=2),
    "a window, padded": Case("mistral_window", batch=2, padding={1: slice(13, 24)}),
    "a window, packed": Case("mistral_window", packed=True),
    "a window in one layer": Case("qwen2_window", batch=2),
    "softcap": Case("gemma2_softcap", batch=2),
    "sinks": Case("gpt_oss_sinks", batch=2),
    "smaller value heads": Case("deepseek_value_dim", batch=2),
    "a forward of one's own": Case("llama_gqa", batch=2, name=OWN),
    "ulysses as the forward": Case("llama_gqa", batch=2, padding={0: slice(0, 7)}, whole_mask=True, name=WRAPPED),
    "ulysses as the forward, slices of the mask": Case("llama_gqa", batch=2, padding={0: slice(0, 7)}, name=WRAPPED),
    "checkpointed": Case("llama_gqa", packed=True, checkpointed=True),
    "compiled": Case("mistral_window", batch=2, padding={0: slice(0, 7)}, compiled=True),
}


def reference() -> kernel_compat.Kernel:
    return kernel_compat.known_kernels()[KERNEL]


def cases(ranks: int) -> dict[str, Case]:
    """The cases for a number of ranks: compiled cases run only on two ranks."""
    return {n: case for n, case in CASES.items() if case.model in CAUSAL_LMS and (ranks == 2 or not case.compiled)}


@dataclass
class Here:
    """This process: its rank, the number of ranks, and its device."""

    rank: int = 0
    ranks: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def length(self) -> int:
        return LENGTH // self.ranks

    @property
    def slice(self) -> slice:
        """The slice of all tokens that this rank has."""
        return slice(self.rank * self.length, (self.rank + 1) * self.length)

    def slices(self, *qkv: Tensor) -> list[Tensor]:
        return [x[:, :, self.slice] for x in qkv]

    def random(self, batch: int, *heads: int) -> list[Tensor]:
        """Random tensors that are the same on every rank, (batch, heads, all tokens, head_dim) each."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(batch, n, LENGTH, 64, generator=generator).to(self.device) for n in heads]

    def gathered(self, x: Tensor) -> Tensor:
        """The slices of all ranks, (batch, length, ...) each, concatenated."""
        x = x.detach().to(self.device).contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1).cpu()

    def summed(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x.cpu()


def judged(case: Case, name: str, models: Path, here: Here) -> tuple[Tensor, Any]:
    """The logits of this rank's tokens, and its share of the gradients of a loss over all tokens."""
    options = {"experts_implementation": "eager"} if case.model in EXPERTS and TRANSFORMERS.release >= (5,) else {}
    model = load(saved(models, case.model), name, **options).to(here.device, torch.float64)
    if case.compiled:  # compiling takes longest
        model.model.layers = model.model.layers[:1]
    if case.checkpointed:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    full = case.inputs()
    labels = full["input_ids"].roll(-1, 1)[:, here.slice].to(here.device)
    real = full.get("attention_mask", torch.ones_like(full["input_ids"]))[:, here.slice].bool().to(here.device)
    given = dict(full)
    for key, value in full.items():
        if isinstance(value, Tensor):
            sliced = value.ndim == 2 and not (case.whole_mask and key == "attention_mask")
            given[key] = (value[:, here.slice] if sliced else value).to(here.device)
    call: Callable[..., Any] = model
    if case.compiled and here.ranks > 1:
        # This tests the graph; inductor would spend a minute on compiling C++ for it.
        call = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    logits = call(**given, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[real], labels[real], reduction="sum").backward()
    gradients = {key: p.grad if p.grad is not None else torch.zeros_like(p) for key, p in model.named_parameters()}
    return (logits.detach() * real[..., None]).cpu(), gradients


@cache
def expected(folder: Path, name: str, alone: str, device: str = "cpu") -> tuple[Tensor, Any]:
    """The results of one process for a case, with the kernel registered as `alone`."""
    logits, gradients = judged(CASES[name], alone, folder, Here(device=torch.device(device)))
    return logits, {key: gradient.cpu() for key, gradient in gradients.items()}


def assert_same_as_one_process(
    results: dict[str, Any], folder: Path, name: str, alone: str, device: str = "cpu"
) -> None:
    """Compare the logits of all ranks and the sum of their gradients, in float64."""
    logits, gradients = results[name]
    # Use the same device: the float32 cosines differ between devices in their last bits.
    expected_logits, expected_gradients = expected(folder, name, alone, device)
    # Gemma's norms multiply in float32, and sum the gradients of their weights in it.
    allowed = 1e-6 if name == "softcap" else 1e-9
    torch.testing.assert_close(logits, expected_logits, rtol=allowed, atol=allowed)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        assert (gradients[parameter] - gradient).norm() <= allowed * gradient.norm(), parameter


def assert_same_as_alone(results: dict[str, Any]) -> None:
    """The same kernel on the same inputs: only the order of additions may differ."""
    allowed = {torch.bool: 0, torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-12}
    for name, (ours, alone) in results["functions"].items():
        assert ours.dtype == alone.dtype, name
        assert ours.shape == alone.shape, name
        assert (ours.double() - alone.double()).norm() <= allowed[ours.dtype] * alone.double().norm(), name


def join(rank: int, ranks: int, device: str, store: Path) -> torch.device:
    """Join the default group, and return this rank's device: a GPU of its own, by NCCL, or else the first one, by gloo."""
    apart = device == "cuda" and torch.cuda.device_count() >= ranks
    own = torch.device("cuda", rank if apart else 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if apart else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    return own


def start(folder: Path, device: str, *ranks: int) -> dict[int, dict[str, Any]]:
    """Run this program on a kind of device; returns its results by the number of ranks."""
    for name in CAUSAL_LMS:
        saved(folder, name)
    done = subprocess.run(
        [sys.executable, __file__, str(folder), device, *map(str, ranks)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return {n: torch.load(folder / f"{n}.pt", weights_only=False) for n in ranks}


def own_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention with torch's own function: causal, or with a mask that is added to the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scale = kwargs.get("scaling")
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale
    )
    return output.transpose(1, 2), "weights"


def work(rank: int, ranks: int, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    # Registered before the process group exists.
    kernel_compat.register_attention(SPREAD, KERNEL, sequence_parallel=True)
    kernel_compat.register_attention(OWN, KERNEL, forward=own_forward, sequence_parallel=True)
    inner = attention_forward(reference(), KERNEL)
    kernel_compat.register_attention(WRAPPED, KERNEL, forward=kernel_compat.ulysses(inner))
    kernel_compat.register_attention(ALONE, KERNEL)
    assert kernel_compat.install().ok
    here = Here(rank, ranks, join(rank, ranks, device, folder / str(ranks)))
    found: dict[str, Any] = {}
    for name, case in cases(ranks).items():
        try:
            logits, gradients = judged(case, case.name, folder, here)
        except Exception as error:
            raise RuntimeError(f"the case {name!r}") from error
        found[name] = here.gathered(logits), {key: here.summed(gradient) for key, gradient in gradients.items()}
    found["functions"] = {**dtypes(here), **kernels(here), **masks(here), **derivatives(here)}
    found["skipped"] = skipped(folder, here)
    found["refused"] = [None] * ranks
    dist.all_gather_object(found["refused"], refused(folder, here))
    if ranks == 4:
        found["mesh"] = mesh(folder, here)
    if rank == 0:
        torch.save(found, folder / f"{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


Pairs = dict[str, tuple[Tensor, Tensor]]


def dtypes(here: Here) -> Pairs:
    """The inner forward gets each tensor in its own dtype."""
    inner, low, high, pairs = attention_forward(reference(), KERNEL), torch.bfloat16, torch.float32, {}
    for name, given in {"float32": (high, high, high), "mixed dtypes": (high, high, low)}.items():
        qkv = [x.to(dtype) for x, dtype in zip(here.random(2, 8, 4, 4), given, strict=True)]
        got = []

        def keep(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            got.append((query.dtype, key.dtype, value.dtype))  # noqa: B023
            return inner(module, query, key, value, *args, **kwargs)

        ours, _ = kernel_compat.ulysses(keep)(MODULE, *here.slices(*qkv), None, scaling=0.3, dropout=0.0)
        assert got == [given]
        pairs[name] = here.gathered(ours), inner(MODULE, *qkv, None, scaling=0.3)[0].cpu()
    return pairs


def kernels(here: Here) -> Pairs:
    """Every kernel that is usable here, in bfloat16, and its gradients if it has any."""
    pairs, environment = {}, kernel_compat.Environment.detect()
    for kernel in kernel_compat.known_kernels().values():
        if kernel.unavailable_because(environment):
            continue
        features = kernel.features_in(environment)
        trains = features.backward and here.device.type not in features.no_backward_on
        inner = attention_forward(kernel, kernel.name)
        for batch in (1, 2):  # a single row keeps its strides, which differ from those of other attention
            qkv = [x.to(torch.bfloat16).requires_grad_(trains) for x in here.random(batch, 8, 2, 2)]
            ours, _ = kernel_compat.ulysses(inner)(MODULE, *here.slices(*qkv), None)
            alone, _ = inner(MODULE, *qkv, None)
            name = f"{kernel.name}, batch {batch}"
            pairs[name] = here.gathered(ours), alone.detach().cpu()
            if not trains:
                continue
            gradients = (torch.autograd.grad(output.square().sum(), qkv) for output in (ours, alone))
            for which, mine, whole in zip("qkv", *gradients, strict=True):
                pairs[f"{name}, gradient of {which}"] = here.summed(mine), whole.cpu()
    return pairs


def masks(here: Here) -> Pairs:
    rows = CASES["padded"].inputs()["attention_mask"].bool().to(here.device)
    given = {"batch_size": len(rows), "q_length": here.length, "kv_length": here.length}
    gathering = gathering_mask_function(None)
    assert gathering(**given, attention_mask=torch.ones_like(rows)[:, here.slice]) is None
    mask = gathering(**given, attention_mask=rows[:, here.slice])
    assert mask is not None
    q, bias = here.random(2, 8, 8)[0], here.random(1, 8, 8)[0]
    bias = bias @ bias.transpose(2, 3)
    ours, _ = kernel_compat.ulysses(own_forward, dist.group.WORLD)(MODULE, *here.slices(q, q, q), bias)
    return {
        "a gathered mask": (mask.cpu(), rows.cpu()),
        "a mask for each head": (here.gathered(ours), own_forward(MODULE, q, q, q, bias)[0].cpu()),
    }


def derivatives(here: Here) -> Pairs:
    """Second derivatives, and gradients of a compiled function over packed sequences."""
    inner = attention_forward(reference(), KERNEL)
    spread = kernel_compat.ulysses(inner)
    q = here.random(2, 8)[0].double().requires_grad_()

    def second(attention: Callable[..., Any], x: Tensor) -> Tensor:
        first = torch.autograd.grad(attention(MODULE, x, x, x, None)[0].square().sum(), q, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), q)[0]

    part = here.slices(q)[0]
    pairs = {"second derivatives": (here.summed(second(spread, part)), second(inner, q).cpu())}
    if here.ranks == 2:
        offsets = torch.tensor([*OFFSETS[:-1], *(LENGTH + x for x in OFFSETS)], dtype=torch.int32, device=here.device)
        given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": LONGEST, "max_length_k": LONGEST}
        compiled = torch.compile(spread, fullgraph=True, backend="aot_eager")
        ours, alone = (
            torch.autograd.grad(attention(MODULE, x, x, x, None, **given)[0].square().sum(), q)[0]
            for attention, x in ((compiled, part), (inner, q))
        )
        pairs["compiled, packed"] = here.summed(ours), alone.cpu()
    return pairs


def skipped(folder: Path, here: Here) -> list[float]:
    """The distance between attention that skips the all-to-alls and attention without them, over each rank's own tokens."""
    differences = []
    given = {key: value[:, here.slice].to(here.device) for key, value in CASES["padded"].inputs().items()}
    ours, alone = (load(saved(folder, "llama_gqa"), name).to(here.device) for name in (SPREAD, ALONE))
    real = given["attention_mask"].bool()
    for keyword in ("skip_sequence_parallel", "skip_ulysses"):
        with torch.no_grad():
            difference = (ours(**given, **{keyword: True}).logits - alone(**given).logits)[real]
        differences.append(float(difference.abs().max()))
    steps = []  # generation with a cache of this rank's tokens
    for model, more in ((ours, {"skip_ulysses": True}), (alone, {})):
        ids, mask = given["input_ids"][2:], torch.ones_like(given["input_ids"][2:])
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True, **more).past_key_values
            mask = torch.cat([mask, mask[:, :1]], 1)
            steps.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache, **more).logits)
    return [*differences, float((steps[0] - steps[1]).abs().max())]


def refused(folder: Path, here: Here) -> dict[str, str]:
    model = load(saved(folder, "llama_gqa"), SPREAD).to(here.device)
    ids = torch.arange(here.length, device=here.device)[None]
    positions = ids + here.slice.start
    local = torch.ones(1, 1, here.length, here.length, dtype=torch.bool, device=here.device).tril()
    cache = model(ids, position_ids=positions, use_cache=True).past_key_values
    messages = {}
    for name, given in {
        "cache": {"input_ids": ids[:, :1], "position_ids": positions[:, :1] + here.length, "past_key_values": cache},
        "4D mask": {"input_ids": ids, "position_ids": positions, "attention_mask": local},
    }.items():
        try:
            model(**given)
        except kernel_compat.UnsupportedFeatureError as error:
            messages[name] = str(error)
    # Mistakes that only one rank can detect, and that all ranks raise in the first call.
    last = here.rank == here.ranks - 1
    for name, length, given in (
        ("default positions", here.length, {"position_ids": ids}),
        ("unequal slices", here.length - last, {}),
    ):
        x = torch.zeros(1, 4, length, 8, device=here.device)
        try:
            kernel_compat.ulysses(own_forward)(MODULE, x, x, x, None, **given)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def mesh(folder: Path, here: Here) -> Tensor:
    """Two sequences on two pairs of ranks: the logits of each sequence, over one dimension of a mesh."""
    grid = torch.distributed.device_mesh.init_device_mesh(here.device.type, (2, 2), mesh_dim_names=("data", "sequence"))
    kernel_compat.register_attention(MESH, KERNEL, sequence_parallel=grid["sequence"])
    case = CASES["fewer key heads"]
    row, column = divmod(here.rank, 2)
    model = load(saved(folder, case.model), MESH).to(here.device, torch.float64)
    part = Here(column, 2, here.device).slice
    inputs = case.inputs()
    ids, positions = (inputs[key][:, part].to(here.device) for key in ("input_ids", "position_ids"))
    with torch.no_grad():
        logits = here.gathered(model(ids[row : row + 1], position_ids=positions, use_cache=False).logits)
    return torch.cat(logits.chunk(2, 1))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    target, chosen = Path(sys.argv[1]), sys.argv[2]
    for count in map(int, sys.argv[3:]):
        # Forked, so that torch and transformers are imported once; CUDA can't be used in a fork where it was asked for devices.
        method = "spawn" if chosen == "cuda" else "fork"
        torch.multiprocessing.start_processes(work, (count, target, chosen), count, start_method=method)

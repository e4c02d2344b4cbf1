"""Attention of one layer over the ranks of a host: context parallelism, others' implementations, and the kernel alone.

Run by hand on GPUs of one host:

    torchrun --nproc-per-node 2 benchmarks/context_parallel_gpu.py --json FILE

bfloat16, causal, head dimension 128. A cell is a number of tokens a GPU, a layout (one sequence, or packed documents of log-normal
lengths) and numbers of heads. Its contenders take turns, round by round; a sample is one call behind a collective, while the device was
kept busy before, and the time of the slowest rank. Where a call waits for the device, its time includes the host's ("waits").

- alone: the kernel on a rank's share of the heads, of all tokens, without communication. Ratios are over its time.
- ideal: the time of the kernel for all heads on one GPU, divided by the ranks: its operations over ranks at the kernel's own rate.
- ours: the function of a registered name, called in the forward of a model, as in its second layer: plans are made in its first one.
  "As chosen" is `ContextParallel` of a group, "mesh" of a mesh: keys travel along the first dimension, the second shares heads.
  The first layer's cost, and that of `shard`, are measured by themselves, with documents in a new order each time.
- others: ring-flash-attn, yunchang, torch's context_parallel, DeepSpeed's DistributedAttention, as far as they can be imported.

Outputs and gradients are compared with those of one GPU and the same kernel: the largest difference, in units of bfloat16's rounding
of a value and of the root mean square of all (2 ** -8 * (abs + rms)).

--smoke runs tiny cells; with --device cpu through gloo and the reference kernel, to test the script.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from attention_gpu import BOTH, FORWARD, MODES, describe, kernel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernel_compat

HEADS = {"MHA": (32, 32), "GQA": (32, 8), "MQA": (32, 1)}
LAYOUTS = ("dense", "packed")
TOKENS = {"dense": (8192, 32768), "packed": (8192, 16384, 32768)}
#: By name: that of the library's kernel, and the module of its functions (see `attention_gpu.kernel`).
KERNELS = {
    "FA4": ("flash_attention_4", "flash_attn.cute"),
    "FA2": ("flash_attention_2", "flash_attn"),
    "torch": ("flash_attention_torch", "torch"),
    "reference": ("flash_attention_reference", ":flash_attention_reference"),
}
#: SDPA's backends under torch's context_parallel.
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "SDPA flash": "FLASH_ATTENTION"}
#: Of the lengths of documents.
MEAN, SIGMA, SEED = 2700, 1.0, 3
#: Clock cycles that the device is kept busy for before a sample: about 5 ms.
HEAD_START = 10_000_000
ALONE, ONE_GPU, OURS, OTHERS = "alone", "one GPU", "ours", "others"
#: Ours over a group without a mesh: which ranks share heads is chosen for each layer.
CHOSEN = "as chosen"
#: Larger differences than this are no rounding: cuDNN alone is 52 from FA2, and a row of another token is thousands away.
ALLOWED = 100.0


@dataclass(frozen=True)
class Cell:
    """One problem.

    Attributes:
        tokens: a GPU.
        heads: a key of `HEADS`.
        sizes: the numbers of query and key heads, and their dimension.
        mean: of the lengths of packed documents.
    """

    tokens: int
    layout: str
    heads: str
    sizes: tuple[int, int, int]
    mean: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.tokens} tokens a GPU, {self.heads} {self.sizes[0]}/{self.sizes[1]}"

    def lengths(self, ranks: int) -> list[int]:
        """Of the sequences of all ranks' tokens, multiples of 16, into which ring-flash-attn can split them."""
        rest, lengths = self.tokens * ranks, []
        if self.layout == "dense":
            return [rest]
        draws = random.Random(SEED)
        while rest:
            length = draws.lognormvariate(math.log(self.mean) - SIGMA**2 / 2, SIGMA)
            lengths.append(min(rest, max(16, round(length / 16) * 16)))
            rest -= lengths[-1]
        return lengths


class Problem:
    """The inputs of a cell on all ranks, alike on each, and the results of one GPU."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.lengths = cell.lengths(self.ranks)
        self.tokens = sum(self.lengths)
        heads, kv_heads, head_dim = cell.sizes
        generator = torch.Generator(device).manual_seed(SEED)
        self.query, self.key, self.value, self.gradient = (
            torch.randn(1, self.tokens, n, head_dim, device=device, dtype=torch.bfloat16, generator=generator)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        self._results: dict[str, list[Tensor]] = {}

    @cached_property
    def offsets(self) -> Tensor:
        return offsets_of(self.lengths, self.device)

    def positions(self) -> Tensor:
        """(tokens,), each token's index among all."""
        return torch.arange(self.tokens, device=self.device)

    def results(self, name: str) -> list[Tensor]:
        """The output of one GPU, and the gradients of query, key and value."""
        if name not in self._results:
            leaves = [x.clone().requires_grad_() for x in (self.query, self.key, self.value)]
            out = alone(self, name)(*leaves)
            self._results[name] = [out.detach(), *torch.autograd.grad(out, leaves, self.gradient)]
        return self._results[name]


@dataclass
class Share:
    """What a rank of a contender computes.

    Attributes:
        part: takes the rank's part of a tensor (1, tokens, heads, head_dim) of all tokens.
        call: from the rank's query, key and value to its output, all of shape (1, tokens, heads, head_dim).
        inside: runs calls in the surroundings that they need.
        comparable: whether the rank's gradients are parts of one GPU's.
    """

    part: Callable[[Tensor], Tensor]
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    inside: Callable[[Callable[[], None]], None] = lambda body: body()
    comparable: bool = True


@dataclass
class Contender:
    """An implementation.

    Attributes:
        kernel: whose time alone, and whose results, are compared.
        kind: `ALONE`, `ONE_GPU`, `OURS` or `OTHERS`.
        share: prepares a problem; raises what the implementation can't do.
        over: ours, for `shard`.
    """

    name: str
    kernel: str
    kind: str
    share: Callable[[Problem], Share]
    over: Any = None


@dataclass
class Row:
    """What is measured of a contender in a cell; times in ms, by mode, one of each round."""

    contender: Contender
    ms: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    host_ms: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    gib: dict[str, float] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)
    first: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    reason: str = ""

    def median(self, mode: str) -> float:
        return statistics.median(self.ms[mode]) if self.ms[mode] and not self.reason else math.nan

    def as_json(self) -> dict[str, Any]:
        whose = {"name": self.contender.name, "kernel": self.contender.kernel, "kind": self.contender.kind}
        return {
            **whose,
            **{k: v for k, v in vars(self).items() if k not in ("contender", "waits")},
            "waits": [*self.waits],
        }


def offsets_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


# The kernels alone.


def alone(problem: Problem, name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A kernel of packages, or a backend of SDPA, on all tokens of any heads."""
    if name in BACKENDS:
        return partial(sdpa, [getattr(torch.nn.attention.SDPBackend, BACKENDS[name])])
    source = KERNELS[name][1]
    if len(problem.lengths) == 1 and source.startswith("flash_attn"):
        function = importlib.import_module(source).flash_attn_func

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out

        return dense
    packed, offsets, longest = kernel(source), problem.offsets, max(problem.lengths)
    return lambda q, k, v: packed(q[0], k[0], v[0], offsets, longest)[None]


def sdpa(backends: list[Any] | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's function, looked up at the call: context_parallel replaces the attribute. None leaves the backend as it is."""
    rows = (x.transpose(1, 2) for x in (q, k, v))
    with ExitStack() as stack:
        if backends is not None:
            stack.enter_context(torch.nn.attention.sdpa_kernel(backends))
        out = functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)


def heads_of(problem: Problem, x: Tensor) -> Tensor:
    """The rank's share of the heads, of which fewer than ranks are on several."""
    rank, ranks, heads = problem.rank, problem.ranks, x.shape[2]
    return x.chunk(ranks, 2)[rank] if heads >= ranks else x.narrow(2, rank * heads // ranks, 1)


def of_heads(name: str, problem: Problem) -> Share:
    if name in BACKENDS and problem.cell.layout != "dense":
        raise NotImplementedError("one sequence alone")
    comparable = problem.cell.sizes[1] >= problem.ranks
    return Share(partial(heads_of, problem), alone(problem, name), comparable=comparable)


def of_everything(name: str, problem: Problem) -> Share:
    return Share(lambda x: x, alone(problem, name))


# Ours.


class Model(transformers.PreTrainedModel):  # type: ignore[misc]
    """A model whose forward runs a function, so that attention functions are called within a model's forward."""

    config_class = transformers.LlamaConfig
    _supports_flash_attn = _supports_sdpa = _supports_attention_backend = True

    def forward(self, input_ids: Tensor, position_ids: Tensor, body: Callable[[], None], **kwargs: Any) -> None:
        body()


class Layer(torch.nn.Module):  # type: ignore[misc]
    """What an attention function reads of its layer."""

    is_causal, layer_idx = True, 0


@functools.cache
def model_of(name: str) -> Any:
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=2)
    return Model._from_config(config, attn_implementation=name)


def batch_of(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """A batch of documents; its ids are the indices of its tokens."""
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    batch: dict[str, Any] = {"input_ids": torch.arange(sum(lengths), device=device)[None], "position_ids": positions}
    if len(lengths) > 1:
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets_of(lengths, device))
        batch |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    return batch


def registered(name: str, arguments: dict[str, Any]) -> Share:
    """A registered name, with a rank's share of a batch."""
    function, layer, columns = ALL_ATTENTION_FUNCTIONS[name], Layer(), arguments["input_ids"][0]
    keywords = {key: value for key, value in arguments.items() if key != "input_ids"}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = function(layer, *rows, None, dropout=0.0, scaling=q.shape[-1] ** -0.5, **keywords)[0]
        return out

    def inside(body: Callable[[], None]) -> None:
        model_of(name)(**arguments, body=body)

    return Share(partial(columns_of, columns), call, inside)


def columns_of(columns: Tensor, x: Tensor) -> Tensor:
    return x[:, columns]


def by_keys(name: str, over: Any, problem: Problem) -> Share:
    return registered(name, over.shard(batch_of(problem.lengths, problem.device)))


def by_heads(name: str, problem: Problem) -> Share:
    batch = batch_of(problem.lengths, problem.device)
    names = ("input_ids", "position_ids")
    return registered(name, batch | {key: batch[key].chunk(problem.ranks, 1)[problem.rank] for key in names})


def ours(kernels: Sequence[str], device: torch.device) -> Iterator[Contender]:
    ranks = dist.get_world_size()
    shapes = [(ranks, 1), (1, ranks), *((n, ranks // n) for n in range(2, ranks) if ranks % n == 0)]
    groups: dict[str, Any] = {CHOSEN: None}
    groups |= {f"mesh {a} x {b}": init_device_mesh(device.type, (a, b)) for a, b in shapes}
    for short, (scheme, group) in product(kernels, groups.items()):
        over, name = kernel_compat.ContextParallel(group), f"flash_{short}_{scheme.replace(' ', '_')}"
        kernel_compat.register_attention(name, kernel=KERNELS[short][0], context_parallel=over)
        yield Contender(f"ours, {scheme}", short, OURS, partial(by_keys, name, over), over)
    for short in kernels:
        name = f"flash_{short}_heads"
        kernel_compat.register_attention(name, kernel=KERNELS[short][0], sequence_parallel=True)
        yield Contender("ours, sequence_parallel", short, OURS, partial(by_heads, name))


# Others'.


@functools.cache
def ring_module(name: str) -> Any:
    """A module of ring-flash-attn, whose package imports names that transformers 5 no longer has."""
    if "ring_flash_attn" not in sys.modules:
        spec = importlib.util.find_spec("ring_flash_attn")
        if spec is None:
            raise ModuleNotFoundError("No module named 'ring_flash_attn'")
        package = types.ModuleType("ring_flash_attn")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["ring_flash_attn"] = package
    return importlib.import_module(f"ring_flash_attn.{name}")


def zigzag(tokens: Tensor, rank: int, ranks: int) -> Tensor:
    chunks = tokens.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def ring_zigzag(problem: Problem) -> Share:
    rank, ranks = problem.rank, problem.ranks
    if len(problem.lengths) == 1:
        function = ring_module("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
        columns = zigzag(problem.positions(), rank, ranks)
        return Share(partial(columns_of, columns), lambda q, k, v: function(q, k, v, causal=True))
    packed = ring_module("zigzag_ring_flash_attn_varlen").zigzag_ring_flash_attn_varlen_func
    columns = torch.cat([zigzag(some, rank, ranks) for some in problem.positions().split(problem.lengths)])
    offsets, longest = problem.offsets // ranks, max(problem.lengths) // ranks
    return Share(
        partial(columns_of, columns), lambda q, k, v: packed(q[0], k[0], v[0], offsets, longest, causal=True)[None]
    )


def ring_llama3(at_once: bool, problem: Problem) -> Share:
    """Gathers keys for one key head after the other, or for all at once."""
    module, heads = ring_module("llama3_flash_attn_varlen"), problem.cell.sizes[1] if at_once else 1
    lengths = module.llama3_flash_attn_prepare_cu_seqlens(problem.offsets, True, problem.rank, problem.ranks)
    *offsets_and_longest, here = lengths
    call = partial(module.llama3_flash_attn_varlen_func, heads_k_stride=heads, local_k_slice=here, causal=True)
    columns = problem.positions().chunk(problem.ranks)[problem.rank]
    return Share(partial(columns_of, columns), lambda q, k, v: call(q[0], k[0], v[0], *offsets_and_longest)[None])


@functools.cache
def yunchang_groups(heads: int) -> tuple[Any, Any]:
    """The groups for so many ranks that share heads. yunchang keeps those of the last call alone."""
    ranks, groups = dist.get_world_size(), importlib.import_module("yunchang.globals")
    groups.set_seq_parallel_pg(heads, ranks // heads, dist.get_rank(), ranks)
    return groups.PROCESS_GROUP.ULYSSES_PG, groups.PROCESS_GROUP.RING_PG


def yunchang_mesh(heads: int, problem: Problem) -> Share:
    """A zigzag ring of groups that share heads; without a ring where they are all ranks."""
    if problem.cell.layout != "dense":
        raise NotImplementedError("one sequence alone")
    yunchang, ranks = importlib.import_module("yunchang"), problem.ranks
    if heads == ranks:
        columns = problem.positions().chunk(ranks)[problem.rank]
        return Share(partial(columns_of, columns), partial(yunchang.UlyssesAttention(dist.group.WORLD), causal=True))
    groups = importlib.import_module("yunchang.globals").PROCESS_GROUP
    groups.ULYSSES_PG, groups.RING_PG = yunchang_groups(heads)
    attention, sizes = yunchang.LongContextAttention(ring_impl_type="zigzag"), {"rd": ranks // heads, "ud": heads}
    columns = yunchang.zigzag_extract_local(problem.positions()[None], problem.rank, ranks, **sizes)[0]
    return Share(partial(columns_of, columns), partial(attention, causal=True))


def torch_context_parallel(backend: str, mesh: Any, problem: Problem) -> Share:
    from torch.distributed.tensor.experimental import context_parallel

    if problem.cell.layout != "dense":
        raise NotImplementedError("one sequence alone")
    chosen = [getattr(torch.nn.attention.SDPBackend, BACKENDS[backend])]

    def inside(body: Callable[[], None]) -> None:
        errors, buffer = [], torch.zeros(2 * problem.ranks, device=problem.device)
        with (
            context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
            torch.nn.attention.sdpa_kernel(chosen),
        ):
            try:
                body()
            except Exception as error:  # raised behind the block, which would leave its function replaced
                errors.append(error)
        if errors:
            raise errors[0]

    columns = zigzag(problem.positions(), problem.rank, problem.ranks)
    return Share(partial(columns_of, columns), partial(sdpa, None), inside)


@functools.cache
def deepspeed_attention() -> Any:
    os.environ.setdefault("DS_BUILD_OPS", "0")
    importlib.import_module("deepspeed.comm").init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return importlib.import_module("deepspeed.sequence.layer").DistributedAttention


def deepspeed_ulysses(name: str, problem: Problem) -> Share:
    attention = deepspeed_attention()(alone(problem, name), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    columns = problem.positions().chunk(problem.ranks)[problem.rank]
    return Share(partial(columns_of, columns), lambda q, k, v: attention(q, k, v, 0))


def others(kernels: Sequence[str], device: torch.device) -> Iterator[Contender]:
    ranks = dist.get_world_size()
    if "FA2" in kernels:
        yield Contender("ring-flash-attn zigzag", "FA2", OTHERS, ring_zigzag)
        for words, at_once in (("a head at a time", False), ("all heads at once", True)):
            yield Contender(f"ring-flash-attn llama3, {words}", "FA2", OTHERS, partial(ring_llama3, at_once))
        for heads in (n for n in range(1, ranks + 1) if ranks % n == 0):
            yield Contender(f"yunchang {ranks // heads} x {heads}", "FA2", OTHERS, partial(yunchang_mesh, heads))
    for name in kernels:
        if name in ("FA2", "reference"):
            yield Contender("DeepSpeed DistributedAttention", name, OTHERS, partial(deepspeed_ulysses, name))
    if device.type == "cuda":
        mesh = init_device_mesh("cuda", (ranks,))
        for backend in BACKENDS:
            prepare = partial(torch_context_parallel, backend, mesh)
            yield Contender("torch context_parallel", backend, OTHERS, prepare)


def contenders(args: argparse.Namespace, device: torch.device) -> list[Contender]:
    """Those that run; prints why kernels can't."""
    usable, environment = [], kernel_compat.Environment.detect()
    for name in args.kernels:
        reason = kernel_compat.known_kernels()[KERNELS[name][0]].unavailable_because(environment)
        if reason:
            say(f"not run: {name}: {reason}")
        else:
            usable.append(name)
    backends = [*BACKENDS] if device.type == "cuda" else []
    limits = [Contender("the kernel alone", name, ALONE, partial(of_heads, name)) for name in (*usable, *backends)]
    limits += [Contender("all on one GPU", name, ONE_GPU, partial(of_everything, name)) for name in usable]
    rivals = [*ours(usable, device), *others(usable, device)]
    if args.contenders:
        rivals = [c for c in rivals if any(word in f"{c.name}, {c.kernel}" for word in args.contenders)]
    needed = {contender.kernel for contender in rivals}
    return [c for c in limits if c.kernel in needed or c.kernel in usable] + rivals


# Measuring.


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def everywhere(action: Callable[[], None]) -> str:
    """Run something on every rank. Returns why it failed on the first rank where it did, if any; the same on all."""
    reason = ""
    try:
        action()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest value of all ranks, for each."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]


class Runner:
    """A contender in a cell, with its inputs on this rank."""

    def __init__(self, contender: Contender, problem: Problem) -> None:
        self.row, self.problem, self.device = Row(contender), problem, problem.device
        self.share: Share | None = None
        self.leaves: list[Tensor] = []
        self.on_gpu = problem.device.type == "cuda"

    def prepare(self) -> None:
        """Make inputs, compare the results with one GPU's, and measure the memory; every later call is a warm one."""
        self.row.reason = everywhere(self._prepare)
        steps: list[Callable[[], None]] = [self._check, *(partial(self._memory, mode) for mode in MODES)]
        for step in steps:
            if not self.row.reason:
                self.row.reason = everywhere(partial(self._inside, step))
        if self.row.reason:
            self.share, self.leaves = None, []
        elif self.row.error is not None:
            self.row.error = slowest([self.row.error], self.device)[0]
        if self.row.gib and not self.row.reason:
            self.row.gib = dict(zip(self.row.gib, slowest([*self.row.gib.values()], self.device), strict=True))

    def _prepare(self) -> None:
        problem = self.problem
        self.share = self.row.contender.share(problem)
        parts = [self.share.part(x) for x in (problem.query, problem.key, problem.value, problem.gradient)]
        *self.leaves, self.gradient = (x.clone(memory_format=torch.contiguous_format) for x in parts)
        for leaf in self.leaves:
            leaf.requires_grad_()

    def _inside(self, body: Callable[[], None]) -> None:
        assert self.share is not None
        self.share.inside(body)

    def run(self, mode: str) -> list[Tensor]:
        """The output, or the output and the gradients."""
        assert self.share is not None
        if mode == FORWARD:
            with torch.no_grad():
                return [self.share.call(*self.leaves)]
        out = self.share.call(*self.leaves)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.gradient)]

    def _check(self) -> None:
        results = self.run(BOTH)
        assert self.share is not None
        if not self.share.comparable or self.row.contender.kind == ONE_GPU:
            return
        reference = self.row.contender.kernel
        if reference in BACKENDS:
            reference = "FA2" if importlib.util.find_spec("flash_attn") else "torch"
        exact = [self.share.part(x) for x in self.problem.results(reference)]
        self.row.error = max(in_roundings(x, y) for x, y in zip(results, exact, strict=True))

    def _memory(self, mode: str) -> None:
        self.run(mode)
        if not self.on_gpu:
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(mode)
        torch.cuda.synchronize()
        self.row.gib[mode] = (torch.cuda.max_memory_allocated() - before) / 2**30

    def sample(self, mode: str) -> None:
        """One time, as in the second layer of a model's forward."""

        def body() -> None:
            self.run(mode)
            ms, host_ms, waits = self._timed(mode)
            self.row.ms[mode].append(ms)
            self.row.host_ms[mode].append(host_ms)
            if waits:
                self.row.waits.add(mode)

        self._inside(body)

    def _timed(self, mode: str) -> tuple[float, float, bool]:
        if not self.on_gpu:
            ms = self._wall(partial(self.run, mode))
            return ms, ms, False
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        dist.all_reduce(torch.zeros(1, device=self.device))  # the ranks' devices begin together
        start.record()
        before = time.perf_counter()
        self.run(mode)
        host_ms = (time.perf_counter() - before) * 1e3
        end.record()
        waits = start.query()
        torch.cuda.synchronize()
        return start.elapsed_time(end), host_ms, waits

    def _wall(self, action: Callable[[], Any]) -> float:
        synchronize = torch.cuda.synchronize if self.on_gpu else lambda: None
        synchronize()
        dist.barrier()
        synchronize()
        before = time.perf_counter()
        action()
        synchronize()
        return (time.perf_counter() - before) * 1e3

    def first_layer(self, repeats: int) -> None:
        """Measure `shard`, and a forward of the first and the second layer, on new batches of the documents in other orders."""
        contender, share, kept = self.row.contender, self.share, self.problem.lengths
        times: dict[str, list[float]] = {"shard": [], "first": [], "second": []}

        def body() -> None:
            for name in ("first", "second"):
                times[name].append(self._wall(partial(self.run, FORWARD)))

        def prepare() -> None:
            self.share = contender.share(self.problem)

        for repeat in range(repeats):
            self.problem.lengths = random.Random(repeat).sample(kept, len(kept))
            times["shard"].append(self._wall(prepare))
            self._inside(body)
        self.share, self.problem.lengths = share, kept
        self.row.first = {name: statistics.median(slowest(some, self.device)) for name, some in times.items()}


def in_roundings(x: Tensor, y: Tensor) -> float:
    """The largest difference of two tensors, in units of bfloat16's rounding; see the module."""
    worst, rms = 0.0, float(torch.linalg.vector_norm(y, dtype=torch.float32)) / math.sqrt(y.numel())
    for some, other in zip(x.split(4096, 1), y.split(4096, 1), strict=True):  # a part at a time, for its memory
        exact = other.float()
        units = (some.float() - exact).abs() / (2**-8 * (exact.abs() + rms))
        worst = max(worst, float(units.nan_to_num(math.inf).max()))
    return worst


def measure(cell: Cell, everyone: Sequence[Contender], args: argparse.Namespace, device: torch.device) -> list[Row]:
    problem = Problem(cell, device)
    runners = [Runner(contender, problem) for contender in everyone]
    for runner in runners:
        runner.prepare()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    problem._results.clear()
    orders = random.Random(SEED)
    for number in range(args.repeats):
        running = [runner for runner in runners if not runner.row.reason]
        for runner in orders.sample(running, len(running)):
            if runner.row.contender.kind == ONE_GPU and number >= 3:
                continue  # takes as long as all ranks together
            for mode in args.modes:
                if not runner.row.reason:
                    runner.row.reason = everywhere(partial(runner.sample, mode))
    for runner in runners:
        row = runner.row
        for mode in args.modes:
            if row.ms[mode]:
                row.ms[mode] = slowest(row.ms[mode], device)
                if slowest([mode in row.waits], device)[0]:
                    row.waits.add(mode)
        if row.contender.kind == OURS and not row.reason:
            row.reason = everywhere(partial(runner.first_layer, 3))
    return [runner.row for runner in runners]


# Tables.


def limits_of(rows: Sequence[Row], kind: str) -> dict[str, Row]:
    return {row.contender.kernel: row for row in rows if row.contender.kind == kind}


def table(cell: Cell, rows: Sequence[Row], modes: Sequence[str], ranks: int) -> str:
    """The rows of a cell as Markdown."""
    limits, whole = limits_of(rows, ALONE), limits_of(rows, ONE_GPU)
    head = ["contender", "kernel"]
    for mode in modes:
        head += [f"{mode}, ms", "over alone", "of ideal", "GiB", "over alone"]
    head += ["shard / first layer more, ms", "error", ""]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        kernel_name, texts = row.contender.kernel, [row.contender.name, row.contender.kernel]
        limit, every = limits.get(kernel_name), whole.get(kernel_name)
        for mode in modes:
            ms, gib = row.median(mode), row.gib.get(mode, math.nan)
            texts += [
                number(ms, 3),
                number(ms / limit.median(mode) if limit else math.nan, 3),
                number(100 * every.median(mode) / ranks / ms if every else math.nan, 1, "%"),
                number(gib, 2),
                number(gib / (limit.gib.get(mode) or math.nan) if limit else math.nan, 2),
            ]
        first = row.first
        texts.append(f"{first['shard']:.2f} / {first['first'] - first['second']:.2f}" if first else "")
        wrong = row.error is not None and not row.error <= ALLOWED
        texts.append("" if row.error is None else f"{row.error:.2f}{' WRONG' if wrong else ''}")
        remarks = [row.reason] if row.reason else [f"waits in {mode}" for mode in modes if mode in row.waits]
        lines.append([*texts, "; ".join(remarks)])
    return "\n".join([f"### {cell}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def number(value: float, digits: int, unit: str = "") -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}{unit}"


def best(rows: Sequence[Row], kind: str, mode: str, kernel_name: str | None = None) -> Row | None:
    """The fastest right one of a kind."""
    right = [
        row
        for row in rows
        if row.contender.kind == kind
        and kernel_name in (None, row.contender.kernel)
        and not math.isnan(row.median(mode))
        and (row.error is None or row.error <= ALLOWED)
    ]
    return min(right, key=lambda row: row.median(mode), default=None)


def summary(cells: Sequence[tuple[Cell, list[Row]]], modes: Sequence[str]) -> str:
    """Ours beside the best of the others, with the middle half of the rounds' ratios: slower where all of it is above 1."""
    head = [
        "cell",
        "mode",
        "kernel",
        "best of ours",
        "over alone",
        "as chosen, over it",
        "best other",
        "ours over it",
        "",
    ]
    lines, slower = [head, ["---"] * len(head)], 0
    for (cell, rows), mode in product(cells, modes):
        limits = limits_of(rows, ALONE)
        for name in dict.fromkeys(row.contender.kernel for row in rows if row.contender.kind == OURS):
            own, other = best(rows, OURS, mode, name), best(rows, OTHERS, mode)
            if own is None:
                continue
            over = number(own.median(mode) / limits[name].median(mode) if name in limits else math.nan, 3)
            chosen = [row for row in rows if row.contender.name == f"ours, {CHOSEN}" and row.contender.kernel == name]
            loss = number(chosen[0].median(mode) / own.median(mode) if chosen else math.nan, 3)
            texts = [str(cell), mode, name, own.contender.name, over, loss]
            if other is None:
                lines.append([*texts, "", "", ""])
                continue
            ratios = [a / b for a, b in zip(own.ms[mode], other.ms[mode], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
            slower += low > 1
            whose = f"{other.contender.name}, {other.contender.kernel}"
            lines.append([*texts, whose, f"{middle:.3f} ({low:.3f} to {high:.3f})", "slower" if low > 1 else ""])
    texts = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join(["### Ours beside the best other", "", *texts, "", f"{slower} slower."])


def cells_of(args: argparse.Namespace) -> list[Cell]:
    cells = []
    for layout, heads in product(args.layouts, args.heads):
        for tokens in args.tokens or TOKENS[layout]:
            query, key = HEADS[heads]
            if args.smoke:
                cells.append(Cell(64, layout, heads, (query // 4, -(-key // 4), 16), 40))
                break
            cells.append(Cell(tokens, layout, heads, (query, key, 128), MEAN))
    return cells


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny cells")
    parser.add_argument("--tokens", nargs="+", type=int, help="a GPU; as many for every layout")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--heads", nargs="+", choices=[*HEADS], default=[*HEADS])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS], help="default: FA4 FA2 torch; reference on a CPU")
    parser.add_argument(
        "--contenders", nargs="+", metavar="WORD", help="only those with a word in their name or kernel"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--json", type=Path, help="written after each cell")
    return parser


def run(args: argparse.Namespace, device: torch.device) -> None:
    begun, ranks = time.monotonic(), dist.get_world_size()
    kernel_compat.install(unproven="allow")
    everyone, done = contenders(args, device), []
    facts = describe(device.type) | {"ranks": str(ranks)}
    say("Measured on " + ", ".join(f"{name} {value}" for name, value in facts.items()) + ".\n")
    for cell in cells_of(args):
        if slowest([time.monotonic() - begun], device)[0] > args.seconds:
            say(f"not run: {cell}")
            continue
        done.append((cell, measure(cell, everyone, args, device)))
        say(table(*done[-1], args.modes, ranks))
        say(f"{time.monotonic() - begun:.0f} s\n")
        if args.json and dist.get_rank() == 0:
            cells = [
                {**vars(c), "lengths": c.lengths(ranks), "rows": [row.as_json() for row in rows]} for c, rows in done
            ]
            args.json.write_text(json.dumps({"environment": facts, "cells": cells}))
    say(summary(done, args.modes))


def main() -> None:
    args = options().parse_args()
    args.kernels = args.kernels or (["reference"] if args.device == "cpu" else ["FA4", "FA2", "torch"])
    transformers.logging.set_verbosity_error()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=4))
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    run(args, device)
    with suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

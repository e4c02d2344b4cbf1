"""Tiny models over batches that `ContextParallel` spreads over processes, and over the same batches in one process.

As a program: `sharded.py FOLDER 2x4` runs all cases on so many processes, in a mesh of as many dimensions, and saves the results in FOLDER.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import beside_encoders
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from any_layer import separates_chunks
from autograd_scenarios import SCENARIOS
from ranks import EXPERTS, KERNEL
from small_mixers import MODELS, InDouble
from tiny import BY_COLUMNS, CAUSAL_LMS, QWEN_VL, SHAPE, TRANSFORMERS, VOCAB, load, randomize, save, saved, two_images
from tiny import bart as tiny_bart
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import kernel_compat
from kernel_compat import ContextParallel
from kernel_compat.attention.parallel import mixing, spread
from kernel_compat.kernels import reference

NAMES = {
    "balanced": "my_flash_balanced",
    "contiguous": "my_flash_contiguous",
    "padding-free": "my_flash_padding_free",
}
ALONE = "my_flash_alone"
#: Of a kernel that takes no mask.
WITHOUT_MASKS = "my_flash_without_masks"
#: No number of ranks divides it: rows are padded.
LENGTH = 29
#: Of packed sequences; those of a second row begin elsewhere.
EDGES = ([0, 5, 7, 20, LENGTH], [0, 1, 16, 19, LENGTH])


@dataclass
class Case:
    """A batch of a model, and how it is described."""

    model: str
    rows: int = 1
    padded: bool = False
    packed: str = ""
    split: str = "balanced"
    checkpointed: bool = False
    mask: str = ""

    @property
    def in_double(self) -> bool:
        """Whether casts to float32 are left out: a mode, which isn't there while a checkpoint is computed again."""
        return self.model in MODELS and not self.checkpointed

    def batch(self) -> dict[str, Any]:
        """The whole batch, with labels of the tokens that follow one of their sequence."""
        torch.manual_seed(0)
        ids = torch.randint(3, VOCAB, (self.rows, LENGTH))
        labels, batch = ids.clone(), {"input_ids": ids}
        if self.padded:
            mask = torch.ones_like(ids)
            mask[0, 20:], mask[-1, :7] = 0, 0
            first = mask.cumsum(1) == 1
            labels[(mask == 0) | first] = -100
            batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        if self.packed:
            positions = [torch.cat([torch.arange(b - a) for a, b in pairwise(EDGES[row])]) for row in range(self.rows)]
            batch["position_ids"] = torch.stack(positions)
            labels[batch["position_ids"] == 0] = -100
        if self.mask:
            batch["attention_mask"] = masks(self.mask, self.rows)
        if self.packed == "lengths":
            edges = [row * LENGTH + edge for row in range(self.rows) for edge in EDGES[row][:-1]]
            offsets = torch.tensor([*edges, self.rows * LENGTH], dtype=torch.int32)
            batch |= {
                "cu_seq_lens_q": offsets,
                "cu_seq_lens_k": offsets,
                "max_length_q": LENGTH,
                "max_length_k": LENGTH,
            }
        return {**batch, "labels": labels}


def masks(kind: str, rows: int) -> Tensor:
    """A mask of each query and key.

    blocks: tokens of a block see each other both ways. heads: others in each head and row, and some queries see nothing. bias: numbers
    added to the scores, which have gradients. packed: what every kernel takes.
    """
    index = torch.arange(LENGTH)
    causal = index[:, None] >= index
    sequences = torch.tensor([0] * 11 + [1] * (LENGTH - 11))
    if kind == "packed":
        return (causal & (sequences[:, None] == sequences))[None, None]
    if kind == "blocks":
        return (causal | (index[:, None] // 5 == index // 5)).expand(rows, 1, -1, -1)
    if kind == "heads":
        visible = torch.rand(rows, 8, LENGTH, LENGTH) < 0.5
        visible |= torch.eye(LENGTH, dtype=torch.bool)
        visible[-1, :, 3:9] = False
        return visible
    assert kind == "bias"
    lowest = torch.finfo(torch.float64).min
    hidden = torch.zeros(rows, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~causal, lowest)
    hidden[0, :, 4] = lowest  # of eager attention this query sees all keys
    hidden[-1, :, 5] = -math.inf
    distance = (index - index[:, None]) / torch.arange(1, 9)[:, None, None]
    return (hidden + distance).requires_grad_()


CASES = {
    "causal": Case("llama_gqa", rows=2),
    "contiguous": Case("llama_gqa", rows=2, split="contiguous"),
    "padded": Case("llama_gqa", rows=2, padded=True),
    "packed by positions": Case("llama_gqa", packed="positions"),
    "packed by lengths": Case("llama_gqa", rows=2, packed="lengths"),
    "checkpointed": Case("llama_gqa", packed="positions", checkpointed=True),
    "a window": Case("mistral_window", rows=2, padded=True),
    "a window, packed": Case("qwen2_window", packed="positions", split="contiguous"),
    "padding left out": Case("llama_gqa", rows=2, padded=True, split="padding-free"),
    "softcap": Case("gemma2_softcap", rows=2),
    "one key head": Case("llama_mqa", rows=2, padded=True),
    "sinks": Case("gpt_oss_sinks", rows=2),
    "smaller value heads": Case("deepseek_value_dim", rows=2),
}
CASES |= {
    "chunks": Case("llama4_chunks", rows=2),
    "chunks, padded": Case("llama4_chunks", rows=2, padded=True),
    "chunks, contiguous": Case("llama4_chunks", rows=2, padded=True, split="contiguous"),
    "chunks, packed": Case("llama4_chunks", packed="positions"),
    "chunks, packed by lengths": Case("llama4_chunks", rows=2, packed="lengths"),
    "chunks, checkpointed": Case("llama4_chunks", packed="positions", checkpointed=True),
    "a mask of blocks": Case("llama_gqa", rows=2, mask="blocks"),
    "a mask of blocks, contiguous": Case("llama_gqa", mask="blocks", split="contiguous", checkpointed=True),
    "a mask of heads": Case("llama_gqa", rows=2, mask="heads"),
    "a mask of heads, one key head": Case("llama_mqa", rows=2, mask="heads", split="contiguous"),
    "a mask of numbers": Case("llama_gqa", rows=2, mask="bias"),
    "a mask of packed sequences": Case("llama_gqa", rows=2, mask="packed"),
}
#: Mixers whose forwards are made of functions from this release on.
OF_FUNCTIONS = (5, 19)
MIXERS = [
    *(
        "mamba",
        "mamba2",
        "falcon_mamba",
        "jamba",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "nemotron_h",
        "zamba",
        "lfm2",
        "lfm3",
    ),
    *("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"),
]
#: One whose first layer is a mixer.
MIXED = "qwen3_next"
CASES |= {f"packed, {mixer}": Case(mixer, packed="positions") for mixer in MIXERS}
CASES |= {
    "rows of a mixer": Case("qwen3_next", rows=2, padded=True, split="contiguous"),
    "padding of a mixer left out": Case("qwen3_next", rows=2, padded=True, split="padding-free"),
    "a mixer in rows packed otherwise, checkpointed": Case("falcon_h1", rows=2, packed="lengths", checkpointed=True),
}


#: Along the second dimension of a mesh heads are shared.
CASES_ON_A_MESH = (
    "contiguous",
    "padded",
    "padding left out",
    "packed by positions",
    "a window",
    "sinks",
    "chunks, padded",
    "a mask of heads",
    "a mask of numbers",
    f"packed, {MIXED}",
    "packed, mamba",
)
#: As many processes have the tokens of a batch one by one.
MANY = 8
CASES_ON_MANY = (
    *("chunks, packed", "a mask of heads", "a mask of blocks, contiguous"),
    *("causal", "padded", "one key head", "packed by positions", "packed by lengths", "a window", "a window, packed"),
    *("padding left out", f"packed, {MIXED}"),
)


def cases(mesh: tuple[int, ...]) -> dict[str, Case]:
    """The cases that are run on a mesh, whose models this transformers has and can spread."""
    models = {*CAUSAL_LMS, *BY_COLUMNS, *(MODELS if TRANSFORMERS.release >= OF_FUNCTIONS else ())}
    names = CASES_ON_MANY if math.prod(mesh) >= MANY else CASES_ON_A_MESH if len(mesh) > 1 else CASES
    left_out = () if separates_chunks() else ("chunks, packed", "chunks, packed by lengths", "chunks, checkpointed")
    return {name: CASES[name] for name in names if CASES[name].model in models and name not in left_out}


def path_of(folder: Path, model: str) -> Path:
    """Save a tiny model once per folder."""
    config = {**CAUSAL_LMS, **BY_COLUMNS, **MODELS}[model]()
    return save(folder, model, transformers.AutoModelForCausalLM, config)


def judged(case: Case, name: str, models: Path, over: ContextParallel | None = None) -> tuple[Tensor, Tensor, Any]:
    """`computed` in float64, in which mixers compute their states in float32 otherwise."""
    with InDouble() if case.in_double else nullcontext():
        return computed(case, name, models, over)


def computed(case: Case, name: str, models: Path, over: ContextParallel | None = None) -> tuple[Tensor, Tensor, Any]:
    """The loss, the logits of the whole batch and the gradients; under `over` each rank's share of the first and the last."""
    has_experts = case.model in EXPERTS or case.model in MODELS
    options = {"experts_implementation": "eager"} if has_experts and TRANSFORMERS.release >= (5,) else {}
    model = load(path_of(models, case.model), name, **options).to(torch.float64)
    if case.checkpointed:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = case.batch()
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    inputs = {**batch, "shift_labels": targets} if over is None else over.shard(batch)
    targets = inputs.pop("shift_labels")
    del inputs["labels"]
    logits = model(**inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
    )
    loss.backward()
    gradients = {key: p.grad if p.grad is not None else torch.zeros_like(p) for key, p in model.named_parameters()}
    whole, mask = logits.detach(), torch.ones(case.rows, LENGTH)
    if case.padded:
        mask = batch["attention_mask"]
    if case.mask == "bias":
        gradients["attention_mask"] = batch["attention_mask"].grad
    if over is not None:
        whole = over.unshard(logits, inputs)
        if over.padding_free:
            assert logits.shape[1] < LENGTH  # of the real tokens alone
            whole = torch.zeros(*mask.shape, VOCAB, dtype=whole.dtype).index_put(
                (mask.bool(),), whole[0, : int(mask.sum())]
            )
    return loss.detach(), whole[:, :LENGTH] * mask[..., None], gradients


def of_scenarios(name: str, models: Path, over: ContextParallel | None = None) -> dict[str, dict[str, Tensor]]:
    """The gradients that each scenario leaves; each rank's share under `over`."""
    gradients = {}
    for what, scenario in SCENARIOS.items():
        model = load(saved(models, "llama_gqa"), name).to(torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # anomaly detection says that it is on
            scenario(model, partial(loss_of, model, over))
        gradients[what] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return gradients


def loss_of(model: Any, over: ContextParallel | None = None, seed: int = 0, length: int = LENGTH) -> Tensor:
    """The sum over two rows of tokens that are drawn by a seed; a rank's share under `over`."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))
    targets = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    share = (
        {"input_ids": ids, "shift_labels": targets} if over is None else over.shard({"input_ids": ids, "labels": ids})
    )
    targets = share.pop("shift_labels")
    share.pop("labels", None)
    logits = model(**share, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def start(folder: Path, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Run this program; returns its results."""
    named = "x".join(map(str, mesh))
    refusing = {"llama_gqa", *({MIXED, "kimi_linear", "minimax"} & MODELS.keys())}
    for model in refusing | {case.model for case in cases(mesh).values()}:
        path_of(folder, model)
    done = subprocess.run(
        [sys.executable, __file__, str(folder), named],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    results: dict[str, Any] = torch.load(folder / f"sharded-{named}.pt", weights_only=False)
    return results


def work(rank: int, mesh: tuple[int, ...], folder: Path) -> None:
    torch.set_num_threads(1)
    if math.prod(mesh) % 2:  # heads are computed in two parts, as with much longer sequences
        spread._LEAST_WORK = 0
    ranks, named = math.prod(mesh), "x".join(map(str, mesh))
    group = partial(mesh_of, mesh) if len(mesh) > 1 else None
    splits: dict[str, Any] = {split: "contiguous" if split == "contiguous" else "balanced" for split in NAMES}
    over = {name: ContextParallel(group, split=split) for name, split in splits.items()}
    for split, name in NAMES.items():  # before the process group exists
        padding_free = split == "padding-free"
        kernel_compat.register_attention(name, KERNEL, context_parallel=over[split], padding_free=padding_free)
    without = SimpleNamespace(
        flash_attn_func=reference.flash_attn_func, flash_attn_varlen_func=reference.flash_attn_varlen_func
    )
    kernel_compat.register_attention(WITHOUT_MASKS, without, context_parallel=over["balanced"])
    assert kernel_compat.install().ok
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/sharded-{named}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    results: dict[str, Any] = {}
    for name, case in cases(mesh).items():
        try:
            loss, logits, gradients = judged(case, NAMES[case.split], folder, over[case.split])
        except Exception as error:
            raise RuntimeError(f"the case {name!r}") from error
        results[name] = summed(loss), logits, {key: summed(gradient) for key, gradient in gradients.items()}
    if len(mesh) == 1:  # neither knows how heads are shared
        results["scenarios"] = {
            what: {key: summed(gradient) for key, gradient in gradients.items()}
            for what, gradients in of_scenarios(NAMES["balanced"], folder, over["balanced"]).items()
        }
        results["refused"] = [None] * ranks
        dist.all_gather_object(results["refused"], refused(folder, rank))
    results["encoder"] = encoded(NAMES["balanced"], over["balanced"])
    loss, gradients = of_images(NAMES["balanced"], over["balanced"])
    results["images"] = summed(loss), {key: summed(gradient) for key, gradient in gradients.items()}
    for kind in BOTH_WAYS:
        loss, gradients = of_both_ways(kind, NAMES["balanced"], over["balanced"])
        results[kind] = summed(loss), {key: summed(gradient) for key, gradient in gradients.items()}
    results["by hand"] = by_hand(folder, NAMES["contiguous"], over["contiguous"])
    results["beside encoders"] = {}
    for what in beside_encoders.CASES if len(mesh) == 1 else beside_encoders.CASES_ON_A_MESH:
        beside = beside_encoders.CASES[what]
        states = beside_encoders.states_of(beside, ranks)
        loss, logits, gradients = beside_encoders.computed(beside, NAMES["balanced"], states, over["balanced"])
        shares = {key: summed(gradient) for key, gradient in gradients.items()}
        results["beside encoders"][what] = summed(loss), logits, shares
    replaced = functions_of_ours()
    report = kernel_compat.uninstall()
    results["functions of ours"] = replaced, functions_of_ours(), report.left_alone
    if rank == 0:
        torch.save(results, folder / f"sharded-{named}.pt")
    dist.barrier()
    dist.destroy_process_group()


@cache
def mesh_of(mesh: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", mesh)


def functions_of_ours() -> list[str]:
    """The functions of files of transformers that the library has replaced for mixers."""
    return [
        f"{module.__name__}.{name}"
        for module in [*sys.modules.values()]
        if getattr(module, "__name__", "").startswith("transformers.models.")
        for name, value in vars(module).items()
        if getattr(getattr(value, "__code__", None), "co_filename", "") == mixing.__file__
    ]


def summed(x: Tensor) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x)
    return x


def refused(folder: Path, rank: int) -> dict[str, str]:
    """The messages of calls that can't be spread, each the first of its name; and what is computed without the other ranks."""
    messages = {}
    ids = torch.arange(3, 11)[None]
    positions = torch.arange(8)[None] + 8 * rank
    local = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    for what, given in {
        "no positions": {},
        "default positions": {"position_ids": torch.arange(8)[None]},
        "4D mask": {"attention_mask": local, "position_ids": positions},
    }.items():
        name = f"my_flash_{what.replace(' ', '_')}"
        kernel_compat.register_attention(name, KERNEL, context_parallel=ContextParallel(split="contiguous"))
        model = load(saved(folder, "llama_gqa"), name)
        try:
            model(input_ids=ids, **given, use_cache=False)
        except (ValueError, kernel_compat.UnsupportedFeatureError) as error:
            messages[what] = str(error)
    try:
        encoder("roberta", NAMES["balanced"])(input_ids=ids)
    except kernel_compat.UnsupportedFeatureError as error:
        messages["positions from padding"] = str(error)
    model = load(saved(folder, "llama_gqa"), NAMES["contiguous"])
    given = {"input_ids": ids, "position_ids": positions}
    try:
        model(**given, labels=ids)
    except ValueError as error:
        messages["labels"] = str(error)
    routed = transformers.MixtralConfig(**SHAPE, num_local_experts=2, output_router_logits=True)
    experts = {"experts_implementation": "eager"} if TRANSFORMERS.release >= (5,) else {}
    router = transformers.AutoModelForCausalLM.from_config(routed, attn_implementation=NAMES["contiguous"], **experts)
    try:
        router(**given, labels=ids, shift_labels=ids)
    except kernel_compat.UnsupportedFeatureError as error:
        messages["a loss of routers"] = str(error)
    over = ContextParallel()
    batch = over.shard(CASES["packed by positions"].batch())
    for what, wrong in {"twice": batch, "empty": {"input_ids": ids[:0]}}.items():
        try:
            over.shard(wrong)
        except ValueError as error:
            messages[what] = str(error)
    of_all = transformers.AutoModelForSequenceClassification.from_config(
        model.config, attn_implementation=NAMES["contiguous"]
    )
    try:
        of_all(**given, labels=torch.tensor([1]))
    except kernel_compat.UnsupportedFeatureError as error:
        messages["a label of the sequence"] = str(error)
    messages |= refused_images(model, over) | refused_masks(folder, over) | refused_decoders(over)
    dropping = load(saved(folder, "llama_gqa"), NAMES["contiguous"])
    dropping.forward = lambda position_ids, **rest: type(dropping).forward(dropping, **rest)
    try:
        dropping(**given, use_cache=False)
    except kernel_compat.UnsupportedFeatureError as error:
        messages["positions that are dropped"] = str(error)
    decoder = encoder("bert", NAMES["contiguous"], is_decoder=True, add_cross_attention=True)
    try:
        decoder(**given, encoder_hidden_states=torch.zeros(1, 8, 16, dtype=torch.float64))
    except kernel_compat.UnsupportedFeatureError as error:
        messages["states of an encoder"] = str(error)
    for split, name in NAMES.items():
        try:
            bart(name).model.decoder(input_ids=ids)
        except kernel_compat.UnsupportedFeatureError as error:
            messages[f"its own positions, {split}"] = str(error)
    model = load(saved(folder, "llama_gqa"), NAMES["contiguous"])
    cache = model(input_ids=ids, position_ids=positions, use_cache=True).past_key_values
    try:
        model(input_ids=ids[:, :1], position_ids=positions[:, :1] + 8, past_key_values=cache)
    except (ValueError, kernel_compat.UnsupportedFeatureError) as error:
        messages["a cache"] = str(error)
    penalized = load(saved(folder, "llama_gqa"), NAMES["balanced"])
    (gradient,) = torch.autograd.grad(loss_of(penalized, over), penalized.model.embed_tokens.weight, create_graph=True)
    try:
        gradient.square().sum().backward()
    except RuntimeError as error:
        messages["gradients of gradients"] = str(error)
    kernel_compat.register_attention(ALONE, KERNEL)
    alone = load(saved(folder, "llama_gqa"), ALONE)
    with torch.no_grad():
        ours = model(input_ids=ids, use_cache=False, skip_sequence_parallel=True).logits
        messages["skipped"] = str(float((ours - alone(input_ids=ids, use_cache=False).logits).abs().max()))
    return messages | (refused_mixers(folder, ids, positions) if "minimax" in MODELS else {})


def refused_images(text: Any, over: ContextParallel) -> dict[str, str]:
    """The messages of images in a model without them, and of those whose tokens see each other both ways where that can't be computed."""
    messages = {}
    pixels, ids = torch.zeros(1, 3, 16, 16), torch.tensor([[5, 90, 90, 90, 90, 6]])
    try:
        text(**over.shard({"input_ids": ids, "pixel_values": pixels}), use_cache=False)
    except kernel_compat.UnsupportedFeatureError as error:
        messages["images of no model"] = str(error)
    for what, name, images in (
        ("images both ways", WITHOUT_MASKS, True),
        ("text both ways", NAMES["balanced"], False),
    ):
        try:
            of_both_ways("gemma3", name, over, images)
        except (ValueError, kernel_compat.UnsupportedFeatureError) as error:
            messages[what] = str(error)
    return messages


def refused_masks(folder: Path, over: ContextParallel) -> dict[str, str]:
    """The messages of masks that can't be spread, each the first call of its name."""
    messages = {}
    batch = {"input_ids": torch.arange(3, 3 + LENGTH).expand(2, -1), "attention_mask": masks("heads", 2)}
    blocks = masks("blocks", 2)
    of_rank = over.shard({**batch, "attention_mask": blocks})
    length = of_rank["input_ids"].shape[1]
    local = torch.ones(2, 1, length, length, dtype=torch.bool)
    another = blocks.clone()
    another[0, 0, 20, dist.get_rank()] = False
    passed = {
        "another rank's mask": over.shard({**batch, "attention_mask": another}),
        "a mask of a slice": {**of_rank, "attention_mask": local},
        "default positions under a mask": {**of_rank, "position_ids": torch.arange(length).expand(2, -1)},
        "a mask beside packed sequences": {**batch, **CASES["packed by lengths"].batch(), **batch},
    }
    for what, given in passed.items():
        name = f"my_flash_{'_'.join(what.replace(chr(39), '').split())}"
        kernel_compat.register_attention(name, KERNEL, context_parallel=over)
        model = load(saved(folder, "llama_gqa"), name)
        try:
            model(**(over.shard(given) if "packed" in what else given), use_cache=False)
        except (ValueError, kernel_compat.UnsupportedFeatureError) as error:
            messages[what] = str(error)
    try:
        load(saved(folder, "llama_gqa"), WITHOUT_MASKS)(**over.shard(batch), use_cache=False)
    except ValueError as error:
        messages["a mask of heads"] = str(error)
    return messages


def refused_decoders(over: ContextParallel) -> dict[str, str]:
    """The messages of models with an encoder and a decoder."""
    messages = {}
    name = NAMES["balanced"]
    case = beside_encoders.Case(beside_encoders.whisper, (4, 57), "features", of_decoder=True)
    whisper, batch = beside_encoders.built(case, name, 8), case.batch(8)
    features, labels = batch["input_features"], batch["labels"]
    bart = transformers.BartForConditionalGeneration._from_config(tiny_bart(), attn_implementation=name)
    ids = {"input_ids": labels, "decoder_input_ids": labels}
    calls: dict[str, tuple[Any, Any]] = {
        "no share": (whisper, lambda: {"input_features": features, "labels": labels}),
        "a decoder's loss": (whisper, lambda: over.shard(batch)),
        "a decoder's packing": (
            whisper,
            lambda: over.shard(
                {**batch, "labels": None, "decoder_position_ids": torch.arange(beside_encoders.LENGTH)[None] % 9}
            ),
        ),
        "a decoder's labels": (whisper, lambda: over.shard({**batch, "labels": labels[:, 1:]})),
        "a decoder's own positions": (bart, lambda: over.shard(ids)),
    }
    if TRANSFORMERS.release >= (5, 5):
        kind, config = beside_encoders.encoder_decoder()
        two = kind._from_config(config, attn_implementation=name)
        case = beside_encoders.CASES["its own loss"]
        masking, masked = beside_encoders.built(case, name, 8), case.batch(8)
        masked["decoder_input_ids"][:, 2] = beside_encoders.PADDING
        del masked["decoder_attention_mask"]
        del masked["labels"]
        mask = torch.ones_like(labels)
        calls |= {
            "a mask of labels": (
                two,
                lambda: over.shard({"input_ids": labels, "decoder_attention_mask": mask, "labels": labels}),
            ),
            "a mask of tokens": (masking, lambda: over.shard(masked)),
        }
    for what, (model, share) in calls.items():
        try:
            model(**share(), use_cache=False)
        except (ValueError, kernel_compat.UnsupportedFeatureError) as error:
            messages[what] = str(error)
    return messages


def refused_mixers(folder: Path, ids: Tensor, positions: Tensor) -> dict[str, str]:
    """The messages of mixers that can't be spread."""
    messages = {}
    mixed = MIXED if TRANSFORMERS.release >= OF_FUNCTIONS else "minimax"
    for what, given in {
        "a mixer of no functions": {"input_ids": ids, "position_ids": positions, "use_cache": False},
        "cache of a mixer": {"input_ids": ids, "position_ids": positions, "use_cache": True},
        "no positions of a mixer": {"input_ids": ids, "use_cache": False},
        "default positions of a mixer": {
            "input_ids": ids,
            "position_ids": torch.arange(8)[None],
            "use_cache": False,
        },
    }.items():
        name = f"my_flash_{what.replace(' ', '_')}"
        kernel_compat.register_attention(name, KERNEL, context_parallel=ContextParallel(split="contiguous"))
        mixer = load(path_of(folder, "minimax" if what == "a mixer of no functions" else mixed), name)
        try:
            mixer(**given)
        except (ValueError, kernel_compat.UnsupportedFeatureError) as error:
            messages[what] = str(error)
    if "kimi_linear" in MODELS and TRANSFORMERS.release >= OF_FUNCTIONS:
        inputs = {"input_ids": ids, "use_cache": False}
        with torch.no_grad():  # a gate of its mixers doesn't get the keyword
            spread, alone = (load(path_of(folder, "kimi_linear"), name) for name in (NAMES["contiguous"], ALONE))
            difference = spread(**inputs, skip_sequence_parallel=True).logits - alone(**inputs).logits
        messages["skipped mixers"] = str(float(difference.abs().max()))
    return messages


def encoder(kind: str, name: str, **more: bool) -> Any:
    """A bidirectional model with learned positions."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more, vocab_size=VOCAB, attn_implementation=name)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config, attn_implementation=name).to(torch.float64).eval()


def encoded(name: str, over: ContextParallel | None = None) -> Tensor:
    """The states of a bidirectional model, of a batch with padding."""
    batch = {key: value for key, value in Case("", rows=2, padded=True).batch().items() if key != "labels"}
    inputs = batch if over is None else over.shard(batch)
    model = encoder("bert", name)
    with torch.no_grad():
        states = model(
            **{name: inputs[name] for name in inputs if over is None or name != "shift_labels"}
        ).last_hidden_state
    return (states if over is None else over.unshard(states, inputs)[:, :LENGTH]) * batch["attention_mask"][..., None]


def vision_model(name: str) -> Any:
    """A model of images with M-RoPE, whose text model adds features of images between its layers."""
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = transformers.Qwen3VLConfig(
        **{**QWEN_VL, "text_config": {**QWEN_VL["text_config"], "head_dim": 16}}, vision_config=vision
    )
    torch.manual_seed(0)
    return randomize(
        transformers.Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=name)
    ).double()


def of_images(name: str, over: ContextParallel | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a model of images and its gradients, of two rows with two images each; each rank's share under `over`."""
    inputs = two_images(generator=torch.Generator().manual_seed(0))
    batch = {key: torch.cat([value, value.flip(0)]) for key, value in inputs.items()}
    batch |= {"input_ids": torch.cat([inputs["input_ids"]] * 2), "pixel_values": batch["pixel_values"].double()}
    batch["labels"] = batch["input_ids"]
    model = vision_model(name)
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    share = {**batch, "shift_labels": targets} if over is None else over.shard(batch)
    targets = share.pop("shift_labels")
    del share["labels"]
    logits = model(**share, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return loss.detach(), {
        key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()
    }


#: Models whose images' tokens see each other both ways.
BOTH_WAYS = ("gemma3", "paligemma")


def model_of_both_ways(kind: str, name: str) -> Any:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**SHAPE, "head_dim": 16, "sliding_window": 8},
            vision_config={**tower, "image_size": 16, "patch_size": 4, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_index=90,
        )
        model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=name)
    else:
        config = transformers.PaliGemmaConfig(
            text_config=transformers.GemmaConfig(**SHAPE, head_dim=8),
            vision_config=transformers.SiglipVisionConfig(**tower, image_size=16, patch_size=8, vision_use_head=False),
            image_token_index=90,
            projection_dim=64,
            hidden_size=64,
        )
        model = transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation=name)
    return randomize(model).double().train()


def of_both_ways(
    kind: str, name: str, over: ContextParallel | None = None, images: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients, of two padded rows with an image each; each rank's share under `over`."""
    batch = Case("", rows=2, padded=True).batch()
    generator = torch.Generator().manual_seed(0)
    batch["input_ids"][0, 9:13] = batch["input_ids"][1, 12:16] = 90
    types = (batch["input_ids"] == 90).long()
    batch["token_type_ids"] = types if kind == "gemma3" else (torch.arange(LENGTH) > 17).long().expand(2, -1).clone()
    if images:
        batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    share = {**batch, "shift_labels": targets} if over is None else over.shard(batch)
    targets = share.pop("shift_labels")
    del share["labels"]
    torch.manual_seed(0)
    model = model_of_both_ways(kind, name)
    with InDouble():
        logits = model(**share, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return loss.detach(), {
        key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()
    }


def by_hand(folder: Path, name: str, over: ContextParallel | None = None) -> Tensor:
    """The logits of chunks in padded rows; under `over` of ranks that pass equal slices of the mask themselves."""
    model = load(path_of(folder, "llama4_chunks"), name).to(torch.float64)
    ranks, rank = (1, 0) if over is None else (dist.get_world_size(), dist.get_rank())
    columns, mask = torch.arange(240), torch.ones(2, 240, dtype=torch.int64)
    mask[0, :7] = mask[1, 200:] = 0
    own = columns.chunk(ranks)[rank]
    with torch.no_grad():
        given = {"input_ids": ((columns * 7) % 90 + 3)[own].expand(2, -1), "position_ids": own.expand(2, -1)}
        logits = model(**given, attention_mask=mask[:, own], use_cache=False).logits
    parts = [torch.empty_like(logits) for _ in range(ranks)]
    if over is None:
        parts = [logits]
    else:
        dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, 1) * mask[..., None]


def bart(name: str) -> Any:
    """A model whose decoder counts positions itself."""
    sizes = {
        "d_model": 16,
        "decoder_layers": 1,
        "decoder_ffn_dim": 16,
        "decoder_attention_heads": 2,
        "vocab_size": VOCAB,
    }
    config = transformers.BartConfig(**sizes, is_decoder=True, is_encoder_decoder=False, attn_implementation=name)
    return transformers.BartForCausalLM(config)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    target, shape = Path(sys.argv[1]), tuple(map(int, sys.argv[2].split("x")))
    # Forked, so that torch and transformers are imported once.
    torch.multiprocessing.start_processes(work, (shape, target), math.prod(shape), start_method="fork")

"""Tiny models in bfloat16 under each kernel, compared with the same weights in float32 under eager attention.

The bound is eager's own error in bfloat16: a kernel computes the softmax in float32 and rounds its output once, so
its error may be at most twice that.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from tiny import CAUSAL_LMS, SHAPE, TRANSFORMERS, VOCAB, distance, installation, load, randomize, saved
from torch import Tensor

import kernel_compat
from kernel_compat.kernels import Functions

pytestmark = pytest.mark.gpu

BATCH, LENGTH = 3, 40
LENGTHS = (17, 20, 3)

#: The features that each model needs of a kernel besides causal attention.
NEEDS = {
    "qwen2_window": ("window",),
    "mistral_window": ("window",),
    "gemma2_softcap": ("window", "softcap"),
    "gpt_oss_sinks": ("window", "sinks"),
}


class Three:
    """The same weights three times: float32 eager (the truth), bfloat16 eager (the yardstick), bfloat16 under test."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.rounded = load(path, "eager").to(torch.bfloat16)
        self.truth = self.copy("eager", torch.float32)
        self.yardstick = self.copy("eager", torch.bfloat16)
        self.ours = self.copy(name, torch.bfloat16)

    def copy(self, name: str, dtype: torch.dtype) -> Any:
        model = load(self.path, name)
        model.load_state_dict({k: v.float() for k, v in self.rounded.state_dict().items()})
        return model.to("cuda", dtype)

    def judge(self, run: Callable[[Any], Tensor], backward: bool) -> None:
        """Compare the three models. `run` returns the logits to compare, (tokens, vocabulary)."""
        results: list[tuple[Tensor, ...]] = []
        for model in (self.truth, self.yardstick, self.ours):
            with torch.set_grad_enabled(backward):
                logits = run(model).float()
            if backward:
                model.zero_grad()
                logits.square().mean().backward()
                gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
                results.append((logits.detach(), gradient))
            else:
                results.append((logits,))
        for truth, yardstick, ours in zip(*results, strict=True):
            error, allowed = distance(ours, truth), 2 * distance(yardstick, truth)
            assert error <= allowed, f"off by {error:.2e}, and eager in bfloat16 by half of {allowed:.2e}"


@pytest.fixture(params=list(CAUSAL_LMS))
def three(request: pytest.FixtureRequest, models: Path, kernel: str, name: str) -> Three:
    """If the kernel lacks a feature that the model needs, this asserts the error and skips the test."""
    features = kernel_compat.known_kernels()[kernel].features
    three = Three(saved(models, request.param), name)
    missing = [feature for feature in NEEDS.get(request.param, ()) if not getattr(features, feature)]
    if missing:
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match=f"{kernel} does not support"), torch.no_grad():
            three.ours(input_ids=tokens())
        pytest.skip(f"{kernel} has no {' and no '.join(missing)}, and said so")
    return three


def tokens(batch: int = BATCH) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(3, VOCAB, (batch, LENGTH), device="cuda")


def differentiable(kernel: str) -> bool:
    return kernel_compat.known_kernels()[kernel].features.backward


def test_batched(three: Three, kernel: str) -> None:
    ids = tokens()
    three.judge(lambda model: model(input_ids=ids, use_cache=False).logits, differentiable(kernel))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(three: Three, kernel: str, side: str) -> None:
    ids, mask = tokens(), torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
    mask[0, :23] = 0
    mask[1, :1] = 0
    mask = mask if side == "left" else mask.flip(1)
    three.judge(
        lambda model: model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()],
        differentiable(kernel),
    )


@pytest.mark.parametrize("lengths", ["position_ids", "cu_seq_lens", "cu_seq_lens and tensors"])
def test_packed(three: Three, kernel: str, lengths: str) -> None:
    """The FlashAttention-4 failure in the design: packed position_ids fail in every forward under upstream's own name."""
    ids = tokens(1)
    inputs: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()}
    if lengths != "position_ids":
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
        longest: Any = torch.tensor(max(LENGTHS), device="cuda") if lengths.endswith("tensors") else max(LENGTHS)
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        inputs |= {"max_length_q": longest, "max_length_k": longest}

    def run(model: Any) -> Tensor:
        if model is three.ours:
            return model(input_ids=ids, use_cache=False, **inputs).logits[0]
        return torch.cat([model(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, 1)])

    three.judge(run, differentiable(kernel))


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_with_a_cache(three: Three, padded: bool) -> None:
    ids = tokens()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0

    def run(model: Any) -> Tensor:
        out = model(input_ids=ids[:, :30], attention_mask=mask[:, :30], use_cache=True)
        steps = [out.logits[:, -1:]]
        for position in range(30, LENGTH):
            out = model(
                input_ids=ids[:, position : position + 1],
                attention_mask=mask[:, : position + 1],
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            steps.append(out.logits)
        return torch.cat(steps, 1)

    three.judge(run, backward=False)


def test_generate(three: Three) -> None:
    ids = tokens()[:, :12]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        if options and three.ours.config.model_type == "deepseek_v3":
            continue  # transformers allocates the static cache with one head dimension; deepseek_v3 has two
        out = three.ours.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        # The float32 model recomputes the generated tokens in one forward.
        whole = torch.cat([mask, mask.new_ones(len(ids), 6)], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": out.sequences, "attention_mask": whole, "position_ids": positions, "use_cache": False}
        with torch.no_grad():
            truth, yardstick = (m(**inputs).logits[:, 11:-1].float() for m in (three.truth, three.yardstick))
        found = torch.stack(out.logits, 1).float()
        assert distance(found, truth) <= 2 * distance(yardstick, truth)


def test_fa4_packed_position_ids_die_upstream(models: Path, usable: Callable[[str], None]) -> None:
    """Upstream has this failure from 5.4 on, when it added the name; our names don't."""
    usable("flash_attention_4")
    if TRANSFORMERS.release < (5, 4):
        pytest.skip("upstream has no flash_attention_4 before 5.4")
    model = load(saved(models, "llama"), "eager").to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_4")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    with pytest.raises(Exception, match="IntTuple"):
        model(input_ids=tokens(1), position_ids=positions, use_cache=False)


def test_names_take_turns(models: Path, usable: Callable[[str], None]) -> None:
    """FlashAttention-2, FlashAttention-4 and the reference in turns; each name calls its own kernel."""
    names = ("flash_attention_2", "flash_attention_4")
    for kernel in names:
        usable(kernel)
        kernel_compat.register_attention(f"turn_{kernel}", kernel=kernel)
    calls: list[str] = []
    try:
        with kernel_compat.installed():
            pair = {kernel: Three(saved(models, "llama_gqa"), f"turn_{kernel}") for kernel in names}
            for kernel in names:
                functions = kernel_compat.known_kernels()[kernel].load()
                assert functions.flash_attn_func is not None
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, torch.no_grad():
                for kernel in (*names, *names):
                    pair[kernel].ours(input_ids=tokens(), use_cache=False)
            calls = [event.key for event in profile.key_averages()]
            for kernel in names:
                pair[kernel].judge(lambda model: model(input_ids=tokens(), use_cache=False).logits, True)
    finally:
        for kernel in names:
            kernel_compat.unregister_attention(f"turn_{kernel}")
    assert any("flash_fwd_kernel" in key for key in calls), calls
    assert any("cute" in key.lower() or "cutlass" in key.lower() for key in calls if "flash_fwd_kernel" not in key), (
        calls
    )


@pytest.mark.parametrize("batch", ["padded", "position_ids", "cu_seq_lens"])
def test_synchronisations_do_not_grow_with_the_layers(name: str, batch: str) -> None:
    """Lengths are read from the device once per forward. Upstream: twice per layer for padding, five times for position_ids."""
    counts = []
    for layers in (2, 8):
        config = CAUSAL_LMS["llama"]()
        config.num_hidden_layers = layers
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * layers
        counts.append(_synchronisations(config, name, batch))
    print(f"synchronisations of {name}, {batch}: {counts}")
    assert counts[1] <= counts[0]
    assert counts[1] <= 2


@pytest.mark.parametrize(("batch", "most"), [("position_ids", 2), ("cu_seq_lens", 1)])
def test_synchronisations_of_mixers(name: str, batch: str, most: int) -> None:
    """Convolutions beside attention; synchronisations of upstream's own code for one sequence are subtracted."""
    config = transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    assert _synchronisations(config, name, batch) - _synchronisations(config, name, "one") <= most


def _synchronisations(config: Any, name: str, batch: str) -> int:
    """The synchronisations of a forward over new tensors, whose lengths haven't been read yet."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    model = randomize(model).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        model(**_inputs(batch))
        inputs = _inputs(batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(**inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def _inputs(batch: str) -> dict[str, Any]:
    ids = tokens(1 if batch != "padded" else BATCH)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if batch == "one":
        return inputs
    if batch == "padded":
        return inputs | {"attention_mask": torch.ones_like(ids).index_fill_(1, torch.tensor([0, 1], device="cuda"), 0)}
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    if batch == "cu_seq_lens":
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
        longest = torch.tensor(max(LENGTHS), device="cuda")
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
    return inputs


@pytest.mark.parametrize("batch", ["one", "padded", "cu_seq_lens"])
def test_fullgraph(models: Path, name: str, kernel: str, batch: str) -> None:
    """One graph: torch.compile traces a package's functions, or calls its primitives as an operator."""
    torch.compiler.reset()
    three = Three(saved(models, "llama_gqa"), name)
    ids = tokens(1 if batch != "padded" else BATCH)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    real = torch.ones_like(ids, dtype=torch.bool)
    if batch == "padded":
        real[0, :9] = False
        inputs["attention_mask"] = real.long()
    if batch == "cu_seq_lens":
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
        lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 20, "max_length_k": 20}
        inputs |= {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda(), **lengths}
    compiled = torch.compile(three.ours, fullgraph=True)

    def run(model: Any) -> Tensor:
        if model is three.ours:
            return compiled(**inputs).logits[real]
        if batch == "cu_seq_lens":
            return torch.cat([model(input_ids=p, use_cache=False).logits[0] for p in ids.split(LENGTHS, 1)])
        return model(**inputs).logits[real]

    three.judge(run, backward=differentiable(kernel))


@pytest.mark.parametrize("batch", ["padded", "cu_seq_lens"])
def test_a_captured_graph(models: Path, name: str, batch: str) -> None:
    """A graph that was captured after a warm-up with the same tensors gives the right numbers for other values of them."""
    three = Three(saved(models, "llama_gqa"), name)
    ids = tokens(1 if batch == "cu_seq_lens" else BATCH)

    def given(lengths: tuple[int, ...]) -> dict[str, Any]:
        """Inputs of rows that begin with so much padding, or of one row with sequences of these lengths."""
        if batch == "padded":
            mask = (torch.arange(LENGTH)[None] >= torch.tensor(lengths)[:, None]).long().cuda()
            return {"input_ids": ids, "attention_mask": mask}
        offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        longest = {"max_length_q": LENGTH, "max_length_k": LENGTH}
        positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
        return {
            "input_ids": ids,
            "position_ids": positions,
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            **longest,
        }

    first, second = given(LENGTHS), given(LENGTHS[::-1])
    stream = torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                three.ours(**first, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = three.ours(**first, use_cache=False).logits
    for key, value in second.items():
        if isinstance(value, Tensor):
            first[key].copy_(value)
    graph.replay()

    def run(model: Any) -> Tensor:
        if batch == "padded":
            logits = captured if model is three.ours else model(**second, use_cache=False).logits
            return logits[second["attention_mask"].bool()]
        if model is three.ours:
            return captured[0]
        return torch.cat([model(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS[::-1], 1)])

    three.judge(run, backward=False)


def greedy() -> Any:
    return transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)


def prompts() -> list[Tensor]:
    return [tokens(1)[:, :n] for n in (5, 12, 9)]


def one_by_one(model: Any) -> list[list[int]]:
    """The tokens that `generate` gives for each prompt, sorted."""
    made = []
    for ids in prompts():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=greedy())
        made.append(out[0, ids.shape[1] :].tolist())
    return sorted(made)


def batched(model: Any, **settings: Any) -> list[list[int]]:
    """The tokens that `generate_batch` gives for each prompt, sorted."""
    # A small cache: by default each process that shares the GPU would take most of its memory.
    page = "page_size" if TRANSFORMERS.release >= (5, 18) else "block_size"
    settings = {"num_blocks": 8, page: 256, "max_batch_tokens": 512, **settings}
    options, batching = greedy(), {}
    if TRANSFORMERS.release < (5, 4):
        settings.pop("max_blocks_per_request", None)  # there is no block table
        vars(options).update(settings)
    else:
        batching = {"continuous_batching_config": transformers.ContinuousBatchingConfig(**settings)}
    results = model.generate_batch([ids[0].tolist() for ids in prompts()], generation_config=options, **batching)
    return sorted(result.generated_tokens for result in results.values())


@pytest.mark.skipif(TRANSFORMERS.release < (5, 0), reason="generate_batch with a private name needs paged|NAME")
@pytest.mark.parametrize("pages", ["gathered", "in pages", "by default"])
def test_continuous_batching(models: Path, kernel: str, name: str, pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each prompt `generate_batch` and `generate` give the same tokens; kernels with a paged cache get the block table."""
    functions = kernel_compat.known_kernels()[kernel].load()
    attend_paged = functions.attend_paged
    in_pages: list[int] = []
    if attend_paged is not None:

        def counted(q: Tensor, *rest: Any) -> Any:
            in_pages.append(len(q))
            return attend_paged(q, *rest)

        counting = Functions(functions.attend, cast("Any", counted), functions.masks)
        monkeypatch.setattr(kernel_compat.known_kernels()[kernel], "_functions", counting)
    reason = kernel_compat.known_kernels()[kernel].unpaged_because(256, 8)
    there = reason is None and TRANSFORMERS.release >= (5, 4)
    if pages == "in pages" and not there:
        pytest.skip(reason or f"transformers {TRANSFORMERS} has no block tables")
    if pages == "by default" and TRANSFORMERS.release < (5, 8):
        pytest.skip("the block table is the default from transformers 5.8 on")
    model = load(saved(models, "llama_gqa"), name).to("cuda", torch.bfloat16)
    settings = {} if pages == "by default" else {"max_blocks_per_request": 4 if pages == "in pages" else 0}
    expected = one_by_one(model)  # first: up to 5.4 the model keeps the paged name after `generate_batch`
    assert batched(model, **settings) == expected
    assert bool(in_pages) == (there and pages != "gathered")


@pytest.mark.skipif(TRANSFORMERS.release < (5, 4), reason="use_async_batching is an option from transformers 5.4 on")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize(
    "skipped", [[], ["tf5_batching_streams", "tf5_batching_offsets"]], ids=["", "without the shims"]
)
def test_late_offsets(
    models: Path, kernel: str, skipped: list[str], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries' offsets of a padded batch rise when the kernel reads them, also where they are completed late on the GPU."""
    inputs = importlib.import_module("transformers.generation.continuous_batching.input_outputs").ContinuousBatchingIOs
    functions = kernel_compat.known_kernels()[kernel].load()
    falls = torch.zeros((), dtype=torch.bool, device="cuda")

    @wraps(functions.flash_attn_varlen_func)
    def looking(*args: Any, **kwargs: Any) -> Any:
        offsets = kwargs["cu_seqlens_q"] if "cu_seqlens_q" in kwargs else args[3]  # transformers up to 5.18 names none
        falls.logical_or_((offsets.diff() < 0).any())  # in a CUDA graph, too
        if skipped:  # offsets that fall make FlashAttention-3 end all use of the GPU
            rising = offsets.cummax(0).values
            if "cu_seqlens_q" in kwargs:
                kwargs["cu_seqlens_q"] = rising
            else:
                args = (*args[:3], rising, *args[4:])
        return functions.flash_attn_varlen_func(*args, **kwargs)

    looked = Functions(functions.attend, functions.attend_paged, functions.masks)
    looked.flash_attn_varlen_func = looking
    monkeypatch.setattr(kernel_compat.known_kernels()[kernel], "_functions", looked)
    with installation("offsets_flash", kernel, skip=skipped):
        completed = inputs.get_model_kwargs

        def late(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == "cuda":
                torch.cuda._sleep(200_000_000)  # about 0.1 s
            return completed(self, *args, **kwargs)

        model = load(saved(models, "llama_gqa"), "offsets_flash").to("cuda", torch.bfloat16)
        expected = one_by_one(model)  # first: up to 5.4 the model keeps the paged name after `generate_batch`
        with monkeypatch.context() as patch:
            patch.setattr(inputs, "get_model_kwargs", late)
            if skipped:
                patch.setattr(torch, "_assert_async", lambda *args: None)  # as in `test_late_inputs`
            settings = {"use_async_batching": asynchronous, "use_cuda_graph": True, "max_blocks_per_request": 0}
            found = batched(model, **settings)
        torch.cuda.synchronize()
        assert len(found) == len(prompts())
        if skipped:
            if not falls:
                pytest.skip("this release completes them on the host, or they were in time")
            return
        assert not falls
        assert found == expected


@pytest.mark.skipif(TRANSFORMERS.release < (5, 4), reason="use_async_batching is an option from transformers 5.4 on")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("skipped", [[], ["tf5_batching_streams"]], ids=["", "without the shim"])
def test_late_inputs(models: Path, skipped: list[str], asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that continuous batching fills late, as on a busy GPU, are there when the model reads them."""
    inputs = importlib.import_module("transformers.generation.continuous_batching.input_outputs").ContinuousBatchingIOs
    kernel_compat.register_attention("late_flash", kernel="flash_attention_torch")
    try:
        with kernel_compat.installed(skip=skipped):
            model = load(saved(models, "llama_gqa"), "late_flash").to("cuda", torch.bfloat16)
            expected = one_by_one(model)
            names = ("_reset_static_tensors", "prepare_batch_tensors", "_transfer_inputs")
            reset, prepare, transfer = (getattr(inputs, name) for name in names)

            def late_reset(self: Any, *args: Any, **kwargs: Any) -> None:
                if self.device.type == "cuda":
                    torch.cuda._sleep(200_000_000)  # about 0.1 s
                reset(self, *args, **kwargs)

            def late_tokens(self: Any, *args: Any, **kwargs: Any) -> None:
                prepare(self, *args, **kwargs)
                if self.device.type == "cuda":  # not in asynchronous batching, which fills them on the host
                    right = self.input_ids.clone()
                    self.input_ids.zero_()
                    torch.cuda._sleep(200_000_000)
                    self.input_ids.copy_(right)

            def early_copy(self: Any, other: Any, stream: Any, **kwargs: Any) -> None:
                transfer(self, other, stream, **kwargs)
                stream.synchronize()
                torch.cuda.current_stream().synchronize()  # what was filled late is written now

            with monkeypatch.context() as patch:
                for name, late in zip(names, (late_reset, late_tokens, early_copy), strict=True):
                    patch.setattr(inputs, name, late)
                if skipped:
                    # The library notices positions that are left over, and the assertion would end all use of the GPU.
                    patch.setattr(torch, "_assert_async", lambda *args: None)
                found = batched(model, use_async_batching=asynchronous, use_cuda_graph=False)
        assert len(found) == len(expected)
        if skipped and found == expected:
            pytest.skip("the inputs were in time: other processes use the GPU")
        assert (found == expected) == (not skipped)
    finally:
        kernel_compat.unregister_attention("late_flash")

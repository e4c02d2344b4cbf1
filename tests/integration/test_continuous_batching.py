"""Continuous batching under registered names: for each prompt `generate_batch` gives the same tokens as `generate`.

From transformers 5.4 on, a kernel with a paged cache gets the block table and computes each new token in the cache's pages. Upstream's
continuous batching runs on a CPU, but passes the block table only with CUDA: the tests fake CUDA for that check.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from stand_in import cpu_flash_attention
from tiny import CAUSAL_LMS, NAME, TRANSFORMERS, VOCAB, randomize
from torch import Tensor

import kernel_compat
from kernel_compat.kernels import Functions, reference

RELEASE = TRANSFORMERS.release[:2]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SHIM = "tf5_decode_fast_path"
NEW = 6
PAGE = "page_size" if RELEASE >= (5, 18) else "block_size"

if RELEASE < (5, 0):
    pytest.skip("generate_batch with a registered name is there from transformers 5.0 on", allow_module_level=True)

block_tables = pytest.mark.skipif(RELEASE < (5, 4), reason="transformers has block tables from 5.4 on")
torch_pages = pytest.mark.skipif(TORCH < (2, 13), reason="flash_attention_torch has a paged cache from torch 2.13 on")


class InPages:
    """A user's kernel with a paged cache, in plain torch, which accepts block tables on every torch release."""

    __name__ = "in_pages"
    flash_attn_func = staticmethod(reference.flash_attn_func)
    flash_attn_varlen_func = staticmethod(reference.flash_attn_varlen_func)

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Compute row by row. Padding has a negative length and no pages; it is neither read nor written."""
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        self.lengths.append(cache_seqlens.tolist())
        output, page_size = torch.zeros_like(q), k_cache.shape[1]
        for row, (length, pages) in enumerate(zip(cache_seqlens.tolist(), block_table, strict=True)):
            if length < 0:
                assert (pages == -1).all()
                continue
            used = pages[: length // page_size + 1]
            assert (used >= 0).all()
            for pool, new in ((k_cache, k), (v_cache, v)):
                pool[used[-1], length % page_size] = new[row, 0]
            keys, values = (pool[used].flatten(0, 1)[None, : length + 1] for pool in (k_cache, v_cache))
            output[row] = reference.flash_attn_func(q[row][None], keys, values, 0.0, softmax_scale, causal, window_size)
        return output


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    if RELEASE < (5, 1):  # 5.0 measures the memory of a GPU only
        module = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
        monkeypatch.setattr(module, lambda: (torch.device("cpu"), 1 << 33, 0, 0))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a CUDA device for upstream's decision."""

    def is_available() -> bool:
        return sys._getframe(1).f_code.co_name.endswith("ensure_decode_fast_path_is_available")

    monkeypatch.setattr(torch.cuda, "is_available", is_available)


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    with cpu_flash_attention() as calls:
        yield calls


@contextmanager
def registered(**kernels: Any) -> Iterator[None]:
    """Register names within a block; each value is a kernel, or a pair of a kernel and a forward."""
    for name, kernel in kernels.items():
        kernel_compat.register_attention(name, *kernel if isinstance(kernel, tuple) else (kernel,))
    try:
        yield
    finally:
        for name in kernels:
            kernel_compat.unregister_attention(name)


# Upstream's decision


def config(name: str, **changes: Any) -> Any:
    config = CAUSAL_LMS["llama_gqa"]()
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = name if RELEASE >= (5, 19) else f"paged|{name}"
    return config


def decided(name: str, requested: int | None = 4, page_size: int = 256, **changes: Any) -> int:
    """The number of blocks per request in upstream's block table if `requested` are requested; 0 if it makes none."""
    from transformers.generation import continuous_batching

    if RELEASE < (5, 9):
        options = SimpleNamespace(max_blocks_per_request=requested, fallback_max_blocks_per_request=16)
        slides = changes.get("sliding_window") is not None
        pool = SimpleNamespace(
            max_blocks_per_request=requested or 0, num_sliding_attention_groups=int(slides), block_size=page_size
        )
        processor = SimpleNamespace(config=config(name, **changes), cache=pool, cb_config=options)
        decide = continuous_batching.continuous_api.ContinuousBatchProcessor._ensure_decode_fast_path_is_available
        decide(processor)
        return pool.max_blocks_per_request
    options = transformers.ContinuousBatchingConfig(max_blocks_per_request=requested, **{PAGE: page_size})
    decide = continuous_batching.initialization.ensure_decode_fast_path_is_available
    decide(config(name, **changes), options, requested is not None)
    blocks = options.max_blocks_per_request
    return 32 if blocks is None else blocks


@block_tables
@pytest.mark.usefixtures("cuda")
class TestUpstreamAsksTheName:
    """Without the shim, names with a 3 get the block table, and from 5.13 on names with a 2."""

    @pytest.fixture(autouse=True)
    def without_the_shim(self) -> Iterator[None]:
        pages = InPages()
        names = {"pages_flash": pages, "pages_flash_2": pages, "pages_flash_3": pages}
        with registered(**names), kernel_compat.installed(skip=[SHIM]):
            yield

    @pytest.mark.parametrize("name", ["flash_attention_torch", "pages_flash"])
    def test_no_digit_no_block_table(self, name: str) -> None:
        assert decided(name) == 0

    def test_digits(self) -> None:
        assert decided("pages_flash_3") == 4
        assert decided("pages_flash_2") == (4 if RELEASE >= (5, 13) else 0)

    def test_pages_it_cannot_use(self) -> None:
        """FlashAttention-2, also torch's, needs pages of at least 256 tokens; it fails with 32."""
        with registered(torch_flash_3="flash_attention_torch"):
            assert decided("torch_flash_3", page_size=32) == (4 if TORCH >= (2, 13) else 0)

    @pytest.mark.skipif(not (5, 9) <= RELEASE <= (5, 15), reason="5.9 to 5.15 alone")
    def test_windows_die(self) -> None:
        assert decided("pages_flash_3", sliding_window=5) == 4
        model = made("mistral_window", "pages_flash_3", torch.float32)
        assert not batched(model, [[5, 6, 7]], max_blocks_per_request=4)


@pytest.mark.usefixtures("cuda")
class TestDecision:
    """A registered name gets the block table if and only if its kernel can use it."""

    @pytest.fixture(autouse=True)
    def names(self, installed: kernel_compat.Report) -> Iterator[None]:
        def forward(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return query.transpose(1, 2), None

        pages = InPages()
        named = {
            "pages_flash": pages,
            "pages_flash_2": pages,
            "pages_flash_3": pages,
            "plain_flash": "flash_attention_reference",
            "plain_flash_2": "flash_attention_reference",
            "plain_flash_3": "flash_attention_reference",
            "torch_flash_3": "flash_attention_torch",
            "forward_flash": (pages, forward),
            "forward_flash_3": (pages, forward),
        }
        with registered(**named):
            yield

    def test_state(self, installed: kernel_compat.Report) -> None:
        assert installed[SHIM].state == ("applied" if RELEASE >= (5, 4) else "not needed")

    @block_tables
    @pytest.mark.parametrize("name", ["pages_flash", "pages_flash_2", "pages_flash_3"])
    def test_pages(self, name: str) -> None:
        assert decided(name) == 4

    @block_tables
    @pytest.mark.parametrize("name", [NAME, "plain_flash", "plain_flash_2", "plain_flash_3"])
    def test_no_pages(self, name: str) -> None:
        assert decided(name) == 0

    @block_tables
    @pytest.mark.parametrize("name", ["flash_attention_torch", "torch_flash_3"])
    def test_torch(self, name: str) -> None:
        assert decided(name) == (4 if TORCH >= (2, 13) else 0)

    @block_tables
    @pytest.mark.parametrize("name", ["flash_attention_torch", "torch_flash_3"])
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"page_size": 32}, "its pages are multiples of 256 tokens, not of 32"),
            ({"head_dim": 12}, "in pages a head dimension must be a multiple of 8, not 12"),
        ],
    )
    def test_what_torch_cannot_page(
        self, name: str, changes: dict[str, int], why: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert decided(name, **changes) == 0
        assert (why if TORCH >= (2, 13) else "has no paged cache") in caplog.text

    @block_tables
    @pytest.mark.parametrize(
        "changes", [{"sliding_window": 5}, {"layer_types": ["full_attention", "chunked_attention"]}]
    )
    @pytest.mark.parametrize("name", ["pages_flash", "pages_flash_3"])
    def test_windows(self, name: str, changes: dict[str, Any]) -> None:
        if "layer_types" in changes and RELEASE >= (5, 18):
            with pytest.raises(ValueError, match="Invalid layer type"):
                decided(name, **changes)
        else:
            assert decided(name, **changes) == 0

    @block_tables
    def test_none_requested(self) -> None:
        assert decided("pages_flash", requested=0) == 0

    @pytest.mark.skipif(RELEASE < (5, 8), reason="the block table is the default from 5.8 on")
    def test_not_requested(self, caplog: pytest.LogCaptureFixture) -> None:
        assert decided("pages_flash", requested=None) > 0
        assert decided("plain_flash", requested=None) == 0
        assert not [record for record in caplog.records if record.name.startswith("kernel_compat")]

    @block_tables
    def test_no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert decided("pages_flash") == 0

    @pytest.mark.skipif(RELEASE < (5, 11), reason="XPU has block tables from 5.11 on")
    def test_xpu_is_not_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.generation.continuous_batching import initialization

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)
        assert decided("pages_flash_2") == 0

    @block_tables
    def test_forward_of_the_users_own(self) -> None:
        """The library can't know whether a user's forward takes block tables: upstream's rule applies."""
        assert decided("forward_flash") == 0
        assert decided("forward_flash_3") == 4

    @block_tables
    @pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_other_3"])
    def test_other_names(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.generation import continuous_batching

        module = continuous_batching.continuous_api if RELEASE < (5, 9) else continuous_batching.initialization
        loader = "lazy_import_flash_attention" if RELEASE >= (5, 19) else "lazy_import_paged_flash_attention"
        loaded: list[str] = []

        def load(name: str) -> Any:
            loaded.append(name.removeprefix("paged|"))
            return ((None, None, print),) if RELEASE >= (5, 19) else (None, print)

        monkeypatch.setattr(module, loader, load)
        there = "flash" in name and (name.endswith("3") or (name.endswith("2") and RELEASE >= (5, 13)))
        assert decided(name) == (4 if there else 0)
        assert loaded == ([name] if there else [])


# Generated tokens


def made(kind: str, name: str, dtype: torch.dtype) -> Any:
    """A tiny model with the same weights for every name, rounded to bfloat16."""
    shape = CAUSAL_LMS[kind]()
    shape.max_position_embeddings = 512
    model = randomize(transformers.AutoModelForCausalLM.from_config(shape, attn_implementation=name))
    return model.to(torch.bfloat16).to(dtype).eval()


@pytest.fixture(autouse=(5, 3) <= RELEASE < (5, 4))
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.3 pins CPU memory even without a driver that supports it."""
    if not torch.cuda.is_available():
        empty = torch.empty

        def pageable(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return empty(*size, **options)

        monkeypatch.setattr(torch, "empty", pageable)


def batched(model: Any, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
    settings = {"num_blocks": 8, PAGE: 256, "max_batch_tokens": 512}
    generation = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if RELEASE < (5, 4):
        vars(generation).update(settings, use_cuda_graph=False, **options)
        return model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
    batching = transformers.ContinuousBatchingConfig(**settings, **options)
    fast = {"warmup": False} if RELEASE >= (5, 5) else {}
    return model.generate_batch(
        inputs=prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False, **fast
    )


def written(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """The new tokens of each prompt, generated in one batch."""
    results = batched(model, prompts, **options).values()
    assert [result.error for result in results] == [None] * len(prompts)
    tokens = {tuple(result.prompt_ids): result.generated_tokens for result in results}  # 5.0 reorders the results
    return [tokens[tuple(prompt)] for prompt in prompts]


def alone(model: Any, prompt: list[int]) -> Any:
    """`generate` for one prompt, with logits."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@cache
def clear_prompts(dtype: torch.dtype) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and the tokens that eager attention generates for them, where rounding can't change any token.

    The best token leads the next by more than twice eager's error in `dtype`, so that two computations with that
    error agree. The last prompt grows from one page into a second.
    """
    truth, rough = made("llama_gqa", "eager", torch.float32), made("llama_gqa", "eager", dtype)
    generator = torch.Generator().manual_seed(0)
    prompts, tokens = [], []
    for length in (5, 12, 253):
        while True:
            prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            out = alone(rough, prompt)
            with torch.no_grad():
                exact = truth(input_ids=out.sequences, use_cache=False).logits[0, length - 1 : -1]
            error = (torch.stack(out.logits, 1)[0].float() - exact).abs().max()
            first, second = exact.topk(2).values.unbind(-1)
            if (first - second).min() > 2 * error:
                break
        prompts.append(prompt)
        tokens.append(out.sequences[0, length:].tolist())
    return prompts, tokens


DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, id="bfloat16"),
        pytest.param(torch.float16, id="float16", marks=pytest.mark.slow),
    ],
)


@DTYPES
@pytest.mark.parametrize("name", ["flash_attention_torch", NAME])
def test_as_prompt_by_prompt(
    installed: kernel_compat.Report, calls: list[dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    prompts, expected = clear_prompts(dtype)
    model = made("llama_gqa", name, dtype)
    assert [alone(model, prompt).sequences[0, len(prompt) :].tolist() for prompt in prompts] == expected
    before = len(calls)
    assert written(model, prompts) == expected
    new = calls[before:]
    if name == "flash_attention_torch":
        assert len(new) >= NEW * model.config.num_hidden_layers  # 5.0 runs one more step
    assert all(call.get("block_table") is None for call in new)  # without CUDA
    assert all(call["heads"] == (8, 2) for call in new)


def test_a_cache_of_another_kind_is_left_alone(installed: kernel_compat.Report) -> None:
    """From 5.24 on models pass their own cache on as `cache`, also to layers that keep nothing in it."""
    layer = made("llama_gqa", NAME, torch.float32).model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 5, 16) for heads in (8, 2, 2))
    kept = transformers.DynamicCache()
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[NAME]
    expected, found = (attend(layer, q, k, v, None, scaling=layer.scaling, **more)[0] for more in ({}, {"cache": kept}))
    assert torch.equal(found, expected)
    assert kept.get_seq_length() == 0


@pytest.fixture
def paged(
    request: pytest.FixtureRequest, installed: kernel_compat.Report, calls: list[dict[str, Any]], cuda: None
) -> Iterator[tuple[str, Callable[[], int]]]:
    """A name whose kernel has a paged cache, and a function that counts the kernel's calls with a block table."""
    if request.param == "flash_attention_torch":
        yield request.param, lambda: sum(call.get("block_table") is not None for call in calls)
        return
    kernel = InPages()
    with registered(**{request.param: kernel}):
        yield request.param, lambda: len(kernel.lengths)


PAGED = pytest.mark.parametrize(
    "paged", [pytest.param("flash_attention_torch", marks=torch_pages), "pages_flash"], indirect=True
)


@block_tables
@DTYPES
@PAGED
@pytest.mark.parametrize("requested", [True, False], ids=["requested", "by default"])
def test_in_pages(paged: tuple[str, Callable[[], int]], dtype: torch.dtype, requested: bool) -> None:
    name, count = paged
    if not requested and RELEASE < (5, 8):
        pytest.skip("the block table is the default from transformers 5.8 on")
    prompts, expected = clear_prompts(dtype)
    model = made("llama_gqa", name, dtype)
    assert written(model, prompts, **({"max_blocks_per_request": 4} if requested else {})) == expected
    assert count() == (NEW - 1) * model.config.num_hidden_layers  # every step except the prefill


@pytest.mark.slow
@block_tables
@pytest.mark.parametrize(
    ("paged", "compiled"),
    [
        pytest.param("flash_attention_torch", False, marks=torch_pages),
        pytest.param("flash_attention_torch", True, marks=torch_pages),
        ("pages_flash", False),
    ],
    indirect=["paged"],
)
def test_in_padded_batches(
    paged: tuple[str, Callable[[], int]], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile and CUDA graphs need padded batches: padding rows have a negative length and no pages."""
    name, count = paged
    prompts, expected = clear_prompts(torch.bfloat16)
    padding = [] if compiled else padding_rows(monkeypatch, name)
    model = made("llama_gqa", name, torch.bfloat16)
    if not compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    how = transformers.CompileConfig(backend="eager", mode=None, dynamic=False)
    options = {"max_blocks_per_request": 4, "decode_compile_config": how}
    if RELEASE >= (5, 13):
        options["max_requests_per_batch"] = 8
    assert written(model, prompts, **options) == expected
    assert count() == (NEW - 1) * model.config.num_hidden_layers
    if not compiled:
        assert len(padding) == count()
        assert all(padding)


@pytest.mark.skipif(not (5, 4) <= RELEASE <= (5, 5), reason="up to 5.5 the offsets of padding fall back to 0")
@pytest.mark.parametrize("name", ["flash_attention_torch", NAME])
def test_padded_without_pages(
    installed: kernel_compat.Report, calls: list[dict[str, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, expected = clear_prompts(torch.bfloat16)
    model = made("llama_gqa", name, torch.bfloat16)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    how = transformers.CompileConfig(backend="eager", mode=None, dynamic=False)
    assert written(model, prompts, varlen_compile_config=how) == expected


@pytest.mark.parametrize("name", ["flash_attention_torch", NAME])
def test_windows_that_layers_pass(installed: kernel_compat.Report, calls: list[dict[str, Any]], name: str) -> None:
    """Up to 5.18 upstream's paged forward reads the window from the layer, and Mistral's layers have no such attribute.

    Only the first token is compared: up to 5.15 upstream's cache reads the wrong tokens once a window is full, under any name.
    """
    if TORCH < (2, 11) and name == "flash_attention_torch":
        pytest.skip("varlen_attn has windows from torch 2.11 on")
    model = made("mistral_window", name, torch.float16)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (4, 12, 40)]
    outputs = [alone(model, prompt) for prompt in prompts]
    for out in outputs:
        first, second = out.logits[0][0].float().topk(2).values
        assert first - second > 0.1  # far more than the roundoff of float16, 2^-11, changes logits below 8
    expected = [out.sequences[0, len(prompt)].item() for prompt, out in zip(prompts, outputs, strict=True)]
    assert [tokens[0] for tokens in written(model, prompts)] == expected


def padding_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> list[list[int]]:
    """Record the padding rows' lengths of every call of a name's kernel."""
    entry = kernel_compat.registered_attention()[name]
    functions = entry.kernel.load()
    original = functions.attend_paged
    assert original is not None
    seen: list[list[int]] = []

    def attend_paged(q: Any, k: Any, v: Any, new_k: Any, new_v: Any, cache_seqlens: Any, *rest: Any) -> Any:
        seen.append([length for length in cache_seqlens.tolist() if length < 0])
        return original(q, k, v, new_k, new_v, cache_seqlens, *rest)

    recorded = Functions(functions.attend, cast("Any", attend_paged), functions.masks)
    monkeypatch.setattr(entry.kernel, "_functions", recorded)
    return seen


@block_tables
@torch_pages
@pytest.mark.parametrize(
    "lengths", [(300, -1, 7, -1), (-38, -1, 5, 255), (256, 0, -38, -1), (-38, -1, -1, -1)], ids=str
)
def test_padding_rows(calls: list[dict[str, Any]], lengths: tuple[int, ...]) -> None:
    """Each row equals the plain kernel's, and padding writes nothing to the cache. The first padding row has length -38 on 5.4."""
    kernel = kernel_compat.known_kernels()["flash_attention_torch"]
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(9, 256, 2, 16, generator=generator).bfloat16() for _ in range(2))
    q, k, v = (torch.randn(4, 1, heads, 16, generator=generator).bfloat16() for heads in (8, 2, 2))
    table = torch.tensor([[4, 2, -1], [7, -1, -1], [0, 6, -1], [8, 3, -1]], dtype=torch.int32)
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32)
    table[cache_seqlens < 0] = -1
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    options = {"cache_seqlens": cache_seqlens, "block_table": table, "softmax_scale": 0.3, "causal": True}
    expected = InPages().flash_attn_with_kvcache(q, expected_k, expected_v, k, v, **options)
    function = kernel.load().flash_attn_with_kvcache
    assert function is not None
    found = function(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, window_size=(-1, -1), **options)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)  # each result is rounded to bfloat16 once
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_values_behind_the_last_sequence_are_zero() -> None:
    """W12: FlashAttention-4 multiplies them by 0, and from 5.8 to 5.13 they may be NaN."""
    from kernel_compat.attention.tables import _without_garbage

    values = torch.full((5, 2, 4), torch.nan)
    values[:3] = 1
    cache = SimpleNamespace(update=lambda *, layer_idx: (values * layer_idx, values))
    offsets = torch.tensor([0, 1, 3, 3])
    layer = SimpleNamespace(sliding_window=None)
    for given in (offsets, {"full_attention": offsets}):
        keys, found = _without_garbage(cache, given, layer).update(layer_idx=2)
        assert torch.equal(found, torch.tensor([1.0, 1, 1, 0, 0])[:, None, None].expand(5, 2, 4))
        assert torch.equal(keys[:3], 2 * values[:3])


@pytest.mark.skipif(not (5, 3) <= RELEASE < (5, 17), reason="only on 5.3 to 5.16")
@pytest.mark.parametrize("skip", [[], ["tf5_batching_start"]], ids=["", "without the shim"])
def test_a_request_may_come_after_the_start(skip: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous batching waits for its first request. Its input buffers need CUDA: those of synchronous batching replace them."""
    upstream = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    monkeypatch.setattr(upstream, "ContinuousBatchingAsyncIOs", upstream.ContinuousBatchingIOs)
    settings = {"num_blocks": 8, PAGE: 256, "max_batch_tokens": 512}
    generation = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    asynchronous: dict[str, Any] = {"use_async_batching": True}
    if RELEASE < (5, 4):
        vars(generation).update(settings, use_cuda_graph=False)
    else:
        batching = transformers.ContinuousBatchingConfig(**settings, **asynchronous, use_cuda_graph=False)
        asynchronous = {"continuous_batching_config": batching}
    with registered(start_flash=reference), kernel_compat.installed(skip=skip):
        model = made("llama_gqa", "start_flash", torch.float32)
        manager = model.init_continuous_batching(generation, **asynchronous)
        manager.start()
        try:
            if skip:
                manager._generation_thread.join(60)
                assert not manager.is_running()
                return
            time.sleep(1)
            assert manager.is_running()
            began = threading.Event()

            def step() -> None:
                began.set()
                raise RuntimeError("it began, and ends here")

            monkeypatch.setattr(manager, "_generation_step", step)
            manager.add_request([5, 6, 7])
            assert began.wait(30)
        finally:
            manager.stop(block=True, timeout=30)
        unused = model.init_continuous_batching(generation, **asynchronous)
        unused.start()
        unused.stop(block=True, timeout=30)
        assert not unused.is_running()
        assert getattr(unused, "fatal_error", None) is unused.batch_processor is None

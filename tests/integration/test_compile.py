"""torch.compile without graph breaks, with a traceable kernel: the reference kernel."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny import NAME, VOCAB, accepts, distance, load, saved
from torch import Tensor

import kernel_compat
from kernel_compat.attention.roles import CACHE, LENGTHS, cache_returned
from kernel_compat.kernels import reference

pytestmark = pytest.mark.usefixtures("installed_for_all")

#: Tracing takes longest: of several graphs, or of what isn't about layers. `test_fullgraph` has two layers.
ONE_LAYER = {"num_hidden_layers": 1}


def compiled(model: Any) -> Any:
    torch._dynamo.reset()  # the graphs of other tests count towards the limit of recompilations
    # This tests the graph; inductor would spend a minute on compiling C++ for it.
    return torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)


@pytest.mark.parametrize(
    "name",
    ["llama_gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral_window", "gemma2_softcap"))],
)
@pytest.mark.parametrize(
    "batch", ["padded", *(pytest.param(batch, marks=pytest.mark.slow) for batch in ("one", "even", "cu_seq_lens"))]
)
def test_fullgraph(models: Path, name: str, batch: str) -> None:
    path = saved(models, name)
    eager, ours = load(path, "eager"), load(path, NAME)
    ids = torch.randint(3, VOCAB, (1 if batch in ("one", "cu_seq_lens") else 2, 12))
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    real = torch.ones(ids.shape, dtype=torch.bool)
    if batch == "padded":
        real[0, :5] = False
        real[1, 10:] = False
        inputs["attention_mask"] = real.long()
    if batch == "cu_seq_lens":
        offsets = torch.tensor([0, 7, 12], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)])[None]
        expected = torch.cat([eager(input_ids=part, use_cache=False).logits for part in ids.split((7, 5), 1)], 1)
    else:
        expected = eager(**inputs).logits
    found = compiled(ours)(**inputs).logits
    assert distance(found[real], expected[real]) < 1e-5
    found[real].square().sum().backward()
    expected[real].square().sum().backward()
    for ours_, eager_ in zip(ours.parameters(), eager.parameters(), strict=True):
        assert (ours_.grad - eager_.grad).norm() <= 1e-4 * eager_.grad.norm()


def static_cache(config: Any) -> Any:
    """A cache with room for more tokens than the tests put in it."""
    more: dict[str, Any] = {"max_batch_size": 2, "device": "cpu", "dtype": torch.float32}
    more = {name: value for name, value in more.items() if accepts(transformers.StaticCache.__init__, name)}
    return transformers.StaticCache(config=config, max_cache_len=20, **more)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("llama_gqa", (3, 1, 1, 7)),
        ("mistral_window", (12,)),
        # Each step compiles a graph.
        pytest.param("llama_gqa", (12,), marks=pytest.mark.slow),
        pytest.param("llama_gqa", (7, 5), marks=pytest.mark.slow),
        pytest.param("mistral_window", (7, 5), marks=pytest.mark.slow),
        pytest.param("mistral_window", (3, 1, 1, 7), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_static_cache_without_a_mask(models: Path, name: str, steps: tuple[int, ...]) -> None:
    """Its unused room is hidden, although the graph doesn't know where it begins."""
    path, layers = saved(models, name), ONE_LAYER if len(steps) > 2 else {}
    eager, ours = (load(path, attention, **layers) for attention in ("eager", NAME))
    ids = torch.randint(3, VOCAB, (2, 12))
    cache, run, found, begin = static_cache(ours.config), compiled(ours), [], 0
    for step, part in zip(steps, ids.split(steps, 1), strict=True):
        given = {CACHE.named(parameters(ours)): cache}
        if "cache_position" in parameters(ours):
            given["cache_position"] = torch.arange(begin, begin + step)
        with torch.no_grad():
            found.append(run(input_ids=part, use_cache=True, **given).logits)
        begin += step
    assert distance(torch.cat(found, 1), eager(input_ids=ids, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize(
    "goes_on",
    [
        pytest.param(compiled, id="compiled"),
        pytest.param(lambda model: model, id="plain", marks=pytest.mark.slow),
        pytest.param(copy.deepcopy, id="copied"),
    ],
)
def test_a_cache_of_packed_sequences_that_a_graph_has_filled(models: Path, goes_on: Callable[[Any], Any]) -> None:
    """Nothing says which of its sequences goes on."""
    model = load(saved(models, "llama_gqa"), NAME, **ONE_LAYER)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = {role.named(): value for role, value in zip(LENGTHS, (offsets, offsets, 7, 7), strict=True)}
    with torch.no_grad():
        cache = cache_returned(compiled(model)(input_ids=torch.arange(3, 15)[None], use_cache=True, **lengths))
    copied = goes_on is copy.deepcopy
    following = {CACHE.named(parameters(model)): copy.deepcopy(cache) if copied else cache}
    with pytest.raises(Exception, match="a cache of packed sequences can't be continued"):
        (model if copied else goes_on(model))(input_ids=torch.tensor([[3]]), use_cache=True, **following)


def test_symbolic_numbers(models: Path) -> None:
    """With ``dynamic=True`` the scale is one, too."""
    eager, ours = (load(saved(models, "llama_gqa"), name, **ONE_LAYER) for name in ("eager", NAME))
    run = torch.compile(ours, fullgraph=True, backend="eager", dynamic=True)
    for length in (7, 12):
        ids = torch.randint(3, VOCAB, (2, length))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        found, expected = run(**given).logits, eager(**given).logits
        assert distance(found[mask.bool()], expected[mask.bool()]) < 1e-5


def parameters(model: Any) -> Any:
    return inspect.signature(type(model).forward).parameters


class _Varlen(torch.autograd.Function):
    """The reference kernel as an autograd.Function of the offsets, as in FlashAttention-2."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, offsets_q, offsets_k)
        ctx.scale = scale
        lengths = (offsets_q, offsets_k, q.shape[0], k.shape[0])
        return reference.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=scale, causal=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None, None, None, None


class AutogradFunction:
    """A user's kernel."""

    __name__ = "autograd_function"

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        output: Tensor = _Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, scale)
        return output


@pytest.mark.skipif(Version(torch.__version__).release < (2, 13), reason="from torch 2.13 on")
def test_upstream_traces_no_function_of_one_tensor_twice() -> None:
    q, offsets = torch.randn(12, 2, 16), torch.tensor([0, 7, 12], dtype=torch.int32)
    attend = torch.compile(AutogradFunction.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="duplicate tensor"):
        attend(q.requires_grad_(), q + 1, q + 2, offsets, offsets, 7, 7)


def test_a_kernel_that_is_an_autograd_function(models: Path) -> None:
    """Queries and keys have the same offsets, and torch.compile takes no tensor twice there."""
    kernel_compat.register_attention("function_flash", kernel=AutogradFunction())
    try:
        eager, ours = (load(saved(models, "llama_gqa"), name, **ONE_LAYER) for name in ("eager", "function_flash"))
        ids = torch.randint(3, VOCAB, (1, 12))
        offsets = torch.tensor([0, 7, 12], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
        positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
        found = compiled(ours)(input_ids=ids, position_ids=positions, use_cache=False, **lengths).logits
        expected = torch.cat([eager(input_ids=part, use_cache=False).logits for part in ids.split((7, 5), 1)], 1)
        assert distance(found, expected) < 1e-5
    finally:
        kernel_compat.unregister_attention("function_flash")


def test_packed_position_ids_are_refused_where_they_cannot_be_told(models: Path) -> None:
    """Sequences depend on tensor values, which a graph can't branch on: an error, never attention over one long sequence."""
    model = compiled(load(saved(models, "llama"), NAME, **ONE_LAYER))
    ids = torch.randint(3, VOCAB, (1, 12))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        model(input_ids=ids, position_ids=positions, use_cache=False)

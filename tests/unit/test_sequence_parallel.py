"""Errors and arguments on rank 1 of 4; the other ranks send the same values as rank 1."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

import kernel_compat
from kernel_compat import ContextParallel, UnsupportedFeatureError, ulysses
from kernel_compat.attention.parallel.ulysses import gathering_mask_function

RANK, RANKS, LENGTH = 1, 4, 6
TOKENS = RANKS * LENGTH

CAUSAL, BIDIRECTIONAL = torch.nn.Module(), torch.nn.Module()
BIDIRECTIONAL.is_causal = False
UNDECLARED = torch.nn.Module()
UNDECLARED.is_causal = None


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ranks = getattr(request, "param", RANKS)
    # The fake group's all-to-all doesn't write its output.
    monkeypatch.setattr(
        collectives, "all_to_all_single", lambda x, _, __, group: x[dist.get_rank(group)].expand_as(x).clone()
    )
    dist.init_process_group("fake", store=FakeStore(), rank=min(RANK, ranks - 1), world_size=ranks)
    yield
    dist.destroy_process_group()


class Inner:
    """An attention function that records its calls."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.calls.append(SimpleNamespace(query=query, key=key, value=value, mask=mask, kwargs=kwargs))
        output = query.transpose(1, 2)[..., :1].expand(-1, -1, -1, value.shape[-1])
        return output, None


def qkv(heads: int = 8, kv_heads: int = 4, batch: int = 1, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(batch, n, length, 8) for n in (heads, kv_heads, kv_heads))


def positions(*ids: int) -> Tensor:
    return torch.tensor([ids])


HERE = positions(*range(LENGTH, 2 * LENGTH))
DEFAULT = positions(*range(LENGTH))


def offsets(*values: int) -> dict[str, Tensor]:
    given = torch.tensor(values, dtype=torch.int32)
    return {"cu_seq_lens_q": given, "cu_seq_lens_k": given}


def padded(tokens: int) -> Tensor:
    """A mask that keeps the last `tokens` tokens."""
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    mask[:, TOKENS - tokens :] = True
    return mask


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "query heads": (UnsupportedFeatureError, "6 query heads on 4 ranks", {"qkv": qkv(6, 6)}),
    "key heads": (UnsupportedFeatureError, "6 key heads on 4 ranks", {"qkv": qkv(12, 6)}),
    "few key heads": (UnsupportedFeatureError, "3 key heads on 4 ranks", {"qkv": qkv(12, 3)}),
    "groups": (ValueError, "8 query heads are not a multiple of 3", {"qkv": qkv(8, 3)}),
    "shapes": (ValueError, "shapes that don't fit", {"qkv": (*qkv()[:2], qkv(batch=2)[2])}),
    "a cache": (UnsupportedFeatureError, "8 keys beside 6 queries", {"qkv": (qkv()[0], *qkv(length=8)[1:])}),
    "a paged cache": (UnsupportedFeatureError, "the argument cache", {"cache": object()}),
    "a paged cache that the layer has updated": (
        UnsupportedFeatureError,
        "the argument read_index",
        {"read_index": []},
    ),
    "weights": (UnsupportedFeatureError, "output_attentions", {"output_attentions": True}),
    "a bias": (UnsupportedFeatureError, "position_bias", {"position_bias": torch.zeros(1)}),
    "a slice of a padding mask": (
        UnsupportedFeatureError,
        "of 6 tokens for a sequence of 24",
        {"mask": torch.ones(1, 6)},
    ),
    "a slice of a 4D mask": (UnsupportedFeatureError, "shape \\(1, 1, 6, 24\\)", {"mask": torch.zeros(1, 1, 6, 24)}),
    "another mask": (UnsupportedFeatureError, "a mask of SimpleNamespace", {"mask": SimpleNamespace()}),
    "sinks": (ValueError, "sinks of shape \\(2,\\)", {"s_aux": torch.zeros(2)}),
    "offsets of a slice": (ValueError, "don't end at 24", offsets(0, 2, 6)),
    "offsets of another slice": (ValueError, "don't end at 48", {"qkv": qkv(batch=2), **offsets(0, 24)}),
    # Rank 1 has tokens 6 to 11.
    "default positions": (ValueError, "tokens 6 to 11, are not those of one", {"position_ids": DEFAULT}),
    "a sequence begins": (ValueError, "packed sequences as cu_seq", {"position_ids": positions(6, 7, 8, 0, 1, 2)}),
    "one that was cut goes on": (ValueError, "packed", {"position_ids": positions(*range(70, 76))}),
    "it begins, bidirectional": (
        ValueError,
        "packed",
        {"module": BIDIRECTIONAL, "position_ids": positions(6, 7, 8, 0, 1, 2)},
    ),
    "it begins, said to be causal": (
        ValueError,
        "packed",
        {"module": BIDIRECTIONAL, "is_causal": True, "position_ids": positions(*range(70, 76))},
    ),
    "default positions in the middle": (
        ValueError,
        "begin at 0 in the middle of a sequence",
        {"position_ids": DEFAULT, **offsets(0, 5, 24)},
    ),
    "default positions beside padding": (
        ValueError,
        "begin at 0 in the middle of a sequence",
        {"position_ids": DEFAULT, "mask": padded(TOKENS - 2)},
    ),
    "default text positions": (ValueError, "packed", {"position_ids": DEFAULT.expand(4, 1, -1)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, message, given = REFUSED[name]
    given = dict(given)
    module, mask = given.pop("module", CAUSAL), given.pop("mask", None)
    inner = Inner()
    spread, tensors = ulysses(inner), given.pop("qkv", qkv())
    for _ in range(2):
        with pytest.raises(error, match=message):
            spread(module, *tensors, mask, **given)
    assert inner.calls == []
    spread(CAUSAL, *qkv(), None)
    with pytest.raises(error, match=message):  # later calls are checked without communication
        spread(module, *tensors, mask, **given)


ACCEPTED: dict[str, dict[str, Any]] = {
    "its own": {"position_ids": HERE},
    "one row for all": {"qkv": qkv(batch=2), "position_ids": HERE[0]},
    "text positions before others": {"position_ids": HERE.expand(4, 1, -1)},
    "no text positions": {"position_ids": DEFAULT.expand(3, 1, -1)},
    "of patches": {"qkv": qkv(batch=2), "module": BIDIRECTIONAL, "position_ids": DEFAULT.expand(2, -1)},
    "of patches, one image": {"module": BIDIRECTIONAL, "position_ids": positions(6, 6, 6, 7, 7, 7)},
    "of patches, causality None": {"module": UNDECLARED, "position_ids": positions(6, 6, 6, 7, 7, 7)},
    "packed": {"position_ids": positions(4, 5, 0, 1, 2, 0), **offsets(0, 2, 8, 11, 24)},
    "a sequence begins here": {"position_ids": DEFAULT, **offsets(0, 6, 24)},
    "in the second row alone": {
        "qkv": qkv(batch=2),
        "position_ids": torch.cat([HERE, DEFAULT]),
        **offsets(0, 24, 30, 48),
    },
    "padding ends here": {"position_ids": DEFAULT, "mask": padded(TOKENS - LENGTH)},
    "nothing but padding here": {"position_ids": DEFAULT, "mask": ~padded(TOKENS - 2)},
    "a 4D mask says it all": {"position_ids": DEFAULT, "mask": torch.zeros(1, 1, TOKENS, TOKENS)},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_positions_that_are_right(name: str) -> None:
    """They aren't passed on: the inner forward would misread or ignore a slice of them."""
    given = dict(ACCEPTED[name])
    module, mask = given.pop("module", CAUSAL), given.pop("mask", None)
    inner = Inner()
    spread = ulysses(inner)
    for _ in range(2):  # two layers: only the first reads values off the device
        spread(module, *given.get("qkv", qkv()), mask, **{key: x for key, x in given.items() if key != "qkv"})
    for call in inner.calls:
        assert call.mask is mask
        assert call.kwargs.keys() == given.keys() - {"qkv", "position_ids"}


def test_positions_of_the_full_sequence() -> None:
    inner, ids = Inner(), torch.arange(TOKENS)[None]
    ulysses(inner)(CAUSAL, *qkv(), None, position_ids=ids)
    assert inner.calls[0].kwargs == {"position_ids": ids}


def test_positions_are_checked_in_a_graph() -> None:
    compiled = torch.compile(
        ulysses(lambda module, query, *args, **kwargs: (query.transpose(1, 2), None)), backend="eager", fullgraph=True
    )
    compiled(CAUSAL, *qkv(), None, position_ids=HERE)
    with pytest.raises(RuntimeError, match="are not those of one sequence"):
        compiled(CAUSAL, *qkv(), None, position_ids=DEFAULT)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "given"), [(8, 8, (2, 2)), (8, 4, (2, 1)), (8, 2, (2, 1)), (8, 1, (2, 1)), (4, 4, (1, 1))]
)
def test_what_the_inner_forward_gets(heads: int, kv_heads: int, given: tuple[int, int]) -> None:
    inner, sinks, window = Inner(), torch.arange(float(heads)), object()
    query, key, value = qkv(heads, kv_heads, batch=3)
    lengths = offsets(0, 3 * TOKENS)
    output, weights = ulysses(inner)(
        CAUSAL, query, key, value[..., :4], None, scaling=0.5, s_aux=sinks, sliding_window=window, **lengths
    )
    assert weights is None
    assert output.shape == (3, LENGTH, heads, 4)
    (call,) = inner.calls
    assert call.query.shape == (3, given[0], TOKENS, 8)
    assert call.key.shape == (3, given[1], TOKENS, 8)
    assert call.value.shape == (3, given[1], TOKENS, 4)
    assert call.kwargs.pop("s_aux").tolist() == list(range(RANK * given[0], (RANK + 1) * given[0]))
    assert call.kwargs == {"scaling": 0.5, "sliding_window": window, **lengths}


def test_a_mask_for_each_head() -> None:
    inner, mask = Inner(), torch.randn(1, 8, TOKENS, TOKENS)
    ulysses(inner)(CAUSAL, *qkv(), mask)
    assert torch.equal(inner.calls[0].mask, mask[:, 2:4])


def test_an_output_in_another_layout() -> None:
    with pytest.raises(ValueError, match=r"returns the shape \(1, 2, 24, 8\)"):
        ulysses(lambda module, query, *args: (query, None))(CAUSAL, *qkv(), None)


@pytest.mark.parametrize("keyword", ["skip_sequence_parallel", "skip_ulysses"])
def test_skipped(keyword: str) -> None:
    """The inner forward gets its arguments unchanged, except for a mask that was gathered before."""
    inner, given = Inner(), qkv(6, 3)
    spread = ulysses(inner)
    mine = padded(TOKENS - 8)[:, LENGTH : 2 * LENGTH]
    for mask in (None, mine, padded(TOKENS - 8)):
        spread(CAUSAL, *given, mask, position_ids=DEFAULT, **{keyword: True})
        call = inner.calls.pop()
        assert (call.query, call.key, call.value) == given
        assert call.kwargs == {"position_ids": DEFAULT}
        assert mask is call.mask is None or torch.equal(call.mask, mine)
    spread(CAUSAL, *qkv(), None, **{keyword: False})
    assert inner.calls[0].query.shape == (1, 2, TOKENS, 8)


@pytest.mark.parametrize("group", [1], indirect=True)
def test_a_group_of_one() -> None:
    inner, given, mask = Inner(), qkv(6, 3), torch.ones(1, LENGTH)
    ulysses(inner)(CAUSAL, *given, mask, cache="cache", skip_ulysses=False)
    (call,) = inner.calls
    assert (call.query, call.key, call.value, call.mask, call.kwargs) == (*given, mask, {"cache": "cache"})
    assert gathering_mask_function(None)(batch_size=1, kv_length=6, q_length=6, attention_mask=mask == 0) is not None


def mask_of(**given: Any) -> Tensor | None:
    return gathering_mask_function(None)(**{"batch_size": 2, "kv_length": LENGTH, "q_length": LENGTH, **given})


def test_masks_of_the_full_sequence() -> None:
    assert mask_of() is None
    assert mask_of(attention_mask=torch.ones(2, TOKENS, dtype=torch.bool)) is None
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    for positions in ({}, {"cache_position": torch.arange(LENGTH), "q_length": None}):
        assert mask_of(attention_mask=mask, **positions) is None
        mask[0, 0] = False
        gathered = mask_of(attention_mask=mask, **positions)
        assert gathered is not None
        assert torch.equal(gathered, mask.repeat(1, RANKS))
        mask[0, 0] = True
    full = padded(TOKENS - 2)
    assert mask_of(attention_mask=full) is full
    # From transformers 5.6 on the number of keys is the mask's; up to 5.5 each query has a position.
    assert mask_of(attention_mask=full, kv_length=TOKENS) is full
    assert mask_of(attention_mask=full, cache_position=torch.arange(LENGTH), q_length=None) is full


def test_masks_with_a_cache_stay_local() -> None:
    """Only layers that skip the all-to-alls use them; other layers refuse a cache."""
    mask = torch.ones(2, LENGTH + 2, dtype=torch.bool)
    mask[0, 0] = False
    found = mask_of(attention_mask=mask, kv_length=LENGTH + 2, q_offset=2)
    assert found is not None
    assert torch.equal(found, mask)


@pytest.mark.parametrize("group_", ["default", -100, 4, [0, 1]], ids=str)
def test_no_group(group_: Any) -> None:
    message = f"not {re.escape(repr(group_))}"
    with pytest.raises(TypeError, match=message):
        ulysses(Inner(), group_)
    with pytest.raises(TypeError, match=message):
        kernel_compat.register_attention("my_flash", "flash_attention_reference", sequence_parallel=group_)
    assert "my_flash" not in kernel_compat.registered_attention()


def test_no_forward() -> None:
    with pytest.raises(TypeError, match="forward must be callable, not 'eager'"):
        ulysses("eager")  # type: ignore[arg-type]


def test_groups() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    inner = Inner()
    for group in (mesh["sequence"], mesh["sequence"].get_group(), dist.new_group([0, 1])):
        ulysses(inner, group)(CAUSAL, *qkv(4, 2), None)
        assert inner.calls.pop().query.shape == (1, 2, 2 * LENGTH, 8)
    with pytest.raises(TypeError, match="of one dimension"):
        ulysses(inner, mesh)


def test_a_function_that_returns_the_group_at_each_call() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    groups: list[Any] = [mesh["sequence"], dist.group.WORLD, None, "none"]
    inner = Inner()
    spread = ulysses(inner, lambda: groups[0])
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    for ranks in (2, RANKS):
        spread(CAUSAL, *qkv(), None)
        assert inner.calls.pop().query.shape == (1, 8 // ranks, ranks * LENGTH, 8)
        arguments = {"batch_size": 2, "kv_length": LENGTH, "q_length": LENGTH, "attention_mask": mask}
        gathered = gathering_mask_function(lambda: groups[0])(**arguments)
        assert gathered is not None
        assert gathered.shape == (2, ranks * LENGTH)
        groups.pop(0)
    spread(CAUSAL, *qkv(), None, skip_sequence_parallel=True)  # None: not spread in this call
    assert inner.calls.pop().query.shape == (1, 8, LENGTH, 8)
    spread(CAUSAL, *qkv(), mask)
    call = inner.calls.pop()
    assert call.query.shape == (1, 8, LENGTH, 8)
    assert call.mask is mask
    alone = gathering_mask_function(lambda: groups[0])(**arguments)
    assert alone is not None
    assert alone.shape == (2, LENGTH)
    groups.pop(0)
    with pytest.raises(TypeError, match="not 'none'"):
        spread(CAUSAL, *qkv(), None)


def test_a_mesh_behind_another_default_group() -> None:
    """Equal to the one before, whose group is gone."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    over = ContextParallel(lambda: mesh)
    first = over.ranks()
    assert over.ranks() is first
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    second = over.ranks()
    assert first is not None
    assert second is not None
    assert dist.get_process_group_ranks(second.group) == [0, 1, 2, 3]
    assert second.group is not first.group


def test_ranks_in_the_order_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second dimension's share heads: neighbours in the group."""
    mesh = dist.DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        ranks = ContextParallel(mesh).ranks()
        assert ranks is not None
        assert dist.get_process_group_ranks(ranks.group) == [0, 2, 1, 3]

    def new_group(ranks: list[int], *, use_local_synchronization: bool) -> None:
        """torch 2.11's."""

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(
        ValueError, match=r"are \[\[0, 2\], \[1, 3\]\]: this torch makes groups in ascending order alone"
    ):
        ContextParallel(mesh).ranks()


def test_a_group_that_is_not_there_yet() -> None:
    spread = ulysses(Inner())
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="has not been initialized"):
        spread(CAUSAL, *qkv(), None)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    spread(CAUSAL, *qkv(), None)


def test_registered() -> None:
    register: Callable[..., None] = kernel_compat.register_attention
    try:
        register("my_flash", "flash_attention_reference", sequence_parallel=True)
        register("my_flash", "flash_attention_reference", sequence_parallel=True)  # the same
        assert kernel_compat.registered_attention()["my_flash"].spread_over is True
        with pytest.raises(ValueError, match="is registered already"):
            register("my_flash", "flash_attention_reference")
    finally:
        kernel_compat.unregister_attention("my_flash")

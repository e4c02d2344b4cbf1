"""A kernel of several gives each call to the first that computes exactly what it asks for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernel_compat
from kernel_compat import Device, Environment, Features, Kernel, KernelUnavailableError, UnsupportedFeatureError
from kernel_compat.kernels import LayeredKernel, Needs, as_kernel, known_kernels, reference

LENGTHS: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 3, 8], dtype=torch.int32), "max_seqlen_q": 5}
LENGTHS |= {"cu_seqlens_k": LENGTHS["cu_seqlens_q"], "max_seqlen_k": 5}
PLAIN = Features(window=False, gqa=True, devices=("cpu",), dtypes=("float32",), max_head_dim=64)

EXACT: Any = reference.flash_attn_varlen_func


class Member:
    """The reference kernel with fewer features; counts its calls."""

    def __init__(self, name: str, **features: Any) -> None:
        self.__name__, self.features, self.calls = name, replace(PLAIN, **features), 0

    def flash_attn_varlen_func(self, *inputs: Any, **options: Any) -> Any:
        self.calls += 1
        return reference.flash_attn_varlen_func(*inputs, **options)


def several(*members: Any) -> LayeredKernel:
    kernel = as_kernel(members)
    assert isinstance(kernel, LayeredKernel)
    return kernel


def inputs(head_dim: int = 8, dtype: torch.dtype = torch.float32, gradients: bool = False) -> list[torch.Tensor]:
    return [torch.randn(8, 2, head_dim, dtype=dtype, requires_grad=gradients) for _ in range(3)]


def call(kernel: Kernel, tensors: list[torch.Tensor] | None = None, **options: Any) -> torch.Tensor:
    found: torch.Tensor = kernel.load().flash_attn_varlen_func(
        *(tensors or inputs()), **LENGTHS, causal=True, **options
    )
    return found


@pytest.mark.parametrize(
    ("feature", "tensors", "options"),
    [
        ({"window": True}, {}, {"window_size": (2, 0)}),
        ({"softcap": True}, {}, {"softcap": 2.0}),
        ({"sinks": True}, {}, {"s_aux": torch.zeros(2)}),
        ({"dropout": True}, {}, {"dropout_p": 0.5}),
        ({"deterministic": True}, {"gradients": True}, {"deterministic": True}),
        ({"max_head_dim": 128}, {"head_dim": 96}, {}),
        ({"dtypes": ("float64",)}, {"dtype": torch.float64}, {}),
    ],
)
def test_the_first_that_can(feature: dict[str, Any], tensors: dict[str, Any], options: dict[str, Any]) -> None:
    """A plain call goes to the first member, and one that needs more to the next that has it."""
    plain, able = Member("plain"), Member("able", **feature)
    kernel = several(plain, able)
    if "dtypes" not in feature:
        call(kernel)
        assert (plain.calls, able.calls) == (1, 0)
    given = inputs(**tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = call(kernel, given, **options)
    assert able.calls == 1
    if "dropout" not in feature:
        expected = EXACT(*given, **LENGTHS, causal=True, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("keys", "window", "causal"), [(1, (2, -1), False), (3, (2, -1), False), (1, (2, 0), False)])
def test_a_window_without_a_limit_to_the_right(keys: int, window: tuple[int, int], causal: bool) -> None:
    """FlashAttention-2 takes the number of keys for the limit, which hides keys from five queries before one key."""
    limited, able = Member("limited", window=True, right_limit="keys"), Member("able", window=True)
    q, kv = torch.randn(5, 2, 8), torch.randn(keys, 2, 8)
    lengths = {"cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32), "max_seqlen_q": 5, "max_seqlen_k": keys}
    lengths["cu_seqlens_k"] = torch.tensor([0, keys], dtype=torch.int32)
    options: dict[str, Any] = {**lengths, "window_size": window, "causal": causal}
    found = several(limited, able).load().flash_attn_varlen_func(q, kv, kv, **options)
    torch.testing.assert_close(found, EXACT(q, kv, kv, **options), rtol=0, atol=0)
    assert (limited.calls, able.calls) == ((0, 1) if window == (2, -1) else (1, 0))


def test_gradients_that_only_the_second_has() -> None:
    first, second = Member("forward_only", backward=False), Member("both")
    kernel = several(first, second)
    call(kernel)
    call(kernel, inputs(gradients=True)).sum().backward()
    with torch.no_grad():
        call(kernel, inputs(gradients=True))
    assert (first.calls, second.calls) == (2, 1)


@pytest.mark.parametrize("option", [{"deterministic": True}, {"dropout_p": 0.5}])
def test_what_none_has_and_a_kernel_alone_leaves_out(option: dict[str, Any]) -> None:
    """As with one kernel: the first member computes without it, and warns."""
    first, second = Member("first"), Member("second")
    with pytest.warns(
        UserWarning, match=f"first has no {'deter' if 'deterministic' in option else 'attention dropout'}"
    ):
        call(several(first, second), inputs(gradients=True), **option)
    assert (first.calls, second.calls) == (1, 0)


def test_a_call_that_none_computes() -> None:
    kernel = several(Member("small"), Member("capped", softcap=True))
    with pytest.raises(UnsupportedFeatureError) as refusal:
        call(kernel, inputs(head_dim=96), softcap=2.0)
    message = str(refusal.value)
    assert "head dimensions 96 and 96, softcap" in message
    assert "small: no head dimension 96; capped: no head dimension 96" in message


def test_the_report_shows_what_was_chosen() -> None:
    name = "layered_flash"
    kernel_compat.register_attention(name, kernel=[Member("plain"), Member("windowed", window=True)])
    try:
        assert kernel_compat.status().chosen[name] == {}
        kernel = kernel_compat.registered_attention()[name].kernel
        call(kernel)
        call(kernel, window_size=(2, 0))
        called = "a call on cpu in float32, head dimensions 8 and 8"
        assert kernel_compat.status().chosen[name] == {called: "plain", f"{called}, sliding windows": "windowed"}
    finally:
        kernel_compat.unregister_attention(name)
    assert name not in kernel_compat.status().chosen


class Unimportable(Kernel):
    """A kernel whose package is there and doesn't import."""

    def __init__(self) -> None:
        super().__init__("unimportable", as_kernel(Member("any")).providers)

    def _load(self, environment: Environment) -> Any:
        raise KernelUnavailableError(self.name, ["it doesn't import"])


def test_a_member_that_does_not_import() -> None:
    """It is left out with a warning; alone, it is the reason."""
    there = Member("there")
    kernel = several(Unimportable(), there)
    with pytest.warns(UserWarning, match="goes on without unimportable: .*it doesn't import"):
        call(kernel)
    assert there.calls == 1
    with (
        pytest.warns(UserWarning, match="goes on without"),
        pytest.raises(KernelUnavailableError, match="unimportable: it doesn't import"),
    ):
        several(Unimportable()).load()


def test_pages_go_to_a_kernel_that_takes_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2's pages are multiples of 256 tokens."""
    coarse, fine = (SimpleNamespace(**vars(Member(name, paged=True))) for name in ("coarse", "fine"))
    for member in (coarse, fine):
        member.flash_attn_varlen_func = reference.flash_attn_varlen_func
        member.flash_attn_with_kvcache = lambda q, *tensors, block_table=None, by=member, **options: by.__name__
    kernel = several(coarse, fine)
    reason = lambda page_size, head_dim: "256 alone" if page_size % 256 else None  # noqa: E731
    monkeypatch.setattr(kernel.members[0], "unpaged_because", reason)
    q, table = torch.randn(1, 1, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    for page_size, taken in ((256, "coarse"), (16, "fine")):
        cache = torch.randn(2, page_size, 2, 8)
        paged = kernel.load().flash_attn_with_kvcache
        assert paged is not None
        assert paged(q, cache, cache, cache_seqlens=torch.ones(1, dtype=torch.int32), block_table=table) == taken


def test_the_reference_is_for_a_cpu() -> None:
    """On a GPU it would be a silent loss of speed; alone, it was asked for."""
    needs = Needs(8, 8, "float32", "cuda", frozenset())
    auto, environment = LayeredKernel("auto", tuple(known_kernels().values())), Environment.detect()
    member, reasons = auto.member_for(needs, environment)
    assert member is None or member.name != "flash_attention_reference"
    assert any(reason.startswith("flash_attention_reference: ") for reason in reasons) == (member is None)
    alone = several("flash_attention_reference")
    assert alone.member_for(needs, environment)[0] is known_kernels()["flash_attention_reference"]


def test_equal_to_another_of_the_same_members() -> None:
    names = ["flash_attention_2", "flash_attention_flex"]
    assert len({as_kernel(names), as_kernel(tuple(names)), as_kernel(names[::-1])}) == 2
    assert as_kernel("auto") == as_kernel("auto")
    with pytest.raises(ValueError, match="must not be empty"):
        as_kernel([])
    with pytest.raises(ValueError, match="'flash_attention_5' is no kernel"):
        several("flash_attention_2", "flash_attention_5")
    assert isinstance(as_kernel("auto"), LayeredKernel)


def test_merged_features_are_what_a_member_has() -> None:
    """For plans: gradients of a feature that one member has without them are no member's; the reference kernel is for a CPU alone."""
    forward = Member("forward", window=True, forward_only=("window",))
    without, inference = Member("without", window=False), Member("inference", window=True, backward=False)
    here = Environment.detect()
    for members in ((forward, without), (inference, without), (without, inference)):
        features = several(*members).features_in(here)
        assert features.lacking({"window"}) == []
        assert features.lacking({"window", "backward"}) == ["gradients of sliding windows"]
    assert several(forward, Member("both", window=True)).features_in(here).lacking({"window", "backward"}) == []
    on_a_gpu = replace(here, devices=(Device("NVIDIA H200", (9, 0)),))
    gpu = SimpleNamespace(**vars(Member("gpu", devices=("cuda",))))
    gpu.flash_attn_varlen_func = reference.flash_attn_varlen_func
    assert several(gpu, "flash_attention_reference").features_in(on_a_gpu).masks is False


def test_a_list_in_a_list_is_one_list() -> None:
    small, able = Member("small"), Member("able", softcap=True)
    kernel = several([small, [able]], "auto")
    assert [member.name for member in kernel.members[:2]] == ["small", "able"]
    assert not any(isinstance(member, LayeredKernel) for member in kernel.members)
    call(kernel, softcap=2.0)
    assert [member.name for member in kernel.chosen.values()] == ["able"]

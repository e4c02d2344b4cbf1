"""One place says whether a kernel can do a call: the call itself, a list of kernels and the plans agree."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_compat
from kernel_compat import Features, Kernel, UnsupportedFeatureError
from kernel_compat.kernels import Needs, catalog, reference, unmet
from kernel_compat.kernels.options import Mask, Options

LIBRARY = Path(kernel_compat.__file__).parent

#: By feature: what a call needs it for.
CALLS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (2, 0), "causal": True},
    "open_window": {"window_size": (2, -1)},
    "softcap": {"softcap": 3.0},
    "sinks": {"s_aux": True},
}


@settings(deadline=None)
@given(
    lacking=st.sets(st.sampled_from(["window", "softcap", "sinks", "gqa", "backward"])),
    open_window=st.booleans(),
    forward_only=st.sets(st.sampled_from(["window", "softcap", "sinks"])),
    asked=st.sets(st.sampled_from([*CALLS]), max_size=3),
    gradients=st.booleans(),
    of_sinks=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([8, 24]),
    limited=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_call_is_refused_where_its_needs_are_unmet(
    lacking: set[str],
    open_window: bool,
    forward_only: set[str],
    asked: set[str],
    gradients: bool,
    of_sinks: bool,
    kv_heads: int,
    head_dim: int,
    limited: bool,
    dtype: torch.dtype,
) -> None:
    if {"window", "open_window"} <= asked:
        asked = asked - {"window"}
    changes: dict[str, Any] = dict.fromkeys(lacking, False)
    features = replace(
        catalog.OWN.features,
        **changes,
        right_limit="" if open_window else "keys",
        forward_only=tuple(sorted(forward_only)),
        max_head_dim=16 if limited else None,
        dtypes=("float32",),
    )
    kernel = Kernel("x", (replace(catalog.OWN, features=features),))
    q = torch.randn(1, 6, 2, head_dim, dtype=dtype, requires_grad=gradients)
    kv = torch.randn(1, 3, kv_heads, head_dim, dtype=dtype)
    options = {name: value for feature in sorted(asked) for name, value in CALLS[feature].items()}
    if "s_aux" in options:
        options["s_aux"] = torch.zeros(2, dtype=dtype, requires_grad=gradients and of_sinks)
    needs = Needs.of(q, kv, kv, Options.of(**options))
    reasons = unmet(features, needs)
    functions = kernel.load()
    if not reasons:
        functions.flash_attn_func(q, kv, kv, **options)
        return
    with pytest.raises(UnsupportedFeatureError) as caught:
        functions.flash_attn_func(q, kv, kv, **options)
    assert f"no {caught.value.feature}" in reasons.split(", ") or reasons.startswith(f"no {caught.value.feature}")


def test_sinks_that_need_no_gradient_need_none() -> None:
    """A kernel without the gradient of sinks computes a call with frozen ones, alone and in a list."""
    source = SimpleNamespace(
        flash_attn_func=reference.flash_attn_func,
        flash_attn_varlen_func=reference.flash_attn_varlen_func,
        features=replace(catalog.OWN.features, forward_only=("sinks",)),
    )
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    frozen, learned = torch.zeros(2), torch.zeros(2, requires_grad=True)
    for kernel in (source, [source]):
        kernel_compat.register_attention("frozen_flash", kernel=kernel)
        functions = kernel_compat.registered_attention()["frozen_flash"].kernel.load()
        kernel_compat.unregister_attention("frozen_flash")
        functions.flash_attn_func(q, q, q, s_aux=frozen).sum().backward()
        with pytest.raises(UnsupportedFeatureError, match="gradients of attention sinks"):
            functions.flash_attn_func(q, q, q, s_aux=learned)


def test_the_features_that_are_needed_are_known() -> None:
    """A name that `Needs.of` gives a call is a field or a property of `Features`."""
    q, k = torch.randn(1, 6, 2, 8, requires_grad=True), torch.randn(1, 3, 1, 8)
    everything = Options(0.5, 1.0, False, (2, -1), 2.0, True, torch.zeros(2))
    names = Needs.of(q, k, k, everything, mask=Mask()).features | Needs.of_pages(q, k, k, None, everything).features
    assert names >= {
        "masks",
        "paged",
        "dropout",
        "window",
        "open_window",
        "softcap",
        "deterministic",
        "frozen_sinks",
        "gqa",
        "backward",
    }
    assert all(hasattr(Features(), name) for name in names)


def test_the_keywords_of_flash_attention_are_written_once() -> None:
    """No function of the library spells them as parameters: they are `Options`."""
    keywords = {"dropout_p", "softmax_scale", "causal", "window_size"}
    spelled = {
        f"{path.relative_to(LIBRARY)}:{node.name}"
        for path in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and len({a.arg for a in (*node.args.args, *node.args.kwonlyargs)} & keywords) > 2
    }
    assert spelled == set()


def test_transformers_reads_the_keywords_off_the_functions() -> None:
    import inspect

    functions = kernel_compat.known_kernels()["flash_attention_reference"].load()
    for function in (functions.flash_attn_func, functions.flash_attn_varlen_func):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in Options._fields} == Options._field_defaults
    assert [*inspect.signature(functions.flash_attn_varlen_func).parameters][:7] == [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    ]

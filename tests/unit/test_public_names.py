"""The public names: the types of what users write, and what worked under other names before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernel_compat
from kernel_compat import (
    AttentionForward,
    ForwardSpec,
    MaskFunction,
    RenamedWarning,
    UnsupportedFeatureError,
    kernels,
    models,
    register_attention,
    registered_attention,
    ulysses,
)
from kernel_compat.patching import wrapping

KERNEL = "flash_attention_reference"


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    yield
    for name in set(registered_attention()) & {"x_flash", "y_flash"}:
        kernel_compat.unregister_attention(name)


def renamed(match: str) -> Any:
    return pytest.warns(RenamedWarning, match=match)


# types: mypy checks this file, and each `type: ignore` is an error where there is nothing to ignore


def any_forward(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


def forward_of_keywords(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    raise NotImplementedError


def forward_of_transformers(
    layer: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def untyped_forward(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **kwargs):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def forward_without_mask(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
    raise NotImplementedError


def forward_without_output(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> None:
    raise NotImplementedError


class Forward:
    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        raise NotImplementedError


def mask(batch_size: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    return attention_mask


def test_forwards_that_users_write() -> None:
    forwards: list[AttentionForward] = [
        any_forward,
        forward_of_keywords,
        forward_of_transformers,
        untyped_forward,
        Forward(),
        kernel_compat.attention_function(KERNEL),
        ulysses(forward_of_keywords, lambda: None),
    ]
    masks: list[MaskFunction] = [mask, kernel_compat.mask_function(KERNEL)]
    for forward in forwards:
        register_attention("x_flash", KERNEL, forward, masks[0], override=True)
        register_attention("x_flash", KERNEL, ForwardSpec(forward, {"varlen"}), masks[1], override=True)
    register_attention("x_flash", KERNEL, forward_without_mask, override=True)  # type: ignore[arg-type]
    register_attention("x_flash", KERNEL, forward_without_output, override=True)  # type: ignore[arg-type]
    ulysses(forward_without_mask, True)  # type: ignore[arg-type]


# register_attention


def test_a_forward_with_what_it_can_do() -> None:
    spec = ForwardSpec(any_forward, {"varlen", "gqa"}, handles_context_parallel=True)
    register_attention("x_flash", forward=spec)
    entry = registered_attention()["x_flash"]
    assert entry.forward is any_forward
    assert entry.handles_context_parallel
    assert set(entry.supported.names()) == {"varlen", "gqa"}
    register_attention("x_flash", forward=spec)  # the same
    with pytest.raises(ValueError, match="registered already"):
        register_attention("x_flash", forward=any_forward)


def test_features_without_a_forward() -> None:
    with pytest.raises(ValueError, match="features are those of a forward"):
        register_attention("x_flash", KERNEL, ForwardSpec(features={"varlen"}))
    with pytest.raises(TypeError, match="takes a kernel, a forward or both"):
        register_attention("x_flash", forward=ForwardSpec(handles_context_parallel=True))


def test_keywords_of_earlier_releases() -> None:
    with renamed(r"'x_flash', features=, handles_.*=\) is now forward=ForwardSpec\(forward, features=...") as caught:
        register_attention("x_flash", forward=any_forward, features={"varlen"}, handles_context_parallel=True)
    assert [warning.filename for warning in caught] == [__file__]
    register_attention("x_flash", forward=ForwardSpec(any_forward, {"varlen"}, True))  # the same
    with renamed(r"is now forward=ForwardSpec\(handles_context_parallel=...\)"):
        register_attention("y_flash", KERNEL, handles_context_parallel=True)
    assert registered_attention()["y_flash"].handles_context_parallel
    with renamed("features="), pytest.raises(ValueError, match="features are those of a forward"):
        register_attention("z_flash", KERNEL, features={"varlen"})
    with pytest.raises(TypeError, match="features beside a ForwardSpec"):
        register_attention("z_flash", forward=ForwardSpec(any_forward), features={"varlen"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'feature'"):
        register_attention("z_flash", KERNEL, feature=())  # type: ignore[call-arg]


def test_the_default_group_of_earlier_releases() -> None:
    with renamed("sequence_parallel=None.* is now sequence_parallel=True") as caught:
        register_attention("x_flash", KERNEL, sequence_parallel=None)
    assert [warning.filename for warning in caught] == [__file__]
    register_attention("x_flash", KERNEL, sequence_parallel=True)  # the same
    assert registered_attention()["x_flash"].spread_over is True


@pytest.mark.parametrize(("group", "before"), [(False, False), (True, None), (print, print)])
def test_the_group_of_a_name(group: Any, before: Any) -> None:
    register_attention("x_flash", KERNEL, sequence_parallel=group)
    entry = registered_attention()["x_flash"]
    assert entry.spread_over == entry.group == (group or None)
    assert entry.spreads is bool(group)
    with renamed("AttentionName.sequence_parallel is now spread_over"):
        assert entry.sequence_parallel is before


def test_a_forward_that_is_spread_already() -> None:
    register_attention("x_flash", KERNEL, forward=ulysses(any_forward, lambda: None))
    entry = registered_attention()["x_flash"]
    assert entry.spread_over is None
    assert entry.spreads
    assert not entry.is_spread()


def test_an_entry_point_of_earlier_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "earlier_plugin.py").write_text(
        "OPTIONS = {'forward': print, 'features': {'varlen'}, 'handles_context_parallel': True}\n"
        "SPREAD = {'kernel': 'flash_attention_reference', 'sequence_parallel': None}\n"
    )
    folder = tmp_path / "earlier_plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: earlier-plugin\nVersion: 1.0\n")
    points = "x_flash = earlier_plugin:OPTIONS\ny_flash = earlier_plugin:SPREAD\n"
    (folder / "entry_points.txt").write_text(f"[kernel_compat.attention]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel_compat.api._from_entry_points.cache_clear()
    try:
        with renamed("register_attention.'x_flash', features=, handles_context_parallel="):
            names = registered_attention()
        assert names["x_flash"].supported.names() == ("varlen",)
        assert names["x_flash"].handles_context_parallel
        assert names["y_flash"].spread_over is True
    finally:
        kernel_compat.api._from_entry_points.cache_clear()
        kernel_compat.attention.defaults.registry.declared.clear()


# other names


def test_the_subject_of_an_error() -> None:
    error = UnsupportedFeatureError("sinks", "flash_attention_2", "Use another.")
    assert (error.feature, error.subject) == ("sinks", "flash_attention_2")
    with renamed("UnsupportedFeatureError.kernel is now subject") as caught:
        assert error.kernel == "flash_attention_2"
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (kernel_compat, "Functions", lambda: kernels.Functions),
        (kernel_compat, "Provider", lambda: kernels.Provider),
        (models, "assert_same_signature", lambda: wrapping.assert_same_signature),
    ],
)
def test_names_that_are_not_public_any_more(module: Any, name: str, value: Callable[[], Any]) -> None:
    assert name not in module.__all__
    with renamed(rf"\.{name} is not public any more") as caught:
        assert getattr(module, name) is value()
    assert [warning.filename for warning in caught] == [__file__]

"""The layout of a forward's sequences: found once for a forward and a type of layer, and the short way to the kernel."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kernel_compat
from kernel_compat.attention import resolution

LIBRARY = str(Path(kernel_compat.__file__).parent)
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
#: Kinds of batches: keywords of a model's forward.
BATCHES: dict[str, dict[str, Any]] = {
    "dense": {"input_ids": torch.ones(2, 6, dtype=torch.long)},
    "padded": {"input_ids": torch.ones(2, 6, dtype=torch.long), "attention_mask": PADDING},
    "packed by offsets": {
        "input_ids": torch.ones(1, 6, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
        **{"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 4, "max_length_k": 4},
    },
    "packed by positions": {
        "input_ids": torch.ones(1, 6, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
    },
    "4D mask": {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "attention_mask": torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6),
    },
}
#: Layers of two types, so that a forward has two layouts.
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2


class Seen:
    """A kernel of the user's own, which records the stack at each call."""

    def __init__(self) -> None:
        self.stacks: list[list[tuple[str, str]]] = []
        self.queries: list[weakref.ref[Any]] = []
        self.alive = 0

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    ) -> Tensor:  # fmt: skip
        return self._output(q)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
    ) -> Tensor:
        return self._output(q)

    def _output(self, q: Tensor) -> Tensor:
        frame: Any = sys._getframe(2)
        stack: list[tuple[str, str]] = []
        while frame.f_code.co_filename.startswith(LIBRARY):  # down to transformers' call
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        self.stacks.append(stack)
        self.alive = sum(query() is not None for query in self.queries)
        self.queries.append(weakref.ref(q.untyped_storage()))
        return torch.zeros_like(q)


@pytest.fixture
def model() -> Iterator[Callable[[Any], Any]]:
    def of(kernel: Any) -> Any:
        kernel_compat.register_attention("laid_out_flash", kernel=kernel)
        config = transformers.Qwen2Config(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=8,
            sliding_window=3,
            use_sliding_window=True,
            layer_types=LAYER_TYPES,
        )
        return transformers.Qwen2Model._from_config(config, attn_implementation="laid_out_flash").eval()

    with kernel_compat.installed(unproven="allow"):
        yield of
        kernel_compat.unregister_attention("laid_out_flash")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layouts that were found, and not known."""
    layouts: list[Any] = []
    find = resolution._find

    def recorded(*arguments: Any) -> Any:
        layouts.append(find(*arguments))
        return layouts[-1]

    monkeypatch.setattr(resolution, "_find", recorded)
    return layouts


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("several", [False, True], ids=["", "of several kernels"])
def test_the_way_to_the_kernel_is_short(model: Callable[[Any], Any], kind: str, several: bool) -> None:
    kernel = Seen()
    with torch.no_grad():
        model([kernel, "flash_attention_reference"] if several else kernel)(**BATCHES[kind], use_cache=False)
    assert len(kernel.stacks) == len(LAYER_TYPES)
    for stack in kernel.stacks:
        assert len(stack) <= 6, stack
        assert len({file for file, _ in stack}) <= 4 + several, stack


@pytest.mark.parametrize("kind", BATCHES)
def test_a_layout_is_found_once_for_a_type_of_layer(model: Callable[[Any], Any], found: list[Any], kind: str) -> None:
    ours = model("flash_attention_reference")
    with torch.no_grad():
        ours(**BATCHES[kind], use_cache=False)
        # Masks that the model got as they are hide what the layers' windows do, so that both types have one layout.
        assert len(found) == len(set(LAYER_TYPES))
        ours(**BATCHES[kind], use_cache=False)
    assert len(found) == 2 * len(set(LAYER_TYPES))
    assert all(layout.__dataclass_params__.frozen for layout in found)


def test_a_mask_that_is_written_to_between_layers_is_another_one(model: Callable[[Any], Any], found: list[Any]) -> None:
    ours = model("flash_attention_reference")
    mask = BATCHES["padded"]["attention_mask"].clone()
    triangle = (torch.ones(6, 6, dtype=torch.bool).tril() & mask[:, None, None, :].bool()).clone()
    first, _ = ours.layers[0], None

    def hide(*arguments: Any) -> None:
        triangle[0, :, :, 2] = False

    handle = first.register_forward_hook(hide)
    with torch.no_grad():
        ours(input_ids=BATCHES["padded"]["input_ids"], attention_mask=triangle, use_cache=False)
    handle.remove()
    before, *after = found
    assert before is not after[0]
    assert len(found) == 3  # the first layer's, and one of each type after the change


def test_under_inference_mode_nothing_is_kept(model: Callable[[Any], Any], found: list[Any]) -> None:
    """Tensors made there don't count their changes."""
    ours = model("flash_attention_reference")
    with torch.inference_mode():
        batch = {name: value.clone() for name, value in BATCHES["padded"].items()}
        ours(**batch, use_cache=False)
    assert len(found) == len(LAYER_TYPES)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_layout_keeps_no_tensors_of_a_layer(model: Callable[[Any], Any], kind: str) -> None:
    kernel = Seen()
    with torch.no_grad():
        model(kernel)(**BATCHES[kind], use_cache=False)
    assert len(kernel.queries) == len(LAYER_TYPES)
    assert kernel.alive == 0  # of the layers before the last one


def test_a_mask_that_needs_a_gradient_goes_through_checkpoints(model: Callable[[Any], Any], found: list[Any]) -> None:
    """Its graph lasts for one backward, in which each layer is computed again."""
    ours = model("flash_attention_reference").train()
    hidden = torch.zeros(6, 6).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    numbers = torch.zeros(6, 6, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            ours.gradient_checkpointing_enable({"use_reentrant": False})
        mask = (hidden + numbers).expand(2, 1, 6, 6)
        out = ours(input_ids=BATCHES["dense"]["input_ids"], attention_mask=mask, use_cache=False)
        gradients.append(torch.autograd.grad(out.last_hidden_state.square().sum(), numbers)[0])
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)
    assert len(found) > len(set(LAYER_TYPES))


def test_a_mask_that_needs_a_gradient_is_refused_by_a_kernel_without_masks(model: Callable[[Any], Any]) -> None:
    """As padding and causality it would be right, and its gradient lost without an error."""
    mask = torch.zeros(2, 1, 6, 6).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf).requires_grad_()
    with pytest.raises(
        ValueError, match="needs a gradient is a bias of the scores. Kernels that do: flash_attention_flex"
    ):
        model(Seen())(input_ids=BATCHES["dense"]["input_ids"], attention_mask=mask, use_cache=False)

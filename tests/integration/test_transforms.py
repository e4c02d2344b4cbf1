"""``torch.func``: gradients of a model's call under a registered name are eager's; values that vmap maps over can't be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_model import LENGTH, ids, model, offsets, padding, positions
from tiny import NAME, distance
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from kernel_compat import UnsupportedFeatureError, attention_function

pytestmark = pytest.mark.usefixtures("installed_for_all")

WEIGHT = "model.norm.weight"


def loss_of(name: str) -> tuple[Callable[..., Tensor], Tensor]:
    """A loss over the real tokens as a function of one weight, tokens and a mask; and the weight."""
    decoder = model("llama", name)
    parameters = dict(decoder.named_parameters())

    def loss(weight: Tensor, tokens: Tensor, mask: Tensor | None = None, **given: Any) -> Tensor:
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False, **given}
        logits = functional_call(decoder, {**parameters, WEIGHT: weight}, (), inputs).logits
        return (logits if mask is None or mask.ndim > 2 else logits * mask[..., None]).square().sum()

    return loss, parameters[WEIGHT].detach()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian])
def test_gradients(transform: Callable[..., Any], dtype: torch.dtype) -> None:
    inputs = ids(2), padding(2, 0, dtype=dtype)
    expected, found = (transform(loss)(weight, *inputs) for loss, weight in (loss_of(name) for name in ("eager", NAME)))
    assert distance(found, expected) < 1e-5


def test_vmap_over_weights_and_tokens() -> None:
    inputs = ids(2), padding(2, 0)
    for dims, more in (((0, None, None), inputs), ((None, 0), (ids(2)[:, None],))):
        expected, found = (
            vmap(loss, in_dims=dims)(torch.stack([weight, 2 * weight]) if dims[0] == 0 else weight, *more)
            for loss, weight in (loss_of(name) for name in ("eager", NAME))
        )
        assert distance(found, expected) < 1e-5


FOUR = torch.ones(2, 1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
PACKED = torch.cat([positions(5, 4, 3), positions(1, 9, 2)])[:, None]
OFFSETS = torch.stack([offsets(5, 4, 3), offsets(1, 9, 2)])


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("attention_mask", padding(2, 0)[:, None]),
        ("attention_mask", padding(2, 0, dtype=torch.long)[:, None]),
        ("attention_mask", FOUR),
        ("position_ids", PACKED),
        ("cu_seq_lens_q", OFFSETS),
        ("max_length_q", torch.tensor([5, 9])),
    ],
)
def test_values_that_vmap_maps_over(name: str, values: Tensor, differentiated: bool) -> None:
    loss, weight = loss_of(NAME)

    def of_sample(tokens: Tensor, value: Tensor) -> Tensor:
        given = {name: value, **({"cu_seq_lens_k": value} if name == "cu_seq_lens_q" else {})}
        mask = given.pop("attention_mask", None)
        return (grad(loss) if differentiated else loss)(weight, tokens, mask, **given)

    with pytest.raises(UnsupportedFeatureError, match=f"{name} that torch.func.vmap maps over.*rows of a batch"):
        vmap(of_sample)(ids(2)[:, None], values)


def test_outside_of_a_model() -> None:
    function, layer = attention_function("flash_attention_reference"), torch.nn.Module()
    layer.is_causal = True
    query = torch.randn(2, 1, 4, LENGTH, 8)
    with pytest.raises(UnsupportedFeatureError, match="attention_mask that torch.func.vmap maps over"):
        vmap(lambda x, mask: function(layer, x, x, x, mask)[0])(query, padding(2, 0)[:, None])

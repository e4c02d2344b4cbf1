"""An attention name that is changed during a forward: the masks of one name don't reach the layers of another unnoticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from any_model import ids, model, padding
from tiny import NAME

pytestmark = pytest.mark.usefixtures("installed_for_all")


@pytest.mark.parametrize(("before", "after"), [(NAME, "sdpa"), (NAME, "eager"), ("sdpa", NAME), ("eager", NAME)])
@pytest.mark.parametrize("padded", [(2,), (2, 0), None])
def test_changed_during_a_forward(before: str, after: str, padded: tuple[int, ...] | None) -> None:
    changing = copy.deepcopy(model("llama", NAME))
    changing.set_attn_implementation(before)

    def change(*_: Any) -> None:  # as another thread may
        changing.config._attn_implementation = after

    hook = changing.model.layers[0].register_forward_hook(change)
    inputs = {"input_ids": ids(len(padded or (0,))), "attention_mask": None if padded is None else padding(*padded)}
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"was changed from '{before}' to '{after}' during its forward"):
            changing(**inputs)
        hook.remove()
        changing.set_attn_implementation(before)
        changing(**inputs)  # between forwards it may change


def test_names_of_others_are_theirs() -> None:
    changing = copy.deepcopy(model("llama", "eager"))
    changing.model.layers[0].register_forward_hook(lambda *_: setattr(changing.config, "_attn_implementation", "sdpa"))
    with torch.no_grad():
        changing(input_ids=ids(1))

"""The forwards of mixers are replaced and restored, with the usual rule for values that other code overwrites."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

from torch import nn

from kernel_compat.attention.mixers import MixerPatches


class Model(nn.Module):
    """A model with one layer of its own class, which counts as a mixer because it has a parameter ``A_log``."""

    def __init__(self) -> None:
        super().__init__()

        class Layer(nn.Module):
            def forward(self, x: Any) -> Any:
                return x

        self.layer: Any = Layer()
        self.layer.register_parameter("A_log", None)


def theirs(self: Any, x: Any) -> Any:
    return x


def test_classes_are_restored() -> None:
    patches, model = MixerPatches(), Model()
    kind = type(model.layer)
    original = kind.forward
    patches.patch(model)
    assert kind.forward is original  # not active yet
    undo = patches.activate()
    patches.patch(model)
    assert kind.forward is not original
    assert model.layer(1) == 1
    undo()
    assert kind.forward is original


def test_a_forward_that_others_have_overwritten_stays_theirs() -> None:
    patches, model = MixerPatches(), Model()
    kind = type(model.layer)
    original = kind.forward
    undo = patches.activate()
    patches.patch(model)
    ours = kind.forward
    kind.forward = theirs
    left = undo()
    assert [(change.owner, change.name) for change in left] == [(kind, "forward")]
    assert kind.forward is theirs
    kind.forward = ours  # other code restores our value
    patches.activate()()
    assert kind.forward is original


def test_layers_with_a_forward_of_their_own() -> None:
    """accelerate's hooks set one. A forward set later is replaced too; a copy calls its own layer."""
    patches, model = MixerPatches(), Model()
    layer: Any = model.layer
    calls: list[str] = []
    undo = patches.activate()
    for name in ("first", "second"):

        def own(x: Any, name: str = name) -> Any:
            calls.append(name)
            return x

        layer.forward = own
        patches.patch(model)
        assert layer.forward is not own
        assert layer(1) == copy.deepcopy(layer)(1) == 1
    undo()
    assert layer.forward is own
    assert calls == ["first"] * 2 + ["second"] * 2


def test_models_are_not_kept_alive() -> None:
    patches, model = MixerPatches(), Model()
    undo = patches.activate()
    model.layer.forward = model.layer.forward
    patches.patch(model)
    layer = weakref.ref(model.layer)
    del model
    gc.collect()
    assert layer() is None
    undo()

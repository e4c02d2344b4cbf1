"""Packed sequences through models that other libraries have wrapped, before or after the installation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from packed_and_wrapped import MODELS, alone, name_for, on_two_ranks, path_of, recomputing, require_same, row, step
from tiny import NAME, load

import kernel_compat


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    try:
        with ExitStack() as stack:
            yield stack
    finally:
        kernel_compat.unregister_attention(NAME)


def wrap(model: Any, how: str) -> Any:
    if how == "a checkpoint function":
        model.train().enable_input_require_grads()
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recomputing)
        return model
    if how == "peft":
        peft = pytest.importorskip("peft")
        gpt2 = hasattr(model, "transformer")
        targets = ["c_attn"] if gpt2 else ["in_proj"]
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, fan_in_fan_out=gpt2)
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" not in name)  # compare gradients with those of the model without LoRA
        return adapted
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("how", ["peft", "accelerate", "a checkpoint function"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_wrapped_before_or_after(models: Path, stack: ExitStack, name: str, how: str, when: str) -> None:
    path = path_of(name, models)
    ids, packed = row()
    expected = alone(load(path, "eager"), ids)
    if when == "after":
        stack.enter_context(kernel_compat.installed())
    model = load(path, "eager" if when == "before" else name_for(name))
    around = wrap(model, how)
    stack.enter_context(kernel_compat.installed())
    require_same(step(model, around, [{"input_ids": ids, **packed}]), expected, name)


@pytest.mark.slow
def test_ddp_and_fsdp2(tmp_path: Path) -> None:
    for name in MODELS:
        path_of(name, tmp_path)
    torch.multiprocessing.spawn(on_two_ranks, (tmp_path,), nprocs=2)


def test_a_forward_of_one_s_own(models: Path, stack: ExitStack) -> None:
    """Hub kernels and hooks may replace a single layer's forward while the library is installed."""
    ids, packed = row()
    model = load(path_of("mamba", models), "eager")
    expected = alone(model, ids)
    mixer = model.backbone.layers[0].mixer
    upstream = type(mixer).forward
    calls: list[Any] = []

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return upstream(self, *args, **kwargs)

    before = MethodType(own, mixer)
    with kernel_compat.installed():
        require_same(step(model, model, [{"input_ids": ids, **packed}]), expected, "the class's")
        mixer.forward = before
        require_same(step(model, model, [{"input_ids": ids, **packed}]), expected, "its own")
        assert calls
        assert mixer.forward != before
    assert mixer.forward == before
    assert type(mixer).forward is upstream


def test_a_class_that_inherits_its_forward(models: Path, stack: ExitStack) -> None:
    ids, packed = row()
    model = load(path_of("mamba", models), "eager")
    expected = alone(model, ids)
    for layer in model.backbone.layers:
        layer.mixer.__class__ = type("Mixer", (type(layer.mixer),), {})
    kind = type(layer.mixer)
    with kernel_compat.installed():
        require_same(step(model, model, [{"input_ids": ids, **packed}]), expected, "a subclass")
        assert "forward" in vars(kind)
    assert "forward" not in vars(kind)

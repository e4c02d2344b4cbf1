"""The README's example for Liger on a tiny model of every type in Liger's own table.

This process tests three types, whose kernels are bound but not run. `test_every_type` runs this file under Triton's interpreter, where
each type's loss and gradients are compared with those of the model without the kernels.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

import interpreted
import pytest
import torch
from tiny import distance
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from kernel_compat import Environment, UnsupportedFeatureError
from kernel_compat.environment import Device
from kernel_compat.models import liger_support, use_liger_kernel
from kernel_compat_ops import registry
from kernel_compat_ops.instances import ops_of
from kernel_compat_prove import recipes
from kernel_compat_prove.architectures import classes_of
from kernel_compat_prove.proof import make_subject
from kernel_compat_prove.subject import main_output

table = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError).MODEL_TYPE_TO_APPLY_LIGER_FN

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a GPU; under the interpreter also the functions of the GPU library that the interpreter lacks."""
    environment = Environment(packages=registry.detect().packages, devices=(Device("NVIDIA H200", (9, 0)),))
    monkeypatch.setattr(registry.default, "detect", lambda: environment)
    if INTERPRETED:
        import interpreter  # noqa: F401  # apply the repairs
        import triton.language as tl

        for module in ("rms_norm", "layer_norm"):
            monkeypatch.setattr(f"liger_kernel.ops.{module}.rsqrt", lambda x: 1 / tl.sqrt(x))
        for module in ("geglu", "cross_entropy"):
            monkeypatch.setattr(f"liger_kernel.ops.{module}.tanh", lambda x: 2 / (1 + tl.exp(-2 * x)) - 1)


def build(model_type: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model of the type, and its inputs: six tokens and labels, or other inputs if it takes no tokens."""
    if model_type == "mllama_text_model":  # transformers' tables lack it
        module = importlib.import_module("transformers.models.mllama.modeling_mllama")
        config_class, model_class = module.MllamaTextConfig, module.MllamaForCausalLM
    elif model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        # Before transformers 5, Pixtral's vision model is listed as a Llava.
        own = [one for one in classes_of(model_type) if one.config_class is config_class]
        model_class = own[0] if own else MODEL_MAPPING[config_class]
    else:
        pytest.skip("this release of transformers has no such type")
    config = config_class(**recipes.constructor(model_type, config_class))
    subject = make_subject(model_class, config, "eager", model_type)
    if not subject.has_tokens:
        return subject.eager, subject.inputs
    ids = torch.tensor([[5, 9, 7, 3, 8, 6]])
    labels = {"labels": ids.masked_fill(ids == 7, -100)} if subject.takes("labels") else {}
    return subject.eager, {"input_ids": ids, **labels}


def results(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss, and all gradients in one tensor."""
    model.zero_grad()
    output = model(**inputs)
    loss = main_output(output).square().mean() if output.get("loss") is None else output.loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("model_type", sorted(table) if INTERPRETED else ["gpt_oss", "llama", "qwen2_5_vl_text"])
def test_the_options_of_liger_support_are_accepted(model_type: str) -> None:
    model, inputs = build(model_type)
    support = liger_support(model)
    off = set()
    for reason in support.reasons:
        found = re.fullmatch(r"liger_kernel does not support .+\. Pass (\w+)=False\.", reason)
        assert found, reason
        off.add(found[1])
    assert support.options == dict.fromkeys(off, False)
    if not support:
        with pytest.raises(UnsupportedFeatureError) as caught:
            use_liger_kernel(model)
        assert str(caught.value) in support.reasons
    try:
        expected = results(model, inputs) if INTERPRETED else None
    except AttributeError as error:  # Qwen2-VL and Qwen2.5-VL on 4.54: their configs have no vocab_size
        pytest.skip(f"without Liger it fails already: {error}")

    with use_liger_kernel(model, **support.options):
        assert any(ops_of(module) for module in model.modules())
        if expected:
            loss, gradients = results(model, inputs)
            assert abs(float(loss - expected[0])) <= 1e-5 * abs(float(expected[0]))
            assert distance(gradients, expected[1]) < 1e-4
    assert not any(ops_of(module) for module in model.modules())
    if expected:
        assert all(map(torch.equal, results(model, inputs), expected))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="it is what this test runs")
def test_every_type() -> None:
    interpreted.run("tests/together/test_liger_types.py", timeout=880)

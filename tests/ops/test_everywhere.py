"""A config that is applied to every model that a process builds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from plain_kernels import PLAIN
from tiny import OPS_MODELS, TRANSFORMERS, llava
from wrapped import CHUNKED, build

from kernel_compat import UnsupportedFeatureError, ops
from kernel_compat.proofs.underway import nothing_to_prove

POST_INIT = transformers.PreTrainedModel.post_init


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    assert transformers.PreTrainedModel.post_init is POST_INIT


def bound(model: Any) -> set[str]:
    report = ops.applied(model)
    return set() if report is None else {binding.op for binding in report.bindings}


def test_models_of_any_thread_have_the_kernels_until_it_is_undone() -> None:
    models: list[Any] = []
    with ops.use_everywhere(CHUNKED):
        thread = threading.Thread(target=lambda: models.append(build("llama")))
        thread.start()
        thread.join()
        with ops.use(ops.OpsConfig.eager()):
            models.append(build("llama"))
    assert [bound(model) for model in (*models, build("llama"))] == [{"cross_entropy_loss"}, set(), set()]


def test_a_process_has_one_config() -> None:
    with ops.use_everywhere(CHUNKED):
        with pytest.raises(ValueError, match="this process uses OpsConfig.* for all models already"):
            ops.use_everywhere(None)
        assert bound(build("llama")) == {"cross_entropy_loss"}
    with pytest.raises(TypeError, match="config must be an OpsConfig"):
        ops.use_everywhere({})  # type: ignore[arg-type]
    with ops.use_everywhere(None), pytest.raises(ValueError, match=r"uses OpsConfig\.auto"):
        ops.use_everywhere(CHUNKED)


def test_models_that_are_built_to_be_proven_stay_as_they_are() -> None:
    with ops.use_everywhere(CHUNKED), nothing_to_prove():
        assert not bound(build("llama"))


def test_the_best_of_a_whole_model_comes_after_the_best_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def auto(environment: Any = None, model: Any = None) -> ops.OpsConfig:
        chosen.append(type(model).__name__)
        head = model.get_output_embeddings() is not None
        return CHUNKED if head else ops.OpsConfig.eager()  # another config for a part than for the whole

    monkeypatch.setattr(ops.OpsConfig, "auto", auto)
    with ops.use_everywhere(None):
        model = transformers.LlavaForConditionalGeneration(llava())
    assert bound(model) == {"cross_entropy_loss"}
    assert len(chosen) > 2
    assert chosen[-1] == type(model).__name__
    assert not any(ops.applied(part) for part in model.modules() if part is not model)


@pytest.fixture
def _experts() -> Iterator[None]:
    for variant in ops.OPS["moe"]:
        ops.register_kernel("moe", variant, PLAIN)(lambda: lambda *args, **kwargs: None)
    yield
    for variant in ops.OPS["moe"]:
        ops.unregister_kernel("moe", variant, PLAIN)


@pytest.mark.skipif(TRANSFORMERS.major < 5, reason="experts are modules of their own before transformers 5")
@pytest.mark.usefixtures("_experts")
def test_kernels_of_experts_that_will_be_quantized_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OPS_MODELS["mixtral"]()
    config.quantization_config = {"quant_method": "fp8"}  # as `from_pretrained` sets it before it builds the model
    experts = ops.OpsConfig(moe_implementation=PLAIN)
    with ops.use_everywhere(experts), torch.device("meta"):
        with pytest.raises(
            UnsupportedFeatureError, match=f"moe_implementation='{PLAIN}' does not support weights that are"
        ):
            transformers.MixtralForCausalLM(config)
        assert not bound(transformers.LlamaForCausalLM(OPS_MODELS["llama"]()))
    monkeypatch.setattr(ops.OpsConfig, "auto", lambda environment=None, model=None: experts)
    with ops.use_everywhere(None), torch.device("meta"):
        assert not bound(transformers.MixtralForCausalLM(config))

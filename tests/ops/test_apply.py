"""Kernel selection on real models: bound kernels compute the same results, and nothing else in the model changes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain_kernels import PLAIN
from tiny import CAUSAL_LMS, OPS_MODELS, TRANSFORMERS, VOCAB, bart, llava, randomize
from wrapped import CHUNKED, assert_same, build, spread, with_a_loss_of_the_logits

import kernel_compat
from kernel_compat import ForwardSpec, KernelUnavailableError, UnsupportedFeatureError, models, ops
from kernel_compat_ops.losses.causal import causal_loss
from kernel_compat_ops.losses.lazy import LazyLogits

#: Every op that has a kernel on the CPU.
VALUES: dict[str, Any] = {
    "rms_norm_implementation": PLAIN,
    "rms_norm_gated_implementation": PLAIN,
    "swiglu_mlp_implementation": PLAIN,
    "rotary_pos_emb_implementation": PLAIN,
    "load_balancing_loss_implementation": PLAIN,
    "cross_entropy_loss_implementation": "chunk_loss",
}
EVERYTHING = ops.OpsConfig(**VALUES)

#: The ops found in a tiny model of each kind, with their variants. Gemma's MLPs use gelu.
EXPECTED = {
    "llama": {"rms_norm": "standard", "swiglu_mlp": "standard", "rotary_pos_emb": "full"},
    "qwen2": {"rms_norm": "standard", "swiglu_mlp": "standard", "rotary_pos_emb": "full"},
    "qwen3": {"rms_norm": "standard", "swiglu_mlp": "standard", "rotary_pos_emb": "full"},
    "qwen3_moe": {"rms_norm": "standard", "rotary_pos_emb": "full", "load_balancing_loss": "standard"},
    "mixtral": {"rms_norm": "standard", "rotary_pos_emb": "full", "load_balancing_loss": "standard"},
    "gemma2": {"rms_norm": "offset", "rotary_pos_emb": "full"},
    "gemma3": {"rms_norm": "offset", "rotary_pos_emb": "full"},
    "deepseek_v3": {"rms_norm": "standard", "swiglu_mlp": "standard", "rotary_pos_emb": "full"},
    "qwen3_5_moe": {
        "rms_norm": "offset",
        "rms_norm_gated": "standard",
        "swiglu_mlp": "standard",
        "rotary_pos_emb": "partial",
        "load_balancing_loss": "standard",
    },
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 1, 1]])
MASK = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
LABELS = torch.tensor([[-100, -100, 7, 8, 9, 10, 11, 12, 13], [21, 22, 23, 24, 25, 26, 27, -100, -100]])
BATCH = {"input_ids": IDS, "labels": LABELS}


def step(model: Any, **inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The outputs of a training step, and every gradient by parameter."""
    model.zero_grad()
    outputs = model(**{"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "use_cache": False, **inputs})
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def config_for(name: str) -> ops.OpsConfig:
    has = EXPECTED[name]
    return ops.OpsConfig(
        **{k: v for k, v in VALUES.items() if k.removesuffix("_implementation") in {*has, "cross_entropy_loss"}}
    )


@contextmanager
def left_as_it_was(model: Any) -> Iterator[None]:
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    yield
    for path, module in model.named_modules():
        now = vars(module)
        assert now.keys() == before[path].keys(), path
        for key, value in now.items():
            assert value is before[path][key] or value == before[path][key], (path, key)


# The same numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OPS_MODELS))
def test_loss_and_every_gradient_are_those_of_eager(name: str) -> None:
    """In float64, as is the eager loss: upstream's own rounds the logits to float32."""
    model = build(name, torch.float64)
    model.loss_function = causal_loss
    eager, expected = step(model)

    report = ops.apply_ops(model, config_for(name))
    bound, found = step(model)

    variants = {binding.op: binding.variant for binding in report.bindings}
    assert variants == {**EXPECTED[name], "cross_entropy_loss": "causal"}
    # Upstream computes the sums of its load-balancing loss in float32, and all of Qwen3.5's linear attention.
    tolerance = 1e-4 if name == "qwen3_5_moe" else 1e-6 if "load_balancing_loss" in variants else 1e-10
    torch.testing.assert_close(bound.loss, eager.loss, rtol=tolerance, atol=0, check_dtype=False)
    assert_same(found, expected, tolerance)
    assert isinstance(bound.logits, LazyLogits)
    torch.testing.assert_close(bound.logits.compute(), eager.logits, rtol=tolerance, atol=tolerance)

    report.undo()
    again, restored = step(model)
    assert torch.equal(again.loss, eager.loss)
    assert all(torch.equal(restored[key], value) for key, value in expected.items())


@pytest.mark.skipif(TRANSFORMERS.major >= 5, reason="experts are one module with all weights")
def test_experts_that_are_modules_of_their_own_are_mlps() -> None:
    model = build("qwen3_moe", torch.float64)
    eager, expected = step(model)

    report = ops.apply_ops(model, ops.OpsConfig(swiglu_mlp_implementation=PLAIN))
    bound, found = step(model)

    assert len(report.bindings) == 8
    torch.testing.assert_close(bound.loss, eager.loss)
    assert_same(found, expected, 1e-10)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision_rounds_as_eager_does(name: str) -> None:
    model = build(name, torch.bfloat16)
    eager, _ = step(model)

    ops.apply_ops(model, config_for(name))
    bound, _ = step(model)

    torch.testing.assert_close(bound.logits.compute(), eager.logits, rtol=0, atol=0)
    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(40)},
        {"shift_labels": LABELS.roll(-1, 1)},
        {"labels": None},
        {"return_dict": False},
        {"labels": torch.full_like(LABELS, -100)},
    ],
    ids=["items", "items as a tensor", "shifted", "no labels", "tuple", "all ignored"],
)
def test_what_goes_to_the_loss_reaches_it(inputs: dict[str, Any]) -> None:
    model = build("llama")
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "use_cache": False, **inputs}
    eager = model(**given)

    ops.apply_ops(model, CHUNKED)
    bound = model(**given)

    if inputs.get("labels", 0) is None:
        assert bound.loss is None
        assert torch.equal(bound.logits, eager.logits)
    else:
        torch.testing.assert_close(bound[0], eager[0], rtol=1e-6, atol=0, equal_nan=True)
        assert isinstance(bound[1], LazyLogits)
        assert torch.equal(bound[1].compute(), eager[1])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_with_gradients_off_logits_are_ordinary(context: Any) -> None:
    model = build("gemma2")
    eager = model(**BATCH)
    with context():
        ops.apply_ops(model, CHUNKED)  # its probe enables gradients
        bound = model(**BATCH)

    assert type(bound.logits) is torch.Tensor
    assert torch.equal(bound.logits, eager.logits)
    torch.testing.assert_close(bound.loss, eager.loss.detach(), rtol=1e-6, atol=0)
    assert isinstance(model(**BATCH).logits, LazyLogits)


def test_labels_may_be_given_by_position() -> None:
    model = build("llama")
    arguments = (IDS, MASK, None, None, None, LABELS)
    eager = model(*arguments).loss

    ops.apply_ops(model, CHUNKED)
    outputs = model(*arguments)

    torch.testing.assert_close(outputs.loss, eager, rtol=1e-6, atol=0)
    assert isinstance(outputs.logits, LazyLogits)


def test_some_logits_alone_give_the_loss_of_those() -> None:
    model = build("llama")
    inputs = {"input_ids": IDS, "labels": LABELS[:, -4:], "logits_to_keep": 4}
    eager = model(**inputs).loss

    ops.apply_ops(model, CHUNKED)

    torch.testing.assert_close(model(**inputs).loss, eager, rtol=1e-6, atol=0)


def test_a_head_with_a_bias_and_one_that_is_tied() -> None:
    config = transformers.PhiConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    biased = randomize(transformers.AutoModelForCausalLM.from_config(config)).double()
    llama = OPS_MODELS["llama"]()
    llama.tie_word_embeddings = True
    tied = randomize(transformers.AutoModelForCausalLM.from_config(llama)).double()
    assert biased.lm_head.bias is not None
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    for model in (biased, tied):
        model.loss_function = causal_loss
        eager, expected = step(model)

        ops.apply_ops(model, CHUNKED)
        bound, found = step(model)

        torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-12, atol=0)
        assert_same(found, expected, 1e-10)


def test_generation_stays_what_it_is() -> None:
    model = build("qwen3").eval()
    arguments = {"max_new_tokens": 8, "do_sample": False}
    eager = model.generate(IDS[:1], **arguments)

    ops.apply_ops(model, config_for("qwen3"))

    assert torch.equal(model.generate(IDS[:1], **arguments), eager)


# This instance alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_transformers_trainer_trains_and_evaluates(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 sets it, and later Trainers would read it
    if "keep_torch_compile" not in inspect.signature(accelerate.Accelerator.unwrap_model).parameters:
        pytest.skip("transformers' Trainer passes keep_torch_compile, which this accelerate doesn't take")
    data = [{"input_ids": IDS[i % 2], "attention_mask": MASK[i % 2], "labels": LABELS[i % 2]} for i in range(4)]

    def run(model: Any) -> tuple[list[float], dict[str, float]]:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {key: trainer.evaluate()[key] for key in ("eval_loss", "eval_right")}

    losses, metrics = run(build("llama"))
    model = build("llama")
    ops.apply_ops(model, config_for("llama"))
    found, evaluated = run(model)

    assert len(losses) == 2
    tolerance = 0.02 if options else 1e-4
    assert found == pytest.approx(losses, rel=tolerance)
    assert evaluated["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=tolerance)
    assert evaluated["eval_right"] == pytest.approx(metrics["eval_right"], abs=0.1)


def test_another_model_of_the_class_stays_as_it_was() -> None:
    model, other = build("llama"), build("llama")
    eager, expected = step(other)

    with left_as_it_was(other):
        ops.apply_ops(model, config_for("llama"))
    outputs, found = step(other)

    assert isinstance(outputs.logits, torch.Tensor)
    assert torch.equal(outputs.loss, eager.loss)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_undone_a_model_is_what_it_was() -> None:
    model = build("qwen3_moe")
    module = transformers.models.qwen3_moe.modeling_qwen3_moe
    step(model)  # upstream caches some preparations on the first call
    model.zero_grad()

    with left_as_it_was(model):
        with ops.apply_ops(model, config_for("qwen3_moe")) as report:
            assert ops.applied(model) is report
            assert report.active
        assert not report.active
        assert ops.applied(model) is None
        report.undo()
    import gc

    gc.collect()
    assert [name for name in vars(module) if "kernel_compat" in name] == []


def test_the_outermost_block_undoes() -> None:
    model = build("llama")
    with ops.apply_ops(model, CHUNKED) as outer:
        with ops.apply_ops(model, CHUNKED) as inner:
            assert inner is outer
        assert ops.applied(model) is outer
    assert ops.applied(model) is None


def test_again_with_the_same_config_it_is_the_same_report() -> None:
    model = build("llama")
    report = ops.apply_ops(model, CHUNKED)

    assert ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss")) is report
    with pytest.raises(ValueError, match="undo that before applying"):
        ops.apply_ops(model, EVERYTHING)
    report.undo()
    assert ops.apply_ops(model, EVERYTHING) is not report


def test_a_copy_has_the_kernels_and_a_report_of_its_own() -> None:
    model = build("llama")
    report = ops.apply_ops(model, config_for("llama"))
    copied = copy.deepcopy(model)
    report.undo()
    eager, expected = step(model)

    bound, found = step(copied)

    assert isinstance(bound.logits, LazyLogits)
    assert isinstance(eager.logits, torch.Tensor)
    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    assert_same(found, expected, 1e-5)
    own = ops.applied(copied)
    assert own is not None
    assert own is not report
    assert own.bindings == report.bindings
    with left_as_it_was(model):
        own.undo()
    assert isinstance(step(copied)[0].logits, torch.Tensor)


def test_names_and_pickles_stay_what_they_are() -> None:
    model = build("llama")
    names = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    eager, _ = step(model)
    ops.apply_ops(model, config_for("llama"))
    step(model)
    buffer = io.BytesIO()

    torch.save(model, buffer)

    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert ops.applied(loaded) is None
    outputs, _ = step(loaded)
    assert isinstance(outputs.logits, torch.Tensor)
    torch.testing.assert_close(outputs.loss, eager.loss, rtol=1e-6, atol=0)
    assert ops.apply_ops(loaded, config_for("llama")).bindings


def test_what_somebody_put_over_it_stays() -> None:
    model = build("llama")
    report = ops.apply_ops(model, config_for("llama"))
    norm = model.model.norm
    ours, norm.forward = norm.forward, lambda x: x

    with pytest.warns(UserWarning, match="forward of a LlamaRMSNorm has been replaced since"):
        report.undo()

    assert norm(torch.ones(1, 64)).eq(1).all()
    assert "forward" not in vars(model)
    norm.forward = ours  # the patches are undone in another order than they were made
    report.undo()
    assert "forward" not in vars(norm)


# Together with other changes to models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        pytest.param("llama", {}, id="mean", marks=pytest.mark.slow),
        pytest.param("llama", {"num_items_in_batch": 40}, id="items", marks=pytest.mark.slow),
        pytest.param("gemma2", {}, id="softcap", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_in_one_graph(name: str, inputs: dict[str, Any]) -> None:
    model = build(name)
    model.config._attn_implementation = "sdpa" if name == "llama" else "eager"
    eager, expected = step(model, **inputs)
    ops.apply_ops(model, config_for(name))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    bound, found = step(compiled, **inputs)

    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected, 1e-4)
    assert isinstance(bound.logits, LazyLogits)
    torch.testing.assert_close(bound.logits.compute(), eager.logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="compiled already"):
        ops.apply_ops(compiled, CHUNKED)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_are_checkpointed(reentrant: bool) -> None:
    model = build("llama")
    eager, expected = step(model)
    ops.apply_ops(model, config_for("llama"))

    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    bound, found = step(model)

    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    assert_same(found, expected, 1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("head", ["with the rest", "by itself"])
def test_fsdp2_wraps_before_or_after(tmp_path: Path, when: str, head: str) -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    model = build("llama")
    eager, expected = step(model)
    model.zero_grad()
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        if when == "before":
            ops.apply_ops(model, config_for("llama"))
        apart = [model.lm_head, model.model.norm, model.model.layers[0].mlp] if head == "by itself" else []
        for part in (*apart, *model.model.layers, model):
            fully_shard(part)
        if when == "after":
            ops.apply_ops(model, config_for("llama"))
        bound, found = step(model)
        report = ops.applied(model)
        assert report is not None
        logits = bound.logits.compute()
        report.undo()
        again, _ = step(model)
    finally:
        distributed.destroy_process_group()

    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, eager.logits, rtol=1e-5, atol=1e-5)
    assert_same({name: value.full_tensor() for name, value in found.items()}, expected, 1e-4)
    assert isinstance(again.logits, torch.Tensor)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_loss_of_the_logits_has_its_gradients(name: str) -> None:
    """Gemma 2's logits have a softcap, and its head is tied to the embeddings."""
    model = build(name)
    expected = with_a_loss_of_the_logits(model, BATCH)
    ops.apply_ops(model, CHUNKED)

    assert_same(with_a_loss_of_the_logits(model, BATCH), expected, 1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_model_leaves_the_logits_their_gradient(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = build("llama")

    def forward(ids: Any, *args: Any) -> Any:
        outputs = model(**BATCH)
        return outputs.loss, outputs.logits

    def around(**inputs: Any) -> Any:
        # A reentrant checkpoint needs an input that requires gradients.
        return checkpoint(forward, IDS, torch.ones((), requires_grad=True), use_reentrant=reentrant)

    expected = with_a_loss_of_the_logits(model, BATCH)
    ops.apply_ops(model, CHUNKED)

    assert_same(with_a_loss_of_the_logits(model, BATCH, around), expected, 1e-4)


@pytest.mark.slow
def test_what_spreads_a_model_leaves_the_logits_their_gradient(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(spread, (str(tmp_path / "store"), BATCH), nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_on_the_head_is_not_passed_over(kind: str, compiled: bool) -> None:
    model = build("llama")
    model.config._attn_implementation = "sdpa"
    ops.apply_ops(model, CHUNKED)
    hook = getattr(model.lm_head, kind)(lambda *given: None)
    run = torch.compile(model, backend="eager") if compiled else model

    with pytest.raises(UnsupportedFeatureError, match="a backward hook on the head, since no gradient of logits"):
        run(input_ids=IDS, labels=LABELS)
    hook.remove()
    torch._dynamo.reset()  # dynamo doesn't notice removed hooks
    run(input_ids=IDS, labels=LABELS).loss.backward()


def test_what_keeps_the_hidden_states_from_the_loss_is_named() -> None:
    model = build("llama")
    report = ops.apply_ops(model, CHUNKED)
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output.clamp(-1, 1))
    with pytest.raises(
        UnsupportedFeatureError,
        match="'clamp' on the logits, in the forward of LlamaForCausalLM or in a hook on its head",
    ):
        model(input_ids=IDS, labels=LABELS)
    hook.remove()
    model.loss_function = causal_loss
    with pytest.raises(UnsupportedFeatureError, match="the loss_function of LlamaForCausalLM, which has been replaced"):
        model(input_ids=IDS, labels=LABELS)
    with pytest.warns(UserWarning, match="loss_function"):
        report.undo()


def test_an_adapter_on_the_head_behind_it_is_an_error() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    ops.apply_ops(model, CHUNKED)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))

    with pytest.raises(UnsupportedFeatureError, match="replaced by a peft.* Set cross_entropy_loss_impl.*='eager'"):
        adapted(input_ids=IDS, labels=LABELS)


def test_accelerate_s_hooks_stay_around_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    eager, expected = step(model)
    calls: list[str] = []

    class Hook(accelerate.hooks.ModelHook):  # type: ignore[name-defined]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(module).__name__)
            return args, kwargs

    accelerate.hooks.add_hook_to_module(model, Hook())
    accelerate.hooks.add_hook_to_module(model.model.norm, Hook())
    report = ops.apply_ops(model, config_for("llama"))
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, Hook())
    calls.clear()
    bound, found = step(model)

    assert sorted(calls) == ["LlamaForCausalLM", "LlamaMLP", "LlamaRMSNorm"]
    assert isinstance(bound.logits, LazyLogits)
    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    assert_same(found, expected, 1e-5)
    report.undo()
    calls.clear()
    again, restored = step(model)
    assert len(calls) == 3
    assert torch.equal(again.loss, eager.loss)
    assert all(torch.equal(restored[key], value) for key, value in expected.items())


@pytest.mark.parametrize("order", ["hook ops unhook undo", "ops hook undo unhook", "ops hook unhook undo"])
def test_a_hook_of_accelerate_comes_and_goes_in_any_order(order: str, recwarn: pytest.WarningsRecorder) -> None:
    hooks = pytest.importorskip("accelerate").hooks
    model = build("llama")
    norm = model.model.norm
    eager = model(input_ids=IDS).logits
    report = None
    for step_ in order.split():
        if step_ == "ops":
            report = ops.apply_ops(model, ops.OpsConfig(rms_norm_implementation=PLAIN))
        elif step_ == "undo":
            assert report is not None
            report.undo()
        elif step_ == "hook":
            hooks.add_hook_to_module(norm, hooks.ModelHook())
        else:
            hooks.remove_hook_from_module(norm)
        assert report is None or report.replaced == ()
        torch.testing.assert_close(model(input_ids=IDS).logits, eager)

    forward = vars(norm).get("forward")  # accelerate leaves the class's forward on the instance, as a bound method
    assert forward is None or forward.__func__ is type(norm).forward
    assert not [warning for warning in recwarn if "replaced since" in str(warning.message)]


@pytest.mark.parametrize("first", ["ops", "peft"])
def test_adapters_go_around_it(first: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        targets = ["q_proj", "gate_proj", "down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))

    eager, expected = step(adapted(build("llama")))
    model = build("llama")
    if first == "ops":
        report = ops.apply_ops(model, config_for("llama"))
        model = adapted(model)
    else:
        model = adapted(model)
        report = ops.apply_ops(model, config_for("llama"))
    bound, found = step(model)

    assert len(report.bindings) == 10
    assert isinstance(bound.logits, LazyLogits)
    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    assert_same(found, expected, 1e-4)
    report.undo()
    assert torch.equal(step(model)[0].loss, eager.loss)


def test_a_head_that_is_replaced_behind_it_is_an_error() -> None:
    model = build("llama")
    ops.apply_ops(model, CHUNKED)
    model.lm_head = torch.nn.Linear(64, VOCAB, bias=False)

    with pytest.raises(
        UnsupportedFeatureError, match="head of LlamaForCausalLM, which has been replaced by a .*Linear since"
    ):
        model(input_ids=IDS, labels=LABELS)


def test_sdpa_s_backends_of_a_model_and_its_kernels_go_together() -> None:
    from kernel_compat.models import use_sdpa_backends

    model = build("llama")
    eager, _ = step(model)
    for first in (True, False):
        handle = use_sdpa_backends(model, ["math"]) if first else None
        report = ops.apply_ops(model, config_for("llama"))
        handle = handle or use_sdpa_backends(model, ["math"])
        bound, _ = step(model)
        torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
        assert isinstance(bound.logits, LazyLogits)
        for one in (report, handle) if first else (handle, report):
            one.undo()
        assert "forward" not in vars(model)
        assert torch.equal(step(model)[0].loss, eager.loss)


def test_attention_is_chosen_with_the_rest() -> None:
    model = build("llama")

    with kernel_compat.installed():
        report = ops.apply_ops(
            model, ops.OpsConfig(attn_implementation="sdpa", cross_entropy_loss_implementation="chunk_loss")
        )
        assert model.config._attn_implementation == "sdpa"
        assert ops.Binding("", "attn", "", "sdpa") in report.bindings
        report.undo()
    assert model.config._attn_implementation == "eager"


def unused_forward(*args: Any, **kwargs: Any) -> Any:
    raise SystemExit("it was called")


#: Arguments of `register_attention`, besides the kernel.
NAMES: dict[str, dict[str, Any]] = {
    "my_flash_spread": {"sequence_parallel": True},
    "my_flash_ring": {"forward": ForwardSpec(handles_context_parallel=True)},
    "my_flash_own": {"forward": unused_forward},
    "my_flash_auto": {"kernel": "auto"},
    "my_flash_padding_free": {"padding_free": True},
}


@pytest.fixture
def attention_names() -> Iterator[None]:
    for name, options in NAMES.items():
        kernel_compat.register_attention(name, **{"kernel": "flash_attention_reference", **options})
    with kernel_compat.installed(unproven="allow"):
        yield
    for name in NAMES:
        kernel_compat.unregister_attention(name)


def attention_of(model: Any) -> list[str]:
    """The attention names of a model's parts."""
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@pytest.mark.usefixtures("attention_names")
@pytest.mark.parametrize("name", [*NAMES, "eager", "sdpa", "flex_attention", "flash_attention_reference"])
@pytest.mark.parametrize("way", ["auto", "auto for the model", "changed", "built", "eager", "liger_support"])
def test_a_model_keeps_the_attention_that_it_was_loaded_with(name: str, way: str) -> None:
    config = OPS_MODELS["llama"]()
    build_it = functools.partial(transformers.AutoModelForCausalLM.from_config, config, attn_implementation=name)
    proposed = ops.OpsConfig.auto()
    assert proposed.attn_implementation is not None  # to load a model with
    if way == "built":
        with ops.use(proposed):
            model = build_it()
        assert ops.applied(model) is not None
    else:
        model = build_it()
    before = attention_of(build_it())
    chosen = {
        "auto": proposed,
        "auto for the model": ops.OpsConfig.auto(model=model),
        "changed": dataclasses.replace(proposed, cross_entropy_loss_implementation="eager"),
        "eager": ops.OpsConfig.eager(),
    }
    if way == "liger_support":
        models.liger_support(model)
    elif way != "built":
        report = ops.apply_ops(model, chosen[way])
        assert not any(binding.op == "attn" for binding in report.bindings)
        assert ops.apply_ops(model, chosen[way]) is report
        assert any("is to load a model with" in note for note in report.notes) == (way in ("auto", "changed"))

    assert set(before) == {name}
    assert attention_of(model) == before


@pytest.mark.usefixtures("attention_names")
def test_the_parts_of_a_composite_model_keep_theirs() -> None:
    names = {"text_config": "my_flash_auto", "vision_config": "eager"}
    model = transformers.LlavaForConditionalGeneration._from_config(llava(), attn_implementation=names)
    before = attention_of(model)
    assert {"my_flash_auto", "eager"} <= set(before)

    for config in (ops.OpsConfig.auto(), ops.OpsConfig.auto(model=model)):
        with ops.apply_ops(model, config):
            assert attention_of(model) == before
    with ops.apply_ops(model, ops.OpsConfig(attn_implementation="sdpa")):
        assert set(attention_of(model)) == {"sdpa"}
    assert attention_of(model) == before


@pytest.mark.usefixtures("attention_names")
@pytest.mark.parametrize("name", ["my_flash_spread", "my_flash_ring"])
def test_attention_over_ranks_is_not_replaced_by_one_within_a_rank(name: str) -> None:
    alone = transformers.AutoModelForCausalLM.from_config(OPS_MODELS["llama"](), attn_implementation=name)
    whole = transformers.LlavaForConditionalGeneration._from_config(
        llava(), attn_implementation={"text_config": name, "vision_config": "eager"}
    )
    for model in (alone, whole):
        for other in ("sdpa", "eager", "my_flash_auto"):
            config = dataclasses.replace(ops.OpsConfig.auto(), attn_implementation=other, proposed=None)
            with (
                left_as_it_was(model),
                pytest.raises(UnsupportedFeatureError, match=f"'{name}', whose sequences are spread over ranks"),
            ):
                ops.apply_ops(model, config)
        assert name in attention_of(model)
    with ops.apply_ops(alone, ops.OpsConfig(attn_implementation="my_flash_ring")):
        assert set(attention_of(alone)) == {"my_flash_ring"}


def test_attention_that_transformers_doesn_t_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs a warning for a model that doesn't look its attention function up."""
    model = build("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *_: False)

    with left_as_it_was(model), pytest.raises(UnsupportedFeatureError, match="transformers sets no other attention"):
        ops.apply_ops(model, ops.OpsConfig(attn_implementation="sdpa"))


@pytest.mark.usefixtures("attention_names")
@pytest.mark.parametrize("name", ["my_flash_spread", "my_flash_ring", "my_flash_own"])
def test_a_model_is_not_run_under_a_name_that_may_wait_for_other_ranks(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(OPS_MODELS["llama"](), attn_implementation=name)
    model.register_forward_pre_hook(unused_forward)

    (note,) = ops.apply_ops(model, CHUNKED).notes
    assert f"it isn't run with the attention '{name}'" in note


def test_the_error_of_a_model_that_can_t_be_run_is_noted() -> None:
    model = build("llama")
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("it needs an image")

    handle = model.register_forward_pre_hook(fail)
    (note,) = ops.apply_ops(model, CHUNKED).notes
    handle.remove()

    assert len(calls) == 1
    assert "the first forward with labels shows" in note
    assert "RuntimeError: it needs an image" in note


# Models built in a block ---------------------------------------------------------------------------------------------


def test_models_built_in_a_block_have_the_kernels(tmp_path: Path) -> None:
    model = build("llama")
    eager, _ = step(model)
    model.save_pretrained(tmp_path)
    config = config_for("llama")

    with ops.use(config):
        made = transformers.AutoModelForCausalLM.from_config(OPS_MODELS["llama"]())
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        others: list[Any] = []
        thread = threading.Thread(target=lambda: others.append(transformers.LlamaModel(OPS_MODELS["llama"]())))
        thread.start()
        thread.join()
    outside = transformers.AutoModelForCausalLM.from_config(OPS_MODELS["llama"]())

    for one in (made, loaded):
        report = ops.applied(one)
        assert report is not None
        assert {binding.op for binding in report.bindings} == {*EXPECTED["llama"], "cross_entropy_loss"}
        assert any(binding.path == "model.layers.0.mlp" for binding in report.bindings)
        assert not any("has none" in note for note in report.notes)
        assert ops.applied(one.model) is None
    assert ops.applied(outside) is None
    assert ops.applied(others[0]) is None
    bound, _ = step(loaded)
    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    assert isinstance(bound.logits, LazyLogits)
    report = ops.applied(loaded)
    assert report is not None
    report.undo()
    assert not any("forward" in vars(module) for module in loaded.modules())


def test_post_init_is_upstream_s_again_behind_blocks() -> None:
    before = transformers.PreTrainedModel.post_init
    with ops.use(CHUNKED):
        with ops.use(EVERYTHING):
            pass
        assert transformers.PreTrainedModel.post_init is not before
        with pytest.raises(TypeError, match="config must be an OpsConfig"), ops.use({}):  # type: ignore[arg-type]
            pass
    assert transformers.PreTrainedModel.post_init is before


def test_what_somebody_put_over_post_init_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = transformers.PreTrainedModel.post_init
    with monkeypatch.context() as patched:
        with ops.use(CHUNKED):
            ours = transformers.PreTrainedModel.post_init
            patched.setattr(transformers.PreTrainedModel, "post_init", lambda self: None)
            theirs = transformers.PreTrainedModel.post_init
        assert transformers.PreTrainedModel.post_init is theirs
    assert transformers.PreTrainedModel.post_init is ours  # their undo has restored our function
    assert ops.applied(build("llama")) is None
    with ops.use(CHUNKED):
        pass
    assert transformers.PreTrainedModel.post_init is before


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "problem"),
    [
        (
            "gemma2",
            "swiglu_mlp",
            r"model.layers.0.mlp \(Gemma2MLP\): it is of the variant 'geglu', and the kernel is for standard",
        ),
        ("gemma3", "swiglu_mlp", "Gemma3MLP"),
    ],
)
def test_a_kernel_for_another_formula_is_refused_and_nothing_is_changed(name: str, field: str, problem: str) -> None:
    model = build(name)
    config = ops.OpsConfig(**{**VALUES, f"{field}_implementation": PLAIN})

    with left_as_it_was(model), pytest.raises(UnsupportedFeatureError, match=problem) as caught:
        ops.apply_ops(model, config)

    assert f"Set {field}_implementation='eager'" in str(caught.value)


def test_a_kernel_for_one_variant_is_not_taken_for_another() -> None:
    model = build("gemma2")

    @ops.register_kernel("rms_norm", "standard", "standard_alone")
    def factory() -> Any:
        raise AssertionError("it was bound")

    try:
        with (
            left_as_it_was(model),
            pytest.raises(UnsupportedFeatureError, match="is of the variant 'offset', and the kernel is for standard"),
        ):
            ops.apply_ops(model, ops.OpsConfig(rms_norm_implementation="standard_alone"))
    finally:
        ops.unregister_kernel("rms_norm", "standard", "standard_alone")


@pytest.mark.skipif("gpt_oss_sinks" not in CAUSAL_LMS, reason="this release has no GPT-OSS")
def test_auto_leaves_eager_what_a_model_refuses() -> None:
    gpt_oss = transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS["gpt_oss_sinks"]())

    config = ops.OpsConfig.auto(model=build("gemma2"))

    assert config["cross_entropy_loss"] == "chunk_loss"
    assert ops.apply_ops(gpt_oss, ops.OpsConfig.auto(model=gpt_oss)).active


def test_a_model_that_computes_its_loss_itself_is_refused_before_or_at_its_first_forward() -> None:
    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(input_ids=input_ids, **kwargs)
            if labels is not None:
                outputs.loss = torch.nn.functional.cross_entropy(
                    outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                )
            return outputs

    torch.manual_seed(0)
    model = Own(OPS_MODELS["llama"]())
    model(input_ids=IDS)
    with (
        left_as_it_was(model),
        pytest.raises(UnsupportedFeatureError, match="'__getitem__' on the logits, in the forward of Own"),
    ):
        ops.apply_ops(model, CHUNKED)

    with torch.device("meta"):
        late = Own(OPS_MODELS["llama"]())
    report = ops.apply_ops(late, CHUNKED)
    assert any("first forward" in note for note in report.notes)
    late.to_empty(device="cpu")
    late.load_state_dict(model.state_dict())
    late.model.rotary_emb = model.model.rotary_emb
    with pytest.raises(UnsupportedFeatureError, match="'__getitem__' on the logits, in the forward of Own"):
        late(input_ids=IDS, labels=LABELS)
    assert torch.equal(late(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_model_that_never_calls_loss_function_is_refused_without_running_it() -> None:
    with torch.device("meta"):
        model = transformers.BartForCausalLM(bart())
    with pytest.raises(UnsupportedFeatureError, match="none of its methods calls loss_function"):
        ops.apply_ops(model, CHUNKED)


@pytest.mark.parametrize("what", ["smoothed", "halved", "broken"])
def test_a_loss_that_is_another_is_refused(what: str) -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        if what == "smoothed":
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
            )
        if what == "halved":
            return causal_loss(logits, labels, vocab_size, **kwargs) / 2
        raise RuntimeError("not today")

    model = build("llama")
    model.loss_function = loss

    with left_as_it_was(model), pytest.raises(UnsupportedFeatureError, match="its loss_function (differs|failed)"):
        ops.apply_ops(model, CHUNKED)


class Unpacking(transformers.LlamaForCausalLM):
    """A model that unpacks what its loss function returns, as VeOmni's generated modeling files do."""

    beside: tuple[Any, ...]

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden_states = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        logits, loss = self.lm_head(hidden_states), None
        if labels is not None:
            loss, *beside = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                hidden_states=hidden_states,
                weights=self.lm_head.weight,
                **{name: value for name, value in kwargs.items() if name != "use_cache"},
            )
            self.beside = tuple(beside)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def flat_logits_beside(logits: Any, labels: Any, vocab_size: int, return_log_probs: bool = False, **kwargs: Any) -> Any:
    if return_log_probs:
        return None, None, logits.log_softmax(-1)
    return causal_loss(logits, labels, vocab_size, **kwargs), logits.view(-1, vocab_size), None


def logits_beside(logits: Any, labels: Any, vocab_size: int, *, scale: float = 1.0, **kwargs: Any) -> Any:
    return causal_loss(logits, labels, vocab_size, **kwargs) * kwargs.pop("factor", scale), logits


def unpacking(loss_function: Any) -> Any:
    torch.manual_seed(0)
    model = randomize(Unpacking(OPS_MODELS["llama"]())).train()
    model.loss_function = loss_function
    return model


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 5}], ids=["mean", "items"])
@pytest.mark.parametrize("loss_function", [flat_logits_beside, functools.partial(logits_beside, scale=1.0)])
def test_a_loss_function_that_returns_a_tuple_still_does(loss_function: Any, options: dict[str, Any]) -> None:
    model = unpacking(loss_function)
    expected, gradients = step(model, **options)
    before = model.beside
    with torch.no_grad():
        model(input_ids=IDS, labels=LABELS)
    without_gradients = model.beside

    with ops.apply_ops(model, CHUNKED):
        found, own = step(model, **options)
        torch.testing.assert_close(found.loss, expected.loss)
        assert_same(own, gradients, 1e-4)
        assert isinstance(found.logits, LazyLogits)
        assert model.beside[0] is found.logits
        assert model.beside[1:] == before[1:]
        with torch.no_grad():
            evaluated = model(input_ids=IDS, labels=LABELS)
        assert torch.equal(model.beside[0], without_gradients[0])
        torch.testing.assert_close(evaluated.loss, model(input_ids=IDS, labels=LABELS).loss)
        logits = torch.randn(2, 9, VOCAB)
        unpickled = pickle.loads(pickle.dumps(model.loss_function))(logits, LABELS, VOCAB)
        assert torch.equal(unpickled[1], loss_function(logits, LABELS, VOCAB)[1])


@pytest.mark.parametrize("name", ["return_log_probs", "scale", "factor"])
def test_an_argument_for_something_else_than_the_loss_is_refused(name: str) -> None:
    model = unpacking(flat_logits_beside if name == "return_log_probs" else functools.partial(logits_beside, scale=1.0))
    with ops.apply_ops(model, CHUNKED):
        assert model(input_ids=IDS, labels=LABELS, **{name: None}).loss is not None
        for context in (torch.enable_grad, torch.no_grad):
            with (
                context(),
                pytest.raises(UnsupportedFeatureError, match=f"{name}=, which the model's own loss function reads"),
            ):
                model(input_ids=IDS, labels=LABELS, **{name: True})
    if name == "return_log_probs":
        assert model(input_ids=IDS, labels=LABELS, return_log_probs=True).loss is None


def test_an_argument_that_changes_a_loss_function_s_loss_is_refused() -> None:
    def smoothed(logits: Any, labels: Any, vocab_size: int, label_smoothing: float = 0.0, **kwargs: Any) -> Any:
        loss = causal_loss(logits, labels, vocab_size, **{k: v for k, v in kwargs.items() if k != "class_weights"})
        weights = kwargs.get("class_weights")
        return loss + label_smoothing * logits.float().square().mean() + (0 if weights is None else weights.sum())

    model = build("llama")
    model.loss_function = smoothed
    eager = model(input_ids=IDS, labels=LABELS).loss
    ops.apply_ops(model, CHUNKED)

    torch.testing.assert_close(model(input_ids=IDS, labels=LABELS, class_weights=None).loss, eager)
    for name, value in {"label_smoothing": 0.1, "class_weights": torch.ones(VOCAB)}.items():
        with pytest.raises(UnsupportedFeatureError, match=f"{name}=, which the model's own loss function reads"):
            model(input_ids=IDS, labels=LABELS, **{name: value})


def test_a_loss_function_that_returns_more_than_the_logits_is_refused() -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        return causal_loss(logits, labels, vocab_size, **kwargs), {"entropy": logits.sum()}

    model = unpacking(loss)
    with left_as_it_was(model), pytest.raises(UnsupportedFeatureError, match="returns a builtins.dict beside the loss"):
        ops.apply_ops(model, CHUNKED)

    model = unpacking(lambda logits, *args, **kwargs: (causal_loss(logits, *args, **kwargs), logits * 2))
    with left_as_it_was(model), pytest.raises(UnsupportedFeatureError, match="returns a torch.Tensor beside the loss"):
        ops.apply_ops(model, CHUNKED)


def test_a_loss_function_that_is_called_without_logits_is_refused() -> None:
    class Fused(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            hidden_states = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
            if labels is None:
                return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden_states))
            loss = self.loss_function(
                logits=None, labels=labels, vocab_size=self.config.vocab_size, hidden_states=hidden_states
            )
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss)

    def loss(logits: Any, labels: Any, vocab_size: int, hidden_states: Any = None, **kwargs: Any) -> Any:
        logits = model.lm_head(hidden_states) if logits is None else logits
        return causal_loss(logits, labels, vocab_size, **kwargs)

    model = Fused(OPS_MODELS["llama"]())
    model.loss_function = loss
    with (
        left_as_it_was(model),
        pytest.raises(UnsupportedFeatureError, match="the loss function, which the model calls without logits"),
    ):
        ops.apply_ops(model, CHUNKED)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    model = build("llama")
    model.lm_head = Scaled(64, VOCAB, bias=False)

    with (
        left_as_it_was(model),
        pytest.raises(UnsupportedFeatureError, match="its head is a .*Scaled, and not a linear layer"),
    ):
        ops.apply_ops(model, CHUNKED)


def test_a_classifier_s_loss_is_of_another_variant() -> None:
    model = transformers.AutoModelForSequenceClassification.from_config(OPS_MODELS["llama"]())

    with (
        left_as_it_was(model),
        pytest.raises(UnsupportedFeatureError, match="no language modelling head.*SequenceClassification"),
    ):
        ops.apply_ops(model, CHUNKED)
    assert ops.apply_ops(model, ops.OpsConfig(rms_norm_implementation=PLAIN)).bindings


def test_a_part_without_a_loss_is_told_to_have_none() -> None:
    model = transformers.AutoModel.from_config(OPS_MODELS["llama"]())

    report = ops.apply_ops(model, EVERYTHING)

    assert "cross_entropy_loss: this model has none" in report.notes
    assert "load_balancing_loss: this model has none" in report.notes


def test_a_part_that_is_bound_otherwise_is_refused() -> None:
    model = build("llama")
    inner = ops.apply_ops(model.model, ops.OpsConfig(rms_norm_implementation=PLAIN))

    with left_as_it_was(model), pytest.raises(ValueError, match="model has the kernels of"):
        ops.apply_ops(model, EVERYTHING)
    inner.undo()
    assert ops.apply_ops(model, EVERYTHING).active


def test_a_part_of_a_bound_model_keeps_what_it_has() -> None:
    model = build("llama")
    report = ops.apply_ops(model, config_for("llama"))
    other = ops.register_kernel("rms_norm", "standard", "other")(lambda: None)

    try:
        for part in (model.model, copy.deepcopy(model.model)):
            with (
                left_as_it_was(part),
                pytest.raises(ValueError, match="has the kernel 'plain_torch' for rms_norm already"),
            ):
                ops.apply_ops(part, ops.OpsConfig(rms_norm_implementation="other"))
    finally:
        ops.unregister_kernel("rms_norm", "standard", "other")
    assert other() is None
    report.undo()
    inner = ops.apply_ops(model.model, config_for("llama"))
    outer = ops.apply_ops(model, config_for("llama"))
    with pytest.warns(UserWarning, match="undo that one"):
        inner.undo()
    assert isinstance(step(model)[0].logits, LazyLogits)
    outer.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_changes_its_logits_in_place_is_refused_however_it_is_bound() -> None:
    class Masking(transformers.LlamaForCausalLM):
        """Changes its logits in place, like Chameleon, which masks image tokens."""

        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            outputs = self.model(input_ids=input_ids)
            logits = self.lm_head(outputs.last_hidden_state)
            logits[:, :, [90, 91]] = -10.0
            loss = self.loss_function(logits, labels, self.config.vocab_size) if labels is not None else None
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        model = Masking(OPS_MODELS["llama"]()).to(dtype)
        with (
            left_as_it_was(model),
            pytest.raises(UnsupportedFeatureError, match="'__setitem__' on the logits, in the forward of Masking"),
        ):
            ops.apply_ops(model, CHUNKED)
    with ops.use(CHUNKED), torch.device("meta"):
        late = Masking(OPS_MODELS["llama"]())
    late.to_empty(device="cpu")
    late.load_state_dict(Masking(OPS_MODELS["llama"]()).state_dict())
    late.model.rotary_emb = Masking(OPS_MODELS["llama"]()).model.rotary_emb
    with pytest.raises(UnsupportedFeatureError, match="'__setitem__' on the logits, in the forward of Masking"):
        late(input_ids=IDS, labels=LABELS)


def test_hooks_of_the_head_run_once() -> None:
    model = build("llama")
    ops.apply_ops(model, CHUNKED)
    calls = []

    def double(module: Any, args: Any) -> Any:
        calls.append(1)
        return (args[0] * 2,)

    model.lm_head.register_forward_pre_hook(double)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    bound = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    seen = len(calls)
    logits = bound.logits.compute()
    report = ops.applied(model)
    assert report is not None
    report.undo()
    eager = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)

    assert seen == 1
    torch.testing.assert_close(bound.loss, eager.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, eager.logits)


def test_logits_read_late_are_those_of_the_forward_or_an_error() -> None:
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ops.apply_ops(model, CHUNKED):
        bound = model(input_ids=IDS, labels=LABELS)
        other = {name: parameter * 2 for name, parameter in model.named_parameters()}
        doubled = torch.func.functional_call(model, other, (), {"input_ids": IDS, "labels": LABELS})
    torch.testing.assert_close(bound.logits.compute(), model(input_ids=IDS).logits)  # the kernels are undone by now
    expected = torch.func.functional_call(model, other, (), {"input_ids": IDS, "labels": LABELS})
    torch.testing.assert_close(doubled.logits.compute(), expected.logits)
    ops.apply_ops(model, CHUNKED)
    bound = model(input_ids=IDS, labels=LABELS)
    bound.loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the head's weight changed after the forward.*before the optimizer's step"):
        bound.logits.compute()


def test_labels_for_another_number_of_tokens_are_refused() -> None:
    model = build("llama")
    ops.apply_ops(model, CHUNKED)

    with pytest.raises(ValueError, match="labels for 18 tokens, and hidden states of 6"):
        model(input_ids=IDS, labels=LABELS, logits_to_keep=3)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.int32, torch.int16, torch.bool, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("over", ["hidden states", "logits"])
def test_labels_are_refused_and_taken_as_eager_does(dtype: torch.dtype, over: str) -> None:
    model = build("llama")
    labels = IDS.to(dtype)
    try:
        eager = model(input_ids=IDS, shift_labels=labels, labels=labels).loss
    except (TypeError, ValueError, RuntimeError, IndexError):
        eager = None
    if over == "logits":
        ops.register_kernel("cross_entropy_loss", "causal_logits", "of_logits")(
            lambda: torch.nn.functional.cross_entropy
        )
    try:
        config = ops.OpsConfig(cross_entropy_loss_implementation="of_logits" if over == "logits" else "chunk_loss")
        ops.apply_ops(model, config)
        if eager is None:
            with pytest.raises(TypeError, match="labels are of int64 or uint8"):
                model(input_ids=IDS, shift_labels=labels, labels=labels)
        else:
            torch.testing.assert_close(model(input_ids=IDS, shift_labels=labels, labels=labels).loss, eager)
    finally:
        if over == "logits":
            ops.unregister_kernel("cross_entropy_loss", "causal_logits", "of_logits")


def test_a_batch_without_labels_that_count_moves_nothing() -> None:
    model = build("llama")
    ops.apply_ops(model, CHUNKED)

    outputs, gradients = step(model, labels=torch.full_like(LABELS, -100))

    assert outputs.loss.isnan()
    assert all(not gradient.any() for gradient in gradients.values())


def test_two_threads_may_run_one_model() -> None:
    model = build("llama").eval()
    ops.apply_ops(model, CHUNKED)
    expected = model(input_ids=IDS, labels=LABELS).loss
    barrier, found = threading.Barrier(3), []
    model.model.register_forward_hook(lambda *_: [barrier.wait(30)].clear())

    def run(labels: Any) -> None:
        found.append(model(input_ids=IDS, labels=labels))

    threads = [threading.Thread(target=run, args=(labels,)) for labels in (LABELS, LABELS, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [type(outputs.logits) for outputs in found].count(LazyLogits) == 2
    for outputs in found:
        assert outputs.loss is None or torch.equal(outputs.loss, expected)


def test_a_forward_that_is_replaced_already_is_refused() -> None:
    model = build("llama")
    model.model.norm.forward = lambda x: x

    with (
        left_as_it_was(model),
        pytest.raises(UnsupportedFeatureError, match="model.norm .*its forward has been replaced by .*lambda"),
    ):
        ops.apply_ops(model, ops.OpsConfig(rms_norm_implementation=PLAIN))


def test_what_is_no_model_is_refused() -> None:
    for thing in (None, "llama", OPS_MODELS["llama"]()):
        with pytest.raises(TypeError, match="must be a torch.nn.Module"):
            ops.apply_ops(thing, CHUNKED)
    with pytest.raises(TypeError, match="must be an OpsConfig"):
        ops.apply_ops(build("llama"), {"rms_norm_implementation": PLAIN})  # type: ignore[arg-type]


def test_a_kernel_that_fails_to_import_changes_nothing() -> None:
    @ops.register_kernel("swiglu_mlp", "standard", "broken", install="Mend it.")
    def factory() -> Any:
        raise ImportError("no such library")

    model = build("llama")
    try:
        with left_as_it_was(model), pytest.raises(KernelUnavailableError, match="no such library.*Mend it"):
            ops.apply_ops(model, ops.OpsConfig(**{**VALUES, "swiglu_mlp_implementation": "broken"}))
    finally:
        ops.unregister_kernel("swiglu_mlp", "standard", "broken")


def test_a_composite_model_is_bound_in_its_parts() -> None:
    model = transformers.LlavaForConditionalGeneration(llava())
    eager = model(input_ids=IDS, labels=LABELS).loss

    report = ops.apply_ops(model, ops.OpsConfig(**VALUES))

    torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, eager, rtol=1e-5, atol=0)
    assert {binding.op for binding in report.bindings} == {
        "rms_norm",
        "swiglu_mlp",
        "rotary_pos_emb",
        "cross_entropy_loss",
    }

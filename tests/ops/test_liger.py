"""`use_liger_kernel` and `liger_support` on the CPU: Liger's Triton kernels are bound but not run (tests/gpu runs them).

Most tests use the real liger-kernel and an environment with a GPU; they are skipped where it is missing or doesn't import. The errors
are tested everywhere.
"""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny import CAUSAL_LMS, VOCAB, randomize

from kernel_compat import Environment, KernelUnavailableError, SeamError, UnsupportedFeatureError
from kernel_compat.environment import Device
from kernel_compat.models import LigerSupport, liger_support, use_liger_kernel, use_sdpa_backends
from kernel_compat.patching import swap
from kernel_compat_ops import registry
from kernel_compat_ops.instances import ops_of

try:
    from liger_kernel.transformers import monkey_patch
except ImportError as error:
    monkey_patch = None
    why = str(error)
else:
    why = ""

real = pytest.mark.skipif(monkey_patch is None, reason=f"liger-kernel doesn't import: {why}")

NAMES = ("llama", "qwen2_window", "mistral_window", "gemma2_softcap")
ABSENT = object()


def build(name: str = "llama") -> Any:
    model = transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS[name](), attn_implementation="eager")
    return randomize(model).eval()


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 3 + 12)[None] % VOCAB
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return result


def by_liger(module: Any) -> bool:
    """Whether all of a module's ops are bound to Liger's kernels."""
    return set(ops_of(module).values()) == {"liger_kernel"}


def is_patched(model: Any) -> bool:
    """Whether the model is patched; asserts that all of its parts are, or none."""
    layers = model.model.layers
    parts = [
        model,
        model.model.norm,
        *(p for layer in layers for p in (layer.mlp, layer.self_attn, layer.input_layernorm)),
    ]
    patched = {by_liger(part) for part in parts}
    assert len(patched) == 1
    return patched.pop()


class Scene:
    """A snapshot of everything that Liger could change: some models, and the imported modules of transformers and torch.nn."""

    def __init__(self, *models: Any) -> None:
        self.models = models
        names = [n for n in sys.modules if f"{n}.".startswith(("transformers.", "torch.nn."))]
        self.modules = [sys.modules[n] for n in ("torch", *names)]
        self.before = self.look()

    def look(self) -> dict[Any, Any]:
        seen: dict[Any, Any] = {}
        for number, model in enumerate(self.models):
            for name, module in model.named_modules():
                seen[number, name, "class"] = type(module)
                for attribute, value in vars(module).items():
                    seen[number, name, attribute] = value
                    if isinstance(value, dict):
                        seen |= {(number, name, attribute, entry): each for entry, each in value.items()}
                        seen[number, name, attribute, "order"] = tuple(value)
        for module in self.modules:
            if not issubclass(type(module), ModuleType):
                continue
            for name, value in list(vars(module).items()):
                seen[module.__name__, name] = value
                if issubclass(type(value), type) and vars(value).get("__module__") == module.__name__:
                    seen[value, "names"] = (value.__name__, value.__qualname__)
                    seen |= {(value, attribute): each for attribute, each in vars(value).items()}
        return seen

    def changes(self) -> list[Any]:
        now = self.look()
        return [
            key
            for key in self.before.keys() | now.keys()
            if self.before.get(key, ABSENT) is not now.get(key, ABSENT)
            and not (
                isinstance(key[-1], str) and key[-1] in ("order", "names") and self.before.get(key) == now.get(key)
            )
            and not self.is_an_import(key, now)
        ]

    def is_an_import(self, key: Any, now: dict[Any, Any]) -> bool:
        """transformers imports its parts on first access and keeps them as attributes."""
        if key in self.before or not isinstance(key[0], str):
            return str(key[-1]).endswith(("__annotations__", "__slotnames__", "__warningregistry__", "_cached_value"))
        return type(sys.modules[key[0]]) is not ModuleType or isinstance(now[key], ModuleType)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a GPU, as far as the registry of kernels can see."""
    found = registry.detect()
    environment = Environment(packages=found.packages, devices=(Device("NVIDIA H200", (9, 0)),))
    monkeypatch.setattr(registry.default, "detect", lambda: environment)


@pytest.fixture(autouse=True)
def the_process_stays_as_it_is() -> Iterator[None]:
    """No test changes transformers or torch, only its models."""
    from transformers.models.llama import modeling_llama

    owners = (modeling_llama, modeling_llama.LlamaRMSNorm, torch.nn, torch.nn.functional)
    before = [dict(vars(owner)) for owner in owners]
    yield
    for owner, names in zip(owners, before, strict=True):
        assert {name for name in names if vars(owner).get(name) is not names[name]} == set()
        assert not [name for name in vars(owner).keys() - names.keys() if "kernel_compat" in name or "liger" in name]


# With the real liger-kernel.


@real
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    model, other = build(name), build(name)
    expected = logits(model)
    scene = Scene(model, other)
    handle = use_liger_kernel(model)
    assert handle.active
    assert is_patched(model)
    assert not is_patched(other)
    assert {key[0] for key in scene.changes()} == {0}  # only the first model changed
    handle.undo()
    assert not handle.active
    assert scene.changes() == []
    assert torch.equal(logits(model), expected)


@real
def test_the_teacher_of_a_distillation_keeps_its_own_classes() -> None:
    """Whether the teacher is built before or after the student is patched, and also after the student is undone."""
    student, early = build(), build()
    expected = logits(early)
    with use_liger_kernel(student):
        late = build()
        for teacher in (early, late):
            assert not is_patched(teacher)
            kinds = {type(module).__module__ for module in teacher.modules()}
            assert not any("liger" in kind for kind in kinds)
            assert torch.equal(logits(teacher), expected)
        with use_liger_kernel(late, fused_linear_cross_entropy=False):
            assert by_liger(late.model.norm)
            assert is_patched(student)
        assert is_patched(student)
    assert torch.equal(logits(late), expected)


@real
def test_the_options_are_ligers() -> None:
    model = build()
    scene = Scene(model)
    with use_liger_kernel(model, rope=False, fused_linear_cross_entropy=False, swiglu=False):
        assert by_liger(model.model.norm)
        assert not any(map(by_liger, (model, model.model.layers[0].mlp, model.model.layers[0].self_attn)))
    with use_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=False):
        assert not by_liger(model)
        assert ops_of(model, "_loss_function") == {"cross_entropy_loss": "liger_cross_entropy"}
    assert scene.changes() == []


@real
def test_an_option_that_liger_does_not_have() -> None:
    model = build()
    scene = Scene(model)
    with pytest.raises(ValueError, match=r"no option geglu, ropes .*'llama': .*rms_norm, rope, swiglu"):
        use_liger_kernel(model, ropes=True, geglu=True)
    with pytest.raises(ValueError, match="cannot both be True"):
        use_liger_kernel(model, cross_entropy=True)
    assert scene.changes() == []


@real
def test_a_model_type_that_liger_does_not_have() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=VOCAB))
    supported = ", ".join(sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN))
    with pytest.raises(UnsupportedFeatureError, match="does not support the model type 'gpt2'") as caught:
        use_liger_kernel(model)
    assert supported in str(caught.value)
    found = liger_support(model)
    assert not found
    assert found.reasons == (str(caught.value),)
    assert found.options is None


@real
def test_support_is_answered_without_raising() -> None:
    model = build()
    scene = Scene(model)
    assert liger_support(model) == LigerSupport(True, ())
    for wrong, reason in ((None, "not NoneType"), (torch.nn.Linear(2, 2), "no config.model_type")):
        found = liger_support(wrong)
        assert not found.supported
        assert reason in found.reasons[0]
    assert "no option ropes" in liger_support(model, ropes=True).reasons[0]
    config = CAUSAL_LMS["llama"]()
    config.hidden_act = "gelu"
    other = transformers.LlamaModel(config)
    found = liger_support(other)
    assert sorted(reason.rpartition("Pass ")[2] for reason in found.reasons) == [
        "fused_linear_cross_entropy=False.",
        "swiglu=False.",
    ]
    assert found.options == {"swiglu": False, "fused_linear_cross_entropy": False}
    again = liger_support(other, rms_norm=False, **found.options)
    assert again
    assert again.options == {"rms_norm": False, **found.options}
    use_liger_kernel(other, **again.options).undo()
    with use_liger_kernel(model):
        assert liger_support(model)
        assert "is patched already" in liger_support(model, rope=False).reasons[0]
    assert scene.changes() == []


class Interrupt(KeyboardInterrupt):
    """An interrupt that only this test raises."""


@real
@pytest.mark.parametrize("error", [RuntimeError, Interrupt])
@pytest.mark.parametrize("call", [1, 4, 9])
def test_failing_half_way(monkeypatch: pytest.MonkeyPatch, call: int, error: type[BaseException]) -> None:
    model, other = build(), build()
    expected = logits(model)
    undisturbed = use_liger_kernel(other)
    scene = Scene(model, other)
    calls = 0
    original = swap._write

    def fail(*assignment: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("half way")
        original(*assignment)

    with monkeypatch.context() as patched:
        patched.setattr(swap, "_write", fail)
        with pytest.raises(error, match="half way"):
            use_liger_kernel(model)
    assert calls == 2 * call - 1  # each change before the failure was restored
    assert scene.changes() == []
    undisturbed.undo()
    assert torch.equal(logits(model), expected)
    with use_liger_kernel(model):  # the failure doesn't block a second try
        assert is_patched(model)


@real
@pytest.mark.parametrize("first_to_go", [0, 1])
def test_two_models_of_one_type(first_to_go: int) -> None:
    models = [build(), build()]
    scene = Scene(*models)
    handles = [use_liger_kernel(models[0]), use_liger_kernel(models[1], cross_entropy=False)]
    handles[first_to_go].undo()
    assert not is_patched(models[first_to_go])
    assert is_patched(models[1 - first_to_go])
    handles[1 - first_to_go].undo()
    assert scene.changes() == []


@real
def test_again() -> None:
    model = build()
    scene = Scene(model)
    first = use_liger_kernel(model)
    patched = Scene(model)
    second = use_liger_kernel(model, rope=True)  # the default
    assert patched.changes() == []
    with pytest.raises(ValueError, match="patched already, with .*rope=True.* before patching it with .*rope=False"):
        use_liger_kernel(model, rope=False)
    first.undo()
    first.undo()
    assert patched.changes() == []
    second.undo()
    assert scene.changes() == []
    with use_liger_kernel(model, fused_linear_cross_entropy=False):
        assert by_liger(model.model.norm)
    assert scene.changes() == []


@real
def test_what_others_patched_since_is_theirs() -> None:
    model = build()
    norm, other_norm = model.model.norm, model.model.layers[0].input_layernorm

    def forward(self: Any, hidden: Any) -> Any:
        raise NotImplementedError

    handle = use_liger_kernel(model)
    norm.forward = mine = MethodType(forward, norm)
    with pytest.warns(UserWarning, match="forward of a LlamaRMSNorm has been replaced"):
        handle.undo()
    assert norm.forward is mine
    assert not by_liger(other_norm)


@real
def test_ligers_own_patch_from_before_is_refused() -> None:
    model = build()
    for layer in model.model.layers:
        monkey_patch._patch_swiglu_module(
            layer.mlp, importlib.import_module("liger_kernel.transformers").LigerSwiGLUMLP
        )
    scene = Scene(model)
    with pytest.raises(UnsupportedFeatureError, match="replaced by liger_kernel.*Pass swiglu=False"):
        use_liger_kernel(model)
    with use_liger_kernel(model, swiglu=False):
        assert by_liger(model.model.norm)
    assert scene.changes() == []


@real
def test_a_model_that_is_collected_takes_its_patch_along() -> None:
    model = build()
    handle = use_liger_kernel(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None  # freed although the handle exists
    handle.undo()


@real
@pytest.mark.parametrize("is_module", [True, False])
def test_a_peft_model(is_module: bool) -> None:
    class Wrapper(torch.nn.Module if is_module else object):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.base_model = model

        def get_base_model(self) -> Any:
            return self.base_model

    model = build()
    scene = Scene(model)
    handle = use_liger_kernel(Wrapper(model))
    assert is_patched(model)
    with use_liger_kernel(model):
        pass
    assert is_patched(model)
    handle.undo()
    assert scene.changes() == []


@real
def test_parts_of_a_patched_model() -> None:
    model = build()
    scene = Scene(model)
    with use_liger_kernel(model):
        patched = Scene(model)
        with pytest.raises(ValueError, match="part of this LlamaModel has Liger's kernels already"):
            use_liger_kernel(model.model, fused_linear_cross_entropy=False)
        assert patched.changes() == []
    with (
        use_liger_kernel(model.model, fused_linear_cross_entropy=False),
        pytest.raises(ValueError, match="part of this LlamaForCausalLM has Liger's kernels already"),
    ):
        use_liger_kernel(model)
    assert scene.changes() == []


@real
def test_a_copy_has_a_patch_of_its_own() -> None:
    model = build()
    scene, expected = Scene(model), logits(model)
    handle = use_liger_kernel(model)
    twin, shallow = copy.deepcopy(model), copy.copy(model)
    assert is_patched(twin)
    assert twin.forward.__self__ is twin
    with pytest.raises(ValueError, match="already"):
        use_liger_kernel(shallow)
    handle.undo()
    assert scene.changes() == []
    assert is_patched(twin)
    use_liger_kernel(twin).undo()
    assert not is_patched(twin)
    assert torch.equal(logits(twin), expected)


@real
def test_a_pickled_model_has_its_class_s_code() -> None:
    model = build()
    expected = logits(model)
    with use_liger_kernel(model):
        other = pickle.loads(pickle.dumps(model))
    assert not is_patched(other)
    assert torch.equal(logits(other), expected)
    with use_liger_kernel(other):
        assert is_patched(other)


@real
def test_models_without_a_language_modelling_head() -> None:
    config = CAUSAL_LMS["llama"]()
    for model in (transformers.LlamaForSequenceClassification(config), transformers.LlamaModel(config)):
        scene = Scene(model)
        with pytest.raises(
            UnsupportedFeatureError, match="no language modelling head.*fused_linear_cross_entropy=False"
        ):
            use_liger_kernel(model)
        assert scene.changes() == []
        with use_liger_kernel(model, fused_linear_cross_entropy=False):
            assert by_liger(getattr(model, "model", model).norm)
        assert scene.changes() == []


def halved(self: Any, *args: Any, **options: Any) -> Any:
    out = transformers.LlamaForCausalLM.forward(self, *args, **options)
    out.logits = out.logits * 0.5
    return out


@real
@pytest.mark.parametrize("whose", ["a subclass", "an instance"])
def test_a_forward_of_another_s_is_called_or_refused(whose: str) -> None:
    subclass = type("Mine", (transformers.LlamaForCausalLM,), {"forward": halved})
    model = randomize((subclass if whose == "a subclass" else transformers.LlamaForCausalLM)(CAUSAL_LMS["llama"]()))
    model.eval()
    if whose == "an instance":
        model.forward = MethodType(halved, model)
    expected, scene = logits(model), Scene(model)
    if whose == "a subclass":  # its signature doesn't show the labels
        with pytest.raises(UnsupportedFeatureError, match="Mine.*Pass fused_linear_cross_entropy=False"):
            use_liger_kernel(model)
        assert scene.changes() == []
    fused = whose == "an instance"
    with use_liger_kernel(model, rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=fused):
        assert torch.equal(logits(model), expected)
    assert scene.changes() == []


def own_llama() -> type:
    """A model class with Llama's model type and parts and scaled logits, as in remote code."""

    class OwnForCausalLM(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = transformers.LlamaModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(self, input_ids: Any, **options: Any) -> Any:
            hidden = self.model(input_ids, **options)[0]
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden) / 8)

    return OwnForCausalLM


@real
def test_a_class_of_its_own_with_the_model_type() -> None:
    model = randomize(own_llama()(CAUSAL_LMS["llama"]())).eval()
    expected, scene = logits(model), Scene(model)
    with pytest.raises(UnsupportedFeatureError, match="OwnForCausalLM.*fused_linear_cross_entropy=False"):
        use_liger_kernel(model)
    assert scene.changes() == []
    assert torch.equal(logits(model), expected)
    with use_liger_kernel(model, fused_linear_cross_entropy=False):  # its parts are transformers' own classes
        assert by_liger(model.model.norm)
    assert scene.changes() == []


@real
@pytest.mark.parametrize(
    ("name", "values", "option"),
    [
        ("llama", {"hidden_act": "gelu"}, "swiglu"),
        ("llama", {"hidden_act": "relu"}, "swiglu"),
        ("llama", {"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}, "swiglu"),
        ("mistral_window", {"hidden_act": "gelu"}, "swiglu"),
        ("gemma2_softcap", {"hidden_activation": "silu"}, "geglu"),
        ("gemma2_softcap", {"hidden_activation": "gelu"}, "geglu"),  # Liger has only gelu's tanh approximation
    ],
)
def test_another_activation(name: str, values: dict[str, Any], option: str) -> None:
    config = CAUSAL_LMS[name]()
    for key, value in values.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    scene = Scene(model)
    with pytest.raises(UnsupportedFeatureError, match=rf"mlp.*(differs from|computes) .*Pass {option}=False"):
        use_liger_kernel(model)
    assert scene.changes() == []
    with use_liger_kernel(model, **{option: False}):
        assert by_liger(model.model.norm)


@real
def test_a_vision_tower_with_another_activation() -> None:
    config = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    if config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        pytest.skip("this release of liger-kernel has nothing for Pixtral")
    with pytest.raises(UnsupportedFeatureError, match="PixtralMLP.*differs.*swiglu"):
        use_liger_kernel(transformers.PixtralVisionModel(config), rope=False)
    config.hidden_act = "silu"
    with use_liger_kernel(transformers.PixtralVisionModel(config), rope=False) as handle:
        assert handle.active


class Halved(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = inner.weight, inner.variance_epsilon

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight / 2


class HalvedRMSNorm(Halved):
    pass


@real
def test_a_norm_with_another_formula() -> None:
    model = build()
    model.model.norm = Halved(model.model.norm)
    with use_liger_kernel(model):  # not proven, so not replaced
        assert not by_liger(model.model.norm)
        assert by_liger(model.model.layers[0].input_layernorm)
    model.model.norm = HalvedRMSNorm(model.model.norm)
    scene = Scene(model)
    with pytest.raises(UnsupportedFeatureError, match="HalvedRMSNorm.*it differs .*Pass rms_norm=False"):
        use_liger_kernel(model)
    assert scene.changes() == []


@real
def test_the_loss_of_a_head_with_a_bias_and_another_loss() -> None:
    biased, own = build(), build()
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    with use_liger_kernel(biased):
        assert by_liger(biased)
    own.loss_function = lambda *args, **options: None
    scene = Scene(own)
    with pytest.raises(UnsupportedFeatureError, match="its loss_function .*fused_linear_cross_entropy=False"):
        use_liger_kernel(own)
    assert scene.changes() == []
    with use_liger_kernel(own, fused_linear_cross_entropy=False):
        assert by_liger(own.model.norm)


@real
def test_experts_under_swiglu() -> None:
    """Before transformers 5 each expert is an MLP module; since then the fused mixture-of-experts kernel is bound."""
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, vocab_size=VOCAB,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    with use_liger_kernel(model, fused_linear_cross_entropy=False):
        found = {value for module in model.modules() for value in ops_of(module).items()}
    bound = (
        ("moe", "fused_triton")
        if int(transformers.__version__.partition(".")[0]) >= 5
        else ("swiglu_mlp", "liger_kernel")
    )
    assert bound in found


@real
@pytest.mark.parametrize("option", ["cross_entropy", "relu_squared"])
def test_every_option_of_liger_is_bound_or_named(option: str) -> None:
    config = transformers.NemotronConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
    )
    if config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        pytest.skip("this release of liger-kernel has nothing for Nemotron")
    model = transformers.NemotronForCausalLM(config)
    off = {"relu_squared": False, "fused_linear_cross_entropy": False}
    if option == "relu_squared":
        with pytest.raises(UnsupportedFeatureError, match="relu_squared=False"):
            use_liger_kernel(model, **{**off, option: True})
    else:
        with use_liger_kernel(model, **{**off, option: True}):
            assert ops_of(model, "_loss_function")


@real
def test_the_hooks_of_accelerate() -> None:
    """accelerate hooks every module of a model that is quantized or spread over several devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = build()
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook())
    scene = Scene(model)
    with use_liger_kernel(model):
        assert is_patched(model)
    assert scene.changes() == []


@real
def test_a_compiled_model() -> None:
    with pytest.raises(TypeError, match="compiled already"):
        use_liger_kernel(torch.compile(build()))


@real
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.detect()
    monkeypatch.setattr(registry.default, "detect", lambda: Environment(packages=found.packages))
    model = build()
    scene = Scene(model)
    with pytest.raises(KernelUnavailableError, match="needs a CUDA device, and none is visible"):
        use_liger_kernel(model)
    assert scene.changes() == []
    found_here = liger_support(model)
    assert not found_here
    assert found_here.options is None


@real
def test_threads() -> None:
    models = [build() for _ in range(4)]
    scene = Scene(*models)
    start = threading.Barrier(len(models))
    errors: list[BaseException] = []

    def work(model: Any) -> None:
        try:
            start.wait()
            for _ in range(3):
                with use_liger_kernel(model):
                    assert is_patched(model)
                assert not is_patched(model)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[model]) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert scene.changes() == []


# Without liger-kernel, or with a stand-in.


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Returns a function that writes a stand-in liger_kernel whose monkey_patch module has the given source."""
    names = [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]
    kept = {name: sys.modules.pop(name) for name in names}
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> None:
        folder = tmp_path / "liger_kernel" / "transformers"
        folder.mkdir(parents=True)
        for path in (folder.parent / "__init__.py", folder / "__init__.py"):
            path.touch()
        (folder / "monkey_patch.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    model = build()
    scene = Scene(model)
    with pytest.raises(
        KernelUnavailableError, match="liger-kernel is not installed.*pip install liger-kernel"
    ) as caught:
        use_liger_kernel(model)
    assert caught.value.kernel == "liger_kernel"
    assert scene.changes() == []


@pytest.mark.parametrize(
    "error", ["ImportError('liger-kernel requires transformers >= 9')", "RuntimeError('no triton driver')"]
)
def test_that_does_not_import(stand_in: Callable[[str], None], error: str) -> None:
    stand_in(f"raise {error}")
    with pytest.raises(KernelUnavailableError, match=r"does not import \(\w+Error: .*(>= 9|driver)") as caught:
        use_liger_kernel(build())
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("source", "found"),
    [("", "found nothing of that name"), ("MODEL_TYPE_TO_APPLY_LIGER_FN = ['llama']", "found list")],
)
def test_with_another_table(stand_in: Callable[[str], None], source: str, found: str) -> None:
    stand_in(source)
    with pytest.raises(SeamError, match=f"MODEL_TYPE_TO_APPLY_LIGER_FN .*liger-kernel.*{found}"):
        use_liger_kernel(build())


def test_what_is_no_model(stand_in: Callable[[str], None]) -> None:
    stand_in("MODEL_TYPE_TO_APPLY_LIGER_FN = {}")
    nameless = torch.nn.Linear(2, 2)
    nameless.config = transformers.PretrainedConfig()
    for model, message in (
        (None, "not NoneType"),
        ("llama", "not str"),
        (torch.nn.Linear(2, 2), "Linear has no config.model_type"),
        (nameless, "Linear has no config.model_type"),
    ):
        with pytest.raises(TypeError, match=message):
            use_liger_kernel(model)


def test_the_list_of_model_types_is_sorted(stand_in: Callable[[str], None]) -> None:
    stand_in("MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(['qwen9', 'gemma7', 'olmo8'])")
    with pytest.raises(UnsupportedFeatureError, match="supports: gemma7, olmo8, qwen9"):
        use_liger_kernel(build())


def test_the_import_loads_no_framework() -> None:
    program = "import sys, kernel_compat.models; print(*{'torch', 'transformers', 'liger_kernel'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@real
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", ["liger", "sdpa"])
def test_undone_in_either_order_with_sdpa_backends_over_it(name: str, first: str) -> None:
    model = build(name)
    scene, before = Scene(model), logits(model)
    handles = {"liger": use_liger_kernel(model), "sdpa": use_sdpa_backends(model, "math")}
    handles.pop(first).undo()
    if first == "liger":
        torch.testing.assert_close(logits(model), before)  # upstream's forward, with the SDPA backends
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    else:
        assert is_patched(model)
    for handle in handles.values():
        handle.undo()
    assert scene.changes() == []
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


@real
def test_after_sdpa_backends_they_stay() -> None:
    model = build()
    scene = Scene(model)
    with use_sdpa_backends(model, "math"):
        chosen = Scene(model)
        with use_liger_kernel(model):
            assert is_patched(model)
        assert {key[-1] for key in chosen.changes()} <= {"forward"}
    assert scene.changes() == []

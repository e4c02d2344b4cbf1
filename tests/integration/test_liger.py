"""`use_liger_kernel`, on the CPU: what Liger changes is looked at, its Triton kernels are not run (see tests/gpu).

Most tests have the real liger-kernel. Where it is missing or doesn't import, those are skipped, and the errors are
tested all the same; a stand-in does what only some of its releases do.
"""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
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

from kernel_compat import KernelCompatError, KernelUnavailableError, SeamError, UnsupportedFeatureError
from kernel_compat.models import Handle, use_liger_kernel, use_sdpa_backends

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


def modeling(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def by_liger(thing: Any) -> bool:
    return str(thing.__module__).startswith("liger_kernel")


def is_patched(model: Any) -> bool:
    """Whether the model itself is, in all of its parts, or in none."""
    parts = [model, model.model.norm, *(p for layer in model.model.layers for p in (layer.mlp, layer.input_layernorm))]
    patched = {by_liger(part.forward) for part in parts}
    assert len(patched) == 1
    return patched.pop()


class Scene:
    """Everything that Liger could have changed: of some models, and of transformers and torch.nn as imported."""

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
            return key[-1] in ("__annotations__", "__slotnames__", "__warningregistry__")
        return type(sys.modules[key[0]]) is not ModuleType or isinstance(now[key], ModuleType)


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    """No test leaves a part of Liger to the next."""
    from transformers.models.llama import modeling_llama

    owners = (modeling_llama, torch.nn, torch.nn.functional)
    before = [dict(vars(owner)) for owner in owners]

    def changed() -> set[str]:
        pairs = zip(owners, before, strict=True)
        return {name for owner, names in pairs for name in names if vars(owner).get(name) is not names[name]}

    yield
    if changed():
        gc.collect()
    assert changed() == set()


# With the real one.


@real
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    model = build(name)
    expected = logits(model)
    scene = Scene(model)
    handle = use_liger_kernel(model)
    assert handle.active
    assert is_patched(model)
    assert by_liger(modeling(model).apply_rotary_pos_emb)
    handle.undo()
    assert not handle.active
    assert scene.changes() == []
    assert torch.equal(logits(model), expected)


@real
def test_the_options_are_ligers() -> None:
    model = build()
    scene = Scene(model)
    with use_liger_kernel(model, rope=False, fused_linear_cross_entropy=False, swiglu=False):
        assert not by_liger(modeling(model).apply_rotary_pos_emb)
        assert not by_liger(model.forward)
        assert not by_liger(model.model.layers[0].mlp.forward)
        assert by_liger(model.model.norm.forward)
    with use_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=False):
        assert by_liger(torch.nn.functional.cross_entropy)
    assert scene.changes() == []


@real
def test_an_option_that_liger_would_drop() -> None:
    model = build()
    scene = Scene(model)
    with pytest.raises(ValueError, match=r"no option geglu, ropes .*'llama': .*rms_norm, rope, swiglu"):
        use_liger_kernel(model, ropes=True, geglu=True)
    assert scene.changes() == []


@real
def test_a_model_type_that_liger_would_ignore() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=VOCAB))
    supported = ", ".join(sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN))
    with pytest.raises(UnsupportedFeatureError, match="does not support the model type 'gpt2'") as caught:
        use_liger_kernel(model)
    assert supported in str(caught.value)


@real
def test_what_liger_itself_refuses() -> None:
    model = build()
    scene = Scene(model)
    with pytest.raises(KernelCompatError, match="cannot both be True.*The model is as it was") as caught:
        use_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=True)
    assert isinstance(caught.value.__cause__, AssertionError)
    assert scene.changes() == []


class Interrupt(KeyboardInterrupt):
    """What nobody else raises here."""


@real
@pytest.mark.parametrize("error", [RuntimeError, Interrupt])
@pytest.mark.parametrize(
    ("function", "call"),
    [("_patch_rms_norm_module", 1), ("_patch_rms_norm_module", 4), ("_patch_swiglu_module", 1), ("MethodType", 1)],
)
def test_failing_half_way(
    monkeypatch: pytest.MonkeyPatch, function: str, call: int, error: type[BaseException]
) -> None:
    model, other = build(), build()
    expected = logits(model)
    undisturbed = use_liger_kernel(other)
    scene = Scene(model, other)
    calls = 0
    original = getattr(monkey_patch, function)

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **options)
        if calls == call:
            raise error("half way")
        return result

    with monkeypatch.context() as patched:
        patched.setattr(monkey_patch, function, fail)
        with pytest.raises(error if error is Interrupt else KernelCompatError) as caught:
            use_liger_kernel(model)
    assert calls == call
    if error is RuntimeError:
        assert "(RuntimeError: half way). The model is as it was" in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert scene.changes() == []
    undisturbed.undo()
    assert torch.equal(logits(model), expected)
    with use_liger_kernel(model):  # nothing is left that would be in the way of a second try
        assert is_patched(model)


@real
def test_an_interrupt_when_liger_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> Any:
        raise Interrupt

    model = build()
    scene = Scene(model)
    with monkeypatch.context() as patched:
        patched.setattr(weakref, "finalize", interrupt)
        with pytest.raises(Interrupt):
            use_liger_kernel(model)
    assert scene.changes() == []


@real
@pytest.mark.parametrize("first_to_go", [0, 1])
def test_two_models_of_one_type(first_to_go: int) -> None:
    models = [build(), build()]
    scene = Scene(*models)
    handles = [use_liger_kernel(model) for model in models]
    handles[first_to_go].undo()
    assert not is_patched(models[first_to_go])
    assert is_patched(models[1 - first_to_go])
    assert by_liger(modeling(models[0]).apply_rotary_pos_emb)  # the other's as much
    handles[1 - first_to_go].undo()
    assert scene.changes() == []


@real
@pytest.mark.parametrize("first_to_go", [0, 1])
def test_what_the_process_shares_lasts_as_long_as_who_asked_for_it(first_to_go: int) -> None:
    models = [build(), build()]
    module = modeling(models[0])
    scene = Scene(*models)
    handles = [
        use_liger_kernel(models[0], rms_norm=False, cross_entropy=True, fused_linear_cross_entropy=False),
        use_liger_kernel(models[1], rope=False),
    ]
    assert by_liger(module.LlamaRMSNorm)
    handles[first_to_go].undo()
    first_is_left = first_to_go == 1
    assert by_liger(torch.nn.functional.cross_entropy) == first_is_left
    assert by_liger(module.apply_rotary_pos_emb) == first_is_left
    assert by_liger(module.LlamaRMSNorm) != first_is_left
    assert by_liger(module.LlamaMLP)  # both asked for it
    handles[1 - first_to_go].undo()
    assert scene.changes() == []


@real
def test_again() -> None:
    model = build()
    scene = Scene(model)
    first = use_liger_kernel(model)
    patched = Scene(model)
    second = use_liger_kernel(model, rope=True)  # which is the default
    assert patched.changes() == []
    with pytest.raises(ValueError, match="patched already, with .*rope=True.* before patching it with .*rope=False"):
        use_liger_kernel(model, rope=False)
    first.undo()
    first.undo()
    assert patched.changes() == []
    second.undo()
    assert scene.changes() == []
    with use_liger_kernel(model, rope=False):
        assert is_patched(model)
    assert scene.changes() == []


@real
def test_what_others_patched_since_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, later = build(), build()
    module, norm, other_norm = modeling(model), model.model.norm, model.model.layers[0].input_layernorm

    def rope(*args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def forward(self: Any, hidden: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)  # to be put back at the end
    handle = use_liger_kernel(model)
    module.apply_rotary_pos_emb = rope
    norm.forward = mine = MethodType(forward, norm)
    with use_liger_kernel(later):
        assert by_liger(module.apply_rotary_pos_emb)
    assert module.apply_rotary_pos_emb is rope
    handle.undo()
    assert module.apply_rotary_pos_emb is rope
    assert norm.forward is mine
    assert not by_liger(other_norm.forward)
    assert not by_liger(module.LlamaRMSNorm)


@real
def test_ligers_own_patch_from_before_stays() -> None:
    model = build()
    untouched = Scene(model)
    try:
        monkey_patch.apply_liger_kernel_to_llama(rms_norm=False, model=model)
        scene = Scene(model)
        use_liger_kernel(model).undo()
        assert {key for key in scene.changes() if key[-1] not in ("forward", "_get_name")} == set()
        assert by_liger(modeling(model).apply_rotary_pos_emb)
        assert by_liger(model.forward)
    finally:
        for key in untouched.changes():
            if key[0] == modeling(model).__name__:
                setattr(modeling(model), key[1], untouched.before[key])


@real
def test_a_model_that_is_collected_takes_its_patch_along() -> None:
    model, other = build(), build()
    module = modeling(model)
    before = module.apply_rotary_pos_emb
    handle = use_liger_kernel(model)
    keeps = use_liger_kernel(other)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None  # though there is a handle
    assert by_liger(module.apply_rotary_pos_emb)  # the other's
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert module.apply_rotary_pos_emb is before
    handle.undo()
    keeps.undo()
    assert module.apply_rotary_pos_emb is before


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
        with pytest.raises(ValueError, match="part of this LlamaModel is patched already"):
            use_liger_kernel(model.model, fused_linear_cross_entropy=False)
        assert patched.changes() == []
    with (
        use_liger_kernel(model.model, fused_linear_cross_entropy=False),
        pytest.raises(ValueError, match="part of this LlamaForCausalLM is patched already"),
    ):
        use_liger_kernel(model)
    assert scene.changes() == []


@real
def test_a_copy_has_no_patch_to_undo() -> None:
    model = build()
    scene = Scene(model)
    handle = use_liger_kernel(model)
    twin = copy.deepcopy(model)
    patched = Scene(twin)
    assert is_patched(twin)
    assert twin.forward.__self__ is twin
    assert vars(twin)["_kernel_compat_liger"] is None
    handle.undo()
    assert scene.changes() == []
    assert is_patched(twin)
    use_liger_kernel(twin, rope=False).undo()
    assert is_patched(twin)
    assert {key[-1] for key in patched.changes() if key[0] == 0} <= {
        "forward",
        "extra_repr",
        "_get_name",
        "_kernel_compat_liger",
    }


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
            assert by_liger(getattr(model, "model", model).norm.forward)
        assert scene.changes() == []


class Mine(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = out.logits * 0.5
        return out


@real
@pytest.mark.parametrize("whose", ["a subclass", "an instance", "upstream's class"])
def test_a_forward_that_liger_would_silently_replace(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    kind = Mine if whose == "a subclass" else transformers.LlamaForCausalLM
    model = randomize(kind(CAUSAL_LMS["llama"]())).eval()
    if whose == "an instance":
        model.forward = MethodType(Mine.forward, model)
    if whose == "upstream's class":
        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, **options: None)
    scene = Scene(model)
    with pytest.raises(UnsupportedFeatureError, match="forward that isn't upstream's"):
        use_liger_kernel(model)
    assert scene.changes() == []
    with use_liger_kernel(model, fused_linear_cross_entropy=False):
        assert by_liger(model.model.norm.forward)
    assert scene.changes() == []


def own_llama() -> type:
    """A model class of its own with Llama's model type and parts, as remote code has: its logits are scaled."""

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
    with pytest.raises(
        UnsupportedFeatureError, match="OwnForCausalLM is not transformers' model of this type.*fused_linear_cross"
    ):
        use_liger_kernel(model)
    assert scene.changes() == []
    assert torch.equal(logits(model), expected)
    with use_liger_kernel(model, fused_linear_cross_entropy=False):  # its parts are transformers'
        assert by_liger(model.model.norm.forward)
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
        ("gemma2_softcap", {"hidden_activation": "gelu"}, "geglu"),  # without tanh
    ],
)
def test_another_activation(name: str, values: dict[str, Any], option: str) -> None:
    config = CAUSAL_LMS[name]()
    for key, value in values.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    scene = Scene(model)
    with pytest.raises(UnsupportedFeatureError, match=f"MLP.*they differ by .*Turn off the option.*{option}"):
        use_liger_kernel(model)
    assert scene.changes() == []
    with use_liger_kernel(model, **{option: False}):
        assert by_liger(model.model.norm.forward)


@real
def test_a_vision_tower_with_another_activation() -> None:
    config = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    if config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        pytest.skip("this release of liger-kernel has nothing for Pixtral")
    with pytest.raises(UnsupportedFeatureError, match="PixtralMLP.*they differ.*swiglu"):
        use_liger_kernel(transformers.PixtralVisionModel(config))
    config.hidden_act = "silu"
    with use_liger_kernel(transformers.PixtralVisionModel(config)) as handle:
        assert handle is not None


class Halved(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = inner.weight, inner.variance_epsilon

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight / 2


@real
def test_a_norm_with_another_formula() -> None:
    model = build()
    model.model.norm = Halved(model.model.norm)
    scene = Scene(model)
    with pytest.raises(UnsupportedFeatureError, match="Halved.*they differ by .*rms_norm"):
        use_liger_kernel(model)
    assert scene.changes() == []
    model = build()
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5  # which Liger reads
    use_liger_kernel(model).undo()


@real
def test_losses_that_the_fused_one_is_not() -> None:
    biased, own = build(), build()
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    own.loss_function = lambda *args, **options: None
    for model, says in ((biased, "its head has a bias"), (own, "its loss_function is .*lambda")):
        scene = Scene(model)
        with pytest.raises(UnsupportedFeatureError, match=f"{says}.*fused_linear_cross_entropy"):
            use_liger_kernel(model)
        assert scene.changes() == []
        with use_liger_kernel(model, fused_linear_cross_entropy=False):
            assert by_liger(model.model.norm.forward)


@real
def test_the_hooks_of_accelerate() -> None:
    """They are on every module of a model that was loaded with a quantization or onto several devices."""
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
    with pytest.raises(TypeError, match="compiled already: patch the model itself"):
        use_liger_kernel(torch.compile(build()))


@real
def test_threads() -> None:
    models = [build() for _ in range(4)]
    scene = Scene(*models)
    start = threading.Barrier(len(models))
    errors: list[BaseException] = []

    def work(model: Any) -> None:
        try:
            start.wait()
            for _ in range(5):
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


# Without it, or with a stand-in.


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a liger_kernel with this source for its monkey_patch."""
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


ENTRY = """
def _apply_liger_kernel_to_instance(model, **options):
    MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model, **options)
"""


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
    [
        ("MODEL_TYPE_TO_APPLY_LIGER_FN = {}", "_to_instance .*liger-kernel.*found nothing of that name"),
        ("def _apply_liger_kernel_to_instance(model_type): pass", r"found parameters \(model_type\)"),
        (ENTRY, "MODEL_TYPE_TO_APPLY_LIGER_FN .*found nothing of that name"),
        (f"{ENTRY}\nMODEL_TYPE_TO_APPLY_LIGER_FN = ['llama']", "found list"),
    ],
)
def test_with_another_entry_point(stand_in: Callable[[str], None], source: str, found: str) -> None:
    stand_in(source)
    with pytest.raises(SeamError, match=found):
        use_liger_kernel(build())


def test_what_is_no_model(stand_in: Callable[[str], None]) -> None:
    stand_in(f"{ENTRY}\nMODEL_TYPE_TO_APPLY_LIGER_FN = {{}}")
    nameless = torch.nn.Linear(2, 2)
    nameless.config = transformers.PretrainedConfig()  # type: ignore[assignment]
    for model, message in (
        (None, "not NoneType"),
        ("llama", "not str"),
        (torch.nn.Linear(2, 2), "Linear has no config.model_type"),
        (nameless, "Linear has no config.model_type"),
    ):
        with pytest.raises(TypeError, match=message):
            use_liger_kernel(model)


def test_the_list_of_model_types_is_sorted(stand_in: Callable[[str], None]) -> None:
    stand_in(f"{ENTRY}\nMODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(['qwen9', 'gemma7', 'olmo8'])")
    with pytest.raises(UnsupportedFeatureError, match="supports: gemma7, olmo8, qwen9"):
        use_liger_kernel(build())


#: What releases before 0.6.2 do, and in what a release can go wrong.
STRANGE = f"""{ENTRY}
import torch


class LigerNorm(torch.nn.Module):
    extra = "of Liger"


def apply(
    name=True, attribute=True, layers=True, new=True, act=True, remove=False, fail=False, model=None, **more
):
    from transformers.models.llama import modeling_llama

    if attribute:
        modeling_llama.LlamaForCausalLM.forward = LigerNorm.forward
        modeling_llama.LlamaForCausalLM.added = True
    if layers:
        torch.nn.LayerNorm = torch.nn.CrossEntropyLoss = LigerNorm
    if new:
        modeling_llama.CrossEntropyLoss = LigerNorm
    if model is None:
        return
    if name:
        kind = model.model.norm.__class__
        kind.__name__, kind.__qualname__ = "LigerNorm", "Liger.LigerNorm"
    if act:
        model.model.layers[0].mlp.act_fn = LigerNorm()
        model.model.layers[0].mlp.__class__ = type("LigerMLP", (type(model.model.layers[0].mlp),), {{}})
        model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
        model.model.layers[1] = LigerNorm()
    if remove:
        model.model.layers[1].mlp = None
    if fail:
        raise SystemError("at the end")


MODEL_TYPE_TO_APPLY_LIGER_FN = {{"llama": apply}}
"""


def test_changes_of_every_kind(stand_in: Callable[[str], None]) -> None:
    stand_in(STRANGE)
    model, other = build(), build()
    expected = logits(model)
    norm = type(model.model.norm)
    scene = Scene(model, other)
    handle = use_liger_kernel(model, fail=False)
    assert norm.__name__ == "LigerNorm"
    assert torch.nn.LayerNorm.extra == "of Liger"
    assert transformers.LlamaForCausalLM.added
    assert type(model.model.layers[0].mlp).__name__ == "LigerMLP"
    with use_liger_kernel(other):
        handle.undo()
        assert norm.__name__ == "LigerNorm"
        assert torch.nn.LayerNorm.extra == "of Liger"
    assert norm.__name__ == norm.__qualname__ == "LlamaRMSNorm"
    assert scene.changes() == []
    with pytest.raises(KernelCompatError, match="SystemError: at the end"):
        use_liger_kernel(model, fail=True)
    with pytest.raises(ValueError, match="no option more"):
        use_liger_kernel(model, more=1)
    assert scene.changes() == []
    assert torch.equal(logits(model), expected)


def test_a_submodule_that_liger_loses(stand_in: Callable[[str], None]) -> None:
    """0.6.3 to 0.7.0 put None in the place of the dense MLPs of glm4v_moe."""
    stand_in(STRANGE)
    model = build()
    scene = Scene(model)
    with pytest.raises(KernelCompatError, match="removed mlp from LlamaDecoderLayer. The model is as it was"):
        use_liger_kernel(model, remove=True, act=False)
    assert scene.changes() == []


def test_a_module_that_liger_imports_to_change_it(stand_in: Callable[[str], None]) -> None:
    candidates = ("xglm", "biogpt", "codegen", "opt", "bloom")
    name = next(n for n in candidates if f"transformers.models.{n}.modeling_{n}" not in sys.modules)
    stand_in(
        f"{ENTRY}\n"
        "def apply(rope=True, model=None):\n"
        f"    from transformers.models.{name} import modeling_{name} as module\n"
        "    if rope:\n"
        "        module.torch = 'of Liger'\n"
        "MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': apply}\n"
    )
    model = build()
    with use_liger_kernel(model):
        module = sys.modules[f"transformers.models.{name}.modeling_{name}"]
        assert module.torch == "of Liger"
    assert module.torch is torch


def test_a_model_that_is_collected_while_another_is_patched(stand_in: Callable[[str], None]) -> None:
    """The collector may run anywhere, and here it does so where the lock is held."""
    stand_in(
        f"{ENTRY}\n"
        "import gc\n"
        "victims = []\n"
        "def apply(rope=True, model=None):\n"
        "    from transformers.models.llama import modeling_llama\n"
        "    if rope:\n"
        "        modeling_llama.apply_rotary_pos_emb = 'of Liger'\n"
        "        victims.clear()\n"
        "        gc.collect()\n"
        "MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': apply}\n"
    )
    model, other = build(), build()
    module, gone = modeling(model), weakref.ref(model)
    before = module.apply_rotary_pos_emb
    use_liger_kernel(model)
    importlib.import_module("liger_kernel.transformers.monkey_patch").victims.append(model)
    del model
    handles: list[Handle] = []
    thread = threading.Thread(target=lambda: handles.append(use_liger_kernel(other)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for itself"
    assert gone() is None
    assert module.apply_rotary_pos_emb == "of Liger"
    handles[0].undo()
    assert module.apply_rotary_pos_emb is before


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
        torch.testing.assert_close(logits(model), before)  # runs upstream's forward, under SDPA's backends
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    else:
        assert is_patched(model)
    for handle in handles.values():
        handle.undo()
    assert scene.changes() == []
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


@real
def test_after_sdpa_backends_it_is_refused() -> None:
    """Liger would replace our forward, and the backends with it."""
    model = build()
    with use_sdpa_backends(model, "math"):
        scene = Scene(model)
        with pytest.raises(UnsupportedFeatureError, match="Patch the model before"):
            use_liger_kernel(model)
        assert scene.changes() == []

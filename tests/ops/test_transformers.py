"""Kernel selection together with transformers' own four mechanisms, and with Liger's: which kernel runs, or which error is raised.

Layers and functions of the hub come from a folder, loaded by the real package ``kernels``, where the installed version suits the
transformers release: each release from 5.13 on requires another version.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import transformers
from plain_kernels import PLAIN
from tiny import CAUSAL_LMS, OPS_MODELS, TRANSFORMERS
from torch.nn.functional import silu

from kernel_compat import Environment, UnsupportedFeatureError, ops
from kernel_compat.environment import Device
from kernel_compat_ops import registry
from kernel_compat_ops.losses.lazy import LazyLogits
from kernel_compat_ops.recognisers import experts, norms, rotary

IDS = torch.arange(1, 9).unsqueeze(0)

since_5 = pytest.mark.skipif(TRANSFORMERS.major < 5, reason="experts are modules of their own before transformers 5")
since_4_57 = pytest.mark.skipif(TRANSFORMERS.release < (4, 57), reason="models have no use_kernels before 4.57")

#: The modules of a tiny Llama that each op replaces.
NORMS = tuple(f"model.layers.{i}.{name}" for i in range(2) for name in ("input_layernorm", "post_attention_layernorm"))
NORMS = (*NORMS, "model.norm")
ATTENTIONS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
MLPS = ("model.layers.0.mlp", "model.layers.1.mlp")

OURS = "counted"
NORM = ops.OpsConfig(rms_norm_implementation=PLAIN)

#: How often each kernel ran: ours by op, the other ones by "their" and op.
runs: Counter[str] = Counter()


def _counted(op: str, function: Callable[..., Any]) -> Callable[[], Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        runs[op] += 1
        return function(*args, **kwargs)

    return lambda: kernel


def _experts(x: Any, index: Any, weights: Any, up: Any, down: Any, **given: Any) -> Any:
    biases = {name: given.pop(name) for name in ("up_bias", "down_bias") if name in given}
    formula = experts.Experts("", "", (), **given)
    return experts.reference(formula, x, index, weights, up, down, **biases)


_KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("rms_norm", "standard"): lambda x, weight, eps, *, casting: norms.reference(x, weight, eps, False, casting),
    ("rotary_pos_emb", "full"): rotary.reference,
    ("swiglu_mlp", "standard"): lambda gate, up: silu(gate) * up,
    ("moe", "swiglu"): _experts,
    ("moe", "gpt_oss"): _experts,
}


@pytest.fixture(scope="module", autouse=True)
def counted_kernels() -> Iterator[None]:
    for (op, variant), function in _KERNELS.items():
        ops.register_kernel(op, variant, OURS)(_counted(op, function))
    yield
    for op, variant in _KERNELS:
        ops.unregister_kernel(op, variant, OURS)


@pytest.fixture(autouse=True)
def none_ran() -> None:
    runs.clear()


def config(*named: str) -> ops.OpsConfig:
    values: dict[str, Any] = {f"{op}_implementation": OURS for op in named}
    return ops.OpsConfig(**values)


def build(name: str = "llama", **options: Any) -> Any:
    made = {**CAUSAL_LMS, **OPS_MODELS}[name]()
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", **options).eval()


def ran(model: Any) -> dict[str, int]:
    """How often each kernel runs in one forward of the model."""
    runs.clear()
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return dict(runs)


def forwards(paths: tuple[str, ...]) -> set[str]:
    return {f"{path}.forward" for path in paths}


def undo(report: ops.BoundOps) -> int:
    """Undo a report; returns how many bindings it left in place, each with a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report.undo()
    return sum("replaced since apply_ops: it is left as it is" in str(warning.message) for warning in caught)


# Hub layers and hub functions ----------------------------------------------------------------------------------------

LAYERS = """
import torch
from torch import nn
from their_runs import runs

class TheirRMSNorm(nn.Module):
    def forward(self, hidden_states):
        runs["their rms_norm"] += 1
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)

class TheirExperts(nn.Module):
    def forward(self, hidden_states):
        runs["their moe"] += 1
        return hidden_states, None
"""

FUNCTIONS = """
import torch
from their_runs import runs
from . import layers

def turned(x, cos, sin):
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin

def their_rotary(q, k, cos, sin, unsqueeze_dim=1):
    runs["their rotary_pos_emb"] += 1
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return turned(q, cos, sin), turned(k, cos, sin)
"""


class Hub:
    """A folder with hub kernels, and the ways in which transformers loads them."""

    def __init__(self, folder: Path) -> None:
        self.kernels: Any = importlib.import_module("kernels")
        self.folder = folder
        variant = folder / "build" / "torch-universal"
        (variant / "theirs").mkdir(parents=True)
        (variant / "theirs" / "__init__.py").write_text(FUNCTIONS)
        (variant / "theirs" / "layers.py").write_text(LAYERS)
        described = {"id": "theirs", "name": "theirs", "version": 1, "license": "Apache-2.0", "python-depends": []}
        (variant / "metadata.json").write_text(json.dumps({**described, "backend": {"type": "cpu"}}))

    def local(self, kind: str, name: str) -> Any:
        made = getattr(self.kernels, kind)
        parameters = inspect.signature(made).parameters
        given = {"layer_name": name, "func_name": name, "package_name": "theirs"}
        return made(self.folder, **{key: value for key, value in given.items() if key in parameters})

    def kernelize(self, model: Any, *names: str) -> None:
        """``kernels.kernelize`` with kernels for the named layers; other layers get their class's forward."""
        theirs = {"RMSNorm": "TheirRMSNorm", "MegaBlocksMoeMLP": "TheirExperts"}
        # Releases before 0.12 have no device "cpu".
        device = "cpu" if hasattr(self.kernels, "LocalFuncRepository") else "mps"
        layers = {name: {device: self.local("LocalLayerRepository", theirs[name])} for name in names}
        with self.kernels.use_kernel_mapping(layers, inherit_mapping=False):
            self.kernels.kernelize(model, mode=self.kernels.Mode.INFERENCE, device=device)

    def kernelize_functions(self, model: Any) -> None:
        """transformers' ``kernelize``: from 5.6 to 5.14 only this one handles functions."""
        theirs = {"rotary_pos_emb": {"cpu": self.local("LocalFuncRepository", "their_rotary")}}
        with self.kernels.use_kernel_mapping(theirs, inherit_mapping=False):
            (getattr(transformers, "kernelize", None) or type(model).kernelize)(model)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("kernels")
    from transformers.models.llama import modeling_llama

    if not hasattr(modeling_llama.LlamaRMSNorm, "kernel_layer_name"):
        pytest.skip("this transformers doesn't take the kernels that is installed")
    module = ModuleType("their_runs")
    module.runs = runs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_runs", module)
    yield Hub(tmp_path)
    function: Any = modeling_llama.apply_rotary_pos_emb  # kernelize has replaced its forward in the process
    vars(function).pop("forward", None)


@pytest.fixture
def functions(hub: Hub) -> Hub:
    """A hub whose functions can be kernelized: transformers 5 with kernels 0.12 or later."""
    from transformers.models.llama import modeling_llama

    if not isinstance(modeling_llama.apply_rotary_pos_emb, torch.nn.Module):
        pytest.skip("functions of the hub are not in transformers 4, nor in kernels before 0.12")
    return hub


def test_behind_kernelize_a_kernel_of_ours_is_refused(hub: Hub) -> None:
    model = build()
    hub.kernelize(model, "RMSNorm")
    assert ran(model) == {"their rms_norm": 5}

    with pytest.raises(UnsupportedFeatureError, match=r"input_layernorm .*replaced by .*TheirRMSNorm\.forward"):
        ops.apply_ops(model, config("rms_norm", "swiglu_mlp"))

    assert ran(model) == {"their rms_norm": 5}
    ops.apply_ops(model, config("swiglu_mlp"))
    assert ran(model) == {"their rms_norm": 5, "swiglu_mlp": 2}


@pytest.mark.parametrize("found", ["a kernel", "none"])
def test_kernelize_behind_ours_takes_its_place_and_the_report_says_so(hub: Hub, found: str) -> None:
    """Also if it finds no kernel: then it sets the class's forward."""
    model = build()
    report = ops.apply_ops(model, config("rms_norm", "swiglu_mlp"))
    assert ran(model) == {"rms_norm": 5, "swiglu_mlp": 2}
    assert report.replaced == ()

    hub.kernelize(model, *(["RMSNorm"] if found == "a kernel" else []))

    theirs = {"their rms_norm": 5} if found == "a kernel" else {}
    assert ran(model) == {**theirs, "swiglu_mlp": 2}
    assert set(report.replaced) == forwards(NORMS)
    assert report.active
    with pytest.raises(ValueError, match="replaced since the kernels were applied: .*model.norm.forward; undo"):
        ops.apply_ops(model, config("rms_norm", "swiglu_mlp"))
    assert undo(report) == 5
    assert ran(model) == theirs
    assert report.replaced == ()


def test_behind_a_kernelize_that_found_nothing_ours_runs(hub: Hub) -> None:
    model = build()
    hub.kernelize(model)
    before = vars(model.model.norm)["forward"]

    report = ops.apply_ops(model, config("rms_norm"))

    assert ran(model) == {"rms_norm": 5}
    assert undo(report) == 0
    assert vars(model.model.norm)["forward"] == before


@since_4_57
def test_use_kernels_that_is_on_is_refused_since_train_and_eval_take_ours_away(hub: Hub) -> None:
    model = build()
    model.use_kernels = True

    with pytest.raises(
        UnsupportedFeatureError, match="model.norm|input_layernorm.*: use_kernels is on, and with it train"
    ):
        ops.apply_ops(model, config("rms_norm"))
    ops.apply_ops(model, config("rotary_pos_emb", "swiglu_mlp")).undo()

    model.use_kernels = False
    report = ops.apply_ops(model, config("rms_norm"))
    model.train()
    model.eval()
    assert ran(model) == {"rms_norm": 5}
    assert report.replaced == ()


@since_4_57
def test_use_kernels_behind_ours_is_an_error(hub: Hub) -> None:
    model = build()
    report = ops.apply_ops(model, config("rms_norm"))

    ways: list[Callable[[], Any]] = [lambda: setattr(model, "use_kernels", True)]
    if hasattr(model, "set_use_kernels"):
        ways.append(lambda: model.set_use_kernels(True))
    if hasattr(type(model), "kernelize"):
        ways.append(model.kernelize)
    for way in ways:
        with pytest.raises(
            UnsupportedFeatureError, match="apply_ops does not support kernels of the hub in the same Ll"
        ):
            way()
    model.use_kernels = False
    assert ran(model.train().eval()) == {"rms_norm": 5}
    assert report.replaced == ()

    assert undo(report) == 0
    model.use_kernels = True
    assert model.use_kernels
    assert ran(model) == {}


@since_4_57
def test_use_kernels_for_what_ours_leaves_is_taken(hub: Hub) -> None:
    model = build()
    ops.apply_ops(model, config("rotary_pos_emb", "swiglu_mlp"))

    model.use_kernels = True
    hub.kernelize(model, "RMSNorm")

    assert ran(model) == {"their rms_norm": 5, "rotary_pos_emb": 2, "swiglu_mlp": 2}


def test_to_load_with_use_kernels_in_a_block_of_ours_is_an_error(hub: Hub, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "model")

    def load() -> Any:
        with ops.use(config("rms_norm")):
            return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_kernels=True)

    if TRANSFORMERS.release < (4, 57):  # these releases kernelize the model after it is built
        report = ops.applied(load())
        assert report is not None
        assert set(report.replaced) == forwards(NORMS)
    else:
        with pytest.raises(
            UnsupportedFeatureError, match="not support kernels of the hub in the same LlamaForCausalLM"
        ):
            load()


@since_5
def test_a_layer_of_the_hub_around_ours_counts_too(hub: Hub) -> None:
    """The hub's kernel for GPT-OSS replaces the whole MoE block, so that the experts in it are no longer called."""
    model = build("gpt_oss_sinks")
    report = ops.apply_ops(model, config("moe"))
    assert ran(model) == {"moe": 2}

    hub.kernelize(model, "MegaBlocksMoeMLP")

    assert ran(model) == {"their moe": 2}
    assert report.replaced == ("model.layers.0.mlp.experts.forward", "model.layers.1.mlp.experts.forward")
    assert undo(report) == 0  # the forwards of the experts are still ours
    with pytest.raises(
        UnsupportedFeatureError, match=r"experts .*it is in model.layers.0.mlp \(GptOssMLP\), whose forward"
    ):
        ops.apply_ops(model, config("moe"))


def test_a_hook_of_accelerate_that_kernelize_has_replaced_is_not_taken_for_one(hub: Hub) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build()
    accelerate.hooks.add_hook_to_module(model.model.norm, accelerate.hooks.ModelHook())

    hub.kernelize(model)
    report = ops.apply_ops(model, config("rms_norm"))

    assert ran(model) == {"rms_norm": 5}
    assert report.replaced == ()


def test_a_function_of_the_hub_is_not_called_where_ours_is_bound_before_or_after(functions: Hub) -> None:
    model, bare = build(), build()
    functions.kernelize_functions(model)
    # The function is global to the process: transformers also replaces it in models that were not kernelized.
    assert ran(model) == ran(bare) == {"their rotary_pos_emb": 2}

    report = ops.apply_ops(model, config("rotary_pos_emb"))
    assert ran(model) == {"rotary_pos_emb": 2}
    assert ran(bare) == {"their rotary_pos_emb": 2}

    functions.kernelize_functions(model)
    assert ran(model) == {"rotary_pos_emb": 2}
    assert report.replaced == ()
    assert undo(report) == 0
    assert ran(model) == {"their rotary_pos_emb": 2}


# Wrappers around our forwards ----------------------------------------------------------------------------------------


def test_what_calls_ours_does_not_replace_it() -> None:
    """accelerate wraps the forward of a model for mixed precision, and that of a module for a hook."""
    accelerate = pytest.importorskip("accelerate")
    model = build()
    report = ops.apply_ops(
        model, ops.OpsConfig(rms_norm_implementation=OURS, cross_entropy_loss_implementation="chunk_loss")
    )

    accelerate.hooks.add_hook_to_module(model.model.norm, accelerate.hooks.ModelHook())
    mixed = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = MethodType(accelerate.utils.convert_outputs_to_fp32(mixed), model)

    runs.clear()
    outputs = model(input_ids=IDS, labels=IDS)
    assert isinstance(outputs.logits, LazyLogits)
    assert runs["rms_norm"] == 5
    assert report.replaced == ()
    assert ops.apply_ops(model, report.config) is report


# The attention interface ---------------------------------------------------------------------------------------------


def test_of_two_attention_names_the_later_is_in_force() -> None:
    model = build()
    report = ops.apply_ops(model, ops.OpsConfig(attn_implementation="sdpa"))
    assert model.config._attn_implementation == "sdpa"
    assert report.replaced == ()

    model.set_attn_implementation("flex_attention")

    assert model.config._attn_implementation == "flex_attention"
    assert report.replaced == ("attn_implementation",)  # type: ignore[comparison-overlap]
    assert undo(report) == 1
    assert model.config._attn_implementation == "flex_attention"


def test_the_config_s_name_goes_before_that_of_from_pretrained(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)

    with ops.use(ops.OpsConfig(attn_implementation="eager")):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")

    assert model.config._attn_implementation == "eager"
    report = ops.applied(model)
    assert report is not None
    assert report.replaced == ()
    report.undo()
    assert model.config._attn_implementation == "sdpa"


# The experts interface -----------------------------------------------------------------------------------------------


@pytest.fixture
def theirs_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    for name in ("grouped_mm", "batched_mm"):
        monkeypatch.setitem(interface._global_mapping, name, _counted(f"their {name}", interface[name])())


@since_5
@pytest.mark.parametrize("before", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("after", ["eager", "grouped_mm", "batched_mm"])
def test_ours_runs_whatever_experts_implementation_says_before_or_after(
    theirs_counted: None, before: str, after: str
) -> None:
    def theirs(name: str) -> dict[str, int]:
        return {} if name == "eager" else {f"their {name}": 2}

    model = build("qwen3_moe", experts_implementation=before)
    assert ran(model) == theirs(before)

    report = ops.apply_ops(model, config("moe"))
    assert ran(model) == {"moe": 2}
    model.set_experts_implementation(after)
    assert ran(model) == {"moe": 2}
    assert model.config._experts_implementation == after
    assert report.replaced == ()

    assert undo(report) == 0
    assert ran(model) == theirs(after)


@since_5
def test_ours_runs_in_a_model_loaded_with_experts_implementation(theirs_counted: None, tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)

    with ops.use(config("moe")):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="batched_mm")

    assert ran(model) == {"moe": 2}


# Liger applied by transformers' Trainer ------------------------------------------------------------------------------


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The function that the Trainer calls under use_liger_kernel: from 5.3 on when training starts, earlier when it is built."""
    theirs = pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)
    from transformers.models.llama import modeling_llama

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):  # it replaces these for the process
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    apply: Callable[..., None] = theirs._apply_liger_kernel_to_instance
    return apply


def test_behind_liger_what_liger_has_replaced_is_refused(liger: Callable[..., None]) -> None:
    model = build()
    liger(model=model, rope=False, fused_linear_cross_entropy=False)

    for op, theirs in (("rms_norm", r"LigerRMSNorm\.forward"), ("swiglu_mlp", r"LigerSwiGLUMLP\.forward")):
        with pytest.raises(UnsupportedFeatureError, match=f"replaced by liger_kernel.*{theirs}"):
            ops.apply_ops(model, config(op))
    assert ops.apply_ops(model, config("rotary_pos_emb")).replaced == ()


def test_liger_s_rotation_is_refused(liger: Callable[..., None]) -> None:
    """Liger replaces the function in the process by a Triton kernel, which the CPU can't prove; since 0.8.5 its parameters differ."""
    liger(model=build(), rms_norm=False, swiglu=False, fused_linear_cross_entropy=False)

    with pytest.raises(UnsupportedFeatureError, match="self_attn .LlamaAttention.: apply_rotary_pos_emb: it "):
        ops.apply_ops(build(), config("rotary_pos_emb"))


def test_liger_s_loss_is_an_error_in_training_and_ours_runs_in_evaluation(
    liger: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger's forward computes the loss from the head's weight, but only in training."""
    model = build()
    liger(model=model, rms_norm=False, swiglu=False, rope=False)
    forward = inspect.unwrap(model.forward.__func__)
    monkeypatch.setitem(forward.__globals__, "LigerForCausalLMLoss", lambda hidden_states, **given: hidden_states.sum())

    report = ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss"))

    assert isinstance(model(input_ids=IDS, labels=IDS).logits, LazyLogits)
    with pytest.raises(UnsupportedFeatureError, match="from the logits itself"):
        model.train()(input_ids=IDS, labels=IDS)
    assert undo(report) == 0
    model(input_ids=IDS, labels=IDS)


def test_liger_behind_ours_takes_its_place_and_the_report_says_so(liger: Callable[..., None]) -> None:
    model = build()
    everything = config("rms_norm", "rotary_pos_emb", "swiglu_mlp")
    fields: dict[str, Any] = {**everything.values(), "cross_entropy_loss_implementation": "chunk_loss"}
    report = ops.apply_ops(model, ops.OpsConfig(**fields))

    liger(model=model)

    assert set(report.replaced) == {"forward"} | forwards(NORMS) | forwards(
        MLPS
    )  # attention is not among them: rotation is ours
    assert undo(report) == 8


def test_between_use_liger_kernel_and_ours_the_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)
    from kernel_compat.models import use_liger_kernel

    found = registry.detect()
    environment = Environment(packages=found.packages, devices=(Device("NVIDIA H200", (9, 0)),))
    monkeypatch.setattr(registry.default, "detect", lambda: environment)
    model = build()
    handle = use_liger_kernel(model, rope=False)
    with pytest.raises(ValueError, match="LlamaRMSNorm has the kernel 'liger_kernel' for rms_norm already"):
        ops.apply_ops(model, config("rms_norm"))
    handle.undo()
    with ops.apply_ops(model, config("rms_norm")) as report:
        with pytest.raises(ValueError, match="LlamaRMSNorm has the kernel 'counted' for rms_norm already"):
            use_liger_kernel(model)
        assert report.replaced == ()
        assert ran(model) == {"rms_norm": 5}
        use_liger_kernel(model, rms_norm=False, rope=False, fused_linear_cross_entropy=False).undo()

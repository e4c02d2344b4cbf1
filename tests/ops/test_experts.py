"""Mixtures of experts: the formula proven for each of transformers' classes, and bound kernels that compute the same results."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny import CAUSAL_LMS, OPS_MODELS, TRANSFORMERS, VOCAB, randomize
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu, silu

import kernel_compat
from kernel_compat import KernelUnavailableError, UnsupportedFeatureError, ops
from kernel_compat_ops.recognisers import experts
from kernel_compat_ops.recognisers.probing import Unproven

since_5 = pytest.mark.skipif(TRANSFORMERS.major < 5, reason="experts are modules of their own before transformers 5")

PLAIN = "plain_experts"


def plain(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, **given: Any) -> Tensor:
    """The formula of every variant, from the arguments that a kernel gets."""
    biases = {name: given.pop(name) for name in ("up_bias", "down_bias") if name in given}
    formula = experts.Experts("", "", (), gated=up.shape[1] == 2 * down.shape[2], **given)
    return experts.reference(formula, x, index, weights, up, down, **biases)


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    for variant in ops.OPS["moe"]:
        ops.register_kernel("moe", variant, PLAIN)(lambda: plain)
    ops.register_kernel("moe", "swiglu", "swiglu_alone")(lambda: plain)
    yield
    for variant in ops.OPS["moe"]:
        ops.unregister_kernel("moe", variant, PLAIN)
    ops.unregister_kernel("moe", "swiglu", "swiglu_alone")


def config(value: str = PLAIN) -> ops.OpsConfig:
    return ops.OpsConfig(moe_implementation=value)


# Models --------------------------------------------------------------------------------------------------------------


def _deepseek() -> Any:
    made = OPS_MODELS["deepseek_v3"]()
    made.first_k_dense_replace = 1
    return made


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": OPS_MODELS["qwen3_moe"],
    "mixtral": OPS_MODELS["mixtral"],
    "deepseek_v3": _deepseek,
    **({"gpt_oss": CAUSAL_LMS["gpt_oss_sinks"]} if "gpt_oss_sinks" in CAUSAL_LMS else {}),
    **{name: make for name, make in OPS_MODELS.items() if name == "qwen3_5_moe"},
}


def build(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    if TRANSFORMERS.major >= 5:
        options = {"experts_implementation": "eager", **options}
    made = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager", **options)
    return randomize(made).to(dtype).train()


def step(model: Any) -> dict[str, Tensor]:
    """The logits, and the gradient of every parameter: the router's gradients flow through the experts' weights."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 9))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.randn(logits.shape, dtype=logits.dtype)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = tolerance * max(float(value.abs().max()), 1.0)
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


@since_5
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_computes_what_eager_does(name: str) -> None:
    model, other = build(name), build(name)
    expected = step(model)

    report = ops.apply_ops(model, config())
    found = step(model)

    assert_same(found, expected)
    assert any("gate" in key or "router" in key for key in expected), "no router has a gradient"
    moe = [binding for binding in report.bindings if binding.op == "moe"]
    assert {binding.path.rpartition(".")[2] for binding in moe} == {"experts"}
    assert {binding.variant for binding in moe} == {"gpt_oss" if name == "gpt_oss" else "swiglu"}
    assert all("forward" not in vars(module) for module in other.modules())

    twin = copy.deepcopy(model)
    report.undo()
    assert all("forward" not in vars(model.get_submodule(binding.path)) for binding in moe)
    again = step(model)
    assert all(torch.equal(again[key], value) for key, value in expected.items())
    assert_same(step(twin), expected)
    assert len(kernel_compat.ops.applied(twin).bindings) == len(report.bindings)  # type: ignore[union-attr]


@since_5
@pytest.mark.parametrize("chosen", ["grouped_mm", "batched_mm", "eager"])
def test_the_kernel_runs_and_no_implementation_of_transformers(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof uses the eager code whatever the config says, and the bound kernel runs even if the config changes later."""
    model = build("qwen3_moe", torch.float32, experts_implementation=chosen)
    ops.apply_ops(model, config())
    moe = importlib.import_module("transformers.integrations.moe")
    for name in list(moe.ALL_EXPERTS_FUNCTIONS):
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, name, None)
    model.set_experts_implementation("eager")

    assert_same(step(model), step(build("qwen3_moe", torch.float32)), 1e-4)


@since_5
def test_a_variant_that_the_kernel_is_not_for_is_refused() -> None:
    model = build("gpt_oss")
    with pytest.raises(UnsupportedFeatureError, match="of the variant 'gpt_oss', and the kernel is for swiglu"):
        ops.apply_ops(model, config("swiglu_alone"))
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.skipif(TRANSFORMERS.major >= 5, reason="they are held in two parameters")
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_that_are_modules_of_their_own_are_refused(name: str) -> None:
    model = build(name)
    with pytest.raises(UnsupportedFeatureError, match="experts .ModuleList.: its experts are modules of their own"):
        ops.apply_ops(model, config())


@pytest.mark.skipif(TRANSFORMERS.major >= 5, reason="its experts take other arguments")
@pytest.mark.skipif("gpt_oss" not in MODELS, reason="this release has no GPT-OSS")
def test_gpt_oss_of_4_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="GptOssExperts"):
        ops.apply_ops(build("gpt_oss"), config())


def test_a_dense_model_has_none() -> None:
    model = transformers.AutoModelForCausalLM.from_config(OPS_MODELS["llama"]())
    report = ops.apply_ops(model, config())
    assert report.bindings == ()
    assert report.notes == ("moe: this model has none",)


@since_5
def test_a_forward_of_somebody_else_s_is_refused() -> None:
    model = build("qwen3_moe")
    layer = model.model.layers[0].mlp.experts
    layer.forward = lambda *args: None
    with pytest.raises(UnsupportedFeatureError, match="its forward has been replaced"):
        ops.apply_ops(model, config())


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@since_5
@pytest.mark.parametrize("first", ["sharded", "bound"])
def test_sharded(first: str, mesh: Any) -> None:
    """FSDP2 shards the experts as their own module, which changes their class."""
    expected = step(build("qwen3_moe"))
    model = build("qwen3_moe")
    if first == "bound":
        ops.apply_ops(model, config())
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = ops.apply_ops(model, config())

    assert len(report.bindings) == 2
    found = step(model)
    assert_same(
        {
            name: value.full_tensor() if name in dict(model.named_parameters()) else value
            for name, value in found.items()
        },
        expected,
    )


# Classes -------------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "num_attention_heads": 4}

#: One of transformers' classes for each formula: module, class, config class, config values, variant.
CLASSES = [
    ("mixtral", "MixtralExperts", "MixtralConfig", {"num_local_experts": 4}, "swiglu"),
    ("gpt_oss", "GptOssExperts", "GptOssConfig", {"num_local_experts": 4}, "gpt_oss"),
    ("aria", "AriaExperts", "AriaTextConfig", {"moe_num_experts": 4}, "swiglu_transposed"),
    ("deepseek_v4", "DeepseekV4Experts", "DeepseekV4Config", {"n_routed_experts": 4}, "swiglu_limited"),
    ("gemma4", "Gemma4TextExperts", "Gemma4TextConfig", {"num_experts": 4}, "geglu"),
    ("minimax_m3_vl", "MiniMaxM3VLExperts", "MiniMaxM3VLTextConfig", {"num_local_experts": 4}, "gpt_oss"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", "OpenAIPrivacyFilterConfig", {}, "gpt_oss"),
    ("nemotron_h", "NemotronHExperts", "NemotronHConfig", {"n_routed_experts": 4}, "up"),
    ("step3p7", "Step3p7Experts", "Step3p7TextConfig", {"num_local_experts": 4}, "swiglu"),
]


def make(module: str, class_: str, config_class: str, settings: dict[str, Any]) -> Any:
    """A module with random parameters; skips the test if the release doesn't have the class."""
    try:
        kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), class_)
    except (ImportError, AttributeError):
        pytest.skip(f"transformers {TRANSFORMERS} has no {class_}")
    torch.manual_seed(0)
    made = kind(getattr(transformers, config_class)(**{**SIZES, **settings}))
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def inputs(module: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states large enough to reach the clamps, ids, and weights."""
    torch.manual_seed(0)
    number = next(p.shape[0] for p in module.parameters())
    ids = torch.stack([torch.randperm(number)[:2] for _ in range(11)])
    hidden = module.down_proj.shape[2 if getattr(module, "is_transposed", False) else 1]
    x = (torch.randn(11, hidden, dtype=dtype) * 3).requires_grad_()
    return x, ids, torch.rand(11, 2, dtype=dtype).requires_grad_()


def gradients(call: Callable[..., Tensor], module: Any, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    leaves = {"hidden states": given[0], "weights": given[2], **dict(module.named_parameters())}
    result = call(*given)
    torch.manual_seed(1)
    found = torch.autograd.grad((result * torch.randn_like(result)).sum(), list(leaves.values()))
    return {"output": result.detach(), **dict(zip(leaves, found, strict=True))}


def eager(module: Any) -> Callable[..., Tensor]:
    forward = type(module).forward
    return lambda *args: getattr(forward, "__wrapped__", forward)(module, *args)


@since_5
@pytest.mark.parametrize(("module", "class_", "config_class", "settings", "variant"), CLASSES)
def test_a_class_computes_what_eager_does(
    module: str, class_: str, config_class: str, settings: dict[str, Any], variant: str
) -> None:
    layer = make(module, class_, config_class, settings).double()
    if class_ == "AriaExperts" and not hasattr(layer, "down_proj"):
        pytest.skip("older: it takes the router's logits")
    given = inputs(layer)
    expected = gradients(eager(layer), layer, given)

    report = ops.apply_ops(layer, config())

    assert [binding.variant for binding in report.bindings] == [variant]
    # The privacy filter's code computes in float32 for every dtype.
    assert_same(gradients(layer, layer, given), expected, 1e-5 if "Privacy" in class_ else 1e-10)


REFUSED = [
    ("longcat_flash", "LongcatFlashExperts", "LongcatFlashConfig", {"n_routed_experts": 4, "zero_expert_num": 2}, "gate_up_proj .6"),
    ("llama4", "Llama4TextExperts", "Llama4TextConfig", {"num_local_experts": 4}, "its forward takes .hidden_states."),
    ("switch_transformers", "SwitchTransformersExperts", "SwitchTransformersConfig", {"num_experts": 2}, "modules of their own"),
    ("inkling2", "Inkling2Experts", "Inkling2TextConfig", {"n_routed_experts": 4}, "differs from every formula"),
    ("muse_spark", "MuseSparkExperts", "MuseSparkTextConfig", {"num_local_experts": 4, "moe_hidden_size": 32}, "post_expert_norm|differs from every"),
]  # fmt: skip


@since_5
@pytest.mark.parametrize(("module", "class_", "config_class", "settings", "why"), REFUSED)
def test_a_class_of_another_formula_is_refused(
    module: str, class_: str, config_class: str, settings: dict[str, Any], why: str
) -> None:
    layer = make(module, class_, config_class, settings)
    with pytest.raises(UnsupportedFeatureError, match=why):
        ops.apply_ops(layer, config())
    assert "forward" not in vars(layer)


# Formulas that differ slightly from a supported one ------------------------------------------------------------------


class Mine(nn.Module):
    """Experts of a class that the library doesn't know: correct, until a subclass changes one thing."""

    def __init__(self, number: int = 5) -> None:
        super().__init__()
        self.num_experts = number
        self.first = nn.Parameter(torch.randn(number, 2 * 16, 12))
        self.second = nn.Parameter(torch.randn(number, 12, 16))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            inside = self.between(x[token] @ self.first[expert].T)
            total.index_add_(0, token, self.weighted(inside @ self.second[expert].T, weights[token, place, None]))
        return total

    def between(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up

    def weighted(self, given: Tensor, weights: Tensor) -> Tensor:
        return given * weights


class Swapped(Mine):
    def between(self, both: Tensor) -> Tensor:
        up, gate = both.chunk(2, dim=-1)
        return silu(gate) * up


class QuickGelu(Mine):
    def between(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return gate * torch.sigmoid(1.702 * gate) * up


class HiddenClamp(Mine):
    def between(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate).clamp(max=200.0) * up


class Limited(Mine):
    """DeepSeek-V4's limit applied after the activation instead of before it, as in Step3p7."""

    def __init__(self) -> None:
        super().__init__()
        self.swiglu_limit = 7.0

    def between(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)


class OneSided(Limited):
    def between(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate.clamp(max=7.0)) * up.clamp(max=7.0)


class Squared(Mine):
    def weighted(self, given: Tensor, weights: Tensor) -> Tensor:
        return given * weights * weights


class WeightedInside(Mine):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x * weights.sum(-1, keepdim=True), chosen, torch.ones_like(weights))


class Residual(Mine):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x + super().forward(x, chosen, weights)


class Doubled(Mine):
    """The last expert is weighted twice."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights * torch.where(chosen == self.num_experts - 1, 2.0, 1.0))


class Dropping(Mine):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x, chosen, weights), 0.1, self.training)


class AlmostErf(Mine):
    """An approximation of gelu other than the tanh one."""

    def between(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return gelu(gate) * (1 + 1e-4) * up


class TakesTheLastForAnother(Mine):
    """An id out of range selects the last expert."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen.clamp(max=self.num_experts - 1), weights)


class Quantized(Mine):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, 32, 12, dtype=torch.uint8), requires_grad=False)


WRONG: tuple[type[Mine], ...] = (Swapped, QuickGelu, HiddenClamp, Limited, OneSided, Squared, WeightedInside)
WRONG += (Residual, Doubled, Dropping, AlmostErf, TakesTheLastForAnother, Quantized)


def test_a_class_nobody_has_heard_of() -> None:
    found = experts.prove(Mine())
    assert (found.up, found.down, found.variant) == ("first", "second", "swiglu")
    layer = Mine().double()
    given = inputs(SimpleNamespace(parameters=layer.parameters, down_proj=layer.second))
    expected = gradients(layer, layer, given)
    ops.apply_ops(layer, config())
    assert_same(gradients(layer, layer, given), expected)


@pytest.mark.parametrize("class_", WRONG)
def test_a_formula_that_is_not_quite_one_is_refused(class_: type[Mine]) -> None:
    with pytest.raises(Unproven):
        experts.prove(class_())
    model = nn.ModuleDict({"experts": class_()})
    with pytest.raises(UnsupportedFeatureError, match=class_.__name__):
        ops.apply_ops(model, config())


def test_experts_that_are_no_parameters_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="experts .Linear.: its experts are not held in two parameters"):
        ops.apply_ops(nn.ModuleDict({"experts": nn.Linear(2, 2)}), config())


def test_biases_that_no_variant_has_are_refused() -> None:
    class Biased(Mine):
        def __init__(self) -> None:
            super().__init__()
            self.first_bias = nn.Parameter(torch.randn(5, 32))
            self.second_bias = nn.Parameter(torch.randn(5, 12))

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            for expert in chosen.unique().tolist():
                token, place = torch.where(chosen == expert)
                inside = self.between(x[token] @ self.first[expert].T + self.first_bias[expert])
                one = inside @ self.second[expert].T + self.second_bias[expert]
                total.index_add_(0, token, one * weights[token, place, None])
            return total

    with pytest.raises(Unproven, match="no variant of that with biases"):
        experts.prove(Biased())


# Inputs of a kernel --------------------------------------------------------------------------------------------------


@since_5
def test_ids_of_other_ranks_experts_count_nothing() -> None:
    """With experts on several ranks, transformers marks other ranks' experts by an id past the last, which its eager code skips."""
    layer = make(*CLASSES[0][:4]).double()
    given = inputs(layer)
    given[1][::3, 1] = 4
    given[1][2] = 4
    try:
        expected = gradients(eager(layer), layer, given)
    except RuntimeError:  # older releases don't support such an id: compare with their weights set to 0

        def kept(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return eager(layer)(x, ids.where(ids < 4, 0), weights.where(ids < 4, 0))

        expected = gradients(kept, layer, given)
    ops.apply_ops(layer, config())
    assert_same(gradients(layer, layer, given), expected)
    assert expected["weights"][2].eq(0).all()


@since_5
def test_the_arguments_are_taken_by_name_too() -> None:
    layer = make(*CLASSES[1][:4]).double()
    x, ids, weights = inputs(layer)
    expected = eager(layer)(x, ids, weights)
    ops.apply_ops(layer, config())
    torch.testing.assert_close(layer(x, router_indices=ids, routing_weights=weights), expected)


@since_5
def test_what_a_kernel_is_not_given() -> None:
    layer = make(*CLASSES[0][:4])
    ops.apply_ops(layer, config())
    x, ids, weights = inputs(layer, torch.float32)
    with pytest.raises(ValueError, match=r"there are \(11, 1\) weights for \(11, 2\) experts"):
        layer(x, ids, weights[:, :1])
    with pytest.raises(TypeError, match="of one dtype"):
        layer(x.bfloat16(), ids, weights)
    assert layer(x[:0], ids[:0], weights[:0]).shape == (0, 32)


@since_5
def test_autocast() -> None:
    """As for linear layers: float32 parameters, products in bfloat16. The result has the dtype of the hidden states."""
    layer = make(*CLASSES[0][:4])
    given = inputs(layer, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(eager(layer), layer, given)
        ops.apply_ops(layer, config())
        found = gradients(layer, layer, given)
    assert found["output"].dtype == expected["output"].dtype == torch.float32
    # The orders of the sums in bfloat16 differ.
    assert_same(found, expected, 2**-6)
    assert not torch.equal(found["output"], eager(layer)(*given))


@since_5
def test_compiled() -> None:
    """If the kernel is traceable, the whole forward is traced into one graph."""

    def dense(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, other = torch.einsum("th,eoh->teo", x, up).chunk(2, dim=-1)
        given = torch.einsum("tei,ehi->teh", silu(gate) * other, down)
        return torch.einsum("teh,te->th", given, torch.zeros_like(given[..., 0]).scatter_add(1, index, weights))

    ops.register_kernel("moe", "swiglu", "dense")(lambda: dense)
    try:
        layer = make(*CLASSES[0][:4])
        given = inputs(layer, torch.float32)
        expected = gradients(eager(layer), layer, given)
        ops.apply_ops(layer, config("dense"))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_same(gradients(compiled, layer, given), expected, 1e-5)
    finally:
        ops.unregister_kernel("moe", "swiglu", "dense")


# transformers' own switch --------------------------------------------------------------------------------------------

SWITCH = f"kernel_compat_{PLAIN}"


@since_5
def test_without_the_shim_the_switch_does_not_know_the_name() -> None:
    with pytest.raises((ValueError, KeyError)):
        build("qwen3_moe", experts_implementation=SWITCH)


@since_5
def test_the_switch_of_transformers() -> None:
    expected = step(build("qwen3_moe"))
    with kernel_compat.installed() as report:
        assert report["tf5_experts"].state == "applied"
        model = build("qwen3_moe", experts_implementation=SWITCH)
        assert model.config._experts_implementation == SWITCH
        assert_same(step(model), expected)
        layer = model.model.layers[0].mlp.experts
        assert list(vars(layer)["_kernel_compat_experts"]) == [PLAIN]
        assert_same(step(copy.deepcopy(model)), expected)
        assert "_kernel_compat_experts" in vars(pickle.loads(pickle.dumps(layer)))

        model.set_experts_implementation("kernel_compat_swiglu_alone")
        assert_same(step(model), expected)

        ops.apply_ops(model, config())  # the binding on the instance takes precedence
        assert_same(step(model), expected)
    assert SWITCH not in importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS


@since_5
def test_the_switch_refuses_what_the_kernel_is_not_for() -> None:
    with kernel_compat.installed():
        model = build("gpt_oss", experts_implementation="kernel_compat_swiglu_alone")
        with pytest.raises(UnsupportedFeatureError, match="GptOssExperts, which is of the variant 'gpt_oss'"):
            step(model)
        with pytest.raises(KernelUnavailableError, match="torch-npu is not installed"):
            build("qwen3_moe", experts_implementation="kernel_compat_fused_npu")
        with pytest.raises(ValueError, match="kernel_compat_nothing"):
            build("qwen3_moe", experts_implementation="kernel_compat_nothing")


@since_5
def test_the_names_that_are_entered_without_importing_the_kernels_are_the_librarys() -> None:
    from kernel_compat_ops.builtin import SPECS
    from kernel_compat_ops.tf5_experts import BUILT_IN, PREFIX

    found = {f"{PREFIX}{spec.name}" for spec in SPECS if spec.op == "moe"}
    assert set(BUILT_IN) == found

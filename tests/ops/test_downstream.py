"""Ops, variants, values and kernels of other projects; the ones of VeOmni 0.1.12 as data."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from veomni_kernels import VEOMNI

from kernel_compat import Device, Environment, KernelUnavailableError, UnsupportedFeatureError, cli, ops
from kernel_compat_ops import registry

#: VeOmni's fields whose values are no kernels of its registry: its models read them.
VALUES = {
    "dsa_indexer": ("cudnn", "tilelang"),
    "dsa_attention": ("flashmla_cudnn", "tilelang"),
    "qat": ("fp8_blockwise",),
}
H200 = Device("NVIDIA H200", (9, 0))
B200 = Device("NVIDIA B200", (10, 0))
PACKAGES = {"torch": "2.11.0", "triton": "3.6.0", "liger-kernel": "0.8.0", "quack-kernels": "0.5.0"}
GPU = Environment(
    packages={**PACKAGES, "flash-linear-attention": "0.4", "flash-attn": "2.8.3"},
    imports={"flash_attn": ("flash-attn",)},
    devices=(H200,),
)
NPU = Environment(packages={"torch": "2.10.0", "torch-npu": "2.10.0"})
MLU = Environment(packages={"torch": "2.10.0", "torch-mlu": "1.30.0"})


def register(there: ops.OpRegistry, *, override: bool = False, prefix: str = "") -> None:
    """Register VeOmni's ops and kernels; the ones of its experts by the values of the field that they share with ``moe``."""
    for op, values in VALUES.items():
        there.register_op(op, values=values, default="none" if op == "qat" else None)
    for (op, variant), kernels in VEOMNI.items():
        there.register_op(op, [variant], field="moe_implementation" if op == "moe_experts" else None)
        for name, devices, low, high in kernels:
            hardware = ops.Hardware(
                tuple({"gpu": "cuda"}.get(device, device) for device in devices.split()),
                divmod(low, 10) if low else None,
                max_capability=divmod(high, 10) if high else None,
            )
            value = prefix + name if op == "moe_experts" else name
            there.register(op, variant, value, hardware=hardware, override=override)(lambda: kernel)


def kernel(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.fixture
def veomni() -> ops.OpRegistry:
    """A registry of its own: its kernels are called in another way than the library's of the same names."""
    there = ops.OpRegistry()
    register(there, prefix="fused_")
    return there


@pytest.fixture
def other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an NPU and an MLU, as torch sees them."""
    monkeypatch.setattr(Environment, "detect", lambda *_: Environment(packages={**NPU.packages, **MLU.packages}))
    for kind in ("npu", "mlu"):
        monkeypatch.setattr(torch, kind, SimpleNamespace(device_count=lambda: 1), raising=False)


@pytest.fixture
def clean() -> Iterator[None]:
    """The registry that configs use, with what tests add to it removed."""
    before = registry.default._ops, dict(registry.default._specs)
    registry.default._ops = dict(before[0])
    yield
    registry.default._ops, registry.default._specs = before


@pytest.mark.usefixtures("other_devices")
def test_veomni_s_kernels_are_accepted_and_its_slots_bound_to_them(veomni: ops.OpRegistry) -> None:
    assert {(spec.op, spec.variant) for spec in veomni.kernels()} == VEOMNI.keys()
    assert len(veomni.kernels()) == sum(map(len, VEOMNI.values())) == 35

    for (op, variant), kernels in VEOMNI.items():
        for name, devices, low, high in kernels:
            slot = ops.OpSlot(op, variant, veomni)
            assert (slot.op_name, slot.variant) == (op, variant)
            value = f"fused_{name}" if op == "moe_experts" else name
            (spec,) = (spec for spec in veomni.kernels(op, value) if spec.variant == variant)
            other = {"gpu", "any"}.isdisjoint(devices.split())
            assert bool(spec.unavailable_because(GPU)) == other
            assert bool(spec.unavailable_because(Environment(devices=(B200,)))) == (other or bool(high and high < 100))
            assert bool(spec.unavailable_because(Environment(devices=(Device("T4", (6, 0)),)))) == (other or bool(low))
            if "gpu" not in devices.split():
                slot.bind(value)
                assert slot.bound_kernel() is kernel
                assert slot(1, a=2) == ((1,), {"a": 2})


def test_they_can_replace_the_library_s_in_the_registry_that_configs_use(clean: None) -> None:
    before = len(ops.registered_kernels())
    with pytest.raises(
        ValueError, match="cross_entropy_loss has a kernel 'liger_kernel' for the variant 'causal' already"
    ):
        register(registry.default)

    register(registry.default, override=True)

    replaced = {
        ("cross_entropy_loss", "causal"): 3,
        ("rms_norm_gated", "standard"): 1,
        ("load_balancing_loss", "standard"): 1,
    }
    replaced |= {("rms_norm", "standard"): 2, ("rotary_pos_emb", "full"): 2, ("swiglu_mlp", "standard"): 1}
    assert len(ops.registered_kernels()) == before + 35 - sum(replaced.values())
    assert ops.registered_ops()["mhc"].variants == ("pre", "post", "head")
    assert ops.registered_ops()["rms_norm"].variants == ("standard", "offset", "unweighted", "qwen3_5")


@pytest.mark.parametrize(
    ("values", "environment"),
    [
        ("model_path: llama", None),
        ("ops_implementation: {attn_implementation: flash_attention_2, moe_implementation: fused_triton}", GPU),
        (
            """ops_implementation:
    attn_implementation: sdpa
    rms_norm_implementation: npu
    rotary_pos_emb_implementation: npu
    rotary_pos_emb_vision_implementation: npu
    moe_implementation: fused_npu
    rms_norm_gated_implementation: npu
    causal_conv1d_implementation: npu
    chunk_gated_delta_rule_implementation: npu_ascendc
    load_balancing_loss_implementation: eager
    cross_entropy_loss_implementation: chunk_loss""",
            NPU,
        ),
        (
            """ops_implementation:
    attn_implementation: eager
    moe_implementation: fused_quack
    dsa_indexer_implementation: tilelang
    dsa_attention_implementation: flashmla_cudnn
    mhc_implementation: tilelang
    qat_implementation: fp8_blockwise
    chunk_gated_delta_rule_implementation: flash_qla
    rms_norm_gated_implementation: fla""",
            GPU,
        ),
        ("ops_implementation: {moe_implementation: fused_mlu_triton, qat_implementation: none}", MLU),
    ],
    ids=["no block", "a few", "npu", "deepseek", "mlu"],
)
def test_its_files_are_read(
    tmp_path: Path, veomni: ops.OpRegistry, values: str, environment: Environment | None
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model:\n  {values}\ntrain: {{init_device: meta}}\n")

    config = ops.OpsConfig.from_yaml(file, registry=veomni, environment=environment)

    assert config == ops.OpsConfig.from_yaml(file, registry=veomni, deferred=True)
    for name, value in config.values().items():
        assert (value in (None, "eager")) == (name not in values or f"{name}: eager" in values)
    assert config["moe_experts"] == config["moe"] == config.moe_implementation
    slot = ops.OpSlot("mhc", "pre", veomni)
    if "mhc" not in values:
        slot.bind(config)
        assert slot.use_eager_impl


@pytest.mark.usefixtures("other_devices")
def test_a_slot_follows_a_field_of_another_name(veomni: ops.OpRegistry) -> None:
    slot = ops.OpSlot("moe_experts", "standard", veomni)

    slot.bind(ops.OpsConfig(moe_implementation="fused_npu", registry=veomni, deferred=True))

    assert slot.value == "fused_npu"
    assert slot.bound_kernel() is kernel
    with pytest.raises(ValueError, match="moe_experts has no kernel 'fused_npu' for the variant 'gpt_oss'"):
        ops.OpSlot("moe_experts", "gpt_oss", veomni).bind("fused_npu")
    with pytest.raises(ValueError, match="moe_implementation='npu': the values are eager, .*did you mean fused_npu"):
        ops.OpsConfig(moe_implementation="npu", registry=veomni)


class Experts(nn.Module):
    """A module whose slot is a global of its file, and one that keeps what the slot had when it was built."""

    def __init__(self, slot: ops.OpSlot) -> None:
        super().__init__()
        self.kept = slot.bound_kernel() or torch.neg

    def forward(self, x: Tensor) -> Any:
        return self.kept(x)


@pytest.mark.usefixtures("other_devices")
def test_a_module_keeps_the_kernel_that_it_was_built_with(veomni: ops.OpRegistry) -> None:
    slot = ops.OpSlot("causal_conv1d", "standard", veomni)
    slot.bind("npu")
    module = Experts(slot)
    slot.bind("eager")

    assert module(1) == ((1,), {})
    assert Experts(slot)(torch.tensor(1)) == -1


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Gate(nn.Module):
    """A module of a downstream project with an op of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = ops.OpSlot("squared_gate", "relu")

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel.use_non_eager_impl:
            found: Tensor = self.kernel(x)
            return found
        if not self.kernel.use_eager_impl:
            raise RuntimeError("nothing chosen")
        return x.relu() ** 2


@pytest.fixture
def gate(clean: None) -> None:
    ops.register_op("squared_gate", ("relu",), values=("by_hand",))
    ops.register_kernel("squared_gate", "relu", "fast", note="twice as fast")(lambda: lambda x: x.relu().square() + 1)


def test_an_op_of_one_s_own_is_a_field_and_bound_to_slots(gate: None) -> None:
    model = nn.Sequential(Gate(), nn.Linear(2, 2))
    x = torch.tensor([[-1.0, 2.0]])
    config = ops.OpsConfig(squared_gate_implementation="fast")
    changes: dict[str, Any] = {"squared_gate_implementation": "eager"}

    assert config["squared_gate"] == "fast"
    assert getattr(config, "squared_gate_implementation", "eager") == "fast"
    assert getattr(ops.OpsConfig(), "squared_gate_implementation", None) == "eager"
    assert not hasattr(config, "circled_gate_implementation")
    assert config.others == (("squared_gate_implementation", "fast"),)
    assert config.values()["squared_gate_implementation"] == "fast"
    assert config == ops.OpsConfig.from_dict({"squared_gate_implementation": "fast"}) != ops.OpsConfig.eager()
    assert {config: 1}[dataclasses.replace(config)] == 1
    assert dataclasses.replace(config, **changes) == ops.OpsConfig.eager()
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(RuntimeError, match="nothing chosen"):
        model(x)
    with ops.apply_ops(model, config) as report:
        assert [(b.path, b.op, b.variant, b.kernel) for b in report.bindings] == [
            ("0.kernel", "squared_gate", "relu", "fast")
        ]
        assert torch.equal(model[0](x), torch.tensor([[1.0, 5.0]]))
    with ops.apply_ops(model, ops.OpsConfig.eager()):
        assert torch.equal(model[0](x), torch.tensor([[0.0, 4.0]]))
    notes = ops.apply_ops(nn.Linear(2, 2), config).notes
    assert notes == ("squared_gate: this model has no module with an OpSlot for it",)
    notes = ops.apply_ops(nn.Linear(2, 2), ops.OpsConfig(squared_gate_implementation="by_hand")).notes
    assert notes == ("squared_gate: 'by_hand' chooses no kernel here: the code that registered the op reads it",)
    assert ops.refusal(model, "squared_gate", "fast") == ""


def test_the_same_values_of_another_registry_are_another_config(gate: None) -> None:
    mine = ops.OpRegistry()
    mine.register_op("squared_gate", ("relu",))
    mine.register("squared_gate", "relu", "fast")(lambda: lambda x: -x)
    values = {"squared_gate_implementation": "fast"}
    model = nn.Sequential(Gate())
    config, theirs = ops.OpsConfig.from_dict(values), ops.OpsConfig.from_dict(values, registry=mine)
    ops.apply_ops(model, config)

    assert config != theirs
    with pytest.raises(ValueError, match="of another registry"):
        ops.apply_ops(model, theirs)


def test_the_command_lists_it(gate: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "--json"]) == 0

    choices = [one for one in json.loads(capsys.readouterr().out)["choices"] if one["op"] == "squared_gate"]
    assert [(one["value"], one["field"], one["variants"]) for one in choices] == [
        ("eager", "squared_gate_implementation", []),
        ("by_hand", "squared_gate_implementation", []),
        ("fast", "squared_gate_implementation", ["relu"]),
    ]
    assert choices[2]["note"] == "twice as fast"
    assert cli.main(["ops"]) == 0
    shown = capsys.readouterr().out
    assert "squared_gate_implementation" in shown
    assert "by_hand" in shown


def test_apply_ops_checks_what_was_deferred(clean: None) -> None:
    ops.register_op("squared_gate", ("relu",))
    ops.register_kernel("squared_gate", "relu", "fast", requires=("no-such-package",), install="Ask them.")(
        lambda: print
    )
    config = ops.OpsConfig(squared_gate_implementation="fast", deferred=True)
    model = nn.Sequential(Gate())

    with pytest.raises(KernelUnavailableError, match="squared_gate_implementation='fast'.*no-such-package.*Ask them"):
        ops.apply_ops(model, config)
    with pytest.raises(KernelUnavailableError, match="no-such-package"):
        ops.apply_ops(nn.Linear(2, 2), config)
    assert not model[0].kernel.is_bound
    with pytest.raises(KernelUnavailableError, match="flash_attention_3"):
        ops.apply_ops(model, ops.OpsConfig(attn_implementation="flash_attention_3", deferred=True))


def test_variants_and_values_of_one_s_own_for_the_library_s_ops(clean: None) -> None:
    ops.register_op("rms_norm", ("unweighted",), values=("theirs",))
    ops.register_kernel("rms_norm", "unweighted", "fast")(lambda: print)

    assert ops.registered_ops()["rms_norm"].variants == ("standard", "offset", "unweighted")
    assert ops.OpsConfig(rms_norm_implementation="theirs")["rms_norm"] == "theirs"
    ops.OpSlot("rms_norm", "unweighted").bind("fast")
    model = nn.Sequential(RMSNorm())
    with pytest.raises(UnsupportedFeatureError, match="the kernel is for unweighted"):
        ops.apply_ops(model, ops.OpsConfig(rms_norm_implementation="fast"))
    ops.unregister_op("rms_norm")
    assert ops.registered_ops()["rms_norm"].variants == ops.OPS["rms_norm"]
    assert ops.registered_kernels("rms_norm", "fast") == ()
    assert ops.registered_kernels("rms_norm", "triton") != ()
    with pytest.raises(ValueError, match="rms_norm is the library's own, and no variant or value was added"):
        ops.unregister_op("rms_norm")


def test_an_op_can_be_unregistered_and_registered_again(gate: None) -> None:
    config, slot = ops.OpsConfig(squared_gate_implementation="fast"), ops.OpSlot("squared_gate", "relu")
    slot.bind(config)
    ops.register_op("squared_gate", ("relu",), values=("by_hand",))  # as a reloaded module does
    ops.register_op("squared_gate", ("gelu",))
    assert ops.registered_ops()["squared_gate"] == ops.Op("squared_gate", ("relu", "gelu"), ("by_hand",))

    ops.unregister_op("squared_gate")

    assert slot.use_non_eager_impl
    assert "squared_gate" not in ops.registered_ops()
    assert ops.registered_kernels("squared_gate") == ()
    for refused in (lambda: ops.OpSlot("squared_gate", "relu"), lambda: ops.unregister_op("squared_gate")):
        with pytest.raises(ValueError, match="'squared_gate' is no op"):
            refused()
    with pytest.raises(ValueError, match="'squared_gate_implementation' is no field"):
        ops.OpsConfig(squared_gate_implementation="fast")
    with pytest.raises(ValueError, match="squared_gate_implementation='fast': the values are none"):
        config.require()
    ops.register_op("squared_gate", ("relu",))
    with pytest.raises(ValueError, match="squared_gate_implementation='fast': the values are eager"):
        config.require()


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        (
            "squared_gate",
            {"field": "gate"},
            "registered already with the field 'squared_gate_implementation', not 'gate'",
        ),
        ("squared_gate", {"default": "none"}, "registered already with the default 'eager', not 'none'"),
        ("squared_gate", {"values": ("fast",)}, "'fast' is the default or a kernel's name already"),
        ("squared_gate", {"values": ("eager",)}, "'eager' is the default or a kernel's name already"),
        (
            "other",
            {"field": "moe_implementation", "default": "none"},
            "is that of moe, whose default is 'eager', not 'none'",
        ),
        ("other", {"field": "attn_implementation"}, "'attn_implementation' can't be the field of an op"),
        ("other", {"field": "reasons"}, "'reasons' can't be the field"),
        ("other", {"field": "values"}, "'values' can't be the field"),
        ("other", {"field": "_gate"}, "a field is an identifier without a leading underscore, not '_gate'"),
        ("other", {"default": 3}, "default is a string, not 3"),
        ("attn", {}, "'attn_implementation' can't be the field of an op"),
        ("two words", {}, "an op's name is an identifier, not 'two words'"),
        (3, {}, "an op's name is an identifier, not 3"),
        ("other", {"variants": "relu"}, "variants are several strings, not 'relu'"),
        ("other", {"values": (3,)}, "values are strings in a tuple, not .3,."),
        ("other", {"variants": ("",)}, "a variant or value is empty"),
    ],
)
def test_an_op_that_makes_no_sense_is_refused(gate: None, name: Any, arguments: dict[str, Any], problem: str) -> None:
    before = ops.registered_ops()

    with pytest.raises((ValueError, TypeError), match=problem):
        ops.register_op(name, **arguments)

    assert ops.registered_ops() == before


def test_no_field_can_have_the_name_of_a_part_of_a_config() -> None:
    parts = {*dir(ops.OpsConfig()), *inspect.signature(ops.OpsConfig).parameters}
    library = {op.field for op in ops.registered_ops().values()}

    for name in sorted(one for one in parts - library if not one.startswith("_")):
        with pytest.raises(ValueError, match=f"{name!r} can't be the field of an op"):
            ops.Op("other", field=name)


def test_a_kernel_can_t_have_the_name_of_a_value(gate: None) -> None:
    with pytest.raises(ValueError, match="'by_hand' is a value of squared_gate_implementation that chooses no kernel"):
        ops.register_kernel("squared_gate", "relu", "by_hand")(print)


def test_a_field_of_veomni_s_is_free_for_the_code_that_registers_its_op(clean: None) -> None:
    with pytest.raises(
        ValueError, match="mhc_implementation='tilelang': kernel-compat has no kernels.*registers its op"
    ):
        ops.OpsConfig(mhc_implementation="tilelang")
    ops.register_op("mhc", values=("tilelang",))

    assert ops.OpsConfig(mhc_implementation="tilelang")["mhc"] == "tilelang"

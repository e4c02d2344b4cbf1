"""OpsConfig: accepted arguments, errors and when they are raised, and the defaults it chooses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

import kernel_compat
import kernel_compat_ops
from kernel_compat import Device, Environment, KernelUnavailableError, ops
from kernel_compat_ops import registry

TORCH = {"torch": "2.11.0", "triton": "3.6.0"}
LIGER = {**TORCH, "liger-kernel": "0.8.0"}
H200 = Device("NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_what_is_left_out_is_eager() -> None:
    values = ops.OpsConfig().values()

    assert values.pop("attn_implementation") is None
    assert set(values.values()) == {"eager"}
    assert list(values) == [f"{op}_implementation" for op in registry.OPS]
    assert ops.OpsConfig() == ops.OpsConfig.eager() == ops.OpsConfig.from_dict({})


def test_a_file_of_veomni_s_loads(tmp_path: Path) -> None:
    file = tmp_path / "qwen3.yaml"
    file.write_text("""
model:
  model_path: Qwen3-0.6B-Base
  ops_implementation:
    attn_implementation: sdpa
    moe_implementation: eager
    cross_entropy_loss_implementation: chunk_loss
    rms_norm_implementation: eager
    causal_conv1d_implementation: eager
    qat_implementation: none
train:
  init_device: meta
""")

    config = ops.OpsConfig.from_yaml(file)

    assert config == ops.OpsConfig(attn_implementation="sdpa", cross_entropy_loss_implementation="chunk_loss")
    assert config["cross_entropy_loss"] == "chunk_loss"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: [", "is no YAML"),
        ("model: 3", "model is no mapping, so that it has no ops_implementation"),
        ("[model]", "the file is no mapping, so that it has no model"),
        ("model: {ops_implementations: {}}", "a key 'ops_implementations'; did you mean ops_implementation"),
        ("models: {ops_implementation: {}}", "a key 'models'; did you mean model"),
        ("ops_implementation: {}", "has ops_implementation, and only model.ops_implementation is read"),
        (
            "vision: {ops_implementation: {}}",
            "has vision.ops_implementation, and only model.ops_implementation is read",
        ),
        (
            "model: {moe_implementation: fused}",
            "has model.moe_implementation, and only model.ops_implementation is read",
        ),
        ("model: {attn_implementation: sdpa}", "has model.attn_implementation, and only"),
        ("model: {ops_implementation: [a]}", "a mapping of fields to values"),
        ("model: {ops_implementation: {rms_norm: eager}}", "did you mean rms_norm_implementation"),
        ("model: {ops_implementation: {rms_norm_implementation: 3}}", "must be a string, not 3"),
        ("model: {ops_implementation: {mhc_implementation: tilelang}}", "can only be 'eager'"),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)

    with pytest.raises((ValueError, TypeError), match=problem):
        ops.OpsConfig.from_yaml(file)


@pytest.mark.parametrize(
    "text", ["model: {ops_implementation: }", "model: {model_path: somewhere}", "model:", "train: {lr: 1}", ""]
)
def test_a_file_without_ops_chooses_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)

    assert ops.OpsConfig.from_yaml(file) == ops.OpsConfig.eager()


def test_an_unknown_value_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="rms_norm_implementation='lyger': the values are eager, liger_kernel, triton"):
        ops.OpsConfig(rms_norm_implementation="lyger")
    with pytest.raises(ValueError, match="no attention name here"):
        ops.OpsConfig(attn_implementation="native-sparse")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (Environment(packages=TORCH, devices=(H200,)), "liger-kernel is not installed.*pip install liger-kernel"),
        (Environment(packages=LIGER), r"it needs a CUDA device, and none is visible\."),  # nothing to install
        (
            Environment(packages={**LIGER, "liger-kernel": "0.5.0"}, devices=(H200,)),
            "liger-kernel 0.5.0 is installed, and it needs",
        ),
    ],
)
def test_what_can_t_run_is_refused_with_what_is_missing(environment: Environment, reason: str) -> None:
    with pytest.raises(KernelUnavailableError, match=reason):
        ops.OpsConfig(rms_norm_implementation="liger_kernel", environment=environment)


def test_a_device_that_is_too_old_is_refused_with_what_it_needs() -> None:
    old = Environment(packages=TORCH, devices=(Device("Tesla P100", (6, 0)),))

    with pytest.raises(KernelUnavailableError, match="capability 7.0 or greater, and there is Tesla P100"):
        ops.OpsConfig(rms_norm_implementation="triton", environment=old)
    assert (
        ops.OpsConfig(rms_norm_implementation="triton", environment=Environment(packages=TORCH, devices=(H200,)))[
            "rms_norm"
        ]
        == "triton"
    )


def test_what_is_written_in_triton_runs_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    assert (
        ops.OpsConfig(rms_norm_implementation="triton", environment=Environment(packages=TORCH))["rms_norm"] == "triton"
    )
    with pytest.raises(KernelUnavailableError, match="none is visible"):  # liger-kernel doesn't run without a GPU
        ops.OpsConfig(rms_norm_implementation="liger_kernel", environment=Environment(packages=LIGER))


def test_auto_takes_the_best_and_says_why() -> None:
    bare = ops.OpsConfig.auto(Environment(packages=TORCH))
    full = ops.OpsConfig.auto(Environment(packages=LIGER, devices=(H200,)))
    old = ops.OpsConfig.auto(Environment(packages=LIGER, devices=(Device("Tesla P100", (6, 0)),)))

    assert bare == ops.OpsConfig(attn_implementation="sdpa", cross_entropy_loss_implementation="chunk_loss")
    assert bare.reasons["attn_implementation"].endswith("sdpa runs here")
    assert bare.reasons["cross_entropy_loss_implementation"].startswith("liger_kernel: liger-kernel is not installed")
    assert bare.reasons["cross_entropy_loss_implementation"].endswith("chunk_loss runs here")
    assert [full[op] for op in ("cross_entropy_loss", "swiglu_mlp")] == ["liger_kernel"] * 2
    assert [full[op] for op in ("rms_norm", "rotary_pos_emb")] == ["triton"] * 2
    assert [old[op] for op in ("rms_norm", "rotary_pos_emb")] == ["liger_kernel"] * 2
    assert full["load_balancing_loss"] == "triton"
    assert set(full.reasons) == set(full.values())


def test_it_is_a_value() -> None:
    config = ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss")

    assert {config: 1}[ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss")] == 1
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, cross_entropy_loss_implementation="eager") == ops.OpsConfig.eager()


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\xff", "config.yaml is no YAML: 'utf-8'"), (b"a: 2026-02-30", "config.yaml is no YAML: day")],
)
def test_the_error_of_a_file_names_it(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)

    with pytest.raises(ValueError, match=problem):
        ops.OpsConfig.from_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"requires": "numpy"}, r"requires is a tuple of strings, as \('numpy',\), not 'numpy'"),
        ({"assumes": "equal_halves"}, "assumes is a tuple of strings"),
        ({"hardware": "cuda"}, r"hardware is a Hardware, as Hardware\('cuda'\), not 'cuda'"),
    ],
)
def test_a_kernel_that_would_break_every_config_is_refused(attributes: dict[str, Any], problem: str) -> None:
    before = ops.registered_kernels()

    with pytest.raises(TypeError, match=problem):
        ops.register_kernel("rms_norm", "standard", "theirs", **attributes)(lambda: print)

    assert ops.registered_kernels() == before


def test_a_factory_that_returns_no_kernel_is_refused_before_the_first_forward() -> None:
    forgotten: Any = ops.KernelSpec("rms_norm", "standard", "theirs", lambda: None)  # type: ignore[arg-type, return-value]

    with pytest.raises(KernelUnavailableError, match="its factory returns None, which can't be called"):
        forgotten.load()


def test_third_parties_kernels_are_values() -> None:
    @ops.register_kernel("rms_norm", "standard", "theirs", requires=("some-package>=2",), install="Ask them.")
    def theirs() -> Any:
        return lambda x, weight, eps, *, casting: x

    try:
        with pytest.raises(KernelUnavailableError, match="some-package is not installed.*Ask them"):
            ops.OpsConfig(rms_norm_implementation="theirs")
        there = Environment(packages={"some-package": "2.1"})
        assert ops.OpsConfig(rms_norm_implementation="theirs", environment=there)["rms_norm"] == "theirs"
        with pytest.raises(ValueError, match="has a kernel 'theirs' for the variant 'standard' already"):
            ops.register_kernel("rms_norm", "standard", "theirs")(theirs)
        ops.register_kernel("rms_norm", "standard", "theirs", override=True)(theirs)
        assert ops.OpsConfig(rms_norm_implementation="theirs")["rms_norm"] == "theirs"
    finally:
        ops.unregister_kernel("rms_norm", "standard", "theirs")
    with pytest.raises(ValueError, match="the values are"):
        ops.OpsConfig(rms_norm_implementation="theirs")
    with pytest.raises(ValueError, match="has no kernel 'theirs'"):
        ops.unregister_kernel("rms_norm", "standard", "theirs")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("", "standard", "x", print), "needs an op"),
        (("rms_norm", 3, "x", print), "needs a variant, not 3"),
        (("rms_norm", "standard", "eager", print), "the model's own code"),
        (("rms_norm", "standard", " ", print), "needs a name"),
        (("rms_norm", "standard", "x", 3), "factory must be callable"),
        (("rms_norm", "standard", "x", print, ("a b c",)), "is no requirement"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        ops.KernelSpec(*arguments)


@pytest.mark.parametrize(
    ("op", "variant", "problem"),
    [
        ("rmsnorm", "standard", "'rmsnorm' is no op.*did you mean rms_norm"),
        ("rms_norm", "ofset", "has no variant 'ofset': it has standard, offset; did you mean offset"),
    ],
)
def test_a_kernel_for_an_op_or_variant_that_is_not_there_is_refused(op: str, variant: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ops.register_kernel(op, variant, "x")(print)


@pytest.mark.parametrize(
    "values", [{"rms_norm": "eager"}, {"qat_implementation": "fp8"}, {"rms_norm_implementation": None}]
)
def test_the_constructor_and_from_dict_raise_the_same_errors(values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as first:
        ops.OpsConfig(**values)
    with pytest.raises(type(first.value)) as second:
        ops.OpsConfig.from_dict(values)

    assert str(first.value) == str(second.value)


def test_the_constructor_and_from_dict_know_the_same_fields() -> None:
    values: dict[str, Any] = {
        "mhc_implementation": "eager",
        "qat_implementation": "none",
        "cross_entropy_loss_implementation": "chunk_loss",
    }

    assert ops.OpsConfig(**values) == ops.OpsConfig.from_dict(values)
    assert ops.OpsConfig(**values) == ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss")


def test_a_file_is_read_for_another_machine_or_checked_later(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {ops_implementation: {rms_norm_implementation: liger_kernel}}")
    here, there = Environment(packages=LIGER), Environment(packages=LIGER, devices=(H200,))

    with pytest.raises(KernelUnavailableError, match="none is visible"):
        ops.OpsConfig.from_yaml(file, environment=here)
    assert ops.OpsConfig.from_yaml(file, environment=there)["rms_norm"] == "liger_kernel"
    config = ops.OpsConfig.from_yaml(file, deferred=True)
    assert pickle.loads(pickle.dumps(config)) == config  # sent to the machine with the GPU
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(ops.OpsConfig(registry=ops.OpRegistry()))
    config.require(there)
    with pytest.raises(KernelUnavailableError, match="none is visible"):
        config.require(here)
    with pytest.raises(ValueError, match="did you mean liger_kernel"):
        ops.OpsConfig(rms_norm_implementation="liger", deferred=True)
    with pytest.raises(ValueError, match="no attention name here"):
        ops.OpsConfig(attn_implementation="native-sparse", deferred=True)


@pytest.mark.parametrize(
    ("hardware", "capability", "reason"),
    [
        (ops.Hardware("cuda", max_capability=(9, 0)), (10, 0), "capability 9.0 or less, and there is"),
        (ops.Hardware("cuda", max_capability=(9, 0)), (9, 0), ""),
        (ops.Hardware("cuda", (9, 0), max_capability=(9, 0)), (10, 0), "capability 9.0, and there is"),
        (ops.Hardware("cuda", (8, 0), max_capability=(9, 0)), (12, 0), "capability 8.0 to 9.0, and there is"),
        (ops.Hardware("cuda", (8, 0), max_capability=(9, 0)), (8, 9), ""),
        (ops.Hardware("cuda", (8, 0), max_capability=(9, 0)), (7, 5), "capability 8.0 to 9.0, and there is"),
        (
            ops.Hardware(("cuda", "mlu"), (8, 0)),
            (7, 5),
            "a CUDA device of .* 8.0 or greater or one of torch-mlu, and there",
        ),
    ],
)
def test_hardware_has_a_lowest_and_a_highest_capability(
    hardware: ops.Hardware, capability: tuple[int, int], reason: str
) -> None:
    import re

    reasons = hardware.unavailable_because(Environment(devices=(Device("A GPU", capability),)))

    assert re.search(reason, reasons[0]) if reason else reasons == []


def test_one_of_several_devices_is_enough() -> None:
    hardware = ops.Hardware(("cuda", "mlu"))

    assert hardware.unavailable_because(Environment(packages={"torch-mlu": "1.20"})) == []
    assert hardware.unavailable_because(Environment(devices=(H200,))) == []
    assert hardware.unavailable_because(Environment()) == [
        "it needs a CUDA device or one of torch-mlu, and none is visible"
    ]
    assert ops.Hardware("mlu").unavailable_because(Environment()) == ["torch-mlu is not installed"]
    assert ops.Hardware(("mlu", "hpu")).unavailable_because(Environment(packages={"habana-torch-plugin": "1.23"})) == []
    assert ops.Hardware("xpu").unavailable_because(Environment(packages=TORCH)) == []  # in torch itself
    assert ops.Hardware(("cuda", "cpu")).unavailable_because(Environment()) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"min_capability": 90}, "min_capability is a pair of integers, as .9, 0., not 90"),
        ({"max_capability": "9.0"}, "max_capability is a pair"),
        ({"min_capability": (9, 0), "max_capability": (8, 0)}, "max_capability=.8, 0. is below"),
        ({"device": ()}, "torch's type of device"),
        ({"device": 3}, "torch's type of device"),
        ({"device": ("cuda", 3)}, "torch's type of device"),
        ({"interpreted": (9, 0)}, "interpreted is a bool"),
    ],
)
def test_hardware_that_makes_no_sense_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        ops.Hardware(**{"device": "cuda", **arguments})


def test_entry_points_bring_kernels_and_a_broken_one_breaks_nothing(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    (tmp_path / "theirs.py").write_text(
        "from kernel_compat.ops import KernelSpec, Op\n"
        "SPECS = Op('mhc', ('pre',)), KernelSpec('mhc', 'pre', 'tiled', print), KernelSpec('rms_norm', 'standard', 'theirs', print)\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernel_compat.ops]\ntheirs = theirs:SPECS\nbroken = theirs:NOTHING\n")
    code = (
        "from kernel_compat.ops import OpSlot, OpsConfig, registry\n"
        "print(OpSlot('mhc', 'pre'), OpsConfig(mhc_implementation='tiled')['mhc'])\n"
        "print(OpsConfig(rms_norm_implementation='theirs')['rms_norm'], registry.broken())"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("OpSlot('mhc', 'pre'): unbound tiled\ntheirs {'broken': \"AttributeError")


def test_a_kernel_that_does_not_import_says_so() -> None:
    def factory() -> Any:
        raise OSError("libcuda.so.1 is a text file")

    spec = ops.KernelSpec("rms_norm", "standard", "theirs", factory, install="Install the driver.")

    with pytest.raises(KernelUnavailableError, match="does not import .OSError: libcuda.so.1 is a text file.*driver"):
        spec.load()


def test_a_registry_of_one_s_own() -> None:
    """Its kernels don't get into the registry that configs use."""
    mine = registry.OpRegistry()
    assert mine.kernels() == ()

    @mine.register("rms_norm", "standard", "mine", hardware=ops.Hardware("cuda"))
    def factory() -> Any:
        return None

    assert mine.choices("rms_norm") == ("eager", "mine")
    assert "mine" not in registry.choices("rms_norm")
    with pytest.raises(ValueError, match="already: pass override=True"):
        mine.register("rms_norm", "standard", "mine")(factory)
    mine.require("rms_norm", "mine", Environment(packages=TORCH, devices=(H200,)))
    with pytest.raises(KernelUnavailableError, match="none is visible"):
        mine.require("rms_norm", "mine", Environment(packages=TORCH))
    mine.unregister("rms_norm", "standard", "mine")
    with pytest.raises(ValueError, match="the values are eager"):
        mine.require("rms_norm", "mine", Environment(packages=TORCH))


def test_the_name_of_earlier_releases() -> None:
    for module in (ops, kernel_compat_ops):
        with pytest.warns(kernel_compat.RenamedWarning, match="ops.Report is now BoundOps") as caught:
            assert module.Report is ops.BoundOps
        assert {warning.filename for warning in caught} == {__file__}  # where it is read
    with pytest.warns(kernel_compat.RenamedWarning) as caught:
        from kernel_compat.ops import Report  # type: ignore[attr-defined]
    assert Report is ops.BoundOps
    assert {warning.filename for warning in caught} == {__file__}

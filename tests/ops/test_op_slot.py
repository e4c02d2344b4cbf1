"""Slots for kernels in a user's own modeling code."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_kernels import PLAIN
from torch import Tensor, nn

from kernel_compat import Environment, KernelUnavailableError, UnsupportedFeatureError, ops
from kernel_compat_ops import config as config_module
from kernel_compat_ops.recognisers.norms import reference

CONFIG = ops.OpsConfig(rms_norm_implementation=PLAIN)


class Norm(nn.Module):
    """An RMSNorm with a slot that counts the calls of its eager code and of its kernel."""

    def __init__(self, variant: str = "standard") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.eps = 1e-6
        self.kernel = ops.OpSlot("rms_norm", variant)
        self.calls = {"eager": 0, "kernel": 0}

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel.use_non_eager_impl:
            self.calls["kernel"] += 1
            found: Tensor = self.kernel(x, self.weight, self.eps, casting="llama")
            return found
        self.calls["eager"] += 1
        return reference(x, self.weight, self.eps, False, "llama")


def test_a_slot_is_empty_until_it_is_bound() -> None:
    slot = ops.OpSlot("rms_norm", "standard")

    assert not slot.is_bound
    assert not slot.use_non_eager_impl
    assert not slot.use_eager_impl
    assert slot.bound_kernel() is None
    assert repr(slot) == "OpSlot('rms_norm', 'standard'): unbound"
    with pytest.raises(RuntimeError, match="the OpSlot for rms_norm, standard is empty"):
        slot(torch.ones(2))

    slot.bind(PLAIN)
    assert slot.is_bound
    assert slot.use_non_eager_impl
    assert not slot.use_eager_impl
    assert slot.value == PLAIN
    kept = slot.bound_kernel()
    assert kept is not None
    assert torch.equal(slot(torch.ones(2), torch.ones(2), 0.0, casting="none"), torch.ones(2))
    slot.bind(ops.OpsConfig.eager())
    assert slot.is_bound
    assert slot.use_eager_impl
    assert not slot.use_non_eager_impl
    assert slot.bound_kernel() is None
    assert repr(slot) == "OpSlot('rms_norm', 'standard'): eager"
    assert torch.equal(kept(torch.ones(2), torch.ones(2), 0.0, casting="none"), torch.ones(2))
    with pytest.raises(RuntimeError, match="is empty"):
        slot(torch.ones(2))


def test_a_model_s_slots_are_told_that_eager_was_chosen() -> None:
    model = nn.Sequential(Norm(), Norm())
    model[1].kernel.bind(PLAIN)

    report = ops.apply_ops(model, ops.OpsConfig.eager())
    assert report.bindings == ()
    assert model[0].kernel.use_eager_impl
    assert model[1].kernel.value == PLAIN  # bound by hand
    report.undo()
    assert not model[0].kernel.is_bound
    pytest.importorskip("transformers")
    with ops.use(ops.OpsConfig.eager()):
        assert ops.OpSlot("rms_norm", "standard").use_eager_impl


def test_a_slot_is_copied_and_pickled_with_its_kernel() -> None:
    slot = ops.OpSlot("rms_norm", "standard")
    mine = ops.OpRegistry()

    assert copy.deepcopy(slot).registry is slot.registry
    assert copy.deepcopy(ops.OpSlot("rms_norm", "standard", mine)).registry is mine
    restored = pickle.loads(pickle.dumps(slot))
    restored.bind(PLAIN)
    assert restored.use_non_eager_impl
    assert not slot.is_bound


def test_apply_ops_leaves_the_slots_of_another_registry() -> None:
    model = Norm()
    model.kernel = ops.OpSlot("rms_norm", "standard", ops.OpRegistry())

    ops.apply_ops(model, ops.OpsConfig.eager())
    assert not model.kernel.is_bound

    pytest.importorskip("transformers")
    with ops.use(CONFIG):  # has a value that the other registry doesn't have
        assert not ops.OpSlot("rms_norm", "standard", ops.OpRegistry()).is_bound


def test_apply_ops_fills_a_model_s_slots_and_leaves_their_modules_alone() -> None:
    model = nn.Sequential(Norm(), Norm())

    report = ops.apply_ops(model, CONFIG)
    model(torch.randn(2, 8))

    assert [(b.path, b.variant, b.kernel) for b in report.bindings] == [
        ("0.kernel", "standard", PLAIN),
        ("1.kernel", "standard", PLAIN),
    ]
    assert "forward" not in vars(model[0])
    assert model[0].calls == {"eager": 0, "kernel": 1}
    copied = copy.deepcopy(model)
    report.undo()
    model(torch.randn(2, 8))
    copied(torch.randn(2, 8))
    assert model[0].calls == {"eager": 1, "kernel": 1}
    assert copied[0].calls == {"eager": 0, "kernel": 2}


def test_slots_are_filled_where_models_are_built() -> None:
    pytest.importorskip("transformers")
    with ops.use(CONFIG):
        norm = Norm()
    outside = Norm()

    norm(torch.randn(2, 8))

    assert norm.calls["kernel"] == 1
    assert not outside.kernel.use_non_eager_impl
    report = ops.apply_ops(nn.Sequential(norm), CONFIG)
    assert report.bindings == ()
    assert report.notes == ()


def test_a_slot_of_another_variant_is_refused() -> None:
    @ops.register_kernel("rms_norm", "standard", "standard_alone")
    def factory() -> Any:
        return reference

    try:
        config = ops.OpsConfig(rms_norm_implementation="standard_alone")
        with pytest.raises(UnsupportedFeatureError, match="of the variant 'offset', and the kernel is for standard"):
            ops.apply_ops(nn.Sequential(Norm(), Norm("offset")), config)
        with pytest.raises(ValueError, match="no kernel 'standard_alone' for the variant 'offset'"):
            ops.OpSlot("rms_norm", "offset").bind("standard_alone")
    finally:
        ops.unregister_kernel("rms_norm", "standard", "standard_alone")


def built_under(config: ops.OpsConfig) -> Norm:
    pytest.importorskip("transformers")
    with ops.use(config):
        return Norm("offset")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"hardware": ops.Hardware("cuda")}, "it needs a CUDA device, and none is visible"),
        ({"hardware": ops.Hardware("npu")}, "torch-npu is not installed"),
        ({"hardware": ops.Hardware("mlu")}, "torch-mlu is not installed"),
        ({"requires": ("no-such-package>=2",), "install": "Take it."}, "no-such-package is not installed.* Take it"),
    ],
)
@pytest.mark.parametrize("way", ["bind", "config", "use", "apply_ops", "auto"])
def test_a_kernel_that_can_t_run_here_is_refused_though_another_variant_s_can(
    attributes: dict[str, Any], reason: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = dataclasses.replace(Environment.detect(), devices=())
    monkeypatch.setattr(Environment, "detect", lambda *_: here)
    ops.register_kernel("rms_norm", "standard", "mixed")(lambda: reference)
    ops.register_kernel("rms_norm", "offset", "mixed", **attributes)(lambda: reference)
    model = nn.Sequential(Norm("offset"))
    try:
        config = ops.OpsConfig(rms_norm_implementation="mixed")
        if way == "auto":
            monkeypatch.setitem(config_module._PREFERRED, "rms_norm", ("mixed",))
            for environment in (None, here):
                found = ops.OpsConfig.auto(environment, model)
                assert found["rms_norm"] == "eager"
                assert re.search(reason.partition(".*")[0], found.reasons["rms_norm_implementation"])
            return
        ways: dict[str, Callable[[], Any]] = {
            "bind": lambda: model[0].kernel.bind("mixed"),
            "config": lambda: model[0].kernel.bind(config),
            "use": lambda: built_under(config),
            "apply_ops": lambda: ops.apply_ops(model, config),
        }
        with pytest.raises(KernelUnavailableError, match=f"'mixed' for the variant 'offset' is not usable.*{reason}"):
            ways[way]()
        assert not model[0].kernel.is_bound
    finally:
        for variant in ("standard", "offset"):
            ops.unregister_kernel("rms_norm", variant, "mixed")


def test_a_value_that_the_variant_lacks_is_said_to_be_that_whatever_is_installed() -> None:
    for op, variant, value in (("moe", "gpt_oss", "fused_quack"), ("rms_norm_gated", "standard", "npu")):
        with pytest.raises(ValueError, match=f"has no kernel '{value}' for the variant '{variant}'|the values are"):
            ops.OpSlot(op, variant).bind(value)


@pytest.mark.parametrize("seen", [0, 2, None])
def test_a_kernel_is_bound_where_torch_sees_its_device(seen: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever packages are there: those decide where torch isn't loaded."""
    here = Environment(packages={"torch": "2.11.0", "torch-mlu": "1.20"})
    monkeypatch.setattr(Environment, "detect", lambda *_: here)
    if seen is not None:
        monkeypatch.setattr(torch, "mlu", SimpleNamespace(device_count=lambda: seen), raising=False)
    ops.register_kernel("rms_norm", "standard", "mlu", hardware=ops.Hardware("mlu"))(lambda: reference)
    try:
        config = ops.OpsConfig(rms_norm_implementation="mlu")
        if seen:
            assert ops.apply_ops(nn.Sequential(Norm()), config).bindings
            return
        for bind in (ops.OpSlot("rms_norm", "standard").bind, lambda one: ops.apply_ops(nn.Sequential(Norm()), one)):
            with pytest.raises(KernelUnavailableError, match="torch sees no mlu device"):
                bind(config)
    finally:
        ops.unregister_kernel("rms_norm", "standard", "mlu")


def test_what_is_no_op_is_refused() -> None:
    with pytest.raises(ValueError, match="'group_norm' is no op"):
        ops.OpSlot("group_norm", "standard")
    with pytest.raises(ValueError, match="rms_norm has no variant 'full'"):
        ops.OpSlot("rms_norm", "full")
    with pytest.raises(ValueError, match="the values are eager"):
        ops.OpSlot("rms_norm", "standard").bind("nothing")


def test_it_compiles_in_one_graph() -> None:
    model = Norm()
    model.kernel.bind(PLAIN)
    x = torch.randn(3, 8)

    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)

    torch.testing.assert_close(found, model(x))

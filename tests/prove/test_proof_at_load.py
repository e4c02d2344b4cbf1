"""Models loaded under a registered name have a proven type, or are proven while they are loaded, or are refused."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import CAUSAL_LMS, NAME, SHAPE
from transformers import masking_utils, modeling_rope_utils
from transformers.models.llama import modeling_llama

import kernel_compat
from kernel_compat.errors import AttentionRefusedError, UnsupportedFeatureError
from kernel_compat.proofs import sources, table
from kernel_compat.versions import minor
from kernel_compat_prove import at_load, isolated
from kernel_compat_prove.outcomes import Outcome, Proof

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(at_load, "_proofs", {})


def use(monkeypatch: pytest.MonkeyPatch, **types: Any) -> None:
    monkeypatch.setattr(table, "_table", lambda: {minor(transformers.__version__): types})


def build() -> Any:
    return transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)


def test_a_type_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    monkeypatch.setattr(at_load, "prove_here", lambda *_: pytest.fail("it is proven already"))
    build()


def test_a_type_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, llama={"wrong": ["padded_left"]})
    with pytest.raises(
        UnsupportedFeatureError, match="LlamaForCausalLM.*padded_left.*`kernel-compat prove llama` shows"
    ):
        build()


def test_a_type_that_is_in_no_table_is_proven_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch)
    build()
    (kept,) = tmp_path.glob("kernel-compat/proofs/*.json")
    assert json.loads(kept.read_text())["verdict"] == "equal"
    monkeypatch.setattr(at_load, "_proofs", {})
    monkeypatch.setattr(at_load, "prove_here", lambda *_: pytest.fail("it is kept"))
    build()


class Unprovable(transformers.LlamaForCausalLM):
    """A class of which no tiny model can be made."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config._attn_implementation == "eager":
            raise RuntimeError("no eager attention")


def test_a_class_that_can_not_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        Unprovable._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)

    use(monkeypatch, llama={})
    kernel_compat.install(unproven="refuse")
    with pytest.raises(UnsupportedFeatureError, match="no tiny model of it could be made"):
        load()
    kernel_compat.install(unproven="warn")
    with pytest.warns(UserWarning, match="no tiny model of it could be made"):
        load()
    kernel_compat.install(unproven="allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load()


LLAMA = transformers.LlamaForCausalLM


class Named(transformers.LlamaForCausalLM):
    pass


class Helped(transformers.LlamaForCausalLM):
    _no_split_modules = ("LlamaDecoderLayer",)

    def count_layers(self) -> int:
        return len(self.model.layers)


class Mixin:
    tag = "mine"


class Mixed(Mixin, Helped):
    pass


class OwnForward(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnAttention(transformers.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = type("Mine", (modeling_llama.LlamaAttention,), {})(config, 0)


class OwnInputs(transformers.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


class OwnMixin(type("Forwarding", (), {"forward": lambda self, *args, **kwargs: None}), transformers.LlamaForCausalLM):  # type: ignore[misc]
    pass


class SameConfig(transformers.LlamaConfig):
    pass


class OwnConfig(transformers.LlamaConfig):
    model_type = "own"


class Proofs:
    """Proofs that are made, by class; the first is equal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        monkeypatch.setattr(at_load, "prove_here", self.prove)

    def prove(self, owner: type, config: Any, padding_free: bool) -> Proof:
        self.made.append(owner.__name__)
        return Proof("llama", transformers.__version__, (Outcome(owner.__name__, "plain", "equal"),))


def built(kind: type, config: Any = None) -> Any:
    return kind._from_config(config or CAUSAL_LMS["llama"](), attn_implementation=NAME)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Named, Helped, Mixed])
def test_a_class_that_changes_nothing_inherits(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    proofs = Proofs(monkeypatch)
    built(kind)
    built(kind, SameConfig(**CAUSAL_LMS["llama"]().to_dict()))
    assert proofs.made == []
    use(monkeypatch, llama={"wrong": ["padded_left"]})
    with pytest.raises(AttentionRefusedError, match="padded_left") as caught:
        built(kind)
    assert (caught.value.name, caught.value.part) == (NAME, "LlamaForCausalLM")


@pytest.mark.parametrize("kind", [OwnForward, OwnAttention, OwnMixin, OwnInputs])
def test_a_class_that_changes_something_does_not_inherit(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    proofs = Proofs(monkeypatch)
    built(kind)
    assert proofs.made == [kind.__name__]


def test_a_config_that_changes_something_does_not_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    proofs = Proofs(monkeypatch)
    built(LLAMA, OwnConfig(**SHAPE))
    assert proofs.made[:1] == ["LlamaForCausalLM"]


def foreign(*args: Any, **kwargs: Any) -> Any:
    """The code of others."""


@functools.wraps(modeling_llama.LlamaAttention.forward)
def wrapping(*args: Any, **kwargs: Any) -> Any:
    return foreign(*args, **kwargs)


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "rotation": (modeling_llama, "apply_rotary_pos_emb", foreign),
    "attention": (modeling_llama.LlamaAttention, "forward", foreign),
    "a wrapper": (modeling_llama.LlamaAttention, "forward", wrapping),
    "partial": (modeling_llama.LlamaAttention, "forward", functools.partial(foreign)),
    "class": (modeling_llama, "LlamaAttention", type("LlamaAttention", (modeling_llama.LlamaAttention,), {})),
    "eager": (modeling_llama, "eager_attention_forward", foreign),
    "mask": (modeling_llama, "create_causal_mask", foreign),
    "another mask of upstream's": (
        modeling_llama,
        "create_causal_mask",
        masking_utils.create_sliding_window_causal_mask,
    ),
    "inside the mask": (masking_utils, "create_causal_mask", foreign),
    "a function that masks call": (masking_utils, "sdpa_mask", foreign),
    "an entry of a table": (modeling_rope_utils.ROPE_INIT_FUNCTIONS, "linear", foreign),
    "an added method": (modeling_llama.LlamaForCausalLM, "__call__", foreign),
    "config": (transformers.LlamaConfig, "__post_init__", foreign),
}


@pytest.mark.parametrize("what", REPLACED)
def test_code_that_others_have_replaced_is_not_proven(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, value = REPLACED[what]
    table_or_namespace = owner if isinstance(owner, dict) else vars(owner)
    if what != "an added method" and name not in table_or_namespace:
        pytest.skip("this release has none")
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    proofs = Proofs(monkeypatch)
    config = CAUSAL_LMS["llama"]()
    built(LLAMA, config)
    assert proofs.made == []
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, value)
    else:
        monkeypatch.setattr(owner, name, value, raising=False)
    with contextlib.suppress(TypeError):
        built(LLAMA, config)
    assert proofs.made == ["LlamaForCausalLM"]


def test_a_mask_that_others_have_broken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the type as right; with the patch it drops its padding."""
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    original = modeling_llama.create_causal_mask

    def dropping(**kwargs: Any) -> Any:
        drops = "flash" in kwargs["config"]._attn_implementation
        return original(**{**kwargs, "attention_mask": None if drops else kwargs["attention_mask"]})

    monkeypatch.setattr(modeling_llama, "create_causal_mask", dropping)
    with pytest.raises(AttentionRefusedError, match="padded_left"):
        built(LLAMA)


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_upstreams_own_code_is_recognised(name: str) -> None:
    """With this library installed, whose replacements are not others'."""
    config = CAUSAL_LMS[name]()
    owner = type(transformers.AutoModelForCausalLM.from_config(config))
    assert sources.replaced(owner, type(config)) == []


def _state() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.nn.Module.register_parameter,
        torch.empty,
    )


MODES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "empty weights": lambda: pytest.importorskip("accelerate").init_empty_weights(include_buffers=True),
}


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_proof_is_shielded_from_the_state_of_its_caller(
    mode: str, forked: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    class Local(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)

    monkeypatch.setattr(isolated, "_may_fork", lambda: forked)
    kernel_compat.install(unproven="refuse")
    use(monkeypatch, llama={})
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    config = CAUSAL_LMS["llama"]()
    states: list[Any] = []
    make = isolated.prove_here

    def prove(*arguments: Any) -> Proof:
        states.append(_state())
        proof = make(*arguments)
        states.append(_state())
        return proof

    monkeypatch.setattr(at_load, "prove_here", prove)
    with MODES[mode]():
        Local._from_config(config, attn_implementation=NAME)
    (proof,) = at_load._proofs.values()
    assert proof.verdict == "equal"
    assert states[0] == states[1]


def test_a_child_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that the model's code causes is its verdict; one from outside isn't: the proof is made here."""

    class Crashing(transformers.LlamaForCausalLM):
        number = signal.SIGSEGV

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if os.getpid() != here:
                os.kill(os.getpid(), self.number)

    class Killed(Crashing):
        number = signal.SIGKILL

    here = os.getpid()
    monkeypatch.setattr(isolated, "_may_fork", lambda: True)
    # A backward of an earlier test may have started threads in this process; the child ends before it would need them.
    monkeypatch.setattr(isolated, "_engine_runs", lambda torch: True)
    kernel_compat.install(unproven="refuse")
    with pytest.raises(AttentionRefusedError, match="its proof ended by SIGSEGV"):
        built(Crashing)
    built(Killed)


def test_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="warn, refuse, allow"):
        kernel_compat.install(unproven="maybe")

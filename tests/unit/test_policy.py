from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kernel_compat
from kernel_compat import Device, Environment, ForwardSpec, KernelUnavailableError, UnsupportedFeatureError, policy
from kernel_compat.errors import UnknownNameError
from kernel_compat.policy import (
    LADDER,
    best_available,
    ladder,
    load_with_fallback,
    loading,
    next_fallback,
    plan_attention,
)
from kernel_compat.policy.planning import verify_context_parallel, verify_flash

A100 = Device("NVIDIA A100", (8, 0))
H100 = Device("NVIDIA H100", (9, 0))
B200 = Device("NVIDIA B200", (10, 0))
CONSUMER = Device("NVIDIA RTX PRO 6000", (12, 0))
T4 = Device("NVIDIA T4", (7, 5))

IMPORTS = {
    "flash-attn": {"flash_attn": ("flash-attn",)},
    "flash-attn-3": {"flash_attn_interface": ("flash-attn-3",)},
    "fa3-fwd": {"fa3_fwd_interface": ("fa3-fwd",)},
    "flash-attn-4": {"flash_attn.cute": ("flash-attn-4",)},
}
ALL = ("flash-attn", "flash-attn-3", "flash-attn-4")


def environment(
    *packages: str, devices: tuple[Device, ...] = (), transformers: str = "5.23.0", torch: str = "2.11.0"
) -> Environment:
    versions = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36"}
    imports: dict[str, tuple[str, ...]] = {"torch": ("torch",), "transformers": ("transformers",)}
    for package in packages:
        imports.update(IMPORTS[package])
    return Environment(
        packages={"torch": torch, "transformers": transformers, **{name: versions[name] for name in packages}},
        imports=imports,
        devices=devices,
    )


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    loading._warn_once.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the kernels that other tests loaded: the environments here have other versions of torch."""
    for kernel in kernel_compat.known_kernels().values():
        monkeypatch.setattr(kernel, "_features", None)
        monkeypatch.setattr(kernel, "_functions", None)


def forward(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


#: Context parallelism by code around the kernel.
AROUND = ForwardSpec(handles_context_parallel=True)


class Attention:
    """A user's kernel."""

    @staticmethod
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        raise NotImplementedError


class TestNextFallback:
    def test_the_ladder(self) -> None:
        walked = ["flash_attention_4"]
        while following := next_fallback(walked[-1]):
            walked.append(following)
        assert walked == [
            "flash_attention_4",
            "flash_attention_3",
            "flash_attention_2",
            "flash_attention_torch",
            "sdpa",
            "eager",
        ]

    @pytest.mark.parametrize(
        ("kernel", "following"),
        [
            ("flash_attention_4", "flash_attention_3"),
            ("flash_attention_2", "flash_attention_torch"),
            ("flash_attention_reference", "sdpa"),
            (Attention, "sdpa"),
        ],
    )
    def test_a_registered_name_goes_by_its_kernel(self, kernel: Any, following: str) -> None:
        kernel_compat.register_attention("my_flash", kernel=kernel)
        assert next_fallback("my_flash") == following

    def test_a_kernel_that_only_has_the_name_of_one(self) -> None:
        class Impostor(Attention): ...

        Impostor.__name__ = "flash_attention_4"
        kernel_compat.register_attention("my_flash", kernel=Impostor)
        assert next_fallback("my_flash") == "sdpa"

    @pytest.mark.filterwarnings("ignore:.* has no 'flash' in it")
    @pytest.mark.parametrize("name", LADDER)
    @pytest.mark.parametrize("kernel", ["flash_attention_4", "flash_attention_2", "flash_attention_reference"])
    def test_it_ends_whatever_the_rungs_are_bound_to(self, name: str, kernel: str) -> None:
        kernel_compat.register_attention(name, kernel=kernel, override=True)
        assert [step.name for step in ladder("flash_attention_4", environment())] == list(LADDER)

    @pytest.mark.parametrize("name", ["nothing", "flex_attention", "org/repo", ""])
    def test_an_unknown_name(self, name: str) -> None:
        assert next_fallback(name) == "eager"

    @given(
        st.sampled_from([*LADDER, "nothing", "org/repo"]),
        st.lists(st.sampled_from([*LADDER, "flash_attention_reference"]), unique=True),
        st.sets(st.sampled_from([*LADDER, "flash_attention_reference"])),
    )
    def test_it_tries_no_name_twice(self, name: str, prefer: list[str], exclude: set[str]) -> None:
        walked = [name]
        while following := next_fallback(walked[-1], prefer=prefer, exclude=exclude):
            assert following not in walked
            assert following not in exclude
            walked.append(following)

    def test_preferred_and_excluded_names(self) -> None:
        chosen: Any = {"prefer": ["sdpa", "flash_attention_2"], "exclude": {"flash_attention_3"}}
        assert next_fallback("flash_attention_4", **chosen) == "sdpa"
        assert next_fallback("sdpa", **chosen) == "flash_attention_2"
        assert next_fallback("flash_attention_2", **chosen) == "eager"
        assert [step.name for step in ladder("flash_attention_4", environment(), **chosen)] == [
            *("flash_attention_4", "sdpa", "flash_attention_2", "flash_attention_torch", "eager")
        ]
        here = environment(*ALL, devices=(H100,))
        assert best_available(here, **chosen).name == "sdpa"
        assert best_available(here, {"varlen"}, **chosen).name == "flash_attention_2"
        assert best_available(here, exclude={"flash_attention_4"}).name == "flash_attention_3"
        for function in (lambda **options: next_fallback("sdpa", **options), best_available):
            with pytest.raises(TypeError, match="prefer takes attention names, not the string 'sdpa'"):
                function(prefer="sdpa")
            with pytest.raises(UnknownNameError, match="'flash_atention_2' is no attention name"):
                function(exclude=["flash_atention_2"])
        with pytest.raises(ValueError, match="'sdpa' is the first name to try, and excluded"):
            ladder("sdpa", environment(), exclude=["sdpa"])

    def test_preferred_and_excluded_names_with_paged(self) -> None:
        assert next_fallback("paged|flash_attention_2", prefer=["paged|sdpa"]) == "paged|sdpa"
        assert next_fallback("flash_attention_torch", exclude=["paged|sdpa"]) == "eager"
        steps = ladder("paged|flash_attention_torch", environment(), prefer=["paged|eager"], exclude=["paged|sdpa"])
        assert [step.name for step in steps] == ["paged|flash_attention_torch", "paged|eager"]

    def test_paged_names_stay_paged(self) -> None:
        assert next_fallback("paged|flash_attention_2") == "paged|flash_attention_torch"
        assert next_fallback("paged|eager") is None

    def test_transformers_own_choice(self) -> None:
        """None begins at sdpa, as in `load_with_fallback`."""
        assert next_fallback(None) == next_fallback("sdpa") == "eager"
        assert next_fallback(None, exclude={"eager"}) is None
        assert next_fallback(None, prefer=["sdpa", "flash_attention_2"]) == "flash_attention_2"

    def test_no_string(self) -> None:
        with pytest.raises(TypeError, match="must be a string, not 5"):
            next_fallback(5)  # type: ignore[arg-type]


class TestBestAvailable:
    @pytest.mark.parametrize(
        ("packages", "device", "chosen"),
        [
            (ALL, A100, "flash_attention_2"),
            (ALL, H100, "flash_attention_4"),
            (ALL, B200, "flash_attention_4"),
            (ALL, CONSUMER, "flash_attention_4"),
            (("flash-attn", "flash-attn-3"), H100, "flash_attention_3"),
            (("flash-attn", "flash-attn-3"), B200, "flash_attention_2"),
            (("flash-attn-3",), A100, "flash_attention_torch"),
            (("flash-attn-4",), A100, "flash_attention_torch"),
            ((), H100, "flash_attention_torch"),
            ((), CONSUMER, "flash_attention_torch"),
            (ALL, T4, "sdpa"),
        ],
    )
    def test_by_device(self, packages: tuple[str, ...], device: Device, chosen: str) -> None:
        choice = best_available(environment(*packages, devices=(device,)), {"backward", "window"})
        assert choice.name == chosen
        assert [step.name for step in choice.steps] == list(LADDER[: LADDER.index(chosen) + 1])
        assert [step.usable for step in choice.steps] == [False] * (len(choice.steps) - 1) + [True]
        assert all(step.reason for step in choice.steps)

    @pytest.mark.parametrize(
        ("torch", "requires", "chosen", "because"),
        [
            ("2.9.1", {"varlen"}, None, "torch 2.9.1 is older than 2.10, the first with torch.nn.attention.varlen"),
            ("2.10.0", {"varlen"}, "flash_attention_torch", "torch 2.10.0 on NVIDIA A100 (sm_80)"),
            ("2.10.0", {"window"}, "sdpa", "it has no sliding windows"),
            ("2.11.0", {"window"}, "flash_attention_torch", "torch 2.11.0 on NVIDIA A100 (sm_80)"),
            ("2.11.0", {"varlen", "paged"}, None, "it has no paged"),
            ("2.12.1", {"varlen", "paged"}, None, "it has no paged"),
            ("2.13.0", {"varlen", "paged"}, "flash_attention_torch", "torch 2.13.0 on NVIDIA A100 (sm_80)"),
            ("2.15.0", {"varlen", "sinks"}, "flash_attention_torch", "torch 2.15.0 on NVIDIA A100 (sm_80)"),
            ("2.15.0", {"softcap"}, "eager", "it has no softcap"),
        ],
    )
    def test_torchs_own_by_its_version(self, torch: str, requires: set[str], chosen: str | None, because: str) -> None:
        here = environment(devices=(A100,), torch=torch)
        (step, *_) = ladder("flash_attention_torch", here, requires)
        assert step.usable is (chosen == "flash_attention_torch")
        assert step.reason == because + (", once kernel_compat.install() is called" if step.usable else "")
        if chosen is None:
            with pytest.raises(KernelUnavailableError, match=because):
                best_available(here, requires)
        else:
            assert best_available(here, requires).name == chosen

    def test_why_not(self) -> None:
        steps = {step.name: step.reason for step in ladder(environment=environment(*ALL, devices=(A100,)))}
        assert "compute capability 9.0 or greater, and there is NVIDIA A100 (sm_80)" in steps["flash_attention_4"]
        assert "compute capability 9.0 to 9.x, and there is NVIDIA A100 (sm_80)" in steps["flash_attention_3"]
        assert steps["flash_attention_2"] == "flash-attn 2.8.3 on NVIDIA A100 (sm_80)"

    def test_features(self) -> None:
        here = environment(*ALL, devices=(H100,))
        assert best_available(here, {"sinks"}).name == "flash_attention_4"
        assert best_available(here, {"dropout", "softcap"}).name == "flash_attention_2"
        assert best_available(here, {"dropout", "sinks"}).name == "eager"
        assert best_available(environment(), {"softcap"}).name == "eager"
        lacks = {step.name: step.reason for step in ladder(environment=here, requires={"dropout", "sinks"})}
        assert lacks["flash_attention_2"] == "it has no attention sinks"  # transformers drops them
        assert lacks["flash_attention_torch"] == "it has no dropout"
        assert lacks["flash_attention_4"] == "it has no dropout"

    def test_the_package_that_transformers_imports(self) -> None:
        """transformers' flash_attention_3 can't use a forward-only package; our own name with the same kernel can."""
        here = environment("fa3-fwd", devices=(H100,))
        (step, *_) = ladder("flash_attention_3", here)
        assert not step.usable
        assert "flash-attn-3 is not installed" in step.reason
        kernel_compat.register_attention("my_flash", kernel="flash_attention_3")
        (step, *_) = ladder("my_flash", here)
        assert step.usable
        assert step.reason == "fa3-fwd 0.0.3 on NVIDIA H100 (sm_90), once kernel_compat.install() is called"

    def test_names_that_transformers_learns_from_us(self) -> None:
        """transformers has its own flash_attention_4 from 5.4 on."""
        for release, ours in (("5.3.0", True), ("5.4.0", False)):
            choice = best_available(environment("flash-attn-4", devices=(H100,), transformers=release))
            assert choice.name == "flash_attention_4"
            assert ("once kernel_compat.install() is called" in choice.steps[-1].reason) is ours

    def test_a_kernel_without_gradients_on_a_cpu(self) -> None:
        """flex_attention trains on a GPU alone; forwards run on both."""
        prefer = ["flash_attention_flex"]
        assert best_available(environment(), prefer=prefer).name == "flash_attention_flex"
        choice = best_available(environment(), {"backward"}, prefer=prefer)
        assert choice.name == "sdpa"
        assert choice.steps[0].reason == "no gradients on 'cpu'"
        assert best_available(environment(devices=(H100,)), {"backward"}, prefer=prefer).name == "flash_attention_flex"

    def test_paged_names_came_with_5(self) -> None:
        for release, usable in (("4.57.6", False), ("5.0.0", True)):
            here = environment("flash-attn", devices=(H100,), transformers=release)
            assert [step.usable for step in ladder("paged|sdpa", here)] == [usable, usable]

    def test_nothing_will_do(self) -> None:
        with pytest.raises(KernelUnavailableError, match="attention with paged and sinks is not usable here") as caught:
            best_available(environment(), {"sinks", "paged"})
        for name in LADDER:
            assert f"{name}: " in str(caught.value)

    def test_without_torch(self) -> None:
        with pytest.raises(KernelUnavailableError, match="eager: torch is not installed"):
            best_available(Environment())

    @pytest.mark.parametrize(
        ("requires", "error", "says"),
        [
            ({"soft_cap"}, ValueError, "no such features: 'soft_cap'; there are: causal, window"),
            ({"max_head_dim"}, ValueError, "no such features: 'max_head_dim'"),
            ("softcap", TypeError, "not the string 'softcap'"),
        ],
    )
    def test_bad_features(self, requires: Any, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            best_available(environment(), requires)


def plan(name: Any, here: Environment | None = None, **options: Any) -> policy.Preload:
    return plan_attention(name, environment=here or environment(*ALL, devices=(H100,)), **options)


class TestResolvePreload:
    @pytest.mark.parametrize("name", [None, "sdpa", "eager", "flash_attention_3", "flex_attention"])
    def test_nothing_to_settle(self, name: str | None) -> None:
        found = plan(name, use_liger_kernel=True)
        assert not any("not usable" in reason for reason in found.reasons)
        assert (found.attn_implementation, found.use_liger_kernel) == (name, True)
        assert "nothing needs another" in " ".join(found.reasons)

    @pytest.mark.parametrize(("tp", "cp", "ep"), [(2, 1, 1), (1, 2, 1), (2, 4, 1), (1, 1, 8)])
    def test_liger_is_off_where_weights_or_tokens_are_sharded(self, tp: int, cp: int, ep: int) -> None:
        found = plan("sdpa", tp_size=tp, cp_size=cp, ep_size=ep, use_liger_kernel=True)
        assert found.use_liger_kernel is False
        (reason,) = [reason for reason in found.reasons if "Liger" in reason]
        assert (f"tensor parallelism (tp_size={tp})" in reason) is (tp > 1)
        assert (f"context parallelism (cp_size={cp})" in reason) is (cp > 1)
        assert (f"expert parallelism (ep_size={ep})" in reason) is (ep > 1)

    def test_liger_that_was_not_asked_for(self) -> None:
        found = plan("sdpa", tp_size=2)
        assert found.use_liger_kernel is False
        assert not any("Liger" in reason for reason in found.reasons)

    @pytest.mark.parametrize("name", [None, "eager", "flash_attention_2", "flash_attention_4", "mine"])
    def test_context_parallelism_needs_sdpa(self, name: str | None) -> None:
        if name == "mine":
            name = "my_flash"
            kernel_compat.register_attention(name, kernel="flash_attention_2")
        found = plan(name, cp_size=2)
        assert found.attn_implementation == "sdpa"
        assert any("sdpa instead of" in reason and "cp_size=2" in reason for reason in found.reasons)

    def test_names_that_handle_context_parallelism(self) -> None:
        kernel_compat.register_attention("my_flash", kernel="flash_attention_2", forward=AROUND)
        found = plan("my_flash", cp_size=2)
        assert found.attn_implementation == "my_flash"
        assert any("registered as handling context parallelism" in reason for reason in found.reasons)

    @pytest.mark.parametrize(
        "name", [*LADDER[:4], "flash_attention_reference", "mine", "kernels-community/flash-attn2"]
    )
    @pytest.mark.parametrize("devices", [(H100,), ()])
    def test_packed_sequences_keep_a_varlen_choice(self, name: str, devices: tuple[Device, ...]) -> None:
        """The choice stays even if it can't run here, which the plan says: the run may be on another machine."""
        if name == "mine":
            name = "my_flash"
            kernel_compat.register_attention(name, kernel="flash_attention_2")
        found = plan(name, environment(*ALL, devices=devices), packed_sequence=True)
        assert found.attn_implementation == name
        unusable = not devices and name not in ("flash_attention_reference", "kernels-community/flash-attn2")
        assert any("is not usable here" in reason for reason in found.reasons) is unusable

    @pytest.mark.parametrize("name", [None, "sdpa", "eager", "flex_attention", "nothing"])
    @pytest.mark.parametrize(("device", "best"), [(A100, "flash_attention_2"), (H100, "flash_attention_4")])
    def test_packed_sequences_take_the_best_varlen_kernel(self, name: str | None, device: Device, best: str) -> None:
        found = plan(name, environment(*ALL, devices=(device,)), packed_sequence=True, tp_size=2)
        assert found.attn_implementation == best
        (reason,) = [reason for reason in found.reasons if f"{best} instead of" in reason]
        assert ("kernel-compat knows no kernel of this name" in reason) is (name == "nothing")
        if device is A100:
            assert any("flash_attention_4 is not usable here" in reason for reason in found.reasons)

    @pytest.mark.parametrize("name", [None, "sdpa", "eager"])
    def test_packed_sequences_without_any_package(self, name: str | None) -> None:
        """torch itself provides a kernel for them."""
        found = plan(name, environment(devices=(A100,)), packed_sequence=True)
        assert found.attn_implementation == "flash_attention_torch"
        (reason,) = [reason for reason in found.reasons if "flash_attention_torch instead of" in reason]
        assert "packed sequences need a varlen kernel" in reason
        assert not any(reason.startswith("flash_attention_torch is not usable") for reason in found.reasons)

    def test_packed_sequences_and_no_varlen_kernel(self) -> None:
        with pytest.raises(KernelUnavailableError) as caught:
            plan("eager", environment(*ALL), packed_sequence=True)
        said = str(caught.value)
        for name in LADDER:
            assert f"{name}: " in said
        assert "sdpa: it has no varlen" in said
        assert "no CUDA device is visible" in said
        assert "flash_attention_reference runs here, slowly" in said

    @pytest.mark.parametrize("name", ["sdpa", "eager", None])
    def test_packed_sequences_on_sdpa(self, name: str | None) -> None:
        """SDPA is exact for packed sequences: tests/integration shows it on every release."""
        found = plan(name, environment(*ALL), packed_sequence=True, prefer=[] if name == "sdpa" else ["sdpa"])
        assert found.attn_implementation == "sdpa"
        (reason,) = found.reasons
        assert "by position_ids alone, with use_cache=False and without an attention_mask" in reason

    def test_packed_sequences_under_context_parallelism(self) -> None:
        register = kernel_compat.register_attention
        register("my_flash", "flash_attention_2", forward=AROUND)
        register("dense_flash", forward=ForwardSpec(forward, {"backward"}, handles_context_parallel=True))
        register("spread_flash", "flash_attention_2", sequence_parallel=True)
        for name in ("flash_attention_2", "dense_flash", "sdpa", None):
            with pytest.raises(ValueError, match="packed sequences can't be split.*cp_size=2"):
                plan(name, packed_sequence=True, cp_size=2)
        for name in ("my_flash", "spread_flash"):
            for packed in (True, False):
                found = plan(name, packed_sequence=packed, cp_size=2)
                assert (found.attn_implementation, found.sdpa_backends) == (name, None)

    @pytest.mark.parametrize("own", [False, True])
    def test_a_name_over_ranks_is_not_replaced_by_one_within_a_rank(self, own: bool) -> None:
        register = kernel_compat.register_attention
        register("spread_flash", forward=ForwardSpec(forward, {"backward"}, own), sequence_parallel=not own)
        register("other_flash", "flash_attention_2", sequence_parallel=True)
        here = environment(*ALL, devices=(H100,))

        with pytest.raises(ValueError, match="spread_flash spreads sequences over ranks"):
            plan("spread_flash", here, packed_sequence=True)
        assert [step.name for step in ladder("spread_flash", here)] == ["spread_flash"]
        assert next_fallback("spread_flash") is None
        prefer = ["sdpa", "other_flash"]
        assert [step.name for step in ladder("spread_flash", here, prefer=prefer)] == ["spread_flash", "other_flash"]
        register("first_flash", "flash_attention_4", ForwardSpec(None, None, own), sequence_parallel=not own)
        assert next_fallback("first_flash", prefer=prefer) == "other_flash"

    def test_the_features_of_a_forward_decide(self) -> None:
        kernel_compat.register_attention("magi_flash", forward=ForwardSpec(forward, {"varlen", "backward"}))
        kernel_compat.register_attention("dense_flash", forward=ForwardSpec(forward, {"backward"}))
        here = environment(*ALL, devices=(H100,))
        assert plan("magi_flash", here, packed_sequence=True).attn_implementation == "magi_flash"
        assert plan("dense_flash", here, packed_sequence=True).attn_implementation == "flash_attention_4"

    def test_preferred_and_excluded_names(self) -> None:
        here = environment(*ALL, devices=(H100,))
        found = plan("sdpa", here, packed_sequence=True, prefer=["flash_attention_2"])
        assert found.attn_implementation == "flash_attention_2"
        found = plan(None, here, packed_sequence=True, exclude={"flash_attention_4"})
        assert found.attn_implementation == "flash_attention_3"
        with pytest.raises(ValueError, match="'sdpa' is requested, and excluded"):
            plan("sdpa", here, exclude=["sdpa"])
        with pytest.raises(ValueError, match="needs sdpa, which is excluded"):
            plan(None, here, cp_size=2, exclude=["sdpa"])

    def test_sdpas_backends(self) -> None:
        everything = ("cudnn_attention", "flash_attention", "efficient_attention", "math")
        for checkpointing in (False, True):
            for name in ("sdpa", None):
                assert plan(name, activation_checkpointing=checkpointing).sdpa_backends == everything
        assert plan("flash_attention_2", cp_size=2).sdpa_backends == everything[:2]
        assert plan("flash_attention_2").sdpa_backends is None

    @pytest.mark.parametrize(
        ("options", "error", "says"),
        [
            ({"tp_size": 0}, ValueError, "tp_size counts ranks.*can't be 0"),
            ({"cp_size": -1}, ValueError, "cp_size counts ranks.*can't be -1"),
            ({"tp_size": 1.5}, TypeError, "tp_size must be an integer, not 1.5"),
            ({"cp_size": "2"}, TypeError, "cp_size must be an integer, not '2'"),
            ({"cp_size": True}, TypeError, "cp_size must be an integer, not True"),
            ({"attn_implementation": " "}, ValueError, "must not be empty"),
        ],
    )
    def test_bad_sizes(self, options: dict[str, Any], error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            plan_attention(**{"attn_implementation": "sdpa", **options})

    @pytest.mark.parametrize("name", ["flex_attention", "org/repo", "flash_atention_2"])
    def test_names_that_are_not_ours_to_judge(self, name: str) -> None:
        assert any(f"{name} is for transformers to load" in reason for reason in plan(name).reasons)
        (step, last) = ladder(name, environment())
        assert (step.usable, last.name) == (None, "eager")

    def test_a_dict_of_names(self) -> None:
        names = {"text_config": "flash_attention_2", "vision_config": "eager"}
        found = plan(names, cp_size=2)
        assert found.attn_implementation == {"text_config": "sdpa", "vision_config": "eager"}
        assert found.reasons[:2] == (
            "text_config: sdpa instead of flash_attention_2: context parallelism (cp_size=2) needs it.",
            "vision_config: eager is kept: the tokens of encoders are neither packed nor sharded.",
        )
        with pytest.raises(TypeError, match="a dict of strings or None, not 3"):
            plan({"": 3})

    @pytest.mark.parametrize("name", ["sdpa", "paged|sdpa", {"vision_config": "sdpa"}, {"text_config": "paged|sdpa"}])
    def test_a_name_that_is_requested_and_excluded(self, name: Any) -> None:
        with pytest.raises(ValueError, match=r"sdpa' is requested, and excluded"):
            plan(name, exclude={"sdpa"})

    def test_it_can_be_compared_and_kept(self) -> None:
        assert plan("sdpa") == plan("sdpa")
        assert hash(plan("sdpa")) == hash(plan("sdpa"))


class Config:
    def __init__(self, name: str = "sdpa", **values: Any) -> None:
        self._attn_implementation = name
        vars(self).update(values)


class Layer(nn.Module):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)


class Model(nn.Module):
    """The attributes of a model that the policy reads; tests/integration has real models."""

    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, name: str = "sdpa", layer: Layer | None = None) -> None:
        super().__init__()
        self.config = Config(name)
        self.layer = layer or Layer()


class Old(Model):
    _supports_sdpa = False
    _supports_flash_attn = False


class TestVerifySdpa:
    def test_one_rank_asks_nothing(self) -> None:
        assert verify_context_parallel(Old("eager"), 1) is None
        assert verify_context_parallel(Old("eager")) is None

    def test_right(self) -> None:
        verify_context_parallel(Model("sdpa"), 2)
        verify_context_parallel(Model, 2)

    @pytest.mark.parametrize("model", [Old("eager"), Old])
    def test_a_model_without_sdpa(self, model: Any) -> None:
        with pytest.raises(UnsupportedFeatureError, match=r"Old does not support sdpa.*cp_size=2.*Set cp_size=1"):
            verify_context_parallel(model, 2)

    @pytest.mark.parametrize("name", ["eager", "flash_attention_2"])
    def test_a_model_that_was_loaded_with_another(self, name: str) -> None:
        with pytest.raises(UnsupportedFeatureError, match=f"Model.*'{name}'.*Load it with attn_implementation='sdpa'"):
            verify_context_parallel(Model(name), 2)

    def test_a_name_that_handles_it(self) -> None:
        kernel_compat.register_attention("my_flash", kernel="flash_attention_2", forward=AROUND)
        verify_context_parallel(Old("my_flash"), 2)
        kernel_compat.unregister_attention("my_flash")
        kernel_compat.register_attention("my_flash", kernel="flash_attention_2")
        with pytest.raises(UnsupportedFeatureError):
            verify_context_parallel(Model("my_flash"), 2)

    def test_softcap(self) -> None:
        with pytest.raises(UnsupportedFeatureError, match="It needs softcap, which sdpa does not support"):
            verify_context_parallel(Model("sdpa", Layer(attn_logit_softcapping=50.0)), 2)

    def test_a_class_with_a_property(self) -> None:
        class Odd(Model):
            _supports_sdpa = property(lambda self: False)

        for model in (Odd, Odd()):
            with pytest.raises(UnsupportedFeatureError, match="Odd does not support sdpa"):
                verify_context_parallel(model, 2)

    def test_an_object_that_is_no_model(self) -> None:
        with pytest.raises(UnsupportedFeatureError, match="Layer does not support sdpa"):
            verify_context_parallel(Layer(), 2)

    def test_a_bad_size(self) -> None:
        with pytest.raises(ValueError, match="can't be 0"):
            verify_context_parallel(Model(), 0)


def without_sinks(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    softmax_scale: Any = None, causal: Any = False,
) -> Any:  # fmt: skip
    """A kernel of a user's own."""
    raise AssertionError("called")


class TestVerifyFlash:
    here = environment(*ALL, devices=(H100,))

    @pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
    def test_right(self, name: str) -> None:
        assert verify_flash(Model(), name, self.here) is None
        assert verify_flash(Model, name, self.here) is None

    @pytest.mark.parametrize("sdpa", [False, True])
    @pytest.mark.parametrize("instance", [False, True])
    def test_a_model_without(self, sdpa: bool, instance: bool) -> None:
        """The message names the attentions that the model supports."""

        class Older(Old):
            _supports_sdpa = sdpa

        others = "'sdpa' or 'eager'" if sdpa else "'eager'"
        with pytest.raises(
            UnsupportedFeatureError, match=f"Older does not support flash attention .*says\\. Use {others}, or"
        ):
            verify_flash(Older() if instance else Older, "flash_attention_2", self.here)

    def test_the_legacy_flag(self) -> None:
        class Legacy(Model):
            _supports_flash_attn_2 = True
            _supports_flash_attn = False

        class Newer(Legacy):
            _supports_flash_attn_2 = True

        with pytest.raises(UnsupportedFeatureError):
            verify_flash(Legacy, "flash_attention_2", self.here)
        verify_flash(Newer, "flash_attention_2", self.here)

    @pytest.mark.parametrize(
        ("model", "name", "says"),
        [
            (Model(layer=Layer(sinks=[0.0])), "flash_attention_2", "attention sinks.*flash_attention_4"),
            (Model(layer=Layer(sinks=[0.0])), "flash_attention_3", "attention sinks.*flash_attention_4"),
            (Model(layer=Layer(sinks=[0.0])), "without_sinks", "attention sinks.*flash_attention_2"),
            (Model(layer=Layer(sliding_window=8)), "forward_alone", "sliding windows.*flash_attention_4"),
            (Model(layer=Layer(config=Config(sliding_window=8))), "forward_alone", "sliding windows"),
        ],
    )
    def test_a_feature_it_needs(self, model: Any, name: str, says: str) -> None:
        here = environment("flash-attn", "fa3-fwd", devices=(H100,))
        if name == "forward_alone":
            name = "my_flash"
            kernel_compat.register_attention(name, kernel="flash_attention_3")
        elif name == "without_sinks":
            name = "my_flash"
            kernel_compat.register_attention(name, kernel=SimpleNamespace(flash_attn_varlen_func=without_sinks))
        with pytest.raises(UnsupportedFeatureError, match=says) as caught:
            verify_flash(model, name, here)
        assert "Model" in str(caught.value)

    @pytest.mark.parametrize(
        "config",
        [
            Config(sliding_window=8, use_sliding_window=False),
            Config(sliding_window=8, layer_types=["full_attention"]),
            Config(sliding_window=None),
        ],
    )
    def test_a_window_that_is_not_used(self, config: Config) -> None:
        kernel_compat.register_attention("my_flash", kernel="flash_attention_3")
        here = environment("fa3-fwd", devices=(H100,))
        assert verify_flash(Model(layer=Layer(config=config)), "my_flash", here) is None

    def test_paged_means_the_same(self) -> None:
        kernel_compat.register_attention("my_flash", kernel="flash_attention_2")

        class Undeclared(nn.Module):
            _supports_attention_backend = True

        assert verify_flash(Undeclared, "paged|my_flash", self.here) is None

    def test_masks_of_any_kind(self) -> None:
        """A model with flex attention runs under kernels that take any mask, as Llama-4 does under ``auto``."""

        class Masked(Old):
            _supports_flex_attn = True

        kernel_compat.register_attention("my_flash", kernel="auto")
        kernel_compat.register_attention("plain_flash", kernel="flash_attention_2")
        assert verify_flash(Masked(), "my_flash", self.here) is None
        with pytest.raises(UnsupportedFeatureError, match="does not support flash attention"):
            verify_flash(Masked(), "plain_flash", self.here)

    def test_a_layer_that_no_kernel_of_a_list_computes(self) -> None:
        class Attention(Layer):
            def __init__(self) -> None:
                super().__init__(head_dim=512)
                self.k_proj = nn.Linear(4, 4)

        kernel_compat.register_attention("my_flash", kernel=["flash_attention_2", "flash_attention_torch"])
        with pytest.raises(UnsupportedFeatureError, match="the layer layer of Model.*head dimension 512"):
            verify_flash(Model(layer=Attention()), "my_flash", self.here)

    def test_not_here(self) -> None:
        with pytest.raises(KernelUnavailableError, match="flash_attention_3 is not usable here.*9.0 to 9.x.*B200"):
            verify_flash(Model(), "flash_attention_3", environment(*ALL, devices=(B200,)))

    @pytest.mark.parametrize("name", ["sdpa", "eager", "nothing"])
    def test_no_flash_attention(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"'{name}' is no flash attention; there are: flash_attention_2"):
            verify_flash(Model(), name, self.here)


class TestLoadWithFallback:
    """tests/integration tests with real models which errors cause a fallback."""

    def test_no_gradients_on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Environment, "detect", lambda *args: environment())
        tried: list[str] = []
        load_with_fallback(
            lambda name: tried.append(name) or Model(name), "flash_attention_flex", requires={"backward"}
        )
        assert tried == ["sdpa"]

    def test_the_first_that_loads(self) -> None:
        asked = []

        def load(name: str) -> str:
            asked.append(name)
            return f"a model with {name}"

        assert load_with_fallback(load, "my/kernel") == "a model with my/kernel"
        assert asked == ["my/kernel"]

    def test_steps_are_logged_once(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(Environment, "detect", classmethod(lambda cls, distributions=(): environment()))
        for _ in range(2):
            asked: list[str] = []

            def load(name: str, asked: list[str] = asked) -> str:
                asked.append(name)
                if name == "flash_attention_4":
                    raise KernelUnavailableError(name, ["no CUDA device"])
                return name

            with caplog.at_level(logging.WARNING, "kernel_compat"):
                found = load_with_fallback(load, "flash_attention_4")
            # Names that aren't usable here are skipped.
            assert asked == ["flash_attention_4", found]
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == LADDER.index(found)
        assert messages[0].startswith(
            "attn_implementation='flash_attention_4' is not supported here, trying 'flash_attention_3': "
            "flash_attention_4 is not usable here: no CUDA device"
        )

    @pytest.mark.parametrize(
        "error", [ValueError("bad config"), ImportError("no einops"), OSError("no such file"), KeyboardInterrupt()]
    )
    def test_other_errors_are_passed_on(self, error: BaseException) -> None:
        asked = []

        def load(name: str) -> None:
            asked.append(name)
            raise error

        with pytest.raises(type(error)) as caught:
            load_with_fallback(load, "flash_attention_4")
        assert caught.value is error
        assert asked == ["flash_attention_4"]

    def test_nothing_will_do(self) -> None:
        def load(name: str) -> None:
            raise UnsupportedFeatureError("anything", name, "No kernel does.")

        with pytest.raises(KernelUnavailableError, match="eager: eager does not support anything") as caught:
            load_with_fallback(load, "sdpa")
        assert isinstance(caught.value.__cause__, UnsupportedFeatureError)
        with pytest.raises(UnsupportedFeatureError, match="eager does not support anything"):
            load_with_fallback(load, "eager")

    def test_no_name(self) -> None:
        asked: list[str] = []
        load_with_fallback(asked.append, None)
        assert asked == ["sdpa"]

    @pytest.mark.parametrize("name", [3, ["sdpa"], {"": 3}])
    def test_objects_that_are_no_name(self, name: Any) -> None:
        for function in (lambda: load_with_fallback(print, name), lambda: ladder(name)):
            with pytest.raises(TypeError, match="an attention name must be a string"):
                function()

    def test_errors_of_the_models_own(self) -> None:
        def load(name: str) -> str:
            if name != "eager":
                raise ValueError("this model knows eager alone")
            return name

        assert load_with_fallback(load, "sdpa", is_refusal=lambda error: "eager alone" in str(error)) == "eager"
        with pytest.raises(ValueError, match="this model knows eager alone"):
            load_with_fallback(load, "sdpa", is_refusal=lambda error: False)

    def test_preferred_and_excluded_names(self) -> None:
        tried: list[str] = []

        def load(name: str) -> None:
            tried.append(name)
            raise UnsupportedFeatureError("it", name, "")

        with pytest.raises(KernelUnavailableError):
            load_with_fallback(load, "flash_attention_reference", prefer=["eager"], exclude={"sdpa"})
        assert tried == ["flash_attention_reference", "eager"]

    def test_required_features(self) -> None:
        asked: list[str] = []
        load_with_fallback(asked.append, "sdpa", requires={"softcap"})
        assert asked == ["eager"]

    def test_a_model_that_needs_softcap(self, caplog: pytest.LogCaptureFixture) -> None:
        def load(name: str) -> Model:
            return Model(name, Layer(attn_logit_softcapping=50.0))

        with caplog.at_level(logging.WARNING, "kernel_compat"):
            model = load_with_fallback(load, "sdpa")
        assert model.config._attn_implementation == "eager"
        assert "sdpa does not support softcap, which Model needs" in caplog.text

    @pytest.mark.parametrize(
        "error",
        [
            KernelUnavailableError("liger_kernel", ["it is not installed"]),
            UnsupportedFeatureError("float64", "rms_norm 'triton'", "Use float32."),
        ],
    )
    def test_errors_of_model_patches(self, error: Exception) -> None:
        """A missing Liger doesn't change the attention."""
        asked = []

        def load(name: str) -> None:
            asked.append(name)
            raise error

        with pytest.raises(type(error)) as caught:
            load_with_fallback(load, "sdpa")
        assert caught.value is error
        assert asked == ["sdpa"]

    def test_a_check_made_by_load(self) -> None:
        """The error names the model class without flash attention; its feature names the attention."""

        def load(name: str) -> Model:
            if name != "sdpa":
                verify_flash(Old, name)
            return Model(name)

        assert load_with_fallback(load, "flash_attention_reference").config._attn_implementation == "sdpa"


class TestProvenWrong:
    """A registered name isn't offered for a model type that loading would refuse."""

    HERE = environment(*ALL, devices=(H100,), transformers="5.3.0")  # has no flash_attention_4 of its own

    @pytest.fixture(autouse=True)
    def _table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        types = {"5.3": {"llama": {}, "gpt2": {"wrong": ["plain"]}}}
        monkeypatch.setattr("kernel_compat.proofs.table._table", lambda: types)

    def test_names_of_transformers_own_stay(self) -> None:
        steps = {step.name: step for step in ladder(environment=self.HERE, model_type="gpt2")}
        assert steps["flash_attention_4"].reason == "gpt2 is proven wrong under it: plain"
        assert [name for name, step in steps.items() if step.usable] == [
            "flash_attention_3",
            "flash_attention_2",
            "sdpa",
            "eager",
        ]
        assert best_available(self.HERE, model_type="gpt2").name == "flash_attention_3"

    @pytest.mark.parametrize("model_type", [None, "llama", "nonesuch"])
    def test_other_types(self, model_type: str | None) -> None:
        assert best_available(self.HERE, model_type=model_type).name == "flash_attention_4"

    def test_another_release(self) -> None:
        here = environment(*ALL, devices=(H100,), transformers="5.2.0")
        assert best_available(here, model_type="gpt2").name == "flash_attention_4"

    def test_registered_names(self) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        kernel_compat.register_attention("my_flash", "flash_attention_2")
        kernel_compat.register_attention("their_flash", "flash_attention_2", forward=forward)
        assert ladder("my_flash", self.HERE, model_type="gpt2")[0].usable is False
        assert ladder("their_flash", self.HERE, model_type="gpt2")[0].usable is True  # its author has to prove it

    def test_packed_sequences(self) -> None:
        plan = plan_attention("sdpa", packed_sequence=True, environment=self.HERE, model_type="gpt2")
        assert plan.attn_implementation == "flash_attention_3"
        assert any("gpt2 is proven wrong" in reason for reason in plan.reasons)


class TestVerifyAttention:
    """It is one call of what the tests above call by halves."""

    def test_a_name(self) -> None:
        with pytest.raises(ValueError, match="is no flash attention"):
            policy.verify_attention(Model(), "eager")

    def test_ranks(self) -> None:
        policy.verify_attention(Model("eager"))
        with pytest.raises(UnsupportedFeatureError, match="context parallelism"):
            policy.verify_attention(Model("eager"), cp_size=2)

    def test_both(self) -> None:
        here = environment(*ALL, devices=(H100,))
        policy.verify_attention(Model("sdpa"), "flash_attention_2", cp_size=2, environment=here)
        with pytest.raises(UnsupportedFeatureError, match="context parallelism"):
            policy.verify_attention(Model("eager"), "flash_attention_2", cp_size=2, environment=here)


@pytest.mark.parametrize("name", ["Preload", "resolve_preload", "verify_flash_support", "verify_sdpa_support"])
def test_names_of_earlier_releases(name: str) -> None:
    with pytest.warns(kernel_compat.RenamedWarning, match=rf"kernel_compat\.policy\.{name} is now "):
        found = getattr(policy, name)
    assert callable(found)
    assert name not in policy.__all__

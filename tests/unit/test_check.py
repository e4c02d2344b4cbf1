"""`check` reports wrong kernels, passes right ones, and says why a name isn't usable."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kernel_compat
from kernel_compat import Features, Kernel
from kernel_compat.cli import status
from kernel_compat.cli.explain import explain
from kernel_compat.diagnostics import numerics as check
from kernel_compat.errors import UnknownNameError
from kernel_compat.kernels import Provider
from kernel_compat.policy import LADDER

torch = pytest.importorskip("torch")

from stand_in import cpu_flash_attention  # noqa: E402

from kernel_compat.kernels import reference  # noqa: E402

ALL = {case.name for case in check.CASES}
PADDED_OR_PACKED = {case.name for case in check.CASES if case.layout != "batch"}


def kernel(change: Callable[..., Any]) -> SimpleNamespace:
    """A kernel that declares the reference's features and returns `change(reference_function, q, k, v, **keywords)`."""

    def dense(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        return change(reference.flash_attn_func, q, k, v, **keywords)

    def varlen(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        return change(reference.flash_attn_varlen_func, q, k, v, **keywords)

    features = kernel_compat.known_kernels()["flash_attention_reference"].features
    return SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen, features=features)


def check_kernel(functions: Any, **registration: Any) -> check.NameResult:
    kernel_compat.register_attention("my_flash", functions, **registration)
    (result,) = check.run(["my_flash"]).names
    return result


def having(result: check.NameResult, verdict: str) -> set[str]:
    return {case.case for case in result.cases if case.verdict == verdict}


def test_the_reference_is_right_in_every_case() -> None:
    report = check.run(["flash_attention_reference"])
    (result,) = report.names
    assert report.ok
    assert result.verdict == "right"
    assert [case.case for case in result.cases] == [case.name for case in check.CASES]
    for case in result.cases:
        assert case.verdict == "right"
        assert set(case.errors) == {"output", "dq", "dk", "dv"} | ({"dsinks"} if case.case == "sinks" else set())
        assert case.tolerance is not None
        assert 0 < max(case.errors.values()) <= case.tolerance


def test_sdpa_is_right_too() -> None:
    pytest.importorskip("transformers.modeling_utils")
    (result,) = check.run(["sdpa"]).names
    assert result.verdict == "right"
    assert having(result, "skipped") == {"packed cu_seq_lens", "softcap", "sinks"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_tolerances_leave_room_for_rounding(dtype: str) -> None:
    subject = check._Subject("mine", kernel_compat.known_kernels()["flash_attention_reference"])
    for case in check.CASES:
        assert check._check_case(case, subject, "cpu", getattr(torch, dtype)).verdict == "right"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torchs_own_kernel_is_right_in_every_case(dtype: str) -> None:
    """In the cases that the installed torch's signature supports; a stand-in replaces its CUDA kernel."""
    with cpu_flash_attention():
        known = kernel_compat.known_kernels()["flash_attention_torch"]
        subject = check._Subject("mine", Kernel(known.name, known.providers))
        results = [check._check_case(case, subject, "cpu", getattr(torch, dtype)) for case in check.CASES]
    skipped = {"softcap"} if subject.features.window else {"softcap", "window", "sinks"}
    assert {result.case for result in results if result.verdict == "skipped"} == skipped
    for result in results:
        if result.case not in skipped:
            assert result.verdict == "right", result.reason
            assert {"output", "dq", "dk", "dv"} <= set(result.errors)


def test_torchs_own_kernel_is_not_usable_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel loads all the same."""
    monkeypatch.setattr("kernel_compat.environment._devices", lambda: ())
    (result,) = check.run(["flash_attention_torch"]).names
    assert (result.verdict, result.reasons) == ("not usable", ("no CUDA device is visible",))
    assert result.cases == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tolerances_are_below_a_window_that_is_off_by_one(dtype: str) -> None:
    def wider(function: Any, q: Any, k: Any, v: Any, window_size: Any = (-1, -1), **keywords: Any) -> Any:
        left, right = window_size
        return function(q, k, v, window_size=(left + 1 if left >= 0 else left, right), **keywords)

    kernel_compat.register_attention("my_flash", kernel(wider))
    subject = check._Subject("my_flash", kernel_compat.registered_attention()["my_flash"].kernel)
    verdicts = {
        case.name: check._check_case(case, subject, "cpu", getattr(torch, dtype)).verdict for case in check.CASES
    }
    assert verdicts.pop("window") == "WRONG"
    assert set(verdicts.values()) == {"right"}


def no_causality(function: Any, q: Any, k: Any, v: Any, causal: bool = False, **keywords: Any) -> Any:
    return function(q, k, v, causal=False, **keywords)


def no_window(function: Any, q: Any, k: Any, v: Any, window_size: Any = None, **keywords: Any) -> Any:
    return function(q, k, v, **keywords)


def no_boundaries(function: Any, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    if function is reference.flash_attn_func:
        return function(q, k, v, **keywords)
    options = {name: keywords[name] for name in ("softmax_scale", "causal", "s_aux") if name in keywords}
    return reference.flash_attn_func(q[None], k[None], v[None], **options)[0]


def wrong_gradients(function: Any, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    return function(q, k.detach() + (k - k.detach()) * 1.01, v, **keywords)


def not_a_number(function: Any, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    return function(q, k, v, **keywords) * float("nan")


@pytest.mark.parametrize(
    ("change", "cases", "what"),
    [
        (no_causality, ALL - {"window"}, "output"),
        (no_window, {"window"}, "output"),
        (no_boundaries, PADDED_OR_PACKED, "output"),
        (wrong_gradients, ALL, "dk"),
        (not_a_number, ALL, "output"),
    ],
)
def test_a_wrong_kernel_is_found_out(change: Callable[..., Any], cases: set[str], what: str) -> None:
    result = check_kernel(kernel(change))
    assert result.verdict == "WRONG"
    # A causal window is also causal through its right limit of 0.
    assert having(result, "WRONG") == cases
    assert having(result, "right") == ALL - cases
    assert all(what in case.reason for case in result.cases if case.verdict == "WRONG")


def test_wrong_gradients_leave_the_output_right() -> None:
    for case in check_kernel(kernel(wrong_gradients)).cases:
        assert case.tolerance is not None
        assert case.errors["output"] < case.tolerance
        assert case.errors["dk"] == pytest.approx(0.01, rel=1e-3)
        assert case.reason == "wrong: dk"


def test_an_exception_is_a_failure_with_its_message() -> None:
    def broken(function: Any, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError("no kernel image\n  is available " + "x" * 1000)

    result = check_kernel(kernel(broken))
    assert result.verdict == "failed"
    assert having(result, "failed") == ALL
    assert result.cases[0].reason.startswith("RuntimeError: no kernel image is available xxx")
    assert len(result.cases[0].reason) < 500


def test_an_output_of_another_shape_or_dtype_is_a_failure() -> None:
    result = check_kernel(kernel(lambda function, *args, **keywords: function(*args, **keywords).half()))
    assert result.verdict == "failed"
    assert "torch.float16" in result.cases[0].reason


def test_a_feature_the_kernel_does_not_have_is_skipped_by_name() -> None:
    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
               softmax_scale: float, causal: bool) -> Any:  # fmt: skip
        return reference.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal
        )

    result = check_kernel(SimpleNamespace(flash_attn_varlen_func=varlen))
    assert result.verdict == "right"
    assert [(case.case, case.reason) for case in result.cases if case.verdict != "right"] == [
        (feature, f"no {feature}") for feature in ("window", "softcap", "sinks")
    ]


def module_kernel(monkeypatch: pytest.MonkeyPatch, **features: Any) -> Kernel:
    module = ModuleType("some_kernel")
    module.flash_attn_varlen_func = reference.flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_kernel", module)
    declared = Features(**{"dtypes": ("float32",), "devices": ("cpu",), **features})
    return Kernel("some_kernel", (Provider("some_kernel", "some-kernel", declared, "Ask for it.", bundled=True),))


def test_without_a_backward_the_forward_alone_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_kernel(module_kernel(monkeypatch, backward=False))
    assert result.verdict == "right"
    assert {tuple(case.errors) for case in result.cases if case.verdict == "right"} == {("output",)}
    assert {case.reason for case in result.cases if case.verdict == "right"} == {"no backward: forward only"}
    assert having(result, "skipped") == {"softcap", "sinks"}  # that kernel declares neither


def test_a_feature_that_the_installed_version_should_have_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keyword was renamed: the kernel works without windows, and the case for them must not go without a word."""

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
               softmax_scale: float | None = None, causal: bool = False, window: Any = (-1, -1)) -> Any:  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options: Any = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window}
        return reference.flash_attn_varlen_func(q, k, v, *lengths, **options)

    known = module_kernel(monkeypatch)
    sys.modules["some_kernel"].flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    kernel_compat.register_attention("my_flash", known)
    report = check.run(["my_flash"])
    (result,) = report.names
    assert (result.verdict, report.ok) == ("lost", False)
    assert having(result, "lost") == {"window"}
    assert having(result, "skipped") == {"softcap", "sinks"}  # not declared either


def test_a_kernel_for_another_device_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_kernel(module_kernel(monkeypatch, devices=("npu", "xpu")))
    assert result.verdict == "not usable"
    assert "it runs on npu or xpu" in result.reasons[0]


def test_what_is_not_installed_says_what_installs_it() -> None:
    missing = Kernel("mine", (Provider("no_such", "no-such", Features(devices=("cpu",)), "pip install no-such"),))
    result = check_kernel(missing)
    assert result.verdict == "not usable"
    assert result.reasons == ("no-such is not installed",)
    assert result.install == "pip install no-such"


def test_what_does_not_import_says_why() -> None:
    broken = Provider("no_such_module", "no-such", Features(devices=("cpu",)), "pip install no-such", bundled=True)
    result = check_kernel(Kernel("mine", (broken,)))
    assert result.verdict == "not usable"
    assert "does not import (ModuleNotFoundError: No module named 'no_such_module')" in result.reasons[0]
    assert result.install == "pip install no-such"


def test_a_forward_of_its_own_is_what_runs() -> None:
    layouts = []

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **keywords: Any) -> Any:
        layouts.append(set(keywords))
        if "sliding_window" in keywords:
            raise kernel_compat.UnsupportedFeatureError("sliding windows", "mine", "Nothing does.")
        right, _ = default(module, query, key, value, attention_mask, **keywords)
        return (right * 2 if "cu_seq_lens_q" in keywords else right), None

    from kernel_compat.attention.forward import attention_forward

    default = attention_forward(kernel_compat.known_kernels()["flash_attention_reference"], "mine")
    result = check_kernel("flash_attention_reference", forward=forward)
    assert having(result, "WRONG") == {"packed cu_seq_lens"}
    assert having(result, "skipped") == {"window"}
    assert len(layouts) == len(check.CASES)


def test_a_mask_function_of_its_own_leaves_padding_out() -> None:
    result = check_kernel("flash_attention_reference", mask=lambda **keywords: None)
    assert result.verdict == "right"
    assert having(result, "skipped") == {"padded left", "padded right", "sinks"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_modes_of_the_caller_do_not_matter(mode: Callable[[], Any]) -> None:
    with mode():
        (result,) = check.run(["flash_attention_reference"]).names
    assert result.verdict == "right"
    assert all("dq" in case.errors for case in result.cases)


def test_progress_counts_names() -> None:
    calls: list[tuple[str, int, int]] = []
    missing = Kernel("mine", (Provider("no_such", "no-such", Features(), ""),))
    kernel_compat.register_attention("my_flash", missing)
    check.run(["my_flash", "flash_attention_reference", "my_flash"], lambda *call: calls.append(call))
    assert calls == [("my_flash", 1, 2), ("flash_attention_reference", 2, 2)]


def test_nothing_stays_installed_and_an_installation_stays_as_it_is() -> None:
    pytest.importorskip("transformers.modeling_utils")
    check.run(["flash_attention_reference"])
    assert not kernel_compat.status().installed
    skip = next(shim.name for shim in kernel_compat.status().shims if shim.state == "pending")
    with kernel_compat.installed(skip=[skip]):
        report = check.run(["flash_attention_reference"])
        assert report.installation[skip].state == "skipped"
        assert kernel_compat.status()[skip].state == "skipped"


def test_a_refused_name_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.modeling_utils")
    monkeypatch.setitem(utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "my_flash", lambda: None)
    kernel_compat.register_attention("my_flash", "flash_attention_reference")
    report = check.run(["my_flash"])
    assert not report.ok
    assert report.names[0].verdict == "failed"
    assert "is taken in transformers by" in report.names[0].reasons[0]


def test_unknown_names_are_an_error_that_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"'nope' can't be checked here.*flash_attention_reference.*sdpa"):
        check.run(["flash_attention_reference", "nope"])
    with pytest.raises(TypeError, match="not the string 'sdpa'"):
        check.run("sdpa")


def test_the_reference_formula_agrees_with_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 9, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    visible = torch.ones(9, 9, dtype=torch.bool).tril().triu(-2)
    k_, v_ = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k_, v_, attn_mask=visible)
    assert torch.equal(check._visible(9, 3), visible)
    torch.testing.assert_close(check._reference(q, k, v, visible=visible[None]), expected.transpose(1, 2))


def test_every_kernel_and_every_registered_name_is_listed() -> None:
    kernel_compat.register_attention("my_flash", "flash_attention_reference")
    found = {name["name"]: name for name in status.find(Namespace())["attention"]}
    assert set(found) == {*kernel_compat.known_kernels(), "my_flash"}
    assert found["my_flash"]["kernel"] == "flash_attention_reference"
    assert found["my_flash"]["owner"] == "registered"
    assert found["my_flash"]["reasons"] == []
    assert found["flash_attention_2"]["owner"] == "transformers"
    assert found["flash_attention_reference"]["owner"] == "kernel-compat"
    assert found["flash_attention_torch"]["owner"] == "kernel-compat"


def test_explain_lists_every_provider() -> None:
    found = explain("flash_attention_3")
    assert [provider["distribution"] for provider in found["providers"]] == ["flash-attn-3", "fa3-fwd"]
    assert found["providers"][1]["features"].backward is False
    assert found["owner"] == "transformers"


@pytest.mark.parametrize(
    ("version", "features"), [("2.10.0", set()), ("2.11.0", {"window"}), ("2.15.0", {"window", "paged"})]
)
def test_explain_shows_the_features_of_the_torch_there_is(
    version: str, features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kernel_compat.Environment(packages={"torch": version}, imports={"torch": ("torch",)})
    monkeypatch.setattr(kernel_compat.Environment, "detect", classmethod(lambda cls, distributions=(): here))
    found = explain("flash_attention_torch")
    (provider,) = found["providers"]
    assert (provider["distribution"], provider["version"]) == ("torch", version)
    assert {"window", "paged"} & set(provider["features"].names()) == features
    assert [*provider["reasons"]] == [*found["reasons"]] == ["no CUDA device is visible"]
    assert found["owner"] == "kernel-compat"


@pytest.mark.parametrize("name", ["my_flash", "paged|my_flash"])
def test_explain_a_registered_name(name: str) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any: ...

    kernel_compat.register_attention("my_flash", "flash_attention_reference", forward)
    found = explain(name)
    assert (found["name"], found["kernel"], found["owner"]) == ("my_flash", "flash_attention_reference", "registered")
    assert found["forward"].endswith("test_explain_a_registered_name.<locals>.forward")
    assert found["state"] == "pending"


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_explain_what_transformers_owns(name: str) -> None:
    found = explain(name)
    assert (found["name"], found["kernel"], found["owner"]) == (name, None, "transformers")
    assert found["providers"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "is no attention name here; there are: eager.*flash_attention_2"),
        ("", "must not be empty"),
        ("a b", "may contain letters"),
    ],
)
def test_explain_of_a_bad_name(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        explain(name)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("flash_attention_3", LADDER[1:]),
        ("flash_attention_torch", LADDER[3:]),
        ("flash_attention_reference", ("flash_attention_reference", "sdpa", "eager")),
        ("sdpa", ("sdpa", "eager")),
        ("flex_attention", ("flex_attention", "eager")),
    ],
)
def test_explain_shows_the_ladder(name: str, steps: tuple[str, ...]) -> None:
    found = explain(name)["ladder"]
    assert tuple(step.name for step in found) == steps
    assert all(step.reason for step in found)


def test_explain_of_what_is_no_string() -> None:
    with pytest.raises(TypeError, match="must be a string"):
        explain(3)  # type: ignore[arg-type]

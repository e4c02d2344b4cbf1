"""The facts of the kernels' table, each in an environment made for it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from kernel_compat import Device, Environment, Features, Kernel, UnsupportedFeatureError, known_kernels, policy
from kernel_compat.cli import explain
from kernel_compat.diagnostics import numerics
from kernel_compat.environment import DISTRIBUTIONS, KNOWN_IMPORTS, SHIPS
from kernel_compat.kernels import Limit, catalog, reference
from kernel_compat.kernels.adapter import adapt
from kernel_compat.kernels.catalog import CATALOG, FLASH_ATTN_4, TRANSFORMERS
from kernel_compat.kernels.needs import Needs, unmet
from kernel_compat.kernels.options import Functions
from kernel_compat.kernels.provider import Provider, older
from kernel_compat.releases import TRANSFORMERS as TRANSFORMERS_RELEASES

A100, H100 = Device("A100", (8, 0)), Device("H100", (9, 0))
B200, THOR, RTX5090 = Device("B200", (10, 0)), Device("Thor", (11, 0)), Device("RTX 5090", (12, 0))
NEWEST = "4.0.0b36"


def environment(*devices: Device, **versions: str) -> Environment:
    """An Environment with torch and these packages, such as ``flash_attn_4="4.0.0b36"``."""
    packages = {"torch": "2.15.0", **{name.replace("_", "-"): version for name, version in versions.items()}}
    imports = {SHIPS[name][0]: (name,) for name in packages}
    return Environment(packages=packages, imports=imports, devices=devices)


def fa4(version: str, *devices: Device) -> Features:
    return FLASH_ATTN_4.features_in(environment(*devices, flash_attn_4=version))


# the table


def test_an_environment_describes_the_packages_of_every_kernel() -> None:
    for kernel in known_kernels().values():
        for package in kernel.providers:
            assert package.distribution in DISTRIBUTIONS
            assert package.bundled or package.distribution in KNOWN_IMPORTS[package.module]


def test_imports_that_several_distributions_ship() -> None:
    assert KNOWN_IMPORTS == {
        "torch": ("torch",),
        "transformers": ("transformers",),
        "flash_attn": ("flash-attn", "flash-attn-4"),
        "flash_attn.cute": ("flash-attn", "flash-attn-4"),
        "flash_attn_interface": ("flash-attn-3",),
        "fa3_fwd_interface": ("fa3-fwd",),
    }


def test_the_ladder_is_the_table() -> None:
    assert (
        *(name for name in CATALOG if name not in (catalog.FLEXIBLE, catalog.REFERENCE)),
        *TRANSFORMERS,
    ) == policy.LADDER


def test_explain_has_the_features_of_this_version_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment(RTX5090, flash_attn_4="4.0.0b20")
    monkeypatch.setattr(Environment, "detect", lambda *distributions: here)
    monkeypatch.setattr(
        explain, "status", lambda: type("Report", (), {"environment": here, "attention": {}, "shims": ()})
    )
    (package,) = explain.explain("flash_attention_4")["providers"]
    assert package["features"] == FLASH_ATTN_4.features_in(here) != FLASH_ATTN_4.features
    assert package["features"].sinks_from == "log-sum-exp"


@pytest.mark.parametrize(
    ("version", "bound", "expected"),
    [
        ("4.0.0b25", "4.0.0b26", True),
        ("4.0.0b26", "4.0.0b26", False),
        ("4.0.0", "4.0.0b26", False),
        ("2.11.0a0+gitabcdef", "2.11", False),
        ("2.10.9", "2.11", True),
        ("2.6.0.post1", "2.6", False),
    ],
)
def test_older(version: str, bound: str, expected: bool) -> None:
    from packaging.version import Version

    assert older(Version(version), bound) is expected


def test_limits() -> None:
    """By version, GPU or both; an unknown version counts as the newest, several GPUs as the least capable one."""
    limits = (
        Limit({"softcap": False}, before="2"),
        Limit({"sinks": False}, capabilities=(12,)),
        Limit({"window": False}, before="2", capabilities=(12,)),
        Limit(forward_only=("softcap",), before="1.5"),
        Limit(forward_only=("sinks",), before="1.6"),
    )
    package = Provider("x", "flash-attn-3", Features(softcap=True, sinks=True), "", limits=limits)

    def lost(where: Environment) -> set[str]:
        return set(package.features.names()) - set(package.features_in(where).names())

    assert lost(environment(H100, flash_attn_3="2.0")) == set()
    assert lost(environment(H100, flash_attn_3="1.9")) == {"softcap"}
    assert lost(environment(RTX5090, flash_attn_3="2.0")) == {"sinks"}
    assert lost(environment(RTX5090, flash_attn_3="1.9")) == {"softcap", "sinks", "window"}
    assert lost(environment(H100, RTX5090, flash_attn_3="2.0")) == {"sinks"}
    assert lost(environment(H100)) == set()
    assert lost(environment(flash_attn_3="1.9")) == {"softcap"}
    assert package.features_in(environment(flash_attn_3="1.5")).forward_only == ("sinks",)
    assert package.features_in(environment(flash_attn_3="1.4")).forward_only == ("softcap", "sinks")


# FlashAttention-4


@pytest.mark.parametrize("device", [H100, B200])
@pytest.mark.parametrize(
    ("version", "own"),
    [
        ("4.0.0b10", False),
        ("4.0.0b17", False),
        ("4.0.0b24", False),
        ("4.0.0b25", False),
        ("4.0.0b26", True),
        ("4.0.0b30", True),
        (NEWEST, True),
        ("4.0.0", True),
    ],
)
def test_its_own_sinks_where_they_have_gradients(device: Device, version: str, own: bool) -> None:
    features = fa4(version, device)
    assert features.sinks_from == ("keyword" if own else "log-sum-exp")
    assert features.lacking({"sinks", "backward"}) == []


def test_before_4_0_0b9() -> None:
    """No backward with softcap; before 4.0.0b5 no deterministic backward on sm_90 either."""
    training = {"softcap", "backward", "deterministic"}
    assert fa4("4.0.0b9", H100).lacking(training) == []
    assert fa4("4.0.0b8", H100).lacking(training) == ["gradients of softcap"]
    assert fa4("4.0.0b4", H100).lacking(training) == ["deterministic", "gradients of softcap"]
    assert fa4("4.0.0b4", B200).lacking(training) == ["gradients of softcap"]
    assert fa4("4.0.0b8", RTX5090).forward_only == ("softcap", "window")


@pytest.mark.parametrize(
    ("device", "lacking", "dims"),
    [(H100, [], ()), (B200, [], ((192, 128), (256, 256))), (RTX5090, ["gradients of sliding windows"], ())],
)
def test_of_4_0_0b16(device: Device, lacking: list[str], dims: tuple[tuple[int, int], ...]) -> None:
    """VeOmni 0.1.12 pins it. Read from its flash_attn/cute: interface.py, flash_bwd.py, flash_fwd.py."""
    features = fa4("4.0.0b16", device)
    assert features.lacking({"varlen", "window", "softcap", "sinks", "backward"}) == lacking
    assert features.head_dims == dims
    assert features.sinks_from == "log-sum-exp"  # it returns no gradient for its own
    assert features.deterministic == (device != RTX5090)


def test_the_extras_admit_every_version_that_is_supported() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    specifiers = {
        name: Requirement(requirements[0]).specifier
        for name, requirements in project["optional-dependencies"].items()
        if name in ("fa4", "transformers4", "transformers5-exp")
    }

    assert all(specifiers["fa4"].contains(version) for version in ("4.0.0b3", "4.0.0b16", NEWEST))
    for release in TRANSFORMERS_RELEASES:
        extra = "transformers4" if release.startswith("4.") else "transformers5-exp"
        assert specifiers[extra].contains(release), release


@pytest.mark.parametrize("version", ["4.0.0b10", NEWEST])
def test_on_sm_120(version: str) -> None:
    features = fa4(version, RTX5090)
    assert features.sinks_from == "log-sum-exp"
    assert not features.deterministic
    assert features.max_head_dim == 192
    assert features.lacking({"sinks", "deterministic"}) == ["deterministic"]
    assert fa4(version, H100).deterministic


@pytest.mark.parametrize(("version", "gradients"), [("4.0.0b20", False), ("4.0.0b21", True)])
def test_gradients_of_windows_on_sm_120(version: str, gradients: bool) -> None:
    features = fa4(version, RTX5090)
    assert features.window
    assert features.lacking({"window", "backward"}) == ([] if gradients else ["gradients of sliding windows"])


@pytest.mark.parametrize(
    ("version", "device", "usable"),
    [
        ("4.0.0b4", H100, True),
        ("4.0.0b4", THOR, True),
        ("4.0.0b4", RTX5090, False),
        ("4.0.0b5", RTX5090, True),
        (NEWEST, A100, False),
    ],
)
def test_where_it_runs(version: str, device: Device, usable: bool) -> None:
    reasons = FLASH_ATTN_4.unavailable_because(environment(device, flash_attn_4=version))
    assert (reasons == []) is usable
    if version == "4.0.0b4" and not usable:
        assert reasons == ["it needs compute capability 9.0 to 11.x, and there is RTX 5090 (sm_120)"]


def test_the_ladder_goes_by_version_and_gpu() -> None:
    def usable(device: Device, version: str, feature: str) -> bool | None:
        where = environment(device, flash_attn_4=version, transformers="5.23.0")
        return policy.ladder("flash_attention_4", where, {feature, "backward"})[0].usable

    assert usable(H100, "4.0.0b30", "softcap")
    assert usable(H100, "4.0.0b8", "softcap") is False
    assert usable(RTX5090, "4.0.0b30", "deterministic") is False


# how the adapter applies the features


def adapted(features: Features, package: Provider = FLASH_ATTN_4) -> tuple[Functions, list[dict[str, Any]]]:
    """The adapted functions of a package with these features, on the CPU, and the calls that the package gets."""
    calls: list[dict[str, Any]] = []

    def varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append({"q": q.shape[-1], "k": k.shape[-1], "v": v.shape[-1], **options})
        return v.repeat_interleave(q.shape[-2] // v.shape[-2], -2)

    raw = {"flash_attn_func": varlen, "flash_attn_varlen_func": varlen, "flash_attn_with_kvcache": None}
    return adapt("flash_attention_4", raw, replace(features, devices=("cpu",), dtypes=("float32",)), package)[1], calls


@pytest.mark.parametrize(
    ("version", "device", "given", "padded"),
    [
        (NEWEST, B200, (128, 128), (128, 128)),
        (NEWEST, B200, (100, 40), (128, 128)),
        (NEWEST, B200, (192, 128), (192, 128)),
        (NEWEST, B200, (160, 100), (192, 128)),
        (NEWEST, B200, (192, 192), (256, 256)),
        (NEWEST, B200, (256, 256), (256, 256)),
        (NEWEST, THOR, (192, 192), (256, 256)),
        ("4.0.0b10", B200, (192, 128), (192, 128)),
        ("4.0.0b10", B200, (192, 192), None),
        ("4.0.0b10", B200, (256, 256), None),
        (NEWEST, B200, (264, 264), None),
        (NEWEST, H100, (192, 128), (192, 192)),
        (NEWEST, H100, (192, 192), (192, 192)),
        (NEWEST, H100, (256, 256), (256, 256)),
        (NEWEST, RTX5090, (192, 192), (192, 192)),
        (NEWEST, RTX5090, (200, 200), None),
    ],
)
def test_head_dimensions(version: str, device: Device, given: tuple[int, int], padded: tuple[int, int] | None) -> None:
    """Supported ones are passed unchanged, others are padded to the next supported one, and the rest are refused."""
    functions, calls = adapted(fa4(version, device))
    q, v = torch.ones(1, 3, 2, given[0]), torch.ones(1, 3, 2, given[1])
    if padded is None:
        with pytest.raises(UnsupportedFeatureError, match="head dimension.*flash_attention_flex has no limit"):
            functions.flash_attn_func(q, q, v)
        assert not calls
        return
    out = functions.flash_attn_func(q, q, v)
    assert out.shape == v.shape
    (call,) = calls
    assert (call["q"], call["k"], call["v"]) == (padded[0], padded[0], padded[1])
    assert call["softmax_scale"] == (None if given == padded else given[0] ** -0.5)


@pytest.mark.parametrize("dims", [(192, 192), (160, 128), (192, 128)])
def test_padding_changes_neither_output_nor_gradients(dims: tuple[int, int]) -> None:
    features = replace(fa4(NEWEST, B200), devices=("cpu",), dtypes=("float64",), plain_backward_head_dims=())
    functions = Kernel("x", (replace(catalog.OWN, features=features),)).load()
    shapes = (1, 5, 4, dims[0]), (1, 7, 2, dims[0]), (1, 7, 2, dims[1])
    q, k, v = inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours, right = (
        [out, *torch.autograd.grad(out.sin().sum(), inputs)]
        for out in (
            function(q, k, v, causal=True, window_size=(3, 0), softcap=5.0)
            for function in (functions.flash_attn_func, reference.flash_attn_func)
        )
    )
    for x, y in zip(ours, right, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("version", "option", "forward", "backward"),
    [
        ("4.0.0b16", "softcap", False, False),
        ("4.0.0b33", "softcap", False, False),
        ("4.0.0b34", "softcap", True, False),
        (NEWEST, "softcap", True, False),
        ("4.0.0b33", "s_aux", False, False),
        (NEWEST, "s_aux", True, False),
        (NEWEST, "", True, True),
    ],
)
@pytest.mark.parametrize("dim", [256, 192])
def test_on_sm_100_256_has_neither_softcap_nor_sinks(
    version: str, option: str, forward: bool, backward: bool, dim: int
) -> None:
    """Its kernels of its own assert so: flash_attn/cute/interface.py."""
    features = fa4(version, B200)
    functions, calls = adapted(features)
    options: dict[str, Any] = {"softcap": {"softcap": 5.0}, "s_aux": {"s_aux": torch.zeros(2)}, "": {}}[option]
    used = {"softcap": {"softcap"}, "s_aux": {"sinks"}, "": set()}[option]
    word = Features.word(next(iter(used), ""))
    for gradients, right in ((False, forward), (True, backward)):
        q = torch.ones(1, 3, 2, dim, requires_grad=gradients)
        needs = Needs(dim, dim, "bfloat16", "cuda", frozenset(used | ({"backward"} if gradients else set())))
        what = f"{'gradients of ' if forward else ''}{word} with head dimensions .256, 256."
        if right:
            assert unmet(features, needs) == ""
            functions.flash_attn_func(q, q, q, **options)
            continue
        before = len(calls)
        with pytest.raises(UnsupportedFeatureError, match=f"does not support {what}.*{catalog.FLEXIBLE}"):
            functions.flash_attn_func(q, q, q, **options)
        assert len(calls) == before
        assert re.fullmatch(f"no {what}", unmet(features, needs))
    q = torch.ones(1, 3, 2, 128, requires_grad=True)
    if option == "softcap":
        functions.flash_attn_func(q, q, q, **options)


def test_the_refusal_names_the_head_dimensions_that_are_taken() -> None:
    functions, _ = adapted(fa4("4.0.0b10", B200))
    q = torch.ones(1, 3, 2, 192)
    with pytest.raises(UnsupportedFeatureError) as caught:
        functions.flash_attn_func(q, q, q)
    assert str(caught.value) == (
        "flash_attention_4 does not support head dimensions (192, 192) of query and value. On this GPU it takes up to 128, "
        "or (192, 128); flash_attention_flex has no limit."
    )


def test_sinks_without_gradients_are_refused_where_they_are_trained() -> None:
    functions, calls = adapted(replace(fa4(NEWEST, H100), forward_only=("sinks",)))
    q, sinks = torch.ones(1, 3, 2, 32, requires_grad=True), torch.zeros(2)
    functions.flash_attn_func(q, q, q, s_aux=sinks)  # frozen, as under LoRA
    sinks.requires_grad_()
    with torch.no_grad():
        functions.flash_attn_func(q, q, q, s_aux=sinks)
    assert len(calls) == 2
    with pytest.raises(UnsupportedFeatureError, match="does not support gradients of attention sinks") as caught:
        functions.flash_attn_func(q, q, q, s_aux=sinks)
    assert "Or run it under torch.no_grad()." in str(caught.value)
    assert len(calls) == 2


def test_windows_without_gradients_are_refused_in_training() -> None:
    functions, calls = adapted(fa4("4.0.0b20", RTX5090))
    q = torch.ones(1, 3, 2, 32)
    functions.flash_attn_func(q, q, q, window_size=(1, 0))
    functions.flash_attn_func(q.clone().requires_grad_(), q, q)
    with pytest.raises(UnsupportedFeatureError, match="does not support gradients of sliding windows"):
        functions.flash_attn_func(q, q, q.clone().requires_grad_(), window_size=(1, 0))
    assert len(calls) == 2


def test_check_computes_no_gradients_where_a_feature_has_none() -> None:
    package = replace(catalog.OWN, features=replace(catalog.OWN.features, forward_only=("window",)))
    subject = numerics._Subject("x", Kernel("x", (package,)))
    cases = {case.name: case for case in numerics.CASES}
    window, causal = (numerics._check_case(cases[name], subject, "cpu", torch.float32) for name in ("window", "causal"))
    assert (window.verdict, window.reason, set(window.errors)) == ("right", "no backward: forward only", {"output"})
    assert (causal.verdict, causal.reason, set(causal.errors)) == ("right", "", {"output", "dq", "dk", "dv"})


@pytest.mark.parametrize(
    ("where", "feature", "able"),
    [
        (environment(), "dropout", "flash_attention_2, flash_attention_reference"),
        (
            environment(A100, flash_attn_4=NEWEST),
            "sinks",
            "flash_attention_2, flash_attention_torch, flash_attention_flex, flash_attention_reference",
        ),
        (
            environment(RTX5090, flash_attn_4=NEWEST),
            "softcap",
            "flash_attention_4, flash_attention_2, flash_attention_flex, flash_attention_reference",
        ),
        (environment(B200), "paged", "flash_attention_2, flash_attention_torch"),
        (environment(H100), "paged", "flash_attention_3, flash_attention_2, flash_attention_torch"),
        (environment(H100, fa3_fwd="0.0.3"), "paged", "flash_attention_2, flash_attention_torch"),
        (replace(environment(B200), packages={"torch": "2.11.0"}), "paged", "flash_attention_2"),
        (
            environment(A100),
            "window",
            "flash_attention_2, flash_attention_torch, flash_attention_flex, flash_attention_reference",
        ),
        (environment(A100), "masks", "flash_attention_flex, flash_attention_reference"),
        (environment(), "masks", "flash_attention_flex, flash_attention_reference"),
    ],
)
def test_errors_name_the_kernels_that_have_it_here(
    where: Environment, feature: str, able: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment, "detect", lambda *distributions: where)
    assert catalog.instead("another", feature) == f"Kernels that do: {able}."
    for name in able.split(", "):
        assert name not in catalog.instead(name, feature)


def test_gradients_are_named_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    where = environment(H100, flash_attn_4="4.0.0b8")
    monkeypatch.setattr(Environment, "detect", lambda *distributions: where)
    both = (
        "Kernels that do: flash_attention_4, flash_attention_3, flash_attention_2, flash_attention_flex, "
        "flash_attention_reference."
    )
    assert catalog.instead("x", "softcap") == both
    assert catalog.instead("x", "softcap", gradients=True) == both.replace("flash_attention_4, ", "")


def test_a_kernel_is_loaded_with_the_features_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    module = SimpleNamespace(flash_attn_varlen_func=lambda q, **options: q)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    kernel = Kernel("flash_attention_4", CATALOG["flash_attention_4"])
    kernel.load(environment(RTX5090, flash_attn_4=NEWEST))
    assert not kernel.features.deterministic
    assert not kernel.features.sinks  # the module has no primitives
    assert kernel.features_in(environment(H100, flash_attn_4=NEWEST)).deterministic

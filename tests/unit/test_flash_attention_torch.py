"""torch's varlen_attn as a kernel on the CPU: all is real except the CUDA kernel, which stand_in.py replaces."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from stand_in import cpu_flash_attention
from torch import Tensor

from kernel_compat import (
    Device,
    Environment,
    Kernel,
    KernelUnavailableError,
    SeamError,
    UnsupportedFeatureError,
    known_kernels,
)
from kernel_compat.kernels import Functions, reference, torch_varlen
from kernel_compat.kernels.catalog import instead
from kernel_compat.kernels.torch_varlen import _scaled, _write

NAME = "flash_attention_torch"
RELEASE = Version(torch.__version__).release[:2]
#: Features of the installed torch's kernel, by release; the adapter itself reads the signature.
WINDOWS = SCALES = RELEASE >= (2, 11)
PAGES = RELEASE >= (2, 13)

#: Unit roundoff of bfloat16: the largest relative error of one rounding.
U = 2.0**-8
#: Bound on float32's rounding errors: sums of up to a hundred products of about 1, each rounded by 2^-24.
FLOAT32 = 2.0**-16

LEADING = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k"
TORCH_2_10 = f"{LEADING}, is_causal=False, return_aux=None"
TORCH_2_11 = f"{LEADING}, *, return_aux=None, scale=None, window_size=(-1, -1)"
TORCH_2_12 = f"{TORCH_2_11}, enable_gqa=False, seqused_k=None, block_table=None, num_splits=None"


def environment(torch_version: str = torch.__version__, *capabilities: tuple[int, int]) -> Environment:
    return Environment(
        packages={"torch": torch_version},
        imports={"torch": ("torch",)},
        devices=tuple(Device(f"GPU {major}.{minor}", (major, minor)) for major, minor in capabilities),
    )


def fresh() -> Kernel:
    """The kernel, not loaded yet; the library's own instance is loaded once per process."""
    return Kernel(NAME, known_kernels()[NAME].providers)


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """The calls of the stand-in for torch's CUDA kernel, which is registered for the CPU."""
    with cpu_flash_attention() as calls:
        yield calls


@pytest.fixture
def functions(calls: list[dict[str, Any]]) -> Functions:
    return fresh().load(environment())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# signatures


class Varlen:
    """A `varlen_attn` with this signature that computes nothing and records its arguments and options."""

    def __init__(self, signature: str) -> None:
        scope: dict[str, Any] = {}
        exec(f"def varlen_attn({signature}): ...", scope)
        self.__signature__ = inspect.signature(scope["varlen_attn"])
        self.arguments: list[tuple[Any, ...]] = []
        self.asked: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.__signature__.bind(*arguments, **options)
        self.arguments.append(arguments)
        self.asked.append(options)
        return arguments[0]


def kernel_over(varlen_attn: Any, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel over another `varlen_attn`, which runs on any device, in a torch whose own kernel takes a number of splits."""
    monkeypatch.setattr(torch_varlen, "_takes_splits", lambda: True)  # torch 2.12 has the parameter for FA3 alone
    module = ModuleType("kc_varlen")
    module.varlen_attn = varlen_attn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kc_varlen", module)
    (provider,) = known_kernels()[NAME].providers
    return Kernel(NAME, (replace(provider, module="kc_varlen", runs_on=lambda device: True),))


def test_what_the_installed_torch_can_do() -> None:
    kernel = fresh()
    functions = kernel.load(environment())
    every = {"causal", "window", "sinks", "deterministic", "gqa", "varlen", "paged", "backward"}
    assert set(kernel.features.names()) == every - ({"window"} if not WINDOWS else set()) - (
        {"paged"} if not PAGES else set()
    )
    assert (functions.flash_attn_with_kvcache is not None) is PAGES
    # The features that are declared by version, before the import, are the same.
    assert fresh().features_in(environment()).names() == kernel.features.names()
    assert kernel.load(environment()) is functions


@pytest.mark.parametrize(
    ("signature", "window", "paged"),
    [
        (TORCH_2_10, False, False),
        (TORCH_2_11, True, False),
        (TORCH_2_12, True, True),
        (f"{TORCH_2_12}, sinks=None, softcap=0.0", True, True),
        (f"{TORCH_2_12}, **options", True, True),
        (f"{TORCH_2_11}, seqused_k=None", True, False),  # useless without block_table
    ],
    ids=["2.10", "2.11", "2.12", "a nightly with more options", "one with any", "half a paged cache"],
)
@pytest.mark.parametrize("version", ["2.10.1", "2.11.0", "2.16.0.dev20261101"])
def test_the_signature_decides(
    signature: str, window: bool, paged: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version doesn't matter: nightlies and vendors' builds may have another release's signature."""
    kernel = kernel_over(Varlen(signature), monkeypatch)
    functions = kernel.load(environment(version))
    assert (kernel.features.window, kernel.features.paged) == (window, paged)
    assert (functions.flash_attn_with_kvcache is not None) is paged
    assert not kernel.features.softcap
    assert kernel.features.sinks


class NoSignature:
    __signature__ = "none that could be read"

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("varlen_attn", "found"),
    [
        (Varlen(f"{LEADING}, dropout_p, *, window_size=(-1, -1)"), "of which dropout_p is new and required"),
        (Varlen(f"{LEADING}, *, window_size=(-1, -1), layout"), "of which layout is new and required"),
        (Varlen("query, key, value, cu_seq_q, max_q, max_k, is_causal=False"), "cu_seq_q, max_q, max_k, is_causal"),
        (Varlen("q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False"), "parameters (q, k, v,"),
        (Varlen(TORCH_2_11.replace("(-1, -1)", "(0, 0)")), "window_size=(0, 0)"),
        (Varlen(TORCH_2_11.replace("(-1, -1)", "None")), "window_size=None"),
        (Varlen(TORCH_2_10.replace("False", "True")), "is_causal=True"),
        (Varlen(TORCH_2_12.replace("enable_gqa=False", "enable_gqa=True")), "enable_gqa=True"),
        (Varlen(TORCH_2_12.replace("num_splits=None", "num_splits=0")), "num_splits=0"),
        (
            Varlen(TORCH_2_12.replace("scale=None", "scale=1.0").replace("num_splits=None", "num_splits=1")),
            "scale=1.0, num_splits=1",
        ),
        (Varlen(f"{LEADING}, *, return_aux=None, scale=None"), "causality by no parameter"),
        (Varlen(f"{TORCH_2_11}, is_causal=False"), "causality by is_causal and window_size"),
        (NoSignature(), "NoSignature, which has no signature"),
        (None, "NoneType, which has no signature"),
    ],
)
def test_a_signature_that_nobody_has_seen(varlen_attn: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_over(varlen_attn, monkeypatch)
    declared = kernel.features_in(environment())
    for _ in range(2):  # no partial state: the second call raises the same error
        with pytest.raises(SeamError) as caught:
            kernel.load(environment())
    error = caught.value
    assert found in error.found
    assert error.seam == "torch.nn.attention.varlen:varlen_attn"
    assert error.expected == f"parameters ({LEADING}, ...), and is_causal or window_size for causality"
    assert error.version == f"torch {torch.__version__}"
    assert all(part in str(error) for part in (error.seam, error.expected, error.found, error.version))
    assert kernel.features_in(environment()) == declared
    assert not getattr(varlen_attn, "asked", None)
    sys.modules["kc_varlen"].varlen_attn = Varlen(TORCH_2_11)  # type: ignore[attr-defined]
    assert kernel.load(environment()).flash_attn_with_kvcache is None


# availability


@pytest.mark.parametrize(
    ("version", "window", "paged"),
    [
        ("2.9.1", False, False),
        ("2.10.0", False, False),
        ("2.10.0+cu128", False, False),
        ("2.11.0", True, False),
        ("2.11.0a0+gitabcdef", True, False),
        ("2.12.0", True, False),
        ("2.13.0", True, True),
        ("2.16.0.dev20261101+cu132", True, True),
        ("3.0", True, True),
        ("unreadable", True, True),
    ],
)
def test_features_expected_of_a_version(version: str, window: bool, paged: bool) -> None:
    features = fresh().features_in(environment(version))
    assert (features.window, features.paged) == (window, paged)
    assert features.causal
    assert features.gqa
    assert features.varlen
    assert features.backward
    assert not any((features.softcap, features.dropout))
    assert features.sinks
    assert (features.head_dim_multiple, features.max_head_dim) == (8, 256)
    assert features.dtypes == ("bfloat16", "float16")


def test_features_expected_of_a_torch_without_metadata() -> None:
    assert fresh().features_in(Environment(imports={"torch": ()})) == known_kernels()[NAME].providers[0].features


OLD = "is older than 2.10, the first with torch.nn.attention.varlen"


@pytest.mark.parametrize(
    ("where", "because"),
    [
        (environment("2.11.0"), ["no CUDA device is visible"]),
        (
            environment("2.11.0", (7, 5)),
            ["it needs compute capability 8.0 or greater, and there is GPU 7.5 (sm_75)"],
        ),
        (environment("2.11.0", (8, 0)), []),
        (environment("2.11.0", (12, 0)), []),
        (environment("2.11.0", (7, 5), (8, 9)), []),
        (environment("2.10.0", (9, 0)), []),
        (environment("2.10.0a0+git1", (9, 0)), []),
        (environment("unreadable", (9, 0)), []),
        (environment("2.9.1", (9, 0)), [f"torch 2.9.1 {OLD}"]),
        (environment("2.9.1"), [f"torch 2.9.1 {OLD}", "no CUDA device is visible"]),
        (Environment(), ["torch is not installed", "no CUDA device is visible"]),
        (Environment(imports={"torch": ()}, devices=(Device("H100", (9, 0)),)), []),
    ],
)
def test_where_it_runs(where: Environment, because: list[str]) -> None:
    assert known_kernels()[NAME].unavailable_because(where) == because


def test_it_loads_without_a_device() -> None:
    """So that a test or a backend can provide a kernel for another device."""
    kernel = fresh()
    where = environment()
    assert kernel.unavailable_because(where) == ["no CUDA device is visible"]
    assert isinstance(kernel.load(where), Functions)


@pytest.mark.parametrize(
    ("where", "says", "is_torch"),
    [
        (environment(torch.__version__, (7, 5)), "it needs compute capability 8.0 or greater", False),
        (environment("2.9.1"), f"torch 2.9.1 {OLD}", True),
        (Environment(), "torch is not installed", True),
    ],
)
def test_where_it_does_not_load(where: Environment, says: str, is_torch: bool) -> None:
    """The error advises another torch where that helps."""
    with pytest.raises(KernelUnavailableError, match=says) as caught:
        fresh().load(where)
    assert caught.value.kernel == NAME
    assert caught.value.install == ("Install a newer torch: pip install --upgrade 'torch>=2.10'" if is_torch else "")
    assert caught.value.install in str(caught.value)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def call(functions: Functions, which: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """One sequence, (1, length, heads, head_dim), dense, packed, or with its keys and values in a page."""
    out: Tensor
    if which == "dense":
        out = functions.flash_attn_func(q, k, v, **options)
        return out
    if which == "paged":
        assert functions.flash_attn_with_kvcache is not None
        paging = {"cache_seqlens": offsets(k.shape[1])[1:], "block_table": torch.zeros(1, 1, dtype=torch.int32)}
        out = functions.flash_attn_with_kvcache(q, k, v, **paging, **options)
        return out
    lengths = {
        "cu_seqlens_q": offsets(q.shape[1]),
        "cu_seqlens_k": offsets(k.shape[1]),
        "max_seqlen_q": q.shape[1],
        "max_seqlen_k": k.shape[1],
    }
    out = functions.flash_attn_varlen_func(q[0], k[0], v[0], **lengths, **options)
    return out[None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("which", ["dense", "varlen", *(["paged"] if PAGES else [])])
def test_the_first_call_on_a_cpu(which: str, dtype: torch.dtype) -> None:
    """With any dtype, the error is about the device."""
    functions = fresh().load(environment())
    q = torch.ones(1, 3, 2, 8, dtype=dtype)
    with pytest.raises(KernelUnavailableError) as caught:
        call(functions, which, q, q, q)
    assert str(caught.value) == (
        f"{NAME} is not usable here: it has no kernel for tensors on 'cpu'. "
        "Move the model to cuda, or use flash_attention_reference."
    )
    assert isinstance(caught.value, ImportError)


def test_a_cpu_that_has_a_kernel_has_it_no_longer_than_that() -> None:
    functions = fresh().load(environment())
    q = torch.ones(1, 3, 2, 8, dtype=torch.bfloat16)
    with cpu_flash_attention():
        assert torch.equal(call(functions, "dense", q, q, q), q)
    with pytest.raises(KernelUnavailableError):
        call(functions, "dense", q, q, q)


# supported inputs


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_dtypes(which: str, functions: Functions) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q = torch.ones(1, 3, 2, 8, dtype=dtype)
        assert call(functions, which, q, q, q).dtype == dtype
    for dtype in (torch.float32, torch.float64):
        q = torch.ones(1, 3, 2, 8, dtype=dtype)
        with pytest.raises(UnsupportedFeatureError, match=f"{NAME} does not support {dtype}") as caught:
            call(functions, which, q, q, q)
        assert "Cast the model to bfloat16 or float16" in str(caught.value)
        assert "flash_attention_reference" in str(caught.value)


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize("dim", [257, 264])
def test_a_head_dimension_that_is_too_large(which: str, dim: int, functions: Functions) -> None:
    q = torch.ones(1, 3, 2, dim, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedFeatureError, match=f"head dimension {dim}. Its largest is 256"):
        call(functions, which, q, q, q)


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_what_it_has_not(which: str, functions: Functions, calls: list[Any]) -> None:
    q = torch.ones(1, 3, 2, 8, dtype=torch.bfloat16)
    able = [name for name, kernel in known_kernels().items() if kernel.providers[0].features.softcap]
    assert NAME not in able
    assert "flash_attention_reference" in able
    with pytest.raises(UnsupportedFeatureError) as caught:
        call(functions, which, q, q, q, softcap=30.0)
    assert str(caught.value) == f"{NAME} does not support softcap. Kernels that do: {', '.join(able)}."
    assert not calls
    for nothing in ({"softcap": 0.0}, {"softcap": None}, {"s_aux": None}):
        call(functions, which, q, q, q, **nothing)
    assert len(calls) == 3


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_dropout_warns_once(which: str, functions: Functions) -> None:
    q = torch.randn(1, 3, 2, 8, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=f"{NAME} has no attention dropout: it is not applied"):
        out = call(functions, which, q, q, q, dropout_p=0.5)
    assert torch.equal(out, call(functions, which, q, q, q))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(functions, which, q, q, q, dropout_p=0.5)


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_determinism_warns_once_where_there_are_gradients(which: str, index: int, functions: Functions) -> None:
    inputs = [torch.randn(1, 3, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(functions, which, *inputs, deterministic=True)
        inputs[index].requires_grad_()
        call(functions, which, *inputs)
        with torch.no_grad():
            call(functions, which, *inputs, deterministic=True)
    with pytest.warns(UserWarning, match="has no deterministic backward of its own: gradients vary in their last bits"):
        call(functions, which, *inputs, deterministic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(functions, which, *inputs, deterministic=True)


@pytest.mark.usefixtures("deterministic")
def test_determinism_needs_no_warning_where_torch_grants_it(functions: Functions) -> None:
    q = torch.randn(1, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(functions, "dense", q, q, q, deterministic=True)


# the arguments passed to varlen_attn

SOME = torch.ones(1, 4, 4, 16, dtype=torch.bfloat16)
FEWER = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize(
    ("options", "by_2_10", "by_2_11"),
    [
        ({}, {"is_causal": False}, {"window_size": (-1, -1)}),
        ({"causal": True}, {"is_causal": True}, {"window_size": (-1, 0)}),
        ({"causal": True, "window_size": (None, None)}, {"is_causal": True}, {"window_size": (-1, 0)}),
        ({"softmax_scale": 0.3}, {"is_causal": False}, {"window_size": (-1, -1), "scale": 0.3}),
        ({"softmax_scale": -0.3}, {"is_causal": False}, {"window_size": (-1, -1), "scale": 0.3}),
        ({"softmax_scale": 0.0}, {"is_causal": False}, {"window_size": (-1, -1), "scale": 1.0}),
        ({"window_size": (3, 2)}, None, {"window_size": (3, 2)}),
        ({"window_size": (2, 2)}, None, {"window_size": (2, 2)}),
        ({"window_size": (3, 0)}, None, {"window_size": (3, 0)}),
        ({"window_size": (0, 0)}, None, {"window_size": (0, 0)}),
        ({"window_size": (-1, 2)}, None, {"window_size": (-1, 2)}),
        ({"window_size": (None, 2)}, None, {"window_size": (-1, 2)}),
        ({"window_size": (3, -1)}, None, {"window_size": (3, -1)}),
        ({"causal": True, "window_size": (3, 0)}, None, {"window_size": (3, 0)}),
        ({"causal": True, "window_size": (3, 3)}, None, {"window_size": (3, 0)}),
        ({"causal": True, "window_size": (-1, 3)}, None, {"window_size": (-1, 0)}),
    ],
    ids=str,
)
def test_what_is_asked(
    which: str,
    options: dict[str, Any],
    by_2_10: dict[str, Any] | None,
    by_2_11: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactly the expected options, and none that the signature lacks."""
    for signature, expected in ((TORCH_2_10, by_2_10), (TORCH_2_11, by_2_11), (TORCH_2_12, by_2_11)):
        varlen_attn = Varlen(signature)
        functions = kernel_over(varlen_attn, monkeypatch).load(environment())
        if expected is None:
            with pytest.raises(UnsupportedFeatureError, match="sliding windows. Kernels that do: flash_attention_4"):
                call(functions, which, SOME, SOME, SOME, **options)
            assert not varlen_attn.asked
        else:
            call(functions, which, SOME, SOME, SOME, **options)
            assert varlen_attn.asked == [expected]


def test_who_has_windows_where_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "detect", classmethod(lambda cls: environment("2.10.0")))
    functions = kernel_over(Varlen(TORCH_2_10), monkeypatch).load(environment())
    with pytest.raises(UnsupportedFeatureError) as caught:
        call(functions, "dense", SOME, SOME, SOME, window_size=(3, 0))
    assert NAME not in str(caught.value).partition("Kernels that do:")[2]
    # Another kernel's message suggests it where the installed torch supports the feature.
    assert NAME not in instead("flash_attention_2", "window")
    assert NAME not in instead("flash_attention_2", "paged")
    monkeypatch.setattr(Environment, "detect", classmethod(lambda cls: environment("2.13.0")))
    assert NAME in instead("flash_attention_2", "window")
    assert NAME in instead("flash_attention_2", "paged")
    assert NAME not in instead(NAME, "window")


def test_fewer_key_heads_are_announced_where_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for signature, announced in ((TORCH_2_10, False), (TORCH_2_11, False), (TORCH_2_12, True)):
        varlen_attn = Varlen(signature)
        functions = kernel_over(varlen_attn, monkeypatch).load(environment())
        call(functions, "dense", SOME, FEWER, FEWER)
        call(functions, "dense", SOME, SOME, SOME)
        assert [asked.get("enable_gqa") for asked in varlen_attn.asked] == [announced or None, None]


def test_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for deterministic calls; otherwise torch chooses."""
    varlen_attn = Varlen(TORCH_2_12)
    functions = kernel_over(varlen_attn, monkeypatch).load(environment())
    for options in ({}, {"deterministic": False}, {"deterministic": True}):
        call(functions, "dense", SOME, SOME, SOME, **options)
    assert [asked.get("num_splits") for asked in varlen_attn.asked] == [None, None, 1]
    assert "num_splits" not in varlen_attn.asked[0]
    older = Varlen(TORCH_2_11)
    call(kernel_over(older, monkeypatch).load(environment()), "dense", SOME, SOME, SOME, deterministic=True)
    assert older.asked == [{"window_size": (-1, -1)}]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_splits_under_torchs_own_switch(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen_attn = Varlen(TORCH_2_12)
    call(kernel_over(varlen_attn, monkeypatch).load(environment()), which, SOME, SOME, SOME)
    assert varlen_attn.asked == [{"window_size": (-1, -1), "num_splits": 1}]


def test_splits_of_an_activated_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always a number: without one torch 2.15 would choose cuDNN."""
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[0], raising=False)
    varlen_attn = Varlen(TORCH_2_12)
    functions = kernel_over(varlen_attn, monkeypatch).load(environment())

    def splits(**options: Any) -> Any:
        varlen_attn.asked.clear()
        call(functions, "dense", SOME, SOME, SOME, **options)
        return varlen_attn.asked[0].get("num_splits")

    assert splits() is None
    active[0] = "FA3"  # activated after it was loaded
    assert splits() == 0
    assert splits(deterministic=True) == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        assert splits() is None
    assert splits() == 0


def test_torch_2_12_has_a_number_of_splits_for_a_backend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on an H100: its own kernel raises "num_splits requires FA3", and in pages it would split the keys."""
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[0], raising=False)
    varlen_attn = Varlen(TORCH_2_12)
    kernel = kernel_over(varlen_attn, monkeypatch)
    monkeypatch.setattr(torch_varlen, "_takes_splits", lambda: False)
    functions = kernel.load(environment())
    assert not kernel.features.paged
    assert functions.flash_attn_with_kvcache is None
    call(functions, "dense", SOME, SOME, SOME, deterministic=True)
    active[0] = "FA3"
    call(functions, "dense", SOME, SOME, SOME, deterministic=True)
    assert [asked.get("num_splits") for asked in varlen_attn.asked] == [None, 1]


def test_lengths_that_are_equal_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 recognizes equal lengths by the identity of the two tensors."""
    varlen_attn = Varlen(TORCH_2_12)
    functions = kernel_over(varlen_attn, monkeypatch).load(environment())
    longer = torch.ones(1, 5, 4, 16, dtype=torch.bfloat16)
    batch = SOME.expand(3, -1, -1, -1)
    functions.flash_attn_func(batch, batch, batch, causal=True)
    functions.flash_attn_func(SOME, longer, longer, causal=True)
    (_, _, _, q_offsets, k_offsets, *longest), (_, _, _, q_other, k_other, *other) = varlen_attn.arguments
    assert q_offsets is k_offsets
    assert q_offsets.tolist() == [0, 4, 8, 12]
    assert longest == [4, 4]
    assert (q_other.tolist(), k_other.tolist(), other) == ([0, 4], [0, 5], [4, 5])
    assert q_offsets.dtype == q_other.dtype == k_other.dtype == torch.int32


def test_what_this_torch_makes_of_it(functions: Functions, calls: list[dict[str, Any]]) -> None:
    """Causal, window and splits as they reach the CUDA kernel."""
    call(functions, "dense", SOME, FEWER, FEWER, causal=True, deterministic=True, softmax_scale=0.5)
    (asked,) = calls
    assert asked["causal"] is True
    assert asked["heads"] == (4, 2)
    assert asked["scale"] == (0.5 if SCALES else None)
    assert asked["window"] in ((-1, 0), (None, None))
    assert asked.get("num_splits") == (1 if RELEASE >= (2, 13) else None)
    call(functions, "dense", SOME, SOME, SOME)
    assert calls[-1]["causal"] is False
    assert calls[-1]["window"] in ((-1, -1), (None, None))
    assert calls[-1].get("num_splits") is None
    if WINDOWS:
        call(functions, "dense", SOME, SOME, SOME, causal=True, window_size=(3, 0))
        assert (calls[-1]["causal"], calls[-1]["window"]) == (False, (3, 0))


def test_maximum_lengths_may_be_tensors(functions: Functions) -> None:
    lengths = {"cu_seqlens_q": offsets(4), "cu_seqlens_k": offsets(4)}
    out = functions.flash_attn_varlen_func(
        SOME[0], SOME[0], SOME[0], **lengths, max_seqlen_q=torch.tensor(4), max_seqlen_k=torch.tensor([4])
    )
    assert torch.equal(out, SOME[0])


# numbers


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def results(function: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Output and gradients, each in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    assert out.dtype == inputs[0].dtype
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, weight.to(out.dtype)))]


def compare(
    inputs: list[Tensor], ours: Callable[..., Tensor], theirs: Callable[..., Tensor], rounded_query: bool = False
) -> None:
    """Compare bfloat16 with the reference kernel on the same numbers in float64.

    The stand-in computes in float32 and rounds its results to bfloat16, so each element may be off by one rounding.
    Rounding the query before, and its gradient after, changes the scores by at most U of themselves, which adds about
    one U of the norm: four are allowed, as in `check`.
    """
    q_shape, v_shape = inputs[0].shape, inputs[2].shape
    weight = random(*q_shape[:-1], v_shape[-1], seed=9)
    found, expected = results(ours, inputs, weight), results(theirs, [x.double() for x in inputs], weight)
    for what, x, y in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        if rounded_query:
            assert (x - y).norm() <= 4 * U * y.norm(), what
        else:
            torch.testing.assert_close(x, y, rtol=U, atol=FLOAT32, msg=lambda text, what=what: f"{what}: {text}")


class Sizes(NamedTuple):
    lengths: tuple[tuple[int, int], ...] = ((7, 7), (1, 1), (12, 12))
    heads: tuple[int, int] = (2, 2)
    dim: int = 16
    value_dim: int | None = None


SIZES = {
    "equal lengths": Sizes(),
    "fewer key heads": Sizes(heads=(4, 2)),
    "one key head": Sizes(heads=(3, 1)),
    "shorter queries": Sizes(((1, 9), (4, 13), (12, 15))),
    "longer queries": Sizes(((9, 1), (13, 4), (15, 12))),
    "no queries": Sizes(((0, 5), (4, 7), (0, 3))),
    "no keys": Sizes(((5, 0), (4, 7), (3, 0))),
    "neither": Sizes(((5, 5), (0, 0), (3, 8), (0, 0))),
    "head dimension 20": Sizes(dim=20),
    "head dimension 40": Sizes(dim=40, heads=(4, 2)),
    "head dimension 36": Sizes(dim=36),
    "head dimension 250": Sizes(dim=250),
    "smaller value dimension": Sizes(dim=16, value_dim=8),
    "smaller odd value dimension": Sizes(((4, 9), (6, 6)), dim=20, value_dim=13),
}
#: The dimensions that torch 2.10 pads to a multiple of 8, where no padding makes the scale a power of two.
ROUNDED_DIMS = (250,)
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (2, 2)},
    {"window_size": (3, 0)},
    {"window_size": (0, 0)},
    {"window_size": (-1, 2)},
    {"window_size": (3, -1)},
    {"window_size": (-1, 0)},
    {"causal": True, "window_size": (3, 0)},
    {"causal": True, "window_size": (3, 3)},
]


def packed_inputs(sizes: Sizes) -> tuple[list[Tensor], dict[str, Any]]:
    q_lengths, k_lengths = zip(*sizes.lengths, strict=True)
    heads, kv_heads = sizes.heads
    inputs = [
        random(sum(q_lengths), heads, sizes.dim, seed=1),
        random(sum(k_lengths), kv_heads, sizes.dim, seed=2),
        random(sum(k_lengths), kv_heads, sizes.value_dim or sizes.dim, seed=3),
    ]
    return inputs, {
        "cu_seqlens_q": offsets(*q_lengths),
        "cu_seqlens_k": offsets(*k_lengths),
        "max_seqlen_q": max(q_lengths),
        "max_seqlen_k": max(k_lengths),
    }


def on(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: function(q, k, v, **options)


def refusal(mask: dict[str, Any], max_q: int, max_k: int) -> str | None:
    """The expected refusal: a window, where torch has none, or a window whose right side the kernel would limit."""
    left, right = mask.get("window_size", (-1, -1))
    if not WINDOWS and (left >= 0 or right >= 0):
        return "sliding windows"
    if left >= 0 > right and not mask.get("causal") and max_q > max_k + 1:
        return "a window without a limit to the right over more queries than keys"
    return None


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_packed_sequences(sizes: Sizes, mask: dict[str, Any], functions: Functions) -> None:
    inputs, lengths = packed_inputs(sizes)
    ours, theirs = (on(kernel.flash_attn_varlen_func, **lengths, **mask) for kernel in (functions, reference))
    if refused := refusal(mask, lengths["max_seqlen_q"], lengths["max_seqlen_k"]):
        with pytest.raises(UnsupportedFeatureError, match=refused):
            ours(*inputs)
    else:
        compare(inputs, ours, theirs, rounded_query=not SCALES and sizes.dim in ROUNDED_DIMS)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(9, 9), (1, 9), (4, 9), (9, 4)], ids=["equal", "one query", "fewer queries", "more queries"]
)
def test_batches(q_len: int, kv_len: int, mask: dict[str, Any], functions: Functions) -> None:
    q, k, v = (random(3, n, h, 16, seed=n + h) for n, h in ((q_len, 4), (kv_len, 2), (kv_len, 2)))
    if refused := refusal(mask, q_len, kv_len):
        with pytest.raises(UnsupportedFeatureError, match=refused):
            functions.flash_attn_func(q, k, v, **mask)
    else:
        compare([q, k, v], on(functions.flash_attn_func, **mask), on(reference.flash_attn_func, **mask))


@pytest.mark.skipif(not WINDOWS, reason="no windows before torch 2.11")
def test_a_window_without_a_limit_to_the_right(functions: Functions) -> None:
    """Right for up to one query more than the longest sequence has keys; test_batches tests that more are refused."""
    inputs, lengths = packed_inputs(Sizes(((9, 1), (3, 8), (5, 4))))
    options = {**lengths, "window_size": (2, -1)}
    compare(inputs, on(functions.flash_attn_varlen_func, **options), on(reference.flash_attn_varlen_func, **options))


#: Scales that torch 2.10, which has no scale argument, applies without rounding the query, and other scales.
EXACT_SCALES = (None, 1 / 12, -1 / 12, 0.25, 0.125, 1.0, -(2.0**-9), 2.0, 64**-0.5, 40**-0.5, 0.0)
OTHER_SCALES = (0.1, -0.3, 1 / 7, 100**-0.5)


@pytest.mark.parametrize("scale", [*EXACT_SCALES, *OTHER_SCALES])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_scales(scale: float | None, causal: bool, which: str, functions: Functions) -> None:
    """Includes zero and negative scales, which torch 2.15 refuses."""
    options = {"softmax_scale": scale, "causal": causal}
    rounded = not SCALES and scale in OTHER_SCALES
    if which == "dense":
        q, k, v = random(2, 6, 4, 32, seed=1), random(2, 6, 2, 32, seed=2), random(2, 6, 2, 32, seed=3)
        compare([q, k, v], on(functions.flash_attn_func, **options), on(reference.flash_attn_func, **options), rounded)
    else:
        inputs, lengths = packed_inputs(Sizes(((5, 5), (3, 8), (0, 2)), heads=(4, 2), dim=32))
        options.update(lengths)
        compare(
            inputs,
            on(functions.flash_attn_varlen_func, **options),
            on(reference.flash_attn_varlen_func, **options),
            rounded,
        )


def test_a_scale_of_zero_is_a_mean(functions: Functions) -> None:
    q, v = random(1, 5, 2, 16, seed=1), random(1, 5, 2, 16, seed=2)
    out = call(functions, "dense", q, q, v, softmax_scale=0.0)
    torch.testing.assert_close(out.double(), v.double().mean(1, keepdim=True).expand_as(out), rtol=U, atol=FLOAT32)


def test_inputs_are_left_as_they_were(functions: Functions) -> None:
    for scale in (None, 0.0, -0.5, 1 / 12, 0.1):
        inputs = [random(1, 5, 2, 20, seed=n) for n in range(3)]
        before = [x.clone() for x in inputs]
        call(functions, "dense", *inputs, softmax_scale=scale)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_tokens_behind_the_last_sequence(functions: Functions) -> None:
    """They belong to no sequence, and don't change the output of the sequences."""
    inputs, lengths = packed_inputs(Sizes(((4, 4), (3, 3))))
    expected = functions.flash_attn_varlen_func(*inputs, **lengths, causal=True)
    longer = [torch.cat([x, random(2, *x.shape[1:], seed=4)]) for x in inputs]
    assert torch.equal(functions.flash_attn_varlen_func(*longer, **lengths, causal=True)[:7], expected)


@pytest.mark.skipif(not PAGES, reason="no number of splits before torch 2.13")
def test_torch_compile_with_a_backend(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice between an activated backend and cuDNN is a constant of the graph."""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    functions = fresh().load(environment())
    compiled = torch.compile(functions.flash_attn_func, fullgraph=True, backend="aot_eager")
    inputs = [random(1, 6, 2, 16, seed=seed) for seed in range(3)]
    torch.testing.assert_close(compiled(*inputs), functions.flash_attn_func(*inputs))
    assert [call["num_splits"] for call in calls] == [0, 0]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("scale", [None, 0.1])
def test_torch_compile(scale: float | None) -> None:
    """In one graph, forward and backward."""
    functions = fresh().load(environment())
    cu = offsets(2, 0, 4)
    options: dict[str, Any] = {"causal": True, "softmax_scale": scale}
    if WINDOWS:
        options["window_size"] = (3, 0)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dense = functions.flash_attn_func(q, k, v, **options)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4}
        return dense.flatten(0, 1) + functions.flash_attn_varlen_func(q, k, v, **lengths, **options)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [random(1, 6, heads, 20, seed=heads).requires_grad_() for heads in (4, 2, 2)]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    for found, expected in zip(run(compiled), run(compute), strict=True):
        torch.testing.assert_close(found, expected)


# the scale, for torch 2.10


def small_integers(*shape: int, seed: int) -> Tensor:
    """Integers whose sums of products are exact in float64, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dim", "scale", "padded", "power"),
    [
        (16, 1 / 4, 16, 1.0),
        (64, 1 / 8, 64, 1.0),
        (128, 128**-0.5, 128, 1.0),
        (256, 1 / 16, 256, 1.0),
        (64, 1.0, 64, 8.0),
        (16, 2.0**-6, 16, 2.0**-4),
        (32, 1 / 8, 64, 1.0),
        (32, 0.5, 64, 4.0),
        (128, 1 / 12, 144, 1.0),
        (64, 1 / 12, 144, 1.0),
        (128, 1.0, 256, 16.0),
        (24, 20**-0.5, 80, 2.0),  # head dimension 20, as padded for the kernel
        (40, 40**-0.5, 40, 1.0),
        (40, 36**-0.5, 144, 2.0),
        (96, 192**-0.5, 192, 1.0),
        (112, 224**-0.5, 224, 1.0),
    ],
)
def test_scores_are_exact_where_a_padding_makes_the_factor_a_power_of_two(
    dim: int, scale: float, padded: int, power: float, sign: int
) -> None:
    q, k, v = (small_integers(5, 2, dim, seed=n) for n in range(3))
    q_scaled, k_padded, v_padded = _scaled(q, k, v, sign * scale)
    for x, given_, factor in ((q_scaled, q, sign * power), (k_padded, k, 1.0), (v_padded, v, 1.0)):
        assert x.dtype == torch.bfloat16
        assert x.shape == (5, 2, padded)
        assert torch.equal(x[..., :dim].double(), given_.double() * factor)
        assert (x[..., dim:] == 0).all()
    dots = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    ours = torch.einsum("qhd,khd->hqk", q_scaled.double(), k_padded.double())
    assert torch.equal(ours, dots * sign * power)
    assert math.isclose(power / math.sqrt(padded), scale, rel_tol=2.0**-51)  # the effective scale is the requested one
    if math.isqrt(padded) ** 2 == padded:  # its root is exact
        assert torch.equal(ours * padded**-0.5, dots * (sign * scale))


def test_a_scale_that_is_the_kernels_own_costs_nothing() -> None:
    q, k, v = (small_integers(5, 2, 64, seed=n) for n in range(3))
    for scale in (None, 1 / 8, 64**-0.5):
        assert all(x is y for x, y in zip(_scaled(q, k, v, scale), (q, k, v), strict=True))


@pytest.mark.parametrize("zero", [0.0, -0.0, 0])
def test_a_scale_of_zero(zero: float) -> None:
    q, k, v = (small_integers(5, 2, 64, seed=n) for n in range(3))
    scaled = _scaled(q, k, v, zero)
    assert (scaled[0] == 0).all()
    assert scaled[1] is k
    assert scaled[2] is v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(
    dim=st.integers(1, 32).map(lambda n: 8 * n),
    scale=st.one_of(
        st.floats(2.0**-6, 4.0), st.integers(1, 300).map(lambda n: n**-0.5), st.integers(-6, 2).map(lambda n: 2.0**n)
    ),
    negative=st.booleans(),
    seed=st.integers(0, 100),
)
def test_scores_are_never_off_by_more_than_one_rounding_of_the_query(
    dtype: torch.dtype, dim: int, scale: float, negative: bool, seed: int
) -> None:
    scale = -scale if negative else scale
    q, k, v = (torch.randn(3, 1, dim, generator=torch.Generator().manual_seed(seed + n)).to(dtype) for n in range(3))
    q_scaled, k_padded, v_padded = (x.double() for x in _scaled(q, k, v, scale))
    padded = q_scaled.shape[-1]
    assert padded == k_padded.shape[-1] == v_padded.shape[-1]
    assert padded % 8 == 0
    assert dim <= padded <= 256
    assert torch.equal(v_padded[..., :dim], v.double())
    found = torch.einsum("qhd,khd->hqk", q_scaled, k_padded) / math.sqrt(padded)
    expected = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    # Exact if some padding makes the squared factor a power of four.
    squares = [scale * scale * p for p in range(dim, 257, 8)]
    exact = any(math.isclose(square, 4.0 ** round(math.log2(square) / 2), rel_tol=1e-11) for square in squares)
    terms = torch.einsum("qhd,khd->hqk", q.double().abs(), k.double().abs()) * abs(scale)
    # float16 is subnormal below 2^-14, where the rounding error is up to 2^-25.
    denormal = 2.0**-25 * k.double().abs().sum(-1).max() if dtype == torch.float16 else 0.0
    rounding = 0.0 if exact else torch.finfo(dtype).eps / 2 * (1 + 2.0**-12)
    if not exact:
        assert padded == dim
        whole = q.double() * (scale * math.sqrt(dim))
        assert ((q_scaled - whole).abs() <= whole.abs() * rounding + 2.0**-25).all()
    assert ((found - expected).abs() <= terms * (rounding + 2.0**-38) + denormal).all()


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("dim", "scale", "padded"), [(20, None, 80), (32, 1 / 12, 144), (100, None, 104), (32, 0.1, 32)]
)
def test_the_padding_reaches_the_kernel_on_2_10_alone(
    dim: int, scale: float | None, padded: int, calls: list[dict[str, Any]]
) -> None:
    q = random(1, 4, 2, dim, seed=1)
    out = fresh().load(environment()).flash_attn_func(q, q, q, softmax_scale=scale)
    assert out.shape == q.shape
    assert calls[-1]["head_dim"] == (-(-dim // 8) * 8 if SCALES else padded)


# the paged cache


needs_pages = pytest.mark.skipif(not PAGES, reason="no paged cache before torch 2.13")


@pytest.mark.skipif(PAGES, reason="this torch has a paged cache")
def test_no_paged_cache_before_2_12(functions: Functions) -> None:
    assert functions.flash_attn_with_kvcache is None


class Cache:
    """Keys and values in pages of a larger storage, of which nothing else may change.

    Args:
        layout: how the pages lie in the storage: one after the other, every other one, heads before tokens, or keys and
            values of each page side by side.
        tables: the pages of each sequence, -1 for none.
    """

    def __init__(self, layout: str, tables: list[list[int]], page_size: int, heads: int, dim: int, seed: int) -> None:
        pages = max(max(row) for row in tables) + 2
        shapes = {
            "contiguous": (2, pages, page_size, heads, dim),
            "every other page": (2, 2 * pages, page_size, heads, dim),
            "heads first": (2, pages, heads, page_size, dim),
            "keys beside values": (pages, page_size, heads, 2, dim),
        }
        views: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
            "contiguous": lambda x: (x[0], x[1]),
            "every other page": lambda x: (x[0, ::2], x[1, 1::2]),
            "heads first": lambda x: (x[0].transpose(1, 2), x[1].transpose(1, 2)),
            "keys beside values": lambda x: (x[..., 0, :], x[..., 1, :]),
        }
        self.view = views[layout]
        self.storage = random(*shapes[layout], seed=seed)
        self.table = torch.tensor(tables, dtype=torch.int32)
        self.page_size = page_size

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.view(self.storage)

    def after(self, lengths: list[int], new: tuple[Tensor, Tensor]) -> Tensor:
        """The expected storage after the new tokens are appended."""
        storage = self.storage.clone()
        for pages, tokens in zip(self.view(storage), new, strict=True):
            for row, length in enumerate(lengths):
                for n in range(tokens.shape[1]):
                    place = length + n
                    if length >= 0 and self.table[row, place // self.page_size] >= 0:
                        pages[int(self.table[row, place // self.page_size]), place % self.page_size] = tokens[row, n]
        return storage

    def gathered(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a sequence: (1, length, heads, dim)."""
        places = [(int(self.table[row, n // self.page_size]), n % self.page_size) for n in range(length)]
        keys, values = ([x[place] for place in places] for x in self.pages)
        if not places:
            empty = self.pages[0][0, :0]
            return empty[None], empty[None]
        return torch.stack(keys)[None], torch.stack(values)[None]


class Paged(NamedTuple):
    """The arguments of a call with a paged cache."""

    layout: str
    page_size: int
    tables: list[list[int]]
    lengths: list[int]
    new: int
    seed: int


LAYOUTS = ("contiguous", "every other page", "heads first", "keys beside values")


@st.composite
def paged(draw: st.DrawFn, new: tuple[int, int]) -> Paged:
    """Sequences of any lengths in pages in any order, and padding rows with no length and perhaps no pages."""
    page_size, columns, rows = draw(st.sampled_from((1, 2, 3, 8))), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tokens = min(draw(st.integers(*new)), page_size * columns)
    order = draw(st.permutations(range(rows * columns)))
    tables, lengths = [], []
    for row in range(rows):
        if draw(st.integers(0, 3)) == 0:
            tables.append([draw(st.sampled_from((-1, order[0])))] * columns)
            lengths.append(-draw(st.integers(1, 40)))
            continue
        length = draw(st.integers(0, page_size * columns - tokens))
        used = -(-(length + tokens) // page_size)
        pages = list(order[row * columns : (row + 1) * columns])
        # Entries after the pages in use may be -1 or another sequence's pages.
        tables.append(pages[:used] + [draw(st.sampled_from((-1, order[0]))) for _ in range(columns - used)])
        lengths.append(length)
    return Paged(draw(st.sampled_from(LAYOUTS)), page_size, tables, lengths, tokens, draw(st.integers(0, 99)))


@given(paged((1, 6)))
def test_new_tokens_go_where_they_belong_and_nothing_else_changes(given_: Paged) -> None:
    cache = Cache(given_.layout, given_.tables, given_.page_size, 2, 8, given_.seed)
    new = tuple(random(len(given_.lengths), given_.new, 2, 8, seed=given_.seed + n) for n in (1, 2))
    expected = cache.after(given_.lengths, (new[0], new[1]))
    lengths = torch.tensor(given_.lengths, dtype=torch.int32)
    for pages, tokens in zip(cache.pages, new, strict=True):
        _write(pages, tokens, lengths, cache.table)
    assert torch.equal(cache.storage, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_padding(dtype: torch.dtype) -> None:
    """Nothing is written for rows that are all padding."""
    cache = Cache("contiguous", [[0], [1]], 4, 2, 8, seed=0)
    before = cache.storage.clone()
    new = random(2, 1, 2, 8, seed=1)
    for lengths, table in (([-1, -7], [[0], [1]]), ([0, 3], [[-1], [-1]]), ([-1, 2], [[1], [-1]])):
        pages = torch.tensor(table, dtype=dtype)
        _write(cache.pages[0], new, torch.tensor(lengths, dtype=dtype), pages)
        assert torch.equal(cache.storage, before)


def test_tokens_for_which_there_is_no_page_are_not_written() -> None:
    """They don't overwrite a sequence that fills all of its pages either."""
    cache = Cache("contiguous", [[0, 1]], 4, 2, 8, seed=0)
    new, before = random(1, 3, 2, 8, seed=1), cache.storage.clone()
    _write(cache.pages[0], new, torch.tensor([8]), cache.table)
    assert torch.equal(cache.storage, before)
    _write(cache.pages[0], new, torch.tensor([7]), cache.table)
    before[0, 1, 3] = new[0, 0]
    assert torch.equal(cache.storage, before)


@needs_pages
@given(
    asked=paged((0, 4)),
    queries=st.integers(1, 5),
    heads=st.sampled_from(((2, 2), (4, 2), (3, 1))),
    causal=st.booleans(),
    window=st.sampled_from(((-1, -1), (2, 0), (3, 1), (-1, 1))),
    scale=st.sampled_from((None, 0.1, -0.25, 0.0)),
    sinks=st.booleans(),
)
def test_a_paged_cache(
    asked: Paged,
    queries: int,
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    sinks: bool,
) -> None:
    """Each row against the reference on the gathered keys; nothing but the new tokens is written to the cache."""
    batch = len(asked.lengths)
    cache = Cache(asked.layout, asked.tables, asked.page_size, heads[1], 16, asked.seed)
    q = random(batch, queries, heads[0], 16, seed=asked.seed + 1)
    new = tuple(random(batch, asked.new, heads[1], 16, seed=asked.seed + n) for n in (2, 3))
    expected_storage = cache.after(asked.lengths, (new[0], new[1]))
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "window_size": window}
    options["s_aux"] = random(heads[0], seed=asked.seed + 4) if sinks else None
    with cpu_flash_attention(), torch.no_grad():
        kvcache = fresh().load(environment()).flash_attn_with_kvcache
        assert kvcache is not None
        out = kvcache(
            q,
            *cache.pages,
            *(new if asked.new else (None, None)),
            cache_seqlens=torch.tensor(asked.lengths, dtype=torch.int32),
            block_table=cache.table,
            **options,
        )
    assert torch.equal(cache.storage, expected_storage)
    assert out.shape == q.shape
    assert out.dtype == torch.bfloat16
    assert not out.isnan().any()
    for row, length in enumerate(asked.lengths):
        if length < 0:
            continue
        k, v = cache.gathered(row, length + asked.new)
        expected = reference.flash_attn_func(q[row, None].double(), k.double(), v.double(), **options)
        # The output without sinks is rounded as well.
        torch.testing.assert_close(out[row, None].double(), expected, rtol=(1 + sinks) * U, atol=FLOAT32)


def paged_call(functions: Functions, **changes: Any) -> Tensor:
    """Two sequences of 3 and 5 tokens in pages of 4, one new token each."""
    cache = Cache("contiguous", [[0, -1], [2, 1]], 4, 2, 16, seed=0)
    arguments: dict[str, Any] = {
        "q": random(2, 1, 4, 16, seed=1),
        "k_cache": cache.pages[0],
        "v_cache": cache.pages[1],
        "k": random(2, 1, 2, 16, seed=2),
        "v": random(2, 1, 2, 16, seed=3),
        "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32),
        "block_table": cache.table,
        "causal": True,
    }
    assert functions.flash_attn_with_kvcache is not None
    out: Tensor = functions.flash_attn_with_kvcache(**{**arguments, **changes})
    return out


@needs_pages
def test_what_the_paged_kernel_is_asked(functions: Functions, calls: list[dict[str, Any]]) -> None:
    paged_call(functions)
    (asked,) = calls
    assert (asked["causal"], asked["window"]) == (True, (-1, 0))
    assert asked["heads"] == (4, 2)
    assert asked["block_table"].tolist() == [[0, -1], [2, 1]]
    assert asked["num_splits"] == 1  # every other number gives wrong results in torch 2.13
    paged_call(functions, window_size=(2, 0))
    assert (calls[-1]["causal"], calls[-1]["window"]) == (False, (2, 0))


@pytest.mark.parametrize("active", [None, "FA3", "FA4"])
def test_offsets_of_keys_in_pages(active: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 needs offsets besides the lengths; FlashAttention-3 and -4 refuse them."""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active, raising=False)
    varlen_attn = Varlen(TORCH_2_12)
    paged_call(kernel_over(varlen_attn, monkeypatch).load(environment()))
    ((q, k_cache, v_cache, q_offsets, k_offsets, *longest),) = varlen_attn.arguments
    (asked,) = varlen_attn.asked
    assert (q.shape, k_cache.shape, v_cache.shape) == ((2, 4, 16), (4, 4, 2, 16), (4, 4, 2, 16))
    assert (q_offsets.tolist(), longest) == ([0, 1, 2], [1, 8])
    assert asked["seqused_k"].tolist() == [4, 6]
    assert (asked["window_size"], asked["enable_gqa"], asked["num_splits"]) == ((-1, 0), True, 1)
    assert asked["block_table"].tolist() == [[0, -1], [2, 1]]
    assert "scale" not in asked
    assert q_offsets.dtype == asked["seqused_k"].dtype == asked["block_table"].dtype == torch.int32
    if active is None:
        assert k_offsets.tolist() == [0, 4, 10]
        assert k_offsets.dtype == torch.int32
    else:
        assert k_offsets is None


@needs_pages
@pytest.mark.usefixtures("deterministic")
def test_splits_of_the_paged_kernel(functions: Functions, calls: list[dict[str, Any]]) -> None:
    paged_call(functions)
    assert calls[-1]["num_splits"] == 1


@needs_pages
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_any_integer_dtype(dtype: torch.dtype, functions: Functions) -> None:
    lengths = torch.tensor([3, 5], dtype=dtype)
    assert torch.equal(paged_call(functions, cache_seqlens=lengths), paged_call(functions))
    assert lengths.tolist() == [3, 5]


@needs_pages
@pytest.mark.parametrize("missing", ["block_table", "cache_seqlens"])
def test_a_cache_without_pages_is_refused(missing: str, functions: Functions, calls: list[Any]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="a cache without block_table and cache_seqlens. Give both."):
        paged_call(functions, **{missing: None})
    assert not calls


@needs_pages
@pytest.mark.parametrize("index", ["q", "k", "v", "k_cache"])
def test_gradients_through_a_paged_cache(index: str, functions: Functions, calls: list[Any]) -> None:
    """Refused before anything is written."""
    cache = Cache("contiguous", [[0, -1], [2, 1]], 4, 2, 16, seed=0)
    inputs: dict[str, Any] = dict(zip(("k_cache", "v_cache"), cache.pages, strict=True))
    inputs |= {"q": random(2, 1, 4, 16, seed=1), "k": random(2, 1, 2, 16, seed=2), "v": random(2, 1, 2, 16, seed=3)}
    before = cache.storage.clone()
    needing = inputs | {index: inputs[index].clone().requires_grad_()}
    with pytest.raises(UnsupportedFeatureError, match="gradients through a paged cache. Run it under torch.no_grad()"):
        paged_call(functions, **needing)
    assert torch.equal(cache.storage, before)
    assert not calls
    with torch.no_grad():
        out = paged_call(functions, **needing)
    assert not torch.equal(cache.storage, before) or index == "k_cache"
    assert torch.equal(out, paged_call(functions))


@needs_pages
@pytest.mark.parametrize("missing", ["k", "v"])
def test_new_keys_come_with_new_values(missing: str, functions: Functions) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        paged_call(functions, **{missing: None})


@needs_pages
def test_paged_values_of_another_head_dimension(functions: Functions) -> None:
    values = random(4, 4, 2, 8, seed=1)
    with pytest.raises(UnsupportedFeatureError, match="whose values have another head dimension than its keys"):
        paged_call(functions, v_cache=values, k=None, v=None)


@needs_pages
def test_a_paged_window_without_a_limit_to_the_right(functions: Functions) -> None:
    """The kernel replaces the missing limit with the capacity for keys, here 8."""
    options: dict[str, Any] = {"k": None, "v": None, "causal": False, "window_size": (2, -1)}
    paged_call(functions, q=random(2, 9, 4, 16, seed=1), **options)
    with pytest.raises(UnsupportedFeatureError, match="without a limit to the right over more queries than keys"):
        paged_call(functions, q=random(2, 10, 4, 16, seed=1), **options)


@needs_pages
@pytest.mark.parametrize("dim", [20, 12, 4])
def test_a_paged_cache_is_not_padded(dim: int, functions: Functions, calls: list[Any]) -> None:
    """Padding would copy the whole cache."""
    cache = Cache("contiguous", [[0, -1], [2, 1]], 4, 2, dim, seed=0)
    q = random(2, 1, 4, dim, seed=1)
    with pytest.raises(
        UnsupportedFeatureError, match=f"a paged cache of head dimension {dim}. It must be a multiple of 8"
    ):
        paged_call(functions, q=q, k_cache=cache.pages[0], v_cache=cache.pages[1], k=None, v=None)
    assert not calls


@needs_pages
def test_what_the_paged_kernel_has_not(functions: Functions) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{NAME} does not support softcap. Kernels that do:"):
        paged_call(functions, softcap=30.0)

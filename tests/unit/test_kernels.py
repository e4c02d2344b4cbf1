from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_compat import (
    Device,
    Environment,
    Features,
    Kernel,
    KernelCompatError,
    KernelUnavailableError,
    UnsupportedFeatureError,
    known_kernels,
)
from kernel_compat.kernels import Functions, Limit, Provider, as_kernel
from kernel_compat.kernels.adapter import adapt

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
KERNELS = (
    "flash_attention_4",
    "flash_attention_3",
    "flash_attention_2",
    "flash_attention_torch",
    "flash_attention_flex",
    "flash_attention_reference",
)
#: The kernels with a package of their own, and the kernels that need a GPU.
PACKAGES, ON_CUDA = KERNELS[:3], KERNELS[:4]


def environment(
    *capabilities: tuple[int, int],
    imports: tuple[str, ...] = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "fa3_fwd_interface"),
    **changes: Any,
) -> Environment:
    owners = {
        "flash_attn": ("flash-attn", "2.8.3"),
        "flash_attn.cute": ("flash-attn-4", "4.0.0b20"),
        "flash_attn_interface": ("flash-attn-3", "3.0.0"),
        "fa3_fwd_interface": ("fa3-fwd", "0.1.0"),
    }
    there = {owners[name][0]: owners[name][1] for name in imports}
    fields: dict[str, Any] = {
        "packages": {"torch": "2.11.0", **there},
        "imports": {"torch": ("torch",), **{name: (owners[name][0],) for name in imports}},
        "devices": tuple(Device(f"GPU {major}.{minor}", (major, minor)) for major, minor in capabilities),
    }
    return Environment(**{**fields, **changes})


def reasons(kernel: str, environment: Environment) -> list[str]:
    return known_kernels()[kernel].unavailable_because(environment)


# availability


def test_the_kernels_there_are() -> None:
    assert tuple(known_kernels()) == KERNELS
    for name, kernel in known_kernels().items():
        assert kernel.name == name
        assert repr(kernel) == f"Kernel({name!r})"


@pytest.mark.parametrize(
    ("kernel", "capability", "usable"),
    [
        ("flash_attention_2", (7, 5), False),
        ("flash_attention_2", AMPERE, True),
        ("flash_attention_2", HOPPER, True),
        ("flash_attention_2", (12, 0), True),
        ("flash_attention_3", AMPERE, False),
        ("flash_attention_3", HOPPER, True),
        ("flash_attention_3", BLACKWELL, False),
        ("flash_attention_4", ADA, False),
        ("flash_attention_4", HOPPER, True),
        ("flash_attention_4", BLACKWELL, True),
        ("flash_attention_torch", (7, 5), False),
        ("flash_attention_torch", AMPERE, True),
        ("flash_attention_torch", HOPPER, True),
        ("flash_attention_torch", (12, 0), True),
        ("flash_attention_reference", (5, 0), True),
    ],
)
def test_compute_capability(kernel: str, capability: tuple[int, int], usable: bool) -> None:
    because = reasons(kernel, environment(capability))
    assert (because == []) is usable
    if not usable:
        (reason,) = because
        assert "it needs compute capability" in reason
        assert f"sm_{capability[0]}{capability[1]}" in reason  # what is installed


def test_the_needed_capability_is_named() -> None:
    assert "9.0 to 9.x" in reasons("flash_attention_3", environment(BLACKWELL))[0]
    assert "9.0 or greater" in reasons("flash_attention_4", environment(ADA))[0]
    assert "8.0 or greater" in reasons("flash_attention_2", environment((7, 0)))[0]
    assert "8.0 or greater" in reasons("flash_attention_torch", environment((7, 0)))[0]


def test_one_device_that_can_is_enough() -> None:
    assert reasons("flash_attention_3", environment(AMPERE, HOPPER)) == []


@pytest.mark.parametrize("kernel", ON_CUDA)
def test_no_device(kernel: str) -> None:
    assert reasons(kernel, environment()) == ["no CUDA device is visible"]


def test_the_reference_needs_torch_alone() -> None:
    assert reasons("flash_attention_reference", environment(imports=())) == []
    assert reasons("flash_attention_reference", Environment()) == ["torch is not installed"]
    # A torch without metadata may be a supported one.
    assert reasons("flash_attention_reference", Environment(imports={"torch": ()})) == []


@pytest.mark.parametrize("kernel", PACKAGES)
def test_several_reasons(kernel: str) -> None:
    because = known_kernels()[kernel].unavailable_because(Environment())
    assert len(because) == 3
    assert because[0].endswith("is not installed")
    assert because[1:] == ["torch is not installed", "no CUDA device is visible"]


def test_torchs_own_needs_torch_and_a_device() -> None:
    assert reasons("flash_attention_torch", environment(HOPPER, imports=())) == []
    assert reasons("flash_attention_torch", Environment()) == ["torch is not installed", "no CUDA device is visible"]


def test_an_old_fa2() -> None:
    old = environment(HOPPER, packages={"torch": "2.11.0", "flash-attn": "2.5.9"})
    assert reasons("flash_attention_2", old) == ["flash-attn 2.5.9 is older than 2.6, the first with softcap"]
    right = environment(HOPPER, packages={"torch": "2.11.0", "flash-attn": "2.6.0.post1"})
    assert reasons("flash_attention_2", right) == []


def test_a_package_that_no_distribution_claims_counts() -> None:
    built = Environment(
        packages={"torch": "2.11.0"},
        imports={"torch": ("torch",), "flash_attn_interface": ()},
        devices=(Device("H100", HOPPER),),
    )
    assert reasons("flash_attention_3", built) == []
    assert known_kernels()["flash_attention_3"].provider(built).module == "flash_attn_interface"


def test_fa4_under_the_name_of_fa2() -> None:
    alone = Environment(
        packages={"torch": "2.11.0", "flash-attn-4": "4.0.0b20"},
        imports={"torch": ("torch",), "flash_attn": ("flash-attn-4",), "flash_attn.cute": ("flash-attn-4",)},
        devices=(Device("H100", HOPPER),),
    )
    assert reasons("flash_attention_2", alone) == ["flash-attn is not installed"]
    assert reasons("flash_attention_4", alone) == []


# choice of FlashAttention-3's provider


@pytest.mark.parametrize(
    ("imports", "chosen"),
    [
        (("flash_attn_interface", "fa3_fwd_interface"), "flash_attn_interface"),
        (("flash_attn_interface",), "flash_attn_interface"),
        (("fa3_fwd_interface",), "fa3_fwd_interface"),
        ((), "flash_attn_interface"),
    ],
)
def test_the_provider_of_fa3(imports: tuple[str, ...], chosen: str) -> None:
    kernel = known_kernels()["flash_attention_3"]
    assert kernel.provider(environment(HOPPER, imports=imports)).module == chosen
    assert (reasons("flash_attention_3", environment(HOPPER, imports=imports)) == []) is bool(imports)


def test_an_installed_provider_explains_itself() -> None:
    """The reason is about the installed provider, not about the preferred one."""
    (reason,) = reasons("flash_attention_3", environment(AMPERE, imports=("fa3_fwd_interface",)))
    assert "compute capability" in reason


# load


@pytest.mark.parametrize(
    ("kernel", "command"),
    [
        ("flash_attention_2", "flash-attn"),
        ("flash_attention_3", "pip install fa3-fwd"),
        ("flash_attention_4", "pip install --pre flash-attn-4"),
    ],
)
def test_unavailable_says_what_installs_it(kernel: str, command: str) -> None:
    nothing = environment(HOPPER, imports=())
    with pytest.raises(KernelUnavailableError, match="is not installed") as caught:
        known_kernels()[kernel].load(nothing)
    error = caught.value
    assert isinstance(error, ImportError)
    assert isinstance(error, KernelCompatError)
    assert error.kernel == kernel
    assert kernel in str(error)
    assert command in str(error)
    assert command in error.install
    assert error.reasons == reasons(kernel, nothing)
    with pytest.raises(KernelUnavailableError, match=r"GPU 7.0[^:]*$"):  # nothing to install
        Kernel(kernel, known_kernels()[kernel].providers).load(environment((7, 0)))


class Recorder:
    """A module of FlashAttention functions that records their calls."""

    def __init__(self, varlen: Callable[..., Any] | None = None, dense: Callable[..., Any] | None = None) -> None:
        self.flash_attn_varlen_func = varlen
        self.flash_attn_func = dense


def provider(module: str = "kc_kernel_module", **changes: Any) -> Provider:
    fields: dict[str, Any] = {
        "module": module,
        "distribution": "kc-kernel",
        "features": Features(devices=("cpu",), dtypes=("float32",)),
        "install": "Install it with: pip install kc-kernel",
    }
    return Provider(**{**fields, **changes})


HERE = Environment(packages={"torch": "2.11.0", "kc-kernel": "1"}, imports={"kc_kernel_module": ("kc-kernel",)})


def calls_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    return q


def test_load(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(flash_attn_varlen_func=calls_varlen)
    monkeypatch.setitem(sys.modules, "kc_kernel_module", module)
    kernel = Kernel("x", (provider(),))
    assert kernel.features.window  # as declared
    functions = kernel.load(HERE)
    assert isinstance(functions, Functions)
    assert kernel.load(HERE) is functions
    assert kernel.load(Environment()) is functions  # loaded already
    assert not kernel.features.window  # as in the signature of its function
    assert functions.flash_attn_with_kvcache is None


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise OSError('undefined symbol: _ZN3c105')", "OSError: undefined symbol"),
        ("import torch_of_the_future", "ModuleNotFoundError"),
        ("flash_attn_func = print", "has no flash_attn_varlen_func"),
    ],
)
def test_a_package_that_does_not_import(module: str, says: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kc_kernel_module.py").write_text(module)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "kc_kernel_module", raising=False)
    kernel = Kernel("x", (provider(),))
    with pytest.raises(KernelUnavailableError, match="kc-kernel is installed but does not import") as caught:
        kernel.load(HERE)
    assert says in str(caught.value)
    assert "pip install kc-kernel" in str(caught.value)
    monkeypatch.delitem(sys.modules, "kc_kernel_module", raising=False)
    # The failure isn't cached.
    (tmp_path / "kc_kernel_module.py").write_text("def flash_attn_varlen_func(q, **kwargs): return q\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import importlib

    importlib.invalidate_caches()
    for cached in (tmp_path / "__pycache__").glob("*"):
        cached.unlink()
    assert kernel.load(HERE)


def test_refine_lowers_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(flash_attn_varlen_func=lambda q, **kwargs: q, built_without=("window",))
    monkeypatch.setitem(sys.modules, "kc_kernel_module", module)

    def refine(module: Any, features: Features) -> Features:
        from dataclasses import replace

        without: dict[str, Any] = dict.fromkeys(module.built_without, False)
        return replace(features, **without)

    kernel = Kernel("x", (provider(refine=refine),))
    kernel.load(HERE)
    assert not kernel.features.window
    assert kernel.features.causal


def test_the_features_loaded_are_those_of_the_package_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For another version or GPU, the kernel has the features that the provider declares there."""
    module = SimpleNamespace(flash_attn_varlen_func=lambda q, softcap=0.0: q)
    monkeypatch.setitem(sys.modules, "kc_kernel_module", module)
    features = Features(devices=("cpu",), dtypes=("float32",), softcap=True)
    limits = (Limit({"softcap": False}, before="2"), Limit({"gqa": False}, capabilities=(12,)))
    kernel = Kernel("x", (provider(features=features, limits=limits),))
    other = Environment(packages={"torch": "2.11.0", "kc-kernel": "2"}, imports=HERE.imports)
    blackwell = Environment(packages=HERE.packages, imports=HERE.imports, devices=(Device("GPU", (12, 0)),))

    def some(environment: Environment) -> tuple[bool, bool, bool]:
        found = kernel.features_in(environment)
        return found.window, found.softcap, found.gqa

    assert (some(HERE), some(other), some(blackwell)) == ((True, False, True), (True, True, True), (True, False, False))
    kernel.load(HERE)
    assert (some(HERE), some(other), some(blackwell)) == (
        (False, False, True),
        (True, True, True),
        (True, False, False),
    )
    kernel = Kernel("x", kernel.providers)
    kernel.load(other)
    assert (some(HERE), some(other), some(blackwell)) == (
        (True, False, True),
        (False, True, True),
        (True, False, False),
    )
    assert kernel.features.softcap  # of this process


def test_features_by_name() -> None:
    assert Features(softcap=True, gqa=False).names() == ("causal", "window", "softcap", "varlen", "backward")


# as_kernel


def test_as_kernel() -> None:
    with pytest.raises(ValueError, match="a list of kernels must not be empty"):
        as_kernel([])
    kernel = Kernel("own", (provider(),))
    assert as_kernel(kernel) is kernel
    for name in KERNELS:
        assert as_kernel(name) is known_kernels()[name]


@pytest.mark.parametrize("nonsense", [None, 1, 2.5, object(), {}, print, b"flash_attention_2", calls_varlen])
def test_nonsense_is_no_kernel(nonsense: Any) -> None:
    with pytest.raises(TypeError, match="a kernel is a name, a Kernel or an object with flash_attn_varlen_func"):
        as_kernel(nonsense)


@pytest.mark.parametrize("name", ["", "flash_attention_5", "FLASH_ATTENTION_2", "flash_attention_2 ", "org/kernel"])
def test_an_unknown_kernel(name: str) -> None:
    with pytest.raises(ValueError, match="is no kernel; there are: flash_attention_4, ") as caught:
        as_kernel(name)
    assert repr(name) in str(caught.value)


def test_an_object_becomes_a_kernel() -> None:
    kernel = as_kernel(Recorder(calls_varlen))
    assert kernel.name == "Recorder"
    assert kernel.unavailable_because(Environment(packages={"torch": "2.11.0"})) == []
    assert not any(getattr(kernel.features, name) for name in ("window", "softcap", "sinks", "dropout", "paged"))
    q = torch.randn(1, 3, 2, 4)
    assert torch.equal(kernel.load().flash_attn_func(q, q, q), q)


def test_what_an_object_takes_without_naming_it_is_not_known() -> None:
    """The function may ignore such arguments, so only declared features count."""
    optional = {"window", "softcap", "sinks", "dropout", "deterministic"}
    q = torch.randn(1, 3, 2, 4)

    def varlen(q: Any, k: Any, v: Any, softcap: float = 0.0, **kwargs: Any) -> Any:
        return q

    def anything(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        return q

    recorder = Recorder(varlen, dense=anything)
    kernel = as_kernel(recorder)
    assert optional & set(kernel.features.names()) == {"softcap"}
    kernel.load().flash_attn_func(q, q, q, softcap=1.0)
    with pytest.raises(
        UnsupportedFeatureError, match=r"no parameter 'window_size'.*`features`.*window=True.*Kernels that"
    ):
        kernel.load().flash_attn_func(q, q, q, window_size=(1, 0))
    with pytest.warns(UserWarning, match="Recorder has no deterministic backward"):
        kernel.load().flash_attn_func(q, q, q, deterministic=True)
    recorder.features = Features(sinks=True, devices=("cpu",), dtypes=("float32",))  # type: ignore[attr-defined]
    declared = as_kernel(recorder)
    assert declared == as_kernel(recorder)
    assert hash(declared) == hash(as_kernel(recorder))
    assert declared != kernel
    assert optional & set(declared.features.names()) == {"window", "sinks"}
    declared.load().flash_attn_func(q, q, q, window_size=(1, 0), s_aux=torch.zeros(2))
    with pytest.raises(UnsupportedFeatureError, match="softcap"):
        declared.load().flash_attn_func(q, q, q, softcap=1.0)


def test_a_cache_function_has_features_of_its_own() -> None:
    def varlen(q: Any, k: Any, v: Any, window_size: Any = (-1, -1), softcap: float = 0.0, **kwargs: Any) -> Any:
        return q

    def kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, window_size: Any = None, **kwargs: Any) -> Any:
        return q

    made = SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_with_kvcache=kvcache)
    kernel, q = as_kernel(made), torch.randn(1, 3, 2, 4)
    cached = kernel.load().flash_attn_with_kvcache
    assert kernel.features.softcap
    assert cached is not None
    cached(q, q, q, window_size=(1, 0))
    with pytest.raises(UnsupportedFeatureError, match="softcap"):
        cached(q, q, q, softcap=1.0)


def test_the_conventions_of_an_object_are_read_off_its_signatures() -> None:
    seen: dict[str, Any] = {}

    def varlen(  # the conventions of FlashAttention-4
        q: Any,
        k: Any,
        v: Any,
        qv: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Any = None,
    ) -> Any:
        seen.update(locals())
        return q, None

    def kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, **options: Any) -> Any:
        seen.update(options)
        return q

    def kvcache_of_fa3(
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        cache_seqlens: Any = None,
        page_table: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
    ) -> Any:
        seen.update(locals())
        return q

    made = SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_with_kvcache=kvcache_of_fa3)
    functions = as_kernel(made).load()
    q, sinks = torch.randn(1, 3, 2, 4), torch.zeros(2)
    functions.flash_attn_func(q, q, q, window_size=(1, -1), s_aux=sinks)
    assert seen["learnable_sink"] is sinks
    assert seen["window_size"] == (1, None)
    assert seen["qv"] is None
    assert functions.flash_attn_with_kvcache is not None
    functions.flash_attn_with_kvcache(q, q, q, block_table="pages")
    assert seen["page_table"] == "pages"
    other = SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_with_kvcache=kvcache)
    kv = as_kernel(other).load().flash_attn_with_kvcache
    assert kv is not None
    kv(q, q, q, block_table="pages")
    assert seen["block_table"] == "pages"


# adapt


def adapted(
    signature: str,
    dense: str | None = None,
    kvcache: str | None = None,
    returns: str = "q",
    features: Features | None = None,
    **changes: Any,
) -> tuple[Features, Functions, list[dict[str, Any]]]:
    """Adapt functions with these parameters that record their calls."""
    calls: list[dict[str, Any]] = []

    def make(parameters: str | None, default: str) -> Callable[..., Any] | None:
        if parameters is None:
            return None
        scope: dict[str, Any] = {"calls": calls}
        exec(
            f"def function({default}{parameters}):\n    calls.append(dict(locals()))\n    return {returns}\n",
            scope,
        )
        function: Callable[..., Any] = scope["function"]
        return function

    lengths = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False"
    raw = {
        "flash_attn_func": make(dense, "q, k, v, softmax_scale=None, causal=False"),
        "flash_attn_varlen_func": make(signature, lengths),
        "flash_attn_with_kvcache": make(
            kvcache, "q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, softmax_scale=None, causal=False"
        ),
    }
    everything = Features(
        softcap=True,
        sinks=True,
        dropout=True,
        deterministic=True,
        paged=True,
        devices=("cpu",),
        dtypes=("float32",),
    )
    found, functions = adapt("x", raw, features or everything, provider(**changes))
    return found, functions, calls


OPTIONS = ", dropout_p=0.0, window_size=(-1, -1), softcap=0.0, deterministic=False, s_aux=None"
Q = torch.randn(2, 3, 4, 8)
FLAT = Q.flatten(0, 1)
CU = torch.tensor([0, 3, 6], dtype=torch.int32)


def run(functions: Functions, which: str, **options: Any) -> Any:
    if which == "dense":
        return functions.flash_attn_func(Q, Q, Q, **options)
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
    return functions.flash_attn_varlen_func(FLAT, FLAT, FLAT, **{**lengths, **options})


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_options_reach_the_function(which: str) -> None:
    _, functions, calls = adapted(OPTIONS, dense=OPTIONS)
    sinks = torch.zeros(4)
    run(
        functions,
        which,
        dropout_p=0.5,
        softmax_scale=0.3,
        causal=True,
        window_size=(2, 0),
        softcap=30.0,
        deterministic=True,
        s_aux=sinks,
    )
    (call,) = calls
    assert call["softmax_scale"] == 0.3
    assert call["causal"] is True
    assert call["dropout_p"] == 0.5
    assert call["window_size"] == (2, 0)
    assert call["softcap"] == 30.0
    assert call["deterministic"] is True
    assert call["s_aux"] is sinks


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_keywords_are_renamed(which: str) -> None:
    own = ", p=0.0, window=(-1, -1), cap=0.0, repeatable=False, learnable_sink=None"
    renamed = {
        "dropout_p": "p",
        "window_size": "window",
        "softcap": "cap",
        "deterministic": "repeatable",
        "s_aux": "learnable_sink",
    }
    features, functions, calls = adapted(own, dense=own, renamed=renamed)
    assert features.sinks
    assert features.softcap
    sinks = torch.zeros(4)
    run(functions, which, dropout_p=0.5, window_size=(2, 0), softcap=30.0, deterministic=True, s_aux=sinks)
    (call,) = calls
    assert (call["p"], call["window"], call["cap"], call["repeatable"]) == (0.5, (2, 0), 30.0, True)
    assert call["learnable_sink"] is sinks


def test_the_block_table_is_renamed() -> None:
    _, functions, calls = adapted(OPTIONS, kvcache=", page_table=None", renamed={"block_table": "page_table"})
    assert functions.flash_attn_with_kvcache is not None
    pages = torch.zeros(2, 1, dtype=torch.int32)
    functions.flash_attn_with_kvcache(Q, Q, Q, Q, Q, cache_seqlens=CU, block_table=pages, causal=True)
    (call,) = calls
    assert call["page_table"] is pages
    assert call["cache_seqlens"] is CU
    assert call["k"] is call["v"] is Q
    assert call["causal"] is True


@pytest.mark.parametrize("unlimited", [-1, None])
@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_windows_without_a_limit(which: str, unlimited: int | None) -> None:
    options = ", window_size='not given'"
    _, functions, calls = adapted(options, dense=options, unlimited=unlimited)
    given = [(-1, -1), (None, None), (2, -1), (-1, 2), (2, None), (None, 0), (0, 0)]
    for window in given:
        run(functions, which, window_size=window)
    u = unlimited
    expected = ["not given", "not given", (2, u), (u, 2), (2, u), (u, 0), (0, 0)]
    assert [call["window_size"] for call in calls] == expected


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize(
    ("options", "kv_len", "refused"),
    [
        ({"window_size": (2, -1)}, 1, True),
        ({"window_size": (2, None)}, 1, True),
        ({"window_size": (2, -1)}, 2, False),  # the limit that the kernel sets hides nothing yet
        ({"window_size": (2, -1), "causal": True}, 1, False),
        ({"window_size": (2, 0)}, 1, False),
        ({"window_size": (-1, 2)}, 1, False),
        ({"window_size": (-1, -1)}, 1, False),
        ({}, 1, False),
    ],
)
def test_a_window_without_a_limit_to_the_right(which: str, options: dict[str, Any], kv_len: int, refused: bool) -> None:
    """Three queries and fewer keys, for a kernel that sets a right limit by itself."""
    _, functions, calls = adapted(
        OPTIONS, dense=OPTIONS, features=Features(right_limit="keys", devices=("cpu",), dtypes=("float32",))
    )
    kv = Q[:, :kv_len]
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": kv_len}

    def run() -> None:
        if which == "dense":
            functions.flash_attn_func(Q, kv, kv, **options)
        else:
            functions.flash_attn_varlen_func(FLAT, FLAT, FLAT, **lengths, **options)

    if refused:
        with pytest.raises(UnsupportedFeatureError, match="without a limit to the right over more queries than keys"):
            run()
        assert not calls
    else:
        run()
        assert len(calls) == 1
    _, functions, calls = adapted(OPTIONS, dense=OPTIONS)
    run()
    assert len(calls) == 1


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize(
    ("option", "feature", "named", "able"),
    [
        ({"window_size": (2, 0)}, "window", "sliding windows", "flash_attention_3"),
        ({"softcap": 30.0}, "softcap", "softcap", "flash_attention_2"),
        (
            {"s_aux": torch.zeros(4)},
            "sinks",
            "attention sinks",
            "flash_attention_torch, flash_attention_flex, flash_attention_reference",
        ),
    ],
)
@pytest.mark.parametrize("missing", ["declared", "no keyword"])
def test_what_it_can_not_honour_is_an_error(
    which: str, option: dict[str, Any], feature: str, named: str, able: str, missing: str
) -> None:
    """An option is refused if the features exclude it or the function lacks the argument; it is never dropped."""
    from dataclasses import replace

    everything = Features(softcap=True, sinks=True, devices=("cpu",), dtypes=("float32",))
    if missing == "declared":
        without: dict[str, Any] = {feature: False}
        features, functions, calls = adapted(OPTIONS, dense=OPTIONS, features=replace(everything, **without))
    else:
        features, functions, calls = adapted("", dense="", features=everything)
    assert not getattr(features, feature)
    with pytest.raises(UnsupportedFeatureError, match=named) as caught:
        run(functions, which, **option)
    assert not calls
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.subject == "x"
    assert named in error.feature
    assert "x does not support" in str(error)
    assert "Kernels that do:" in str(error)
    assert able in str(error)
    run(functions, which)  # the same call without the option is right
    assert len(calls) == 1


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize(
    ("option", "says"),
    [({"dropout_p": 0.1}, "x has no attention dropout"), ({"deterministic": True}, "x has no deterministic backward")],
)
def test_dropout_and_determinism_warn_once(which: str, option: dict[str, Any], says: str) -> None:
    _, functions, calls = adapted("", dense="")
    with pytest.warns(UserWarning, match=says):
        run(functions, which, **option)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(functions, which, **option)
    assert len(calls) == 2
    assert not {"dropout_p", "deterministic"} & set(calls[0])


def test_maximum_lengths_are_ints() -> None:
    """FlashAttention-4 crashes on a tensor, and upstream passes one."""
    _, functions, calls = adapted("")
    longest = torch.tensor(3)
    run(functions, "varlen", max_seqlen_q=longest, max_seqlen_k=longest)
    run(functions, "varlen", max_seqlen_q=torch.tensor(3, dtype=torch.int32), max_seqlen_k=torch.tensor([3]))
    run(functions, "varlen", max_seqlen_q=3, max_seqlen_k=torch.tensor(3))
    for call in calls:
        assert type(call["max_seqlen_q"]) is type(call["max_seqlen_k"]) is int
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 3


@pytest.mark.parametrize("which", ["dense", "varlen"])
@pytest.mark.parametrize("returns", ["q", "(q, None)", "[q, 1, 2]", "(q,)"])
def test_the_output_alone_is_returned(which: str, returns: str) -> None:
    _, functions, _ = adapted("", dense="", returns=returns)
    assert torch.equal(run(functions, which), Q if which == "dense" else FLAT)


@pytest.mark.parametrize("dense", [None, ""], ids=["no base function", "one that takes less"])
def test_dense_from_varlen(dense: str | None) -> None:
    _, functions, calls = adapted(OPTIONS, dense=dense)
    k = torch.randn(2, 5, 2, 8)
    out = functions.flash_attn_func(Q, k, k, causal=True, softmax_scale=0.5, window_size=(1, 0))
    (call,) = calls
    assert torch.equal(out, Q)
    assert call["q"].shape == (6, 4, 8)
    assert call["k"].shape == call["v"].shape == (10, 2, 8)
    assert call["cu_seqlens_q"].tolist() == [0, 3, 6]
    assert call["cu_seqlens_k"].tolist() == [0, 5, 10]
    assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (3, 5)
    assert (call["causal"], call["softmax_scale"], call["window_size"]) == (True, 0.5, (1, 0))


def test_dense_from_varlen_is_right() -> None:
    from kernel_compat.kernels import reference

    alone = SimpleNamespace(flash_attn_varlen_func=reference.flash_attn_varlen_func)
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
    v = torch.randn(2, 5, 2, 6)
    options: dict[str, Any] = {"causal": True, "window_size": (2, 0), "softcap": 5.0, "s_aux": torch.randn(4)}
    out = as_kernel(alone).load().flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(out, reference.flash_attn_func(q, k, v, **options))


@pytest.mark.parametrize("own_value_dim", [False, True])
@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_head_dimensions_are_padded(which: str, own_value_dim: bool) -> None:
    """Padded with zeros to a supported size; the scale stays the one for the original head dimension."""
    features = Features(
        devices=("cpu",), dtypes=("float32",), head_dim_multiple=8, max_head_dim=None, value_head_dim=own_value_dim
    )
    _, functions, calls = adapted("", dense="", returns="v", features=features)
    q, k, v = torch.ones(1, 3, 2, 21), torch.ones(1, 3, 2, 21), torch.ones(1, 3, 2, 4)
    lengths = {"cu_seqlens_q": CU[:2], "cu_seqlens_k": CU[:2], "max_seqlen_q": 3, "max_seqlen_k": 3}
    for scale in (None, 0.5):
        if which == "dense":
            out = functions.flash_attn_func(q, k, v, softmax_scale=scale)
        else:
            out = functions.flash_attn_varlen_func(q[0], k[0], v[0], **lengths, softmax_scale=scale)
        assert out.shape[-1] == 4
        call = calls.pop()
        for name, given in (("q", q), ("k", k)):
            assert call[name].shape[-1] == 24
            assert (call[name][..., :21] == given.reshape((*call[name].shape[:-1], 21))).all()
            assert (call[name][..., 21:] == 0).all()
        assert call["v"].shape[-1] == (8 if own_value_dim else 24)
        assert (call["v"][..., 4:] == 0).all()
        assert call["softmax_scale"] == (21**-0.5 if scale is None else scale)
    fitting = torch.ones(1, 3, 2, 8)
    functions.flash_attn_func(fitting, fitting, fitting)
    assert calls.pop()["q"] is fitting  # not copied, because it fits


def test_a_value_head_dimension_above_the_querys() -> None:
    _, functions, calls = adapted("", dense="")
    with pytest.raises(UnsupportedFeatureError, match=r"value head dimension \(9\) greater than the query's \(8\)"):
        functions.flash_attn_func(Q, Q, torch.ones(2, 3, 4, 9))
    assert not calls


@pytest.mark.parametrize(
    ("signature", "lost"),
    [
        (OPTIONS, set()),
        ("", {"window", "softcap", "sinks", "dropout", "deterministic"}),
        (", **kwargs", set()),
        (", softcap=0.0, window_size=(-1, -1)", {"sinks", "dropout", "deterministic"}),
    ],
)
def test_features_are_those_of_the_signature(signature: str, lost: set[str]) -> None:
    features, functions, _ = adapted(signature)
    assert functions.flash_attn_with_kvcache is None
    every = {"causal", "window", "softcap", "sinks", "dropout", "deterministic", "gqa", "varlen", "backward"}
    assert set(features.names()) == every - lost  # nor paged, without the function


# refusals at the call


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_a_dtype_it_can_not_do(which: str) -> None:
    half = Features(devices=("cpu",))
    _, functions, calls = adapted("", dense="", features=half)
    with pytest.raises(UnsupportedFeatureError, match="x does not support torch.float32") as caught:
        run(functions, which)
    assert "bfloat16 or float16" in str(caught.value)
    assert not calls


@pytest.mark.parametrize("which", ["dense", "varlen"])
def test_a_device_it_can_not_do(which: str) -> None:
    _, functions, calls = adapted("", dense="", features=Features(dtypes=("float32",)))
    with pytest.raises(UnsupportedFeatureError, match="tensors on 'cpu'") as caught:
        run(functions, which)
    assert "cuda" in str(caught.value)
    assert not calls


def test_a_head_dimension_it_can_not_do() -> None:
    _, functions, calls = adapted("", features=Features(devices=("cpu",), dtypes=("float32",), max_head_dim=256))
    q = torch.zeros(1, 1, 1, 257)
    with pytest.raises(UnsupportedFeatureError, match="head dimension 257") as caught:
        functions.flash_attn_func(q, q, q)
    assert "256" in str(caught.value)
    assert not calls
    functions.flash_attn_func(q[..., :256], q[..., :256], q[..., :256])
    assert len(calls) == 1


def test_fewer_key_heads() -> None:
    _, functions, _ = adapted("", features=Features(devices=("cpu",), dtypes=("float32",), gqa=False))
    k = torch.randn(2, 3, 2, 8)
    with pytest.raises(UnsupportedFeatureError, match="fewer key heads"):
        functions.flash_attn_func(Q, k, k)
    functions.flash_attn_func(Q, Q, Q)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_gradients_it_has_not(index: int) -> None:
    forward_only = Features(devices=("cpu",), dtypes=("float32",), backward=False)
    _, functions, calls = adapted("", dense="", features=forward_only)
    inputs = [Q.clone() for _ in range(3)]
    inputs[index].requires_grad_()
    with pytest.raises(UnsupportedFeatureError, match="gradients") as caught:
        functions.flash_attn_func(*inputs)
    assert "torch.no_grad()" in str(caught.value)
    assert "flash_attention_4" in str(caught.value)
    assert not calls
    with torch.no_grad():
        functions.flash_attn_func(*inputs)
    with torch.inference_mode():
        functions.flash_attn_func(*inputs)
    functions.flash_attn_func(Q, Q, Q)
    assert len(calls) == 3


def test_the_reference_is_a_kernel_like_the_others() -> None:
    kernel = known_kernels()["flash_attention_reference"]
    functions = kernel.load()
    assert functions.flash_attn_with_kvcache is None
    assert not kernel.features.paged
    wanted = {"causal", "window", "softcap", "sinks", "dropout", "deterministic", "gqa", "varlen", "backward"}
    wanted |= {"value_head_dim", "masks"}
    assert set(kernel.features.names()) == wanted
    integers = torch.ones(1, 2, 1, 4, dtype=torch.int64)
    with pytest.raises(UnsupportedFeatureError, match=r"torch\.int64"):
        functions.flash_attn_func(integers, integers, integers)


def test_listing_the_kernels_does_not_import_torch() -> None:
    code = (
        "import sys, kernel_compat as k\n"
        "for kernel in k.known_kernels().values():\n"
        "    kernel.unavailable_because(k.Environment.detect()), kernel.features.names()\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

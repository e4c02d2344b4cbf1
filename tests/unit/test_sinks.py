"""Attention by a kernel's primitives: sinks from its log-sum-exp, and one operator under torch.compile."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, starmap
from types import ModuleType, SimpleNamespace
from typing import Any

import interpreted
import pytest
import torch
from stand_in import cpu_flash_attention
from torch import Tensor
from torch._guards import active_fake_mode

from kernel_compat import Environment, UnsupportedFeatureError, known_kernels
from kernel_compat.kernels import as_kernel, reference, sinks
from kernel_compat.kernels.adapter import adapt
from kernel_compat.kernels.catalog import CATALOG, FLASH_ATTN
from kernel_compat.kernels.options import Functions, Lengths
from kernel_compat.kernels.primitives import PackagePrimitives, Pattern

CAUSAL = Pattern(0.5, True, -1, -1, 0.0, False)
LENGTHS = (5, 1, 7)


class TorchOnCpu:
    """torch's own flash attention for CPUs, which takes float64: dense, with as many key heads as query heads."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, pattern: Pattern
    ) -> tuple[Tensor, Tensor]:
        assert lengths is None
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        scale = {"scale": pattern.softmax_scale}
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(*heads_first, 0.0, pattern.causal, **scale)
        return out.transpose(1, 2), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lengths: Lengths | None,
        pattern: Pattern,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = operator(*inputs, lse, 0.0, pattern.causal, scale=pattern.softmax_scale)
        return tuple(x.transpose(1, 2) for x in grads)


class Plain:
    """Plain torch, computed as the CUDA kernels do: the backward from the log-sum-exp and the output that it gets."""

    def _sequences(self, lengths: Lengths | None, q: Tensor, k: Tensor) -> Iterator[tuple[Any, Any]]:
        if lengths is None:
            yield from ((row, row) for row in range(q.shape[0]))
        else:
            q_offsets, k_offsets = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
            yield from zip(starmap(slice, pairwise(q_offsets)), starmap(slice, pairwise(k_offsets)), strict=True)

    def _scores(self, q: Tensor, k: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """The scores of one sequence, minus infinity where hidden, and the derivative of the softcap."""
        scores = torch.einsum("qhd,khd->hqk", q, _repeated(k, q)) * pattern.softmax_scale
        slope = torch.ones_like(scores)
        if pattern.softcap:
            scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
            slope = 1 - (scores / pattern.softcap) ** 2
        distance = torch.arange(q.shape[0])[:, None] + len(k) - len(q) - torch.arange(k.shape[0])
        left, right = pattern.window_size_left, 0 if pattern.causal else pattern.window_size_right
        hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
        return scores.masked_fill(hidden, -torch.inf), slope

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, pattern: Pattern
    ) -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, torch.nan)
        lse = q.new_full((q.shape[-2], len(q)) if lengths else (len(q), q.shape[-2], q.shape[1]), torch.nan)
        for at, keys in self._sequences(lengths, q, k):
            scores, _ = self._scores(q[at], k[keys], pattern)
            sums = scores.logsumexp(-1)
            weights = (scores - sums[..., None]).exp().nan_to_num(0)
            out[at] = torch.einsum("hqk,khd->qhd", weights, _repeated(v[keys], q))
            lse[(slice(None), at) if lengths else at] = sums.masked_fill(sums == -torch.inf, torch.inf)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lengths: Lengths | None,
        pattern: Pattern,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at, keys in self._sequences(lengths, q, k):
            scores, slope = self._scores(q[at], k[keys], pattern)
            weights = (scores - lse[(slice(None), at) if lengths else at][..., None]).exp()
            delta = (grad[at] * out[at]).sum(-1).T[..., None]
            products = torch.einsum("qhd,khd->hqk", grad[at], _repeated(v[keys], q))
            ds = weights * (products - delta) * slope * pattern.softmax_scale
            dq[at] = torch.einsum("hqk,khd->qhd", ds, _repeated(k[keys], q))
            groups = (-1, k.shape[-2], q.shape[-2] // k.shape[-2], k.shape[-1])
            dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[at]).view(groups).sum(2)
            dv[keys] = torch.einsum("hqk,qhd->khd", weights, grad[at]).view(groups).sum(2)
        return dq, dk, dv


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[-2] // x.shape[-2], -2)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    sinks.register("torch on a CPU", TorchOnCpu())
    sinks.register("plain", Plain())


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def attend(kernel: str, given: Any, lengths: Lengths | None, pattern: Pattern) -> Tensor:
    q, k, v, s = given if len(given) == 4 else (*given, None)
    return sinks.attention_by_primitives(kernel, q, k, v, s, lengths, pattern)


def plain(given: Any, **options: Any) -> Tensor:
    q, k, v, s = given
    return reference.flash_attn_func(q, k, v, s_aux=s, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_a_flash_backward_is_exact(causal: bool) -> None:
    """torch's own flash kernel for CPUs, in float64, against autograd through plain softmax."""
    given = inputs((2, 9, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8), (3,))
    out = attend("torch on a CPU", given, None, CAUSAL._replace(causal=causal))
    expected = plain(given, softmax_scale=0.5, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, given, weight) for x in (out, expected))
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "pattern", [CAUSAL, Pattern(0.3, False, 2, 1, 0.0, True), Pattern(0.3, True, 2, 0, 3.0, False)]
)
def test_gradcheck(pattern: Pattern) -> None:
    """Fewer key heads, ragged sequences; windows in which some queries see no key."""
    given = inputs((13, 4, 4), (13, 2, 4), (13, 2, 4), (4,))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    lengths = Lengths(offsets, offsets, max(LENGTHS), max(LENGTHS))
    assert torch.autograd.gradcheck(lambda *x: attend("plain", x, lengths, pattern), given)
    dense = inputs((2, 5, 4, 4), (2, 3, 2, 4), (2, 3, 2, 4), (4,))
    assert torch.autograd.gradcheck(lambda *x: attend("plain", x, None, pattern), dense)
    assert torch.autograd.gradcheck(lambda *x: attend("plain", x, None, pattern), dense[:3])


def test_no_second_derivative() -> None:
    q, k, v, s = inputs((1, 3, 1, 8), (1, 3, 1, 8), (1, 3, 1, 8), (1,))
    out = attend("plain", (q, k, v, s), None, CAUSAL)
    with pytest.raises(RuntimeError, match="sinks of plain have no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_graph(compiled: bool, with_sinks: bool) -> None:
    """An operator under torch.compile; its fake results are like the real ones."""
    given = inputs((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (4,))[: 3 + with_sinks]

    def call(*given: Tensor) -> Tensor:
        return attend("plain", given, None, CAUSAL)

    if not compiled:
        sink = given[3] if with_sinks else None
        torch.library.opcheck(sinks._forward_op, (*given[:3], sink, None, None, 0, 0, *CAUSAL, "plain"))
        return
    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    weight = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    found, expected = (torch.autograd.grad(f(*given), given, weight) for f in (fast, call))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_a_query_that_sees_no_key(infinity: float) -> None:
    """FlashAttention-2 gives it a log-sum-exp of plus infinity, others of minus infinity."""
    out, lse = torch.zeros(2, 1, 4), torch.tensor([[infinity, 1.0]])
    found, total = sinks.with_sinks(out, lse, torch.tensor([3.0]))
    torch.testing.assert_close(total, torch.tensor([[3.0, torch.tensor([1.0, 3.0]).logsumexp(0)]]))
    assert not found.any()
    found, total = sinks.with_sinks(out, lse, torch.tensor([-torch.inf]))
    assert not found.any()
    torch.testing.assert_close(total, torch.tensor([[-torch.inf, 1.0]]))


def test_tokens_behind_the_last_sequence_do_not_reach_the_sinks() -> None:
    """Kernels leave their output unwritten; their gradient is zero."""
    q, k, v, s = inputs((7, 2, 8), (7, 2, 8), (7, 2, 8), (2,))
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    out = sinks.attention_by_primitives("plain", q, k, v, s, Lengths(offsets, offsets, 5, 5), CAUSAL)
    assert out[5:].isnan().all()
    weight = torch.randn_like(out).index_fill(0, torch.tensor([5, 6]), 0)
    found = torch.autograd.grad(out, (q, k, v, s), weight)
    full = reference.flash_attn_func(q[None, :5], k[None, :5], v[None, :5], softmax_scale=0.5, causal=True, s_aux=s)
    expected = torch.autograd.grad(full, (q, k, v, s), weight[None, :5])
    torch.testing.assert_close(found, expected)


# Packages


def signed(parameters: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a package's parameters, which `function` gets by name."""
    scope: dict[str, Any] = {"function": function}
    exec(f"def signed({parameters}):\n    return function(**locals())", scope)
    made: Callable[..., Any] = scope["signed"]
    return made


#: By release: the parameters of the dense and the varlen forward and of the dense and the varlen backward.
RELEASES = {
    "flash-attn 2.6.1": (
        "q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax",
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, "
        "softcap, alibi_slopes, return_softmax, block_table=None, leftpad_k=None",
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, "
        "deterministic, rng_state=None",
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
        "softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None",
    ),
    "flash-attn 2.8.3": (
        "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax",
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, "
        "leftpad_k=None, seqused_k=None, zero_tensors=False",
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
        "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
        "softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, "
        "zero_tensors=False",
    ),
    "flash-attn-3": (
        "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, "
        "max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, "
        "v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1",
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq, "
        "dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0",
    ),
    "fa3-fwd": (
        "q, k, v, k_new=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "page_table=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0",
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, deterministic=False, sm_margin=0",
    ),
    "flash-attn-4": (
        "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, "
        "softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None, "
        "learnable_sink=None, return_lse=False, out=None, lse=None",
        "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
        "window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "deterministic=False, dq=None, dk=None, dv=None, dlse=None",
    ),
}


class Package:
    """A package's functions in plain torch, behind the parameters of a release."""

    def __init__(self, release: str) -> None:
        self.release, self.calls = release, list[dict[str, Any]]()
        self.module = ModuleType("a_package")
        signatures = RELEASES[release]
        names = ("forward", "varlen_forward", "backward", "varlen_backward")
        for index, name in enumerate(names):  # later packages have one function for both
            parameters = signatures[index * len(signatures) // len(names)]
            setattr(self.module, name, signed(parameters, self.backward if "backward" in name else self.forward))

    @property
    def primitives(self) -> PackagePrimitives:
        unlimited = None if self.release == "flash-attn-4" else -1
        names = {"dense": ("forward", "backward"), "varlen": ("varlen_forward", "varlen_backward")}
        return PackagePrimitives("a_package", **names, unlimited=unlimited)

    def _pattern(self, given: dict[str, Any]) -> Pattern:
        window: Any = given.get("window_size") or (given["window_size_left"], given["window_size_right"])
        if self.release == "flash-attn-4":
            assert -1 not in window
            window = tuple(-1 if side is None else side for side in window)
        causal = given["is_causal"] if "is_causal" in given else given["causal"]
        softcap, deterministic = given["softcap"] or 0.0, given.get("deterministic", False)
        return Pattern(given["softmax_scale"], causal, window[0], window[1], softcap, deterministic)

    @staticmethod
    def _lengths(given: dict[str, Any]) -> Lengths | None:
        if given.get("cu_seqlens_q") is None:
            return None
        return Lengths(*(given[name] for name in Lengths._fields))

    def forward(self, **given: Any) -> tuple[Any, ...]:
        self.calls.append(given)
        assert not given.get("dropout_p")
        assert all(given[name] is None for name in ("alibi_slopes", "k_new", "out", "page_table") if name in given)
        inputs = given["q"], given["k"], given["v"]
        out, lse = Plain().forward(*inputs, self._lengths(given), self._pattern(given))
        if self.release == "flash-attn 2.6.1":
            return (out, *inputs, out, lse, None, None)
        return out, lse if given.get("return_lse", True) else None, None, None

    def backward(self, **given: Any) -> Any:
        self.calls.append(given)
        lse = given["lse"] if "lse" in given else given["softmax_lse"]
        saved = given["dout"], given["q"], given["k"], given["v"], given["out"], lse
        grads = Plain().backward(*saved, self._lengths(given), self._pattern(given))
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            given[name].copy_(grad)


@pytest.fixture(params=list(RELEASES))
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package(request.param)
    monkeypatch.setitem(sys.modules, "a_package", package.module)
    return package


@pytest.mark.parametrize("packed", [False, True])
def test_packages(package: Package, packed: bool) -> None:
    primitives = package.primitives.load()
    assert primitives is not None
    sinks.register(package.release, primitives)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    lengths = Lengths(offsets, offsets, max(LENGTHS), max(LENGTHS)) if packed else None
    leading = (13,) if packed else (1, 13)
    given = inputs((*leading, 4, 8), (*leading, 2, 8), (*leading, 2, 8), (4,))
    for pattern in (CAUSAL, Pattern(0.3, True, 2, 0, 3.0, True)):
        ours, right = (attend(name, given, lengths, pattern) for name in (package.release, "plain"))
        weight = torch.randn_like(ours)
        torch.testing.assert_close(ours, right)
        torch.testing.assert_close(*(torch.autograd.grad(x, given, weight) for x in (ours, right)))
    assert package.calls[-1].get("deterministic")


@pytest.mark.parametrize("name", ["softmax_scale", "causal", "softcap", "window_size"])
def test_unknown_parameters_mean_no_sinks(package: Package, name: str) -> None:
    """Without a parameter that every call gives, the function would compute something else."""
    parameters = str(inspect.signature(package.module.varlen_forward))[1:-1]
    changed = parameters.replace(name, f"new_{name}")
    assert changed != parameters
    package.module.varlen_forward = signed(changed, package.forward)  # type: ignore[attr-defined]
    assert package.primitives.load() is None


def test_a_new_parameter_that_is_needed_means_no_sinks(package: Package) -> None:
    parameters = str(inspect.signature(package.module.varlen_forward))[1:-1]
    package.module.varlen_forward = signed(f"new, {parameters}", package.forward)  # type: ignore[attr-defined]
    assert package.primitives.load() is None


def test_custom_operators_are_looked_into(package: Package) -> None:
    """As flash-attn's are from 2.7 on, and fa3-fwd's: their own signature is ``(*args, **kwargs)``."""
    for name, function in list(vars(package.module).items()):
        if callable(function):
            made = SimpleNamespace(_init_fn=function)
            setattr(package.module, name, made)
    assert package.primitives.load() is not None


def test_a_missing_function_means_no_sinks(package: Package) -> None:
    del package.module.varlen_backward
    assert package.primitives.load() is None
    sys.modules.pop("a_package")
    assert package.primitives.load() is None


# Kernels


@pytest.fixture
def torchs() -> Iterator[tuple[Functions, list[dict[str, Any]]]]:
    with cpu_flash_attention() as calls:
        yield known_kernels()["flash_attention_torch"].load(), calls


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("scale", [None, 0.7, -0.7, 0.0])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_torch(torchs: Any, window: tuple[int, int], scale: float | None, head_dim: int) -> None:
    functions, _ = torchs
    if window != (-1, -1) and not known_kernels()["flash_attention_torch"].features.window:
        pytest.skip("torch 2.10 has no windows")
    # The gradient of a sink is one sum over all rows: one draw in some hundred cancels so far that rounding exceeds the bound.
    torch.manual_seed(0)
    shapes = ((2, 9, 4, head_dim), (2, 9, 2, head_dim), (2, 9, 2, head_dim), (4,))
    given = inputs(*shapes, dtype=torch.bfloat16)
    options: dict[str, Any] = {"causal": True, "window_size": window, "softmax_scale": scale}
    found = functions.flash_attn_func(*given[:3], s_aux=given[3], **options)
    exact = [x.detach().double().requires_grad_() for x in given]
    right = plain(exact, **options)
    weight = torch.randn_like(right).bfloat16()
    pairs = zip(
        (found, *torch.autograd.grad(found, given, weight, materialize_grads=True)),
        (right, *torch.autograd.grad(right, exact, weight.double(), materialize_grads=True)),
        strict=True,
    )
    for ours, true in pairs:
        assert (ours.double() - true).norm() <= 2.0**-6 * true.norm() + 1e-12


def test_dropout_beside_sinks_is_refused(torchs: Any) -> None:
    """FlashAttention-2 has dropout, and its mask can't be known to the sinks' gradient."""
    primitives = Plain()
    features, functions = adapt(
        "mine", {**dict.fromkeys(("flash_attn_func", "flash_attn_with_kvcache")), "flash_attn_varlen_func": _flash_2},
        ON_CPU.features, replace(ON_CPU, primitives=lambda: primitives),
    )  # fmt: skip
    assert (features.sinks, features.dropout) == (True, True)
    q = torch.zeros(1, 3, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedFeatureError, match="mine does not support attention dropout beside sinks"):
        functions.flash_attn_func(q, q, q, dropout_p=0.1, s_aux=torch.zeros(2))


def _flash_2(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: Any = 0,
    softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1), softcap: Any = 0, deterministic: Any = False,
) -> Any:  # fmt: skip
    raise AssertionError("called without sinks")


@pytest.mark.parametrize("sinks", [False, True])
def test_functions_that_torch_compile_cannot_trace(sinks: bool) -> None:
    """As FlashAttention-4's, which ask for the active fake mode: the primitives are one operator."""

    def untraceable(*inputs: Any, **options: Any) -> Any:
        return active_fake_mode() or reference.flash_attn_varlen_func(*inputs, **options)

    named = {**dict.fromkeys(("flash_attn_func", "flash_attn_with_kvcache")), "flash_attn_varlen_func": untraceable}
    primitives = Plain()
    provider = replace(ON_CPU, traced=False, primitives=lambda: primitives)
    _, functions = adapt("mine", named, replace(ON_CPU.features, dtypes=("float32",)), provider)
    given = inputs((1, 13, 4, 8), (1, 13, 2, 8), (1, 13, 2, 8), (4,), dtype=torch.float32)[: 3 + sinks]

    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None = None) -> Tensor:
        found: Tensor = functions.flash_attn_func(q, k, v, causal=True, s_aux=s_aux)
        return found

    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    weight = torch.randn(1, 13, 4, 8)
    found, right = fast(*given), plain((*given, None)[:4], causal=True)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(*(torch.autograd.grad(x, given, weight) for x in (found, right)))
    if not sinks:
        torch.testing.assert_close(call(*given), right)


ON_CPU = replace(FLASH_ATTN, features=replace(FLASH_ATTN.features, devices=("cpu",)))


def test_which_kernels_have_sinks() -> None:
    """All of the library's; a user's own object by its keyword alone."""
    here = Environment.detect()
    assert all(package.features_in(here).sinks for packages in CATALOG.values() for package in packages)

    class Theirs:
        flash_attn_varlen_func = staticmethod(_flash_2)

    assert not as_kernel(Theirs()).features.sinks


@pytest.mark.slow
def test_interpreted() -> None:
    pytest.importorskip("triton")
    interpreted.run("tests/unit/interpreted_sinks.py")

"""A kernel's forward that returns its log-sum-exp, and its backward: below the autograd function that the package offers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .options import Lengths

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PackagePrimitives", "Pattern", "Primitives"]


class Pattern(NamedTuple):
    """The arguments of a call that are no tensors, under FlashAttention-2's names; -1 for a side without a limit."""

    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    deterministic: bool


class Primitives(Protocol):
    """A kernel's forward and backward below its autograd function.

    Shapes: query (tokens, heads, head_dim) and a log-sum-exp (heads, tokens), float32; without lengths, query (batch, length,
    heads, head_dim) and (batch, heads, length).
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, pattern: Pattern
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp, both new tensors."""
        ...

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
        """The gradients of query, key and value."""
        ...


@dataclass(frozen=True)
class PackagePrimitives:
    """Where a FlashAttention package has its primitives.

    Attributes:
        module: the module below the public one.
        dense, varlen: the names of the forward and the backward.
        unlimited: the package's value for a window side without a limit.
    """

    module: str
    dense: tuple[str, str]
    varlen: tuple[str, str]
    unlimited: int | None = -1

    def load(self) -> Primitives | None:
        """The primitives of the installed version; None if their parameters are unknown."""
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            return None
        parts = [getattr(module, name, None) for name in (*self.dense, *self.varlen)]
        # Most are custom operators, of which the function itself has the parameters.
        functions = [getattr(function, "_init_fn", function) for function in parts]
        values = (_FORWARD, _BACKWARD) * 2
        if any(f is None or _missing(f, known) for f, known in zip(functions, values, strict=True)):
            return None
        return _PackagePrimitives(tuple(functions[:2]), tuple(functions[2:]), self.unlimited)


#: What a package's forward is called with beyond inputs, lengths and pattern; a parameter that isn't in its signature is left out.
#: Their parameters differ between versions (read from flash-attn 2.6.1 to 2.8.3, fa3-fwd 0.0.3 and flash-attn-4 4.0.0b3 to
#: 4.0.0b36), their names don't.
_FORWARD: Mapping[str, Any] = {
    "dropout_p": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "return_lse": True,
    # Features of FlashAttention-3's forward that are off.
    **dict.fromkeys(
        ("k_new", "v_new", "qv", "out", "out_", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table")
    ),
    **dict.fromkeys(("kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary")),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
}
_BACKWARD: Mapping[str, Any] = {
    "dropout_p": 0.0,
    "alibi_slopes": None,
    **dict.fromkeys(("rng_state", "sequed_q", "sequed_k", "seqused_q", "seqused_k")),
}
#: The names under which packages take what every call gives.
_GIVEN = frozenset(
    {"q", "k", "v", "dout", "out", "lse", "softmax_lse", "dq", "dk", "dv", "is_causal", "window_size"}
    | {*Lengths._fields, *Pattern._fields}
)
#: Parameters without which a function would compute something else.
_NEEDED = ("softmax_scale", "softcap")


def _missing(function: Callable[..., Any], values: Mapping[str, Any]) -> bool:
    """Whether a function lacks a parameter that every call gives, or needs one that isn't known."""
    parameters = inspect.signature(function).parameters
    required = {name for name, p in parameters.items() if p.default is p.empty}
    causal = {"causal", "is_causal"} & parameters.keys()
    window = {"window_size", "window_size_left"} & parameters.keys()
    return not (causal and window and parameters.keys() >= set(_NEEDED) and required <= values.keys() | _GIVEN)


class _PackagePrimitives:
    """A package's functions as `Primitives`."""

    def __init__(self, dense: tuple[Any, ...], varlen: tuple[Any, ...], unlimited: int | None) -> None:
        self._functions = {False: dense, True: varlen}
        self._parameters = {f: frozenset(inspect.signature(f).parameters) for f in (*dense, *varlen)}
        self._unlimited = unlimited

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, pattern: Pattern
    ) -> tuple[Tensor, Tensor]:
        values = {**_FORWARD, "q": q, "k": k, "v": v}
        results = self._call(self._functions[lengths is not None][0], values, lengths, pattern)
        return results[0], results[5 if len(results) == 8 else 1]  # eight before flash-attn 2.7

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
        import torch

        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        inputs = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "lse": lse}
        values = {**_BACKWARD, **inputs, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        self._call(self._functions[lengths is not None][1], values, lengths, pattern)
        return grads

    def _call(
        self, function: Callable[..., Any], values: dict[str, Any], lengths: Lengths | None, pattern: Pattern
    ) -> Any:
        left, right = (self._unlimited if side < 0 else side for side in pattern[2:4])
        values |= pattern._asdict() | {"is_causal": pattern.causal, "window_size": (left, right)}
        values |= {"window_size_left": left, "window_size_right": right}
        values |= dict.fromkeys(Lengths._fields) if lengths is None else lengths._asdict()
        return function(**{name: values[name] for name in self._parameters[function] & values.keys()})

"""FlashAttention from torch itself: ``torch.nn.attention.varlen.varlen_attn``, there from torch 2.10.

Its features are read from its signature:

- 2.10: ``is_causal``; no window, no scale.
- 2.11: ``scale`` and ``window_size``, of which ``(-1, 0)`` is causal.
- 2.12 on: ``enable_gqa``, ``num_splits``, and a paged cache by ``seqused_k`` and ``block_table``. In 2.12 only FA3 takes ``num_splits``
  (measured on an H100). Without it the kernel may split the keys in pages, which was wrong in 2.13: paged caches are used from 2.13 on.

Head dimensions must be multiples of 8, up to 256 (measured on an H200 with torch 2.11; torch documents no limit).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..environment import torch_flash_backend
from ..errors import SeamError, UnsupportedFeatureError
from ..versions import within
from .provider import Features, WarnOnce

if TYPE_CHECKING:
    from torch import Tensor

    from .options import Lengths, Mask, Options
    from .primitives import Pattern

__all__ = ["Primitives", "functions", "refine", "runs_on", "unpaged_because"]

_NAME = "flash_attention_torch"
_LEADING = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
#: Its options, with the default that changes nothing.
_OFF = {
    "is_causal": False,
    "return_aux": None,
    "scale": None,
    "window_size": (-1, -1),
    "enable_gqa": False,
    "seqused_k": None,
    "block_table": None,
    "num_splits": None,
}
_VARYING = "gradients vary in their last bits unless torch.use_deterministic_algorithms(True) is in force"
_PAGING = frozenset({"seqused_k", "block_table"})


def _options(varlen_attn: Any) -> frozenset[str]:
    """The options of a `varlen_attn`, by its signature; raises SeamError if that is unknown."""
    from ..patching.seam import parameter_problem

    problem = parameter_problem(varlen_attn, _LEADING)
    if problem is None:
        parameters = inspect.signature(varlen_attn).parameters
        strange = [name for name, off in _OFF.items() if name in parameters and parameters[name].default != off]
        ways = [name for name in ("is_causal", "window_size") if name in parameters]
        if strange:
            problem = ", ".join(f"{name}={parameters[name].default!r}" for name in strange)
        elif len(ways) != 1:
            problem = f"causality by {' and '.join(ways) or 'no parameter'}"
        else:
            return frozenset(parameters) & _OFF.keys()
    import torch

    expected = f"parameters ({', '.join(_LEADING)}, ...), and is_causal or window_size for causality"
    raise SeamError("torch.nn.attention.varlen:varlen_attn", expected, problem, f"torch {torch.__version__}")


def refine(module: Any, features: Features) -> Features:
    """The features of the `varlen_attn` in a module."""
    options = _options(getattr(module, "varlen_attn", None))
    return replace(features, window="window_size" in options, paged=options >= _PAGING and _takes_splits())


def functions(module: Any) -> Mapping[str, Callable[..., Any] | None]:
    """The `varlen_attn` in a module as a kernel: see `Provider.functions`."""
    varlen = _Varlen(getattr(module, "varlen_attn", None))
    paged = varlen.attend_paged if varlen.options >= _PAGING else None
    return {"attend": varlen.attend, "attend_paged": paged}


def runs_on(device: str) -> bool:
    """Whether torch has a kernel for a device type: CUDA's, or one that a backend or a test has registered."""
    import torch

    key = {"meta": "Meta", "privateuseone": "PrivateUse1"}.get(device, device.upper())
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", key))
    except RuntimeError:  # no such key
        return False


def unpaged_because(page_size: int, head_dim: int) -> str | None:
    """Why the active backend can't use a cache in pages of `page_size` tokens; None if it can."""
    if head_dim % 8:
        return f"in pages a head dimension must be a multiple of 8, not {head_dim}"
    backend = torch_flash_backend()
    if backend is None and page_size % 256:
        return f"its pages are multiples of 256 tokens, not of {page_size}"
    import torch

    if backend == "FA4" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10:
        return "FA4, which is active, has no paged cache on this device"
    return None


class _Varlen:
    """A `varlen_attn` as a kernel."""

    def __init__(self, varlen_attn: Any) -> None:
        import torch

        self.options = _options(varlen_attn)
        self._varlen_attn = varlen_attn
        self._active_backend = _backend_in_graphs()
        # torch.compile can't trace it, and takes what it returns while tracing.
        self._prefers_flash = torch.compiler.assume_constant_result(_prefers_flash)
        self._splits = _takes_splits()
        self._warn_once = WarnOnce(_NAME)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Options,
        lengths: Lengths | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """An `options.Attend` of packed sequences alone."""
        import torch

        assert lengths is not None
        deterministic = options.deterministic
        determined = torch.are_deterministic_algorithms_enabled()
        if deterministic and not determined and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            self._warn_once("deterministic backward of its own", _VARYING)
        chosen: dict[str, Any] = {}
        if "num_splits" in self.options and (self._splits or self._active_backend() is not None):
            if deterministic or determined:
                chosen["num_splits"] = 1  # no sum in an order that depends on the rest of the batch
            elif self._active_backend() is not None and self._prefers_flash():
                chosen["num_splits"] = 0  # the backend chooses; excludes cuDNN, which takes none
        output: Tensor = self._call((q, k, v), lengths, options, chosen)
        return output

    def attend_paged(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        options: Options,
        return_softmax_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """An `options.AttendPaged`, which returns the log-sum-exp (batch, heads, new tokens) as well where that is wanted."""
        import torch

        if cache_seqlens is None or block_table is None:
            raise UnsupportedFeatureError("a cache without block_table and cache_seqlens", _NAME, "Give both.")
        if (k is None) != (v is None):
            raise ValueError("k and v are the new tokens' keys and values: give both or neither")
        backend = self._active_backend()
        # Checked before anything is written; torch checks afterwards.
        self._check_paged(q, k_cache, v_cache, k, v)
        batch, q_len = q.shape[:2]
        lengths = cache_seqlens
        if k is not None:
            assert v is not None
            _write(k_cache, k, cache_seqlens, block_table)
            _write(v_cache, v, cache_seqlens, block_table)
            lengths = torch.where(lengths < 0, lengths, lengths + k.shape[1])
        lengths = lengths.clamp(min=0).to(torch.int32)
        # FA2 needs the offsets of the keys as well, and reads `seqused_k`; FA3 and FA4 refuse them beside pages.
        k_offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        packed = (
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len,
            k_offsets if backend is None else None,
            q_len,
            block_table.shape[1] * k_cache.shape[1],  # an upper bound: the greatest length is on the device
        )
        chosen: dict[str, Any] = {"seqused_k": lengths, "block_table": block_table}
        if "num_splits" in self.options:
            chosen["num_splits"] = 1  # in pages torch 2.13 is silently wrong where it splits (measured)
        if return_softmax_lse:
            chosen["return_aux"] = torch.nn.attention.varlen.AuxRequest(lse=True)
        inputs = (q.flatten(0, 1), k_cache, v_cache)
        output = self._call(inputs, packed, options, chosen)
        if not return_softmax_lse:
            return output.unflatten(0, (batch, q_len))
        out, lse = output  # lse: (heads, tokens)
        return out.unflatten(0, (batch, q_len)), lse.unflatten(1, (batch, q_len)).transpose(0, 1)

    def _check_paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *new: Tensor | None) -> None:
        import torch

        if q.shape[-1] % 8:
            feature, advice = f"a paged cache of head dimension {q.shape[-1]}", "It must be a multiple of 8."
        elif self._active_backend() == "FA4" and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 10:
            feature = "a paged cache while FA4 is active, on this device"
            advice = "kernel_compat.use_torch_flash_backend(None) returns to the kernel that has one."
        elif k_cache.shape[-1] != v_cache.shape[-1]:
            feature = "a paged cache whose values have another head dimension than its keys"
            advice = "Pad the values."
        elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k_cache, v_cache, *new)):
            feature, advice = "gradients through a paged cache", "Run it under torch.no_grad()."
        else:
            return
        raise UnsupportedFeatureError(feature, _NAME, advice)

    def _call(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        lengths: tuple[Any, ...],
        options: Options,
        chosen: dict[str, Any],
    ) -> Any:
        """Call `varlen_attn` with the options in `chosen`, and with the options that the other arguments require."""
        (q, k, v), scale = inputs, options.softmax_scale
        if "is_causal" in self.options:
            chosen["is_causal"] = options.causal
        else:
            chosen["window_size"] = (options.window_size[0], 0) if options.causal else options.window_size
        if "scale" not in self.options:
            q, k, v = _scaled(q, k, v, scale)
        elif scale is not None:
            if scale <= 0:  # torch 2.15 takes positive scales only
                q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
            chosen["scale"] = scale
        if "enable_gqa" in self.options and q.shape[-2] != k.shape[-2]:
            chosen["enable_gqa"] = True
        return self._varlen_attn(q, k, v, *lengths, **chosen)


class Primitives:
    """torch's own operators as `primitives.Primitives`; their dense form is left out. A backend that is active runs them."""

    def __init__(self) -> None:
        import torch

        self._forward = torch.ops.aten._flash_attention_forward  # noqa: SLF001
        self._backward = torch.ops.aten._flash_attention_backward  # noqa: SLF001
        self._has_splits = "num_splits" in str(self._forward.default._schema)  # noqa: SLF001
        self._active_backend = _backend_in_graphs()
        self._splits = _takes_splits()
        self._warn_once = WarnOnce(_NAME)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, pattern: Pattern
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp."""
        import torch

        determined = torch.are_deterministic_algorithms_enabled()
        takes_splits = self._has_splits and (self._splits or self._active_backend() is not None)
        split = {"num_splits": 1} if takes_splits and (pattern.deterministic or determined) else {}
        assert lengths is not None
        arguments = (*lengths, 0.0, pattern.causal, False)
        results = self._forward(q, k, v, *arguments, **_keywords(pattern), **split)
        return results[0], results[1]

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
        import torch

        if pattern.deterministic and not torch.are_deterministic_algorithms_enabled():
            self._warn_once("deterministic backward of its own", _VARYING)
        assert lengths is not None
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        arguments = (*lengths, 0.0, pattern.causal, state, unused)
        grads = self._backward(grad, q, k, v, out, lse, *arguments, **_keywords(pattern))
        return tuple(grads)


def _keywords(pattern: Pattern) -> dict[str, Any]:
    sides = {"window_size_left": pattern.window_size_left, "window_size_right": pattern.window_size_right}
    return {"scale": pattern.softmax_scale, **sides}


def _scaled(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The scale moved into the query, for a kernel that always divides by the square root of the head dimension.

    A power of two multiplies a query without rounding it, and zeros behind the head dimension, which the caller cuts
    off the output, change the kernel's divisor: with the two together the scales of most models are exact. Where no
    padding makes them exact, the query is rounded once.
    """
    from torch.nn.functional import pad

    dim = q.shape[-1]
    if scale is None:
        return q, k, v
    if not scale:
        return q * 0.0, k, v
    for padded in range(dim, 257, 8):
        factor = scale * math.sqrt(padded)
        power = math.copysign(2.0 ** round(math.log2(abs(factor))), factor)
        if abs(factor - power) <= 1e-12 * abs(power):  # torch.compile can't trace math.isclose
            q, k, v = (pad(x, (0, padded - dim)) for x in (q, k, v)) if padded > dim else (q, k, v)
            return q if power == 1 else q * power, k, v
    return q * (scale * math.sqrt(dim)), k, v


def _write(cache: Tensor, new: Tensor, lengths: Tensor, block_table: Tensor) -> None:
    """Write the keys or values of new tokens into their pages, behind the first `lengths` tokens.

    Nothing may be written for padding (rows without a page or with a negative length) and for tokens behind the last
    column, and shapes can't depend on which these are: each repeats the write of some real token, or writes back the value
    that the cache has.

    Args:
        cache: (pages, page size, kv_heads, head_dim), changed in place.
        new: (batch, tokens, kv_heads, head_dim).
        lengths: (batch,).
        block_table: (batch, pages a sequence).
    """
    import torch

    page_size = cache.shape[1]
    position = lengths[:, None] + torch.arange(new.shape[1], device=lengths.device)
    column = (position // page_size).clamp(0, block_table.shape[1] - 1).long()
    page = block_table.gather(1, column)
    room = block_table.shape[1] * page_size
    there = ((lengths[:, None] >= 0) & (position < room) & (page >= 0)).flatten()
    source = torch.where(there, torch.arange(there.numel(), device=there.device), there.int().argmax())
    place = page.flatten()[source].clamp(min=0).long(), (position % page_size).flatten()[source].long()
    cache[place] = torch.where(there.any(), new.flatten(0, 1)[source].to(cache.dtype), cache[place])


def _backend_in_graphs() -> Callable[[], str | None]:
    """The function of torch that names the active backend, for code in a graph: torch.compile can't trace a look into sys.modules."""
    import torch

    backend: Callable[[], str | None] = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return backend


def _takes_splits() -> bool:
    """Whether torch's own kernel takes a number of splits. In 2.12 it raises that this needs FA3."""
    import torch

    return within(torch.__version__, ">=2.13")


def _prefers_flash() -> bool:
    """Whether an activated backend should run: unless the caller's ``sdpa_kernel`` excludes or reorders it."""
    import torch

    ordered = getattr(torch.nn.attention, "_is_sdp_priority_order_active", lambda: False)
    return bool(torch.backends.cuda.flash_sdp_enabled()) and not ordered()

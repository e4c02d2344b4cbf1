"""Every kernel is called with FlashAttention-2's keywords; the adapter translates them to the keywords of the kernel's package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import KernelUnavailableError, UnsupportedFeatureError
from .catalog import FLEXIBLE, REFERENCE, instead
from .needs import is_open
from .primitives import Lengths, Pattern, Primitives
from .provider import FUNCTIONS, Features, Provider, WarnOnce

__all__ = ["Functions", "adapt", "takes"]


class Functions(NamedTuple):
    """The functions of a loaded kernel, to be called with keywords.

    Shapes: query (batch, length, heads, head_dim), key and value (batch, length, kv_heads, head_dim); without the
    batch, all sequences joined along the first dimension, for varlen. The output has the query's shape with the
    value's head dimension. Keywords are FA2's: ``dropout_p``, ``softmax_scale``, ``causal``, ``window_size``,
    ``softcap``, ``deterministic``, and ``s_aux`` for sinks of shape (heads,). Varlen adds ``cu_seqlens_q``,
    ``cu_seqlens_k`` of shape (sequences + 1,), int32, ``max_seqlen_q`` and ``max_seqlen_k``. A keyword the kernel can't honour
    raises `UnsupportedFeatureError`.

    The last function takes any mask besides, None if the kernel has no such masks: ``visible`` of shape (batch or 1, heads or 1,
    q_len, kv_len), bool; ``bias`` of the same shape, added to the scores; ``segments``, of shapes (batch, q_len) and (batch,
    kv_len), ints, negative for padding: a query sees the keys of its own segment. Inputs have a batch dimension.
    """

    flash_attn_func: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]
    flash_attn_with_kvcache: Callable[..., Any] | None
    masked_attention: Callable[..., Any] | None = None


#: Keywords of FlashAttention-2 besides the lengths, with their defaults.
_DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "deterministic": False,
    "s_aux": None,
}
#: Optional keywords, with the feature that each needs.
_OPTIONAL = {
    "dropout_p": "dropout",
    "window_size": "window",
    "softcap": "softcap",
    "deterministic": "deterministic",
    "s_aux": "sinks",
}

#: The keyword by which a function with a paged cache returns the log-sum-exp as well.
_LSE = "return_softmax_lse"


def adapt(
    name: str,
    raw: Mapping[str, Callable[..., Any] | None],
    features: Features,
    provider: Provider,
    masked: Callable[..., Any] | None = None,
) -> tuple[Features, Functions]:
    """Put a package's functions behind FlashAttention-2's keywords, and leave out the features that they don't take."""
    dense, varlen, kvcache = (raw[function] for function in FUNCTIONS)
    assert varlen is not None
    features = replace(_taken(varlen, features, provider), paged=features.paged and kvcache is not None)
    features = replace(features, masks=masked is not None)
    primitives = None
    if features.sinks_from == "log-sum-exp" or not provider.traced:
        primitives = provider.primitives()
    if features.sinks_from == "log-sum-exp":
        features = replace(features, sinks=primitives is not None)
    if dense is not None and not (
        all(takes(dense, keyword) for keyword in ("softmax_scale", "causal"))
        and replace(_taken(dense, features, provider), sinks=features.sinks) == features
    ):
        dense = None  # the varlen function computes it
    adapter = _Adapter(name, features, provider, (dense, varlen, None), primitives, masked)
    paged = None
    if kvcache is not None and features.paged:
        cached = _Adapter(name, _taken(kvcache, features, provider), provider, (None, None, kvcache))
        paged = cached.flash_attn_with_kvcache
    masking = adapter.masked_attention if masked is not None else None
    return features, Functions(adapter.flash_attn_func, adapter.flash_attn_varlen_func, paged, masking)


def _taken(function: Callable[..., Any], features: Features, provider: Provider) -> Features:
    """The features without those whose keyword a function doesn't take."""
    names = {keyword: provider.renamed.get(keyword, keyword) for keyword in _OPTIONAL}
    if features.sinks_from == "log-sum-exp":
        names["s_aux"] = _LSE
    lacking: dict[str, Any] = {
        feature: False
        for keyword, feature in _OPTIONAL.items()
        if not takes(function, names[keyword], unnamed=provider.declared)
    }
    return replace(features, **lacking)


def takes(function: Callable[..., Any], keyword: str, *, unnamed: bool = True) -> bool:
    """Whether a function can be called with a keyword.

    Args:
        unnamed: whether ``**kwargs`` counts; a function may ignore such a keyword.
    """
    parameters = inspect.signature(function).parameters
    anything = unnamed and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return anything or keyword in parameters


class _Adapter:
    """A package's functions behind FlashAttention-2's keywords.

    transformers reads off the signatures of the last two which keywords they take.
    """

    def __init__(
        self,
        name: str,
        features: Features,
        provider: Provider,
        functions: tuple[Callable[..., Any] | None, ...],
        primitives: Primitives | None = None,
        masked: Callable[..., Any] | None = None,
    ) -> None:
        import torch

        self._name, self._features, self._provider = name, features, provider
        self._sinks_from_lse = features.sinks_from == "log-sum-exp"
        self._is_compiling = torch.compiler.is_compiling
        self._operator_if_compiling = primitives is not None and not provider.traced
        # From 2.13 on, torch.compile breaks the graph where an autograd.Function, such as FlashAttention-2's, takes one tensor
        # twice. torch's own function is none, and tells by the identity of the offsets that queries and keys have the same.
        self._offsets_twice = provider.distribution != "torch"
        if primitives is not None:
            from .sinks import register

            register(provider.distribution, primitives)
        self._dense, self._varlen, self._kvcache = functions
        self._masked = masked
        self._names = {keyword: provider.renamed.get(keyword, keyword) for keyword in (*_OPTIONAL, "block_table")}
        self._supported = {keyword: getattr(features, feature) for keyword, feature in _OPTIONAL.items()}
        self._dtypes = tuple(getattr(torch, dtype) for dtype in features.dtypes)
        # torch.compile can't trace its look into the dispatcher.
        self._runs_on = provider.runs_on and torch.compiler.assume_constant_result(provider.runs_on)
        self._warn_once = WarnOnce(name)

    def flash_attn_func(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
        if self._dense is not None:
            given = {**_DEFAULTS, **options}
            if len(given) > len(_DEFAULTS):
                raise TypeError(f"unexpected keywords: {', '.join(given.keys() - _DEFAULTS.keys())}")
            return self._compute(self._dense, (q, k, v), (q_len, kv_len), {}, given)
        import torch

        # Equal lengths are a special case of varlen.
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        q_starts = starts * q_len
        packed = self.flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens_q=q_starts,
            # The same tensor where they are equal: torch 2.15 chooses its fastest backend by that.
            cu_seqlens_k=q_starts if kv_len == q_len else starts * kv_len,
            max_seqlen_q=q_len,
            max_seqlen_k=kv_len,
            **options,
        )
        return packed.unflatten(0, (batch, q_len))

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        s_aux: Any = None,
    ) -> Any:
        # transformers passes the maximum as a tensor up to 5.23; FA4 compiles for it as if it were one more
        # array and dies. Every kernel takes an int.
        same = max_seqlen_k is max_seqlen_q
        max_q = max_seqlen_q if isinstance(max_seqlen_q, int) else int(max_seqlen_q)
        max_k = max_q if same else max_seqlen_k if isinstance(max_seqlen_k, int) else int(max_seqlen_k)
        if cu_seqlens_k is cu_seqlens_q and self._offsets_twice and self._is_compiling():
            cu_seqlens_k = cu_seqlens_k.view(-1)
        lengths = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
        }
        options = {
            "dropout_p": dropout_p,
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "deterministic": deterministic,
            "s_aux": s_aux,
        }
        return self._compute(self._varlen, (q, k, v), (max_q, max_k), lengths, options)

    def flash_attn_with_kvcache(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        cache_seqlens: Any = None,
        block_table: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        s_aux: Any = None,
    ) -> Any:
        inputs = (q, k_cache, v_cache)
        dims = self._check(*inputs)
        if not self._features.open_window:  # the room for keys counts as their number
            room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
            self._check_window(causal, window_size, (q.shape[1], room))
        given = {**_DEFAULTS, "window_size": window_size, "softcap": softcap, "s_aux": s_aux}
        options = self._options(inputs, given)
        self._require_with(dims, inputs, given)
        options[self._names["block_table"]] = block_table
        if computed := s_aux is not None and self._sinks_from_lse:
            options[_LSE] = True
        scale = {"softmax_scale": softmax_scale, "causal": causal}
        found = self._kvcache(*inputs, k, v, cache_seqlens=cache_seqlens, **scale, **options)  # type: ignore[misc]
        if computed:
            from .sinks import with_sinks

            found = with_sinks(found[0], found[1], s_aux)
        return _first(found)

    def masked_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        visible: Any = None,
        bias: Any = None,
        segments: Any = None,
        **options: Any,
    ) -> Any:
        mask = {"visible": visible, "bias": bias, "segments": segments}
        return self._compute(self._masked, (q, k, v), (q.shape[1], k.shape[1]), mask, {**_DEFAULTS, **options})

    def _compute(
        self,
        function: Any,
        inputs: tuple[Any, Any, Any],
        longest: tuple[int, int],
        lengths: dict[str, Any],
        given: dict[str, Any],
    ) -> Any:
        """Call a package's function with inputs whose head dimensions it takes.

        Args:
            longest: the lengths of the longest sequences of query and key.
            lengths: the function's keywords for the sequences, or for a mask.
            given: the keywords of `_DEFAULTS`.
        """
        dims = self._check(*inputs)
        options = self._options(inputs, given)
        self._require_with(dims, inputs, given)
        causal, scale = given["causal"], given["softmax_scale"]
        if not self._features.open_window:
            self._check_window(causal, given["window_size"], longest)
        v_dim = inputs[2].shape[-1]
        if dims != (inputs[0].shape[-1], v_dim):
            inputs, scale = _padded(inputs, scale, dims)
        by_primitives = given["s_aux"] is not None and self._sinks_from_lse
        if by_primitives or (self._operator_if_compiling and self._is_compiling()):
            out = self._by_primitives(inputs, lengths, {**given, "softmax_scale": scale})
        else:
            out = _first(function(*inputs, **lengths, softmax_scale=scale, causal=causal, **options))
        return out if out.shape[-1] == v_dim else out[..., :v_dim].contiguous()

    def _by_primitives(self, inputs: tuple[Any, Any, Any], lengths: dict[str, Any], given: dict[str, Any]) -> Any:
        """Attention by the package's primitives, which take no dropout."""
        if given["dropout_p"] and given["s_aux"] is not None:
            advice = f"Use {REFERENCE}, or train without attention dropout."
            raise UnsupportedFeatureError("attention dropout beside sinks", self._name, advice)
        from .sinks import attention_by_primitives

        q, k, v = inputs
        scale = q.shape[-1] ** -0.5 if given["softmax_scale"] is None else given["softmax_scale"]
        if scale <= 0:  # primitives look for the largest score before they scale
            q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
        left, right = (-1 if side is None else side for side in given["window_size"])
        pattern = Pattern(scale, given["causal"], left, right, given["softcap"], given["deterministic"])
        sequences = Lengths(**lengths) if lengths else None
        return attention_by_primitives(self._provider.distribution, q, k, v, given["s_aux"], sequences, pattern)

    def _options(self, inputs: tuple[Any, Any, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The package's keywords for a call; an error, or a warning once, for an option that it lacks."""
        options: dict[str, Any] = {}
        supported, names = self._supported, self._names
        if given["dropout_p"]:
            if supported["dropout_p"]:
                options[names["dropout_p"]] = given["dropout_p"]
            else:
                self._warn_once("attention dropout", "it is not applied")
        if given["deterministic"]:
            if supported["deterministic"]:
                options[names["deterministic"]] = True
            else:
                self._warn_once("deterministic backward", "gradients vary in their last bits")
        if given["window_size"] != (-1, -1):
            left, right = (-1 if side is None else side for side in given["window_size"])
            if left >= 0 or right >= 0:
                self._require("window_size", inputs)
                unlimited = self._provider.unlimited
                options[names["window_size"]] = (left if left >= 0 else unlimited, right if right >= 0 else unlimited)
        if given["softcap"]:
            self._require("softcap", inputs)
            options[names["softcap"]] = given["softcap"]
        if given["s_aux"] is not None:
            self._require("s_aux", (given["s_aux"],))
            if not self._sinks_from_lse:
                options[names["s_aux"]] = given["s_aux"]
        return options

    def _require(self, keyword: str, inputs: tuple[Any, ...]) -> None:
        """Refuse a keyword that the package doesn't take, and one without gradients where an input needs its gradient."""
        feature = _OPTIONAL[keyword]
        if not self._supported[keyword]:
            advice = instead(self._name, feature)
            if not self._provider.declared:
                keyword = self._names[keyword]
                advice = (
                    f"Its function has no parameter {keyword!r}, and **kwargs may be ignored. If it honours {keyword!r}, "
                    f"give the kernel object an attribute `features`: a kernel_compat.Features with {feature}=True. {advice}"
                )
            raise UnsupportedFeatureError(Features.word(feature), self._name, advice)
        if feature in self._features.forward_only and _needs_gradient(inputs):
            advice = f"{instead(self._name, feature, gradients=True)} Or run it under torch.no_grad()."
            raise UnsupportedFeatureError(f"gradients of {Features.word(feature)}", self._name, advice)

    def _require_with(self, dims: tuple[int, int], inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Refuse softcap and sinks with head dimensions that the package has a kernel without them for."""
        features = self._features
        if dims not in (*features.plain_head_dims, *features.plain_backward_head_dims):
            return
        sinks = given["s_aux"]
        used = [name for name, uses in (("softcap", given["softcap"]), ("sinks", sinks is not None)) if uses]
        if _needs_gradient(inputs if sinks is None else (*inputs, sinks)):
            used.append("backward")
        if lacking := features.lacking_with(dims, used):
            raise UnsupportedFeatureError(lacking[0], self._name, f"{FLEXIBLE} and {REFERENCE} have both.")

    def _check_window(self, causal: bool, window: tuple[int, int], longest: tuple[int, int]) -> None:
        if is_open(causal, window, longest):
            advice = f"Give it a limit to the right. {instead(self._name, 'open_window')}"
            raise UnsupportedFeatureError(Features.word("open_window"), self._name, advice)

    def _check(self, q: Any, k: Any, v: Any) -> tuple[int, int]:
        """Check the inputs, and return the head dimensions of query and value that they must be padded to."""
        features = self._features
        device = q.device.type
        if device not in features.devices and not (self._runs_on and self._runs_on(device)):
            elsewhere = f"Move the model to {' or '.join(features.devices)}, or use {REFERENCE}."
            if self._runs_on:  # it was loaded without such a device
                raise KernelUnavailableError(
                    self._name, [f"it has no kernel for tensors on {device!r}"], elsewhere, in_call=True
                )
            raise UnsupportedFeatureError(f"tensors on {device!r}", self._name, elsewhere)
        if q.dtype not in self._dtypes:
            wanted = " or ".join(features.dtypes)
            advice = f"Cast the model to {wanted}, run it under torch.autocast, or use {REFERENCE}."
            raise UnsupportedFeatureError(f"{q.dtype}", self._name, advice)
        q_dim, v_dim = q.shape[-1], v.shape[-1]
        dims = self._head_dims(q_dim, v_dim)
        if v_dim > q_dim:
            excess = f"a value head dimension ({v_dim}) greater than the query's ({q_dim})"
            raise UnsupportedFeatureError(excess, self._name, "No kernel does.")
        if q.shape[-2] != k.shape[-2] and not features.gqa:
            raise UnsupportedFeatureError("fewer key heads than query heads", self._name, instead(self._name, "gqa"))
        if device in features.no_backward_on and _needs_gradient((q, k, v)):
            advice = f"Use {REFERENCE}, or run it under torch.no_grad()."
            raise UnsupportedFeatureError(f"gradients on {device!r}", self._name, advice)
        if not features.backward and _needs_gradient((q, k, v)):
            advice = f"{instead(self._name, 'backward')} Or run it under torch.no_grad()."
            raise UnsupportedFeatureError("gradients", self._name, advice)
        return dims

    def _head_dims(self, q_dim: int, v_dim: int) -> tuple[int, int]:
        """The head dimensions of query and value that these are padded to."""
        features = self._features
        largest, multiple = features.max_head_dim, features.head_dim_multiple
        if largest is None or q_dim <= largest:
            dim, of_values = (-(-x // multiple) * multiple for x in (q_dim, v_dim))
            return dim, of_values if features.value_head_dim else dim
        if (pair := features.pair(q_dim, v_dim)) is not None:
            return pair
        if not features.head_dims:
            advice = f"Its largest is {largest}; {FLEXIBLE} has no limit."
            raise UnsupportedFeatureError(f"head dimension {q_dim}", self._name, advice)
        beyond = " or ".join(map(str, features.head_dims))
        advice = f"On this GPU it takes up to {largest}, or {beyond}; {FLEXIBLE} has no limit."
        raise UnsupportedFeatureError(f"head dimensions {(q_dim, v_dim)} of query and value", self._name, advice)


def _padded(inputs: tuple[Any, Any, Any], scale: float | None, dims: tuple[int, int]) -> tuple[Any, float]:
    """Zeros behind the head dimensions, which change neither scores nor output, and the scale of the dimension without them."""
    from torch.nn.functional import pad

    q, k, v = inputs
    q_dim, v_dim = q.shape[-1], v.shape[-1]
    scale = q_dim**-0.5 if scale is None else scale
    extra = (0, dims[0] - q_dim)
    return (pad(q, extra), pad(k, extra), pad(v, (0, dims[1] - v_dim))), scale


def _needs_gradient(inputs: tuple[Any, ...]) -> bool:
    if not any(x.requires_grad for x in inputs):
        return False
    import torch

    return bool(torch.is_grad_enabled())


def _first(result: Any) -> Any:
    """The output alone: some packages return the log-sum-exp with it."""
    return result[0] if isinstance(result, (tuple, list)) else result

"""A package's functions as a kernel: FlashAttention-2's options become the package's keywords, checked before each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import KernelUnavailableError, UnsupportedFeatureError
from .catalog import FLEXIBLE, REFERENCE, instead
from .needs import Needs, refusals
from .options import Attend, Functions, Lengths, Mask, Options
from .primitives import Pattern
from .provider import FUNCTIONS, Features, Provider, Refusal, WarnOnce

__all__ = ["adapt", "takes"]

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
    name: str, raw: Mapping[str, Callable[..., Any] | None], features: Features, provider: Provider
) -> tuple[Features, Functions]:
    """A kernel from a package's functions, and the features that these functions support.

    Args:
        raw: the functions by their names in FlashAttention-2. Kernels of this library have an `Attend` under ``attend`` instead.
    """
    dense, varlen, kvcache = (raw.get(function) for function in FUNCTIONS)
    own, own_paged = raw.get("attend"), raw.get("attend_paged")
    paged = features.paged and (kvcache or own_paged) is not None
    features = replace(features, paged=paged, masks=features.masks and own is not None)
    if own is None:
        assert varlen is not None
        features = _taken(varlen, features, provider)
    computed = features.sinks_from == "log-sum-exp"  # sinks are, from the log-sum-exp
    primitives = provider.primitives() if computed or not provider.traced else None
    if primitives is not None:
        from .sinks import register

        register(provider.distribution, primitives)
    if computed:
        features = replace(features, sinks=primitives is not None)
    if own is None and dense is not None:
        same = replace(_taken(dense, features, provider), sinks=features.sinks) == features
        if not (same and all(takes(dense, keyword) for keyword in ("softmax_scale", "causal"))):
            dense = None  # the varlen function computes it
    package: Attend = own or _Package(dense, varlen, provider)
    takes_rows = dense is not None if own is None else provider.takes_rows
    kernel = _Checked(name, features, provider, package, takes_rows, primitives is not None)
    if not paged:
        return features, Functions(kernel.attend, None, features.masks)
    of_pages = features if kvcache is None else _taken(kvcache, features, provider)
    attend_paged = _Paged(_Checked(name, of_pages, provider, package), own_paged or _PagedPackage(kvcache, provider))
    return features, Functions(kernel.attend, attend_paged, features.masks)


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


class _Package:
    """A package's dense and varlen functions as one `Attend`; options that are off aren't passed on.

    Without a dense function it takes calls with lengths alone.
    """

    def __init__(self, dense: Any, varlen: Any, provider: Provider) -> None:
        self._dense, self._varlen = dense, varlen
        self._keywords = _Keywords(provider)

    def __call__(
        self, q: Any, k: Any, v: Any, options: Options, lengths: Lengths | None = None, mask: Mask | None = None
    ) -> Any:
        keywords = self._keywords(options)
        if lengths is None:
            return _first(self._dense(q, k, v, **keywords))
        keywords["cu_seqlens_q"], keywords["cu_seqlens_k"] = lengths.cu_seqlens_q, lengths.cu_seqlens_k
        keywords["max_seqlen_q"], keywords["max_seqlen_k"] = lengths.max_seqlen_q, lengths.max_seqlen_k
        return _first(self._varlen(q, k, v, **keywords))


def _by_sequences(attend: Attend, q: Any, k: Any, v: Any, options: Options) -> Any:
    """Rows of equal lengths, (batch, length, heads, head_dim), computed as packed sequences."""
    import torch

    (batch, q_len), kv_len = q.shape[:2], k.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    q_starts = starts * q_len
    # The same tensor where they are equal: torch 2.15 chooses its fastest backend by that.
    lengths = Lengths(q_starts, q_starts if kv_len == q_len else starts * kv_len, q_len, kv_len)
    out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options, lengths)
    return out.unflatten(0, (batch, q_len))


class _Keywords:
    """Options as the keywords of a package."""

    def __init__(self, provider: Provider) -> None:
        self._names = {keyword: provider.renamed.get(keyword, keyword) for keyword in _OPTIONAL}
        self._unlimited = provider.unlimited

    def __call__(self, options: Options) -> dict[str, Any]:
        names = self._names
        keywords: dict[str, Any] = {"softmax_scale": options.softmax_scale, "causal": options.causal}
        if options.dropout_p:
            keywords[names["dropout_p"]] = options.dropout_p
        if options.deterministic:
            keywords[names["deterministic"]] = True
        left, right = options.window_size
        if left >= 0 or right >= 0:
            keywords[names["window_size"]] = tuple(
                side if side >= 0 else self._unlimited for side in options.window_size
            )
        if options.softcap:
            keywords[names["softcap"]] = options.softcap
        if options.s_aux is not None:
            keywords[names["s_aux"]] = options.s_aux
        return keywords


class _Checked:
    """A kernel's `Attend` behind the checks of a call: inputs get head dimensions that the kernel takes.

    Args:
        package: computes the calls.
        takes_rows: whether it takes calls without lengths.
        has_primitives: whether torch.compile, where it can't trace the package, calls its primitives as one operator.
    """

    def __init__(
        self,
        name: str,
        features: Features,
        provider: Provider,
        package: Attend,
        takes_rows: bool = False,
        has_primitives: bool = False,
    ) -> None:
        import torch

        self.name, self.features, self.provider = name, features, provider
        self._package, self._takes_rows = package, takes_rows
        self._by_operator = has_primitives and not provider.traced
        # From 2.13 on, torch.compile breaks the graph where an autograd.Function, such as FlashAttention-2's, takes one tensor
        # twice. torch's own function is none, and tells by the identity of the offsets that queries and keys have the same.
        self._offsets_twice = provider.distribution != "torch"
        self._is_compiling = torch.compiler.is_compiling
        self.computes_sinks = features.sinks_from == "log-sum-exp"
        # torch.compile can't trace its look into the dispatcher.
        self._runs_on = provider.runs_on and torch.compiler.assume_constant_result(provider.runs_on)
        self._warn_once = WarnOnce(name)
        #: The head dimensions to pad to, by what a call needs. A call that isn't in it is checked.
        self._dims: dict[Needs, tuple[int, int]] = {}

    def attend(
        self, q: Any, k: Any, v: Any, options: Options, lengths: Lengths | None = None, mask: Mask | None = None
    ) -> Any:
        """Compute a call, or raise `UnsupportedFeatureError` for what the kernel can't do."""
        if lengths is None and mask is None and not self._takes_rows:
            return _by_sequences(self.attend, q, k, v, options)
        if (
            lengths is not None
            and lengths.cu_seqlens_k is lengths.cu_seqlens_q
            and self._offsets_twice
            and self._is_compiling()
        ):
            lengths = lengths._replace(cu_seqlens_k=lengths.cu_seqlens_k.view(-1))
        options = self._without_extras(options)
        needs = Needs.of(q, k, v, options, lengths, mask)
        dims = self.checked(needs)
        v_dim = v.shape[-1]
        if dims != (q.shape[-1], v_dim):
            (q, k, v), options = _padded(q, k, v, options, dims)
        if (options.s_aux is not None and self.computes_sinks) or (self._by_operator and self._is_compiling()):
            out = self._by_primitives(q, k, v, options, lengths)
        else:
            out = self._package(q, k, v, options, lengths, mask)
        return out if out.shape[-1] == v_dim else out[..., :v_dim].contiguous()

    def _without_extras(self, options: Options) -> Options:
        """The options without dropout and determinism that the kernel lacks, which are worth a warning and no error."""
        if options.dropout_p and not self.features.dropout:
            self._warn_once("attention dropout", "it is not applied")
            options = options._replace(dropout_p=0.0)
        if options.deterministic and not self.features.deterministic:
            self._warn_once("deterministic backward", "gradients vary in their last bits")
            options = options._replace(deterministic=False)
        return options

    def checked(self, needs: Needs) -> tuple[int, int]:
        """The head dimensions of query and value that a call is padded to; raises if the kernel can't compute it."""
        if not self._is_compiling() and (dims := self._dims.get(needs)) is not None:
            return dims
        for refusal in refusals(self.features, needs, self._runs_on):
            raise self._error(refusal)
        dims = self.features.padded_dims(needs.head_dim, needs.value_dim)
        if needs.device in self.features.devices and not self._is_compiling():
            self._dims[needs] = dims
        return dims

    def _error(self, refusal: Refusal) -> Exception:
        features, feature = self.features, refusal.feature
        if feature == "device" and refusal.gradients:
            advice = f"Use {REFERENCE}, or run it under torch.no_grad()."
        elif feature == "device":
            advice = f"Move the model to {' or '.join(features.devices)}, or use {REFERENCE}."
            if self._runs_on:  # it was loaded without such a device
                reason = f"it has no kernel for {refusal.subject}"
                return KernelUnavailableError(self.name, [reason], advice, in_call=True)
        elif feature == "dtype":
            wanted = " or ".join(features.dtypes)
            advice = f"Cast the model to {wanted}, run it under torch.autocast, or use {REFERENCE}."
        elif feature == "value_dim":
            advice = "No kernel does."
        elif feature == "max_head_dim":
            advice = f"Its largest is {features.max_head_dim}; {FLEXIBLE} has no limit."
        elif feature == "head_dims":
            beyond = " or ".join(map(str, features.head_dims))
            advice = f"On this GPU it takes up to {features.max_head_dim}, or {beyond}; {FLEXIBLE} has no limit."
        elif feature == "plain_head_dims":
            advice = f"{FLEXIBLE} and {REFERENCE} have both."
        elif feature == "sinks_from":
            advice = f"Use {REFERENCE}, or train without attention dropout."
        else:
            advice = self._advice(feature, refusal.gradients)
        return UnsupportedFeatureError(refusal.subject, self.name, advice)

    def _advice(self, feature: str, gradients: bool) -> str:
        """The kernels that have a feature, and how this one may have it."""
        if feature == "backward" or gradients:
            others = instead(self.name, feature, gradients=gradients)
            return f"{others} Or run it under torch.no_grad()."
        feature = feature.removeprefix("frozen_")
        advice = instead(self.name, feature)
        if feature == "open_window":
            return f"Give it a limit to the right. {advice}"
        keyword = next((keyword for keyword, needed in _OPTIONAL.items() if needed == feature), None)
        if keyword is None or self.provider.declared:
            return advice
        keyword = self.provider.renamed.get(keyword, keyword)
        return (
            f"Its function has no parameter {keyword!r}, and **kwargs may be ignored. If it honours {keyword!r}, "
            f"give the kernel object an attribute `features`: a kernel_compat.Features with {feature}=True. {advice}"
        )

    def _by_primitives(self, q: Any, k: Any, v: Any, options: Options, lengths: Lengths | None) -> Any:
        """Attention by the package's primitives."""
        from .sinks import attention_by_primitives

        scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        if scale <= 0:  # primitives look for the largest score before they scale
            q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
        left, right = options.window_size
        pattern = Pattern(scale, options.causal, left, right, options.softcap, options.deterministic)
        return attention_by_primitives(self.provider.distribution, q, k, v, options.s_aux, lengths, pattern)


class _PagedPackage:
    """A package's ``flash_attn_with_kvcache`` as an `AttendPaged`."""

    def __init__(self, function: Any, provider: Provider) -> None:
        self._function, self._keywords = function, _Keywords(provider)
        self._block_table = provider.renamed.get("block_table", "block_table")

    def __call__(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any,
        v: Any,
        cache_seqlens: Any,
        block_table: Any,
        options: Options,
        return_softmax_lse: bool = False,
    ) -> Any:
        keywords = {**self._keywords(options), self._block_table: block_table, "cache_seqlens": cache_seqlens}
        if return_softmax_lse:
            return self._function(q, k_cache, v_cache, k, v, **keywords, **{_LSE: True})[:2]
        return _first(self._function(q, k_cache, v_cache, k, v, **keywords))


class _Paged:
    """An `AttendPaged` behind the checks of a call; sinks are computed where the kernel has none."""

    def __init__(self, kernel: _Checked, attend: Callable[..., Any]) -> None:
        self._kernel, self._attend = kernel, attend

    def __call__(
        self, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, block_table: Any, options: Options
    ) -> Any:
        kernel, sinks = self._kernel, options.s_aux
        kernel.checked(Needs.of_pages(q, k_cache, v_cache, block_table, options))
        arguments = (q, k_cache, v_cache, k, v, cache_seqlens, block_table)
        if sinks is None or not kernel.computes_sinks:
            return self._attend(*arguments, options)
        from .sinks import with_sinks

        out, lse = self._attend(*arguments, options._replace(s_aux=None), return_softmax_lse=True)
        return with_sinks(out, lse, sinks)[0]


def _padded(q: Any, k: Any, v: Any, options: Options, dims: tuple[int, int]) -> tuple[tuple[Any, Any, Any], Options]:
    """Zeros behind the head dimensions, which change neither scores nor output, and the scale of the dimension without them."""
    from torch.nn.functional import pad

    q_dim, v_dim = q.shape[-1], v.shape[-1]
    if options.softmax_scale is None:
        options = options._replace(softmax_scale=q_dim**-0.5)
    extra = (0, dims[0] - q_dim)
    return (pad(q, extra), pad(k, extra), pad(v, (0, dims[1] - v_dim))), options


def _first(result: Any) -> Any:
    """The output alone: some packages return the log-sum-exp with it."""
    return result[0] if isinstance(result, (tuple, list)) else result

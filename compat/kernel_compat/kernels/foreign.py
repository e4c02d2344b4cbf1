"""Kernels made from any object with FlashAttention's functions, and the one of a name that has none."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NoReturn

from ..environment import Environment
from ..errors import KernelUnavailableError, UnsupportedFeatureError
from .adapter import adapt, takes
from .catalog import OWN
from .kernel import Kernel
from .options import Functions
from .provider import FUNCTIONS, Features, Provider

__all__ = ["ForeignKernel", "ForwardOnly"]

#: Keywords that every varlen function is called with.
_REQUIRED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")

#: The features of an object that declares none, as far as its functions take the keywords.
_EVERYTHING = replace(OWN.features, paged=True, value_head_dim=False)


class ForeignKernel(Kernel):
    """A kernel over the functions of an object. Equal to another over the same object with the same functions and features.

    Its features are those of the object's attribute `features`, a `Features`; without it, those whose keywords are
    named parameters of its functions, on any device and dtype. Raises as `as_kernel`.
    """

    def __init__(self, source: Any) -> None:
        if not any(hasattr(source, name) for name in FUNCTIONS[:2]):
            raise TypeError(f"a kernel is a name, a Kernel or an object with flash_attn_varlen_func, not {source!r}")
        raw = {name: getattr(source, name, None) for name in FUNCTIONS}
        varlen, kvcache = raw["flash_attn_varlen_func"], raw["flash_attn_with_kvcache"]
        if not callable(varlen):
            raise ValueError(
                f"{source!r} has no flash_attn_varlen_func: without it padded and packed batches can't be computed"
            )
        try:
            parameters = inspect.signature(varlen).parameters
        except (TypeError, ValueError) as error:
            raise ValueError(f"the parameters of {source!r}'s flash_attn_varlen_func can't be read: {error}") from error
        if missing := [keyword for keyword in _REQUIRED if not takes(varlen, keyword)]:
            raise ValueError(f"{source!r}'s flash_attn_varlen_func does not take {', '.join(missing)}")
        renamed = {"s_aux": "learnable_sink"} if "learnable_sink" in parameters else {}
        if kvcache is not None and takes(kvcache, "page_table", unnamed=False):
            renamed["block_table"] = "page_table"
        window = parameters["window_size"].default if "window_size" in parameters else None
        features = getattr(source, "features", None)
        declared = features if isinstance(features, Features) else None
        name = getattr(source, "__name__", None) or type(source).__name__
        provider = Provider(
            name,
            name,
            declared or _EVERYTHING,
            "",
            renamed=renamed,
            unlimited=window[0] if isinstance(window, tuple) else -1,
            bundled=True,
            declared=declared is not None,
        )
        super().__init__(name, (provider,))
        self._source, self._raw = source, raw
        self.preload(*adapt(name, raw, provider.features, provider))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ForeignKernel)
            and self._source is other._source
            and (self._raw, self.providers) == (other._raw, other.providers)
        )

    def __hash__(self) -> int:
        return id(self._source)


class ForwardOnly(Kernel):
    """The kernel of a name that was registered with a forward alone: it has features, and its functions refuse every call.

    Args:
        name: the attention name.
        features: the forward's, as far as they were declared.
    """

    def __init__(self, name: str, features: Features) -> None:
        super().__init__(name, (Provider(name, name, features, "", bundled=True),))
        self._features = features

    def _load(self, environment: Environment) -> Functions:
        if reasons := self.providers[0].unloadable_because(environment):
            raise KernelUnavailableError(self.name, reasons)

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            feature = "transformers' _flash_attention_forward, which a model calls instead of the registered forward"
            raise UnsupportedFeatureError(feature, self.name, "Register the name with a kernel, too.")

        return Functions(refuse, refuse if self.features.paged else None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForwardOnly) and (self.name, self.providers) == (other.name, other.providers)

    def __hash__(self) -> int:
        return hash(self.name)

"""What a kernel is: FlashAttention functions under one calling convention, and what they can do."""

from __future__ import annotations

import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from dataclasses import replace as dataclass_replace
from typing import Any, NamedTuple

from ..environment import KNOWN_IMPORTS, Environment, importable
from ..errors import KernelUnavailableError, UnsupportedFeatureError

__all__ = ["Features", "Functions", "Kernel", "Provider"]


@dataclass(frozen=True)
class Features:
    """What a kernel can do.

    Attributes:
        causal: causal masks, aligned to the bottom right where query and key lengths differ.
        window: sliding windows ``(left, right)``, -1 for no limit.
        softcap: ``softcap * tanh(scores / softcap)``.
        sinks: one learnable logit a head that takes part in the softmax and carries no value.
        dropout: of the attention probabilities.
        deterministic: a backward whose result doesn't vary from run to run.
        gqa: fewer key and value heads than query heads.
        varlen: sequences of different lengths packed along one dimension.
        paged: key and value cache in pages, addressed by a block table.
        backward: gradients.
        dtypes: names of the torch dtypes of query, key and value.
        devices: torch device types.
        max_head_dim: the largest head dimension, None for no limit.
        head_dim_multiple: head dimensions are padded to a multiple of this.
        value_head_dim: the value's head dimension may be smaller than the query's; it is padded where not.
        min_capability: the least CUDA compute capability, None where none is needed.
        max_capability: the greatest CUDA compute capability, None for no limit.
    """

    causal: bool = True
    window: bool = True
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    deterministic: bool = False
    gqa: bool = True
    varlen: bool = True
    paged: bool = False
    backward: bool = True
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    devices: tuple[str, ...] = ("cuda",)
    max_head_dim: int | None = 256
    head_dim_multiple: int = 1
    value_head_dim: bool = False
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None

    def names(self) -> tuple[str, ...]:
        """The names of the supported yes-or-no features."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is True)


class Functions(NamedTuple):
    """The functions of a loaded kernel, to be called with keywords.

    Shapes: query (batch, length, heads, head_dim), key and value (batch, length, kv_heads, head_dim); without the
    batch, all sequences joined along the first dimension, for varlen. The output has the query's shape with the
    value's head dimension. Keywords are FA2's: ``dropout_p``, ``softmax_scale``, ``causal``, ``window_size``,
    ``softcap``, ``deterministic``, and ``s_aux`` for sinks of shape (heads,). Varlen adds ``cu_seqlens_q``,
    ``cu_seqlens_k`` of shape (sequences + 1,), int32, ``max_seqlen_q`` and ``max_seqlen_k``. A keyword the kernel can't honour
    raises `UnsupportedFeatureError`.
    """

    flash_attn_func: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]
    flash_attn_with_kvcache: Callable[..., Any] | None


@dataclass(frozen=True)
class Provider:
    """A package that has a kernel's functions.

    Attributes:
        module: what to import.
        distribution: what to install; its presence is asked of the metadata.
        features: what it can do.
        install: a sentence with the command that installs it.
        renamed: its own names for keywords that it calls otherwise.
        unlimited: what it writes for a window side without a limit.
        refine: lowers `features` by what the imported module says of itself.
        refused: why an installed provider is not usable in an environment; empty when it is.
        bundled: at hand without an installation of its own.
    """

    module: str
    distribution: str
    features: Features
    install: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    unlimited: int | None = -1
    refine: Callable[[Any, Features], Features] = lambda module, features: features
    refused: Callable[[Environment], list[str]] = lambda environment: []
    bundled: bool = False

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why this package can't run here; empty when all is well."""
        reasons = []
        owners = environment.imports.get(self.module)
        if owners is None and self.module not in KNOWN_IMPORTS and importable(self.module.partition(".")[0]):
            owners = ()  # somebody else's package, which the environment doesn't describe
        if self.bundled:
            pass
        elif owners is None or (owners and self.distribution not in owners):
            reasons.append(f"{self.distribution} is not installed")
        else:
            reasons += self.refused(environment)
        if "torch" not in environment.packages and "torch" not in environment.imports:
            reasons.append("torch is not installed")
        if self.features.devices == ("cuda",):
            reasons += self._device_reasons(environment)
        return reasons

    def _device_reasons(self, environment: Environment) -> list[str]:
        low, high = self.features.min_capability, self.features.max_capability
        if not environment.devices:
            return ["no CUDA device is visible"]
        if any(
            (low is None or low <= device.capability) and (high is None or device.capability <= high)
            for device in environment.devices
        ):
            return []
        need = f"{low[0]}.{low[1]}" if low else "any"
        if high is not None:
            need += f" to {high[0]}.x"
        elif low is not None:
            need += " or greater"
        return [f"it needs compute capability {need}, and there is {', '.join(map(str, environment.devices))}"]


class Kernel:
    """A set of FlashAttention functions, from the first of its providers that is usable here.

    Args:
        name: what `register_attention` takes, and what error messages say.
        providers: packages in order of preference.
    """

    def __init__(self, name: str, providers: tuple[Provider, ...]) -> None:
        self.name = name
        self.providers = providers
        self._functions: Functions | None = None
        self._features: Features | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"

    def provider(self, environment: Environment) -> Provider:
        """The provider that is used in an environment: the first usable one, else the first one."""
        usable = (p for p in self.providers if not p.unavailable_because(environment))
        installed = (p for p in self.providers if p.distribution in environment.packages)
        return next(usable, None) or next(installed, None) or self.providers[0]

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why no provider can run in an environment, one reason a string; empty when one can."""
        return self.provider(environment).unavailable_because(environment)

    @property
    def features(self) -> Features:
        """What the kernel can do: as loaded, or as its provider declares it while it isn't loaded."""
        return self._features or self.features_in(Environment.detect())

    def features_in(self, environment: Environment) -> Features:
        """What it can do in an environment: as loaded, or as its provider there declares it."""
        return self._features or self.provider(environment).features

    def load(self, environment: Environment | None = None) -> Functions:
        """Import the kernel.

        Raises:
            KernelUnavailableError: it is not usable here; the message says why and what installs it.
        """
        if self._functions is None:
            with self._lock:
                if self._functions is None:
                    environment = environment or Environment.detect()
                    self._features, self._functions = self._load(self.provider(environment), environment)
        return self._functions

    def preload(self, features: Features, functions: Functions) -> None:
        """Give the kernel functions that are at hand already."""
        self._features, self._functions = features, functions

    def _load(self, provider: Provider, environment: Environment) -> tuple[Features, Functions]:
        reasons = provider.unavailable_because(environment)
        if reasons:
            raise KernelUnavailableError(self.name, reasons, provider.install)
        try:
            module = importlib.import_module(provider.module)
            raw = {f: getattr(module, f, None) for f in Functions._fields}
            if raw["flash_attn_varlen_func"] is None:
                raise ImportError(f"{provider.module} has no flash_attn_varlen_func")
        except Exception as error:  # a package built for another torch fails in any way it likes
            reason = f"{provider.distribution} is installed but does not import ({type(error).__name__}: {error})"
            raise KernelUnavailableError(self.name, [reason], provider.install) from error
        return adapt(self.name, raw, provider.refine(module, provider.features), provider)


#: The keywords of the convention that ask for a feature.
_OPTIONAL = {
    "dropout_p": "dropout",
    "window_size": "window",
    "softcap": "softcap",
    "deterministic": "deterministic",
    "s_aux": "sinks",
}


def adapt(
    name: str, raw: Mapping[str, Callable[..., Any] | None], features: Features, provider: Provider
) -> tuple[Features, Functions]:
    """Put functions with a provider's own keywords behind the convention, and trim the features to what they take."""
    varlen = raw["flash_attn_varlen_func"]
    assert varlen is not None
    missing = {
        feature for keyword, feature in _OPTIONAL.items() if not takes(varlen, provider.renamed.get(keyword, keyword))
    }
    off: dict[str, Any] = dict.fromkeys(missing, False)
    paged = features.paged and raw["flash_attn_with_kvcache"] is not None
    features = dataclass_replace(features, paged=paged, **off)
    call = _Call(name, features, provider)
    kvcache = raw["flash_attn_with_kvcache"] if features.paged else None
    dense = raw["flash_attn_func"]
    if dense is not None:
        needed = ["softmax_scale", "causal", *(k for k, feature in _OPTIONAL.items() if getattr(features, feature))]
        if not all(takes(dense, provider.renamed.get(keyword, keyword)) for keyword in needed):
            dense = None  # varlen does what it can't
    by_varlen = call.varlen(varlen)
    return features, Functions(call.dense(dense, by_varlen), by_varlen, kvcache and call.kvcache(kvcache))


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function can be called with a keyword."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return anything or keyword in parameters


class _Call:
    """Builds the functions of the convention over a provider's."""

    def __init__(self, name: str, features: Features, provider: Provider) -> None:
        self.name = name
        self.features = features
        self.renamed = provider.renamed
        self.unlimited = provider.unlimited
        self.supported = {k: getattr(features, f) for k, f in _OPTIONAL.items()}
        import torch

        self.dtypes = tuple(getattr(torch, dtype) for dtype in features.dtypes)

    def dense(self, function: Callable[..., Any] | None, varlen: Callable[..., Any]) -> Callable[..., Any]:
        def flash_attn_func(
            q: Any,
            k: Any,
            v: Any,
            dropout_p: float = 0.0,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int, int] = (-1, -1),
            softcap: float = 0.0,
            deterministic: bool = False,
            s_aux: Any = None,
        ) -> Any:
            if function is None:
                # Equal lengths are a special case of varlen.
                import torch

                batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
                starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
                packed = varlen(
                    q.flatten(0, 1),
                    k.flatten(0, 1),
                    v.flatten(0, 1),
                    cu_seqlens_q=starts * q_len,
                    cu_seqlens_k=starts * kv_len,
                    max_seqlen_q=q_len,
                    max_seqlen_k=kv_len,
                    dropout_p=dropout_p,
                    softmax_scale=softmax_scale,
                    causal=causal,
                    window_size=window_size,
                    softcap=softcap,
                    deterministic=deterministic,
                    s_aux=s_aux,
                )
                return packed.unflatten(0, (batch, q_len))
            self.check(q, k, v)
            options = self.options(dropout_p, window_size, softcap, deterministic, s_aux)
            v_dim = v.shape[-1]
            q, k, v, softmax_scale = self.padded(q, k, v, softmax_scale)
            out = _first(function(q, k, v, softmax_scale=softmax_scale, causal=causal, **options))
            return out if out.shape[-1] == v_dim else out[..., :v_dim]

        return flash_attn_func

    def varlen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def flash_attn_varlen_func(
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
            self.check(q, k, v)
            options = self.options(dropout_p, window_size, softcap, deterministic, s_aux)
            v_dim = v.shape[-1]
            q, k, v, softmax_scale = self.padded(q, k, v, softmax_scale)
            # Upstream hands the maximum on as a tensor up to 5.23; FA4 compiles for it as if it were one more
            # array and dies. Every kernel takes an int.
            same = max_seqlen_k is max_seqlen_q
            max_q = max_seqlen_q if isinstance(max_seqlen_q, int) else int(max_seqlen_q)
            max_k = max_q if same else max_seqlen_k if isinstance(max_seqlen_k, int) else int(max_seqlen_k)
            out = _first(
                function(
                    q,
                    k,
                    v,
                    cu_seqlens_q=cu_seqlens_q,
                    cu_seqlens_k=cu_seqlens_k,
                    max_seqlen_q=max_q,
                    max_seqlen_k=max_k,
                    softmax_scale=softmax_scale,
                    causal=causal,
                    **options,
                )
            )
            return out if out.shape[-1] == v_dim else out[..., :v_dim]

        return flash_attn_varlen_func

    def kvcache(self, function: Callable[..., Any]) -> Callable[..., Any]:
        block_table_name = self.renamed.get("block_table", "block_table")

        def flash_attn_with_kvcache(
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
            self.check(q, k_cache, v_cache)
            options = self.options(0.0, window_size, softcap, False, s_aux)
            return _first(
                function(
                    q,
                    k_cache,
                    v_cache,
                    k,
                    v,
                    cache_seqlens=cache_seqlens,
                    softmax_scale=softmax_scale,
                    causal=causal,
                    **{block_table_name: block_table},
                    **options,
                )
            )

        return flash_attn_with_kvcache

    def options(
        self, dropout_p: float, window_size: tuple[int, int], softcap: float | None, deterministic: bool, s_aux: Any
    ) -> dict[str, Any]:
        """The provider's keywords for what was asked; an error, or a warning once, for what it can't honour."""
        options: dict[str, Any] = {}
        supported, renamed = self.supported, self.renamed
        if dropout_p:
            if supported["dropout_p"]:
                options[renamed.get("dropout_p", "dropout_p")] = dropout_p
            else:
                _warn_once(self.name, "attention dropout", "it is not applied")
        if deterministic:
            if supported["deterministic"]:
                options[renamed.get("deterministic", "deterministic")] = True
            else:
                _warn_once(self.name, "deterministic backward", "gradients vary in their last bits")
        left, right = window_size
        left, right = -1 if left is None else left, -1 if right is None else right
        if left >= 0 or right >= 0:
            self.require("window_size", "window", "sliding windows")
            options[renamed.get("window_size", "window_size")] = (
                left if left >= 0 else self.unlimited,
                right if right >= 0 else self.unlimited,
            )
        if softcap:
            self.require("softcap", "softcap", "softcap")
            options[renamed.get("softcap", "softcap")] = softcap
        if s_aux is not None:
            self.require("s_aux", "sinks", "attention sinks")
            options[renamed.get("s_aux", "s_aux")] = s_aux
        return options

    def padded(self, q: Any, k: Any, v: Any, scale: float | None) -> tuple[Any, Any, Any, float | None]:
        """Zeros behind the head dimensions, up to what the kernel takes: they change neither scores nor output."""
        multiple = self.features.head_dim_multiple
        dim = -(-q.shape[-1] // multiple) * multiple
        v_dim = v.shape[-1] if self.features.value_head_dim else dim
        if q.shape[-1] == dim and v.shape[-1] == v_dim:
            return q, k, v, scale
        from torch.nn.functional import pad

        if scale is None:
            scale = q.shape[-1] ** -0.5
        extra = dim - q.shape[-1]
        return pad(q, (0, extra)), pad(k, (0, extra)), pad(v, (0, v_dim - v.shape[-1])), scale

    def require(self, keyword: str, feature: str, what: str) -> None:
        if not self.supported[keyword]:
            raise UnsupportedFeatureError(what, self.name, instead(self.name, feature))

    def check(self, q: Any, k: Any, v: Any) -> None:
        features = self.features
        if q.dtype not in self.dtypes:
            wanted = " or ".join(features.dtypes)
            raise UnsupportedFeatureError(
                f"{q.dtype}",
                self.name,
                f"Cast the model to {wanted}, run it under torch.autocast, or use flash_attention_reference.",
            )
        if q.device.type not in features.devices:
            raise UnsupportedFeatureError(
                f"tensors on {q.device.type!r}",
                self.name,
                f"Move the model to {' or '.join(features.devices)}, or use flash_attention_reference.",
            )
        if features.max_head_dim is not None and q.shape[-1] > features.max_head_dim:
            raise UnsupportedFeatureError(
                f"head dimension {q.shape[-1]}",
                self.name,
                f"Its largest is {features.max_head_dim}; flash_attention_reference has no limit.",
            )
        if v.shape[-1] > q.shape[-1]:
            raise UnsupportedFeatureError(
                f"a value head dimension ({v.shape[-1]}) greater than the query's ({q.shape[-1]})",
                self.name,
                "No kernel does.",
            )
        if q.shape[-2] != k.shape[-2] and not features.gqa:
            raise UnsupportedFeatureError("fewer key heads than query heads", self.name, instead(self.name, "gqa"))
        if not features.backward and (q.requires_grad or k.requires_grad or v.requires_grad):
            import torch

            if torch.is_grad_enabled():
                raise UnsupportedFeatureError(
                    "gradients", self.name, f"{instead(self.name, 'backward')} Or run it under torch.no_grad()."
                )


def instead(name: str, feature: str) -> str:
    """The sentence that says which kernels have a feature that the named one lacks."""
    from . import known_kernels

    able = [
        kernel.name
        for kernel in known_kernels().values()
        if kernel.name != name and any(getattr(provider.features, feature) for provider in kernel.providers)
    ]
    return f"Kernels that do: {', '.join(able)}." if able else "No kernel does."


_warned: set[tuple[str, str]] = set()


def _warn_once(name: str, what: str, consequence: str) -> None:
    import torch

    if (name, what) not in _warned and not torch.compiler.is_compiling():
        _warned.add((name, what))
        warnings.warn(f"{name} has no {what}: {consequence}.", stacklevel=4)


def _first(result: Any) -> Any:
    """The output alone: some packages return the log-sum-exp with it."""
    return result[0] if isinstance(result, (tuple, list)) else result

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
from ..errors import KernelUnavailableError, SeamError, UnsupportedFeatureError

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
        expected: lowers `features` by what the versions of an environment say, while the module isn't imported.
        refine: lowers `features` by what the imported module says of itself.
        functions: finds the functions of the convention in the imported module, by their names.
        refused: why an installed provider is not usable in an environment; empty when it is.
        unpaged: why it can't use a cache in pages as things stand, by the tokens in a page and the head dimension; None where
            it can.
        runs_on: whether it has a kernel for a device type that `features` doesn't name. A provider with this loads where
            there is no device at all, and refuses tensors of devices without a kernel as it is called.
        left_alone: whether it is right for a window without a limit to the right where a sequence has more queries than
            keys. FlashAttention-2 takes the number of keys for that limit, counted from the diagonal.
        bundled: at hand without an installation of its own.
        declared: whether `features` is its author's word, which holds for keywords taken by ``**kwargs`` too. Otherwise
            a function has the features whose keywords are parameters of its own.
    """

    module: str
    distribution: str
    features: Features
    install: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    unlimited: int | None = -1
    expected: Callable[[Environment, Features], Features] = lambda environment, features: features
    refine: Callable[[Any, Features], Features] = lambda module, features: features
    functions: Callable[[Any], Mapping[str, Any]] = lambda module: {
        f: getattr(module, f, None) for f in Functions._fields
    }
    refused: Callable[[Environment], list[str]] = lambda environment: []
    unpaged: Callable[[int, int], str | None] = lambda page_size, head_dim: None
    runs_on: Callable[[str], bool] | None = None
    left_alone: bool = True
    bundled: bool = False
    declared: bool = True

    def features_in(self, environment: Environment) -> Features:
        """What it can do in an environment, as far as that is known without importing it."""
        return self.expected(environment, self.features)

    def install_hint(self, environment: Environment) -> str:
        """The sentence with the command, where there is something to install."""
        return self.install if self.absent_because(environment) else ""

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why this package can't run here; empty when all is well."""
        return self.absent_because(environment) + self._no_device_because(environment)

    def unloadable_because(self, environment: Environment) -> list[str]:
        """Why its functions can't be had here; empty when they can, though perhaps for no device that is there."""
        if self.runs_on is not None and not environment.devices:
            return self.absent_because(environment)
        return self.unavailable_because(environment)

    def absent_because(self, environment: Environment) -> list[str]:
        """What isn't installed, or not as it must be."""
        reasons = []
        owners = environment.imports.get(self.module)
        if owners is None and self.module not in KNOWN_IMPORTS and importable(self.module.partition(".")[0]):
            owners = ()  # somebody else's package, which the environment doesn't describe
        if not self.bundled and (owners is None or (owners and self.distribution not in owners)):
            reasons.append(f"{self.distribution} is not installed")
        else:
            reasons += self.refused(environment)
        if "torch" not in environment.packages and "torch" not in environment.imports:
            reasons.append("torch is not installed")
        return reasons

    def _no_device_because(self, environment: Environment) -> list[str]:
        if self.features.devices != ("cuda",):
            return []
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
        #: The provider it was loaded from, and that one's version.
        self._loaded: tuple[Provider, str | None] | None = None
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
        """What it can do in an environment: as loaded, where that has the same package, or as its provider there declares it."""
        provider = self.provider(environment)
        there = (provider, environment.packages.get(provider.distribution))
        if self._features is not None and self._loaded in (None, there):
            return self._features
        return provider.features_in(environment)

    def load(self, environment: Environment | None = None) -> Functions:
        """Import the kernel.

        Raises:
            KernelUnavailableError: it is not usable here; the message says why and what installs it.
            SeamError: its package has functions that nobody has seen yet.
        """
        if self._functions is None:
            with self._lock:
                if self._functions is None:
                    environment = environment or Environment.detect()
                    provider = self.provider(environment)
                    self._features, self._functions = self._load(provider, environment)
                    self._loaded = (provider, environment.packages.get(provider.distribution))
        return self._functions

    def unpaged_because(self, page_size: int, head_dim: int) -> str | None:
        """Why it can't use a cache in pages of so many tokens, as things stand; None where it can. Loads the kernel."""
        if self.load().flash_attn_with_kvcache is None:
            return f"{self.name} has no paged cache"
        return self.provider(Environment.detect()).unpaged(page_size, head_dim)

    def preload(self, features: Features, functions: Functions) -> None:
        """Give the kernel functions that are at hand already."""
        self._features, self._functions = features, functions

    def _load(self, provider: Provider, environment: Environment) -> tuple[Features, Functions]:
        reasons = provider.unloadable_because(environment)
        if reasons:
            raise KernelUnavailableError(self.name, reasons, provider.install_hint(environment))
        try:
            module = importlib.import_module(provider.module)
            raw = provider.functions(module)
            if raw["flash_attn_varlen_func"] is None:
                raise ImportError(f"{provider.module} has no flash_attn_varlen_func")
        except SeamError:
            raise
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
    varlen, kvcache = raw["flash_attn_varlen_func"], raw["flash_attn_with_kvcache"]
    assert varlen is not None
    features = dataclass_replace(_taken(varlen, features, provider), paged=features.paged and kvcache is not None)
    call = _Call(name, features, provider)
    dense = raw["flash_attn_func"]
    if dense is not None:
        core = all(takes(dense, keyword) for keyword in ("softmax_scale", "causal"))
        if not core or _taken(dense, features, provider) != features:
            dense = None  # varlen does what it can't
    by_varlen = call.varlen(varlen)
    paged = None
    if kvcache is not None and features.paged:
        paged = _Call(name, _taken(kvcache, features, provider), provider).kvcache(kvcache)
    return features, Functions(call.dense(dense, by_varlen), by_varlen, paged)


def _taken(function: Callable[..., Any], features: Features, provider: Provider) -> Features:
    """The features without those whose keyword a function doesn't take."""
    lacking: dict[str, Any] = {
        feature: False
        for keyword, feature in _OPTIONAL.items()
        if not takes(function, provider.renamed.get(keyword, keyword), unnamed=provider.declared)
    }
    return dataclass_replace(features, **lacking)


def takes(function: Callable[..., Any], keyword: str, *, unnamed: bool = True) -> bool:
    """Whether a function can be called with a keyword.

    Args:
        unnamed: whether ``**kwargs`` counts. What a function does with such a keyword isn't known: it may ignore it.
    """
    parameters = inspect.signature(function).parameters
    anything = unnamed and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return anything or keyword in parameters


class _Call:
    """Builds the functions of the convention over a provider's."""

    def __init__(self, name: str, features: Features, provider: Provider) -> None:
        self.name = name
        self.features = features
        self.renamed = provider.renamed
        self.unlimited = provider.unlimited
        self.left_alone = provider.left_alone
        self.declared = provider.declared
        self.supported = {k: getattr(features, f) for k, f in _OPTIONAL.items()}
        import torch

        self.dtypes = tuple(getattr(torch, dtype) for dtype in features.dtypes)
        # torch.compile can't look into the dispatcher, which is what this asks.
        self.runs_on = provider.runs_on and torch.compiler.assume_constant_result(provider.runs_on)

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
                q_starts = starts * q_len
                packed = varlen(
                    q.flatten(0, 1),
                    k.flatten(0, 1),
                    v.flatten(0, 1),
                    cu_seqlens_q=q_starts,
                    # The same tensor where they are equal: torch 2.15 chooses its fastest backend by that.
                    cu_seqlens_k=q_starts if kv_len == q_len else starts * kv_len,
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
            self.check_window(causal, window_size, q.shape[1], k.shape[1])
            v_dim = v.shape[-1]
            q, k, v, softmax_scale = self.padded(q, k, v, softmax_scale)
            out = _first(function(q, k, v, softmax_scale=softmax_scale, causal=causal, **options))
            return out if out.shape[-1] == v_dim else out[..., :v_dim].contiguous()

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
            self.check_window(causal, window_size, max_q, max_k)
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
            return out if out.shape[-1] == v_dim else out[..., :v_dim].contiguous()

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
            if not self.left_alone:  # for which it takes the room that there is for keys
                room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
                self.check_window(causal, window_size, q.shape[1], room)
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
                warn_once(self.name, "attention dropout", "it is not applied")
        if deterministic:
            if supported["deterministic"]:
                options[renamed.get("deterministic", "deterministic")] = True
            else:
                warn_once(self.name, "deterministic backward", "gradients vary in their last bits")
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

    def check_window(self, causal: bool, window_size: tuple[int, int], max_q: int, max_k: int) -> None:
        left, right = window_size
        if self.left_alone or causal or left is None or left < 0 or (right is not None and right >= 0):
            return
        if max_q > max_k + 1:
            raise UnsupportedFeatureError(
                "a window without a limit to the right over more queries than keys",
                self.name,
                "Give it a limit to the right, or use flash_attention_4 or flash_attention_reference.",
            )

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
            raise UnsupportedFeatureError(
                what, self.name, self.undeclared(keyword, feature) + instead(self.name, feature)
            )

    def undeclared(self, keyword: str, feature: str) -> str:
        """The sentence that says how to declare a feature that a signature doesn't show."""
        if self.declared:
            return ""
        keyword = self.renamed.get(keyword, keyword)
        return (
            f"Its function has no parameter {keyword!r}, and **kwargs may be ignored. If it honours {keyword!r}, give the "
            f"kernel object an attribute `features`: a kernel_compat.Features with {feature}=True. "
        )

    def check(self, q: Any, k: Any, v: Any) -> None:
        features = self.features
        device = q.device.type
        if device not in features.devices and not (self.runs_on and self.runs_on(device)):
            elsewhere = f"Move the model to {' or '.join(features.devices)}, or use flash_attention_reference."
            if self.runs_on:  # which loaded though there may be no such device
                raise KernelUnavailableError(self.name, [f"it has no kernel for tensors on {device!r}"], elsewhere)
            raise UnsupportedFeatureError(f"tensors on {device!r}", self.name, elsewhere)
        if q.dtype not in self.dtypes:
            wanted = " or ".join(features.dtypes)
            raise UnsupportedFeatureError(
                f"{q.dtype}",
                self.name,
                f"Cast the model to {wanted}, run it under torch.autocast, or use flash_attention_reference.",
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

    here = Environment.detect()
    able = [
        kernel.name
        for kernel in known_kernels().values()
        if kernel.name != name and any(getattr(provider.features_in(here), feature) for provider in kernel.providers)
    ]
    return f"Kernels that do: {', '.join(able)}." if able else "No kernel does."


_warned: set[tuple[str, str]] = set()


def warn_once(name: str, what: str, consequence: str) -> None:
    """Warn that a kernel lacks something that isn't worth an error, once a process."""
    import torch

    if (name, what) not in _warned and not torch.compiler.is_compiling():
        _warned.add((name, what))
        warnings.warn(f"{name} has no {what}: {consequence}.", stacklevel=4)


def _first(result: Any) -> Any:
    """The output alone: some packages return the log-sum-exp with it."""
    return result[0] if isinstance(result, (tuple, list)) else result

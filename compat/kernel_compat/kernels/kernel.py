"""A kernel: FlashAttention functions under one calling convention, from the first of its packages that is usable here."""

from __future__ import annotations

import importlib
import threading

from ..environment import Environment
from ..errors import KernelUnavailableError, SeamError
from .adapter import adapt
from .options import Functions
from .provider import Features, Provider

__all__ = ["Kernel"]


class Kernel:
    """A set of FlashAttention functions, from the first of its providers that is usable here.

    Args:
        name: the name for `register_attention` and in error messages.
        providers: packages in order of preference.
    """

    def __init__(self, name: str, providers: tuple[Provider, ...]) -> None:
        self.name = name
        self.providers = providers
        self._functions: Functions | None = None
        self._features: Features | None = None
        #: The provider it was loaded from, its version, and the features it had there before it was imported.
        self._loaded: tuple[Provider, str | None, Features] | None = None
        #: The features of the installed version that its functions turned out not to take. Known once it is loaded.
        self.lost: tuple[str, ...] = ()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"

    def provider(self, environment: Environment) -> Provider:
        """The provider that is used in an environment: the first usable one, else the first installed one, else the first."""
        usable = (p for p in self.providers if not p.unavailable_because(environment))
        installed = (p for p in self.providers if p.distribution in environment.packages)
        return next(usable, None) or next(installed, None) or self.providers[0]

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why no provider can run in an environment, one reason a string; empty when one can."""
        return self.provider(environment).unavailable_because(environment)

    @property
    def features(self) -> Features:
        """The features as loaded, or as the provider has them here while it isn't loaded."""
        return self._features or self.features_in(Environment.detect())

    def features_in(self, environment: Environment) -> Features:
        """The features in an environment: as loaded, where that is the same package on the same kind of GPU."""
        provider = self.provider(environment)
        features = provider.features_in(environment)
        there = (provider, environment.packages.get(provider.distribution), features)
        return self._features if self._features is not None and self._loaded in (None, there) else features

    def load(self, environment: Environment | None = None) -> Functions:
        """Import the kernel.

        Raises:
            KernelUnavailableError: it is not usable here; the message says why and how to install it.
            SeamError: its package has functions with an unknown signature.
        """
        if self._functions is None:
            with self._lock:
                if self._functions is None:
                    self._functions = self._load(environment or Environment.detect())
        return self._functions

    def unpaged_because(self, page_size: int, head_dim: int) -> str | None:
        """Why it can't use a cache in pages of `page_size` tokens now; None if it can. Loads the kernel."""
        if self.load().attend_paged is None:
            return f"{self.name} has no paged cache"
        return self.provider(Environment.detect()).unpaged_because(page_size, head_dim)

    def preload(self, features: Features, functions: Functions) -> None:
        """Give the kernel functions that are imported already."""
        self._features, self._functions = features, functions

    def _load(self, environment: Environment) -> Functions:
        provider = self.provider(environment)
        if reasons := provider.unloadable_because(environment):
            raise KernelUnavailableError(self.name, reasons, provider.install_hint(environment))
        try:
            module = importlib.import_module(provider.module)
            raw = provider.functions(module)
            if "attend" not in raw and raw["flash_attn_varlen_func"] is None:
                raise ImportError(f"{provider.module} has no flash_attn_varlen_func")
        except SeamError:
            raise
        except Exception as error:  # a package built for another torch fails in any way it likes
            reason = f"{provider.distribution} is installed but does not import ({type(error).__name__}: {error})"
            raise KernelUnavailableError(self.name, [reason], provider.install) from error
        declared = provider.features_in(environment)
        refined = provider.refine(module, declared)
        self._features, functions = adapt(self.name, raw, refined, provider)
        if provider.declared:
            expected = declared if provider.bundled else refined  # a package may be built without some
            self.lost = tuple(name for name in expected.names() if not getattr(self._features, name))
        self._loaded = (provider, environment.packages.get(provider.distribution), declared)
        return functions

"""The features of a kernel, the package that provides it, and why that package can't run in an environment."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version

from ..environment import KNOWN_IMPORTS, Environment, importable
from ..errors import KernelCompatWarning
from ..versions import within

if TYPE_CHECKING:
    from .primitives import Primitives

__all__ = ["FUNCTIONS", "Features", "Limit", "Provider", "Refusal", "WarnOnce", "older"]

#: The functions of a kernel, by the names they have in FlashAttention-2.
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")

#: Features that messages call by another name.
_WORDS = {
    "window": "sliding windows",
    "open_window": "a window without a limit to the right over more queries than keys",
    "sinks": "attention sinks",
    "frozen_sinks": "attention sinks",
    "masks": "masks of any kind",
    "gqa": "fewer key heads than query heads",
    "backward": "gradients",
}


class Refusal(NamedTuple):
    """A property of a call that a kernel doesn't support.

    Attributes:
        subject: the property, in the words of messages.
        feature: the field of `Features` that says so, and that another kernel may have; ``device``, ``dtype`` and ``value_dim`` for
            those of the inputs.
        gradients: whether it is the gradients with that feature that are lacking.
    """

    subject: str
    feature: str
    gradients: bool = False


@dataclass(frozen=True)
class Features:
    """The features of a kernel.

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
        masks: any mask, and a bias of the scores.
        backward: gradients.
        forward_only: names of supported features without gradients: for ``sinks`` the gradient of the sinks, for others
            every gradient of a call that uses the feature.
        dtypes: names of the torch dtypes of query, key and value.
        devices: torch device types.
        max_head_dim: the largest head dimension, None for no limit.
        head_dims: pairs of query and value head dimensions above `max_head_dim` that are supported; smaller ones are padded
            to the first pair that holds them.
        plain_head_dims: the pairs of `head_dims` whose kernels have neither softcap nor sinks of their own.
        plain_backward_head_dims: the pairs of `head_dims` whose kernels have no gradients with softcap or with sinks of their own.
        head_dim_multiple: head dimensions are padded to a multiple of this.
        value_head_dim: the value's head dimension may be smaller than the query's; it is padded where not.
        min_capability: the least CUDA compute capability, None where none is needed.
        max_capability: the greatest CUDA compute capability, None for no limit.
        sinks_from: ``keyword`` if the package's functions take sinks; ``log-sum-exp`` if they take none, or have no gradients
            for them, and sinks are computed from the log-sum-exp that they return.
        no_backward_on: torch device types on which it has no gradients.
        right_limit: ``keys`` if a window without a limit to the right gets the number of keys for one, counted from the diagonal, as
            in FlashAttention-2; empty if it gets none.
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
    masks: bool = False
    backward: bool = True
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    devices: tuple[str, ...] = ("cuda",)
    max_head_dim: int | None = 256
    head_dim_multiple: int = 1
    value_head_dim: bool = False
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    head_dims: tuple[tuple[int, int], ...] = ()
    forward_only: tuple[str, ...] = ()
    sinks_from: str = "keyword"
    no_backward_on: tuple[str, ...] = ()
    plain_head_dims: tuple[tuple[int, int], ...] = ()
    plain_backward_head_dims: tuple[tuple[int, int], ...] = ()
    right_limit: str = ""

    @property
    def open_window(self) -> bool:
        """Windows without a limit to the right over more queries than keys."""
        return not self.right_limit

    def pair(self, head_dim: int, value_dim: int) -> tuple[int, int] | None:
        """The first pair of `head_dims` that holds these; None for head dimensions up to `max_head_dim`, and where none does."""
        if self.max_head_dim is None or head_dim <= self.max_head_dim:
            return None
        return next((pair for pair in self.head_dims if head_dim <= pair[0] and value_dim <= pair[1]), None)

    @property
    def frozen_sinks(self) -> bool:
        """Sinks that need no gradient."""
        return self.sinks

    def padded_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """The head dimensions of query and value that supported ones are padded to."""
        if (pair := self.pair(head_dim, value_dim)) is not None:
            return pair
        head_dim, value_dim = (
            -(-dim // self.head_dim_multiple) * self.head_dim_multiple for dim in (head_dim, value_dim)
        )
        return head_dim, value_dim if self.value_head_dim else head_dim

    def refusals(self, required: Collection[str], pair: tuple[int, int] | None = None) -> Iterator[Refusal]:
        """What of the required features is not supported.

        With ``backward`` among them, a feature that has no gradients counts as not supported.

        Args:
            pair: the pair of `head_dims` that a call is padded to; None for head dimensions up to `max_head_dim`.
        """
        required = set(required)
        if not self.window:  # which is the reason then
            required.discard("open_window")
        for name in sorted(required):
            if not getattr(self, name):
                yield Refusal(self.word(name), name)
        of_sinks, computed = required & {"sinks", "frozen_sinks"}, self.sinks_from == "log-sum-exp"
        # The log-sum-exp can't know the mask of dropout.
        if computed and self.sinks and self.dropout and of_sinks and "dropout" in required:
            yield Refusal("attention dropout beside sinks", "sinks_from")
        gradients = "backward" in required and self.backward
        for name in sorted(required & set(self.forward_only)) if gradients else ():
            if getattr(self, name):
                yield Refusal(f"gradients of {self.word(name)}", name, gradients=True)
        if pair in self.plain_head_dims or (pair in self.plain_backward_head_dims and "backward" in required):
            kind = "" if pair in self.plain_head_dims else "gradients of "
            for name in sorted((required & {"softcap"}) | (set() if computed else of_sinks)):
                yield Refusal(f"{kind}{self.word(name)} with head dimensions {pair}", "plain_head_dims")

    def names(self) -> tuple[str, ...]:
        """The names of the supported yes-or-no features."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is True)

    def lacking(self, required: Collection[str]) -> list[str]:
        """The required features that are not supported, as messages name them: see `refusals`."""
        return [refusal.subject for refusal in self.refusals(required)]

    @classmethod
    def of(cls, declared: Features | Collection[str]) -> Features:
        """`Features` as they are, or those with exactly these names, for any device, dtype and head dimension.

        Raises:
            TypeError: `declared` is a single string or no collection.
            ValueError: a name is that of no feature.
        """
        if isinstance(declared, Features):
            return declared
        named = cls.checked_names(declared, "features")
        values: dict[str, Any] = {name: name in named for name in cls._known()}
        dtypes = ("bfloat16", "float16", "float32", "float64")
        return cls(**values, dtypes=dtypes, devices=("cuda", "cpu"), max_head_dim=None)

    @classmethod
    def checked_names(cls, names: Collection[str], argument: str) -> Collection[str]:
        """The names of features that an argument has.

        Raises:
            TypeError: they are a single string or no collection.
            ValueError: a name is that of no feature.
        """
        if isinstance(names, str):
            raise TypeError(f"{argument} takes a collection of features, not the string {names!r}")
        if not isinstance(names, Collection):
            raise TypeError(f"{argument} takes a collection of features, not {names!r}")
        if unknown := sorted(map(repr, set(names) - set(cls._known()))):
            raise ValueError(f"no such features: {', '.join(unknown)}; there are: {', '.join(cls._known())}")
        return names

    @classmethod
    def _known(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.type in (bool, "bool")]

    @staticmethod
    def word(feature: str) -> str:
        """The name of a feature in messages."""
        return _WORDS.get(feature, feature)


def older(version: Version, bound: str) -> bool:
    """Whether a version comes before `bound`, by `within`."""
    return within(version, f"<{bound}")


@dataclass(frozen=True)
class Limit:
    """Features that differ in older versions of a package, on some GPUs, or in older versions on some GPUs.

    Attributes:
        changes: values of the fields of `Features` that differ. Where several limits change a field, the last one counts.
        forward_only: names of features without gradients, besides those of other limits.
        before: the limit holds for versions before this one; empty for all versions.
        capabilities: the limit holds on GPUs of these major compute capabilities; empty for all GPUs.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    forward_only: tuple[str, ...] = ()
    before: str = ""
    capabilities: tuple[int, ...] = ()

    def holds(self, version: Version | None, capabilities: Collection[int]) -> bool:
        """Whether it holds for a version, None for an unknown one, on any of some major compute capabilities."""
        if self.before and (version is None or not older(version, self.before)):
            return False
        return not self.capabilities or not set(self.capabilities).isdisjoint(capabilities)


@dataclass(frozen=True)
class Provider:
    """A package that has a kernel's functions.

    Attributes:
        module: the module to import.
        distribution: the distribution that ships it.
        features: the features of its newest version on the GPUs without a limit.
        install: a sentence with the command that installs it.
        limits: features that differ by version and GPU.
        minimum: the oldest supported version and the reason; None if every version is supported.
        renamed: the package's keyword for a keyword of FlashAttention-2.
        unlimited: the package's value for a window side without a limit.
        bundled: whether the module comes with torch or with this library.
        declared: whether `features` holds for keywords taken by ``**kwargs`` too. Otherwise a function has the features whose
            keywords are among its named parameters.
        refine: called with the imported module and its features; returns the features that the module was built with.
        functions: called with the imported module; returns its functions, by their names in FlashAttention-2. A kernel of this
            library's own has an `options.Attend` under ``attend`` instead.
        takes_rows: whether such an `Attend` takes calls without lengths.
        unpaged_because: called with a page size and a head dimension; returns why such pages can't be used, None if they can.
        runs_on: called with a device type that `features` doesn't name; returns whether there is a kernel for it.
        primitives: returns the functions below its autograd functions, None if it has none; called once it is imported.
        traced: whether torch.compile can trace its functions. Otherwise it calls the primitives, as one operator.
    """

    module: str
    distribution: str
    features: Features
    install: str
    limits: tuple[Limit, ...] = ()
    minimum: tuple[str, str] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    unlimited: int | None = -1
    bundled: bool = False
    declared: bool = True
    refine: Callable[[Any, Features], Features] = lambda module, features: features
    functions: Callable[[Any], Mapping[str, Any]] = lambda module: {f: getattr(module, f, None) for f in FUNCTIONS}
    takes_rows: bool = True
    unpaged_because: Callable[[int, int], str | None] = lambda page_size, head_dim: None
    runs_on: Callable[[str], bool] | None = None
    primitives: Callable[[], Primitives | None] = lambda: None
    traced: bool = True

    def features_in(self, environment: Environment) -> Features:
        """The features of the installed version on the GPUs of an environment; a limit of one GPU counts for all."""
        version = environment.version(self.distribution)
        capabilities = {device.capability[0] for device in environment.devices}
        changes: dict[str, Any] = {}
        forward_only = dict.fromkeys(self.features.forward_only)
        for limit in self.limits:
            if limit.holds(version, capabilities):
                changes.update(limit.changes)
                forward_only.update(dict.fromkeys(limit.forward_only))
        return replace(self.features, **changes, forward_only=tuple(forward_only))

    def install_hint(self, environment: Environment) -> str:
        """The sentence with the command, where there is something to install: not where another package hides the installed one."""
        reasons = self.absent_because(environment)
        return self.install if reasons and not any(" hides " in reason for reason in reasons) else ""

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why this package can't run in an environment; empty where it can."""
        return self.absent_because(environment) + self.no_device_because(environment)

    def unloadable_because(self, environment: Environment) -> list[str]:
        """Why this package can't be loaded in an environment: without any device it can, for a model that trains elsewhere."""
        return self.unavailable_because(environment) if environment.devices else self.absent_because(environment)

    def absent_because(self, environment: Environment) -> list[str]:
        """What is missing, too old or overwritten in an environment."""
        reasons = []
        owners = environment.imports.get(self.module)
        if owners is None and self.module not in KNOWN_IMPORTS and importable(self.module.partition(".")[0]):
            owners = ()  # a package that the environment doesn't describe
        own = f"{self.module.replace('.', '/')} of {self.distribution}"
        hidden = [problem for problem in environment.problems if f" hides {own} " in problem]
        if not self.bundled and (owners is None or (owners and self.distribution not in owners)):
            reasons += hidden or [f"{self.distribution} is not installed"]
        else:
            version = environment.version(self.distribution)
            if self.minimum is not None and version is not None and older(version, self.minimum[0]):
                reasons.append(f"{self.distribution} {version} is older than {self.minimum[0]}, {self.minimum[1]}")
            reasons += [problem for problem in environment.problems if f"has overwritten {own}" in problem]
        if "torch" not in environment.packages and "torch" not in environment.imports:
            reasons.append("torch is not installed")
        return reasons

    def no_device_because(self, environment: Environment) -> list[str]:
        """Why no device of an environment will do."""
        if self.features.devices != ("cuda",):
            return []
        if not environment.devices:
            return ["no CUDA device is visible"]
        features = self.features_in(environment)
        low, high = features.min_capability or (0, 0), features.max_capability
        if any(low <= device.capability and (not high or device.capability <= high) for device in environment.devices):
            return []
        need = f"{low[0]}.{low[1]} " + (f"to {high[0]}.x" if high else "or greater")
        return [f"it needs compute capability {need}, and there is {', '.join(map(str, environment.devices))}"]


class WarnOnce:
    """Warns once about each feature that a kernel lacks and that is not worth an error."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._lacking: set[str] = set()

    def __call__(self, lacking: str, consequence: str) -> None:
        """Warn, unless this feature was warned about before. Does nothing under torch.compile."""
        import torch

        if torch.compiler.is_compiling() or lacking in self._lacking:
            return
        self._lacking.add(lacking)
        warnings.warn(f"{self._kernel} has no {lacking}: {consequence}.", KernelCompatWarning, stacklevel=5)

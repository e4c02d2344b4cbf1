"""One kernel of several: each call goes to the first of them that computes exactly what it asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from ..environment import Environment
from ..errors import KernelCompatWarning, KernelUnavailableError, UnsupportedFeatureError
from .adapter import Functions
from .catalog import REFERENCE
from .kernel import Kernel
from .needs import Needs, is_open, unmet
from .provider import Features

__all__ = ["LayeredKernel"]


class LayeredKernel(Kernel):
    """A kernel that gives each call to the first of its members that meets the call's needs.

    Equal to another of the same name and members. The reference kernel is used for tensors on a CPU alone, unless it is the only
    member.

    Args:
        name: the name in messages.
        members: kernels in order of preference. Those that can't run here are left out; one has to.
    """

    def __init__(self, name: str, members: Sequence[Kernel]) -> None:
        if not members:
            raise ValueError("a list of kernels must not be empty")
        super().__init__(name, tuple(provider for member in members for provider in member.providers))
        self.members = tuple(members)
        self._chosen: dict[Needs, Kernel] = {}
        #: Members whose package is there and doesn't import, with the error.
        self._broken: dict[Kernel, KernelUnavailableError] = {}

    @property
    def chosen(self) -> dict[Needs, Kernel]:
        """The member of each kind of call so far."""
        return dict(self._chosen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayeredKernel) and (self.name, self.members) == (other.name, other.members)

    def __hash__(self) -> int:
        return hash((self.name, self.members))

    def usable(self, environment: Environment) -> list[Kernel]:
        """The members that can run in an environment, without those that couldn't be loaded."""
        return [m for m in self.members if m not in self._broken and not m.unavailable_because(environment)]

    def unavailable_because(self, environment: Environment) -> list[str]:
        """Why no member can run in an environment; empty when one can."""
        if self.usable(environment):
            return []
        return [
            f"{member.name}: {reason}"
            for member in self.members
            for reason in (
                self._broken[member].reasons if member in self._broken else member.unavailable_because(environment)
            )
        ]

    def features_in(self, environment: Environment) -> Features:
        """The features that at least one usable member has."""
        every = [member.features_in(environment) for member in self.usable(environment) or self.members]
        merged: dict[str, Any] = {
            f.name: any(getattr(one, f.name) for one in every) for f in fields(Features) if f.type == "bool"
        }
        merged["dtypes"] = tuple(dict.fromkeys(dtype for one in every for dtype in one.dtypes))
        merged["devices"] = tuple(dict.fromkeys(device for one in every for device in one.devices))
        largest = [one.max_head_dim for one in every]
        merged["max_head_dim"] = None if None in largest else max(size for size in largest if size is not None)
        merged["right_limit"] = "" if any(one.open_window for one in every) else every[0].right_limit
        forward_only = set.intersection(*(set(one.forward_only) for one in every))
        return replace(
            every[0], **merged, forward_only=tuple(sorted(forward_only)), min_capability=None, max_capability=None
        )

    @property
    def features(self) -> Features:
        """The features that at least one usable member has here."""
        return self.features_in(Environment.detect())

    def member_for(self, needs: Needs, environment: Environment) -> tuple[Kernel | None, list[str]]:
        """The first member that meets the needs in an environment, None if none does; and what those before it lack."""
        members = self.usable(environment) or list(self.members)
        reasons: list[str] = []
        for member in members:
            reason = unmet(member.features_in(environment), needs)
            if not reason and needs.page_size:
                reason = member.unpaged_because(needs.page_size, needs.head_dim) or ""
            if not reason and member.name == REFERENCE and needs.device != "cpu" and len(members) > 1:
                reason = "for tensors on a CPU alone"
            if not reason:
                return member, reasons
            reasons.append(f"{member.name}: {reason}")
        return None, reasons

    def choose(self, needs: Needs) -> Kernel:
        """The first member that meets the needs; loads it.

        Determinism and dropout that no member has are left out: the member warns.

        Raises:
            UnsupportedFeatureError: none does; the message says what each lacks.
        """
        if needs not in self._chosen:
            environment = Environment.detect()
            self._load_members(environment)
            found, reasons = self.member_for(needs, environment)
            for less in ({"deterministic"}, {"dropout"}, {"deterministic", "dropout"}):
                if found is None:
                    found, _ = self.member_for(needs._replace(features=needs.features - less), environment)
            if found is None:
                raise UnsupportedFeatureError(str(needs), self.name, f"{'; '.join(reasons)}.")
            self._chosen[needs] = found
        return self._chosen[needs]

    def _load_members(self, environment: Environment) -> None:
        """Load every member that can run: a build of a package may lack features."""
        for member in self.usable(environment):
            try:
                member.load(environment)
            except KernelUnavailableError as error:
                self._broken[member] = error
                warnings.warn(f"{self.name} goes on without {member.name}: {error}", KernelCompatWarning, stacklevel=2)

    def _load(self, environment: Environment) -> Functions:
        self._load_members(environment)
        # Without any device, members that would run on one: each call is refused.
        there = (m for m in self.members if not m.provider(environment).unloadable_because(environment))
        members = self.usable(environment) or [m for m in there if m not in self._broken]
        if not members:
            raise KernelUnavailableError(self.name, self.unavailable_because(environment))
        features = [member.features_in(environment) for member in members]
        return Functions(
            self._dispatch("flash_attn_func"),
            self._dispatch("flash_attn_varlen_func"),
            self._dispatch("flash_attn_with_kvcache", "paged") if any(f.paged for f in features) else None,
            self._dispatch("masked_attention", "masks") if any(f.masks for f in features) else None,
        )

    def unpaged_because(self, page_size: int, head_dim: int) -> str | None:
        """Why no usable member can use a cache in pages of `page_size` tokens now; None if one can."""
        reasons = [member.unpaged_because(page_size, head_dim) for member in self.usable(Environment.detect())]
        return next(
            (None for reason in reasons if reason is None),
            next(filter(None, reasons), f"{self.name} has no paged cache"),
        )

    def _dispatch(self, function: str, *features: str) -> Callable[..., Any]:
        import torch

        def index(
            head_dim: int, value_dim: int, dtype: str, device: str, features: tuple[str, ...], page_size: int
        ) -> int:
            return self.members.index(
                self.choose(Needs(head_dim, value_dim, dtype, device, frozenset(features), page_size))
            )

        untraced = torch.compiler.assume_constant_result(index)  # it looks for packages and loads them

        def call(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
            member = self.members[untraced(*_needs(q, k, v, options, features))]
            return getattr(member.load(), function)(q, k, v, *args, **options)

        call.__name__ = function
        return call


def _needs(q: Any, k: Any, v: Any, options: dict[str, Any], features: tuple[str, ...]) -> tuple[Any, ...]:
    """The fields of a call's `Needs`, as constants that torch.compile can pass on."""
    import torch

    left, right = window = options.get("window_size") or (-1, -1)
    pages = options.get("block_table")
    lengths = (q.shape[1], k.shape[1] * (1 if pages is None else pages.shape[1])) if q.ndim == 4 else (0, 0)
    longest = (options.get("max_seqlen_q", lengths[0]), options.get("max_seqlen_k", lengths[1]))
    tensors = (q, k, v, options.get("s_aux"), options.get("bias"))
    backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    asked = {
        "window": (left is not None and left >= 0) or (right is not None and right >= 0),
        "open_window": is_open(bool(options.get("causal")), window, longest),
        "softcap": bool(options.get("softcap")),
        "sinks": options.get("s_aux") is not None,
        "dropout": bool(options.get("dropout_p")),
        "gqa": q.shape[-2] != k.shape[-2],
        "backward": backward,
        "deterministic": bool(options.get("deterministic")) and backward,
    }
    used = (*features, *[feature for feature, needed in asked.items() if needed])
    page_size = 0 if pages is None else k.shape[1]
    return (q.shape[-1], v.shape[-1], str(q.dtype).removeprefix("torch."), q.device.type, used, page_size)

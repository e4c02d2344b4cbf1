"""One kernel of several: each call goes to the first of them that computes exactly what it asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from ..environment import Environment
from ..errors import KernelCompatWarning, KernelUnavailableError, UnsupportedFeatureError
from .catalog import REFERENCE
from .kernel import Kernel
from .needs import Needs, unmet
from .options import Attend, AttendPaged, Functions, Lengths, Mask, Options
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
        self.members: tuple[Kernel, ...] = tuple(
            part for member in members for part in (member.members if isinstance(member, LayeredKernel) else (member,))
        )
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
        members = self.usable(environment) or list(self.members)
        if environment.devices and len(members) > 1:
            members = [member for member in members if member.name != REFERENCE]
        every = [member.features_in(environment) for member in members]
        merged: dict[str, Any] = {
            f.name: any(getattr(features, f.name) for features in every) for f in fields(Features) if f.type == "bool"
        }
        merged["dtypes"] = tuple(dict.fromkeys(dtype for features in every for dtype in features.dtypes))
        merged["devices"] = tuple(dict.fromkeys(device for features in every for device in features.devices))
        largest = [features.max_head_dim for features in every]
        merged["max_head_dim"] = None if None in largest else max(size for size in largest if size is not None)
        merged["right_limit"] = "" if any(features.open_window for features in every) else every[0].right_limit
        merged["sinks_from"] = next((f.sinks_from for f in every if f.sinks_from == "keyword"), every[0].sinks_from)
        merged["no_backward_on"] = tuple(set.intersection(*(set(f.no_backward_on) for f in every)))
        # Of what some member has, but none with gradients.
        merged["forward_only"] = tuple(
            sorted(
                name
                for name, has in merged.items()
                if has is True
                and merged["backward"]
                and name != "backward"
                and not any(getattr(f, name) and f.backward and name not in f.forward_only for f in every)
            )
        )
        return replace(every[0], **merged, min_capability=None, max_capability=None)

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
            member, reasons = self.member_for(needs, environment)
            for less in ({"deterministic"}, {"dropout"}, {"deterministic", "dropout"}):
                if member is None:
                    member, _ = self.member_for(needs._replace(features=needs.features - less), environment)
            if member is None:
                raise UnsupportedFeatureError(str(needs), self.name, f"{'; '.join(reasons)}.")
            self._chosen[needs] = member
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
        paged = self._attend_paged() if any(f.paged for f in features) else None
        return Functions(self._attend(), paged, any(f.masks for f in features))

    def unpaged_because(self, page_size: int, head_dim: int) -> str | None:
        """Why no usable member can use a cache in pages of `page_size` tokens now; None if one can."""
        reasons = [member.unpaged_because(page_size, head_dim) for member in self.usable(Environment.detect())]
        return next(
            (None for reason in reasons if reason is None),
            next(filter(None, reasons), f"{self.name} has no paged cache"),
        )

    def _member(self) -> Callable[[Needs], Functions]:
        """The function that returns the functions of the member for a call's needs; torch.compile takes its choice as a constant."""
        import torch

        def index(*fields: Any) -> int:
            head_dim, value_dim, dtype, device, features, page_size = fields
            return self.members.index(
                self.choose(Needs(head_dim, value_dim, dtype, device, frozenset(features), page_size))
            )

        untraced = torch.compiler.assume_constant_result(index)  # it looks for packages and loads them

        def member(needs: Needs) -> Functions:
            if not torch.compiler.is_compiling():
                return self.choose(needs).load()
            head_dim, value_dim, dtype, device, features, page_size = needs
            number: int = untraced(head_dim, value_dim, dtype, device, tuple(features), page_size)
            return self.members[number].load()

        return member

    def _attend(self) -> Attend:
        member = self._member()

        def attend(
            q: Any, k: Any, v: Any, options: Options, lengths: Lengths | None = None, mask: Mask | None = None
        ) -> Any:
            functions = member(Needs.of(q, k, v, options, lengths, mask))
            return functions.attend(q, k, v, options, lengths, mask)

        return attend

    def _attend_paged(self) -> AttendPaged:
        member = self._member()

        def attend_paged(
            q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, block_table: Any, options: Options
        ) -> Any:
            functions = member(Needs.of_pages(q, k_cache, v_cache, block_table, options))
            assert functions.attend_paged is not None
            return functions.attend_paged(q, k_cache, v_cache, k, v, cache_seqlens, block_table, options)

        return attend_paged

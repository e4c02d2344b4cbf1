"""Shims: the replacements that one upstream release needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from packaging.utils import canonicalize_name

from ..environment import Environment
from ..gates import in_order
from ..versions import within
from .seam import Seam
from .swap import Change

__all__ = ["Shim", "discover", "each"]

ENTRY_POINT_GROUP = "kernel_compat.shims"


@dataclass(frozen=True)
class Shim:
    """A version range, a reason, the seams that differ there and their replacements.

    Ship one by naming it, or a tuple of them, in the entry-point group ``kernel_compat.shims``.

    Attributes:
        name: unique; the name that `install(skip=[...])` takes.
        distribution: the distribution whose releases `versions` selects, e.g. ``"transformers"``.
        versions: a PEP 440 specifier set, read by `kernel_compat.versions.within`: a pre-release counts as its release.
        reason: the fault of upstream without it, in a sentence.
        seams: all attributes that it replaces.
        replace: called with the originals by seam name once every seam is verified; returns the replacements
            under the same names. It must change nothing itself: the installation does the swapping.
        unneeded_because: returns why the shim has nothing to do in an environment its versions match, or None.
        complete: does the rest, where replacing attributes is not enough: called once they are replaced, and returns the
            function that undoes it, called before they are restored. That one returns None, or the `swap.Change`s that other
            code has overwritten since.
        on_import: applies it once other code has imported the modules of its seams, which `install` doesn't import then: for a
            framework that takes seconds to import, and is in many environments whose programs don't use it.
        protects: the calls that could be silently wrong without it, in words. If it can't be applied, its seams refuse these calls
            instead. Empty for a shim whose absence is an error of upstream's.
        upstream: issues and pull requests (``"huggingface/transformers#44559"``), or the release and the function, that show
            why it is needed.
        delete_when: the condition under which it can be deleted.
    """

    name: str
    distribution: str
    versions: str
    reason: str
    seams: tuple[Seam, ...]
    replace: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    unneeded_because: Callable[[Environment], str | None] = lambda environment: None
    complete: Callable[[], Callable[[], Iterable[Change] | None]] = lambda: lambda: None
    on_import: bool = False
    protects: str = ""
    upstream: str = ""
    delete_when: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "distribution", canonicalize_name(self.distribution))

    def seams_for(self, version: str) -> tuple[Seam, ...]:
        """The seams that a release of the distribution has."""
        return tuple(seam for seam in self.seams if seam.applies_to(version))

    def not_needed(self, environment: Environment) -> str | None:
        """Why this shim doesn't apply to an environment, or None where it does."""
        version = environment.packages.get(self.distribution)
        if version is None:
            return f"{self.distribution} is not installed"
        if environment.version(self.distribution) is None:
            return f"the version of {self.distribution} can't be read: {version!r}"
        if not within(version, self.versions):
            return f"{self.distribution} {version} is not in {self.versions}"
        return self.unneeded_because(environment)


def each(replacement_of: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A shim's `replace` that makes each replacement of its original alone."""
    return lambda originals: {name: replacement_of(original) for name, original in originals.items()}


def _has_own() -> bool:
    """Whether the metadata of this library is there, with its shims."""
    try:
        own = distribution("kernel-compat").entry_points
    except PackageNotFoundError:
        return False
    return any(point.group == ENTRY_POINT_GROUP for point in own)


def discover(points: Iterable[EntryPoint] | None = None) -> tuple[list[Shim], dict[str, str]]:
    """Load all shims of all installed distributions.

    Args:
        points: the entry points; None for those of the group ``kernel_compat.shims`` in this environment.

    Returns:
        The shims in a stable order, and the error by name of each entry point that could not be loaded; of ``kernel-compat``, where its
        own metadata isn't there.
    """
    shims: dict[str, Shim] = {}
    broken: dict[str, str] = {}
    if points is None:
        points = entry_points(group=ENTRY_POINT_GROUP)
        if not _has_own():
            broken["kernel-compat"] = "it has no metadata here, as it is imported from a folder. Install it"
    for point in in_order(points):
        try:
            loaded = point.load()
            for shim in (loaded,) if isinstance(loaded, Shim) else tuple(loaded):
                if not isinstance(shim, Shim):
                    raise TypeError(f"{point.value} holds {shim!r}, which is not a Shim")
                if shims.setdefault(shim.name, shim) is not shim:
                    raise ValueError(f"{point.value} defines a second shim named {shim.name!r}")
        except Exception as error:  # another project's package; ours must go on
            broken[point.name] = f"{type(error).__name__}: {error}"
    return list(shims.values()), broken

"""Plan, verify every seam, then swap; and back again."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from types import ModuleType
from typing import Literal

from packaging.version import Version

from ..attention import registry as names
from ..environment import Environment
from ..errors import KernelCompatError, SeamError
from ..releases import TRANSFORMERS, minors
from .seam import Located, Shim, swap

__all__ = ["Report", "ShimReport", "install", "installed", "status", "uninstall"]

ENTRY_POINT_GROUP = "kernel_compat.shims"

#: The minor releases of transformers that the shims were written against and are tested on.
TESTED_TRANSFORMERS = tuple(map(Version, minors(TRANSFORMERS)))

State = Literal["applied", "pending", "not needed", "skipped", "failed"]


@dataclass(frozen=True)
class ShimReport:
    """What became of one shim.

    Attributes:
        name: of the shim, or of the entry point that could not be loaded.
        state: ``applied``; ``pending`` (applies here, `install()` hasn't been called); ``not needed``;
            ``skipped`` (asked for); ``failed`` (nothing of it is in place).
        reason: why it exists where it is applied or pending, and why not where it isn't.
        seams: the attributes that it replaces here, or would.
        foreign: of these, the ones somebody else has replaced since.
    """

    name: str
    state: State
    reason: str
    seams: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What `install()` did, or would do.

    Attributes:
        environment: what it was decided on.
        installed: whether `install()` is in force.
        shims: one entry a shim.
        attention: state by registered attention name: ``"available"``, or why transformers doesn't know it.
        left_alone: after `uninstall()`, what others had patched since and still is theirs.
        torch_flash_backend: what torch's own flash attention runs on in this process (``"FA3"``, ``"FA4"``), None for the
            FlashAttention-2 it is built with.
    """

    environment: Environment
    installed: bool
    shims: tuple[ShimReport, ...]
    attention: dict[str, str] = field(default_factory=dict)
    left_alone: tuple[str, ...] = ()
    torch_flash_backend: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing failed: no shim, and no registered attention name."""
        pending = ("available", "pending")
        return all(s.state != "failed" for s in self.shims) and all(s in pending for s in self.attention.values())

    def __getitem__(self, shim: str) -> ShimReport:
        for entry in self.shims:
            if entry.name == shim:
                return entry
        raise KeyError(shim)


@dataclass
class _Applied:
    shim: Shim
    seams: list[Located]
    undo: Callable[[], None] = lambda: None


class _State:
    """Of this process: what is in place. Changed under the lock alone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed = False
        self.skip: frozenset[str] = frozenset()
        self.unproven: str | None = None
        self.applied: dict[str, _Applied] = {}
        self.failed: dict[str, str] = {}
        # Seams we left to somebody's patch, by shim: ours again as soon as they take it back.
        self.left: list[tuple[str, Located]] = []
        # `installed()` blocks that are open, and whether the first found nothing installed.
        self.blocks = 0
        self.blocks_own = False


_state = _State()


#: What `install(unproven=...)` takes.
UNPROVEN = ("warn", "refuse", "allow")


def install(*, skip: Collection[str] = (), unproven: str | None = None) -> Report:
    """Apply every shim this environment needs and make the registered attention names known to transformers.

    Imports the upstream modules whose seams it replaces. Each shim is applied whole or not at all: one that finds
    a seam missing or changed is reported as failed, and the others still apply. Calling it again is free and
    applies what has become applicable since; shims that are in place stay as they are.

    Args:
        skip: names of shims to leave out, as `status()` lists them. One that an earlier call applied is undone.
        unproven: what happens when a model is loaded under a registered name whose type can't be proven to compute what it
            computes with eager attention: ``"warn"``, ``"refuse"`` or ``"allow"``. Types that the library was tested on are
            in its table; others are proven at load on a tiny model of their own class, once, which takes some seconds and is
            kept in the user's cache. ``"allow"`` leaves that out. By default what an earlier call said, or else the environment
            variable ``KERNEL_COMPAT_UNPROVEN``, or else ``"warn"``.

    Returns:
        A report: every shim with its state and the reason.

    Raises:
        ValueError: `skip` names a shim that doesn't exist, or `unproven` is none of the three.
        TypeError: `skip` is a single string.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip takes a list of shim names, not the string {skip!r}")
    if unproven not in (None, *UNPROVEN):
        raise ValueError(f"unproven must be one of {', '.join(UNPROVEN)}, not {unproven!r}")
    skip = frozenset(skip)
    shims, broken = discover()
    unknown = sorted(map(repr, skip - {shim.name for shim in shims} - set(broken)))
    if unknown:
        known = ", ".join(shim.name for shim in shims)
        raise ValueError(f"skip names unknown shims: {', '.join(unknown)}; there are: {known or 'none'}")
    environment = _environment(shims)
    _warn_untested(environment)
    needed = [shim for shim in shims if shim.name not in skip and _unapplied(shim, environment).state == "pending"]
    # Imports the modules before the lock is taken: an import waits for other threads' imports, and one of those may
    # wait for the lock. What is located counts only once it is located again under the lock.
    for shim in needed:
        _locate(shim, environment)
    with _state.lock:
        _undo([name for name in _state.applied if name in skip])
        _reclaim()
        _state.skip = skip
        _state.unproven = unproven or _state.unproven
        _state.failed = {}
        before = set(_state.applied)
        try:
            for shim in needed:
                if shim.name in _state.applied:
                    continue
                outcome = _locate(shim, environment)
                if isinstance(outcome, KernelCompatError):
                    _state.failed[shim.name] = str(outcome)
                    continue
                try:
                    _apply(shim, outcome)
                except Exception as error:
                    _state.failed[shim.name] = f"{type(error).__name__}: {error}"
        finally:  # by Ctrl-C too: the next call takes what is in place for whole
            _rebind([name for name in _state.applied if name not in before])
        _state.installed = True
        if "transformers" in environment.packages:
            names.publish()
        return _report(environment, shims, broken)


def unproven() -> str:
    """What happens to models that can't be proven: as `install` was told, or by the environment."""
    said = _state.unproven or os.environ.get("KERNEL_COMPAT_UNPROVEN") or "warn"
    if said not in UNPROVEN:
        raise ValueError(f"KERNEL_COMPAT_UNPROVEN must be one of {', '.join(UNPROVEN)}, not {said!r}")
    return said


def uninstall() -> Report:
    """Put back the very objects that were there before `install()`, and withdraw the registered attention names.

    An attribute that somebody else has patched since is left as they made it; the report's `left_alone` says so.
    """
    shims, broken = discover()
    with _state.lock:
        _state.installed = False  # first: a name registered from now on isn't published any more
        left = names.withdraw()
        _undo(list(_state.applied))
        _reclaim()
        left += dict.fromkeys(f"{seam.seam.target} (shim {name})" for name, seam in _state.left)
        _state.skip = frozenset()
        _state.unproven = None
        _state.failed = {}
        return replace(_report(_environment(shims), shims, broken), left_alone=tuple(left))


def status() -> Report:
    """The report of `install()` as things stand now; changes nothing and imports no framework."""
    shims, broken = discover()
    with _state.lock:
        return _report(_environment(shims), shims, broken)


@contextmanager
def installed(*, skip: Collection[str] = (), unproven: str | None = None) -> Iterator[Report]:
    """`install()` for the length of a ``with`` block; of several that overlap, in one thread or many, the last uninstalls.

    Inside another installation it changes nothing on leaving.
    """
    with _state.lock:
        outer = _state.skip if _state.installed else None
        if not _state.blocks:
            _state.blocks_own = not _state.installed
        _state.blocks += 1
    try:
        yield install(skip=skip, unproven=unproven)
    finally:
        with _state.lock:
            _state.blocks -= 1
            if not _state.blocks and _state.blocks_own:
                uninstall()
            elif outer is not None and outer != _state.skip:
                install(skip=outer)


def discover() -> tuple[list[Shim], dict[str, str]]:
    """All shims of all installed distributions in a stable order, and the entry points that failed, with the error."""
    shims: dict[str, Shim] = {}
    broken: dict[str, str] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        try:
            loaded = point.load()
            for shim in (loaded,) if isinstance(loaded, Shim) else tuple(loaded):
                if not isinstance(shim, Shim):
                    raise TypeError(f"{point.value} holds {shim!r}, which is not a Shim")
                if shims.setdefault(shim.name, shim) is not shim:
                    raise ValueError(f"{point.value} defines a second shim named {shim.name!r}")
        except Exception as error:  # somebody else's package; ours must go on
            broken[point.name] = f"{type(error).__name__}: {error}"
    return list(shims.values()), broken


def _environment(shims: list[Shim]) -> Environment:
    return Environment.detect(shim.distribution for shim in shims)


def _warn_untested(environment: Environment) -> None:
    version = environment.version("transformers")
    oldest, *_, newest = TESTED_TRANSFORMERS
    if version is None or _state.installed:
        return
    if version < oldest:
        warnings.warn(
            f"transformers {version} is older than {oldest}, the oldest release kernel-compat supports: registered "
            "attention names are passed on, but no shim applies. Upgrade transformers.",
            stacklevel=3,
        )
    elif version.release[:2] > newest.release[:2]:
        warnings.warn(
            f"transformers {version} is newer than {newest}, the newest release kernel-compat was tested on. "
            "Every seam is still verified before it is replaced: kernel_compat.status() says what applied.",
            stacklevel=3,
        )


def _locate(shim: Shim, environment: Environment) -> list[Located] | KernelCompatError:
    version = environment.packages[shim.distribution]
    try:
        return [seam.locate(version) for seam in shim.seams_for(version)]
    except SeamError as error:
        return error


def _apply(shim: Shim, located: list[Located]) -> None:
    for seam in located:
        for other in _state.applied.values():
            # Under another name too: undoing one of the two would leave its replacement inside the other's.
            if any(
                seam.original is theirs.replacement
                or (seam.seam.holds is None and seam.original is theirs.original)
                or (seam.owner is theirs.owner and seam.name == theirs.name)
                for theirs in other.seams
            ):
                raise KernelCompatError(f"{seam.seam.target} is replaced by the shim {other.shim.name} already")
    expected = {seam.seam.name for seam in located}
    if len(expected) < len(located):
        raise KernelCompatError(
            f"shim {shim.name} has several seams of one name: {sorted(s.seam.name for s in located)}"
        )
    replacements = shim.replace({seam.seam.name: seam.original for seam in located})
    if set(replacements) != expected:
        raise KernelCompatError(
            f"shim {shim.name} replaces {sorted(replacements)} where its seams are {sorted(expected)}"
        )
    for seam in located:
        seam.replacement = replacements[seam.seam.name]
    swap([(seam.owner, seam.name, seam.replacement) for seam in located])
    _state.applied[shim.name] = applied = _Applied(shim, located)
    try:
        applied.undo = shim.complete()
    except BaseException:
        _undo([shim.name])
        raise


def _rebind(shims: list[str]) -> None:
    """Rebind what other modules have imported of the seams of these shims: one search of all modules for all of them."""
    try:
        swap((), [(seam.original, seam.replacement) for name in shims for seam in _functions(name)])
    except Exception:  # somewhere a name can't be bound: that shim fails, and the others don't
        for name in shims:
            try:
                swap((), [(seam.original, seam.replacement) for seam in _functions(name)])
            except Exception as error:
                _undo([name])
                _state.failed[name] = f"{type(error).__name__}: {error}"
    except BaseException:
        _undo(shims)
        raise


def _functions(shim: str) -> list[Located]:
    """The seams of an applied shim that other modules may have imported by name."""
    return [seam for seam in _state.applied[shim].seams if isinstance(seam.owner, ModuleType)]


def _undo(shims: list[str]) -> None:
    """Restore the seams of these shims that are still ours, last applied first; note the others as left."""
    undone = [name for name in reversed(list(_state.applied)) if name in shims]
    seams = [(name, seam) for name in undone for seam in _state.applied[name].seams]
    left = [(name, seam) for name, seam in seams if not seam.in_place]
    for name in undone:
        _state.applied[name].undo()
        _state.applied[name].undo = lambda: None  # it isn't undone twice where what follows fails
    swap(
        [(seam.owner, seam.name, seam.before) for _, seam in seams if seam.in_place],
        [(seam.replacement, seam.original) for name in undone for seam in _functions(name)],
    )
    for name in undone:
        del _state.applied[name]
    _state.left += left


def _reclaim() -> None:
    """Restore the seams that were left to somebody's patch, and that they have put back to our replacement since."""
    while ours := next((entry for entry in _state.left if entry[1].in_place), None):
        seam = ours[1]
        aliases = [(seam.replacement, seam.original)] if isinstance(seam.owner, ModuleType) else []
        swap([(seam.owner, seam.name, seam.before)], aliases)
        _state.left = [entry for entry in _state.left if entry is not ours]
    # Somebody has restored the rest without us. Any of its originals will do: ours may have been there twice, below and
    # above a patch of theirs.
    originals = {(id(seam.owner), seam.name, id(seam.before)) for _, seam in _state.left}
    _state.left = [
        (name, seam) for name, seam in _state.left if (id(seam.owner), seam.name, id(seam.current)) not in originals
    ]


def _unapplied(shim: Shim, environment: Environment) -> ShimReport:
    """What a shim that isn't in place is here: not needed, pending, or failed by its own fault."""
    try:
        reason = shim.not_needed(environment)
        if reason is not None:
            return ShimReport(shim.name, "not needed", reason)
        targets = tuple(seam.target for seam in shim.seams_for(environment.packages[shim.distribution]))
        return ShimReport(shim.name, "pending", shim.reason, targets)
    except Exception as error:  # a specifier that is none, a check of its own that fails
        return ShimReport(shim.name, "failed", f"{type(error).__name__}: {error}")


def _report(environment: Environment, shims: list[Shim], broken: dict[str, str]) -> Report:
    entries = [ShimReport(name, "failed", f"its entry point could not be loaded: {e}") for name, e in broken.items()]
    for shim in shims:
        entry: Callable[..., ShimReport] = partial(ShimReport, shim.name)
        if applied := _state.applied.get(shim.name):
            entries.append(
                entry(
                    "applied",
                    shim.reason,
                    tuple(seam.seam.target for seam in applied.seams),
                    tuple(seam.seam.target for seam in applied.seams if not seam.in_place),
                )
            )
        elif shim.name in _state.skip:
            entries.append(entry("skipped", "asked for by install(skip=...)", _unapplied(shim, environment).seams))
        elif shim.name in _state.failed:
            entries.append(entry("failed", _state.failed[shim.name], _unapplied(shim, environment).seams))
        else:
            entries.append(_unapplied(shim, environment))
    attention = names.states(_state.installed)
    return Report(environment, _state.installed, tuple(entries), attention, (), torch_flash_backend())


def torch_flash_backend() -> str | None:
    """What is active in this process, asked of a torch that is imported already."""
    current: Callable[[], str | None] | None = getattr(
        sys.modules.get("torch.nn.attention"), "current_flash_attention_impl", None
    )
    return None if current is None else current()

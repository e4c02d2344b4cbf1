"""Verifies every seam of the shims that an environment needs, then replaces them; and restores them."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType
from typing import Generic, Protocol, TypeVar

from ..environment import Environment
from ..errors import KernelCompatError, SeamError, UnprotectedError, UnprotectedWarning
from .refusal import Concerns, refusals
from .report import InstallationReport, ShimReport
from .seam import Located
from .shim import Shim, discover
from .swap import Change, make, swap, undo

__all__ = ["Blocks", "Installation", "Participant"]

T = TypeVar("T")


class Participant(Protocol):
    """Changes more than shims do while an installation is in force, such as entries of another project's tables."""

    def prepare(self, environment: Environment) -> None:
        """Called by `install()` before it changes anything."""

    def publish(self, environment: Environment, unprotected: UnprotectedError | None) -> None:
        """Called by every `install()` once the shims are applied.

        Args:
            environment: the environment.
            unprotected: what every call must be refused with, if a shim that protects calls has failed and its seams can't
                refuse them; else None.
        """

    def withdraw(self) -> Iterable[str]:
        """Called by `uninstall()` before the shims are undone; returns the values that other code has overwritten."""


@dataclass
class _Applied:
    seams: list[Located]
    #: Undoes what the shim's `complete` did, and returns the changes that other code has overwritten.
    undo: Callable[[], Iterable[Change] | None] = lambda: ()


class Blocks(Generic[T]):
    """The settings of ``with`` blocks that overlap, in any threads: those of the last one that is open are in force."""

    def __init__(self) -> None:
        self._before: T | None = None
        self._open: list[list[T]] = []

    @property
    def are_open(self) -> bool:
        """Whether a block is open, also one whose settings aren't in force yet."""
        return bool(self._open)

    def open(self, present: T | None) -> list[T]:
        """A new block, to which its settings are appended once they are in force.

        Args:
            present: the settings in force now, which come back after the last block; None for none.
        """
        if not self._open:
            self._before = present
        block: list[T] = []
        self._open.append(block)
        return block

    def close(self, block: list[T]) -> T | None:
        """Close a block; returns the settings that are to be in force now."""
        # By identity: blocks may have equal settings.
        self._open = [other for other in self._open if other is not block]
        return next((other[-1] for other in reversed(self._open) if other), self._before)


class Installation:
    """The shims that are applied, and the way back. Safe from several threads.

    Args:
        participants: called by `install` and `uninstall`, in this order.
        discover: returns the shims, and the errors by name of the entry points that could not be loaded.
        detect: returns the environment, given further distributions to look at; None for `Environment.detect`.
        concerns: whether shims protect a call of a seam, by its arguments.
    """

    def __init__(
        self,
        participants: Sequence[Participant] = (),
        discover: Callable[[], tuple[list[Shim], dict[str, str]]] = discover,
        detect: Callable[[Iterable[str]], Environment] | None = None,
        concerns: Concerns = lambda args, kwargs: True,
    ) -> None:
        self._participants = participants
        self._discover = discover
        self._detect = detect
        self._concerns = concerns
        self._lock = threading.RLock()
        #: Whether `install()` is in force.
        self.active = False
        self._skip: frozenset[str] = frozenset()
        self._applied: dict[str, _Applied] = {}
        self._failed: dict[str, str] = {}
        # What failed shims protect is refused by their seams, or by the participants if these can't.
        self._allows_broken = False
        self._refusing: list[Change] = []
        self._unprotected: UnprotectedError | None = None
        # Shims that are applied once other code has imported the modules beside them, and the modules whose import will call `_imported`.
        self._waiting: dict[str, tuple[Shim, list[str]]] = {}
        self._hooked: set[str] = set()
        # Changes that other code had overwritten when they were undone, and their shims.
        self._left: dict[Change, str] = {}
        # The skip and `_allows_broken` of the `installed()` blocks that are open; and those from before the first one.
        self._blocks: Blocks[tuple[frozenset[str], bool]] = Blocks()

    def install(
        self, *, skip: Collection[str] = (), only: Collection[str] | None = None, broken: str = "refuse"
    ) -> InstallationReport:
        """Apply every shim that the environment needs, each whole or not at all, and call the participants.

        Args:
            skip: names of shims to leave out. One that an earlier call applied is undone.
            only: names of the shims to apply, None for all: the others are left out.
            broken: ``"refuse"`` refuses the calls that a failed shim protects, ``"allow"`` doesn't.

        Raises:
            ValueError: `skip` or `only` names a shim that doesn't exist, or `broken` is another value.
            TypeError: `skip` or `only` is a single string.
        """
        if broken not in ("refuse", "allow"):
            raise ValueError(f"broken must be 'refuse' or 'allow', not {broken!r}")
        state = environment, shims, unloaded = self._look()
        every = {shim.name for shim in shims} | set(unloaded)
        chosen: dict[str, frozenset[str]] = {}
        for argument, names in (("skip", skip), ("only", every if only is None else only)):
            if isinstance(names, str):
                raise TypeError(f"{argument} takes a list of shim names, not the string {names!r}")
            chosen[argument] = frozenset(names)
            if unknown := sorted(map(repr, chosen[argument] - every)):
                known = ", ".join(shim.name for shim in shims)
                raise ValueError(f"{argument} names unknown shims: {', '.join(unknown)}; there are: {known or 'none'}")
        skip = chosen["skip"] | (every - chosen["only"])
        for participant in self._participants:
            participant.prepare(environment)
        pending = [shim for shim in shims if shim.name not in skip and _unapplied(shim, environment).state == "pending"]
        absent = {shim.name: _absent(shim, environment) for shim in pending if shim.on_import}
        self._await({module for modules in absent.values() for module in modules}, environment)
        # Imports the modules before the lock is taken: an import waits for other threads' imports, and one of those may
        # wait for the lock. Seams are located again under the lock.
        for shim in pending:
            if self._hooked.isdisjoint(absent.get(shim.name, ())):
                with suppress(SeamError):
                    _locate(shim, environment)
        with self._lock:
            self._stop_refusing()
            self._undo(skip)
            self._skip, self._failed, self._allows_broken = skip, {}, broken == "allow"
            self._waiting = {
                shim.name: (shim, modules)
                for shim in pending
                if (modules := [module for module in absent.get(shim.name, ()) if module in self._hooked])
            }
            self._apply_all([shim for shim in pending if shim.name not in self._waiting], environment)
            for name in unloaded.keys() - skip:
                self._unprotected = UnprotectedError(name, _EVERYTHING, _unloaded(unloaded[name]))
            if self._allows_broken:
                self._unprotected = None
            self.active = True
            for participant in self._participants:
                participant.publish(environment, self._unprotected)
            return self._report(*state)

    def uninstall(self) -> InstallationReport:
        """Call the participants, and restore the objects that were there before `install()`.

        A value that other code has overwritten stays theirs; the report's `left_alone` names it.
        """
        state = self._look()
        with self._lock:
            self.active = False
            left = [name for participant in self._participants for name in participant.withdraw()]
            self._stop_refusing()
            self._undo(self._applied)
            self._waiting = {}
            left += dict.fromkeys(f"{change.target} (shim {name})" for change, name in self._left.items())
            self._skip, self._failed = frozenset(), {}
            return replace(self._report(*state), left_alone=tuple(left))

    def status(self) -> InstallationReport:
        """The report of `install()` as of now; changes nothing and imports no other project."""
        state = self._look()
        with self._lock:
            return self._report(*state)

    @contextmanager
    def installed(
        self, *, skip: Collection[str] = (), only: Collection[str] | None = None, broken: str = "refuse"
    ) -> Iterator[InstallationReport]:
        """`install()` for the length of a ``with`` block; of several that overlap, in any threads, the last uninstalls.

        Inside another installation it changes nothing on leaving.
        """
        with self._lock:
            block = self._blocks.open((self._skip, self._allows_broken) if self.active else None)
        try:
            report = self.install(skip=skip, only=only, broken=broken)
            block.append((self._skip, self._allows_broken))
            yield report
        finally:
            with self._lock:
                before = self._blocks.close(block)
                if before is None and not self._blocks.are_open:
                    self.uninstall()
                elif before is not None and self.active and before != (self._skip, self._allows_broken):
                    self.install(skip=before[0], broken="allow" if before[1] else "refuse")

    def _look(self) -> tuple[Environment, list[Shim], dict[str, str]]:
        shims, broken = self._discover()
        detect = self._detect or Environment.detect
        return detect([shim.distribution for shim in shims]), shims, broken

    def _await(self, modules: set[str], environment: Environment) -> None:
        """Have `_imported` called once each module has been imported. It can't be undone, and does nothing after `uninstall()`."""
        with self._lock:
            new = modules - self._hooked
            self._hooked |= new
        if new:
            import wrapt  # here: most installations wait for no module

            for module in sorted(new):
                wrapt.register_post_import_hook(lambda loaded: self._imported(loaded.__name__, environment), module)

    def _imported(self, module: str, environment: Environment) -> None:
        """Apply the shims that have waited for this module alone."""
        with self._lock:
            self._hooked.discard(module)
            # Not by sys.modules: it has the modules whose import has led to this one's already.
            for _, absent in self._waiting.values():
                if module in absent:
                    absent.remove(module)
            ready = [shim for shim, absent in self._waiting.values() if not absent]
            for shim in ready:
                del self._waiting[shim.name]
            self._apply_all(ready, environment)
            for participant in self._participants if self.active and self._unprotected else ():
                participant.publish(environment, self._unprotected)
            failed = {shim.name: self._failed[shim.name] for shim in ready if shim.name in self._failed}
        for name, reason in failed.items():
            warnings.warn(f"the shim {name} is not applied: {reason}", UnprotectedWarning, stacklevel=2)

    def _apply_all(self, shims: Sequence[Shim], environment: Environment) -> None:
        """Apply the shims that aren't applied yet."""
        before = set(self._applied)
        try:
            for shim in shims:
                if shim.name not in self._applied:
                    self._apply(shim, environment)
        finally:  # after Ctrl-C too: the next call takes every applied shim for whole
            self._rebind(self._applied.keys() - before)
        for shim in shims:
            if shim.name in self._failed and shim.protects and not self._allows_broken:
                self._refuse(shim, environment)

    def _refuse(self, shim: Shim, environment: Environment) -> None:
        """Have the seams of a failed shim refuse the calls that it protects; the participants, if they can't."""
        error = UnprotectedError(shim.name, shim.protects, self._failed[shim.name])
        changes = refusals(shim.seams_for(environment.packages[shim.distribution]), self._concerns, error)
        if not changes:
            self._unprotected = self._unprotected or error
            return
        make(changes)
        self._refusing += changes
        swap((), [(change.before, change.replacement) for change in changes if isinstance(change.owner, ModuleType)])

    def _stop_refusing(self) -> None:
        undo(reversed(self._refusing))
        self._refusing, self._unprotected = [], None

    def _apply(self, shim: Shim, environment: Environment) -> None:
        """Apply a shim, or note why that failed."""
        try:
            located = [seam for seam in _locate(shim, environment) if seam.seam.replaced]
            self._require_untouched(located)
            replacements = shim.replace({seam.name: seam.original for seam in located})
            names = sorted(seam.name for seam in located)
            if sorted(replacements) != names:
                raise KernelCompatError(f"shim {shim.name} replaces {sorted(replacements)} where its seams are {names}")
            for seam in located:
                seam.replacement = replacements[seam.name]
            make(located)
            self._applied[shim.name] = _Applied(located)
            try:
                self._applied[shim.name].undo = shim.complete()
            except BaseException:
                self._undo([shim.name])
                raise
        except Exception as error:
            self._failed[shim.name] = _message(error)

    def _require_untouched(self, located: list[Located]) -> None:
        """Refuse seams that another shim has replaced, under other names too: undoing one would leave it inside the other's."""
        for name, applied in self._applied.items():
            for seam, other in product(located, applied.seams):
                same = seam.owner is other.owner and seam.name == other.name
                if same or seam.original is other.original or seam.original is other.replacement:
                    raise KernelCompatError(f"{seam.target} is replaced by the shim {name} already")

    def _rebind(self, shims: Collection[str]) -> None:
        """Rebind the names that other modules have imported of these shims' seams: one search of all modules for all of them."""
        seams = [seam for name in shims for seam in self._applied[name].seams]
        try:
            swap((), [(seam.original, seam.replacement) for seam in seams if isinstance(seam.owner, ModuleType)])
        except BaseException as error:  # a module that refuses, or Ctrl-C
            self._undo(shims)
            self._failed |= dict.fromkeys(shims, _message(error))
            if not isinstance(error, Exception):
                raise

    def _undo(self, shims: Collection[str]) -> None:
        """Restore the seams of these shims, last applied first, and those left by earlier calls that are ours again."""
        for name in [name for name in reversed(self._applied) if name in shims]:
            left = self._applied[name].undo() or ()
            self._left |= dict.fromkeys([*left, *self._applied.pop(name).seams], name)
        self._left = {change: self._left[change] for change in undo(self._left)}

    def _report(self, environment: Environment, shims: list[Shim], broken: dict[str, str]) -> InstallationReport:
        protects = "" if self._allows_broken else _EVERYTHING
        entries = [ShimReport(name, "failed", _unloaded(error), protects=protects) for name, error in broken.items()]
        for shim in shims:
            entry = _unapplied(shim, environment)
            if applied := self._applied.get(shim.name):
                foreign = tuple(seam.target for seam in applied.seams if not seam.in_place)
                entry = replace(entry, state="applied", reason=shim.reason, foreign=foreign)
            elif shim.name in self._skip:
                entry = replace(entry, state="skipped", reason="left out by install(skip=...) or install(only=...)")
            elif shim.name in self._failed:
                protects = "" if self._allows_broken else shim.protects
                entry = replace(entry, state="failed", reason=self._failed[shim.name], protects=protects)
            elif shim.name in self._waiting:
                modules = " and ".join(self._waiting[shim.name][1])
                entry = replace(entry, reason=f"{shim.reason}; applied once {modules} is imported")
            entries.append(replace(entry, upstream=shim.upstream, delete_when=shim.delete_when))
        return InstallationReport(environment, self.active, tuple(entries))


#: The `protects` of a shim that can't be loaded: its own can't be read, so every call is refused.
_EVERYTHING = "attention under registered names"


def _unloaded(error: str) -> str:
    return f"its entry point could not be loaded: {error}"


def _locate(shim: Shim, environment: Environment) -> list[Located]:
    version = environment.packages[shim.distribution]
    return [seam.locate(version) for seam in shim.seams_for(version)]


def _absent(shim: Shim, environment: Environment) -> list[str]:
    """The modules of its seams that have not been imported, in their order."""
    seams = shim.seams_for(environment.packages[shim.distribution])
    return [module for module in dict.fromkeys(seam.module for seam in seams) if module not in sys.modules]


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, KernelCompatError) else f"{type(error).__name__}: {error}"


def _unapplied(shim: Shim, environment: Environment) -> ShimReport:
    """The report of a shim that isn't applied: not needed, pending, or failed by its own fault."""
    try:
        if (reason := shim.not_needed(environment)) is not None:
            return ShimReport(shim.name, "not needed", reason)
        seams = shim.seams_for(environment.packages[shim.distribution])
        replaced, read = ([seam.target for seam in seams if seam.replaced is kind] for kind in (True, False))
        return ShimReport(shim.name, "pending", shim.reason, tuple(replaced), reads=tuple(read))
    except Exception as error:  # an invalid specifier, or the shim's own check
        return ShimReport(shim.name, "failed", _message(error))

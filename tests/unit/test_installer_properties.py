"""Installing, uninstalling and patches by others, in any order, checked after every step against a plain model."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernel_compat import Environment, Seam, Shim
from kernel_compat.patching.installation import Installation
from kernel_compat.patching.report import InstallationReport

HOME, USER = "kc_machine_upstream", "kc_machine_user"

#: Seams by shim. `two` and `three` share a seam, so only one of them can be applied.
SEAMS = {
    "one": ("f", "g", "Model.method"),
    "two": ("h", "k"),
    "three": ("k", "Model.of"),
}
ALL = ("f", "g", "h", "k", "Model.method", "Model.of")
MARK = "__kc_machine_shim__"


def _replacing(shim: str) -> Any:
    def replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
        def wrap(original: Any) -> Any:
            inner = original.__func__ if isinstance(original, classmethod) else original

            @functools.wraps(inner)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return inner(*args, **kwargs)

            made: Any = classmethod(replacement) if isinstance(original, classmethod) else replacement
            vars(made)[MARK] = shim
            return made

        return {name: wrap(original) for name, original in originals.items()}

    return replace


def _shim(name: str) -> Shim:
    seams = tuple(
        Seam(f"{HOME}:{attribute}", () if attribute == "Model.of" else ("self",) if "." in attribute else ("x",))
        for attribute in SEAMS[name]
    )
    return Shim(name, "upstream", ">=1", "why not", seams, _replacing(name))


class Machine(RuleBasedStateMachine):
    @initialize()
    def build(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.home, self.user, shims = ModuleType(HOME), ModuleType(USER), tuple(map(_shim, SEAMS))
        exec(
            "def f(x): ...\ndef g(x): ...\ndef h(x): ...\ndef k(x): ...\n"
            "class Model:\n"
            "    def method(self): ...\n"
            "    @classmethod\n"
            "    def of(cls): ...\n",
            vars(self.home),
        )
        for name in "fghk":  # from upstream import f as also_f
            setattr(self.user, f"also_{name}", getattr(self.home, name))
        for module in (self.home, self.user):
            self.patch.setitem(sys.modules, module.__name__, module)
        self.installation = Installation(
            discover=lambda: (list(shims), {}), detect=lambda _: Environment(packages={"upstream": "1.0"})
        )
        #: Upstream's own values.
        self.original = {attribute: self.look(attribute) for attribute in ALL}
        #: Patches by others, the last one on top: (attribute, the value they set, the value they found).
        self.patches: list[tuple[str, Any, Any]] = []
        self.touched: set[str] = set()
        self.installed = False
        self.skip: frozenset[str] = frozenset()

    def teardown(self) -> None:
        try:
            if hasattr(self, "patch"):
                while self.patches:
                    self.foreign_undo(len(self.patches) - 1)
                for attribute in ALL:
                    if self.look(attribute) is None:
                        self.put(attribute, self.original[attribute])
                self.installation.uninstall()
                self.all_are_originals()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    # lookups

    def owner(self, attribute: str) -> tuple[Any, str]:
        if "." in attribute:
            return vars(self.home)["Model"], attribute.partition(".")[2]
        return self.home, attribute

    def look(self, attribute: str) -> Any:
        owner, name = self.owner(attribute)
        return vars(owner).get(name)

    def put(self, attribute: str, value: Any) -> None:
        owner, name = self.owner(attribute)
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def foreign(self, attribute: str) -> bool:
        return any(attribute == patched for patched, _, _ in self.patches)

    def shim_of(self, attribute: str) -> str | None:
        """The shim whose replacement is in place."""
        return getattr(self.look(attribute), "__dict__", {}).get(MARK)

    # rules

    @rule(skip=st.frozensets(st.sampled_from(tuple(SEAMS))))
    def install(self, skip: frozenset[str]) -> None:
        self.check(self.installation.install(skip=skip))
        self.installed, self.skip = True, skip

    @rule()
    def install_plainly(self) -> None:
        self.install(frozenset())

    @rule()
    def uninstall(self) -> None:
        report = self.installation.uninstall()
        self.installed, self.skip = False, frozenset()
        left = {entry.partition(" ")[0].partition(":")[2] for entry in report.left_alone}
        assert left <= self.touched
        assert {attribute for attribute in ALL if self.foreign(attribute)} >= left - {
            # Undoing a patch from before install() leaves a value that we can't recognize as upstream's own.
            attribute
            for attribute in left
            if self.look(attribute) is self.original[attribute]
        }
        self.originals_but_for_foreigners()
        assert {entry.state for entry in report.shims} == {"pending"}

    @rule(attribute=st.sampled_from(ALL), right=st.booleans())
    def foreign_patch(self, attribute: str, right: bool) -> None:
        """Other code patches the attribute: with a wrapper that fits, or with other parameters."""
        found = self.look(attribute)

        def theirs(*args: Any) -> None: ...

        def fits(x: Any) -> None: ...

        def fits_as_method(self: Any) -> None: ...

        self.touched.add(attribute)
        made = (fits_as_method if "." in attribute else fits) if right else theirs
        self.patches.append((attribute, made, found))
        self.put(attribute, made)

    @precondition(lambda self: self.patches)
    @rule(data=st.data())
    def foreign_patch_undone(self, data: st.DataObject) -> None:
        """Other code restores the value that it found; the last patch of an attribute first."""
        newest = {attribute: index for index, (attribute, _, _) in enumerate(self.patches)}
        self.foreign_undo(data.draw(st.sampled_from(sorted(newest.values()))))

    def foreign_undo(self, index: int) -> None:
        attribute, _, found = self.patches.pop(index)
        self.put(attribute, found) if self.look(attribute) is not None or found is not None else None

    @rule(attribute=st.sampled_from(ALL))
    def seam_vanishes(self, attribute: str) -> None:
        """Recorded as a patch by others, because the attribute may be put back."""
        found = self.look(attribute)
        if found is not None:
            self.touched.add(attribute)
            self.patches.append((attribute, None, found))
            self.put(attribute, None)

    @rule(actions=st.lists(st.sampled_from(["install", "skip one", "skip two", "uninstall"]), min_size=2, max_size=4))
    def threads(self, actions: list[str]) -> None:
        errors: list[BaseException] = []
        barrier = threading.Barrier(len(actions))

        def act(action: str) -> None:
            try:
                barrier.wait(30)
                if action == "uninstall":
                    self.installation.uninstall()
                elif action == "install":
                    self.installation.install()
                else:
                    self.installation.install(skip=[action.partition(" ")[2]])
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=act, args=(action,)) for action in actions]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        assert not any(thread.is_alive() for thread in running)
        assert not errors, errors
        status = self.installation.status()
        self.installed = status.installed
        self.skip = frozenset(entry.name for entry in status.shims if entry.state == "skipped")

    # invariants

    def check(self, report: InstallationReport) -> None:
        for entry in report.shims:
            attributes = [target.partition(":")[2] for target in entry.seams]
            if entry.state == "applied":
                assert tuple(attributes) == SEAMS[entry.name]
                assert all(
                    self.shim_of(attribute) == entry.name or self.foreign(attribute) or entry.foreign
                    for attribute in attributes
                )

    @invariant()
    def all_or_none(self) -> None:
        """Every seam of an applied shim is replaced unless others overwrote it; no seam of the other shims is."""
        if not hasattr(self, "home"):
            return
        status = self.installation.status()
        assert status.installed == self.installed
        states = {entry.name: entry for entry in status.shims}
        assert set(states) == set(SEAMS)
        for name, attributes in SEAMS.items():
            entry = states[name]
            for attribute in attributes:
                there = self.shim_of(attribute)
                if entry.state == "applied":
                    listed = f"{HOME}:{attribute}" in entry.foreign
                    applied = {s.seam.attribute: s for s in self.installation._applied[name].seams}[attribute]
                    assert listed != applied.in_place
                    # A seam that isn't in place was overwritten by others, never left by an incomplete step of our own.
                    assert applied.in_place or attribute in self.touched
                    assert not applied.in_place or there == name
                elif there == name:
                    # Our replacement is here only if others put it back after uninstall().
                    assert attribute in self.touched, (name, attribute, entry.state)
        assert not {"two", "three"} <= {name for name, entry in states.items() if entry.state == "applied"}
        for name in self.skip:
            assert states[name].state == "skipped"

    def originals_but_for_foreigners(self) -> None:
        for attribute in ALL:
            if not self.foreign(attribute):
                assert self.look(attribute) is self.original[attribute], attribute
        # Others patch only one module's attribute: names imported elsewhere are upstream's again in any case.
        for name in "fghk":
            assert vars(self.user)[f"also_{name}"] is self.original[name], name

    def all_are_originals(self) -> None:
        for attribute in ALL:
            assert self.look(attribute) is self.original[attribute], attribute
        for name in "fghk":
            assert vars(self.user)[f"also_{name}"] is self.original[name], name


Machine.TestCase.settings = settings(
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase is not Phase.explain],  # this phase traces every line
)
TestMachine = Machine.TestCase

"""The steps of adopting a release, in their order. Each changes the branch's files, and returns what the report says of it."""

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from compat_matrix.axes import Axes
from compat_matrix.cells import Cell, parse
from compat_matrix.errors import MatrixError, NotFoundError
from compat_matrix.pins import project_requirements, read, uv
from compat_matrix.results import FINE
from compat_matrix.store import Store
from compat_matrix.store.documents import ATLAS, keep
from compat_matrix.views.common import one_line
from compat_matrix.words import plural
from kernel_compat.patching.shim import Shim
from kernel_compat.proofs import table
from kernel_compat_atlas import renames
from kernel_compat_atlas.errors import AtlasError
from kernel_compat_atlas.index import Index
from kernel_compat_atlas.published import Cache
from kernel_compat_atlas.releases import Release, covered
from kernel_compat_atlas.seams import installed_shims, read_seams
from kernel_compat_prove.outcomes import PADDING_FREE

from . import edits
from .checkout import Checkout, git

#: Folders of a project whose code doesn't run with a user's.
_ASIDE = ("tests", "docs", "benchmarks", "examples", "noxfile.py")

#: Of more cells only a few run: each takes minutes.
_MANY = 32

#: Enters the proofs of a file in the table of the branch.
_RECORD = """
import json, sys
from kernel_compat_prove import Proof
from kernel_compat_prove.record import record
record(map(Proof.from_json, json.load(open(sys.argv[1]))["proofs"]))
"""


@dataclass
class Found:
    """What a step found.

    Attributes:
        counts: by kind, such as cells, the number that is right, refused, lost, wrong or untested.
        red: what is not right, and wasn't so before.
        write: what a person must write.
        notes: anything else that a reader wants to know.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    red: list[str] = field(default_factory=list)
    write: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, kind: str, words: Iterable[str]) -> None:
        """Add to the counts of a kind."""
        known = Counter(self.counts.get(kind, {}))
        known.update(words)
        self.counts[kind] = dict(known)

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


@dataclass(frozen=True)
class Adoption:
    """A release to adopt.

    Attributes:
        before: the release before it that the project knows, if there is one.
        axes: the project's axes file, in the user's checkout.
        checkout: the branch.
        index: asked for the files of releases.
    """

    release: Release
    before: Release | None
    axes: Axes
    checkout: Checkout
    options: argparse.Namespace
    index: Index

    @property
    def axis(self) -> str:
        """The axis of its distribution in any axes file; empty if it is only required."""
        name = self.release.distribution
        return next((axis for axis, one in self.axes.distributions.items() if one == name), name.replace("-", "_"))

    @property
    def in_axes(self) -> bool:
        """Whether the project's axes file has its axis."""
        return self.axis in self.axes.distributions

    @property
    def project(self) -> Path:
        """The project's folder in the worktree."""
        return self.in_tree(self.axes.folder)

    @property
    def library(self) -> bool:
        """Whether the project is kernel-compat itself, with its proofs."""
        return (self.project / edits.RELEASES).exists()

    def in_tree(self, path: Path) -> Path:
        """A path of the checkout in the worktree."""
        return self.checkout.tree / path.relative_to(self.checkout.root)

    @property
    def file(self) -> Path:
        """The project's axes file in the worktree."""
        return self.in_tree(self.axes.path)

    @property
    def others(self) -> list[Path]:
        """The other axes files in the worktree: those of downstream suites."""
        tree = self.checkout.tree
        found = [tree / one for one in git(tree, "ls-files", "*axes.toml").splitlines()]
        return [one for one in found if one != self.file]

    @property
    def condition(self) -> str:
        """The condition on the cells that have the release; empty without any."""
        if self.in_axes:
            return f"{self.axis}=={edits.value_of(self.release.version)}"
        wanted = self.release.distribution
        entries = [(f"({one.when.text})" if one.when else "python", one.requires) for one in self.axes.packages]
        entries.append(("python", [str(one) for one in project_requirements(self.axes)]))
        users = [
            when
            for when, requires in entries
            if wanted in [canonicalize_name(Requirement(text).name) for text in requires]
        ]
        return " or ".join(users)

    def cells(self, file: Path, *words: str) -> list[Cell]:
        """Cells of an axes file of the worktree; none if none is left."""
        code, text = self.checkout.matrix("list", "list", "--axes", str(file), *words)
        if code and "no cell of" not in text:
            raise MatrixError(text)
        return [] if code else [parse(name) for name in text.splitlines() if name.startswith("py")]


def names(one: Adoption) -> Found:
    """The names that seams declare, and all that the project reads: which are renamed or gone."""
    found, shims = Found(), installed_shims()
    cache, version = Cache(None, found.notes.append), str(one.release.version)
    pair = [*filter(None, [one.before]), one.release]
    seams = read_seams({one.release.distribution: pair}, shims, one.index, cache)
    document = seams.as_json(found.notes, checked=True)
    old, new = (renames.places(release, one.index, cache) for release in (pair[0], pair[-1]))
    for disagreement in seams.disagreements:
        if disagreement.release == one.release:
            near = renames.moved(disagreement.target, old, new)
            text = f"{disagreement}{near and f'; the nearest is {near}'}"
            (found.red if disagreement.certain else found.notes).append(text)
            if disagreement.certain:
                found.write.append(
                    f"end the versions of the shim {disagreement.shim} before {version}, and write the next one"
                )
    for seam in document["seams"]:
        for event in seam["history"][-1:]:
            if event["release"] == version and event["what"] != "there" and one.before is not None:
                near = renames.moved(seam["target"], old, new) if event["what"] == "vanished" else event["text"]
                found.notes.append(f"{seam['target']} {event['what']}{near and f': {near}'}")
    folder = one.project
    others = {path.parent.name for path in folder.glob("*/pyproject.toml")} - {*one.axes.project.members}
    for gone in renames.compare(old, new, renames.read_names(folder, [*_ASIDE, *sorted(others)])):
        if gone.certain or gone.nearest:  # one place without a successor says nothing
            (found.red if gone.certain else found.notes).append(str(gone))
        if gone.certain:
            instead = (
                f"the new spelling {gone.nearest!r} of {gone.name!r}" if gone.nearest else f"an end of {gone.name!r}"
            )
            found.write.append(f"{instead}: {', '.join(gone.reads[:9])}")
    if one.options.store:  # for the page of a service
        _keep_atlas(one, shims, cache)
    return found


def _keep_atlas(one: Adoption, shims: Sequence[Shim], cache: Cache) -> None:
    releases: dict[str, list[Release]] = {}
    for distribution in dict.fromkeys(shim.distribution for shim in shims):
        claimed = [shim.versions for shim in shims if shim.distribution == distribution]
        new = [one.release] if distribution == one.release.distribution else []
        with suppress(AtlasError):  # an index need not have all of them
            known = covered(distribution, claimed, one.index.files(distribution))
            releases[distribution] = sorted({*known, *new}, key=lambda release: release.version)
    atlas = read_seams(releases, shims, one.index, cache).as_json([], checked=True)
    with Store.open(one.options.store) as store:
        keep(store, ATLAS, json.dumps(atlas))


def axes(one: Adoption) -> Found:
    """The axes, the lists of supported and of published releases, and the days before which uv looks for packages."""
    uploaded = one.release.file.uploaded or datetime.now(timezone.utc)
    day: date = (uploaded + timedelta(days=1)).date()
    if one.in_axes:
        edits.extend(one.file, one.axis, one.release.version, one.project)
    for path in (one.file, *one.others, one.project / "pyproject.toml"):
        edits.look_up_to(path, day)
    if one.library and one.release.distribution == "transformers":
        code, text = one.checkout.run("axes", sys.executable, "-m", "kernel_compat_atlas.digests")
        if code:
            raise MatrixError(f"the hashes of the release can't be noted: {one_line(text[-2000:], 2000)}")
    return Found(
        notes=[
            f"it was uploaded on {uploaded.date()}: packages are resolved from what was out at the start of {day}, or later"
        ]
    )


def pins(one: Adoption) -> Found:
    """The pins of its cells."""
    found = Found()
    chosen = one.cells(one.file, "--only", one.condition) if one.condition else []
    if chosen:
        code, text = _pin(one, one.file, "--only", one.condition)
        if code:
            found.red.append(f"not every cell can be resolved: {one_line(text, 2000)}")
        name, folder = one.release.distribution, one.file.parent / "pins"
        parts = {(part, cell.python) for cell in chosen for part in (cell.base, cell.layer)}
        there = [read(path, python) for part, python in parts if (path := folder / f"{part}.txt").exists()]
        versions = {part.versions[name] for part in there if name in part.versions}
        if others := versions - {str(one.release.version)}:
            found.notes.append(f"other packages allow only {name} {', '.join(sorted(others))} in some cells")
    return found


def _pin(one: Adoption, path: Path, *words: str) -> tuple[int, str]:
    """Pin cells of an axes file. The parts without the release keep their pins, with which other cells have run."""
    code, text = one.checkout.matrix("pins", "pin", "--axes", str(path), *words)
    tree = one.checkout.tree
    for name in git(tree, "diff", "--name-only", "--", str(path.parent / "pins")).splitlines():
        if one.release.distribution not in read(tree / name, "").versions:
            git(tree, "checkout", "--", name)
    return code, text


def prove(one: Adoption) -> Found:
    """Every model type on tiny models, in an environment of its own, compared with the table's proofs of the release before."""
    found, name = Found(), one.release.distribution
    if not one.library or name not in ("transformers", "torch"):
        return found
    environment, proofs = one.checkout.folder / "environment", one.checkout.folder / "proofs.json"
    python = environment / "bin" / "python"
    proofs.unlink(missing_ok=True)
    if name == "transformers":  # what the group requires is compiled for this torch
        (torch,) = re.findall(r'^TORCH = "(.*)"$', (one.project / "noxfile.py").read_text("utf-8"), re.MULTILINE)
        # A later patch of torchaudio doesn't load beside this torch, and requires none.
        exactly = [f"torch=={torch}", f"torchaudio=={torch}", "--group", "pyproject.toml:prove"]
    else:
        exactly = [f"transformers=={one.cells(one.file, '--only', one.condition)[-1].transformers}.*"]
    exactly.append(str(one.release).replace(" ", "=="))
    uv("venv", "--clear", "--python", sys.executable, str(environment), folder=one.project)
    uv("pip", "install", "--python", str(python), "--editable", ".[all,gpu]", *exactly, folder=one.project)
    words = one.options.types or ["--all"]
    jobs = ["--workers", str(one.options.jobs)] if one.options.jobs else []
    command = [str(python), "-m", "kernel_compat", "prove", *words, *jobs, "--timeout", "120", "--json", str(proofs)]
    code, text = one.checkout.run("prove", *command)
    if not proofs.exists() or not proofs.stat().st_size:
        raise MatrixError(f"`kernel-compat prove` ended with {code}: {one_line(text[-2000:], 2000)}")
    document = json.loads(proofs.read_text("utf-8"))
    before = one.before.version if one.before and name == "transformers" else Version(document["transformers"])
    # A prover that knows losses also reports whole types.
    whole = not one.options.types and "lost" not in document["summary"]
    judge(found, document["proofs"], table.known(str(before)), whole)
    if one.options.types:
        found.notes.append(
            f"proven are only {', '.join(one.options.types)}: the table of proofs has no entry for the release"
        )
    elif name == "transformers":
        code, text = one.checkout.run("prove", str(python), "-c", _RECORD, str(proofs))
        if code:
            raise MatrixError(f"the proofs can't be recorded: {text}")
    shutil.rmtree(environment)
    return found


def judge(found: Found, proofs: Sequence[Any], known: dict[str, Any], whole: bool) -> None:
    """Count proofs by verdict. A case is red unless it is right or untested, or is refused and was refused before."""
    words = {"equal": "right", "refused": "refused", "lost": "lost"}
    words |= dict.fromkeys(("not applicable", "untested", "no recipe"), "untested")
    for proof in proofs:
        name, verdict = proof["model_type"], proof["verdict"]
        before = known.get(name)
        ran = before is not None and not table.nothing_ran(before)
        refused = (before or {}).get("refused", ())
        worse: dict[str, list[str]] = {}
        for outcome in proof["outcomes"]:
            kind, case = outcome["verdict"], outcome["case"]
            if kind == "refused":
                fine = not ran or case in refused or case == PADDING_FREE
            else:
                fine = words.get(kind) in ("right", "untested")
            if not fine:
                worse.setdefault(kind, []).append(f"{case} ({one_line(outcome['reason'], 200) or kind})")
        if verdict == "no recipe" and ran:
            verdict, worse["lost"] = "lost", [f"every case: no tiny model ({one_line(proof['no_recipe'], 200)})"]
        found.count("model types", [words.get(verdict, "wrong")])
        for kind, cases in worse.items():
            found.red.append(f"{name} is {kind} in {', '.join(dict.fromkeys(cases))}")
    if gone := sorted(known.keys() - {proof["model_type"] for proof in proofs}) if whole else []:
        found.count("model types", ["lost"] * len(gone))
        found.red.append(f"lost with their model types: {', '.join(gone)}")
    if found.red:
        found.write.append("what makes these model types right, or an entry in the reviewed list that says why not")


def cells(one: Adoption) -> Found:
    """Its cells on CPUs, with the suites that watch the axis in the last one."""
    found = Found()
    if not one.condition:
        found.notes.append(f"no cell of {one.axes.path.name} requires {one.release.distribution}")
        return found
    only = f"({one.condition})" + (f" and ({one.options.only})" if one.options.only else "")
    both = one.cells(one.file, "--only", only)
    on_gpus, chosen = ([cell for cell in both if cell.device == device] for device in ("cuda", "cpu"))
    if one.options.few or len(chosen) > _MANY:
        every, chosen = len(chosen), meeting(chosen)
        found.notes.append(
            f"{len(chosen)} of {plural(every, 'cell')} run, in which every value of the other axes occurs"
        )
    _run(one, found, one.file, chosen, "default", "cells")
    for suite in sorted({tests.suite for tests in one.axes.tests if chosen and tests.watch == one.axis} - {"default"}):
        _run(one, found, one.file, chosen[-1:], suite, f"cells of the suite {suite}")
    if on_gpus:
        command = f'kernel-compat-matrix run --only "{only} and device==cuda"'
        found.notes.append(f"{plural(len(on_gpus), 'cell')} need a GPU: `{command}`")
    return found


def meeting(cells: Sequence[Cell]) -> list[Cell]:
    """A few of the cells of a release, in which every value of each other axis occurs."""
    left, chosen = {value for cell in cells for value in cell.axes.items()}, []
    while left:
        best = max(cells, key=lambda cell: len(left & cell.axes.items()))
        chosen.append(best)
        left -= best.axes.items()
    return [cell for cell in cells if cell in chosen]


def downstream(one: Adoption) -> Found:
    """The suites of other axes files that resolve with the release, each in a new table that it adds to its file."""
    found = Found()
    for path in one.others:
        added: list[Cell] = []
        before, there = path.read_text("utf-8"), {*one.cells(path)}
        for what in edits.copies(path, one.axis, one.release.version):
            new = [cell for cell in one.cells(path) if cell not in there]
            code, text = _pin(one, path, *(cell.name for cell in new))
            if code or not new:
                path.write_text(before, encoding="utf-8")
                found.notes.append(f"{what or path.parent.name} doesn't resolve with it: {one_line(text, 500)}")
                continue
            before, there = path.read_text("utf-8"), there | {*new}
            added += new
        _run(one, found, path, added, "default", "downstream suites")
    return found


def _run(one: Adoption, found: Found, path: Path, chosen: Sequence[Cell], suite: str, kind: str) -> None:
    """Run cells, or go on with the run of them that was interrupted, and count them."""
    if not chosen:
        return
    where = one.options.store or str(one.checkout.folder / "results.sqlite")
    git(one.checkout.tree, "add", "--all")
    tree = git(one.checkout.tree, "write-tree")[:12]
    label = f"{one.checkout.branch} {path.parent.name} {suite} {tree}"
    with Store.open(where) as store:
        try:
            planned = [*store.summary(store.resolve(label))]
        except NotFoundError:
            planned = []
    words = ["--resume", label] if planned else ["--label", label, *(cell.name for cell in chosen)]
    more = ["--suite", suite]
    more += [f"--jobs={one.options.jobs}"] if one.options.jobs else []
    more += [f"--cache={one.options.cache}"] if one.options.cache else []
    code, text = one.checkout.matrix("cells", "run", "--axes", str(path), "--store", where, *words, *more)
    with Store.open(where, create=False) as store:
        try:
            states = store.summary(store.resolve(label))
        except NotFoundError:
            states = {}
    lost = len(chosen) - len(states)
    if code not in (0, 1) or lost:  # what has run counts all the same
        found.red.append(f"the run of the {kind} ended with {code}: {one_line(text[-2000:], 2000)}")
    found.count(kind, ["lost"] * lost)
    for cell, summary in states.items():
        right = summary.state in FINE
        found.count(kind, ["right" if right else "wrong" if summary.state == "failed" else "lost"])
        if not right:
            found.red.append(f"{cell} is {summary.state} ({summary.kind}): {one_line(summary.reason, 500)}")
    if found.red:
        found.write.append(f"what makes these {kind} pass")


def docs(one: Adoption) -> Found:
    """The generated parts of the documentation."""
    found = Found()
    if one.library:
        for command in (
            [sys.executable, "docs/generate.py"],
            [sys.executable, "-m", "compat_matrix", "architectures", "docs/architectures.md"],
            *([[sys.executable, "docs/names.py"]] if one.release.distribution == "transformers" else []),
        ):
            code, text = one.checkout.run("docs", *command, folder=one.project)
            if code:
                found.red.append(f"{' '.join(command[1:])} ended with {code}: {one_line(text[-2000:], 2000)}")
    return found


STEPS: dict[str, Callable[[Adoption], Found]] = {
    step.__name__: step for step in (names, axes, pins, prove, cells, downstream, docs)
}
#: The options that change the result of a step.
DEPENDS = {"prove": ("types",), "cells": ("only", "few")}

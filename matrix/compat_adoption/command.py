"""``kernel-compat-matrix adopt``: what a release changes and breaks, as a report and a branch; without a release, the new ones."""

import argparse
import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console

from compat_matrix.axes import Axes, load
from compat_matrix.cells import values_of
from compat_matrix.errors import MatrixError
from compat_matrix.expressions import Expression
from compat_matrix.store import Store
from compat_matrix.store.documents import NEWS, keep
from kernel_compat_atlas.errors import AtlasError
from kernel_compat_atlas.index import Index
from kernel_compat_atlas.releases import installable, select

from .checkout import Checkout, git
from .report import markdown, report
from .steps import DEPENDS, STEPS, Adoption

note = partial(Console(stderr=True, highlight=False).print, markup=False, soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """Adopt a release, or each new one; returns the exit code."""
    axes, index = load(options.axes), Index()
    if options.only is not None:
        Expression(options.only, axes.own)
    if wrong := [step for step in options.steps or () if step not in STEPS]:
        raise MatrixError(f"there is no step {wrong[0]!r}: they are {', '.join(STEPS)}")
    files = [axes, *_others(axes)]
    found = new_releases(files, index) if options.release is None else [_named(options.release, files, index)]
    if options.list:
        remote = git(axes.folder, "remote").splitlines()
        there = git(axes.folder, "ls-remote", "--heads", "origin", "adopt/*") if "origin" in remote else ""
        jobs = [{"release": f"{name}=={version}", "branch": f"adopt/{name}-{version}"} for name, version in found]
        jobs = [job for job in jobs if f"refs/heads/{job['branch']}\n" not in f"{there}\n"]
        print(json.dumps({"include": jobs}, separators=(",", ":")))
        return 0
    if not found:
        note("no release is new")
    return max((adopt(options, axes, files, index, *one) for one in found), default=0)


def _others(axes: Axes) -> list[Axes]:
    """The other axes files in the repository, such as those of downstream suites."""
    root = Path(git(axes.folder, "rev-parse", "--show-toplevel"))
    paths = [root / one for one in git(root, "ls-files", "*axes.toml").splitlines()]
    return [load(path) for path in paths if path != axes.path]


def _required(axes: Axes) -> set[str]:
    """The distributions that some cells alone require, such as those of kernels."""
    entries = [entry for entry in axes.packages if entry.when is not None]
    return {canonicalize_name(Requirement(text).name) for entry in entries for text in entry.requires}


def _named(text: str, files: Sequence[Axes], index: Index) -> tuple[str, Version]:
    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        raise MatrixError(f"a release is written as transformers==5.24.0, not {text!r}") from None
    name, exact = canonicalize_name(wanted.name), re.fullmatch(r"==([^*,]+)", str(wanted.specifier))
    if exact is None:
        raise MatrixError(f"a release is written as transformers==5.24.0, not {text!r}")
    known = {one for axes in files for one in axes.distributions.values()} | {
        canonicalize_name(Requirement(one).name) for axes in files for entry in axes.packages for one in entry.requires
    }
    if name not in known:
        near = get_close_matches(name, known, 1)
        which = f"is it {near[0]}?" if near else f"they are {', '.join(sorted(known))}"
        raise MatrixError(f"no axis and no cell of {files[0].path.name} has the distribution {name}: {which}")
    (release,) = select(name, exact[1], index.files(name))
    return name, release.version


def new_releases(files: Iterable[Axes], index: Index) -> list[tuple[str, Version]]:
    """The releases on the index that the axes files don't have: newer minors, and newer patches than are pinned.

    The first file alone counts for the axes that it has, and for the packages that some cells require. Of the others, such as those of
    frameworks, only the newest release counts.
    """
    first: set[str] = set()
    found: dict[tuple[str, Version], None] = {}
    for number, axes in enumerate(files):
        values = values_of(axes.all_cells)
        listed = {name: [*map(Version, values[axis])] for axis, name in axes.distributions.items()}
        for name in [*listed, *(sorted(_required(axes)) if number == 0 else ())]:
            if name in first:
                continue
            try:
                there = index.files(name)
            except AtlasError as error:
                note(str(error))
                continue
            pinned = known(axes, name)
            newest = max([*listed.get(name, ()), *pinned], default=None)
            usual = installable(there) or installable(there, pre_releases=True)
            minors = {one.release[:2]: one for one in usual}
            for minor, version in [*minors.items()] if number == 0 else [*minors.items()][-1:]:
                mine = name not in listed or minor in [one.release[:2] for one in listed[name]]
                patches = [one for one in pinned if mine and one.release[:2] == minor]
                if version > max(patches) if patches else newest is not None and minor > newest.release[:2]:
                    found[name, version] = None
        first |= {*listed} if number == 0 else set()
    return [*found]


def known(axes: Axes, distribution: str) -> list[Version]:
    """The releases of a distribution in the pins, oldest first."""
    pattern = re.compile(rf"^{re.escape(distribution)}==(\S+)", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in axes.pins.glob("*.txt")] if axes.pins.is_dir() else []
    return sorted({Version(one) for text in texts for one in pattern.findall(text)})


def adopt(
    options: argparse.Namespace, axes: Axes, files: Sequence[Axes], index: Index, name: str, version: Version
) -> int:
    """Run the steps that aren't done yet, and write the report; returns 1 if something is not right, else 0."""
    checkout = Checkout.of(axes.folder, f"{name}-{version}", options.cache)
    available = index.files(name)
    (release,) = select(name, str(version), available)
    older = {one for file in files for one in known(file, name)} or installable(available)
    before = max((one for one in older if one < version and one in available), default=None)
    previous = select(name, str(before), available)[0] if before is not None else None
    adoption = Adoption(release, previous, axes, checkout, options, index)
    try:
        with FileLock(checkout.folder / "lock", timeout=0):
            found, commit = _steps(adoption)
    except Timeout:
        raise MatrixError(f"{name} {version} is being adopted by another process") from None
    document = report(adoption, found, commit)
    text = markdown(document)
    for suffix, content in (("json", json.dumps(document, indent=2) + "\n"), ("md", text)):
        (checkout.folder / f"report.{suffix}").write_text(content, encoding="utf-8")
        if options.report is not None:
            options.report.mkdir(parents=True, exist_ok=True)
            (options.report / f"{name}-{version}.{suffix}").write_text(content, encoding="utf-8")
    if options.store:
        with Store.open(options.store) as store:
            keep(store, NEWS, json.dumps({**document, "text": text, "run": None}))
    print(text, end="")
    note(f"report: {checkout.folder / 'report.md'}")
    return 0 if document["ok"] else 1


def _steps(one: Adoption) -> tuple[dict[str, Any], str]:
    """Run each step whose result isn't kept for the same commit and options; returns the results, and the branch's commit."""
    options, checkout = one.options, one.checkout
    path = checkout.folder / "state.json"
    state: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {"commits": [], "steps": {}}
    done: dict[str, Any] = {}
    commit, placed = checkout.base, ""
    for name, step in STEPS.items():
        inputs = {word: getattr(options, word) for word in DEPENDS.get(name, ())}
        given = [str(one.release), one.release.file.sha256, str(one.axes.path), name, inputs, commit]
        key = hashlib.sha256(json.dumps(given).encode()).hexdigest()
        kept = state["steps"].get(key)
        if kept is None and options.steps and name not in options.steps:
            continue
        if kept is None:
            if placed != commit:
                checkout.at(commit, state["commits"])
            note(f"{one.release}: {name}")
            started = time.monotonic()
            found = step(one)
            placed = checkout.commit(f"{one.release}: {name}")
            kept = {"found": found.as_json(), "commit": placed, "seconds": round(time.monotonic() - started, 1)}
            state["steps"][key] = kept
            state["commits"].append(placed)
            scratch = path.with_suffix(".part")
            scratch.write_text(json.dumps(state), encoding="utf-8")
            scratch.replace(path)
        done[name], commit = kept, kept["commit"]
    checkout.remove()
    return done, commit

"""The names that a project reads and that a release has renamed or removed, whether a seam declares them or not."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from .index import Index
from .project.uses import source_files
from .published import Cache, Published
from .releases import Release
from .scopes import Function, last_name, parse

#: A name that fewer places have lost may have gone by chance: that is reported, and doesn't count as certain.
FEW = 3

#: The names that each place defines: ``module:Class.method()`` its parameters, ``module:Class`` its attributes and methods.
Places = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Gone:
    """A name that a project reads, and that most places which defined it no longer do.

    Attributes:
        was: the number of places that defined it in the old release.
        now: the number of those places that define it in the new release.
        nearest: the name that most of the others have instead; empty if none has appeared there.
        places: two of them.
        reads: where the project reads it, as ``file:line``.
    """

    name: str
    was: int
    now: int
    nearest: str
    places: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def certain(self) -> bool:
        """Whether so many places changed that it is no coincidence."""
        return self.was - self.now >= FEW

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {**asdict(self), "certain": self.certain}

    def __str__(self) -> str:
        instead = f"it is {self.nearest!r} now" if self.nearest else "nothing is there instead"
        read = f"read in {self.reads[0]}" + f" and {len(self.reads) - 1} more" * (len(self.reads) > 1)
        return f"{self.name!r} is gone from {self.was - self.now} of {self.was} places: {instead}; {read}"


class Reads(NamedTuple):
    """The names that sources read.

    Attributes:
        places: of each, as ``file:line``.
        together: the spellings that a `Role` has in different releases.
    """

    places: Mapping[str, Sequence[str]]
    together: Collection[frozenset[str]]


def compare(old: Places, new: Places, read: Reads) -> list[Gone]:
    """The names that are read and that at least half of their places have lost, the most frequent first.

    A name that went elsewhere isn't lost, nor is one that a role of the sources lists with its successor.
    """
    reads = read.places
    was = Counter(name for names in old.values() for name in {*names} & reads.keys())
    now = Counter(name for names in new.values() for name in {*names} & reads.keys())
    lost: dict[str, list[str]] = defaultdict(list)
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for place, names in old.items():
        there = new.get(place, ())
        for name in ({*names} & reads.keys()).difference(there):
            lost[name].append(place)
            votes[name].update(_likeness(name, names, there))
    found = []
    for name, some in lost.items():
        if 2 * len(some) >= was[name] and 2 * now[name] <= was[name]:
            instead = votes[name].most_common(1)[0][0] if votes[name] else ""
            if any({name, instead} <= some for some in read.together):
                continue
            count = was[name] - len(some)
            found.append(Gone(name, was[name], count, instead, tuple(sorted(some)[:2]), tuple(reads[name])))
    return sorted(found, key=lambda one: (-one.was, one.name))


def nearest(name: str, before: Sequence[str], there: Sequence[str]) -> str:
    """The name in a list that most likely replaces one of an earlier list; empty if none is new or alike."""
    likeness = _likeness(name, before, there)
    return max(likeness, key=likeness.__getitem__) if likeness else next(iter(get_close_matches(name, there, 1)), "")


def _likeness(name: str, before: Sequence[str], there: Sequence[str]) -> Counter[str]:
    """For each new name how likely it replaces one: by its position, and by its letters. In thousandths."""
    counts: Counter[str] = Counter()
    for position, other in enumerate(there):
        if other not in before:
            same = position == before.index(name) if name in before else False
            counts[other] = round(1000 * (same + SequenceMatcher(None, name, other).ratio())) + 1
    return counts


def places(release: Release, index: Index, cache: Cache) -> dict[str, tuple[str, ...]]:
    """The names that each function and class of a release defines; modules that this Python can't parse have none.

    A wheel for one platform, such as torch's, isn't read: it is large, and has thousands of modules.
    """
    found: dict[str, dict[str, None]] = {}
    if release.file.is_wheel and not release.file.filename.endswith("-any.whl"):
        return {}
    with Published(release.file, index, cache) as published:
        for path in published.members:
            if path.endswith(".py"):
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                try:
                    tree = parse(published.read(path))
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
                _define(tree, f"{module}:", "", found)
    return {place: tuple(names) for place, names in found.items()}


def _define(node: ast.AST, place: str, owner: str, found: dict[str, dict[str, None]]) -> None:
    """Add the names that a node's children define: in a function those it sets on its first parameter are its class's, `owner`."""
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, (Function, ast.ClassDef)):
            found.setdefault(place, {})[child.name] = None
            inner = f"{place}.{child.name}".replace(":.", ":")
            if isinstance(child, Function):
                given = child.args
                found[f"{inner}()"] = {one.arg: None for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            _define(child, inner, place if isinstance(child, Function) else inner, found)
            continue
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and not isinstance(node, Function):
            found.setdefault(place, {})[child.id] = None
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and last_name(child.value) == "self":
            found.setdefault(owner, {})[child.attr] = None
        _define(child, place, owner, found)


def read_names(folder: Path, exclude: Sequence[str] = ()) -> Reads:
    """The names in the source files of a folder: attributes, keywords, and strings that are identifiers.

    Args:
        exclude: patterns of paths that are left out.
    """
    found: dict[str, list[str]] = {}
    together: set[frozenset[str]] = set()
    for path in source_files(folder, exclude):
        try:
            tree = parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for name, line in _named(tree):
            found.setdefault(name, []).append(f"{path.relative_to(folder)}:{line}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and last_name(node.func) == "Role":
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                together.add(frozenset(text for text in texts if isinstance(text, str)))
    return Reads({name: sorted(some) for name, some in found.items()}, together)


def _named(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value, node.lineno


def moved(target: str, old: Places, new: Places) -> str:
    """Where a seam that a release lacks is now: under another name at the same place, or elsewhere under its own; empty if unknown.

    Args:
        target: ``module:attribute``, or ``module:Class.attribute``.
    """
    owner, _, name = target.replace(":", ":.").rpartition(".")
    place = owner if owner.endswith(":") else owner.replace(":.", ":")
    elsewhere: Collection[str] = [other for other, names in new.items() if name in names and not other.endswith("()")]
    if elsewhere:
        near = get_close_matches(place, elsewhere, 1, 0) or [*elsewhere]
        return f"{near[0]}.{name}".replace(":.", ":")
    instead = nearest(name, old.get(place, ()), new.get(place, ()))
    return f"{place}.{instead}".replace(":.", ":") if instead else ""

"""The proofs of every model type on every release of transformers, from the table that ships with the library."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from kernel_compat.proofs import table

from .compatibility import table_line, write
from .ranges import Releases

LEGEND = {
    "equal": "what eager attention computes, in every case that applies",
    "refused": "an error says why; `load`: one of its classes can't be loaded under a flash attention name",
    "wrong": "something else than eager attention; no model of the type is loaded under a registered name",
    "crashed": "any other error, where eager attention works",
    "no recipe": "no tiny model could be made: it is tried once more when one is loaded",
}

#: A verdict with the cases that have it.
Verdict = tuple[str, Sequence[str]]

#: Consecutive releases, empty for all since the type's first one, with the verdicts that a type has there, the worst first.
Span = tuple[str, Sequence[Verdict]]


def rows() -> Iterator[tuple[str, str, list[Span]]]:
    """The model types, sorted, each with the first release in the table that has it."""
    every = table.releases()
    known = {release: table.known(release) for release in every}
    write = Releases(every)
    for name in sorted({name for types in known.values() for name in types}):
        verdicts = {release: _verdicts(known[release][name]) for release in every if name in known[release]}
        since = next(iter(verdicts))
        all_since = every[every.index(since) :]
        groups = [[*some] for verdict, some in groupby(every, verdicts.get) if verdict]
        yield name, since, [("" if some == all_since else write(some), verdicts[some[0]]) for some in groups]


def counts() -> dict[str, Counter[str]]:
    """By release, the number of types, and of those whose worst verdict is each one."""
    return {
        release: Counter(word for found in table.known(release).values() for word in ("types", _verdicts(found)[0][0]))
        for release in table.releases()
    }


def _verdicts(cases: Mapping[str, Sequence[str]]) -> tuple[Verdict, ...]:
    return tuple((word, cases[word]) for word in (*table.WORSE, "no recipe") if word in cases) or (("equal", ()),)


def values() -> dict[str, Any]:
    """The contents of the page of model types."""
    return {"rows": [*rows()], "counts": counts(), "legend": LEGEND}


def run(arguments: argparse.Namespace) -> int:
    """Write the document; returns the exit code."""
    write(arguments.path, document())
    return 0


def document() -> str:
    """The rows as Markdown; deterministic."""
    words = [*LEGEND]
    lines = [
        "# Architectures",
        "",
        "What tiny models of each model type compute under a registered attention name, compared with eager attention: [proving](proving.md)",
        "says how. A type is one row, with the cases that aren't equal, and since which of the proven releases it is there; `5.0 to 5.4` is every",
        "proven release between. Written by `kernel-compat-matrix architectures` from the table that ships with the library: edits are lost.",
        "",
        "| verdict | |",
        "|---|---|",
        *(f"| {word} | {meaning} |" for word, meaning in LEGEND.items()),
        "",
        "## Releases",
        "",
        table_line("transformers", "types", *words),
        "|---" * (len(words) + 2) + "|",
    ]
    lines += [
        table_line(release, *(str(found[word]) for word in ("types", *words))) for release, found in counts().items()
    ]
    lines += ["", "## Model types", "", "| type | since | |", "|---|---|---|"]
    lines += [table_line(f"`{name}`", since, " / ".join(map(_span, spans))) for name, since, spans in rows()]
    return "\n".join(lines) + "\n"


def _span(span: Span) -> str:
    releases, verdicts = span
    return (f"{releases}: " if releases else "") + "; ".join(map(_verdict, verdicts))


def _verdict(verdict: Verdict) -> str:
    word, cases = verdict
    word = f"**{word}**" if word in ("wrong", "crashed") else word
    return f"{word} in {', '.join(f'`{case}`' for case in cases)}" if cases else word

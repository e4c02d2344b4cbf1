"""Write the parts of the READMEs, of docs/ and of notebooks that are generated: supported releases, kernels, shims, modules, how to install, a framework's rows.

Usage: python docs/generate.py [--check]

With --check it writes nothing and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from itertools import accumulate, pairwise
from pathlib import Path

from kernel_compat import Features, Shim
from kernel_compat.attention.parallel.split import TokenSplit
from kernel_compat.kernels import Limit, Provider
from kernel_compat.kernels.catalog import CATALOG
from kernel_compat.patching.shim import ENTRY_POINT_GROUP, discover
from kernel_compat.releases import TORCH, TRANSFORMERS, minors

ROOT = Path(__file__).parent.parent

#: By path, as tests run this file.
INSTALLS = runpy.run_path(str(ROOT / "docs" / "installs.py"))

#: The layers of the library from top to bottom, in the order of the first import contract.
ROOMS = re.findall(
    r"\w+", re.findall(r"^layers = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)[0]
)


def documents() -> Iterator[tuple[Path, str]]:
    """The files with generated parts, and the text that each should have."""
    parts = {
        "releases": _range(TRANSFORMERS),
        "torch": _range(TORCH),
        "kernels": f"\n{_kernels()}\n",
        "limits": f"\n{_limits()}\n",
        "shims": f"\n{_shims()}\n",
        "modules": f"\n{_modules()}\n",
        "spread": f"\n{_spread()}\n",
    }
    before = {"before": "BEFORE", "address": "ADDRESS", "variable": "VARIABLE"}
    readmes = (
        ROOT / folder / "README.md"
        for folder in (".", "atlas", "compat/doctor", "compat/ops", "compat/prove", "compat/run", "matrix")
    )
    for path in [*readmes, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.ipynb"))]:
        where = os.path.relpath(ROOT / "docs" / "installing.md", path.parent)
        until = {
            marker: "" if INSTALLS["PUBLISHED"] else INSTALLS[name].format(where) for marker, name in before.items()
        }
        fill = _notebook if path.suffix == ".ipynb" else _filled
        yield path, fill(path.read_text(encoding="utf-8"), parts | until)
    yield ROOT / "docs" / "badges.svg", _badges()


def _filled(text: str, parts: dict[str, str]) -> str:
    """A document with the commands that install today, and its generated parts."""
    text = INSTALLS["installs"](text)
    for marker, part in parts.items():
        text = re.sub(rf"(<!-- {marker} -->).*?(<!-- / -->)", rf"\g<1>{part}\g<2>", text, flags=re.DOTALL)
    return re.sub(
        r"(<!-- ([\w-]+): ([^>]+) -->).*?(<!-- / -->)",
        lambda match: f"{match[1]}\n{_rows_of(ROOT / 'docs' / f'{match[2]}.md', match[3])}\n{match[4]}",
        text,
        flags=re.DOTALL,
    )


def _notebook(text: str, parts: dict[str, str]) -> str:
    """The same for each cell of a notebook, in the form in which nbformat writes it."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        cell["source"] = _filled("".join(cell["source"]), parts).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _rows_of(document: Path, name: str) -> str:
    """The rows of a document's tables of frameworks whose first field has a name, each table with its head, for a page in a folder below."""
    tables = re.findall(
        r"^(\| framework \|.+\n\|[-| ]+\n)((?:\|.+\n)+)", document.read_text(encoding="utf-8"), re.MULTILINE
    )
    rows = {head: [row for row in body.splitlines() if name in row.split("|")[1]] for head, body in tables}
    shown = [head + "\n".join(lines) for head, lines in rows.items() if lines]
    assert shown, f"{document.name}: no table has a row for {name}"
    text = re.sub(r"\]\(#", f"]({document.name}#", "\n\n".join(shown))
    return re.sub(r"\]\((?!\w+:)", "](../", text)


def shims() -> list[Shim]:
    """Every shim of the library and its neighbours, in the order of their names."""
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.module.startswith("kernel_compat_")]
    found, broken = discover(points)
    assert not broken, broken
    return found


def _range(releases: dict[str, str]) -> str:
    oldest, *_, newest = minors(releases)
    return f"{oldest} to {newest}"


def _badges() -> str:
    """The supported releases and the licence as a picture, beside each other."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", metadata)
    (licence,) = re.findall(r'^license = "(.+)"', metadata, re.MULTILINE)
    badges = {
        "python": f"{pythons[0]} to {pythons[-1]}",
        "transformers": _range(TRANSFORMERS),
        "torch": _range(TORCH),
        "licence": licence,
    }
    shapes, left = [], 0
    for fields in badges.items():
        for field, color in zip(fields, ("#555", "#1f6fb2"), strict=True):
            width = 7 * len(field) + 12
            shapes.append(
                f'<rect x="{left}" width="{width}" height="20" fill="{color}"/><text x="{left + 6}" y="14" textLength="{width - 12}">{field}</text>'
            )
            left += width
        left += 6
    words = ", ".join(map(" ".join, badges.items()))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left - 6}" height="20" role="img" aria-label="{words}">'
    return "\n".join(
        [head, '<g font-family="Verdana,sans-serif" font-size="11" fill="#fff">', *shapes, "</g>", "</svg>", ""]
    )


def _shims() -> str:
    lines = ["| shim | releases | without it | upstream | delete when |", "|---|---|---|---|---|"]
    for shim in shims():
        link = r"[\2#\3](https://github.com/\1/\2/issues/\3)"
        upstream = re.sub(r"([\w-]+)/([\w-]+)#(\d+)", link, shim.upstream)
        fields = (f"`{shim.name}`", f"{shim.distribution} `{shim.versions}`", shim.reason, upstream, shim.delete_when)
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


#: Features that the tables call by another name.
WORDS = {"window": "windows", "paged": "paged caches"}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
#: Features that every kernel has, or that have a column or a sentence of their own.
EVERY = ("causal", "gqa", "varlen", "backward", "value_head_dim")


def _kernels() -> str:
    lines = [
        "| kernel | package | compute capability | dtypes | besides causal, GQA and packed sequences |",
        "|---|---|---|---|---|",
    ]
    for name, packages in CATALOG.items():
        for package in packages:
            features = package.features
            what = f"`{package.distribution}`" + (f" {package.minimum[0]} and later" if package.minimum else "")
            dtypes = ", ".join(SHORT[dtype] for dtype in sorted(features.dtypes, key=list(SHORT).index))
            on = "any device" if "cpu" in features.devices else _capability(features)
            has = ", ".join(WORDS.get(name, name) for name in features.names() if name not in EVERY)
            lines.append(
                f"| `{name}` | {what} | {on} | {dtypes} | {has}{'' if features.backward else '; no gradients'} |"
            )
    return "\n".join(lines)


def _capability(features: Features) -> str:
    low, high = features.min_capability, features.max_capability
    assert low is not None
    return f"{high[0]}.x" if high else f"{low[0]}.{low[1]} and later"


def _limits() -> str:
    lines = ["| package | where | difference |", "|---|---|---|"]
    for package in (package for packages in CATALOG.values() for package in packages):
        for limit in package.limits:
            where = [f"before {limit.before}"] if limit.before else []
            where += ["on " + " and ".join(f"{major}.x" for major in limit.capabilities)] if limit.capabilities else []
            lines.append(f"| `{package.distribution}` | {', '.join(where)} | {_difference(package, limit)} |")
    return "\n".join(lines)


def _difference(package: Provider, limit: Limit) -> str:
    changes, parts = dict(limit.changes), []
    if "max_capability" in changes:
        parts.append(f"compute capability up to {changes.pop('max_capability')[0]}.x")
    if "max_head_dim" in changes or "head_dims" in changes:
        largest, pairs = changes.pop("max_head_dim", 128), changes.pop("head_dims", ())
        parts.append(" or ".join([f"head dimensions up to {largest}", *map(str, pairs)]))
    for field, lost in (
        ("plain_head_dims", "neither softcap nor sinks of its own"),
        ("plain_backward_head_dims", "no gradients of softcap and of sinks of its own"),
    ):
        if pairs := changes.pop(field, ()):
            parts.append(f"{lost} with head dimensions {' or '.join(map(str, pairs))}")
    if changes.pop("sinks_from", None):
        parts.append("sinks from the log-sum-exp")
    parts += [f"no gradients of {WORDS.get(name, name)}" for name in limit.forward_only]
    lost = {**WORDS, "deterministic": "deterministic backward"}
    parts += [f"no {lost.get(name, name)}" for name, value in changes.items() if value is False]
    if not parts:
        raise NotImplementedError(f"{package.distribution}: {limit}")
    return "; ".join(parts)


def _modules() -> str:
    """Every module of the library, by layer from the top, and of its neighbours, with the first line of its docstring."""
    compat = ROOT / "compat"
    lines = ["| module | contents |", "|---|---|"]
    for neighbour in sorted(compat.glob("*/kernel_compat_*")):
        lines += _rows(neighbour.rglob("*.py"), neighbour.parent)
    library = compat / "kernel_compat"
    for room in ROOMS:
        module = library / f"{room}.py"  # first: a folder may be left over with bytecode in it
        lines += _rows([module] if module.exists() else (library / room).rglob("*.py"), library)
    return "\n".join(lines)


def _spread() -> str:
    """Which of 4 ranks holds each of 64 tokens, and which computes its attention where two neighbours share heads."""
    length, ranks, lengths = 64, 4, [24, 8, 16, 8, 8]
    packed = [*pairwise([0, *accumulate(lengths)])]
    zigzag = _owners(TokenSplit.balanced([(0, length)], length, ranks))
    lines = {
        "": "".join(f"{token:<8}" for token in range(0, length, 8)),
        "one causal sequence": zigzag,
        f"packed, {' + '.join(map(str, lengths))}": _owners(TokenSplit.balanced(packed, length, ranks)),
        'split="contiguous"': _owners(TokenSplit.contiguous(length, ranks)),
    }
    computed = {
        f"head_ranks=2, {half} half": "".join(str(int(rank) // 2 * 2 + unit) for rank in zigzag)
        for unit, half in enumerate(("first", "second"))
    }
    return "\n\n".join(
        [
            _drawn("The rank of each token:", lines),
            _drawn(
                "The rank that computes the attention of each token of one causal sequence, of each half of the heads:",
                computed,
            ),
        ]
    )


def _owners(split: TokenSplit) -> str:
    holds = {token: rank for rank, runs in enumerate(split.runs) for run in runs for token in range(*run)}
    return "".join(str(holds[token]) for token in range(split.length))


def _drawn(title: str, lines: dict[str, str]) -> str:
    return "\n".join([title, "", "```text", *(f"{name:36}{line}".rstrip() for name, line in lines.items()), "```"])


def _rows(files: Iterable[Path], folder: Path) -> Iterator[str]:
    for path in sorted(files, key=lambda path: (path.parent, path.stem != "__init__", path.stem)):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        package = name.removesuffix(".__init__")
        yield f"| **`{package}`** | **{first}** |" if package != name else f"| `{name}` | {first} |"


def main() -> int:
    """Write the files that are out of date, or with --check list them; returns the exit code."""
    stale = [(path, text) for path, text in documents() if path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is out of date: run python docs/generate.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

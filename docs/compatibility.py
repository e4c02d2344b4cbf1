"""Write docs/compatibility.md, its two pictures and the sentence in README.md from results of the matrix.

Usage: python docs/compatibility.py [STORE]

The results are those in docs/compatibility.sqlite.xz, or those of a store, which then replace that file. To add results to it: unpack
it with xz, `kernel-compat-matrix merge` the new ones into it, and give it as the store. `kernel-compat-matrix atlas --store` replaces its
atlas.
"""

from __future__ import annotations

import argparse
import lzma
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from compat_matrix import axes as axes_file
from compat_matrix.axes import Axes
from compat_matrix.cells import Cell
from compat_matrix.results import ENDED, Figure, Past
from compat_matrix.store import Store, documents
from compat_matrix.views import common, compatibility
from compat_matrix.views.trend import LEAST, noise, number

ROOT = Path(__file__).parent.parent

#: The state of a combination, of the states of its cells, one for each Python: the first of these that one of them has.
STATES = {
    "failed": "fails",
    "known": "known issue",
    "flaky": "flaky",
    "passed": "works",
    "not run": "not run",
    "excluded": "can't exist",
}
LEGEND = ("passed", "flaky", "known", "failed", "not run", "excluded")
#: States in the legend only if a combination has them.
RARE = ("known", "flaky")

#: The table of figures compares this torch with the newest one.
BEFORE = "2.11"

#: The options of a command that name paths.
PATHS = re.compile(r" --(axes|base-python|cache|export|offline|store)[ =]('[^']*'|\S+)")

#: The verdict of a combination by its transformers and its torch.
Verdicts = dict[tuple[str, str], str]

#: Figures by name without the kernel, then kernel, then torch; the newest one last.
Figures = dict[str, dict[str, dict[str, list[Figure]]]]


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("store", nargs="?", metavar="STORE", help="the SQLite file of a store, or its URL")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with README.md, docs and matrix/axes.toml")
    options = parser.parse_args()
    axes = axes_file.load(options.root / "matrix" / "axes.toml")
    docs, readme = options.root / "docs", options.root / "README.md"
    with TemporaryDirectory() as folder:
        results, packed = Path(folder, "results.sqlite"), docs / "compatibility.sqlite.xz"
        if options.store:
            keep(options.store, results, axes.project_name)
        else:
            results.write_bytes(lzma.decompress(packed.read_bytes()))
        with Store.open(str(results), create=False) as store:
            current = store.current()
            said = sentence(store, current)
            (docs / "compatibility.svg").write_text(grid(axes, current), encoding="utf-8")
            text = document(store, current, said)
            torches = common.by_version({cell.torch for cell in axes.all_cells})
            where, found = figures(store, torches[-1])
        if options.store:
            packed.write_bytes(lzma.compress(results.read_bytes()))
    if found:
        (docs / "torch_figures.svg").write_text(plot(found, torches), encoding="utf-8")
        text += "\n".join(section(axes, where, found, torches[-1])) + "\n"
    compatibility.write(docs / "compatibility.md", text)
    text = readme.read_text(encoding="utf-8")
    text = re.sub(r"(<!-- cells -->).*?(<!-- / -->)", lambda match: match[1] + said + match[2], text, flags=re.DOTALL)
    readme.write_text(text, encoding="utf-8")


def keep(url: str, path: Path, project: str) -> None:
    """Write the results and the atlas of a store into a new one: without logs, paths in commands, and the times of tests."""
    with Store.open(url, create=False) as store:
        runs = store.runs()
        store.export([run.id for run in runs], path)
        with Store.open(str(path)) as kept:
            kept.claim(project)
            for atlas in documents.kept(store, documents.ATLAS):
                documents.keep(kept, documents.ATLAS, atlas.content, atlas.made)
    with closing(sqlite3.connect(path)) as connection:
        commands = [(PATHS.sub("", run.command), run.id) for run in runs]
        connection.executemany("UPDATE run SET command = ? WHERE name = ?", commands)
        connection.executescript("DELETE FROM log; UPDATE test SET seconds = 0; VACUUM")


def document(store: Store, current: Mapping[Cell, Past], said: str) -> str:
    """The document of the matrix, with the sentence and the picture above its tables."""
    text = compatibility.document(store, current).replace("kernel-compat-matrix compatibility", "docs/compatibility.py")
    head, _, tables = text.partition("\n## ")
    return f"{head}\nThe [matrix](matrix.md) ran {said}.\n\n![The results by transformers and torch](compatibility.svg)\n\n## {tables}"


def sentence(store: Store, current: Mapping[Cell, Past]) -> str:
    """How many cells ran where and when, and how many of them work: the end of a sentence."""
    ran = {cell: past for cell, past in current.items() if past.summary.verdict in ENDED}
    on = Counter(cell.device for cell in ran)
    environments = (store.environment(past.run.id, cell) for cell, past in ran.items() if cell.device == "cuda")
    gpus = sorted({str(one["device"]) for one in environments if one.get("device")})
    named = f" ({common.one_line(', '.join(gpus))})" if gpus else ""
    places = {"cpu": "CPUs", "cuda": ("GPUs" if len(gpus) > 1 else "a GPU") + named}
    ran_on = [(on[device], place) for device, place in places.items() if on[device]]
    counted = [f"{count}{' cells' * (n == 0)} on {place}" for n, (count, place) in enumerate(ran_on)]
    if not counted:
        return "no cells"
    times = sorted(past.summary.started for past in ran.values() if past.summary.started)
    months = [f"{time:%B %Y}" for time in (times[0], times[-1])]
    when = f"in {months[0]}" if months[0] == months[1] else f"from {months[0]} to {months[1]}"
    ended = Counter(past.summary.verdict for past in ran.values())
    words = {"known": "with known issues"}
    worked = ", ".join(f"{ended[verdict]} {words.get(verdict, verdict)}" for verdict in ENDED if ended[verdict])
    worked = "all passed" if {*ended} == {"passed"} else worked
    return f"{' and '.join(counted)}, {when}; {worked}"


# The grid.


def verdicts(axes: Axes, current: Mapping[Cell, Past]) -> dict[common.Kind, Verdicts]:
    """The verdict of each combination, by FlashAttention and device; none of a kind that can't exist."""
    states = {cell: "excluded" if because else "not run" for cell, because in axes.all_cells.items()}
    states |= {cell: past.summary.verdict for cell, past in current.items() if past.summary.verdict in ENDED}
    found: dict[common.Kind, Verdicts] = {}
    for cell, state in states.items():
        own = found.setdefault(common.kind(cell), {})
        place = cell.transformers, cell.torch
        own[place] = min(state, own.get(place, state), key=list(STATES).index)
    kinds = [kind for kind, own in found.items() if {*own.values()} != {"excluded"}]
    return {kind: found[kind] for kind in sorted(kinds, key=common.kernel_place)}


# Units of the pictures are pixels of a phone: 360 wide. Their colours are those of GitHub's pages, light and dark. A renderer of SVG
# needs to know no more than rules for classes, and the media query.
LIGHT = {"page": "#fff", "text": "#1f2328", "faint": "#59636e", "line": "#d1d9e0"}
LIGHT |= {"failed": "#cf222e", "known": "#bf8700", "flaky": "#1a7f37", "passed": "#1a7f37"}
DARK = {"page": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "line": "#3d444d"}
DARK |= {"failed": "#f85149", "known": "#d29922", "flaky": "#2ea043", "passed": "#2ea043"}
#: Of lines, by kernel: colours that people with any colour vision can tell apart (Okabe and Ito), on white and on black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


def svg(width: float, height: float, scale: float, title: str, parts: Iterable[str]) -> str:
    """A picture on a background of its own, light or dark as the reader's system; shown larger where there is room."""

    def rules(colours: Mapping[str, str]) -> str:
        fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
        return fills + f".not-run,.axis{{stroke:{colours['line']}}}.cross{{stroke:{colours['page']}}}"

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width * scale:g}" height="{height * scale:g}" role="img">',
            f"<title>{escape(title)}</title>",
            "<style>text{font-size:9px;font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}.strong{font-weight:600}"
            f".not-run,.axis,.cross,.series{{fill:none}}.not-run,.axis{{stroke-width:.7}}.series{{stroke-width:1.5}}{rules(LIGHT)}"
            f"@media(prefers-color-scheme:dark){{{rules(DARK)}}}</style>",
            f'<rect class="page" width="{width:g}" height="{height:g}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text_at(x: float, y: float, words: str, classes: str = "text", anchor: str = "") -> str:
    """A text whose baseline begins, or is centred or ends, at a point."""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{classes}" x="{x:g}" y="{y:g}"{where}>{escape(words)}</text>'


def mark(state: str, places: Sequence[tuple[float, float]], width: float, height: float) -> list[str]:
    """The marks of one state at places: filled, empty, a dot for what can't exist, and a cross or a dot in those that differ."""
    box = f"h{width:g}v{height:g}h-{width:g}z"
    if state == "excluded":  # a dot in the middle
        places, box = [(x + width / 2 - 0.75, y + height / 2 - 0.75) for x, y in places], "h1.5v1.5h-1.5z"
    drawn = "".join(f"M{x:g} {y:g}{box}" for x, y in places)
    found = [f'<path class="{"faint" if state == "excluded" else state.replace(" ", "-")}" d="{drawn}"/>']
    middles = [(x + width / 2, y + height / 2) for x, y in places]
    if state == "failed":
        drawn = "".join(f"M{x - 2.5:g} {y - 2.5:g}l5 5m0 -5l-5 5" for x, y in middles)
        found.append(f'<path class="cross" stroke-width="1.4" d="{drawn}"/>')
    elif state in RARE:
        drawn = "".join(f"M{x - 1:g} {y - 1:g}h2v2h-2z" for x, y in middles)
        found.append(f'<path class="page" d="{drawn}"/>')
    return found


def grid(axes: Axes, current: Mapping[Cell, Past]) -> str:
    """The picture of the verdicts: a panel for each kernel, transformers to the right and torch downwards."""
    found = verdicts(axes, current)
    every = {place for own in found.values() for place in own}
    releases, torches = (common.by_version(values) for values in zip(*every, strict=True))
    left, right, row = 30, 354, 8
    column = (right - left) / len(releases)
    shown = labelled(releases)

    def scale(y: float) -> list[str]:
        return [text_at(left + (n + 0.5) * column, y, releases[n], "faint", "middle") for n in shown]

    parts = [text_at(6, 12, "transformers, to the right; torch, downwards", "faint"), *scale(26)]
    top = 30.0
    for kind, own in found.items():
        counts = Counter(own.values())
        words = (f"{counts[state]} {state}" for state in STATES if counts[state] and state != "excluded")
        name, said = escape(common.kernel_name(*kind)), ", ".join(words)
        parts.append(f"<g><title>{name}: {said}</title>")
        title = f'<tspan class="text strong">{name}</tspan><tspan class="faint">: {said}</tspan>'
        parts.append(f'<text x="{left}" y="{top + 10:g}">{title}</text>')
        top += 14
        for line, torch in enumerate(torches):
            parts.append(text_at(left - 4, top + line * row + row - 1, torch, "faint", "end"))
        for state in STATES:
            places = [
                (round(left + n * column, 1), top + line * row)
                for line, torch in enumerate(torches)
                for n, release in enumerate(releases)
                if own.get((release, torch)) == state
            ]
            if places:
                parts += mark(state, places, round(column - 1.5, 1), row - 1.5)
        parts.append("</g>")
        top += len(torches) * row + 4
    parts += scale(top + 8)
    top += 18
    place = 6.0
    occurring = {state for own in found.values() for state in own.values()}
    for state in LEGEND:
        if state in occurring or state not in RARE:
            parts += [*mark(state, [(place, top)], 10, 6.5), text_at(place + 14, top + 6.5, STATES[state])]
            place += 22 + 4.8 * len(STATES[state])
    return svg(360, top + 14, 1.5, "What works: transformers and torch by kernel", parts)


def labelled(releases: Sequence[str]) -> list[int]:
    """The places of the releases with a label: the ends, new majors and every fifth minor, if there is room."""
    keys = [common.version_key(release)[0].release for release in releases]
    majors = [n for n in range(1, len(keys)) if keys[n][:1] != keys[n - 1][:1]]
    fifths = [n for n, key in enumerate(keys) if key[1:2] and key[1] % 5 == 0]
    found: list[int] = []
    for n in (0, len(releases) - 1, *majors, *fifths):
        if all(abs(n - other) >= 3 for other in found):
            found.append(n)
    return sorted(found)


# The figures.


def figures(store: Store, after: str) -> tuple[list[tuple[str, str, str]], Figures]:
    """The figures of one device, transformers and Python, and all of these that have figures, that one first.

    Figures of different ones aren't comparable. First comes the one that has most figures for both releases of torch that are compared,
    `BEFORE` and `after`. If several have as many, the one with the newest transformers comes first, even if others have more figures in all.
    """
    wholes = {run.whole for run in store.runs() if run.suite == "figures"}
    places: dict[tuple[str, str, str], Figures] = {}
    for cell, every in store.measured(wholes).items():
        # Not in the order received: the runs of several machines are merged in any order.
        for one in sorted(every, key=lambda one: one.run.started):
            name, _, kernel = one.figure.name.rpartition(", ")
            own = places.setdefault((one.device, cell.transformers, cell.python), {})
            own.setdefault(name, {}).setdefault(kernel, {}).setdefault(cell.torch, []).append(one.figure)

    def rank(place: tuple[str, str, str]) -> tuple[object, ...]:
        device, transformers, python = place
        series = [by_torch for kernels in places[place].values() for by_torch in kernels.values()]
        compared = sum({BEFORE, after} <= {*by_torch} for by_torch in series)
        size = sum(len(by_torch) for by_torch in series)
        return compared, common.version_key(transformers), size, common.version_key(python), device

    order = sorted(places, key=rank, reverse=True)
    return order, places[order[0]] if order else {}


def short(kernel: str) -> str:
    """The name of a kernel for a label: ``FA4``, ``torch``."""
    name = kernel.removeprefix("flash_attention_")
    return f"FA{name}" if name[:1].isdigit() else name


def kernels_of(found: Figures) -> list[str]:
    """The kernels with a figure, in the order of the tables."""
    return sorted({kernel for kernels in found.values() for kernel in kernels})


def plot(found: Figures, torches: Sequence[str]) -> str:
    """A small plot for each figure, two in a row: torch to the right, a line for each kernel, from zero."""
    colours = {kernel: COLOURS[n % len(COLOURS)] for n, kernel in enumerate(kernels_of(found))}
    width, height = 250, 138
    parts: list[str] = []
    for n, name in enumerate(sorted(found)):
        parts.append(f'<g transform="translate({n % 2 * width} {n // 2 * height})">')
        parts += [*_panel(name, found[name], torches, colours), "</g>"]
    return svg(2 * width, math.ceil(len(found) / 2) * height + 6, 1.5, "Figures by torch and kernel", parts)


def _panel(
    name: str, kernels: Mapping[str, Mapping[str, list[Figure]]], torches: Sequence[str], colours: Mapping[str, str]
) -> Iterator[str]:
    left, right, top, bottom = 36, 180, 24, 122
    values = [figures[-1].value for own in kernels.values() for figures in own.values()]
    step = _step(max(*values, 0) - min(*values, 0))
    low = math.floor(min(*values, 0) / step)
    high = max(math.ceil(max(*values, 0) / step), low + 1)

    def x(torch: str) -> float:
        return round(left + 6 + torches.index(torch) * (right - left - 12) / max(len(torches) - 1, 1), 1)

    def y(value: float) -> float:
        return round(bottom - (value / step - low) / (high - low) * (bottom - top), 1)

    unit = next(figures[-1].unit for own in kernels.values() for figures in own.values())
    yield text_at(6, 14, f"{name}{f', {unit}' if unit else ''}", "text strong")
    for tick in range(low, high + 1):
        value = tick * step
        yield f'<path class="axis" d="M{left} {y(value):g}H{right}"/>'
        yield text_at(left - 4, y(value) + 3, f"{value:g}", "faint", "end")
    for torch in torches:
        yield text_at(x(torch), bottom + 11, torch, "faint", "middle")
    ends: dict[str, float] = {}
    for kernel, own in sorted(kernels.items()):
        known = [torch for torch in torches if torch in own]
        if not known:
            continue
        # A release without a value interrupts the line.
        drawn = "".join(
            f"{'L' if place and torches[torches.index(torch) - 1] in own else 'M'}{x(torch):g} {y(own[torch][-1].value):g}"
            for place, torch in enumerate(known)
        )
        yield f'<path class="series" stroke="{colours[kernel]}" d="{drawn}"/>'
        for torch in known:
            yield f'<circle fill="{colours[kernel]}" cx="{x(torch):g}" cy="{y(own[torch][-1].value):g}" r="2"/>'
        ends[kernel] = y(own[known[-1]][-1].value)
    for kernel, place in _apart(ends, 10.5, top, bottom).items():
        yield f'<circle fill="{colours[kernel]}" cx="{right + 6}" cy="{place:g}" r="2.5"/>'
        yield text_at(right + 12, place + 3, short(kernel))


def _step(span: float) -> float:
    """The distance of ticks, of which there are three to six."""
    if not span:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= span)


def _apart(places: Mapping[str, float], least: float, top: float, bottom: float) -> dict[str, float]:
    """Places at least so far apart, each as near to its own as the order allows."""
    order = sorted(places, key=lambda name: (places[name], name))
    found: dict[str, float] = {}
    lowest = top
    for name in order:
        found[name] = lowest = max(places[name], lowest)
        lowest += least
    highest = bottom
    for name in reversed(order):
        found[name] = highest = round(min(found[name], highest), 1)
        highest -= least
    return found


def section(axes: Axes, where: Sequence[tuple[str, str, str]], found: Figures, after: str) -> list[str]:
    """The part of the document with the plot, and the figures on two releases of torch."""
    device, transformers, python = where[0]
    left_out = " Those of other GPUs and releases aren't shown." if where[1:] else ""
    better = {
        one.better
        for kernels in found.values()
        for own in kernels.values()
        for figures in own.values()
        for one in figures
    }
    lower = " Lower is better." if better == {"lower"} else ""
    lines = [
        *("", "## Figures", ""),
        f"What each kernel costs on a torch, with transformers {transformers} and Python {python} on {common.one_line(device) or 'a GPU'}.{lower}",
        f"`tests/gpu/test_figures.py` says what is measured. Each number is the newest one of its cell.{left_out} The host",
        "takes most of a step and all of the overhead: times vary with what else runs there ([On a GPU](matrix.md#on-a-gpu)); memory and errors don't.",
        "",
        "![Each figure by torch, a line for each kernel](torch_figures.svg)",
        "",
        f"From torch {BEFORE} to {after}; empty: not measured. A change is called better or worse if it is beyond the noise of at least",
        f"{LEAST} results on torch {BEFORE} ([Figures](matrix-results.md#figures)); any other may be noise.",
        "",
        f"| kernel | figure | torch {BEFORE} | torch {after} | ratio |",
        "|---|---|---|---|---|",
    ]
    for kernel in kernels_of(found):
        for name in sorted(found):
            pair = [found[name].get(kernel, {}).get(torch, []) for torch in (BEFORE, after)]
            shown = [number(every[-1].value, every[-1].unit) if every else "" for every in pair]
            if any(shown):
                lines.append(compatibility.table_line(f"`{kernel}`", name, *shown, _ratio(*pair)))
    missing = {
        f"- {common.KERNELS.get(cell.flash_attention, cell.flash_attention)} doesn't exist on torch {cell.torch}: {because}."
        for cell, because in axes.all_cells.items()
        if because and cell.device == "cuda" and cell.flash_attention != "none"
        if (cell.transformers, cell.python) == (transformers, python) and cell.torch in (BEFORE, after)
    }
    return [*lines, *([""] if missing else []), *sorted(missing)]


def _ratio(before: Sequence[Figure], after: Sequence[Figure]) -> str:
    """The ratio of the newest figures, and what it means if it isn't noise; empty unless both are positive and in one unit."""
    if not before or not after:
        return ""
    old, new = before[-1], after[-1]
    if old.unit != new.unit or min(old.value, new.value) <= 0:
        return ""
    expected = noise([one.value for one in before if one.unit == old.unit])
    side = expected.side(new.value) if expected and new.better else 0
    word = {0: "", (1 if new.better == "higher" else -1): ", better"}.get(side, ", worse")
    return f"{new.value / old.value:.2f}{word}"


if __name__ == "__main__":
    main()

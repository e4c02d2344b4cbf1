"""Every combination of an axes file: the judge, the API, `check` and the report's script say no only where a rule does, and why."""

from __future__ import annotations

import dataclasses
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli
from asked import answered_alike
from served import served
from stored import failed, not_run, passed, stored

from compat_matrix.axes import OWN, Axes, load
from compat_matrix.cells import WORDS, Cell
from compat_matrix.matrix_client import _ask
from compat_matrix.results import FINE, CellResult
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store
from compat_matrix.views.rules import Rules
from compat_matrix.views.verdicts import WORST, Answer, Judge, Verdict, wanted

RESULTS = Path(__file__).parents[2] / "docs" / "compatibility.sqlite.xz"

#: The rules of this project, on few releases on both sides of each of their bounds.
FEW = {
    "python": ["3.10", "3.11"],
    "transformers": ["5.20", "5.21", "5.22"],
    "torch": ["2.10", "2.11", "2.14", "2.15"],
    "flash_attention": [*WORDS["flash_attention"]],
    "device": [*WORDS["device"]],
}

#: Axes of a project's own, in one table of two; rules on them and on patches; and one device that two rules exclude.
OWN_AXES = """
version = 1
[[axes]]
python = ["3.11", "3.12"]
transformers = ["5.9", "5.10.0", "5.10.2"]
flash_attention = ["none", "fa2", "fa4"]
device = ["cpu", "cuda"]
peft = ["0.17", "0.18"]
backend = ["gloo", "nccl"]
[[axes]]
python = ["3.12"]
transformers = ["5.9"]
device = ["cpu", "cuda"]
[[exclude]]
when = "device==cpu and (flash_attention!=none or backend==nccl)"
because = "the CPU has neither"
[[exclude]]
when = "peft<0.18 and transformers>=5.10.2"
because = "peft 0.17 is for transformers up to 5.10.1"
[[exclude]]
when = "flash_attention in (fa2, fa4) and not (backend==nccl and python>=3.12)"
because = "kernels need nccl and Python 3.12"
[[exclude]]
when = "not peft and device==cuda"
because = "without peft nothing runs on a GPU"
[[tests]]
command = ["pytest"]
"""


PYTHONS = pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])


class Truth(NamedTuple):
    """What the rules and the results say of a combination.

    Attributes:
        excluded: for each device that may be meant, the reasons of all rules that exclude it.
        verdicts: those of the results of its cells.
    """

    excluded: list[set[str]]
    verdicts: list[Verdict]

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        return min(self.verdicts, key=WORST.index) if self.verdicts else "refused" if all(self.excluded) else "unknown"

    @property
    def reasons(self) -> set[str]:
        """The rules that exclude it on every device; if none does, those that exclude it on one."""
        return set.intersection(*self.excluded) or set.union(*self.excluded)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The repository's results."""
    path = tmp_path_factory.mktemp("committed") / "results.sqlite"
    path.write_bytes(lzma.decompress(RESULTS.read_bytes()))
    with Store.open(str(path), create=False) as store:
        yield store


@pytest.fixture(scope="module")
def few() -> Axes:
    axes = tomli.loads(OWN.read_text(encoding="utf-8"))
    return Axes.model_validate(axes | {"axes": FEW})


def questions(axes: Axes, python: str = "") -> list[dict[str, str]]:
    """Every combination of the axes, or those of a Python, with its device and without."""
    every = [dict(cell.axes) for cell in axes.all_cells if python in ("", cell.python)]
    without = [{axis: value for axis, value in one.items() if axis != "device"} for one in every]
    return every + [dict(one) for one in dict.fromkeys(tuple(one.items()) for one in without)]


def cells_of(axes: Axes, asked: Mapping[str, str]) -> list[Cell]:
    """The cell of a combination on each device that may be meant. Where torch's own kernel is an axis, that is meant by none on CUDA."""
    devices = [asked["device"]] if "device" in asked else WORDS["device"]
    absent = {"transformers": "", "torch": "", "flash_attention": "none"}
    cells = [Cell.of(absent | dict(asked) | {"device": device}) for device in devices]
    own = any(cell.flash_attention == "torch" for cell in axes.all_cells)
    torchs = {("none", "cuda"): "torch"} if own else {}
    kernels = [torchs.get((cell.flash_attention, cell.device), cell.flash_attention) for cell in cells]
    return [dataclasses.replace(cell, flash_attention=kernel) for cell, kernel in zip(cells, kernels, strict=True)]


def truth(axes: Axes, results: Mapping[Cell, Verdict], asked: Mapping[str, str]) -> Truth:
    cells = cells_of(axes, asked)
    excluded = [{rule.because for rule in axes.exclude if rule.when(cell)} for cell in cells]
    for cell, reasons in zip(cells, excluded, strict=True):
        if (because := axes.all_cells.get(cell)) is not None:
            assert because in reasons if because else not reasons
    return Truth(excluded, [results[cell] for cell in cells if cell in results])


def check(axes: Axes, results: Mapping[Cell, Verdict], asked: Mapping[str, str], answer: Answer) -> None:
    """An answer is what the rules and the results say."""
    true = truth(axes, results, asked)
    assert answer.verdict == true.verdict, (asked, answer.verdict, answer.reason)
    assert answer.match == ("exact" if true.verdict != "unknown" else "nearest" if results else "none"), asked
    if true.verdict == "refused":
        assert {*answer.reason.split("; ")} == true.reasons, (asked, answer.reason)
        assert {one.reason for one in answer.refusals if one.rule} >= true.reasons, asked
    if true.verdict == "unknown":
        assert answer.reason == "no run has planned it", asked
    devices = [asked["device"]] if "device" in asked else WORDS["device"]
    on = {
        device: min(own, key=WORST.index) if own else "refused" if reasons else "unknown"
        for device, cell, reasons in zip(devices, cells_of(axes, asked), true.excluded, strict=True)
        for own in [[results[cell]] if cell in results else []]
    }
    assert {one.device: one.verdict for one in answer.devices} == on, asked
    assert {one.device: one.verdict for one in answer.kernels} == on, asked
    assert answer.verdict == "unknown" or not answer.against
    cells = [cell for cell in cells_of(axes, asked) if cell not in results]
    states = Counter("refused" if why else "unknown" for cell in cells if (why := axes.all_cells.get(cell)) is not None)
    assert answer.counts.get("unknown", 0) == states["unknown"], asked
    assert answer.counts.get("refused", 0) == (states["refused"] or true.verdict == "refused"), asked
    tested = {verdict in FINE for verdict in true.verdicts}
    differ = len(tested) + (states["unknown"] > 0) + (states["refused"] > 0) > 1
    assert bool(answer.mixed) is (differ and true.verdict != "refused"), (asked, answer.mixed)


def results_of(store: Store) -> dict[Cell, Verdict]:
    """The verdicts of the cells that ran."""
    found: dict[Cell, Verdict] = {}
    for past in store.newest():
        if past.summary.verdict and past.summary.verdict != "not run":
            found[past.cell] = "wrong" if past.summary.kind == "wrong" else past.summary.verdict
    return found


def some_results(cells: Iterable[Cell], part: int) -> Iterator[CellResult]:
    """Results of one in so many cells: one that fails and one that is flaky in each seven."""
    for number, cell in enumerate(cells):
        if number % part == 0:
            place = number // part % 7
            flaky = dataclasses.replace(passed(cell), verdict="flaky", reason="a test is flaky")
            yield {0: failed(cell, "crash", "it died"), 1: flaky, 2: failed(cell, "wrong", "off")}.get(
                place, passed(cell)
            )


@PYTHONS
def test_every_combination_with_the_committed_results(committed: Store, python: str) -> None:
    axes, results = load(OWN), results_of(committed)
    asked = questions(axes, python)
    assert (len(asked), len(results)) == (2610, 443)
    for one, answer in zip(asked, answered_alike(Judge(committed, Rules.of(axes)), asked), strict=True):
        check(axes, results, one, answer)


@pytest.mark.slow
@PYTHONS
def test_every_combination_over_http(committed: Store, monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    """`check` and the API."""
    axes, newest = load(OWN), committed.newest()
    results = results_of(committed)
    monkeypatch.setattr(Store, "newest", lambda self: newest)
    with served(create_app(committed, axes, Settings())) as address:
        for one in questions(axes, python):
            names = {"flash_attention": "flash_attn"}
            answer = _ask(address, {names.get(axis, axis): value for axis, value in one.items()}, 60)
            true = truth(axes, results, one)
            assert answer.verdict == true.verdict, one
            assert answer.bad is (true.verdict in ("refused", "wrong", "failed")), one
            assert true.verdict != "refused" or {*answer.reason.split("; ")} == true.reasons, one


@pytest.mark.parametrize("planned", ["nothing", "the CPU", "a fifth", "all"])
def test_every_combination_of_a_few_releases(few: Axes, tmp_path: Path, planned: str) -> None:
    """With the axes file; and without it, where nothing may be refused that the axes allow."""
    parts = {"nothing": [], "the CPU": [], "a fifth": some_results(few.cells, 5), "all": some_results(few.cells, 1)}
    with Store.open(str(tmp_path / "store.db")) as store:
        if planned != "nothing":
            excluded = few.excluded("device==cpu" if planned == "the CPU" else None)
            store.new_run([], excluded=excluded)
            stored(store, parts[planned])
        results, asked = results_of(store), questions(few)
        for one, answer in zip(asked, answered_alike(Judge(store, Rules.of(few)), asked), strict=True):
            check(few, results, one, answer)
        refused = 0
        for one, answer in zip(asked, answered_alike(Judge(store), asked), strict=True):
            true = truth(few, results, one)
            assert answer.verdict in (true.verdict, "unknown"), one
            assert true.verdict == answer.verdict or not true.verdicts, one
            refused += answer.verdict == "refused"
        assert bool(refused) is (planned != "nothing")


@pytest.mark.parametrize("part", [0, 4, 1])
def test_every_combination_of_a_projects_own_axes(tmp_path: Path, part: int) -> None:
    (tmp_path / "axes.toml").write_text(OWN_AXES)
    axes = load(tmp_path / "axes.toml")
    with Store.open(str(tmp_path / "store.db")) as store:
        stored(store, some_results(axes.cells, part) if part else [])
        results = results_of(store)
        asked = [one for one in questions(axes) if "peft" in one]
        for one, answer in zip(asked, answered_alike(Judge(store, Rules.of(axes)), asked), strict=True):
            check(axes, results, one, answer)
        # Where other axes are left out, too, it is refused only if all of its cells are.
        asked = [{axis: one[axis] for axis in one if axis not in ("peft", left)} for one in asked for left in one]
        asked = [dict(one) for one in dict.fromkeys(tuple(one.items()) for one in asked)]
        for one, answer in zip(asked, answered_alike(Judge(store, Rules.of(axes)), asked), strict=True):
            meant = [why for cell, why in axes.all_cells.items() if one.items() <= cell.axes.items()]
            assert answer.verdict != "refused" or all(meant), one


TOO_OLD = "flash-attn 2.8.3 compiles as C++17, and torch 2.14 and later need C++20"

#: A combination with releases outside of the axes or with patches, the verdict, and a part of the reason.
OUTSIDE = [
    ("flash_attention=fa2 torch=2.14", "refused", "C++20"),
    ("flash_attention=fa2 torch=2.14 device=cuda", "refused", "C++20"),
    ("flash_attention=fa2 torch=2.14.0+cu130 transformers=5.9.1 python=3.12.4", "refused", "C++20"),
    ("flash_attention=fa2 torch=2.16 device=cuda", "refused", "C++20"),
    ("flash_attention=fa2 torch=3 device=cuda", "refused", "C++20"),
    ("flash_attention=fa2 torch=2.13 device=cpu", "refused", "kernels for CUDA alone"),
    (
        "flash_attention=fa2 torch=2.13.7 transformers=5.3 python=3.12",
        "unknown",
        "another patch of it was tested: torch 2.13",
    ),
    ("flash_attention=fa2 torch=2.9", "unknown", "the matrix has no torch 2.9"),
    ("flash_attention=fa3 torch=2.9", "refused", "torch has from 2.11 on"),
    ("flash_attention=fa3 torch=2.10.1", "refused", "torch has from 2.11 on"),
    ("flash_attention=fa3 torch=2.11", "passed", ""),
    ("flash_attention=fa4 torch=2.10 transformers=5.1 python=3.12", "unknown", "no run has planned it"),
    ("transformers=5.30 torch=2.16", "unknown", "the matrix has no transformers 5.30 and no torch 2.16"),
    ("transformers=5.30.0rc1 python=3.10", "refused", "transformers 5.21 and later need Python 3.11"),
    ("transformers=5.30 python=3.9.2", "refused", "transformers 5.21 and later need Python 3.11"),
    ("transformers=4.40 python=3.9", "unknown", "the matrix has no transformers 4.40 and no python 3.9"),
    ("transformers=5.20.9 python=3.10", "unknown", "no run has planned it"),
    ("python=3.14", "unknown", "the matrix has no python 3.14"),
    ("torch=2.15 python=3.10", "refused", "torch 2.15 and later need Python 3.11"),
    ("device=cuda flash_attention=none", "passed", ""),
    ("device=cuda flash_attention=none python=3.10 torch=2.15", "refused", "torch 2.15 and later need Python 3.11"),
    ("flash_attention=none", "passed", ""),
    ("flash_attention=flash-attn|2.8.3.post2 torch=2.12 transformers=5.9.0", "passed", ""),
    ("flash_attention=2.8 torch=2.12", "passed", ""),
    (
        "flash_attention=flash-attn|2.8.3 torch=2.12",
        "unknown",
        "another patch of it was tested: flash-attn package 2.8.3.post2",
    ),
    ("flash_attention=flash-attn|2.7.1 torch=2.12", "unknown", "the matrix has no flash-attn package 2.7.1"),
    (
        "flash_attention=flash-attn|1.0.9 torch=2.12",
        "unknown",
        "the matrix has no flash-attn fa1 and no flash-attn package 1.0.9",
    ),
    ("flash_attention=fa3-fwd|0.0.3 torch=2.12", "passed", ""),
    ("flash_attention=flash-attn-3|3.0.0b1 torch=2.12", "unknown", "the matrix has no flash-attn package 3.0.0b1"),
    ("flash_attention=flash-attn-4|4.0.0b36 torch=2.12", "passed", ""),
    (
        "flash_attention=flash-attn-4|4.0.0b9 torch=2.12",
        "unknown",
        "another patch of it was tested: flash-attn package 4.0.0b36",
    ),
    ("flash_attention=flash-attn|2.8.3 torch=2.14", "refused", "C++20"),
    ("device=cuda", "passed", ""),
]


def test_releases_outside_of_the_axes_and_patches(committed: Store) -> None:
    asked = [dict(one.replace("|", " ").split("=") for one in text.split()) for text, _, _ in OUTSIDE]
    answers = answered_alike(Judge(committed, Rules.of(load(OWN))), asked)
    for answer, (text, verdict, reason) in zip(answers, OUTSIDE, strict=True):
        assert (answer.verdict, text) == (verdict, text)
        assert reason in answer.reason, text
        assert ("alone" in answer.reason) is ("alone" in reason), text
        assert answer.tested, text


def test_a_rule_about_patches_is_for_these_alone(tmp_path: Path) -> None:
    (tmp_path / "axes.toml").write_text(
        'version = 1\n[axes]\npython = ["3.12"]\ntransformers = ["5.9"]\n[[tests]]\ncommand = ["pytest"]\n'
        '[[exclude]]\nwhen = "transformers<5.9.2"\nbecause = "broken before 5.9.2"\n'
    )
    axes = load(tmp_path / "axes.toml")
    with Store.open(str(tmp_path / "store.db")) as store:
        said = {
            one: Judge(store, Rules.of(axes))({"transformers": one}).verdict
            for one in ("5.9", "5.9.1", "5.9.2", "5.10")
        }
        assert said == {"5.9": "refused", "5.9.1": "refused", "5.9.2": "unknown", "5.10": "unknown"}
        stored(store, [passed(Cell("3.12", "5.9", flash_attention="none"))])  # of 5.9.1
        said = {
            one: Judge(store, Rules.of(axes))({"transformers": one}).verdict
            for one in ("5.9", "5.9.0", "5.9.1", "5.9.2")
        }
        assert said == {"5.9": "passed", "5.9.0": "refused", "5.9.1": "passed", "5.9.2": "unknown"}
        assert Judge(store, Rules.of(axes))({"transformers": "5.9.2"}).minor == "passed"


def test_where_some_work_and_some_fail_the_headline_is_no_plain_no(few: Axes, tmp_path: Path) -> None:
    cpu = next(one for one in few.cells if one.device == "cpu")
    gpu = next(
        one
        for one in few.cells
        if one.device == "cuda" and (one.transformers, one.torch) == (cpu.transformers, cpu.torch)
    )
    with Store.open(str(tmp_path / "store.db")) as store:
        stored(store, [failed(cpu), passed(gpu)])
        asked = [{"transformers": cpu.transformers, "torch": cpu.torch}, dict(cpu.axes), dict(gpu.axes)]
        either, *alone = answered_alike(Judge(store, Rules.of(few)), asked)
        assert either.verdict == "failed"
        assert either.mixed == "1 of 2 tested combinations work, 6 were never run, 10 are excluded"
        assert [(one.verdict, one.mixed) for one in alone] == [("failed", ""), ("passed", "")]
        stored(store, [passed(dataclasses.replace(cpu, torch="2.15"))])
        (either,) = answered_alike(Judge(store, Rules.of(few)), [{"transformers": cpu.transformers, "device": "cpu"}])
        without = either.kernels[0]
        assert (without.verdict, without.sign) == ("failed", "known")
        assert without.mixed.startswith("1 of 2 tested combinations work, ")


#: A combination, the headline, how near the evidence is, and what is said of each kernel.
SAID: list[tuple[dict[str, str], str, str, list[str]]] = [
    (
        {"transformers": "5.9", "torch": "2.14", "device": "cuda"},
        "3 tested combinations work, 9 were never run, 4 are excluded",
        "minor",
        [
            "torch's own FlashAttention, FlashAttention-3, FlashAttention-4: 1 tested combination works, 3 were never run",
            f"FlashAttention-2: refused {TOO_OLD}",
        ],
    ),
    (
        {"transformers": "5.8", "torch": "2.12"},
        "1 tested combination works, 19 were never run, 16 are excluded",
        "minor",
        [
            "CPU, no FlashAttention: 1 tested combination works, 3 were never run",
            "CPU, FlashAttention-2, FlashAttention-3, FlashAttention-4, torch's own FlashAttention: refused FlashAttention has"
            " kernels for CUDA alone",
            "GPU, torch's own FlashAttention, FlashAttention-2, FlashAttention-3, FlashAttention-4: unknown",
        ],
    ),
    (
        {"transformers": "5.9", "torch": "2.12", "python": "3.12", "flash_attention": "none"},
        "",
        "minor",
        ["CPU: passed", "GPU, torch's own FlashAttention: passed"],
    ),
    (
        {"transformers": "5.9.3", "torch": "2.12", "python": "3.12", "flash_attention": "none", "device": "cpu"},
        "It was never run; it works with transformers 5.9.0",
        "minor",
        [],
    ),
    (
        {"transformers": "5.9.0", "torch": "2.12.1", "python": "3.12", "flash_attention": "none"},
        "",
        "patch",
        ["CPU: passed"],
    ),
    (
        {"transformers": "5.9.0", "torch": "2.12", "python": "3.12", "flash_attention": "none"},
        "",
        "minor",
        ["CPU: passed"],
    ),
    ({"torch": "2.12.0", "device": "cpu"}, "It was never run; it works with torch 2.12.1", "minor", []),
    (
        {"transformers": "5.9.0", "torch": "2.12.1", "python": "3.12", "flash_attention": "2.8"},
        "1 tested combination works, 1 is excluded",
        "minor",
        [],
    ),
    (
        {
            "transformers": "5.9.0",
            "torch": "2.12.1",
            "python": "3.12",
            "device": "cuda",
            "flash_attention": "2.8.3.post2",
        },
        "",
        "patch",
        [],
    ),
    (
        {
            "transformers": "5.9.0",
            "torch": "2.12.1",
            "python": "3.12",
            "device": "cuda",
            "flash_attention": "flash-attn 2.8.3",
        },
        "It was never run; it works with flash-attn package 2.8.3.post2",
        "minor",
        [],
    ),
]


def test_the_headline_and_each_kernel_say_what_ran_and_what_is_excluded(committed: Store) -> None:
    answers = answered_alike(Judge(committed, Rules.of(load(OWN))), [one for one, *_ in SAID])
    for answer, (asked, headline, closeness, kernels) in zip(answers, SAID, strict=True):
        assert (answer.mixed, answer.closeness) == (headline, closeness), asked
        said = [f"{names}: {one.mixed or one.verdict} {one.reason}".strip() for names, one in answer.lines]
        assert said[: len(kernels)] == kernels, asked


def test_a_patch_that_was_never_run_is_neither_a_yes_nor_a_no(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        stored(store, [passed(Cell("3.12", "5.9", "2.11")), failed(Cell("3.12", "5.8", "2.11"))])
        asked = [{"transformers": one} for one in ("5.9.2", "5.8.3")] + [{"torch": "2.11.4"}]
        works, fails, either = answered_alike(Judge(store), asked)
        assert {(one.verdict, one.sign) for one in (works, fails, either)} == {("unknown", "unknown")}
        assert works.mixed == "It was never run; it works with transformers 5.9.1"
        assert fails.mixed == "It was never run; it fails with transformers 5.8.1"
        assert either.mixed == "It was never run; with other patches 1 of 2 tested combinations work"
        assert [one.minor for one in (works, fails, either)] == ["passed", "failed", "failed"]


def test_the_nearest_of_another_series_is_its_nearest_end_and_what_is_left_out_is_the_newest(tmp_path: Path) -> None:
    releases = ["4.56", "4.57", "5.0", "5.9", "5.24", "7.1", "7.30"]
    with Store.open(str(tmp_path / "store.db")) as store:
        stored(store, [passed(Cell("3.12", one, torch)) for one in releases for torch in ("2.9", "2.10", "2.15")])
        asked = [{"transformers": one} for one in ("6.0", "8.2", "5.12", "5.0", "4.58", "3.0")] + [{"torch": "3.0"}]
        found = [answer.tested[0] for answer in answered_alike(Judge(store), asked)]
        assert [one.cell.transformers for one in found] == ["5.24", "7.30", "5.9", "5.0", "4.57", "4.56", "7.30"]
        assert {one.cell.torch for one in found} == {"2.15"}


def test_what_was_planned_and_not_run_has_the_reason(few: Axes, tmp_path: Path) -> None:
    cell = next(one for one in few.cells if one.device == "cuda")
    with Store.open(str(tmp_path / "store.db")) as store:
        run = stored(store, [not_run(cell)])
        (answer,) = answered_alike(Judge(store, Rules.of(few)), [dict(cell.axes)])
        assert (answer.verdict, answer.reason) == ("unknown", f"{cell} was not run in {run}: no CUDA device")


def test_failures_next_to_it_speak_against_what_was_never_run(few: Axes, tmp_path: Path) -> None:
    cells = {
        (one.transformers, one.torch): one for one in few.cells if one.base.startswith("py311") and one.device == "cpu"
    }
    with Store.open(str(tmp_path / "store.db")) as store:
        results = [failed(cells["5.22", "2.14"]), passed(cells["5.20", "2.14"]), failed(cells["5.21", "2.10"])]
        stored(store, [*results, passed(cells["5.21", "2.11"]), failed(cells["5.22", "2.15"])])
        asked = {"transformers": "5.21", "torch": "2.14"}
        (answer,) = answered_alike(Judge(store, Rules.of(few)), [asked])
        assert answer.verdict == "unknown"
        assert [one.cell for one in answer.against] == [cells["5.22", "2.14"]]
        assert answer.works
        assert answer.works.cell == cells["5.21", "2.11"]


def test_a_failure_has_its_test_and_its_error(few: Axes, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        stored(store, [failed(few.cells[0])])
        answer = Judge(store, Rules.of(few))(wanted(few.cells[0].axes)).detailed(store)
        failure = answer.tested[0].failure
        assert failure
        assert (failure.test, failure.error, failure.issue) == (
            "tests/test_names.py::test_fine",
            "where 1 is one",
            "",
        )

"""docs/compatibility.py: the sentence, the pictures and the figures are those of the store."""

from __future__ import annotations

import lzma
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import pytest
import requests
from served import served
from sqlalchemy import text
from stored import cells, failed, not_run, passed, stored
from waiting import LONG

from compat_matrix.cells import Cell
from compat_matrix.pages import seams
from compat_matrix.results import CellResult, Figure, Test
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store, documents

SCRIPT = Path(__file__).parents[2] / "docs" / "compatibility.py"
GPU = "NVIDIA H100 80GB HBM3"

AXES = """
version = 1
[axes]
python = ["3.11", "3.12"]
transformers = ["4.57", "5.0", "5.23"]
torch = ["2.10", "2.11", "2.15"]
flash_attention = ["none", "fa2", "fa4"]
device = ["cpu", "cuda"]
[[exclude]]
when = "device==cpu and flash_attention!=none"
because = "no kernels"
[[exclude]]
when = "device==cuda and flash_attention==none"
because = "no difference"
[[exclude]]
when = "flash_attention==fa2 and torch>=2.15"
because = "it needs C++20"
[project]
path = "."
[[tests]]
command = ["pytest"]
"""

Write = Callable[[], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("docs", "matrix"):
        (tmp_path / folder).mkdir()
    (tmp_path / "matrix" / "axes.toml").write_text(AXES)
    (tmp_path / "README.md").write_text("Before. <!-- cells -->old<!-- / --> After. <!-- kernels -->kept<!-- / -->\n")
    return tmp_path


@pytest.fixture
def write(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Write:
    def write() -> None:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), store.url, "--root", str(root)])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return write


def on_gpu(result: CellResult, device: str = GPU) -> CellResult:
    return replace(result, environment={**result.environment, "device": device})


def measured(store: Store, cell: Cell, *figures: Figure, device: str = GPU) -> None:
    run = store.new_run([cell], command="kernel-compat-matrix run --suite figures", partial=True)
    store.add(run, on_gpu(passed(cell, tests=[Test("test_figures", "passed", 1.0, figures=figures)]), device))
    store.finish(run, "finished")


def gpu_cell(torch: str, kernel: str = "fa4", transformers: str = "5.23") -> Cell:
    return Cell("3.12", transformers, torch, kernel, "cuda")


def panels(root: Path) -> dict[str, dict[str, int]]:
    """The number of marks by class, by the title of the panel."""
    found: dict[str, dict[str, int]] = {}
    space = "{http://www.w3.org/2000/svg}"
    for group in ElementTree.parse(root / "docs" / "compatibility.svg").iter(f"{space}g"):
        marks = {path.attrib["class"]: path.attrib["d"] for path in group.iter(f"{space}path")}
        found[group.findtext(f"{space}title", "")] = {name: drawn.count("M") for name, drawn in marks.items()}
    return found


def rows(root: Path) -> list[str]:
    text = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    return [line for line in text.partition("## Figures")[2].splitlines() if line.startswith("| `")]


def test_a_store(root: Path, store: Store, write: Write) -> None:
    grid = cells(["4.57", "5.0", "5.23"], ["2.10", "2.11"])
    stored(store, [failed(grid[0]), *map(passed, grid[1:])])
    stored(store, [passed(replace(grid[0], python="3.11"))])  # one Python of two fails
    ran = [on_gpu(passed(gpu_cell("2.15"))), on_gpu(passed(gpu_cell("2.11"))), not_run(gpu_cell("2.10"))]
    december = datetime(2026, 12, 1, tzinfo=timezone.utc)
    stored(store, [*ran, replace(on_gpu(failed(gpu_cell("2.11", "fa2"))), started=december)])
    write()

    said = f"7 cells on CPUs and 3 on a GPU ({GPU}), from November 2026 to December 2026; 8 passed, 2 failed"
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert readme == f"Before. <!-- cells -->{said}<!-- / --> After. <!-- kernels -->kept<!-- / -->\n"
    assert panels(root) == {
        "no FlashAttention, CPU: 1 failed, 5 passed, 3 not run": {"failed": 1, "cross": 1, "passed": 5, "not-run": 3},
        "FlashAttention-2, GPU: 1 failed, 5 not run": {"failed": 1, "cross": 1, "not-run": 5, "faint": 3},
        "FlashAttention-4, GPU: 2 passed, 7 not run": {"passed": 2, "not-run": 7},
    }
    document = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert f"The [matrix](matrix.md) ran {said}." in document
    assert "(compatibility.svg)" in document
    assert "Written by `docs/compatibility.py`" in document
    assert "| 5.23 | 2.11, 2.15 | 3.12 | works | `tf5` | 1 | 3 |" in document
    assert "## Figures" not in document  # none measured
    assert not (root / "docs" / "torch_figures.svg").exists()


def test_known_failures_and_flaky_tests_are_shown(root: Path, store: Store, write: Write) -> None:
    first, second, third = cells(torch=["2.10"])
    stored(store, [replace(passed(first), verdict="flaky"), replace(passed(second), verdict="known"), passed(third)])
    write()
    assert ">3 cells on CPUs, in November 2026; 1 passed, 1 flaky, 1 with known issues<" in (
        root / "README.md"
    ).read_text("utf-8")
    assert panels(root)["no FlashAttention, CPU: 1 known, 1 flaky, 1 passed, 6 not run"]["known"] == 1
    picture = (root / "docs" / "compatibility.svg").read_text(encoding="utf-8")
    assert {"known issue", "flaky"} <= {*re.findall(r">([^<>]+)</text>", picture)}


def test_figures(root: Path, store: Store, write: Write) -> None:
    def step(value: float, kernel: str = "flash_attention_4") -> Figure:
        return Figure(f"step time, {kernel}", value, "ms")

    measured(store, gpu_cell("2.11"), step(99.0), device="another GPU")
    measured(store, gpu_cell("2.10"), step(30.0))
    measured(store, gpu_cell("2.11"), step(40.0))
    measured(store, gpu_cell("2.11"), step(20.0), Figure("overhead, flash_attention_4", -1.5, "µs"))
    measured(store, gpu_cell("2.15"), step(25.0), Figure("overhead, flash_attention_4", 3.0, "µs"))
    measured(store, gpu_cell("2.11", "fa2"), step(21.5, "flash_attention_2"))
    measured(store, gpu_cell("2.11", "torch"), step(5.0, "flash_attention_torch on FA4"))
    write()

    assert rows(root) == [
        "| `flash_attention_2` | step time | 21.5 ms |  |  |",
        "| `flash_attention_4` | overhead | -1.5 µs | 3 µs |  |",
        "| `flash_attention_4` | step time | 20 ms | 25 ms | 1.25 |",
        "| `flash_attention_torch on FA4` | step time | 5 ms |  |  |",
    ]
    document = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert "transformers 5.23 and Python 3.12 on NVIDIA H100" in document
    assert "Those of other GPUs and releases aren't shown." in document
    assert "- FlashAttention-2 doesn't exist on torch 2.15: it needs C++20." in document
    picture = (root / "docs" / "torch_figures.svg").read_text(encoding="utf-8")
    assert {"overhead, µs", "step time, ms", "FA2", "FA4", "torch on FA4"} <= {
        *re.findall(r">([^<>]+)</text>", picture)
    }
    # A line for each kernel and figure, and a circle for each value and each label.
    assert picture.count('class="series"') == 4
    assert picture.count("<circle") == 7 + 4
    write()
    assert (root / "docs" / "torch_figures.svg").read_text(encoding="utf-8") == picture


def test_a_figure_is_that_of_the_run_which_began_last(root: Path, store: Store, write: Write) -> None:
    for value in (10.0, 20.0):
        measured(store, gpu_cell("2.11"), Figure("step time, flash_attention_4", value, "ms"))
    with store.writing() as connection:  # as if it came from another machine, later
        connection.execute(text("UPDATE run SET started = '2020-01-01 00:00:00' WHERE id = 2"))
    write()
    assert rows(root) == ["| `flash_attention_4` | step time | 10 ms |  |  |"]


def test_the_newest_transformers_that_compares_as_many_is_shown(root: Path, store: Store, write: Write) -> None:
    def step(value: float) -> Figure:
        return Figure("step time, flash_attention_4", value, "ms")

    for torch in ("2.10", "2.11", "2.11", "2.15"):
        measured(store, gpu_cell(torch), step(10.0))
    measured(store, gpu_cell("2.11", transformers="5.24"), step(20.0))
    write()
    assert rows(root) == ["| `flash_attention_4` | step time | 10 ms | 10 ms | 1.00 |"]
    measured(store, gpu_cell("2.15", transformers="5.24"), step(30.0))
    write()
    assert rows(root) == ["| `flash_attention_4` | step time | 20 ms | 30 ms | 1.50 |"]


def test_a_missing_release_interrupts_the_line(root: Path, store: Store, write: Write) -> None:
    for torch in ("2.10", "2.15"):
        measured(store, gpu_cell(torch), Figure("step time, flash_attention_4", 10.0, "ms"))
    write()
    picture = (root / "docs" / "torch_figures.svg").read_text(encoding="utf-8")
    (line,) = re.findall(r'class="series"[^>]* d="([^"]+)"', picture)
    assert (line.count("M"), line.count("L")) == (2, 0)


@pytest.mark.parametrize(("after", "said"), [(15.0, "1.50, worse"), (5.0, "0.50, better"), (10.04, "1.00")])
def test_only_a_change_beyond_the_noise_is_called_one(
    root: Path, store: Store, write: Write, after: float, said: str
) -> None:
    for value in (10.0, 10.1, 9.9, 10.0, 10.1, 10.0):
        measured(store, gpu_cell("2.11"), Figure("step time, flash_attention_4", value, "ms"))
    measured(store, gpu_cell("2.15"), Figure("step time, flash_attention_4", after, "ms"))
    write()
    assert rows(root) == [f"| `flash_attention_4` | step time | 10 ms | {after:g} ms | {said} |"]


def test_the_documents_are_those_of_the_results_in_this_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SCRIPT.parent.parent
    written = [
        *(f"docs/{name}" for name in ("compatibility.md", "compatibility.svg", "torch_figures.svg")),
        "README.md",
    ]
    for name in ("README.md", "docs/compatibility.sqlite.xz", "matrix/axes.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(here / name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--root", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    for name in written:
        assert (tmp_path / name).read_bytes() == (here / name).read_bytes(), "run docs/compatibility.py"


def test_the_results_that_are_kept_give_the_same_document(root: Path, store: Store, write: Write) -> None:
    command = "kernel-compat-matrix run --suite figures --store '/a path/x.sqlite' --offline=/b -j 1"
    run = store.new_run([gpu_cell("2.11")], command=command, partial=True)
    store.add(run, on_gpu(passed(gpu_cell("2.11"), tests=[Test("t", "passed", 1.5)])))
    stored(store, [passed(cells()[0]), failed(cells()[1])])
    write()
    texts = {path.name: path.read_bytes() for path in root.glob("docs/*") if path.suffix != ".xz"}
    packed = root / "docs" / "compatibility.sqlite.xz"
    (root / "kept.sqlite").write_bytes(lzma.decompress(packed.read_bytes()))
    with Store.open(str(root / "kept.sqlite"), create=False) as kept:
        assert kept.run(run).command == "kernel-compat-matrix run --suite figures -j 1"
        found = kept.result(run, gpu_cell("2.11"))
        assert (found.log, [(test.nodeid, test.seconds) for test in found.tests]) == ("", [("t", 0.0)])
    sys.argv = [str(SCRIPT), "--root", str(root)]  # the fixture restores them
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert texts == {path.name: path.read_bytes() for path in root.glob("docs/*") if path.suffix != ".xz"}


def test_the_atlas_of_a_store_is_kept_with_its_results(root: Path, store: Store, write: Write, tmp_path: Path) -> None:
    stored(store, [passed(cells()[0])])
    (root / "matrix" / "pyproject.toml").write_text('[project]\nname = "mine"')
    made = datetime(2026, 11, 1, tzinfo=timezone.utc)
    documents.keep(store, documents.ATLAS, '{"seams": ["old"]}')
    documents.keep(store, documents.ATLAS, '{"seams": []}', made)
    write()
    (tmp_path / "kept.sqlite").write_bytes(lzma.decompress((root / "docs" / "compatibility.sqlite.xz").read_bytes()))
    with Store.open(str(tmp_path / "kept.sqlite"), create=False) as kept:
        (atlas,) = documents.kept(kept, documents.ATLAS, 5)
        assert (atlas.content, atlas.made) == ('{"seams": []}', made)
        assert kept.project == "mine"


def test_the_results_in_this_repository_have_seams(tmp_path: Path) -> None:
    """A service of them, and a report, show the seams."""
    path = tmp_path / "results.sqlite"
    path.write_bytes(lzma.decompress(SCRIPT.with_name("compatibility.sqlite.xz").read_bytes()))
    with Store.open(str(path), create=False) as store:
        assert store.project == "kernel-compat"
        pages = seams.values(store)
        assert {"transformers", "torch"} <= pages.keys()
        for name, page in pages.items():
            assert page["releases"], name
        assert len(pages["transformers"]["releases"]) >= 29
        assert sum(len(page["seams"]) for page in pages.values()) > 90
        with served(create_app(store, None, Settings())) as address:
            shown = requests.get(f"{address}/seams?distribution=transformers", timeout=LONG).text
    shown = shown.replace("<wbr>", "")
    assert "transformers.modeling_flash_attention_utils:lazy_import_flash_attention" in shown


def test_the_pictures_are_small_and_of_this_repository() -> None:
    docs = SCRIPT.parent
    assert (docs / "compatibility.svg").stat().st_size < 60_000
    assert "(docs/compatibility.svg)" in (docs.parent / "README.md").read_text(encoding="utf-8")
    assert "<!-- cells -->" in (docs.parent / "README.md").read_text(encoding="utf-8")

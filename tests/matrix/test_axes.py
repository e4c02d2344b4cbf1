from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import product
from pathlib import Path

import pytest

from compat_matrix.axes import OWN, Axes, load
from compat_matrix.cells import Cell
from compat_matrix.errors import MatrixError
from kernel_compat import releases

GOOD = """\
version = 1
exclude_newer = "2026-11-15"

[axes]
python = ["3.10", "3.11"]
transformers = [
    "4.57", # the last of its kind
    "5.20",
    "5.21",
]
torch = ["2.10", "2.11"]
flash_attention = ["none", "fa4"]
device = ["cpu", "cuda"]

[[exclude]]
when = "python<3.11 and transformers>=5.21"
because = "transformers 5.21 needs Python 3.11"

[[exclude]]
when = "device==cpu and fa!=none or device==cuda and fa==none"
because = "no kernel"

[project]
path = "."

[[packages]]
requires = ["numpy"]

[[packages]]
when = "flash_attention==fa4"
requires = ["flash-attn-4"]
part = "base"

[[tests]]
command = ["pytest", "tests"]
when = "device==cpu"

[[tests]]
command = ["pytest", "tests/gpu"]
minutes = 0.5
gpus = 1
environment = { HF_HUB_OFFLINE = "1" }

[[known]]
when = "transformers>=5.20"
test = "tests/test_generate.py::test_beams[*]"
issue = "https://github.com/huggingface/transformers/issues/1"
until = "2026-12-31"
because = "beams are reordered twice"

[[known]]
test = "tests/test_load.py::test_sharded"
issue = "https://github.com/pytorch/pytorch/issues/2"
until = "2027-01-31"
because = "a wrong stride"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "axes.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(folder: Path, text: str) -> str:
    with pytest.raises(MatrixError) as raised:
        load(written(folder, text))
    return str(raised.value)


@pytest.fixture
def axes(tmp_path: Path) -> Axes:
    return load(written(tmp_path, GOOD))


def line(text: str, part: str) -> int:
    """The number of the line in which the part occurs first."""
    return text[: text.index(part)].count("\n") + 1


def test_the_axis_of_flash_attention_in_any_spelling(tmp_path: Path) -> None:
    names = ("flash_attention", "flash-attn", "flash_attn")
    found = [load(written(tmp_path, GOOD.replace("flash_attention", name))) for name in names]
    assert found[0].all_cells == found[1].all_cells == found[2].all_cells
    assert {cell.flash_attention for cell in found[1].all_cells} == {"none", "fa4"}
    assert found[0].own == found[1].own == found[2].own
    twice = GOOD.replace("flash_attention =", 'flash-attn = ["none"]\nflash_attention =')
    with pytest.raises(MatrixError, match=r"axes\.flash_attention: there is no such axis; is it flash-attn\?"):
        load(written(tmp_path, twice))


@pytest.mark.parametrize(
    ("old", "new", "at", "says"),
    [
        ("version = 1", "version = 2", "version = 2", "version: Input should be 1"),
        ("version = 1\n", "", "exclude_newer", "version: Field required"),
        ("version = 1", 'version = 1\nname = "x"', "name =", "name: Extra inputs are not permitted"),
        ('"2026-11-15"', '"last week"', "last week", "exclude_newer: Input should be a valid date"),
        ('"2026-11-15"', '"2026-11-1599"', "2026-11-1599", "exclude_newer: Input should be a valid date"),
        ('"2026-11-15"', '"2026-13-45"', "2026-13-45", "exclude_newer: "),
        ('["3.10", "3.11"]', '"3.10"', 'python = "3.10"', "axes.python: Input should be a valid list"),
        ('["3.10", "3.11"]', "[3.10]", "python = [3.10]", "axes.python.0: Input should be a valid string"),
        ('["3.10", "3.11"]', "[]", "python = []", "axes.python: List should have at least 1 item"),
        ('"5.20",', '"newest",', '"newest"', "axes.transformers.1: a version is a release such as 5.4 or 5.4.0"),
        ('"5.21",', '"5.x",', '"5.x"', "axes.transformers.2: a version is a release such as 5.4 or 5.4.0"),
        ('"2.10", "2.11"', '"2.10", "2.10"', 'torch = ["2.10"', "axes.torch: 2.10 is listed twice"),
        ('"none", "fa4"', '"none", "fa5"', '"fa5"', "axes.flash_attention.1: Input should be 'none', 'fa2'"),
        ('"cpu", "cuda"', '"cpu", "rocm"', '"rocm"', "axes.device.1: Input should be 'cpu' or 'cuda'"),
        ("python =", "pyton =", "pyton =", "axes.pyton: there is no such axis; is it python?"),
        ('python = ["3.10", "3.11"]\n', "", "[axes]", "axes.python: Field required"),
        ('["3.10", "3.11"]', '["3.10.1"]', '"3.10.1"', "axes.python.0: String should match pattern"),
        ("device =", "Peft =", "Peft =", "axes.Peft: the name of an axis is a word of at most 40 lower-case letters"),
        ("device =", "only =", "only =", "axes.only: the name of an axis is a word"),
        (
            'device = ["cpu", "cuda"]',
            'peft = ["none", "0.17"]',
            "peft =",
            "axes.peft: the values of an axis are releases",
        ),
        (
            'device = ["cpu", "cuda"]',
            'mode = ["zero-3"]',
            "mode =",
            "axes.mode: a value is a release such as 0.17, or a w",
        ),
        ('device = ["cpu", "cuda"]', "mode = []", "mode =", "axes.mode: List should have at least 1 item"),
        (
            'device = ["cpu", "cuda"]',
            f'{"m" * 40} = ["{"n" * 40}"]\n{"o" * 40} = ["{"p" * 40}"]',
            "[axes]",
            "axes: the names of cells",
        ),
        ('because = "transformers 5.21', 'why = "transformers 5.21', 'why = "tr', "exclude.0.why: Extra inputs"),
        ('because = "no kernel"', 'because = ""', 'because = ""', "exclude.1.because: String should have at least"),
        ('"python<3.11 and', '"python<<3.11 and', '"python<<', "exclude.0.when: this isn't a condition on cells"),
        ("fa==none", "fa==nothing", "fa==nothing", "exclude.1.when: flash-attn is one of none, fa2"),
        ("flash_attention==fa4", "flash_attention==fa9", "==fa9", "packages.1.when: flash-attn is one of none"),
        ('part = "base"', 'part = "top"', 'part = "top"', "packages.1.part: Input should be 'base' or 'layer'"),
        ('["numpy"]', '["numpy >>> 1"]', "numpy >>> 1", "packages.0.requires.0: "),
        ("minutes = 0.5", "minutes = 0", "minutes = 0", "tests.1.minutes: Input should be greater than 0"),
        ("minutes = 0.5", 'minutes = "x"', 'minutes = "x"', "tests.1.minutes: Input should be a valid number"),
        ("minutes = 0.5", "minutes = nan", "minutes = nan", "tests.1.minutes: "),
        ("gpus = 1", "gpus = -1", "gpus = -1", "tests.1.gpus: Input should be greater than or equal to 0"),
        ("gpus = 1", "gpus = true", "gpus = true", "tests.1.gpus: Input should be a valid number"),
        ("gpus = 1", "gpus = 1.5", "gpus = 1.5", "tests.1.gpus: a whole number, or for a share of a GPU a multiple of"),
        ("gpus = 1", "gpus = 0.3", "gpus = 0.3", "tests.1.gpus: a whole number, or for a share"),
        ('["pytest", "tests/gpu"]', "[]", "command = []", "tests.1.command: List should have at least 1 item"),
        ('{ HF_HUB_OFFLINE = "1" }', "{ HF_HUB_OFFLINE = 1 }", "{ HF", "tests.1.environment.HF_HUB_OFFLINE: Input"),
        ('until = "2026-12-31"', 'until = "soon"', '"soon"', "known.0.until: Input should be a valid date"),
        ('until = "2026-12-31"', 'until = "2026-02-30"', "2026-02-30", "known.0.until: Input should be a valid date"),
        ('until = "2026-12-31"', 'until = ""', 'until = ""', "known.0.until: Input should be a valid date"),
        (
            'until = "2026-12-31"',
            "until = 2026",
            "until = 2026",
            "known.0.until: Datetimes provided to dates should have",
        ),
        ('until = "2027-01-31"\n', "", '[[known]]\ntest = "tests/test_load', "known.1.until: Field required"),
        (
            'issue = "https://github.com/pyt',
            'issue = "github.com/pyt',
            '"github.com/pyt',
            "known.1.issue: String should",
        ),
        ('"https://github.com/pyt', '"javascript:alert(1)//', '"javascript', "known.1.issue: String should match"),
        (
            '"transformers>=5.20"\ntest',
            '"transformers>=x"\ntest',
            '"transformers>=x"',
            "known.0.when: transformers is a",
        ),
        ('test = "tests/test_load.py::test_sharded"', 'test = ""', 'test = ""', "known.1.test: String should have at"),
        ('because = "a wrong stride"', 'because = ""', 'because = ""', "known.1.because: String should have at least"),
        ('because = "a wrong stride"', 'why = "x"', 'why = "x"', "known.1.why: Extra inputs are not permitted"),
        ('path = "."', "path = 3", "path = 3", "project.path: Input should be a valid string"),
        *(
            ('path = "."', f'members = ["a", "{wrong}"]', "members =", "project.members.1: a member is a folder in the")
            for wrong in ("../other", "a/../../other", "/a", ".", "")
        ),
        ('path = "."', 'members = ["a/b", "a//b/"]', "members =", "project.members: a/b is listed twice"),
    ],
)
def test_a_problem_is_pointed_at(tmp_path: Path, old: str, new: str, at: str, says: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    said = problem(tmp_path, text)
    assert f"{tmp_path / 'axes.toml'}:{line(text, at)}: {says}" in said


@pytest.mark.parametrize("tables", ["[axes]", "[[axes]]"])
def test_too_many_combinations_are_counted_and_not_made(
    tmp_path: Path, tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(*axes: Sequence[object]) -> Iterator[tuple[object, ...]]:
        assert len(axes) < 5, "the combinations are made"
        return product(*axes)

    monkeypatch.setattr("compat_matrix.axes.product", few)
    values = ", ".join(f'"1.{number}"' for number in range(20))
    own = "\n".join(f"a{number} = [{values}]" for number in range(7))
    text = GOOD.replace("[axes]", tables, 1).replace('device = ["cpu", "cuda"]', own, 1)
    said = problem(tmp_path, text)
    number = 2 * 3 * 2 * 2 * 20**7
    most = f"axes: {number:,} combinations, and a matrix has at most 200,000"
    assert f"axes.toml:{line(text, tables)}: {most}: " in said


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    said = problem(tmp_path, GOOD.replace("version = 1", "version = 7").replace("gpus = 1", "gpus = -1"))
    assert len(said.splitlines()) == 2


def test_what_is_no_toml_is_pointed_at(tmp_path: Path) -> None:
    assert "line 4, column" in problem(tmp_path, GOOD.replace("[axes]", "[axes"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "isn't UTF-8 text"),
        (lambda path: path.write_text(""), "version: Field required"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, make: Callable[[Path], object], says: str) -> None:
    path = tmp_path / "axes.toml"
    make(path)
    with pytest.raises(MatrixError, match=says) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_rules_say_which_cells_can_not_be_and_why(axes: Axes) -> None:
    old = Cell("3.10", "5.21", "2.10")
    assert len(axes.all_cells) == 2 * 3 * 2 * 2 * 2
    assert axes.all_cells[old] == "transformers 5.21 needs Python 3.11"
    assert axes.all_cells[Cell("3.11", "5.21", "2.10", "fa4")] == "no kernel"
    assert old not in axes.cells
    assert len(axes.cells) == (2 * 3 - 1) * 2 * 2


def test_cells_are_in_the_order_of_the_file(axes: Axes) -> None:
    assert [cell.name for cell in axes.cells[:3]] == [
        "py310-tf4.57-torch2.10",
        "py310-tf4.57-torch2.10-fa4-cuda",
        "py310-tf4.57-torch2.11",
    ]


def test_cells_are_selected_by_condition_and_by_name(axes: Axes) -> None:
    assert {cell.torch for cell in axes.select("torch==2.11")} == {"2.11"}
    assert axes.select(names=["py311-tf5.21-torch2.10"]) == [Cell("3.11", "5.21", "2.10")]
    both = axes.select("device==cuda", ["py311-tf5.21-torch2.10", "py311-tf5.21-torch2.10-fa4-cuda"])
    assert both == [Cell("3.11", "5.21", "2.10", "fa4", "cuda")]


@pytest.mark.parametrize(
    ("only", "names", "says"),
    [
        ("transformers==5.4", [], "no cell of axes.toml matches 'transformers==5.4'"),
        ("transformers==5.21 and python==3.10", [], "matches .*: transformers 5.21 needs Python 3.11"),
        (
            "transformers==5.21 and python==3.10 or flash_attention==fa4 and device==cpu",
            [],
            "matches .*: (transformers 5.21 needs Python 3.11; no kernel|no kernel; transformers 5.21 needs Python 3.11)$",
        ),
        ("device==cuda", ["py311-tf5.21-torch2.10"], "no cell of axes.toml matches 'device==cuda'"),
        (None, ["py311-tf5.22-torch2.10"], "there is no cell 'py311-tf5.22-torch2.10' in axes.toml"),
        (None, ["py311"], "there is no cell 'py311' in axes.toml"),
        (None, ["py310-tf5.21-torch2.10"], "py310-tf5.21-torch2.10 is excluded: transformers 5.21 needs Python 3.11"),
    ],
)
def test_a_selection_of_nothing_is_an_error(axes: Axes, only: str | None, names: list[str], says: str) -> None:
    with pytest.raises(MatrixError, match=says):
        axes.select(only, names)


def test_rules_that_leave_nothing_are_an_error(tmp_path: Path) -> None:
    text = GOOD.replace('when = "python<3.11 and transformers>=5.21"', 'when = "python>=3"')
    with pytest.raises(MatrixError, match="axes.toml"):
        load(written(tmp_path, text)).select()


def test_a_cell_runs_the_first_tests_that_fit(axes: Axes) -> None:
    cpu, cuda = Cell("3.11", "5.21", "2.10"), Cell("3.11", "5.21", "2.10", "fa4", "cuda")
    assert axes.tests_of(cpu) == axes.tests[0]
    assert axes.tests_of(cuda) == axes.tests[1]
    with pytest.raises(MatrixError, match="axes.toml has the suites default, not 'full'"):
        axes.tests_of(cpu, "full")


def test_a_cell_has_the_known_failures_that_fit(axes: Axes) -> None:
    old, new = Cell("3.11", "4.57", "2.10"), Cell("3.11", "5.21", "2.11")
    assert [known.because for known in axes.known if known.holds(old)] == ["a wrong stride"]
    beams, stride = (known for known in axes.known if known.holds(new))
    assert (beams.until, stride.until) == (date(2026, 12, 31), date(2027, 1, 31))


def test_supported_stands_for_the_releases_of_the_library(tmp_path: Path) -> None:
    text = GOOD.replace('torch = ["2.10", "2.11"]', 'torch = "supported"')
    axes = load(written(tmp_path, text))
    assert axes.axes[0].torch == releases.minors(releases.TORCH)
    assert axes.axes[0].transformers == ["4.57", "5.20", "5.21"]


def test_the_committed_file_is_right() -> None:
    axes = load(OWN)
    supported = product(releases.minors(releases.TRANSFORMERS), releases.minors(releases.TORCH))
    cells = [cell for cell in axes.cells if cell.device == "cpu" and cell.python == "3.12"]
    assert [(cell.transformers, cell.torch) for cell in cells] == list(supported)
    assert axes.folders[1:] == sorted(path.parent for path in axes.folder.glob("compat/*/pyproject.toml"))
    for suite in {tests.suite for tests in axes.tests}:
        devices = {"torch": ["cpu"], "prove": ["cpu"], "figures": ["cuda"]}.get(suite, ["cpu", "cuda"])
        assert all(axes.tests_of(cell, suite) for cell in axes.cells if cell.device in devices)


OWN_AXES = """\
version = 1

[[axes]]
python = ["3.11"]
transformers = ["5.4", "5.23"]
peft = ["0.17", "0.18"]
backend = ["gloo", "nccl"]

[[axes]]
python = ["3.11"]
trl = ["1.0"]
cuda = ["cu128"]

[[exclude]]
when = "peft==0.17 and transformers>=5.20 or backend==nccl and peft>=0.18"
because = "no such combination"

[[packages]]
part = "layer"
when = "backend==nccl and peft"
requires = ["deepspeed"]

[[tests]]
when = "trl and cuda==cu128"
command = ["pytest", "tests/trl"]

[[tests]]
command = ["pytest"]
"""


def test_a_project_has_axes_of_its_own(tmp_path: Path) -> None:
    axes = load(written(tmp_path, OWN_AXES))
    assert [cell.name for cell in axes.cells] == [
        "py311-tf5.4-backend=gloo-peft=0.17",
        "py311-tf5.4-backend=gloo-peft=0.18",
        "py311-tf5.4-backend=nccl-peft=0.17",
        "py311-tf5.23-backend=gloo-peft=0.18",
        "py311-cuda=cu128-trl=1.0",
    ]
    assert axes.own == {"backend": ["gloo", "nccl"], "peft": ["0.17", "0.18"], "cuda": ["cu128"], "trl": ["1.0"]}
    assert axes.distributions == {"transformers": "transformers", "peft": "peft", "trl": "trl"}
    assert [cell.name for cell in axes.select("trl")] == ["py311-cuda=cu128-trl=1.0"]
    assert [cell.name for cell in axes.select("peft<=0.17", pairwise=True)] == [
        "py311-tf5.4-backend=gloo-peft=0.17",
        "py311-tf5.4-backend=nccl-peft=0.17",
    ]
    assert axes.tests_of(axes.select("trl")[0]) == axes.tests[0]
    assert axes.tests_of(axes.select("peft")[0]) == axes.tests[1]


@pytest.mark.parametrize(
    ("old", "new", "at", "says"),
    [
        (
            "backend==nccl and peft>=",
            "backend==ncl and peft>=",
            "ncl and peft>=",
            "exclude.0.when: backend is one of gloo",
        ),
        ('"trl and', '"tlr and', '"tlr', "tests.0.when: there is no axis 'tlr': the axes are python"),
        ('backend==nccl and peft"', 'backend>nccl"', "backend>", "packages.0.when: backend has no order"),
        ('nccl and peft"', 'nccl and torch==2.11"', "[[packages", "packages.0: the layer of a cell depends on"),
        ('part = "layer"', 'part = "base"', "[[packages", "packages.0: the base of a cell depends on"),
        (
            'trl = ["1.0"]',
            'trl = ["1.0"]\nbackend = ["1.0"]',
            "version",
            "backend: the values of an axis are releases, or",
        ),
        ('trl = ["1.0"]', 'trl = ["1.x"]', 'trl = ["1.x"]', "axes.1.trl: a value is a release such as 0.17"),
        (
            'command = ["pytest"]',
            'command = ["pytest"]\nwatch = "backend"',
            "watch",
            "tests.1.watch: an axis of releases",
        ),
    ],
)
def test_a_problem_of_an_own_axis_is_pointed_at(tmp_path: Path, old: str, new: str, at: str, says: str) -> None:
    assert old in OWN_AXES
    text = OWN_AXES.replace(old, new, 1)
    assert f"{tmp_path / 'axes.toml'}:{line(text, at)}: {says}" in problem(tmp_path, text)


def test_tables_of_one_line_each_are_counted(tmp_path: Path) -> None:
    text = """\
version = 1
axes = [
    { python = ["3.11"], trl = ["1.0"] },
    { python = ["3.11", "3.12"], trl = ["1.x"] },
]
tests = [{ command = ["pytest"] }]
"""
    assert f"{tmp_path / 'axes.toml'}:4: axes.1.trl: " in problem(tmp_path, text)

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compat_matrix import versions
from compat_matrix.cells import NAME, WORD, WORDS, Cell, parse, shard
from compat_matrix.errors import MatrixError

minors = st.builds("{}.{}".format, st.integers(0, 9), st.integers(0, 40))
releases = st.one_of(minors, st.builds("{}.{}".format, minors, st.integers(0, 20)))
pythons = st.builds("{}.{}".format, st.integers(2, 4), st.integers(0, 40))
words = st.from_regex(WORD, fullmatch=True)
own = st.dictionaries(words, st.one_of(releases, words), max_size=2).map(lambda axes: tuple(sorted(axes.items())))
missing = st.just("")
every_cell = st.builds(
    Cell,
    pythons,
    releases | missing,
    releases | missing,
    st.sampled_from(WORDS["flash_attention"]),
    st.sampled_from(WORDS["device"]),
    own,
)


@given(every_cell)
@example(Cell("3.6", extra=(("tf0", "a"), ("torch2", "b"))))
def test_a_name_says_which_cell_it_is(cell: Cell) -> None:
    assert parse(cell.name) == cell


@given(st.sets(every_cell, max_size=20))
def test_no_two_cells_share_a_name(cells: set[Cell]) -> None:
    assert len({cell.name for cell in cells}) == len(cells)
    assert not {cell.base for cell in cells} & {cell.layer for cell in cells}


@given(every_cell)
def test_a_name_is_that_of_a_file_and_of_a_tox_environment(cell: Cell) -> None:
    assert re.fullmatch(r"[a-z0-9._=-]+", cell.name)
    assert re.fullmatch(NAME, cell.name)


def test_names_are_short_where_nothing_is_special() -> None:
    assert Cell("3.11", "5.23", "2.15", "fa4", "cuda").name == "py311-tf5.23-torch2.15-fa4-cuda"
    assert Cell("3.11", "5.23", "2.15").name == "py311-tf5.23-torch2.15"
    own = Cell("3.11", "5.23", "2.15", "none", "cuda", (("backend", "gloo"), ("peft", "0.18")))
    assert own.name == "py311-tf5.23-torch2.15-cuda-backend=gloo-peft=0.18"
    assert (own.base, own.layer) == ("py311-torch2.15", "py311-tf5.23-backend=gloo-peft=0.18")
    assert (Cell("3.11").name, Cell("3.11").base, Cell("3.11").layer) == ("py311", "py311-base", "py311-layer")


def test_torchs_own_flash_attention_needs_no_environment_of_its_own() -> None:
    plain, own, fa4 = (Cell("3.11", "5.23", "2.15", kernel, "cuda") for kernel in ("none", "torch", "fa4"))
    assert plain.base == own.base != fa4.base
    assert plain.layer == own.layer == fa4.layer
    assert len({plain.name, own.name, fa4.name}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "",
        "py3",
        "py311-peft",
        "py311-peft=",
        "py311-peft=0.18-backend=gloo",
        "py311-peft=0.17-peft=0.18",
        "py311-peft=0.x",
        "py311-peft=../../etc",
        "py311-Peft=0.18",
        "py311-peft=0.18-cuda",
        f"py311-peft={'1' * 200}",
        "tf5.23-torch2.15",
        "py311-tf5.23-torch2.15-fa5",
        "py311-tf5.23-torch2.15-cuda-fa4",
        "py311-tf5.23-torch2.15-",
        "py311-tf5.23-torch2.15\n",
        "py311-tflatest-torch2.15",
        "py311-tf5.x-torch2.15",
        "py311-tf../../etc-torch2.15",
        "py311-tf5/../..-torch2.15",
        "py³11-tf5.23-torch2.15",
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(MatrixError, match="isn't the name of a cell, such as py311-tf5.23-torch2.15-fa4-cuda"):
        parse(name)


@given(st.lists(st.integers(), max_size=60, unique=True), st.integers(1, 12))
def test_shards_are_disjoint_and_complete(items: list[int], of: int) -> None:
    parts = [shard(items, f"{number}/{of}") for number in range(1, of + 1)]
    assert sorted(item for part in parts for item in part) == sorted(items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part, key=items.index) for part in parts)


@pytest.mark.parametrize("text", ["", "3", "0/8", "9/8", "1/0", "-1/8", "a/b", "1/8/2", "1 /8", "½/8", "1/8\n"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MatrixError, match="--shard takes a part such as 3/8"):
        shard([1, 2, 3], text)


@pytest.mark.parametrize("reported", ["2.11.0 cu130", "2.11.0\n", "2.12.0", "torch", "", None, ["2.11.0"]])
def test_a_cell_has_its_own_version_if_it_reports_none_of_it(reported: object) -> None:
    cell = Cell("3.12", torch="2.11")
    assert versions.exact(cell, {"packages": {"torch": reported}}, "")["torch"] == "2.11"
    assert versions.exact(cell, {"packages": {"torch": "2.11.0+cu130"}}, "")["torch"] == "2.11.0+cu130"

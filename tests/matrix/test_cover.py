from __future__ import annotations

from itertools import combinations, product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from compat_matrix.axes import OWN, cover, load
from compat_matrix.cells import AXES, Cell

NAMES = (*AXES, "backend")


def pairs(cell: Cell) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(cell.axes.items(), 2))


@st.composite
def possible(draw: st.DrawFn) -> list[Cell]:
    """The cells of small axes that no random rule excludes."""
    sizes = [draw(st.integers(1, 4)) for _ in range(3)] + [
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    ]
    values = [[f"{axis}.{number}" for number in range(size)] for axis, size in enumerate(sizes)]
    every = [Cell.of(dict(zip(NAMES, one, strict=True))) for one in product(*values)]
    rules = draw(
        st.lists(st.lists(st.tuples(st.sampled_from(range(6)), st.integers(0, 3)), min_size=1, max_size=3), max_size=6)
    )
    hidden = draw(st.sets(st.sampled_from(every), max_size=len(every)))

    def refused(cell: Cell) -> bool:
        return any(all(cell.axes[NAMES[axis]] == f"{axis}.{number}" for axis, number in rule) for rule in rules)

    return [cell for cell in every if cell not in hidden and not refused(cell)]


@given(possible())
@settings(max_examples=300)
@example([Cell("0", "0", "0"), Cell("1", "1", "0"), Cell("1", "0", "1")])
def test_every_two_values_that_can_meet_do(cells: list[Cell]) -> None:
    chosen = cover(cells)
    assert set(chosen) <= set(cells)
    assert chosen == sorted(chosen, key=cells.index)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, cells))


def test_few_cells_are_enough() -> None:
    axes = load(OWN)
    chosen = axes.select(pairwise=True)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, axes.cells))
    smallest = len(axes.axes[0].transformers) * len(axes.axes[0].torch)  # at least the product of the two largest axes
    assert len(chosen) < 1.6 * smallest < len(axes.cells) / 5
    assert chosen == axes.select(pairwise=True)

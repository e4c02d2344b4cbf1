"""Each change of a copy of the installed transformers is refused, red, or leaves every result right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutations.mutants import MUTANTS, Mutant
from mutations.run import Bench, bench

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made() -> Iterator[Bench]:
    with bench() as one:
        yield one


def test_nothing_is_said_of_an_unchanged_copy(made: Bench) -> None:
    """And nothing is wrong there; what is refused is refused for a reason."""
    assert made.usual == made.ignored == []
    assert all("a cache of packed sequences" in text or "bias" in text for text in made.before.values())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_is_refused_red_or_right(made: Bench, mutant: Mutant) -> None:
    verdict = made.try_(mutant)
    if verdict.word in ("absent", "invalid"):
        pytest.skip(f"{verdict.word}: {verdict.caught_by}")
    assert verdict.word != "silent", verdict.wrong

"""The examples in docstrings, as tests."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Mapping
from typing import Any


def examples(public: Mapping[str, Any]) -> list[doctest.DocTest]:
    """Those of public functions and classes, by their names."""
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    every = [
        example
        for name, value in public.items()
        if callable(value)
        for example in finder.find(value, name, globs=dict(vars(sys.modules[value.__module__])))
    ]
    return [example for example in every if example.examples]


def run(example: doctest.DocTest) -> None:
    """Run an example; its results must be what the docstring shows."""
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert attempted
    assert not failed

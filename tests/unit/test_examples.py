"""The examples in the docstrings of the public API give the results they show."""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import kernel_compat

pytest.importorskip("torch")

#: The public functions whose use isn't clear from their parameters.
WITH_EXAMPLES = {
    "apply_ops",
    "install",
    "ladder",
    "next_fallback",
    "register_attention",
    "plan_attention",
    "use_sdpa_backends",
}


def examples() -> Iterator[doctest.DocTest]:
    public: dict[str, Any] = {}
    for name in ("", ".policy", ".models", ".ops"):
        module = importlib.import_module(f"kernel_compat{name}")
        public |= {name: getattr(module, name) for name in module.__all__}
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    for name, value in public.items():
        if callable(value):
            yield from finder.find(value, name, globs=dict(vars(sys.modules[value.__module__])))


EXAMPLES = [example for example in examples() if example.examples]


def test_the_functions_that_need_one_have_an_example() -> None:
    assert {example.name for example in EXAMPLES} >= WITH_EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    for name in kernel_compat.registered_attention():
        kernel_compat.unregister_attention(name)
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert attempted
    assert not failed

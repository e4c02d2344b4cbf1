"""The examples in the docstrings of kernel selection give the results they show."""

from __future__ import annotations

import doctest

import pytest
from docstrings import examples, run

import kernel_compat.models
import kernel_compat.ops
import kernel_compat_ops

LOOKED_UP = [name for name in kernel_compat.models.__all__ if name not in vars(kernel_compat.models)]
EXAMPLES = examples(
    {name: getattr(kernel_compat.ops, name) for name in kernel_compat_ops.__all__}
    | {name: getattr(kernel_compat.models, name) for name in LOOKED_UP}
)


def test_the_functions_that_need_one_have_an_example() -> None:
    assert "apply_ops" in {example.name for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    run(example)

"""The examples in the docstrings of the public API give the results they show."""

from __future__ import annotations

import doctest

import pytest
from docstrings import examples, run

import kernel_compat.models
import kernel_compat.policy

pytest.importorskip("torch")

#: The public functions whose use isn't clear from their parameters.
WITH_EXAMPLES = {
    "install",
    "ladder",
    "next_fallback",
    "register_attention",
    "plan_attention",
    "use_sdpa_backends",
}

EXAMPLES = examples(
    {name: getattr(kernel_compat, name) for name in kernel_compat.__all__}
    | {name: getattr(kernel_compat.policy, name) for name in kernel_compat.policy.__all__}
    # Without the names of neighbours, which are looked up.
    | {
        name: vars(kernel_compat.models)[name]
        for name in kernel_compat.models.__all__
        if name in vars(kernel_compat.models)
    }
)


def test_the_functions_that_need_one_have_an_example() -> None:
    assert {example.name for example in EXAMPLES} >= WITH_EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    for name in kernel_compat.registered_attention():
        kernel_compat.unregister_attention(name)
    run(example)

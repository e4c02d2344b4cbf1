"""Test with schemathesis that a service conforms to its OpenAPI document."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE

#: The number of requests for each operation and mode; they are the same in every run.
EXAMPLES = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 12


def operations(app: Any, document: str) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_asgi(document, app).get_all_operations()]


def asked(every: Iterable[Any]) -> list[Any]:
    """The parameters of a test: each operation, with requests that conform to the document and with others."""
    return [
        pytest.param(operation, mode, id=f"{operation.method.upper()} {operation.path} {mode.value}")
        for operation in every
        for mode in (GOOD, BAD)
        if mode is GOOD or [*operation.iter_parameters()] or operation.body  # something can be wrong
    ]


def ask(
    operation: Any,
    mode: schemathesis.GenerationMode,
    there: Callable[[], Mapping[str, Any]],
    *,
    headers: Mapping[str, str] = {},
    excluded: Iterable[Callable[..., Any]] = (),
    examples: int = EXAMPLES,
) -> list[int]:
    """Send requests and return the statuses; asserts that each response is as documented: no 5xx, no other status, type or form.

    Args:
        there: values that exist in the service; every other conforming request uses them.
        excluded: schemathesis' checks to leave out.
    """
    answers: list[int] = []

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        if mode is GOOD and len(answers) % 2:  # random values never name an existing resource
            known = there()
            case.path_parameters.update({name: known[name] for name in case.path_parameters})
            for name in ("old", "new", "attempt"):
                case.query.pop(name, None)
            if "body" in known:
                case.body = known["body"]
        answers.append(case.call_and_validate(headers=dict(headers), excluded_checks=[*excluded]).status_code)

    one()
    return answers

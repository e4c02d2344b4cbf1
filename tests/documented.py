"""Whether a service does what its OpenAPI document says, asked by schemathesis."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE

#: Requests of each operation and mode, the same ones each time.
EXAMPLES = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 12


def operations(app: Any, document: str) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_asgi(document, app).get_all_operations()]


def asked(every: Iterable[Any]) -> list[Any]:
    """What a test is to be parametrised with: an operation, and whether what it is asked is as documented."""
    return [
        pytest.param(operation, mode, id=f"{operation.method.upper()} {operation.path} {mode.value}")
        for operation in every
        for mode in (GOOD, BAD)
        if mode is GOOD or [*operation.iter_parameters()] or operation.body  # there is something that can be wrong
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
    """The statuses of the answers, all of which are as documented: no 5xx, no other status, type or form.

    Args:
        there: values that lead to something; every other good request has them.
        excluded: checks of schemathesis.
    """
    answers: list[int] = []

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        if mode is GOOD and len(answers) % 2:  # by chance it never names what is there
            known = there()
            case.path_parameters.update({name: known[name] for name in case.path_parameters})
            for name in ("old", "new", "attempt"):
                case.query.pop(name, None)
            if "body" in known:
                case.body = known["body"]
        answers.append(case.call_and_validate(headers=dict(headers), excluded_checks=[*excluded]).status_code)

    one()
    return answers

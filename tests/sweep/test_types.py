"""`kernel-compat prove --all` as tests: one for each model type of the installed transformers, proven in a process of its own.

What is equal passes, what refuses a case is an expected failure, what is wrong or has lost a case fails, what crashes is an error,
and what has no recipe is skipped.
"""

from __future__ import annotations

import pytest
import transformers

from kernel_compat_prove import Proof, sweep
from kernel_compat_prove.architectures import model_types
from kernel_compat_prove.losses import vanished


def said(proof: Proof, verdict: str) -> str:
    lines = []
    for outcome in proof.outcomes:
        if outcome.verdict == verdict:
            far = f" off by {outcome.difference:.1e}" if outcome.difference is not None else ""
            lines.append(f"{outcome.model} {outcome.case}:{far} {outcome.reason}".rstrip(" :"))
    return "\n".join(lines)


@pytest.fixture
def proof(model_type: str, proofs: list[Proof]) -> Proof:
    (found,) = sweep([model_type], workers=1, seconds=120)
    proofs.append(found)
    if found.verdict == "crashed":
        pytest.fail(said(found, "crashed"), pytrace=False)
    return found


def test_every_type_is_still_there() -> None:
    assert vanished(model_types(), transformers.__version__) == []


@pytest.mark.parametrize("model_type", model_types())
def test_type(proof: Proof, request: pytest.FixtureRequest) -> None:
    if proof.verdict in ("no recipe", "untested", "not applicable"):
        pytest.skip(f"{proof.verdict}: {proof.no_recipe}")
    if proof.verdict == "refused":
        request.applymarker(pytest.mark.xfail(reason="refused"))
    if proof.verdict != "equal":
        pytest.fail(said(proof, proof.verdict), pytrace=False)

"""The results of proving: an outcome for each case, and a proof with all outcomes of a model type."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["EVERYTHING", "PADDING_FREE", "RAN", "WORST_FIRST", "Outcome", "Proof", "Verdict", "summary"]

Verdict = Literal["equal", "refused", "wrong", "crashed", "lost", "untested", "not applicable"]
#: The case of `kernel_compat.models.padding_free`, which refuses a model that isn't equal in it. An attention name doesn't depend on it.
PADDING_FREE = "padding_free"
#: The case of an outcome that stands for all of a type or a class.
EVERYTHING = "all"
WORST_FIRST: tuple[Verdict, ...] = ("wrong", "crashed", "lost", "refused", "equal", "untested", "not applicable")
#: The verdicts of a case that ran.
RAN: tuple[Verdict, ...] = ("wrong", "crashed", "refused", "equal")


@dataclass(frozen=True)
class Outcome:
    """The result of one case of one model class.

    Attributes:
        model: the model class.
        case: the case's name.
        verdict: ``equal``; ``refused``, with an error of this library that says why; ``wrong``; ``crashed``, with any other
            error where eager attention works; ``lost``, if it ran on an earlier release and doesn't run here; ``untested``, if
            eager attention fails in it, or the prover can't make its inputs; ``not applicable``, if the model lacks a part that
            the case needs, such as a cache.
        difference: the largest relative difference that was measured.
        tolerance: the relative difference that was allowed.
        reason: why it isn't equal, or a remark.
        compared: the number of its comparisons that were made.
        apart: whether eager attention differs from another result that it should agree with, such as that without a cache.
    """

    model: str
    case: str
    verdict: Verdict
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""
    compared: int = 0
    apart: bool = False


@dataclass(frozen=True)
class Proof:
    """The outcomes of a model type.

    Attributes:
        model_type: ``config.model_type``.
        transformers: the release it was proven on.
        outcomes: in the order of the cases.
        no_recipe: why no tiny model could be made; empty if one was made.
        seconds: the time it took.
    """

    model_type: str
    transformers: str
    outcomes: tuple[Outcome, ...] = ()
    no_recipe: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict | Literal["no recipe"]:
        """The worst verdict of its outcomes."""
        if self.no_recipe and not self.outcomes:
            return "no recipe"
        return min((outcome.verdict for outcome in self.outcomes), key=WORST_FIRST.index, default="not applicable")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, crashed or lost."""
        return self.verdict not in ("wrong", "crashed", "lost")

    def to_json(self) -> dict[str, Any]:
        """A JSON document, the same on every machine: without the time, and with differences only where they are wrong."""
        outcomes = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        for outcome in outcomes:
            for number in ("difference", "tolerance"):
                outcome[number] = _rounded(outcome[number]) if outcome["verdict"] == "wrong" else None
        return {
            "model_type": self.model_type,
            "transformers": self.transformers,
            "verdict": self.verdict,
            "no_recipe": self.no_recipe,
            "outcomes": outcomes,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Proof:
        """The proof in a document of `to_json`."""
        outcomes = tuple(Outcome(**outcome) for outcome in document["outcomes"])
        return cls(document["model_type"], document["transformers"], outcomes, document["no_recipe"])


def _rounded(value: float | None) -> float | None:
    """The first digit of a number: the others differ between machines."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.0e}") if value < 0.1 else round(value, 1)


def summary(proofs: Iterable[Proof]) -> dict[str, int]:
    """The number of model types tried, and the number with each verdict."""
    verdicts = [proof.verdict for proof in proofs]
    counts = Counter(verdicts)
    return {"tried": len(verdicts)} | {
        verdict: counts[verdict]
        for verdict in ("equal", "refused", "wrong", "crashed", "lost", "untested", "not applicable", "no recipe")
    }

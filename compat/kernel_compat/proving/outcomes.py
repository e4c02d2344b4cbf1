"""The results of proving: an outcome for each case, and a proof with all outcomes of a model type."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Outcome", "Proof", "Verdict", "summary"]

Verdict = Literal["equal", "refused", "wrong", "crashed", "not applicable"]
_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "crashed", "refused", "equal", "not applicable")


@dataclass(frozen=True)
class Outcome:
    """The result of one case of one model class.

    Attributes:
        model: the model class.
        case: the case's name.
        verdict: ``equal``; ``refused``, with an error of this library that says why; ``wrong``; ``crashed``, with any other
            error where eager attention works; ``not applicable``, if eager attention or the model can't do the case.
        difference: the largest relative difference that was measured.
        tolerance: the relative difference that was allowed.
        reason: why it isn't equal, or a remark.
    """

    model: str
    case: str
    verdict: Verdict
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""


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
        if self.no_recipe:
            return "no recipe"
        found = {outcome.verdict for outcome in self.outcomes}
        return next((verdict for verdict in _WORST_FIRST if verdict in found), "not applicable")

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and nothing crashed."""
        return self.verdict not in ("wrong", "crashed")

    def to_json(self, exact: bool = False) -> dict[str, Any]:
        """A JSON document, the same on every machine.

        Args:
            exact: with all digits of the differences, and the time it took.
        """
        if exact:
            return {
                **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
                "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
            }
        return {
            "model_type": self.model_type,
            "transformers": self.transformers,
            "verdict": self.verdict,
            "no_recipe": self.no_recipe,
            "outcomes": [
                {
                    **dataclasses.asdict(outcome),
                    "difference": _rounded(outcome.difference, outcome.verdict),
                    "tolerance": _rounded(outcome.tolerance, outcome.verdict),
                }
                for outcome in self.outcomes
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Proof:
        """The proof in a document of `to_json`."""
        outcomes = tuple(Outcome(**outcome) for outcome in document["outcomes"])
        return cls(
            document["model_type"],
            document["transformers"],
            outcomes,
            document["no_recipe"],
            document.get("seconds", 0.0),
        )


def _rounded(value: float | None, verdict: Verdict) -> float | None:
    """The first digit of a difference that is wrong; None for others, whose digits are noise."""
    if value is None or verdict != "wrong" or not math.isfinite(value):
        return None
    return float(f"{value:.0e}") if value < 0.1 else round(value, 1)


def summary(proofs: Iterable[Proof]) -> dict[str, int]:
    """The number of model types tried, and the number with each verdict."""
    proofs = list(proofs)
    counts = Counter(proof.verdict for proof in proofs)
    return {"tried": len(proofs)} | {
        verdict: counts[verdict] for verdict in ("equal", "refused", "wrong", "crashed", "not applicable", "no recipe")
    }

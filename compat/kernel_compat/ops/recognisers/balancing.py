"""The load-balancing loss of mixtures of experts: a function that a model's forward calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .probing import SAME, Unproven, difference, quiet
from .recogniser import FunctionRecogniser

NAMES = re.compile(r"load_balancing_loss_func")

PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")


@dataclass(frozen=True)
class Balancing:
    """The formula of `reference`."""

    variant: str = "standard"


def reference(gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None) -> Tensor:
    """``experts * sum(share of the choices * mean probability)`` over the experts, of all layers' tokens that count."""
    logits = torch.cat([one.double() for one in gate_logits])
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    counts = logits.new_ones(len(logits), 1)
    if attention_mask is not None:
        counts = attention_mask.reshape(-1, 1).double().repeat(len(gate_logits), 1)
    total = counts.sum()
    return num_experts * ((chosen * counts).sum(0) / total * ((probabilities * counts).sum(0) / total)).sum()


def prove(function: Any) -> Balancing:
    """Check that a function computes `reference`.

    Raises:
        Unproven: it isn't.
    """
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise Unproven(f"its parameters can't be read ({error})") from None
    if names != PARAMETERS:
        raise Unproven(f"it takes ({', '.join(names)}), and not ({', '.join(PARAMETERS)})")
    with quiet() as generator:
        logits = tuple(torch.randn(10, 6, generator=generator) * 2 for _ in range(3))
        mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
        for top_k, attention_mask in ((1, None), (2, None), (2, mask), (6, mask)):
            try:
                given = function(logits, 6, top_k, attention_mask)
            except Exception as error:
                raise Unproven(f"it failed on a probe ({type(error).__name__}: {error})") from error
            expected = reference(logits, 6, top_k, attention_mask)
            worst = difference(given, expected)
            if worst >= SAME:
                what = "with" if attention_mask is not None else "without"
                raise Unproven(f"{what} a mask and top_k={top_k} it is off by {worst:.1e} (float32, relative)")
    return Balancing()


def function_of(found: Balancing, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """The replacement of the function: it has its parameters, and calls a kernel."""

    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        if gate_logits is None or not isinstance(gate_logits, tuple):
            return 0  # as upstream's
        return kernel(gate_logits, num_experts, top_k, attention_mask)

    return load_balancing_loss_func


RECOGNISER = FunctionRecogniser(NAMES, prove, function_of)

__all__ = ["NAMES", "RECOGNISER", "Balancing", "function_of", "prove", "reference"]

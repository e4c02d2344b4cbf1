"""The load-balancing loss of mixtures of experts: a function that a model's forward calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .probing import SAME, Unproven, call, difference, parameters_of, quiet
from .recogniser import FunctionRecogniser

__all__ = ["RECOGNISER", "Balancing", "reference"]

PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")


@dataclass(frozen=True)
class Balancing:
    """The formula of `reference`."""

    variant: str = "standard"


def reference(gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None) -> Tensor:
    """``experts * sum(share of the choices * mean probability)`` over the experts, for the tokens of all layers.

    Args:
        gate_logits: (batch * length, experts) for each layer.
        attention_mask: (batch, length): 0 for tokens that don't count.
    """
    logits = torch.cat([layer.double() for layer in gate_logits])
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    counts = logits.new_ones(len(logits), 1)
    if attention_mask is not None:
        counts = attention_mask.reshape(-1, 1).double().repeat(len(gate_logits), 1)
    total = counts.sum()
    return num_experts * ((chosen * counts).sum(0) / total * ((probabilities * counts).sum(0) / total)).sum()


def prove(function: Any) -> Balancing:
    """The formula of a function; raises `Unproven`."""
    names = parameters_of(function)
    if names != PARAMETERS:
        raise Unproven(f"it takes ({', '.join(names)}), and not ({', '.join(PARAMETERS)})")
    with quiet() as generator:
        logits = tuple(torch.randn(10, 6, generator=generator) * 2 for _ in range(3))
        mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
        for inputs in ((logits, 6, 1, None), (logits, 6, 2, None), (logits, 6, 2, mask), (logits, 6, 6, mask)):
            off = difference(call(function, *inputs), reference(*inputs))
            if off >= SAME:
                masked = "without" if inputs[-1] is None else "with"
                raise Unproven(f"{masked} a mask and top_k={inputs[2]} it is off by {off:.1e} (float32, relative)")
    return Balancing()


def function_of(formula: Balancing, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """The replacement of the function: it has its parameters, and calls a kernel."""

    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        if gate_logits is None or not isinstance(gate_logits, tuple):
            return 0  # as upstream's
        return kernel(gate_logits, num_experts, top_k, attention_mask)

    return load_balancing_loss_func


RECOGNISER = FunctionRecogniser(re.compile("load_balancing_loss_func"), prove, function_of)

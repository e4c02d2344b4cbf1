"""What autograd and its users do with a model's loss, each scenario with the gradients that it leaves in the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["SCENARIOS"]


class Loss(Protocol):
    """The loss of a batch that is drawn by a seed."""

    def __call__(self, seed: int = 0, length: int = 29) -> Tensor: ...


def frozen_keys(model: Any, loss: Loss) -> None:
    """And what is before them, so that neither keys nor values of a layer have a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.self_attn.q" in name or "layers.1.mlp" in name)
    loss().backward()


def values_alone(model: Any, loss: Loss) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    (weight.grad,) = torch.autograd.grad(loss(), weight)


def two_forwards(model: Any, loss: Loss) -> None:
    (loss() + 2 * loss(seed=1)).backward()


def backward_twice(model: Any, loss: Loss) -> None:
    once = loss()
    once.backward(retain_graph=True)
    once.backward()


def forwards_between(model: Any, loss: Loss) -> None:
    """Without gradients, the first of them in inference mode and of a length that is used for the first time."""
    with torch.inference_mode():
        loss(length=31)
    once = loss(length=31)
    with torch.no_grad():
        loss(seed=1)
    once.backward()


def checkpointed(model: Any, loss: Loss) -> None:
    _checkpointed(model, loss, use_reentrant=False)


def checkpointed_reentrant(model: Any, loss: Loss) -> None:
    model.enable_input_require_grads()
    _checkpointed(model, loss, use_reentrant=True)


def _checkpointed(model: Any, loss: Loss, use_reentrant: bool) -> None:
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    loss().backward()


def modes(model: Any, loss: Loss) -> None:
    """Saved tensors on the host, anomalies detected, and deterministic algorithms alone."""
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.graph.save_on_cpu(), torch.autograd.detect_anomaly(check_nan=True):
            loss().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def few_tokens(model: Any, loss: Loss) -> None:
    """Some ranks have padding alone."""
    loss(length=3).backward()


SCENARIOS: dict[str, Callable[[Any, Loss], None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(frozen_keys, values_alone, two_forwards, backward_twice, forwards_between),
        *(checkpointed, checkpointed_reentrant, modes, few_tokens),
    )
}

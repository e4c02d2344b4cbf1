"""Lazy logits record the forward's pointwise operations; `compute` returns the logits, other uses raise."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernel_compat import UnsupportedFeatureError
from kernel_compat_ops.losses import causal as losses
from kernel_compat_ops.losses.lazy import Forward, LazyLogits, Pointwise, applied


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return bound(nn.Linear(4, 7))


def bound(head: nn.Linear) -> nn.Linear:
    """A head with the forward that replacing the model's loss gives it."""
    head.forward = losses.head_forward(lambda *args, **kwargs: torch.zeros(())).__get__(head)
    return head


@pytest.fixture
def lazy(head: nn.Linear) -> LazyLogits:
    """The logits within the model's forward."""
    return given(head, torch.randn(2, 3, 4))


@pytest.fixture
def logits(lazy: LazyLogits) -> LazyLogits:
    """The logits in the outputs, after the forward."""
    lazy.forward.done = True
    return lazy


def given(head: nn.Linear, hidden_states: Tensor) -> LazyLogits:
    """The lazy logits that a head returns in a forward with labels."""
    token = losses._current.set(Forward(head, head))
    try:
        found: LazyLogits = head(hidden_states)
    finally:
        losses._current.reset(token)
    return found


@pytest.fixture
def real(lazy: LazyLogits, head: nn.Linear) -> Tensor:
    return nn.functional.linear(lazy.hidden_states, head.weight, head.bias)


RECORDED: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "to a dtype": lambda x: x.to(torch.bfloat16),
    "to a dtype by name": lambda x: x.to(dtype=torch.float64),
    "to its device": lambda x: x.to(x.device),
    "to its device, without waiting": lambda x: x.to(x.device, non_blocking=True),
    "times": lambda x: x * 0.25,
    "times from the left": lambda x: 2 * x,
    "over": lambda x: x / 30.0,
    "tanh": lambda x: x.tanh(),
    "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("operation", list(RECORDED))
def test_pointwise_operations_are_recorded(lazy: LazyLogits, real: Tensor, operation: str) -> None:
    found, expected = RECORDED[operation](lazy), RECORDED[operation](real)

    assert isinstance(found, LazyLogits)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert torch.equal(found.compute(), expected)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda x: x[..., :-1, :],
    "an assignment": lambda x: x.__setitem__(0, 1.0),
    "addition": lambda x: x + 1,
    "subtraction from": lambda x: 1 - x,
    "times a tensor": lambda x: x * torch.ones(7),
    "a tensor times it": lambda x: torch.ones(7) * x,
    "over a tensor": lambda x: x / torch.full((7,), 2.0),
    "times a truth value": lambda x: x * True,
    "a power": lambda x: x**2,
    "a negation": lambda x: -x,
    "a matrix product": lambda x: x @ torch.ones(7),
    "a comparison": lambda x: x > 0,
    "equality": lambda x: x == 1,
    "a function of torch": lambda x: torch.softmax(x, -1),
    "a list of tensors": lambda x: torch.cat([torch.zeros(2, 3, 7), x]),
    "a keyword": lambda x: torch.argmax(input=x, dim=-1),
    "functional": lambda x: nn.functional.cross_entropy(x, torch.zeros(2, 3)),
    "a method": lambda x: x.argmax(-1),
    "in place": lambda x: x.mul_(2),
    "detach": lambda x: x.detach(),
    "requires_grad": lambda x: x.requires_grad,
    "retain_grad": lambda x: x.retain_grad(),
    "a hook": lambda x: x.register_hook(print),
    "iteration": list,
    "a length": len,
    "a truth value": bool,
    "a number": float,
    "numpy": np.asarray,
    "another device": lambda x: x.to("meta"),
    "with a memory format": lambda x: x.to(torch.float32, copy=True),
    "a copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", list(REFUSED))
def test_other_uses_within_the_forward_are_refused(lazy: LazyLogits, use: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="on the logits, in the forward of Linear .*'eager'"):
        REFUSED[use](lazy)


@pytest.mark.parametrize("use", [*REFUSED, *RECORDED])
def test_in_the_outputs_every_use_raises_and_names_compute(logits: LazyLogits, use: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"not computed: use logits.compute\(\)"):
        {**REFUSED, **RECORDED}[use](logits)


def test_in_the_outputs_they_are_no_tensor(logits: LazyLogits) -> None:
    assert not isinstance(logits, Tensor)
    assert not hasattr(logits, "dtype")
    assert not hasattr(logits, "shape")
    assert "compute() returns them" in repr(logits)
    assert logits in {logits}


def test_accelerate_leaves_them_in_the_outputs(logits: LazyLogits) -> None:
    operations = pytest.importorskip("accelerate.utils.operations")

    found = operations.convert_to_fp32({"loss": torch.zeros((), dtype=torch.bfloat16), "logits": logits})

    assert found["loss"].dtype == torch.float32
    assert found["logits"] is logits


def test_under_autocast_they_are_the_head_s(head: nn.Linear) -> None:
    hidden_states = torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        logits = given(head, hidden_states)
        expected = nn.functional.linear(hidden_states, head.weight, head.bias)
        early = given(head, hidden_states).compute()
    without = given(head, hidden_states)

    assert logits.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(logits.compute(), expected)
    assert torch.equal(early, expected)
    assert torch.equal((logits * 2).compute(), expected * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert without.compute().dtype == torch.float32


@pytest.mark.parametrize("softcap", [False, True])
def test_their_gradients_are_those_of_logits(head: nn.Linear, softcap: bool) -> None:
    hidden_states = torch.randn(2, 3, 4, requires_grad=True)
    lazy, real = given(head, hidden_states * 2), nn.functional.linear(hidden_states * 2, head.weight, head.bias)
    if softcap:
        lazy, real = (torch.tanh(x / 2) * 2 for x in (lazy, real))
    leaves = [hidden_states, *head.parameters()]

    found, expected = lazy.compute(), real

    assert torch.equal(found, expected)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert not lazy.compute().requires_grad


def step_of(name: str) -> Callable[[nn.Linear, Tensor], None]:
    def step(head: nn.Linear, hidden_states: Tensor) -> None:
        changed = hidden_states if name == "hidden states" else getattr(head, name.removeprefix("head's "))
        if name == "hidden states":
            changed /= 2
            return
        changed.grad = torch.ones_like(changed)
        torch.optim.SGD([changed], lr=1.0).step()

    return step


@pytest.mark.parametrize("changed", ["hidden states", "head's weight", "head's bias"])
def test_after_a_change_compute_raises(head: nn.Linear, changed: str) -> None:
    hidden_states = torch.randn(2, 3, 4)
    logits = given(head, hidden_states[:, 1:])
    logits.compute()
    step_of(changed)(head, hidden_states)

    with pytest.raises(RuntimeError, match=f"the {changed} changed after the forward. Call compute.. before the opt"):
        (logits * 2).compute()


def test_a_step_that_leaves_the_head_alone_changes_nothing(head: nn.Linear) -> None:
    logits = given(head, torch.randn(2, 3, 4))
    torch.optim.AdamW(head.parameters()).step()  # without gradients

    assert logits.compute().shape == (2, 3, 7)


def test_they_keep_nothing_alive(head: nn.Linear) -> None:
    """They are freed without the garbage collector."""
    gc.disable()
    try:
        logits = given(head, torch.randn(2, 3, 4).mul(2)).tanh()
        kept = [weakref.ref(logits), weakref.ref(logits.hidden_states)]
        loss = logits.compute().square().sum()
        loss.backward()
        del logits
        assert [one() for one in kept] == [None] * 2
    finally:
        gc.enable()


def test_a_pointwise_operation_is_the_one_recorded() -> None:
    x = torch.randn(5).bfloat16()

    assert torch.equal(applied(Pointwise("times", 0.3), x), x * 0.3)
    assert torch.equal(applied(Pointwise("over", 0.3), x), x / 0.3)
    assert torch.equal(applied(Pointwise("tanh"), x), x.tanh())
    assert applied(Pointwise("to", torch.float32), x).dtype == torch.float32

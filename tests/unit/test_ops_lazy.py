"""Logits that nobody has computed: what is done to them either goes on the list, or computes them."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kernel_compat.ops import lazy as module
from kernel_compat.ops import losses
from kernel_compat.ops.lazy import Deferred, LazyLogits, Pending, Pointwise


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(4, 7)
    head.forward = losses.head_forward(lambda *args, **kwargs: torch.zeros(())).__get__(head)  # type: ignore[method-assign]
    return head


@pytest.fixture
def lazy(head: nn.Linear) -> Deferred:
    return given(head, torch.randn(2, 3, 4))


def given(head: nn.Linear, hidden_states: Tensor) -> Deferred:
    """What a head gives in a forward with labels."""
    token = losses._waiting.set(Pending(None, head))
    try:
        found: Deferred = head(hidden_states)
    finally:
        losses._waiting.reset(token)
    return found


@pytest.fixture
def real(lazy: Deferred, head: nn.Linear) -> Tensor:
    return nn.functional.linear(lazy.hidden_states, head.weight, head.bias)


NOTED: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "to a dtype": lambda x: x.to(torch.bfloat16),
    "to a dtype by name": lambda x: x.to(dtype=torch.float64),
    "to where it is": lambda x: x.to(x.device),
    "times": lambda x: x * 0.25,
    "times from the left": lambda x: 2 * x,
    "over": lambda x: x / 30.0,
    "tanh": lambda x: x.tanh(),
    "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("what", list(NOTED))
def test_what_is_pointwise_is_noted(lazy: Deferred, real: Tensor, what: str) -> None:
    found = NOTED[what](lazy)

    assert isinstance(found, Deferred)
    assert lazy._computed is None
    assert found.shape == real.shape
    assert torch.equal(found.compute(), NOTED[what](real))


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda x: x[..., :-1, :],
    "a mask": lambda x: x + 1,
    "from the left": lambda x: 1 - x,
    "times a tensor": lambda x: x * torch.ones(7),
    "over a tensor": lambda x: x / torch.full((7,), 2.0),
    "a function of torch": lambda x: torch.softmax(x, -1),
    "with a tensor": lambda x: torch.cat([x, torch.zeros(2, 3, 7)]),
    "a keyword": lambda x: torch.argmax(input=x, dim=-1),
    "a method": lambda x: x.argmax(-1),
    "a comparison": lambda x: x > 0,
    "equality": lambda x: x == x.compute(),
    "detached": lambda x: x.detach(),
    "iteration": lambda x: torch.stack(list(x)),
    "numpy": lambda x: torch.from_numpy(np.asarray(x.detach())),
    "functional": lambda x: nn.functional.cross_entropy(x.view(-1, 7), torch.arange(6)),
    "requires_grad": lambda x: torch.tensor(x.requires_grad),
    "another device": lambda x: x.to("meta").new_zeros(1, device="cpu"),
    "with a memory format": lambda x: x.to(torch.float32, copy=True),
}


@pytest.mark.parametrize("what", list(COMPUTED))
def test_anything_else_computes_them(lazy: Deferred, real: Tensor, what: str) -> None:
    real = real.as_subclass(torch.Tensor)
    real.compute = lambda: real  # type: ignore[attr-defined]

    found = COMPUTED[what](lazy)

    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, COMPUTED[what](real))


def test_they_are_computed_once_and_have_gradients(lazy: Deferred, head: nn.Linear) -> None:
    assert lazy.compute() is lazy.compute()
    (lazy * 2).compute().sum().backward()

    assert head.bias.grad is not None
    assert torch.equal(head.bias.grad, torch.full((7,), 12.0))


def test_they_say_what_they_are(lazy: Deferred) -> None:
    assert repr(lazy).startswith("(2, 3, 7), not computed")
    assert lazy._computed is None
    assert len(lazy) == 2
    assert not hasattr(lazy, "no_such_thing")
    assert lazy.device == torch.device("cpu")


def test_what_they_would_be_is_known(lazy: Deferred, real: Tensor) -> None:
    assert (lazy.shape, lazy.size(), lazy.size(-1), lazy.dim(), lazy.ndim) == (real.shape, real.shape, 7, 3, 3)
    assert lazy.dtype == torch.float32
    assert (lazy.to(torch.bfloat16) * 2).dtype == torch.bfloat16
    assert lazy._computed is None


def test_accelerate_casts_them_without_computing_them(lazy: Deferred) -> None:
    operations = pytest.importorskip("accelerate.utils.operations")
    half = lazy.to(torch.bfloat16)
    outputs = {"loss": torch.zeros((), dtype=torch.bfloat16), "compiled": half, "logits": LazyLogits(half)}

    found = operations.convert_to_fp32(outputs)

    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(outputs, torch.float32)
    assert isinstance(found["logits"], LazyLogits)
    assert isinstance(found["compiled"], Deferred)
    assert found["logits"]._deferred._computed is None
    assert found["compiled"]._computed is None


def test_under_autocast_they_are_what_the_head_would_have_given(head: nn.Linear) -> None:
    hidden_states = torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        logits = given(head, hidden_states)
        expected = nn.functional.linear(hidden_states, head.weight, head.bias)

    assert logits.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(logits.compute(), expected)
    assert torch.equal((logits * 2).compute(), expected * 2)


def test_they_have_gradients_where_the_forward_had(head: nn.Linear) -> None:
    hidden_states = torch.randn(2, 3, 4)
    with torch.no_grad():
        without = given(head, hidden_states)
    with torch.inference_mode():
        inferred = given(head, hidden_states.clone())
    with_them = given(head, hidden_states)

    assert not without.compute().requires_grad
    assert inferred.compute().is_inference()
    with torch.no_grad():
        assert with_them.compute().requires_grad


def test_behind_a_step_of_the_optimizer_they_are_gone(head: nn.Linear) -> None:
    early, late = given(head, torch.randn(2, 3, 4)), given(head, torch.randn(2, 3, 4))
    expected = early.compute().detach().clone()
    with torch.no_grad():
        head.weight.mul_(2)

    assert torch.equal(early.compute(), expected)
    with pytest.raises(RuntimeError, match="the weight of the head has changed since"):
        late.compute()


def test_behind_a_fused_step_of_the_optimizer_they_are_gone(head: nn.Linear) -> None:
    """Which torch doesn't count as a change of the weight."""
    other = nn.Linear(4, 5)
    logits = given(head, torch.randn(2, 3, 4))
    for layer in (other, head):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    version = head.weight._version
    torch.optim.AdamW(other.parameters(), fused=True).step()
    assert torch.equal((logits * 1).compute(), logits.compute())
    late = given(head, torch.randn(2, 3, 4))
    torch.optim.AdamW(head.parameters(), fused=True).step()
    assert head.weight._version == version

    with pytest.raises(RuntimeError, match="the weight of the head has changed since"):
        late.compute()


def test_heads_are_watched_as_long_as_they_are_there() -> None:
    """And the hooks of others run, those that came later too."""
    module._steps.clear()  # of other tests' heads
    weight = torch.randn(5, 4)
    logits = Deferred(torch.randn(2, 4), weight, None, Pending(None, None))
    assert len(module._steps) == 1
    later: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *given: later.append(given))
    del weight, logits
    gc.collect()
    try:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    finally:
        hook.remove()
    assert len(module._steps) == 0
    assert len(later) == 1


def test_changed_in_place_they_stay_changed(lazy: Deferred, real: Tensor) -> None:
    with torch.no_grad():
        lazy[..., 2] = 7.0
    expected = real.detach().clone()
    expected[..., 2] = 7.0

    assert torch.equal((lazy * 2), expected * 2)
    assert torch.equal(LazyLogits(lazy).float(), expected)
    assert lazy.pending.changed


def test_copied_or_pickled_they_are_logits(lazy: Deferred, real: Tensor) -> None:
    with torch.no_grad():
        detached = Deferred(lazy.hidden_states, lazy.weight, lazy.bias, lazy.pending)
        assert torch.equal(copy.deepcopy(detached), real)  # type: ignore[arg-type]
        assert torch.equal(pickle.loads(pickle.dumps(detached)), real)


def test_a_copy_of_them_elsewhere_changes_nothing(lazy: Deferred) -> None:
    lazy[:, :1].clone().zero_()

    assert not lazy.pending.changed


def test_steps_are_done_as_they_were_noted() -> None:
    x = torch.randn(5).bfloat16()

    assert torch.equal(Pointwise("times", 0.3)(x), x * 0.3)
    assert torch.equal(Pointwise("over", 0.3)(x), x / 0.3)
    assert torch.equal(Pointwise("tanh")(x), x.tanh())
    assert Pointwise("to", torch.float32)(x).dtype == torch.float32


# As a tensor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def logits(lazy: Deferred) -> LazyLogits:
    return LazyLogits(lazy)


@pytest.mark.parametrize("what", list(COMPUTED))
def test_as_a_tensor_they_are_computed_when_they_are_used(logits: LazyLogits, real: Tensor, what: str) -> None:
    real = real.as_subclass(torch.Tensor)
    real.compute = lambda: real  # type: ignore[attr-defined]

    found = COMPUTED[what](logits)

    assert type(found) is Tensor
    torch.testing.assert_close(found, COMPUTED[what](real))


def test_as_a_tensor_they_tell_what_they_would_be(logits: LazyLogits, real: Tensor) -> None:
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.size(), logits.size(-1), logits.dim(), logits.ndim) == (
        real.shape,
        real.shape,
        7,
        3,
        3,
    )
    assert (logits.numel(), len(logits), logits.is_floating_point()) == (42, 2, True)
    assert (logits.dtype, logits.device) == (real.dtype, real.device)
    assert repr(logits) == "LazyLogits: (2, 3, 7), not computed: the loss took the hidden states. compute() gives them"
    half = logits.to(torch.bfloat16)
    assert (type(half), half.dtype) == (LazyLogits, torch.bfloat16)
    assert type(half.float()) is LazyLogits
    assert logits._deferred._computed is None
    assert torch.equal(half.float().compute(), real.bfloat16().float())


def test_as_a_tensor_they_are_copied_and_pickled_as_logits(logits: LazyLogits, real: Tensor) -> None:
    assert torch.equal(copy.deepcopy(logits.detach()), real)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(logits)), real)

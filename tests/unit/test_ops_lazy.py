"""Logits that nobody has computed: what is done to them either goes on the list, or computes them."""

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
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from kernel_compat.ops.losses import causal as losses
from kernel_compat.ops.losses import lazy as module
from kernel_compat.ops.losses.lazy import Deferred, LazyLogits, Pending, Pointwise


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return bound(nn.Linear(4, 7))


def bound(head: nn.Linear) -> nn.Linear:
    """A head as it is in a model whose loss has been replaced."""
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
    "to where it is, some time": lambda x: x.to(x.device, non_blocking=True),
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
    assert not found["logits"]._deferred.is_computed
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
    with pytest.raises(RuntimeError, match="the head has changed since"):
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

    with pytest.raises(RuntimeError, match="the head has changed since"):
        late.compute()


def test_behind_a_step_of_the_bias_alone_they_are_gone(head: nn.Linear) -> None:
    logits = given(head, torch.randn(2, 3, 4))
    assert head.bias is not None
    head.bias.grad = torch.ones_like(head.bias)
    torch.optim.SGD([head.bias], lr=1.0).step()

    with pytest.raises(RuntimeError, match="the head has changed since"):
        logits.compute()


def test_behind_a_change_of_the_hidden_states_they_are_gone(head: nn.Linear) -> None:
    hidden_states = torch.randn(2, 3, 4)
    logits = given(head, hidden_states[:, 1:])
    hidden_states /= 2

    with pytest.raises(RuntimeError, match="the last hidden state has changed since"):
        logits.compute()


def test_no_gradient_of_the_loss_is_promised(lazy: Deferred) -> None:
    for wrapped in (lazy, LazyLogits(lazy)):
        with pytest.raises(RuntimeError, match="the loss takes the hidden states, and no gradient of it comes"):
            wrapped.retain_grad()
    with pytest.raises(RuntimeError, match="use logits.compute()"):
        lazy.register_hook(print)


def test_heads_are_watched_as_long_as_they_are_there() -> None:
    """And the hooks of others run, those that came later too."""
    module._steps.clear()  # of other tests' heads
    weight = nn.Parameter(torch.randn(5, 4))
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
    assert logits.to("cpu", non_blocking=True) is logits
    assert (logits.stride(), logits.is_contiguous(), logits.element_size()) == (real.stride(), True, 4)
    assert logits._base is None
    assert not logits._deferred.is_computed
    assert torch.equal(half.float().compute(), real.bfloat16().float())


def test_as_a_tensor_they_are_copied_and_pickled_as_logits(logits: LazyLogits, real: Tensor) -> None:
    assert torch.equal(copy.deepcopy(logits.detach()), real)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(logits)), real)


# Their gradients -----------------------------------------------------------------------------------------------------


class Squared(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x


class AsItIs(torch.autograd.Function):  # type: ignore[misc]
    """As wrappers do to outputs whose backward they wait for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


def squared(x: Tensor) -> Tensor:
    return x.square().sum()


def below(x: Tensor) -> Tensor:
    """Called as C++ does."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.square().sum()


def looked_at_before(x: Tensor) -> Tensor:
    with torch.no_grad():
        assert x.argmax(-1).shape == x.shape[:-1]
    return squared(x) + below(x)


def no_grad(cast: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        found = cast()
    assert not found.requires_grad
    return found.mean()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x


def twice(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return squared(gradient)


USES: dict[str, Callable[[Any], Tensor]] = {
    "methods": squared,
    "a function of somebody's own": Squared.apply,
    "what gives them back": lambda x: squared(AsItIs.apply(x)),
    "what gives them back, in another dtype": lambda x: squared(AsItIs.apply(x).double()),
    "C++": below,
    "C++, then methods": lambda x: below(x) + squared(x),
    "without gradients, then with": looked_at_before,
    "checkpoint": lambda x: checkpoint(squared, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(squared, x, use_reentrant=True),
    "vmap": lambda x: torch.vmap(lambda row: row.square().sum())(x).sum(),
    "another dtype": lambda x: squared(x.double()),
    "another dtype in a function": lambda x: Squared.apply(x.double()),
    "changed in place": lambda x: squared(x.mul_(2)),
    "cast without gradients": lambda x: no_grad(x.double) * squared(x),
    "with a hook": lambda x: hooked(x).float().square().sum(),
    "with a hook, in another dtype": lambda x: hooked(x).double().square().sum(),
    "a gradient's gradient": twice,
    "detached": lambda x: x.detach().sum() * squared(x),
}


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("use", list(USES))
def test_what_they_are_used_for_has_its_gradients(head: nn.Linear, use: str, softcap: bool) -> None:
    hidden_states = torch.randn(2, 3, 4, requires_grad=True)
    lazy, real = given(head, hidden_states * 2), nn.functional.linear(hidden_states * 2, head.weight, head.bias)
    if softcap:
        lazy, real = (torch.tanh(x / 2) * 2 for x in (lazy, real))

    found, expected = USES[use](LazyLogits(lazy)), USES[use](real)

    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad
    leaves = [hidden_states, *head.parameters()]
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Not by `torch.autograd.grad`, which reentrant checkpoints refuse."""
    for leaf in leaves:
        leaf.grad = None
    out.backward()
    return [leaf.grad for leaf in leaves]


def test_their_place_in_the_graph_is_known(head: nn.Linear) -> None:
    """Asked by those that wait for the backward, FSDP2 and DistributedDataParallel for two."""
    calls: list[Tensor] = []
    logits = LazyLogits(given(head, torch.randn(2, 3, 4)))

    assert (logits.requires_grad, logits.is_leaf) == (True, False)
    assert logits.grad_fn is not None
    logits.register_hook(calls.append)
    passed = AsItIs.apply(logits)
    assert isinstance(passed, LazyLogits)
    assert not logits._deferred.is_computed
    passed.sum().backward()
    assert torch.equal(calls[0], torch.full((2, 3, 7), 3.0))
    with torch.no_grad():
        assert not LazyLogits(given(head, torch.randn(2, 3, 4))).requires_grad
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    assert not LazyLogits(given(head, torch.randn(2, 3, 4))).requires_grad


def test_a_tied_weight_has_its_gradient_once() -> None:
    """It is behind the hidden states, too."""
    head = bound(nn.Linear(4, 4, bias=False))
    calls: list[Tensor] = []
    x = torch.randn(2, 3, 4, requires_grad=True)
    hidden_states = nn.functional.linear(x, head.weight).tanh()
    hidden_states.register_hook(calls.append)

    found = gradients(LazyLogits(given(head, hidden_states)).square().sum(), [x, head.weight])

    assert len(calls) == 1
    expected = nn.functional.linear(nn.functional.linear(x, head.weight).tanh(), head.weight).square().sum()
    torch.testing.assert_close(found, gradients(expected, [x, head.weight]))


@pytest.mark.parametrize("used", [False, True])
def test_nothing_is_left_of_them(head: nn.Linear, used: bool) -> None:
    """Not even where the loss is kept; without the garbage collector."""
    gc.disable()
    try:
        logits = LazyLogits(given(head, torch.randn(2, 3, 4).mul(2)).tanh())
        kept = [weakref.ref(logits), weakref.ref(logits._deferred), weakref.ref(logits._deferred.hidden_states)]
        with torch.no_grad():
            logits.argmax(-1)
        kept.append(weakref.ref(logits._deferred.values()))
        if used:
            loss = logits.square().sum()
            loss.backward()
        del logits
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


def test_a_parameter_that_a_step_leaves_alone_is_unchanged(head: nn.Linear) -> None:
    head.weight.requires_grad_(False)
    logits = given(head, torch.randn(2, 3, 4))
    torch.optim.AdamW([head.weight]).step()

    assert logits.compute().shape == (2, 3, 7)


def test_they_are_detached_in_place(logits: LazyLogits, real: Tensor) -> None:
    before = logits * 2
    logits.detach_()

    assert before.requires_grad
    assert not logits.requires_grad
    assert not logits.compute().requires_grad
    assert torch.equal(logits.compute(), real)


def test_without_history_they_may_get_one(head: nn.Linear) -> None:
    with torch.no_grad():
        logits = LazyLogits(given(head, torch.randn(2, 3, 4)))
    logits.requires_grad_()
    logits.square().sum().backward()

    assert logits.requires_grad
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, 2 * logits.detach())


def test_nobody_changes_them_unseen(logits: LazyLogits) -> None:
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="changes logits that have not"):
        logits.mul_(2)

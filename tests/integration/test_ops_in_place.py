"""Kernels that write into query and key, into gradients and what they have saved, as Liger's do: only where nobody can see it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny import OPS_MODELS, VOCAB
from torch import Tensor
from torch.nn import functional

from kernel_compat import ops
from kernel_compat.ops.kernels.ownership import Alone, guard_backward, is_learning, own_gradients, own_saved
from kernel_compat.ops.recognisers import rotary

NAME = "in_place"


class Turned(torch.autograd.Function):
    """Writes into its inputs and into the gradients that it gets, and tells nobody."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return tuple(
            _write(x, new) for x, new in zip((query, key), rotary.reference(query, key, cos, sin), strict=True)
        )  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = rotary.reference(*gradients, cos, -sin)
        return (*(_write(x, new) for x, new in zip(gradients, back, strict=True)), None, None)


def _write(x: Tensor, new: Tensor) -> Tensor:
    x.data.copy_(new)
    return x.detach()


@pytest.fixture
def counts() -> Iterator[list[str]]:
    """Registers the kernel; says of every query, key and gradient whether it was written into."""
    seen: list[str] = []

    def factory() -> Callable[..., Any]:
        alone, turned = Alone(), counted(Turned, seen)

        def own(x: Tensor, what: str, is_alone: bool) -> Tensor:
            seen.append(f"{what} {'written' if is_alone else 'copied'}")
            return x if is_alone else x.clone()

        def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return rotate(own(query, "input", False), own(key, "input", False), cos, sin)

        def consuming(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            mine = (alone(query), alone(key))
            if is_learning():
                return query, key
            return rotate(own(query, "input", mine[0]), own(key, "input", mine[1]), cos, sin)

        def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            rotated = turned.apply(query, key, cos, sin)
            guard_backward(rotated[0], "this")
            return rotated

        kernel.consuming = consuming  # type: ignore[attr-defined]
        seen.clear()
        return kernel

    ops.register_kernel("rotary_pos_emb", "full", NAME)(factory)
    yield seen
    ops.unregister_kernel("rotary_pos_emb", "full", NAME)


def counted(function: Any, seen: list[str]) -> Any:
    """The function with gradients of its own; `seen` has each, and each that was copied for it."""

    class Counting(function):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            seen.extend("gradient" for _ in gradients)
            return function.backward(ctx, *gradients)

    def copy(x: Tensor) -> Tensor:
        seen.append("gradient copied")
        return x.clone()

    return own_gradients(Counting, copy)


def build(name: str = "llama") -> Any:
    torch.manual_seed(0)
    config = OPS_MODELS[name]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()


class Normed(torch.autograd.Function):
    """An RMSNorm that writes into the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            normed = functional.rms_norm(x, x.shape[-1:], weight, ctx.eps)
        of_x, of_weight = torch.autograd.grad(normed, (x, weight), gradients[0])
        return _write(gradients[0], of_x), of_weight, None


@pytest.fixture
def norm_counts() -> Iterator[list[str]]:
    """Registers the norm; says of every gradient whether it was written into."""
    seen: list[str] = []

    def factory() -> Callable[..., Tensor]:
        own = counted(Normed, seen)

        def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Tensor:
            normed: Tensor = own.apply(hidden_states, weight, eps)
            guard_backward(normed, "this")
            return normed

        return kernel

    ops.register_kernel("rms_norm", "standard", NAME)(factory)
    yield seen
    ops.unregister_kernel("rms_norm", "standard", NAME)


def apply(model: Any) -> ops.Report:
    return ops.apply_ops(model, ops.OpsConfig(rotary_pos_emb_implementation=NAME))


def gradients(model: Any, add: Callable[[Any], Any] = lambda _: 0.0) -> list[Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 9))
    model.zero_grad()
    (model(input_ids=ids, labels=ids, use_cache=False).loss + add(model)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def require_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [n for n in ("llama", "qwen2", "qwen3", "gemma3") if n in OPS_MODELS])
def test_nothing_is_copied_where_nobody_looks(counts: list[str], name: str) -> None:
    model = build(name)
    expected = gradients(copy.deepcopy(model))
    apply(model)
    require_same(gradients(model), expected)
    assert counts.count("input written") == 2 * model.config.num_hidden_layers
    assert counts.count("input copied") == 0
    assert counts.count("gradient") == 2 * model.config.num_hidden_layers


ways_to_keep = pytest.mark.parametrize(
    "keep",
    [lambda x: x, lambda x: x.detach(), lambda x: x.view(-1)[3:], lambda x: x.untyped_storage()],
    ids=["it", "detached", "a part", "its memory"],
)


def regularize(modules: list[Any]) -> Callable[[Any], Any]:
    """Has autograd save what they give. What it returns gives the sum of the squares since."""
    squares: list[Tensor] = []

    def regularizer(model: Any) -> Any:
        total = sum(squares)
        squares.clear()
        return total

    for module in modules:
        module.register_forward_hook(lambda m, a, out: squares.append(out.square().sum()))
    return regularizer


def keep_from(modules: list[Any], keep: Callable[[Tensor], Any]) -> list[tuple[Any, Any]]:
    """What hooks keep of what modules give, and copies of it as it was."""
    kept: list[tuple[Any, Any]] = []
    for module in modules:
        module.register_forward_hook(lambda m, a, out: kept.append((keep(out), keep(out).clone())))
    return kept


def same(one: Any, other: Any) -> bool:
    """Tensors, or memory."""
    return torch.equal(one, other) if isinstance(one, Tensor) else one.tolist() == other.tolist()


@ways_to_keep
def test_what_a_hook_has_kept_stays(counts: list[str], keep: Callable[[Tensor], Any]) -> None:
    model = build()
    kept = keep_from([layer.self_attn.q_proj for layer in model.model.layers], keep)
    apply(model)
    gradients(model)
    assert counts.count("input copied") == 2  # the queries, and not the keys
    assert all(same(now, before) for now, before in kept)
    assert len(kept) == 2


def test_what_autograd_has_saved_stays(counts: list[str]) -> None:
    model = build()
    regularizer = regularize([layer.self_attn.k_proj for layer in model.model.layers])
    expected = gradients(copy.deepcopy(model), regularizer)
    apply(model)
    require_same(gradients(model, regularizer), expected)
    assert counts.count("input copied") == 2


def test_other_names_in_the_caller(counts: list[str]) -> None:
    """What the caller reads again, or has under a second name, stays."""
    from transformers.models.llama import modeling_llama

    class Reads(modeling_llama.LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
            key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
            cos, sin = position_embeddings
            turned, other = apply_rotary_pos_emb(query, key, cos, sin)
            return self.o_proj(
                (turned + other.sum(1, True) + query * 2 + key.sum(1, True)).transpose(1, 2).flatten(2)
            ), None

    class Renames(modeling_llama.LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
            key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
            before = query
            cos, sin = position_embeddings
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            return self.o_proj((query + key.sum(1, True) + before * 2).transpose(1, 2).flatten(2)), None

    for written, class_ in ((0, Reads), (2, Renames)):  # of the second, the keys
        model = build()
        for number, layer in enumerate(model.model.layers):
            layer.self_attn = class_(model.config, number).double()
        expected = gradients(copy.deepcopy(model))
        counts.clear()
        with apply(model):
            require_same(gradients(model), expected)
        assert counts.count("input written") == written
        assert counts.count("input copied") == 4 - written


def test_a_gradient_that_goes_two_ways_stays(counts: list[str]) -> None:
    """``rotated + other`` hands both the same tensor."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            query, key = x * 2, x * 3
            one, other = x * 5, x * 7
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            return (query + one).square() + (key + other).square()

    torch.manual_seed(0)
    x = torch.randn(1, 2, 3, 4).double().requires_grad_()
    cos, sin = torch.randn(2, 1, 3, 2).double().repeat(1, 1, 1, 2)  # as of angles: two equal halves
    layer = Layer()
    (expected,) = torch.autograd.grad(layer(x, cos, sin).sum(), x)
    with apply(layer):
        (found,) = torch.autograd.grad(layer(x, cos, sin).sum(), x)
    torch.testing.assert_close(found, expected)
    assert counts.count("gradient copied") == 2


def test_the_gradients_of_norms_are_written_in_place(norm_counts: list[str]) -> None:
    model = build()
    expected = gradients(copy.deepcopy(model))
    with ops.apply_ops(model, ops.OpsConfig(rms_norm_implementation=NAME)):
        norm_counts.clear()
        require_same(gradients(model), expected)
    assert norm_counts.count("gradient") == 2 * model.config.num_hidden_layers + 1
    assert norm_counts.count("gradient copied") == 1  # of the last, which is a view of the head's


def test_the_gradient_of_a_norm_that_goes_two_ways_stays(norm_counts: list[str]) -> None:
    """Gemma 2 norms what it then adds to the residual: both have the sum's gradient."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(6)  # computes in float32

        def forward(self, x: Tensor) -> Tensor:
            residual = x * 3  # whose backward is the later one
            return (residual + self.norm(x * 2)).exp()

    torch.manual_seed(0)
    x = torch.randn(2, 6).requires_grad_()
    layer = Layer()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with ops.apply_ops(layer, ops.OpsConfig(rms_norm_implementation=NAME)):
        norm_counts.clear()
        (found,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found, expected)
    assert norm_counts == ["gradient copied", "gradient"]


@pytest.mark.parametrize("hook", ["register_prehook", "register_hook"])
def test_the_gradient_of_a_norm_that_a_hook_keeps_stays(norm_counts: list[str], hook: str) -> None:
    """A hook that comes later than ours, and one behind the backward."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kept: list[Tensor] = []
    layer, factor = LlamaRMSNorm(6), torch.randn(2, 6)
    with ops.apply_ops(layer, ops.OpsConfig(rms_norm_implementation=NAME)):
        norm_counts.clear()
        normed = layer(torch.randn(2, 6, requires_grad=True))
        getattr(normed.grad_fn, hook)(lambda *given: kept.append(given[-1][0]))
        (normed * factor).sum().backward()
    assert torch.equal(kept[0], factor)
    assert norm_counts == ["gradient copied", "gradient"]


class Gated(torch.autograd.Function):
    """A SwiGLU that writes gradients over the gate and the projection that it has saved."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]))
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        saved, (given,) = ctx.saved_tensors, gradients
        gate, up = (one.detach().clone().requires_grad_() for one in saved)
        with torch.enable_grad():
            product = functional.silu(gate) * up
        back = torch.autograd.grad(product, (gate, up), given.reshape_as(product))
        return tuple(_write(x, new).view_as(given) for x, new in zip(saved, back, strict=True))


@pytest.fixture
def gate_copies() -> Iterator[list[Tensor]]:
    """Registers it, with what was copied for its backward."""
    copies: list[Tensor] = []

    def copy(x: Tensor) -> Tensor:
        copies.append(x.clone())
        return copies[-1]

    def factory() -> Callable[[Tensor, Tensor], Tensor]:
        own: Any = own_saved(Gated, copy)
        return lambda gate, up: own.apply(gate.contiguous(), up.contiguous())

    ops.register_kernel("swiglu_mlp", "standard", NAME)(factory)
    yield copies
    ops.unregister_kernel("swiglu_mlp", "standard", NAME)


def gated(model: Any) -> ops.Report:
    return ops.apply_ops(model, ops.OpsConfig(swiglu_mlp_implementation=NAME))


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant checkpoints", "checkpoints"])
@pytest.mark.parametrize("name", [n for n in ("llama", "qwen2", "qwen3") if n in OPS_MODELS])
def test_of_a_gate_nothing_is_copied_where_nobody_looks(
    gate_copies: list[Tensor], name: str, checkpointing: bool | None
) -> None:
    model = build(name).train()
    expected = gradients(copy.deepcopy(model))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
    gated(model)
    require_same(gradients(model), expected)
    assert not gate_copies


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpoints"])
def test_a_gate_that_autograd_has_saved_stays(gate_copies: list[Tensor], checkpointing: bool) -> None:
    """A regularizer's gradient is computed behind SwiGLU's, of what SwiGLU would have written over."""
    model = build().train()
    regularizer = regularize([layer.mlp.gate_proj for layer in model.model.layers])
    expected = gradients(copy.deepcopy(model), regularizer)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gated(model)
    require_same(gradients(model, regularizer), expected)
    assert len(gate_copies) == 2  # the gates, and not the projections


@ways_to_keep
def test_a_gate_that_a_hook_has_kept_stays(gate_copies: list[Tensor], keep: Callable[[Tensor], Any]) -> None:
    model = build()
    kept = keep_from([layer.mlp.up_proj for layer in model.model.layers], keep)
    gated(model)
    gradients(model)
    assert all(same(now, before) for now, before in kept)
    assert len(kept) == len(gate_copies) == 2


def test_what_hooks_have_kept_of_what_was_saved_stays(gate_copies: list[Tensor]) -> None:
    """Nobody knows what they do, so all is copied."""
    model = build()
    expected = gradients(copy.deepcopy(model))
    gated(model)
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append((x.detach(), x.clone()))
        return kept[-1][0]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = gradients(model)
    require_same(found, expected)
    assert all(same(now, before) for now, before in kept)
    assert len(gate_copies) == 4


def test_compiled_autograd() -> None:
    """It follows backwards that it knows, and nothing is alone there."""
    inputs = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(2)]
    gated: Any = own_saved(Gated)
    normed: Any = own_gradients(Normed)

    def results(product: Callable[..., Tensor], norm: Callable[..., Tensor]) -> list[Tensor]:
        gate, up = inputs[0] * 2, inputs[1] * 3
        regularizer = gate.pow(3).sum()
        loss = regularizer + (norm(product(gate, up), torch.ones(4), 1e-6) + inputs[0] * 5).sin().sum()
        return list(torch.autograd.grad(loss, inputs))

    expected = results(
        lambda gate, up: functional.silu(gate) * up, lambda x, weight, eps: functional.rms_norm(x, (4,), weight, eps)
    )
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        require_same(results(gated.apply, normed.apply), expected)


def test_a_config_is_applied_in_inference_mode(gate_copies: list[Tensor]) -> None:
    model = build()
    expected = gradients(copy.deepcopy(model))
    with torch.inference_mode():
        gated(model)
    require_same(gradients(model), expected)
    assert not gate_copies


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotary.rotate_half(q) * sin, k * cos + rotary.rotate_half(k) * sin


def test_a_second_backward_and_a_second_derivative_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    guard_backward(y, "this kernel", once=True)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this kernel changes what it has saved"):
        y.sum().backward()
    y = x.exp()
    guard_backward(y, "this kernel")
    with pytest.raises(RuntimeError, match="this kernel has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), x)

"""use_sdpa_backends sets the backends that SDPA sees, and changes nothing else."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import CAUSAL_LMS, VOCAB, randomize
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError, checkpoint

from kernel_compat import Handle
from kernel_compat.models import sdpa_backends as sdpa
from kernel_compat.models import use_sdpa_backends
from kernel_compat.patching import wrapping

SDPA = F.scaled_dot_product_attention
DEFAULT = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
#: A backend order that is neither torch's default nor ours, and contains a backend for the CPU.
CHOSEN = ["MATH", "EFFICIENT_ATTENTION"]


def in_force() -> list[str]:
    return [backend.name for backend in torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)]


TORCH = in_force()


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    assert in_force() == TORCH
    yield
    left, threads = in_force(), list(sdpa._process._running)
    torch.nn.attention._sdpa_kernel([getattr(SDPBackend, name) for name in TORCH], True)
    assert left == TORCH
    assert not threads
    assert sdpa._here.backends is None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The backends in force at each call of SDPA, in order."""
    calls: list[list[str]] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(in_force())
        return SDPA(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Attend."""
        x = self.project(x)
        return F.scaled_dot_product_attention(x, x, x, scale=scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    """Two blocks; in training each is checkpointed by a function that the user passes."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(lambda x, block=block: block(x) * 2, x, use_reentrant=self.reentrant)
        return x


def inputs() -> torch.Tensor:
    return torch.randn(1, 2, 4, 8, requires_grad=True)


def llama(layers: int = 2) -> Any:
    config = CAUSAL_LMS["llama"]()
    config.num_hidden_layers = layers
    return randomize(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")).eval()


def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 6))


def attributes(module: nn.Module) -> dict[str, dict[str, int]]:
    return {name: {key: id(value) for key, value in vars(part).items()} for name, part in module.named_modules()}


def patched(module: nn.Module) -> set[str]:
    return {name for name, part in module.named_modules() if wrapping.STATE in vars(part)}


# The backends in force.


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        (None, DEFAULT),
        (SDPBackend.MATH, ["MATH"]),
        ("flash_attention", ["FLASH_ATTENTION"]),
        ("MATH", ["MATH"]),
        (["math", SDPBackend.FLASH_ATTENTION], ["MATH", "FLASH_ATTENTION"]),
        ((SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), ["FLASH_ATTENTION", "MATH"]),
        (["Math", SDPBackend.MATH, "Efficient_Attention", "MATH"], ["MATH", "EFFICIENT_ATTENTION"]),
        ([*reversed(DEFAULT)], [*reversed(DEFAULT)]),
    ],
)
def test_what_is_in_force(backends: Any, expected: list[str], seen: list[list[str]]) -> None:
    model = llama()
    handle = use_sdpa_backends(model, backends)
    assert isinstance(handle, Handle)
    assert in_force() == TORCH
    model(ids())
    assert seen == [expected] * 2
    assert in_force() == TORCH
    handle.undo()
    model(ids())
    assert seen == [expected] * 2 + [TORCH] * 2


def test_context_manager(seen: list[list[str]]) -> None:
    model, x = Model(), inputs()
    with use_sdpa_backends(model, CHOSEN) as handle:
        assert handle.active
        model(x)
    assert not handle.active
    model(x)
    assert seen == [CHOSEN, CHOSEN, TORCH, TORCH]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_of_the_forward(error: type[BaseException], seen: list[list[str]]) -> None:
    model, x = Model(), inputs()
    use_sdpa_backends(model, CHOSEN)

    def fail(*args: Any) -> None:
        seen.append(in_force())
        raise error("inside")

    hook = model.blocks[1].attention.register_forward_pre_hook(fail)
    with pytest.raises(error, match="inside"):
        model(x)
    assert in_force() == TORCH
    hook.remove()
    model(x)
    assert seen == [CHOSEN] * 4


def test_a_backend_that_cannot_run_raises() -> None:
    """The choice reaches torch's dispatcher, not only the flags."""
    model, x = Model(), inputs()
    with use_sdpa_backends(model, "CUDNN_ATTENTION"), pytest.raises(RuntimeError, match="No (viable|available)"):
        model(x)
    model(x)


def test_contexts_of_the_user(seen: list[list[str]]) -> None:
    """A context around the forward is overridden; a context inside it is nearer to SDPA and applies."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                x = self.model(x)
            return self.model(x)

    model = Own()
    with use_sdpa_backends(model, CHOSEN), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model(inputs())
        assert set(in_force()) == {"FLASH_ATTENTION"}
    assert seen == [["FLASH_ATTENTION", "MATH"]] * 2 + [CHOSEN] * 2


def test_torchs_own_attention(seen: list[list[str]]) -> None:
    x = torch.randn(2, 4, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    with use_sdpa_backends(attention, CHOSEN):
        assert patched(attention) == {""}
        attention(x, x, x, need_weights=False)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    with use_sdpa_backends(encoder, CHOSEN):
        names = {"", "layers.0", "layers.0.self_attn", "layers.1", "layers.1.self_attn"}
        assert patched(encoder) == names, "all that can attend, no Linear and no list"
        checkpoint(encoder.layers[0].self_attn, x, x, x, None, False, use_reentrant=False)[0].sum().backward()
        encoder(x)
    assert seen == [CHOSEN] * 5


@pytest.mark.parametrize("root", [lambda block: nn.ModuleList([block]), lambda block: nn.ModuleDict({"block": block})])
def test_containers(root: Any, seen: list[list[str]]) -> None:
    module = root(Block())
    before = attributes(module)
    with use_sdpa_backends(module, CHOSEN):
        next(module.children())(inputs())
    assert seen == [CHOSEN]
    assert attributes(module) == before


def test_what_the_process_has_otherwise_comes_back() -> None:
    """torch's own context manager loses the position of a disabled backend in the order."""
    model, order = Model(), torch._C._get_sdp_priority_order()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with use_sdpa_backends(model):
            model(inputs())
        assert torch._C._get_sdp_priority_order() == order
        assert set(in_force()) == set(TORCH) - {"FLASH_ATTENTION"}
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


# Arguments.


@pytest.mark.parametrize(
    ("backends", "error", "match"),
    [
        ([], ValueError, "must not be empty; there are MATH, FLASH_ATTENTION"),
        ((), ValueError, "must not be empty"),
        ("flash", ValueError, "'flash' is no SDPA backend; there are MATH, FLASH_ATTENTION, EFFICIENT_ATTENTION"),
        ("", ValueError, "'' is no SDPA backend"),
        (["MATH", "nothing"], ValueError, "'nothing' is no SDPA backend"),
        ("ERROR", ValueError, "'ERROR' is no SDPA backend"),
        (SDPBackend.ERROR, ValueError, "is no SDPA backend"),
        (5, TypeError, "not 5"),
        ([SDPBackend.MATH, 1], TypeError, "not 1"),
        ([["MATH"]], TypeError, r"not \['MATH'\]"),
        (b"MATH", TypeError, "not b'MATH'"),
        ({"MATH"}, TypeError, "not {'MATH'}"),
    ],
)
def test_bad_backends(backends: Any, error: type[Exception], match: str) -> None:
    model = Model()
    before = attributes(model)
    with pytest.raises(error, match=match):
        use_sdpa_backends(model, backends)
    assert attributes(model) == before


@pytest.mark.parametrize("module", [None, Model, "model", lambda x: x])
def test_no_module(module: Any) -> None:
    with pytest.raises(TypeError, match="module must be a torch.nn.Module"):
        use_sdpa_backends(module)


@pytest.mark.parametrize("at", range(5))
def test_all_or_nothing(at: int, monkeypatch: pytest.MonkeyPatch, seen: list[list[str]]) -> None:
    model, x, real = Model(), inputs(), wrapping._place
    use_sdpa_backends(model.blocks[0], CHOSEN)
    before, count = attributes(model), itertools.count()

    def place(*args: Any) -> None:
        if next(count) == at:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(wrapping, "_place", place)
    with pytest.raises(KeyboardInterrupt):
        use_sdpa_backends(model, "MATH")
    assert attributes(model) == before
    model(x)
    assert seen == [CHOSEN, TORCH]


def test_a_forward_without_a_signature_is_refused() -> None:
    model = Model()
    model.blocks[1].attention.forward = vars
    before = attributes(model)
    with pytest.raises(TypeError, match="has no signature"):
        use_sdpa_backends(model)
    assert attributes(model) == before


# Attributes and signatures that must not change.


def test_signatures_and_names() -> None:
    model = llama()
    before = {name: inspect.signature(part.forward) for name, part in model.named_modules()}
    with use_sdpa_backends(model):
        assert len(patched(model)) > 10
        for name, part in model.named_modules():
            assert inspect.signature(part.forward) == before[name], name
        attention = Attention()
        use_sdpa_backends(attention)
        assert attention.forward.__name__ == "forward"
        assert inspect.unwrap(attention.forward).__func__ is Attention.forward


def test_results_and_gradients_are_those_of_the_backend() -> None:
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    x = inputs()
    with sdpa_kernel(SDPBackend.MATH):
        expected = theirs(x)
        expected.square().sum().backward()
    expected_grad, x.grad = x.grad, None
    use_sdpa_backends(ours, "MATH")
    found = ours(x)
    found.square().sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, expected_grad)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_module_stays_what_it_was(seen: list[list[str]]) -> None:
    model = llama()
    before, state = attributes(model), model.state_dict()
    handle = use_sdpa_backends(model, CHOSEN)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == state[name].data_ptr()
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    model.to(torch.float64).train().eval()
    assert model(ids()).logits.dtype == torch.float64
    model.to(torch.float32)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
        model(ids())
        model.set_attn_implementation("sdpa")
    model(ids())
    assert seen == [CHOSEN] * 4
    handle.undo()
    assert attributes(model) == before


def test_generate(seen: list[list[str]]) -> None:
    model, prompt = llama(), ids()
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones(2, 6).long()}
    with sdpa_kernel(SDPBackend.MATH):
        expected = model.generate(prompt, **options)
    seen.clear()
    with use_sdpa_backends(model, "MATH"):
        assert torch.equal(model.generate(prompt, **options), expected)
        assert seen == [["MATH"]] * 6
        with pytest.raises(ValueError, match="not_an_argument"):  # generate reads the forward's signature
            model.generate(prompt, not_an_argument=1, **options)


# Activation checkpointing: the second half of the recorded SDPA calls is the recomputation.


def top_alone_does_not_suffice(
    model: nn.Module, reentrant: bool, seen: list[list[str]], *args: Any, **kwargs: Any
) -> None:
    """Check that a context around the outer forward alone fails, so that these tests can detect the fault."""
    with sdpa_kernel([getattr(SDPBackend, name) for name in CHOSEN], set_priority=True):
        found = model(*args, **kwargs)
    loss = (found if isinstance(found, torch.Tensor) else found.logits).sum()
    if reentrant:
        loss.backward()
        assert seen == [CHOSEN] * 2 + [TORCH] * 2
    else:
        with pytest.raises(CheckpointError, match="different metadata"):  # another kernel saves other tensors
            loss.backward()
        assert seen[:3] == [CHOSEN, CHOSEN, TORCH]
    model.zero_grad()
    seen.clear()


def in_another_thread(function: Callable[[], Any]) -> None:
    """Run a function in another thread, like autograd's backward on a GPU."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("backward", [lambda run: run(), in_another_thread])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_by_transformers(reentrant: bool, backward: Any, seen: list[list[str]]) -> None:
    model, batch = llama().train(), ids()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    top_alone_does_not_suffice(model, reentrant, seen, input_ids=batch, use_cache=False)

    def step(run: Callable[..., Any]) -> list[torch.Tensor]:
        loss = run(input_ids=batch, use_cache=False).logits.square().mean()
        assert len(seen) == 2
        backward(loss.backward)
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return grads

    with sdpa_kernel(SDPBackend.MATH):
        expected = step(model)
    seen.clear()
    with use_sdpa_backends(model, CHOSEN):
        step(model)
        assert seen == [CHOSEN] * 4
        seen.clear()
    with use_sdpa_backends(model, "MATH"):
        for found, wanted in zip(step(model), expected, strict=True):
            assert torch.equal(found, wanted)
    assert seen == [["MATH"]] * 4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["a function of the user's", "the wrapper, before", "the wrapper, after"])
def test_recomputation_by_torch(how: str, reentrant: bool, seen: list[list[str]]) -> None:
    x = inputs()

    def wrap() -> None:
        implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, implementation)

    model = Model(reentrant=reentrant if how == "a function of the user's" else None)
    if how == "the wrapper, before":
        wrap()
    if how != "the wrapper, after":
        top_alone_does_not_suffice(model, reentrant, seen, x)
    use_sdpa_backends(model, CHOSEN)
    if how == "the wrapper, after":
        wrap()
    model(x).sum().backward()
    assert seen == [CHOSEN] * 4


def test_recomputation_of_a_part_with_other_backends(seen: list[list[str]]) -> None:
    model = Model(reentrant=False)
    use_sdpa_backends(model, CHOSEN)
    with use_sdpa_backends(model.blocks[0], "MATH"):
        model(inputs()).sum().backward()
    assert seen == [["MATH"], CHOSEN, CHOSEN, ["MATH"]]


# Several calls.


def test_twice_does_not_nest(seen: list[list[str]]) -> None:
    model, x = Model(), inputs()
    before = attributes(model)
    first = use_sdpa_backends(model, "FLASH_ATTENTION")
    forward = vars(model)["forward"]
    second = use_sdpa_backends(model, CHOSEN)
    third = use_sdpa_backends(model, CHOSEN)
    assert vars(model)["forward"] is forward
    model(x)
    second.undo()
    second.undo()
    model(x)
    third.undo()
    model(x)
    first.undo()
    assert attributes(model) == before
    assert seen == [CHOSEN] * 4 + [["FLASH_ATTENTION"]] * 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_undone_in_any_order(order: tuple[int, ...], seen: list[list[str]]) -> None:
    model, x = Model(), inputs()
    before = attributes(model)
    choices = [["MATH"], CHOSEN, ["FLASH_ATTENTION", "MATH"]]
    targets = [model, model.blocks[1], model.blocks[1].attention]
    handles = {i: use_sdpa_backends(targets[i], choices[i]) for i in range(3)}
    for i in order:
        handles.pop(i).undo()
        model(x)
        everywhere = choices[0] if 0 in handles else TORCH
        assert seen == [everywhere, choices[max(handles)] if handles else TORCH]
        seen.clear()
    assert attributes(model) == before


# Forwards replaced by other code.


def test_an_instance_forward_from_before_comes_back(seen: list[list[str]]) -> None:
    block = Block()
    original = block.forward

    def theirs(x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        return original(x) * (2 if twice else 1)

    block.forward = theirs  # type: ignore[method-assign]
    x, before = inputs(), attributes(block)
    expected = theirs(x, twice=True)
    handle = use_sdpa_backends(block, CHOSEN)
    assert inspect.signature(block.forward) == inspect.signature(theirs)
    assert torch.allclose(block(x, twice=True), expected, atol=1e-5)
    handle.undo()
    assert block.forward is theirs
    assert attributes(block) == before
    assert seen == [TORCH, CHOSEN]


@pytest.mark.parametrize("wraps", [True, False])
def test_a_forward_over_ours_stays(wraps: bool, seen: list[list[str]]) -> None:
    attention, x = Attention(), inputs()
    before = attributes(attention)
    first = use_sdpa_backends(attention, CHOSEN)
    ours = attention.forward

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return ours(x) if wraps else Attention.forward(attention, x)

    attention.forward = theirs  # type: ignore[method-assign,assignment]
    attention(x)
    assert seen.pop() == (CHOSEN if wraps else TORCH)
    second = use_sdpa_backends(attention, "MATH")
    attention(x)
    assert seen.pop() == ["MATH"]
    second.undo()
    attention(x)
    assert seen.pop() == CHOSEN
    first.undo()
    assert attention.forward is theirs
    attention(x)
    assert seen.pop() == TORCH
    if wraps:  # the other code may remove its forward after our undo
        attention.forward = ours  # type: ignore[method-assign]
        attention(x)
        assert seen.pop() == TORCH
        first.undo()  # removes our forward, which is in place again
        assert attributes(attention) == before
        first.undo()
        assert attributes(attention) == before


def test_a_forward_over_ours_that_is_taken_off_before_the_next_call(seen: list[list[str]]) -> None:
    attention, x = Attention(), inputs()
    before = attributes(attention)
    first = use_sdpa_backends(attention, CHOSEN)
    ours = attention.forward
    attention.forward = lambda x: ours(x) * 1  # type: ignore[method-assign,assignment,misc]
    first.undo()
    attention.forward = ours  # type: ignore[method-assign]
    with use_sdpa_backends(attention, "MATH"):
        first.undo()
        attention(x)
        assert seen.pop() == ["MATH"]
    assert attributes(attention) == before


def test_a_forward_over_ours_that_goes_with_what_is_over_it(seen: list[list[str]]) -> None:
    attention = Attention()
    before = attributes(attention)
    first = use_sdpa_backends(attention, CHOSEN)
    ours = attention.forward
    attention.forward = lambda x: ours(x) * 1  # type: ignore[method-assign,assignment,misc]
    second = use_sdpa_backends(attention, "MATH")
    attention.forward = ours  # type: ignore[method-assign]
    attention(inputs())
    first.undo()
    second.undo()
    assert attributes(attention) == before
    assert seen == [["MATH"]]


def test_a_forward_kept_from_before_the_undo(seen: list[list[str]]) -> None:
    attention = Attention()
    with use_sdpa_backends(attention, CHOSEN):
        kept = attention.forward
    kept(inputs())
    assert seen == [TORCH]


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_accelerate(before: bool, seen: list[list[str]]) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    block, x = Block(), inputs()
    if before:
        hooks.add_hook_to_module(block, hooks.ModelHook())
        theirs = block.forward
    handle = use_sdpa_backends(block, CHOSEN)
    if not before:
        hooks.add_hook_to_module(block, hooks.ModelHook())
        theirs = block.forward
    block(x)
    handle.undo()
    assert block.forward is theirs
    block(x)
    hooks.remove_hook_from_module(block)
    block(x)
    with use_sdpa_backends(block, CHOSEN):
        block(x)
    block(x)
    assert seen == [CHOSEN, TORCH, TORCH, CHOSEN, TORCH]
    assert not patched(block)


def test_a_class_swapped_afterwards(seen: list[list[str]]) -> None:
    """As FSDP2 does. transformers' checkpointed layers look up the forward on the current class."""
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = use_sdpa_backends(model, CHOSEN)
    for layer in model.model.layers:
        layer.__class__ = type("FSDP" + type(layer).__name__, (type(layer),), {})
    model(ids(), use_cache=False).logits.sum().backward()
    assert seen == [CHOSEN] * 4
    handle.undo()
    assert not patched(model)


def test_unusual_forwards(seen: list[list[str]]) -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    class Partial(nn.Module):
        forward = functools.partialmethod(lambda self, x, n: Static.forward(x) * n, n=2)

    with pytest.raises(TypeError, match=r"the original takes \(x.*its replacement \(\)"):
        use_sdpa_backends(Static())
    module, x = Partial(), inputs()
    before, expected = attributes(module), module(x)
    with use_sdpa_backends(module, CHOSEN):
        assert torch.allclose(module(x), expected, atol=1e-6)
    assert attributes(module) == before
    assert seen == [TORCH, CHOSEN]


def test_a_signature_that_would_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = attributes(model)
    monkeypatch.setattr(wrapping._Forward, "__wrapped__", property(lambda self: lambda x: 0))
    with pytest.raises(TypeError, match=r"the original takes \(x: .*scale.*, its replacement \(x\)"):
        use_sdpa_backends(model)
    assert attributes(model) == before


# Copies.


def copies() -> list[Any]:
    def saved(module: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved]


@pytest.mark.parametrize("duplicate", copies(), ids=["deepcopy", "pickle", "torch.save"])
def test_copies_are_on_their_own(duplicate: Callable[[Any], Any], seen: list[list[str]]) -> None:
    model = llama()
    handle = use_sdpa_backends(model, CHOSEN)
    other = duplicate(model)
    assert patched(other) == patched(model)
    assert list(other.state_dict()) == list(model.state_dict())
    assert inspect.signature(other.forward) == inspect.signature(model.forward)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    batch = ids()
    assert not other(batch).logits.any()
    assert model(batch).logits.any()
    assert seen == [CHOSEN] * 4
    seen.clear()
    handle.undo()
    other(batch)
    with use_sdpa_backends(other, "MATH"):
        other(batch)
        model(batch)
    other(batch)
    assert seen == [CHOSEN] * 2 + [["MATH"]] * 2 + [TORCH] * 2 + [CHOSEN] * 2


def doubled(module: nn.Module, inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner(x) * 2


@pytest.mark.parametrize("duplicate", copies()[:2], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("over", ["theirs", "ours"])
def test_copies_of_somebody_elses_forward(over: str, duplicate: Callable[[Any], Any], seen: list[list[str]]) -> None:
    attention, x = Attention(), inputs()
    expected = attention(x) * 2
    if over == "theirs":
        use_sdpa_backends(attention, CHOSEN)
    attention.forward = functools.partial(doubled, attention, attention.forward)  # type: ignore[method-assign]
    if over == "ours":
        use_sdpa_backends(attention, CHOSEN)
    other = duplicate(attention)
    assert torch.allclose(other(x), expected, atol=1e-6)
    with torch.no_grad():
        attention.project.weight.zero_()
    assert torch.allclose(other(x), expected, atol=1e-6)
    assert seen == [TORCH, CHOSEN, CHOSEN]


def attend_twice(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x) * 2


def test_a_pickled_copy_of_a_function_of_another_name(seen: list[list[str]]) -> None:
    attention = Attention()
    attention.forward = attend_twice  # type: ignore[method-assign,assignment]
    use_sdpa_backends(attention, CHOSEN)
    pickle.loads(pickle.dumps(attention))(inputs())
    assert seen == [CHOSEN]


def test_a_shallow_copy_is_another_module(seen: list[list[str]]) -> None:
    attention, x = Attention(), inputs()
    handle = use_sdpa_backends(attention, CHOSEN)
    other = copy.copy(attention)
    with use_sdpa_backends(other, "MATH"):
        handle.undo()
        assert not patched(attention)
        other(x)
        attention(x)
    assert seen == [["MATH"], TORCH]


def test_a_copy_does_not_hold_the_original() -> None:
    attention = Attention()
    attention.forward = functools.partial(doubled, attention, attention.forward)  # type: ignore[method-assign]
    use_sdpa_backends(attention, CHOSEN)
    other, original = copy.deepcopy(attention), weakref.ref(attention)
    del attention
    gc.collect()
    assert original() is None
    other(inputs())


# Threads.


def test_the_same_backends_in_threads_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping threads don't change each other's backends or the process's, whichever ends first."""
    model, x = Model(), inputs()
    found: list[Any] = []
    use_sdpa_backends(model, CHOSEN)
    began, ended = threading.Event(), threading.Event()

    def spy(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.current_thread() is first:
            began.wait(10)
        else:
            began.set()
            ended.wait(10)
        found.append(in_force())
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    first, second = (threading.Thread(target=model, args=(x,)) for _ in range(2))
    first.start()
    second.start()
    first.join()
    assert in_force() == CHOSEN
    ended.set()
    second.join()
    assert found == [CHOSEN] * 4
    assert in_force() == TORCH


def test_other_backends_in_threads_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    x, models = inputs(), [Model(), Model()]
    for model, backends in zip(models, (CHOSEN, ["MATH"]), strict=True):
        use_sdpa_backends(model, backends)
    problems: list[str] = []

    def other() -> None:
        try:
            models[1](x)
        except RuntimeError as error:
            problems.append(str(error))

    def spy(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        in_another_thread(other)
        assert in_force() == CHOSEN
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    models[0](x)
    assert len(problems) == 2
    assert "another thread runs with MATH, EFFICIENT_ATTENTION, so none can run with MATH now" in problems[0]
    monkeypatch.undo()
    models[1](x)


# torch.compile.


def attention_ops(graphs: list[torch.fx.GraphModule]) -> set[str]:
    """The attention operators in the graphs: the CPU's fused kernel, or the softmax of the math backend."""
    text = "\n".join(str(node.format_node()) for graph in graphs for node in graph.graph.nodes)
    return {name for name, mark in {"flash": "scaled_dot_product_flash", "math": "softmax"}.items() if mark in text}


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    """The forward and backward graphs that `compiled` has compiled since they were last cleared."""
    return []


@pytest.fixture
def compiled(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compiler(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return functools.partial(torch.compile, backend=backend, dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled(checkpointed: bool, compiled: Any, graphs: list[torch.fx.GraphModule]) -> None:
    model, batch = llama(layers=1).train(), ids()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = compiled(model, fullgraph=True)

    def step() -> tuple[list[torch.Tensor], set[str]]:
        graphs.clear()
        logits = run(input_ids=batch, use_cache=False).logits
        logits.square().mean().backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return [logits.detach(), *grads], attention_ops(graphs)

    plain, ops = step()
    assert ops == {"flash"}, "what tells the backends apart"
    with use_sdpa_backends(model, "FLASH_ATTENTION"):
        assert step()[1] == {"flash"}
        with use_sdpa_backends(model, ["MATH", "math"]):
            found, ops = step()
            assert ops == {"math"}
            assert in_force() == TORCH
    undone, ops = step()
    assert ops <= {"flash"}, "compiled again, or the first graph"
    for one, other, third in zip(plain, found, undone, strict=True):
        assert torch.equal(one, third)
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_a_compiled_part_in_a_checkpoint(compiled: Any, graphs: list[torch.fx.GraphModule]) -> None:
    model = Model(reentrant=False)
    use_sdpa_backends(model, "MATH")
    for block in model.blocks:
        block.forward = compiled(block.forward, fullgraph=True)
    model(inputs()).sum().backward()
    assert attention_ops(graphs) == {"math"}


def test_a_compiled_module(compiled: Any, graphs: list[torch.fx.GraphModule]) -> None:
    run = compiled(Model(), fullgraph=True)
    before = attributes(run)
    with use_sdpa_backends(run, "MATH"):
        run(inputs()).sum().backward()
    assert attention_ops(graphs) == {"math"}
    assert attributes(run).keys() == before.keys()
    assert not patched(run)


def test_a_forward_that_is_compiled_by_its_class(compiled: Any, graphs: list[torch.fx.GraphModule]) -> None:
    """torch.compile marks the compiled function with the original one, which isn't ours."""

    class Decorated(nn.Module):
        @functools.partial(torch.compile, backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = Decorated()
    use_sdpa_backends(model, "MATH")
    for again in (model, model.forward):
        torch._dynamo.reset()
        graphs.clear()
        compiled(again, fullgraph=True)(inputs())
        assert attention_ops(graphs) == {"math"}


@pytest.mark.slow
def test_a_graph_break(seen: list[list[str]]) -> None:
    """After a graph break torch resumes without the priority order, unless the frame isn't compiled."""

    class Broken(Attention):
        def forward(self, x: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
            x = self.project(x)
            torch._dynamo.graph_break()
            seen.append(torch.compiler.disable(in_force)())
            return SDPA(x, x, x)

    model = Model()
    for block in model.blocks:
        block.attention = Broken()
    run = torch.compile(model, backend="aot_eager")
    with use_sdpa_backends(model, CHOSEN):
        for _ in range(2):
            run(inputs()).sum().backward()
            assert in_force() == TORCH
    run(inputs())
    assert seen == [CHOSEN] * 4 + [TORCH] * 2


@pytest.mark.parametrize("compile_it", [False, True])
def test_torch_sets_its_order_for_cuda_before_ours(compile_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets its order at the first choice of a CUDA kernel, which would overwrite ours; that call itself needs a GPU."""
    asked: list[list[str]] = []

    class Process(sdpa._Process):
        @property
        def order_is_initialized(self) -> bool:
            asked.append(in_force())
            return True

        @order_is_initialized.setter
        def order_is_initialized(self, value: bool) -> None:
            pass

    monkeypatch.setattr(sdpa, "_process", Process())
    model = Block()
    use_sdpa_backends(model, CHOSEN)
    run = torch.compile(model, backend="eager", fullgraph=True) if compile_it else model
    run(inputs())
    assert asked == [TORCH, CHOSEN] if compile_it else [TORCH], "the inner module asks again while tracing"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_that_cannot_run_raises_where_compiled(backend: str) -> None:
    model = Model()
    with use_sdpa_backends(model, "CUDNN_ATTENTION"), pytest.raises(Exception, match="No (viable|available)"):
        torch.compile(model, backend=backend, fullgraph=True)(inputs())
    assert in_force() == TORCH

"""Every kernel that a config can choose, on tiny bfloat16 models, compared with the same weights in float32 without kernels.

The bound is eager's own error in bfloat16: a kernel rounds where eager does, or less often, so its error may be at most twice that.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from bf16 import require_as_close
from synchronization import no_synchronization
from tiny import OPS_MODELS, TRANSFORMERS, VOCAB, randomize
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernel_compat import KernelUnavailableError, ops
from kernel_compat_ops import registry
from kernel_compat_ops.losses.lazy import LazyLogits
from kernel_compat_ops.recognisers import norms, rotary

pytestmark = pytest.mark.gpu

VALUES = [
    ("rms_norm", "liger_kernel"),
    ("rms_norm", "triton"),
    ("rms_norm_gated", "fla"),
    ("swiglu_mlp", "liger_kernel"),
    ("rotary_pos_emb", "liger_kernel"),
    ("rotary_pos_emb", "triton"),
    ("cross_entropy_loss", "liger_kernel"),
    ("cross_entropy_loss", "chunk_loss"),
    ("load_balancing_loss", "triton"),
    ("moe", "fused_triton"),
    ("moe", "fused_quack"),
]


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor
    logits: Tensor


@pytest.fixture(autouse=True)
def linear_attention_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch's linear attention: fla refuses its backward on Hopper with the Triton of torch 2.11."""
    if "qwen3_5_moe" in OPS_MODELS:
        module = importlib.import_module("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
        plain = inspect.unwrap(module.torch_chunk_gated_delta_rule)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", plain)
        if hasattr(module, "chunk_gated_delta_rule"):
            monkeypatch.setattr(module, "chunk_gated_delta_rule", plain)


def build(name: str) -> Any:
    """A model with weights that bfloat16 holds exactly, and experts computed by upstream's own loop.

    Every token goes to every expert: otherwise the routing would depend on how the router's inputs are rounded.
    """
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if TRANSFORMERS.major >= 5 else {}
    config = OPS_MODELS[name]()
    if hasattr(config, "num_experts_per_tok"):
        config.num_experts_per_tok = 4
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
    return randomize(model).to(torch.bfloat16).float().to("cuda").train()


def run(model: Any, **inputs: Any) -> Result:
    """Run a forward and backward on a batch that is padded on the right, with some labels ignored."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, 23:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :9] = -100
    model.zero_grad()
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **inputs)
    outputs.loss.backward()
    logits = values(outputs.logits).float() * mask.unsqueeze(-1)
    return Result(outputs.loss.detach().float(), directions(model), logits.detach())


def values(logits: Any) -> Tensor:
    computed: Tensor = logits.compute() if isinstance(logits, LazyLogits) else logits
    return computed


def directions(model: Any) -> Tensor:
    """All gradients flattened, each normalised to length 1."""
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient / gradient.norm().clamp_min(1e-12) for gradient in gradients])


@pytest.mark.parametrize("name", list(OPS_MODELS))
@pytest.mark.parametrize(("op", "value"), VALUES, ids=[f"{op}-{value}" for op, value in VALUES])
def test_a_kernel_is_as_close_as_eager(op: str, value: str, name: str) -> None:
    truth = build(name)
    try:
        config = ops.OpsConfig.from_dict({f"{op}_implementation": value})
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    ours = copy.deepcopy(truth).bfloat16()
    if refused := ops.refusal(ours, op, value):
        pytest.skip(refused)
    report = ops.apply_ops(ours, config)
    if not report.bindings:
        pytest.skip(report.notes[0])

    exact, rough, found = run(truth), run(copy.deepcopy(truth).bfloat16()), run(ours)

    for what in ("gradient", "logits"):
        require_as_close(getattr(found, what), getattr(rough, what), getattr(exact, what))
    off, own = abs(float(found.loss - exact.loss)), abs(float(rough.loss - exact.loss))
    assert off <= 2 * own + 1e-3 * abs(float(exact.loss))  # own may be small by chance


@pytest.mark.parametrize("name", list(OPS_MODELS))
def test_the_best_set_is_as_close_as_eager(name: str) -> None:
    truth = build(name)
    ours = copy.deepcopy(truth).bfloat16()
    values = {k: v for k, v in ops.OpsConfig.auto(model=ours).values().items() if k != "attn_implementation"}

    report = ops.apply_ops(ours, ops.OpsConfig.from_dict(values))
    exact, rough, found = run(truth), run(copy.deepcopy(truth).bfloat16()), run(ours)

    assert {binding.op for binding in report.bindings} >= {"rms_norm", "cross_entropy_loss"}
    for what in ("gradient", "logits"):
        require_as_close(getattr(found, what), getattr(rough, what), getattr(exact, what))


def test_logits_never_take_memory() -> None:
    """Peak memory of a loss over a large vocabulary is at most a fifth of eager's, which stores the logits."""
    config = OPS_MODELS["llama"]()
    config.vocab_size = 32_000
    peaks = {}
    for value in ("eager", "chunk_loss"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(
            "cuda", torch.bfloat16
        )
        ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation=value))
        ids = torch.randint(0, 32_000, (1, 8192), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peaks[value] = torch.cuda.max_memory_allocated() - before
    assert peaks["chunk_loss"] <= peaks["eager"] / 5


LIGER = [
    ("rms_norm", "liger_kernel"),
    ("swiglu_mlp", "liger_kernel"),
    ("rotary_pos_emb", "liger_kernel"),
    ("cross_entropy_loss", "liger_kernel"),
]


def config_of(op: str, value: str) -> ops.OpsConfig:
    """The config that chooses a kernel; skips the test where it isn't installed."""
    try:
        return ops.OpsConfig.from_dict({f"{op}_implementation": value})
    except KernelUnavailableError as error:
        pytest.skip(str(error))


def bound(op: str, value: str) -> Any:
    config = config_of(op, value)
    model = build("llama").bfloat16()
    ops.apply_ops(model, config)
    return model


def loss_of(model: Any, **more: Any) -> Tensor:
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 64), device="cuda")
    loss: Tensor = model(**{"input_ids": ids, "labels": ids, "use_cache": False, **more}).loss
    return loss


@pytest.mark.parametrize(("op", "value"), LIGER)
def test_what_liger_cannot_do_is_refused(op: str, value: str) -> None:
    model = bound(op, value)
    weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss_of(model), weight, create_graph=True)
    loss = loss_of(model)
    (first,) = torch.autograd.grad(loss * 3, weight, retain_graph=True)
    if op == "cross_entropy_loss":
        with pytest.raises(RuntimeError, match="a second backward .* needs another forward"):
            torch.autograd.grad(loss * 3, weight)
    else:
        (again,) = torch.autograd.grad(loss * 3, weight)
        assert torch.equal(first, again)


def test_of_no_tokens_the_mean_is_not_a_number() -> None:
    model = bound("cross_entropy_loss", "liger_kernel")
    labels = torch.full((2, 64), -100, device="cuda")
    assert loss_of(model, labels=labels).isnan()
    assert not loss_of(model).isnan()


def test_liger_s_rotation_leaves_the_projections_as_they_are() -> None:
    model, kept = bound("rotary_pos_emb", "liger_kernel"), []
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(lambda module, given, out: kept.append((out, out.clone())))

    loss_of(model).backward()

    assert len(kept) == 4
    assert all(torch.equal(now, before) for now, before in kept)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_liger_s_norm_leaves_gradients_as_they_are(shared: bool) -> None:
    """As in Gemma 2, the norm's output is added to the residual: both share the gradient of the sum."""
    config = config_of("rms_norm", "liger_kernel")
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    kept: list[tuple[Tensor, Tensor]] = []

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = module.LlamaRMSNorm(256)

        def forward(self, x: Tensor) -> Tensor:
            residual = x * 3  # its backward runs after the norm's
            normed = self.norm(x * 2)
            normed.register_hook(lambda gradient: kept.append((gradient, gradient.clone())) or None)
            return (residual + normed if shared else normed * residual).square().sum()

    torch.manual_seed(0)
    layer = Layer().to("cuda")
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(layer(x), [x, layer.norm.weight])
    with ops.apply_ops(layer, config):
        found = torch.autograd.grad(layer(x), [x, layer.norm.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # float32 sums of 64 terms
    assert all(torch.equal(now, before) for now, before in kept)


def gated(product: Callable[[Tensor, Tensor], Tensor], how: str = "") -> tuple[list[Tensor], bool]:
    """Gradients of a SwiGLU's inputs, and whether the gate's values are unchanged afterwards."""
    torch.manual_seed(0)
    gate, up = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(64, 128)
    layers, x = torch.nn.ModuleList([gate, up]).to("cuda"), torch.randn(2, 8, 64, device="cuda", requires_grad=True)
    kept: list[tuple[Tensor, Tensor]] = []

    def call(x: Tensor) -> Tensor:
        first, second = gate(x), up(x)
        kept.append((first.detach(), first.clone()))
        regularizer = first.pow(3).sum() if "saved" in how else 0.0  # its backward runs after the product's
        return product(first, second).sin().sum() + regularizer

    loss = checkpoint(call, x, use_reentrant=False) if "checkpointed" in how else call(x)
    gradients = torch.autograd.grad(loss, [x, *layers.parameters()])
    unchanged = all(torch.equal(now, before) for now, before in kept)
    return list(gradients), unchanged


def kernel(op: str, value: str) -> Callable[..., Any]:
    config_of(op, value)
    specs = {spec.variant: spec for spec in registry.registered_kernels(op) if spec.name == value}
    return next(specs[variant] for variant in ("standard", "full", "causal") if variant in specs).load()


@pytest.mark.parametrize("how", ["", "checkpointed", "saved", "saved, checkpointed"], ids=lambda how: how or "alone")
def test_liger_s_swiglu_leaves_the_gate_as_it_is(how: str) -> None:
    found, unchanged = gated(kernel("swiglu_mlp", "liger_kernel"), how)
    expected, _ = gated(lambda gate, up: functional.silu(gate) * up, how)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # float32 sums of 16 terms
    assert unchanged


def test_liger_s_own_swiglu_writes_over_what_others_have() -> None:
    """Liger's SwiGLU writes into tensors that autograd has saved; ours doesn't."""
    library = pytest.importorskip("liger_kernel.transformers.functional")
    found, unchanged = gated(library.liger_swiglu, "saved")
    expected, _ = gated(lambda gate, up: functional.silu(gate) * up, "saved")
    assert not unchanged
    assert not torch.allclose(found[0], expected[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_the_backward_of_liger_s_loss_does_not_wait_for_the_device(factor: float, reduction: str) -> None:
    loss = kernel("cross_entropy_loss", "liger_kernel")
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 64, device="cuda", requires_grad=True) for size in (100, 1000))
    bias = torch.randn(1000, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (100,), device="cuda")
    labels[7] = -100

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss * factor, (hidden, weight, bias))

    expected = gradients(functional.cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction))
    gradients(loss(hidden, weight, labels, bias=bias, reduction=reduction))  # compile the kernels
    out = loss(hidden, weight, labels, bias=bias, reduction=reduction)
    with no_synchronization():
        found = gradients(out)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5  # float32 rounding

    library = importlib.import_module("liger_kernel.transformers.functional")
    theirs = library.liger_fused_linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    with no_synchronization(), pytest.raises(RuntimeError, match="synchroniz"):
        gradients(theirs)


def test_a_head_that_is_trained_alone_is_trained() -> None:
    kernel("cross_entropy_loss", "liger_kernel")
    model = build("llama").requires_grad_(False)
    model.lm_head.requires_grad_()
    other = copy.deepcopy(model)
    ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation="liger_kernel"))
    for one in (model, other):
        run(one)
    found, expected = model.lm_head.weight.grad, other.lm_head.weight.grad
    assert float((found - expected).norm() / expected.norm()) < 1e-4  # float32 rounding


def beside(op: str, kernel: Callable[..., Any], x: Tensor) -> Tensor:
    """A kernel's output plus a tensor that shares its gradient, plus a function that saved the kernel's inputs for its backward."""
    *parts, other = (x * factor for factor in (2, 3, 5))
    saved = sum(part.pow(3).sum() for part in parts)
    if op == "rms_norm":
        results = [kernel(parts[0], torch.linspace(1, 2, 256, device="cuda"), 1e-6, casting="llama") + other]
    elif op == "swiglu_mlp":
        results = [kernel(*parts) + other]
    else:
        heads = [one.view(2, 8, 4, 64).transpose(1, 2) for one in (*parts, other)]
        angles = torch.arange(8 * 32, device="cuda").view(1, 8, 32).repeat(1, 1, 2)
        results = [one + heads[-1] for one in kernel(*heads[:-1], angles.cos(), angles.sin())]
    return sum(result.square().sum() for result in results) + saved


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize(
    ("op", "value"), [one for one in VALUES if one[0] in ("rms_norm", "swiglu_mlp", "rotary_pos_emb")]
)
def test_what_others_have_stays(op: str, value: str, compiled: bool) -> None:
    """A kernel changes neither a gradient that another function shares nor a tensor saved for another function's backward."""
    formulas: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, weight, eps, *, casting: norms.reference(x, weight, eps, False, casting),
        "swiglu_mlp": lambda gate, up: functional.silu(gate) * up,
        "rotary_pos_emb": rotary.reference,
    }
    call = partial(beside, op, kernel(op, value))
    torch.manual_seed(0)
    x = torch.randn(2, 8, 256, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(beside(op, formulas[op], x), x)
    (found,) = torch.autograd.grad((torch.compile(call, fullgraph=True) if compiled else call)(x), x)
    assert float((found - expected).norm() / expected.norm()) < 1e-5  # float32 rounding


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("name", ["geglu", "layer_norm"])
def test_what_others_have_stays_with_liger(name: str, compiled: bool) -> None:
    """The same for kernels that are no values of an op of their own."""
    pytest.importorskip("liger_kernel")
    library = importlib.import_module("kernel_compat_ops.kernels.liger")
    weight, bias = torch.linspace(1, 2, 256, device="cuda"), torch.linspace(0, 1, 256, device="cuda")
    formulas: dict[str, Callable[..., Tensor]] = {
        "geglu": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
        "layer_norm": lambda x, *_: functional.layer_norm(x, (256,), weight, bias, 1e-5),
    }

    def step(kernel: Callable[..., Tensor], x: Tensor) -> Tensor:
        first, second, other = x * 2, x * 3, x * 5
        result = kernel(first, second) if name == "geglu" else kernel(first, weight, bias, 1e-5)
        return (result + other).square().sum() + first.pow(3).sum() + second.pow(3).sum()

    torch.manual_seed(0)
    x = torch.randn(16, 256, device="cuda", requires_grad=True)
    call = partial(step, getattr(library, name)())
    (expected,) = torch.autograd.grad(step(formulas[name], x), x)
    (found,) = torch.autograd.grad((torch.compile(call, fullgraph=True) if compiled else call)(x), x)
    assert float((found - expected).norm() / expected.norm()) < 1e-5  # float32 rounding


def test_gated_rms_norm_by_fla() -> None:
    """The kernel called directly: transformers may use fla's class as well if fla is installed."""
    try:
        config = ops.OpsConfig(rms_norm_gated_implementation="fla")
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    norm = module.Qwen3NextRMSNormGated(128).to("cuda")
    torch.nn.init.normal_(norm.weight)
    x, gate, gradient = (torch.randn(500, 128, device="cuda").bfloat16() for _ in range(3))

    def step(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_(), gate.to(dtype).requires_grad_()]
        module = copy.deepcopy(norm).bfloat16().to(dtype)
        out = module(*leaves)
        return [out, *torch.autograd.grad(out, [*leaves, module.weight], gradient.to(dtype))]

    exact, rough = step(torch.float64), step(torch.bfloat16)
    with ops.apply_ops(norm, config):
        found = step(torch.bfloat16)

    assert not torch.equal(found[0], rough[0]), "the kernel has not run"
    for ours, theirs, right in zip(found, rough, exact, strict=True):
        require_as_close(ours.double(), theirs.double(), right)


@pytest.mark.parametrize(
    ("value", "inputs"),
    [("liger_kernel", {}), ("triton", {}), ("triton", {"num_items_in_batch": 90})],
    ids=["liger_kernel", "triton", "triton, items"],
)
def test_compiled(value: str, inputs: dict[str, Any]) -> None:
    """The same results as without torch.compile, except that inductor rounds less often."""
    fields = {"rms_norm": value, "rotary_pos_emb": value, "cross_entropy_loss": "chunk_loss"}
    if value == "liger_kernel":
        fields |= {"swiglu_mlp": value, "cross_entropy_loss": value}
    try:
        config = ops.OpsConfig.from_dict({f"{op}_implementation": name for op, name in fields.items()})
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    truth = build("llama")
    model = copy.deepcopy(truth).bfloat16()
    ops.apply_ops(model, config)

    exact, plain, compiled = run(truth, **inputs), run(model, **inputs), run(torch.compile(model), **inputs)

    for what in ("gradient", "logits"):
        require_as_close(getattr(compiled, what), getattr(plain, what), getattr(exact, what))
    assert abs(float(compiled.loss - plain.loss)) <= 1e-2 * float(plain.loss)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradients[0] * 2 * x.float() / x.numel()).to(x.dtype)


@pytest.mark.parametrize("value", ["chunk_loss", "liger_kernel"])
@pytest.mark.parametrize("call", [Squared.apply, lambda x: x.float().square().mean()], ids=["function", "methods"])
def test_a_loss_of_the_logits_has_its_gradients(value: str, call: Callable[..., Any]) -> None:
    """The backward pass runs in another thread than the forward."""
    if value == "liger_kernel":
        pytest.importorskip(value)
    truth = build("llama")
    model = copy.deepcopy(truth).bfloat16()
    ids = torch.randint(3, VOCAB, (3, 40), device="cuda")
    found: list[Tensor] = []
    for one in (truth, model, model):
        if found[1:]:
            ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation=value))
        one.zero_grad()
        outputs = one(input_ids=ids, labels=ids)
        (outputs.loss + 0.1 * call(values(outputs.logits))).backward()
        found.append(directions(one))
    require_as_close(found[2], found[1], found[0])

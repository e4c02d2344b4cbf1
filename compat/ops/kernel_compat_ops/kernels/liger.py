"""liger-kernel under the calling conventions of the ops, so that no kernel writes into a tensor that others can see.

Written for liger-kernel 0.6.5 to 0.8.5 (https://github.com/linkedin/Liger-Kernel). Its own modules write gradients over saved
tensors, over the gradients that they get, and over query and key. torch.compile traces the formulas instead, which inductor fuses:
of Liger's functions it makes graphs with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from kernel_compat.errors import UnsupportedFeatureError

from ..losses.labels import checked, require_in_range
from ..losses.lazy import Pointwise, as_autocast
from ..recognisers import norms
from ..recognisers.rotary import reference as rotated
from .backward import first_derivative_only, untraced_backward
from .chunk_loss import chunk_size
from .routing import in_range


def _promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Hidden states and parameters in the dtype that the first two promote to."""
    dtype = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def rms_norm(offset: bool = False) -> Callable[..., Tensor]:
    """The kernel of ``rms_norm``: hidden states (..., hidden), weight (hidden,); with `offset`, the weight is stored minus one."""
    from liger_kernel.ops import LigerRMSNormFunction

    normalize = untraced_backward(LigerRMSNormFunction).apply

    def formula(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: norms.Casting) -> Tensor:
        return norms.reference(hidden_states, weight, eps, offset, casting)

    @first_derivative_only("rms_norm_implementation='liger_kernel'", traced=formula)
    def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Any:
        dtype = hidden_states.dtype
        if weight.dtype != dtype:
            hidden_states, weight = _promoted(hidden_states, weight)
        # In place, it would write over gradients that another branch may need: Gemma 2 norms a layer's result, too.
        normed = normalize(hidden_states, weight, eps, float(offset), casting, False)
        return normed.to(dtype) if casting == "gemma" else normed  # transformers' product has the wider dtype

    return kernel


def layer_norm() -> Callable[..., Tensor]:
    """The kernel of ``layer_norm``: hidden states (..., hidden), weight and bias (hidden,)."""
    from liger_kernel.ops import LigerLayerNormFunction

    normalize = untraced_backward(LigerLayerNormFunction).apply

    def formula(hidden_states: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        hidden_states, weight, bias = _promoted(hidden_states, weight, bias)
        return norms.layer_reference(hidden_states, weight, bias, eps)

    @first_derivative_only("layer_norm_implementation='liger_kernel'", traced=formula)
    def kernel(hidden_states: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
        return normalize(*_promoted(hidden_states, weight, bias), eps)

    return kernel


def swiglu() -> Callable[..., Tensor]:
    """The kernel of ``swiglu_mlp``: ``silu(gate) * up``, both (..., intermediate)."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    from .triton_swiglu import swiglu_backward

    @untraced_backward
    class SiLUMul(LigerSiLUMulFunction):  # type: ignore[misc]
        """Liger's forward. Liger's backward would write the gradients over gate and up."""

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            gate, up = ctx.saved_tensors
            return tuple(result.view(gradient.shape) for result in swiglu_backward(gate, up, gradient))

    @first_derivative_only(
        "swiglu_mlp_implementation='liger_kernel'", traced=lambda gate, up: functional.silu(gate) * up
    )
    def kernel(gate: Any, up: Any) -> Any:
        if hasattr(gate, "to_local"):  # a DTensor
            local = kernel(gate.to_local(), up.to_local())
            return type(gate).from_local(local, gate.device_mesh, gate.placements)
        return SiLUMul.apply(gate, up)

    return kernel


def geglu() -> Callable[..., Tensor]:
    """The kernel of ``swiglu_mlp`` for ``gelu(gate) * up`` with the approximation by tanh, both (..., intermediate)."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction, geglu_backward

    @untraced_backward
    class GeluMul(LigerGELUMulFunction):  # type: ignore[misc]
        """Liger's forward. Liger's backward would write the gradients over gate and up."""

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            gate, up = ctx.saved_tensors
            return geglu_backward(gate.clone(), up.clone(), gradient.contiguous())

    def formula(gate: Tensor, up: Tensor) -> Any:
        return functional.gelu(gate, approximate="tanh") * up

    return first_derivative_only("swiglu_mlp_implementation='liger_kernel'", traced=formula)(GeluMul.apply)


def rotary() -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of ``rotary_pos_emb``; channels beyond the cosines' pass.

    Called with query and key (batch, heads, length, head_dim), cosines and sines (batch, length, rotary_dim).
    """
    from liger_kernel.ops.rope import rope_backward, rope_forward

    option = "rotary_pos_emb_implementation='liger_kernel'"

    @untraced_backward
    class Rotate(Function):  # type: ignore[misc]
        """Liger's rotation on copies."""

        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            query, key, *tables = rope_forward(_copied(query), _copied(key), cos, sin)
            ctx.save_for_backward(*tables)
            return query, key

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            return *rope_backward(*map(_copied, gradients), *ctx.saved_tensors), None, None

    rotate = first_derivative_only(option, traced=rotated)(Rotate.apply)

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            raise UnsupportedFeatureError("gradients for cos and sin", option, "Detach them, or use eager.")
        size = cos.shape[-1]
        if size == query.shape[-1]:
            return rotate(query, key, cos, sin)
        rotated = rotate(query[..., :size], key[..., :size], cos, sin)
        return tuple(torch.cat((x, whole[..., size:]), dim=-1) for x, whole in zip(rotated, (query, key), strict=True))

    return kernel


def _copied(x: Tensor) -> Tensor:
    """A copy of (batch, heads, length, head_dim) where Liger would rotate in place: it copies other layouts itself."""
    heads_last = x.transpose(1, 2)
    return heads_last.clone().transpose(1, 2) if heads_last.is_contiguous() else x


def cross_entropy() -> Callable[..., Tensor]:
    """The kernel of ``cross_entropy_loss``, from hidden states, with the arguments of `chunk_loss`."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    takes_memory = "chunk_mem_const" in signature(fused_linear_cross_entropy_forward).parameters  # from 0.8.5

    @first_derivative_only("cross_entropy_loss_implementation='liger_kernel'", traced=False)
    def kernel(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        pointwise: Sequence[Pointwise] = (),
    ) -> Any:
        labels, ignore_index = checked(labels, len(hidden_states), ignore_index, reduction)
        require_in_range(labels, len(weight), ignore_index)
        factor, softcap = _factor_and_softcap(pointwise)
        if factor != 1.0:
            hidden_states = hidden_states * factor
            bias = None if bias is None else bias * factor
        hidden_states, weight, bias = as_autocast(hidden_states, weight, bias)
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and trained and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()  # Liger computes no gradient otherwise
        options = {"target": labels, "ignore_index": ignore_index, "reduction": reduction, "softcap": softcap}
        if takes_memory and torch.is_grad_enabled() and weight.requires_grad:
            options["chunk_mem_const"] = memory_of_chunks(hidden_states.shape[0], hidden_states.shape[1], len(weight))

        def compute(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Any]:
            results = fused_linear_cross_entropy_forward(_input=hidden_states, weight=weight, bias=bias, **options)
            return _nan_over_no_tokens(results[0], labels, ignore_index, reduction), results[-3:]

        return _ComputedLoss.apply(compute, "liger_kernel", hidden_states, weight, bias)

    return kernel


def memory_of_chunks(tokens: int, hidden: int, vocabulary: int) -> int:
    """Liger's ``chunk_mem_const`` for chunks of about as many tokens as `chunk_loss` has, or for Liger's own if larger.

    Each chunk reads and writes the gradient of the whole weight, and Liger makes chunks smaller the fewer tokens there are.
    """
    chunks = max(1, -(-tokens // chunk_size(hidden, with_weight=True)))
    return max(1, -(-vocabulary // (chunks * hidden)))


def logits_cross_entropy() -> Callable[..., Tensor]:
    """Cross-entropy of logits (tokens, vocabulary) that the kernel may overwrite, and labels (tokens,)."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    @first_derivative_only("cross_entropy_loss_implementation='liger_cross_entropy'", traced=False)
    def kernel(
        logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Literal["mean", "sum"] = "mean"
    ) -> Any:
        labels, ignore_index = checked(labels, len(logits), ignore_index, reduction)
        require_in_range(labels, logits.shape[1], ignore_index)

        def compute(logits: Tensor) -> tuple[Tensor, Any]:
            detached = logits.detach().requires_grad_(logits.requires_grad)
            options = {"lse_square_scale": 0.0, "label_smoothing": 0.0, "softcap": None, "return_z_loss": False}
            results = cross_entropy_forward(detached, labels, None, ignore_index, reduction=reduction, **options)
            return _nan_over_no_tokens(results[0], labels, ignore_index, reduction), (results[-1].detach(),)

        return _ComputedLoss.apply(compute, "liger_cross_entropy", logits)

    return kernel


class _ComputedLoss(Function):  # type: ignore[misc]
    """A loss whose gradients `compute` returns with it. They are kept out of `save_for_backward`: no hook sees them."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, Any]], value: str, *inputs: Tensor | None) -> Tensor:
        ctx.value = value
        loss, ctx.computed = compute(*inputs)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.computed = ctx.computed, None
        if gradients is None:
            raise RuntimeError(
                f"cross_entropy_loss_implementation={ctx.value!r} computes its gradients once: a second backward "
                "(retain_graph=True) needs another forward"
            )
        # Scaled on the device: Liger's own backward waits for the factor. Of one dimension, it is not rounded to half precision.
        for gradient in gradients:
            if gradient is not None:
                torch.mul(gradient, factor.reshape(1), out=gradient)
        return (None, None, *gradients)


def _nan_over_no_tokens(loss: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The loss; NaN as the mean over no tokens, where Liger returns 0."""
    return loss.masked_fill((labels == ignore_index).all(), torch.nan) if reduction == "mean" else loss


def _factor_and_softcap(pointwise: Sequence[Pointwise]) -> tuple[float, float | None]:
    """The factor of the logits and the softcap after it. Casts are left out: Liger computes the loss in float32."""
    factor, softcap = 1.0, None
    steps = [step for step in pointwise if step.kind != "to"]
    if [step.kind for step in steps[-3:]] == ["over", "tanh", "times"] and steps[-3].value == steps[-1].value:
        softcap = float(steps[-1].value)
        steps = steps[:-3]
    for step in steps:
        if step.kind == "tanh":
            operations = ", ".join(f"{kind} {value}" for kind, value in pointwise)
            raise UnsupportedFeatureError(
                f"this model's operations on its logits ({operations})",
                "cross_entropy_loss 'liger_kernel'",
                "chunk_loss supports them.",
            )
        factor *= float(step.value) if step.kind == "times" else 1 / float(step.value)
    return factor, softcap


def experts() -> Callable[..., Tensor]:
    """The kernel of ``moe``. Its forward reads one number back from the device.

    Called with hidden states (tokens, hidden), ids and weights (tokens, k), `gate_up` (experts, 2 * intermediate, hidden) and `down`
    (experts, hidden, intermediate); returns (tokens, hidden).
    """
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    compute = untraced_backward(LigerFusedMoEFunction).apply

    @first_derivative_only("moe_implementation='fused_triton'", traced=False)
    def kernel(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        dtype, name = hidden_states.dtype, "moe 'fused_triton'"
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise UnsupportedFeatureError(str(dtype), name, "It takes float16, bfloat16 and float32.")
        if dtype == torch.float32 and hidden_states.is_cuda and torch.get_float32_matmul_precision() == "highest":
            way = "It multiplies in TF32: allow that by torch.set_float32_matmul_precision('high')."
            raise UnsupportedFeatureError("float32 to full precision", name, way)
        # Liger writes past the end of its tables for an id out of range.
        known = in_range(top_k_index, len(gate_up))
        index = top_k_index.where(known, 0).to(torch.int32)
        return compute(hidden_states, gate_up, down, index, top_k_weights.where(known, 0))

    return kernel

"""What kernel-compat offers in place of patches that other projects carry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kernel_compat.patching.shim import Shim

__all__ = ["CALLED", "PATCHED", "Replacement", "replacements"]


@dataclass(frozen=True)
class Replacement:
    """A call of kernel-compat that makes a patch unnecessary.

    Attributes:
        call: as a line of Python.
        gives: what the call does, and what the patch must be for where the name alone doesn't show it.
        patterns: of the names that are patched or called, as ``package.module.attribute``.
    """

    call: str
    gives: str
    patterns: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """Whether it stands for a patch of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


_INSTALL = "kernel_compat.install()"
_FLASH = "transformers.modeling_flash_attention_utils"
_OPS = "kernel_compat.ops.apply_ops(model, kernel_compat.ops.OpsConfig({}_implementation={!r}))"


def _op(field: str, value: str, what: str, *patterns: str) -> Replacement:
    return Replacement(
        _OPS.format(field, value), f"binds a kernel to one model, where the patch is for a faster {what}", patterns
    )


#: Calls of functions that are patches themselves, or set what kernel-compat sets for one model.
CALLED = (
    Replacement(
        "kernel_compat.models.use_liger_kernel(model)",
        "gives one model Liger's kernels, each proven to compute what its module does",
        ("liger_kernel.*apply_liger_kernel*",),
    ),
    Replacement(
        "kernel_compat.models.use_sdpa_backends(model, backends)",
        "sets the order of SDPA's backends for one model, in the backward pass of checkpointing too",
        ("torch.nn.attention.sdpa_kernel", "torch.backends.cuda.enable_*_sdp", "torch.backends.cuda.sdp_kernel"),
    ),
    Replacement(
        "kernel_compat.use_torch_flash_backend(backend)",
        "activates it until its handle is undone, and refuses it where its calls would fail",
        ("torch.nn.attention.activate_flash_attention_impl",),
    ),
)

#: Patches of names, besides those of the shims' seams. The first that matches counts.
PATCHED = (
    *CALLED,
    Replacement(
        "kernel_compat.register_attention(name, kernel=kernel, forward=forward)",
        "enters an attention name together with its mask function, on every supported release",
        (
            "transformers.*ALL_ATTENTION_FUNCTIONS*",
            "transformers.*ALL_MASK_ATTENTION_FUNCTIONS*",
            "transformers.*AttentionInterface",
            "transformers.*AttentionMaskInterface",
            "transformers.models.*_ATTENTION_CLASSES",
        ),
    ),
    Replacement(
        "kernel_compat.register_attention(name, kernel=kernel)",
        "finds the boundaries of packed sequences in cu_seq_lens_*, position_ids or the mask, once a forward",
        tuple(
            f"transformers.*{name}"
            for name in (
                "._get_unpad_data",
                "._is_packed_sequence",
                ".prepare_fa2_from_position_ids",
                "._prepare_from_posids",
            )
        ),
    ),
    Replacement(
        _INSTALL,
        "makes attention names load their own kernels, and layers call them, on every supported release",
        (
            "transformers.*._lazy_imports",
            "transformers.*.lazy_import_flash_attention",
            "transformers.*._flash_attention_forward",
            "transformers.*._process_flash_attention_kwargs",
            "transformers.*.load_and_register_kernel",
            "transformers.*.load_and_register_attn_kernel",
            "transformers.*._check_and_adjust_attn_implementation",
            "transformers.*.get_correct_attn_implementation",
            "transformers.*._flash_attn*_can_dispatch",
            "transformers.*._check_and_enable_flash_attn*",
        ),
    ),
    Replacement(
        "kernel_compat.register_attention(name, kernel=kernel)",
        "calls another kernel under FlashAttention's conventions",
        (f"{_FLASH}.flash_attn_*func", f"{_FLASH}._flash_*fn", "flash_attn.*flash_attn_*func", "flash_attn"),
    ),
    _op("rotary_pos_emb", "liger_kernel", "rotation", "transformers.models.*.apply_*rotary_pos_emb*"),
    _op(
        "rms_norm_gated",
        "fla",
        "gated norm",
        "transformers.models.*RMSNormGated",
        "transformers.models.*RMSNormGated.forward",
    ),
    _op("rms_norm", "liger_kernel", "norm", "transformers.models.*RMSNorm", "transformers.models.*RMSNorm.forward"),
    _op(
        "layer_norm", "liger_kernel", "norm", "transformers.models.*LayerNorm", "transformers.models.*LayerNorm.forward"
    ),
    _op("swiglu_mlp", "liger_kernel", "MLP", "transformers.models.*MLP", "transformers.models.*MLP.forward"),
    _op(
        "moe",
        "fused_triton",
        "mixture of experts",
        *(
            f"transformers.models.*{part}{forward}"
            for part in ("Experts", "SparseMoeBlock", "MoE")
            for forward in ("", ".forward")
        ),
        "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS",
    ),
    _op("load_balancing_loss", "triton", "loss", "transformers.models.*.load_balancing_loss_func"),
    _op(
        "cross_entropy_loss",
        "chunk_loss",
        "loss, without all logits",
        "transformers.*.cross_entropy",
        "transformers.*.CrossEntropyLoss",
        "transformers.loss.loss_utils.*",
        "transformers.models.*ForCausalLM.forward",
        "transformers.models.*ForConditionalGeneration.forward",
    ),
    Replacement(
        "kernel_compat.register_attention(name, kernel=kernel, forward=forward)",
        "calls the forward with its mask, where the patch changes how attention is computed",
        (
            "transformers.models.*Attention.forward",
            "transformers.models.*Attention2.forward",
            "transformers.models.*Attention",
            "transformers.models.*Attention2",
            "transformers.*.eager_attention_forward",
            "transformers.integrations.*attention.*_attention_forward",
            "transformers.*.scaled_dot_product_attention",
            "torch.nn.functional.scaled_dot_product_attention",
        ),
    ),
)


def replacements(names: Iterable[str], shims: Sequence[Shim]) -> list[Replacement]:
    """What makes a patch unnecessary: the shims that replace the same attribute, and a public call.

    Args:
        names: the names of the patched attribute: as the project names it, and the place of its definition.
        shims: those of the releases that were read.
    """
    known = list(names)
    replacing = [shim for shim in shims if any(seam.target.replace(":", ".") in known for seam in shim.seams)]
    public = [one for one in PATCHED if any(one.matches(name) for name in known)][:1]
    if not replacing:
        return public
    ours = Replacement(_INSTALL, f"replaces it itself: {', '.join(shim.name for shim in replacing)}")
    return [ours, *(one for one in public if one.call != _INSTALL)]

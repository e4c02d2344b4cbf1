"""transformers 4.54: a flash attention loader that caches in module globals and prompts on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.roles import POSITIONS, QUERY_OFFSETS, implementation_of
from kernel_compat.environment import Environment
from kernel_compat.errors import KernelUnavailableError
from kernel_compat.kernels import known_kernels
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each
from kernel_compat.patching.swap import Change, make, undo

from ._dispatch import FORWARD, UTILS, by_implementation, by_name, forward_of, with_implementation, with_own_globals


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    copy_for = by_implementation(
        original, lambda names: names.pop("_is_fa3", None)
    )  # one of the globals that it caches in

    def others(*args: Any, **kwargs: Any) -> Any:
        arguments = by_name(args, kwargs)
        positions, query, key = POSITIONS.of(arguments), arguments["query_states"], arguments["key_states"]
        if positions is not None and QUERY_OFFSETS.of(arguments) is None:
            # Upstream reads where sequences begin in them: once for all rows, and nowhere after a cache or in Qwen2-VL's (3, batch, length).
            of_sequences = positions.ndim == 2 and query.shape[1] == key.shape[1]
            positions = positions.expand(len(query), -1) if of_sequences else None
            args, kwargs = (), {**arguments, POSITIONS.named(arguments): positions}
        implementation = with_implementation(kwargs).get("implementation")
        function = original if implementation is None else copy_for(implementation)
        return function(*args, **kwargs)

    return forward_of(original, others)


def _refuse_to_prompt(prompt: str) -> str:
    kernel = known_kernels()["flash_attention_2"]
    reasons = kernel.unavailable_because(Environment.detect()) or ["flash_attn does not import"]
    raise KernelUnavailableError(kernel.name, reasons, kernel.providers[0].install)


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if resolve(implementation_of(self)) is None:
            return original(self, *args, **kwargs)
        # For a model with this flag upstream makes up cu_seq_lens_*.
        without = [Change(vars(self), "_supports_attention_backend", False)]
        make(without)
        try:
            return original(self, *args, **kwargs)
        finally:
            undo(without)

    return prepare_inputs_for_generation


SHIMS = (
    Shim(
        name="tf4_54_flash_forward",
        protects="the kernel of every flash attention but the first, and batches without a mask",
        distribution="transformers",
        versions="==4.54.*",
        reason="the first flash implementation loaded serves every model, sliding windows are one token too wide, and without a mask "
        "only the first row of a batch is computed, and after a cache none",
        upstream="huggingface/transformers#41427, huggingface/transformers#39408, huggingface/transformers#40163, "
        "transformers 4.54.1, modeling_flash_attention_utils._prepare_from_posids",
        delete_when="the oldest supported transformers is 4.55",
        seams=(FORWARD,),
        replace=each(_forward),
    ),
    Shim(
        name="tf4_54_loader",
        protects="the kernel of a registered name",
        distribution="transformers",
        versions="==4.54.*",
        reason="if flash_attn does not import, the loader prompts on the terminal, which hangs a job",
        upstream="transformers 4.54.1, modeling_flash_attention_utils._lazy_imports",
        delete_when="the oldest supported transformers is 4.55",
        seams=(Seam(f"{UTILS}:_lazy_imports", ("impl",)),),
        replace=each(lambda original: with_own_globals(original, input=_refuse_to_prompt)),
    ),
    Shim(
        name="tf4_54_generate",
        protects="generation from a batch",
        distribution="transformers",
        versions="==4.54.*",
        reason="generate makes up cu_seq_lens_* that are wrong for a batch: queries of one sequence attend to another's keys",
        upstream="huggingface/transformers#40424",
        delete_when="the oldest supported transformers is 4.55",
        seams=(
            Seam(
                "transformers.generation.utils:GenerationMixin.prepare_inputs_for_generation",
                ("self", "input_ids", "past_key_values", "attention_mask", "inputs_embeds", "cache_position"),
            ),
        ),
        replace=each(_generate),
    ),
)

"""A shim and an attention name of another project, found by their entry points: see pyproject.toml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_compat import Seam, Shim
from kernel_compat.patching.shim import each


def _repeat(original: Callable[..., Any]) -> Callable[..., Any]:
    def repeat_kv(hidden_states: Any, n_rep: int) -> Any:
        return hidden_states.repeat_interleave(n_rep, dim=1)

    return repeat_kv


SHIM = Shim(
    name="acme_repeated_keys",
    distribution="transformers",
    versions=">=4.54,<6",
    reason="sdpa's keys are repeated by a reshape, which acme's sharded tensors don't have",
    seams=(Seam("transformers.integrations.sdpa_attention:repeat_kv", ("hidden_states", "n_rep")),),
    replace=each(_repeat),
)

ACME_FLASH = {"kernel": ["flash_attention_2", "flash_attention_reference"]}

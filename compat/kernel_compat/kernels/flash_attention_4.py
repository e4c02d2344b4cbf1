"""FlashAttention-4: the distribution ``flash-attn-4``, import ``flash_attn.cute``."""

from __future__ import annotations

from ..environment import Environment
from .kernel import Features, Kernel, Provider


def _refused(environment: Environment) -> list[str]:
    return [problem for problem in environment.problems if "has overwritten flash_attn/cute" in problem]


KERNEL = Kernel(
    "flash_attention_4",
    (
        Provider(
            module="flash_attn.cute",
            distribution="flash-attn-4",
            features=Features(
                softcap=True,
                sinks=True,
                deterministic=True,
                # Measured on sm_90 with 4.0.0b36: the varlen backward is silently wrong (dq, and all of them with
                # fewer key heads) for 8, 16, 48 and 80, and right for multiples of 32.
                head_dim_multiple=32,
                # 8.x has a forward only.
                min_capability=(9, 0),
            ),
            install="Install it with: pip install --pre flash-attn-4",
            renamed={"s_aux": "learnable_sink"},
            unlimited=None,
            refused=_refused,
        ),
    ),
)

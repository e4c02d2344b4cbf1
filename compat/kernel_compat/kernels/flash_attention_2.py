"""FlashAttention-2: the distribution ``flash-attn``, import ``flash_attn``."""

from __future__ import annotations

from packaging.version import Version

from ..environment import Environment
from .kernel import Features, Kernel, Provider


def _refused(environment: Environment) -> list[str]:
    version = environment.version("flash-attn")
    # 2.4.1 brought `deterministic`, 2.6 softcap; transformers itself asks for 2.3.3 from 5.4 on.
    if version is not None and version < Version("2.6"):
        return [f"flash-attn {version} is older than 2.6, the first with softcap"]
    return []


def _unpaged(page_size: int, head_dim: int) -> str | None:
    return f"its pages are multiples of 256 tokens, not of {page_size}" if page_size % 256 else None


KERNEL = Kernel(
    "flash_attention_2",
    (
        Provider(
            module="flash_attn",
            distribution="flash-attn",
            features=Features(
                softcap=True,
                dropout=True,
                deterministic=True,
                paged=True,
                min_capability=(8, 0),
            ),
            install="Install it where torch is installed already: pip install --no-build-isolation flash-attn",
            refused=_refused,
            unpaged=_unpaged,
            left_alone=False,
        ),
    ),
)

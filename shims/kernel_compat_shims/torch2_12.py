"""torch 2.12 and later: its FlashAttention-4 backend fails or returns wrong gradients with the current flash-attn-4.

2.12 and 2.13 unpack two results of a forward that returns four (pytorch/pytorch#190212, Dao-AILab/flash-attention#2674; 2.14 takes any
number). Every release passes on head dimensions for which flash-attn-4's backward is silently wrong on sm_90
(Dao-AILab/flash-attention#2896, open).
Delete `torch2_12_fa4` when the oldest supported torch is 2.14, and `torch2_14_fa4` when the oldest supported flash-attn-4 has #2896.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_compat.patching.shim import Shim

from ._torch_fa4 import IMPORT, deactivate_when_undone, not_installed, replace_import


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: replace_import(original) for name, original in originals.items()}


SHIMS = (
    Shim(
        name="torch2_12_fa4",
        distribution="torch",
        versions=">=2.12,<2.14",
        reason=(
            "torch's FA4 backend unpacks two results of flash-attn-4's forward, which returns more since 4.0.0b19: once it "
            "is active every attention call of the process raises, SDPA's included"
        ),
        upstream="pytorch/pytorch#190212, Dao-AILab/flash-attention#2674",
        delete_when="the oldest supported torch is 2.14",
        seams=(IMPORT,),
        replace=_replace,
        unneeded_because=not_installed,
        complete=deactivate_when_undone,
    ),
    Shim(
        name="torch2_14_fa4",
        distribution="torch",
        versions=">=2.14,<3",
        reason=(
            "flash-attn-4's backward is silently wrong on sm_90 for head dimensions that are no multiple of 32, and torch's "
            "FA4 backend, SDPA's included, passes them on"
        ),
        upstream="Dao-AILab/flash-attention#2896",
        delete_when="the oldest supported flash-attn-4 has the fix of Dao-AILab/flash-attention#2896",
        seams=(IMPORT,),
        replace=_replace,
        unneeded_because=not_installed,
    ),
)

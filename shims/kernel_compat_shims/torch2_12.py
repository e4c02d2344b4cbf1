"""torch 2.12 and later: its FlashAttention-4 backend fails or returns wrong gradients with the current flash-attn-4.

2.12 and 2.13 unpack two results of a forward that returns four since 4.0.0b19; 2.14 takes any number. Every release passes on
head dimensions for which flash-attn-4's backward is silently wrong on sm_90.
"""

from __future__ import annotations

from kernel_compat.patching.shim import Shim, each

from ._torch_fa4 import IMPORT, deactivate_when_undone, not_installed, replace_import

SHIMS = (
    Shim(
        name="torch2_12_fa4",
        distribution="torch",
        versions=">=2.12,<2.14",
        reason="with torch's FA4 backend active every attention call raises, SDPA's included",
        upstream="pytorch/pytorch#190212, Dao-AILab/flash-attention#2674",
        delete_when="the oldest supported torch is 2.14",
        seams=(IMPORT,),
        replace=each(replace_import),
        unneeded_because=not_installed,
        complete=deactivate_when_undone,
    ),
    Shim(
        name="torch2_14_fa4",
        distribution="torch",
        versions=">=2.14,<3",
        reason="gradients of torch's FA4 backend are silently wrong on sm_90 for head dimensions that are no multiple of 32",
        upstream="Dao-AILab/flash-attention#2896",
        delete_when="the oldest supported flash-attn-4 has the fix of Dao-AILab/flash-attention#2896",
        seams=(IMPORT,),
        replace=each(replace_import),
        unneeded_because=not_installed,
    ),
)

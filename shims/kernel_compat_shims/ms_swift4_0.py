"""ms-swift 4.0 and later: packing and training without padding take FlashAttention's own names, and refuse any other.

The check is in the arguments, before a model exists.
"""

from __future__ import annotations

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import check_of

SHIM = Shim(
    name="ms_swift_padding_free",
    distribution="ms-swift",
    versions=">=4.0,<5",
    reason="packing and padding_free refuse every attention name but FlashAttention's own",
    upstream="ms-swift 4.6.0, SftArguments._check_padding_free",
    delete_when="the oldest supported ms-swift takes any name of transformers' table",
    seams=(Seam("swift.arguments.sft_args:SftArguments._check_padding_free", ("self",)),),
    replace=each(check_of("attn_impl")),
    on_import=True,
)

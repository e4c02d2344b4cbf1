"""trl 0.20 to 0.23.0: batches without padding have no positions under a name other than FlashAttention's own.

`SFTTrainer` compares the name with literals, and its collator then concatenates the sequences of a batch without saying where each begins:
tokens of one attend to another's. 0.23.1 always returns the positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.roles import implementation_of
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import has_varlen_kernel


def _init(original: Any) -> Callable[..., Any]:
    collator = original.__globals__["DataCollatorForLanguageModeling"]

    @wraps(original)
    def __init__(self: Any, model: Any, args: Any = None, data_collator: Any = None, *more: Any, **kwargs: Any) -> None:
        original(self, model, args, data_collator, *more, **kwargs)
        # One that the user has passed is used as it is.
        own = data_collator is None and type(self.data_collator) is collator
        if own and has_varlen_kernel(implementation_of(self.model)):
            self.data_collator.return_position_ids = True

    return __init__


SHIM = Shim(
    name="trl_positions",
    distribution="trl",
    versions=">=0.20,<0.23.1",
    reason="SFTTrainer packs without positions under names that aren't in its code: tokens attend to other sequences",
    protects="SFTTrainer: sequences packed into batches without padding",
    upstream="huggingface/trl#3942; trl 0.23.0, SFTTrainer.__init__",
    delete_when="the oldest supported trl is 0.23.1",
    seams=(Seam("trl.trainer.sft_trainer:SFTTrainer.__init__", ("self", "model", "args", "data_collator")),),
    replace=each(_init),
    on_import=True,
)

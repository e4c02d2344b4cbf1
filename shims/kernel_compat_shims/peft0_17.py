"""peft 0.17 to 0.20: adapters call a model's forward directly.

`PreTrainedModel.__call__` makes the arguments of a forward available to the layers. Where it is passed by, models whose head doesn't
pass positions and lengths on lose them: Mamba's layers mix packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each


def _forward(original: Any) -> Callable[..., Any]:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    return forward


SHIM = Shim(
    name="peft_forward",
    distribution="peft",
    versions="<0.21",
    reason="adapters call a model's forward directly, so that its layers don't see the arguments that its head doesn't pass on",
    protects="adapters: packed sequences in models whose head passes no positions on",
    upstream="peft 0.20.0, BaseTuner.forward",
    delete_when="the oldest supported peft is 0.21",
    seams=(Seam("peft.tuners.tuners_utils:BaseTuner.forward", ("self",)),),
    replace=each(_forward),
    on_import=True,
)

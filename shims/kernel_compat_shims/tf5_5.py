"""transformers 5.4 and later (often said to be 5.5): the flag `_supports_flash_attn_2` is no longer read.

It became `_supports_flash_attn` in 4.54. `PreTrainedModel._flash_attn_2_can_dispatch` of 5.3.0 reads both,
`_flash_attn_can_dispatch` of 5.4.0 the new one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each
from kernel_compat.patching.swap import Change, Changes
from kernel_compat.policy.flash_flags import FLAG, LEGACY, declared_flash_support

from ._dispatch import MODEL


class FlashFlag:
    """`_supports_flash_attn` as `declared_flash_support` reads it, on a class and on an instance alike.

    Attributes:
        home: the class it is placed on.
    """

    def __init__(self, home: type) -> None:
        self.home = home

    def __get__(self, model: object | None, owner: type) -> bool:
        return bool(declared_flash_support(owner, model))


_flags = Changes()


def _activate() -> Callable[[], list[Change]]:
    """Set the flags of the model classes that exist. Returns the function that undoes this, and the flags of later classes."""
    undo = _flags.activate()
    classes: list[type] = [sys.modules["transformers.modeling_utils"].PreTrainedModel]
    for klass in classes:  # grows
        _set_on(klass)
        classes += klass.__subclasses__()
    return undo


def _set_on(klass: type) -> None:
    if FLAG not in vars(klass) and any(LEGACY in vars(ancestor) for ancestor in klass.__mro__):
        _flags.add(klass, FLAG, FlashFlag(klass))


def _init_subclass(original: Any) -> Any:
    @wraps(original.__func__)
    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        original.__func__(cls, **kwargs)
        _set_on(cls)

    hook: Any = __init_subclass__
    return classmethod(hook)


SHIM = Shim(
    name="tf5_5_legacy_flag",
    distribution="transformers",
    versions=">=5.4,<6",
    reason="models that set _supports_flash_attn_2 alone, such as those with older remote code, are refused flash attention",
    upstream="huggingface/transformers#38974; PreTrainedModel._flash_attn_can_dispatch of 5.4.0",
    delete_when="models that set the old flag alone need no support any more",
    seams=(Seam(f"{MODEL}.__init_subclass__"),),
    replace=each(_init_subclass),
    complete=_activate,
)

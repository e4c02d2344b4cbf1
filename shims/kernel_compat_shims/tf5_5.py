"""transformers 5.4 and later (the boundary is 5.4, often said to be 5.5): the flag `_supports_flash_attn_2` is no longer read.

huggingface/transformers#38974 renamed it to `_supports_flash_attn` in 4.54. `PreTrainedModel._flash_attn_2_can_dispatch` of 5.3.0
reads both; `_flash_attn_can_dispatch`, which replaces it in 5.4.0, reads the new one. Models that set the old flag alone, such as those
with remote code for older releases, are refused flash attention.
Delete this module when models that set the old flag alone need no support any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

from kernel_compat.choosing.flash_flags import FLAG, LEGACY, declared_flash_support, is_base, sets
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

_MODEL = "transformers.modeling_utils:PreTrainedModel"


class FlashFlag(int):
    """`_supports_flash_attn` as `declared_flash_support` reads it, on a class and on an instance alike.

    The object itself is equal to the bool that it replaces and has its truth value, because other code may read
    `PreTrainedModel.__dict__["_supports_flash_attn"]` as a default; a property there would always be true.

    Attributes:
        home: the class it is placed on.
    """

    home: type

    def __new__(cls, default: bool, home: type) -> FlashFlag:
        """A False or True that knows its class."""
        flag = super().__new__(cls, default)
        flag.home = home
        return flag

    def __get__(self, model: object | None, owner: type | None = None) -> bool:
        declared = declared_flash_support(type(model) if owner is None else owner, model)
        return bool(self) if declared is None else declared

    def __repr__(self) -> str:
        return repr(bool(self))

    def __reduce__(self) -> tuple[type[bool], tuple[int]]:
        return bool, (int(self),)


class _OwnFlags:
    """Classes that need a `FlashFlag` of their own: in their MRO the old flag comes before a class that sets the new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = False
        self._classes: WeakSet[type] = WeakSet()

    def activate(self) -> Callable[[], None]:
        """Set the flags of all model classes, and of those that are defined from now on. Returns the undo."""
        self._active = True
        for klass in _subclasses(sys.modules["transformers.modeling_utils"].PreTrainedModel):
            self.set_on(klass)
        return self.deactivate

    def set_on(self, klass: type) -> None:
        with self._lock:
            if self._active and _old_flag_is_nearer(klass):
                setattr(klass, FLAG, FlashFlag(False, home=klass))
                self._classes.add(klass)

    def deactivate(self) -> None:
        with self._lock:
            self._active = False
            for klass in list(self._classes):
                if isinstance(vars(klass).get(FLAG), FlashFlag):
                    delattr(klass, FLAG)
            self._classes.clear()


_own_flags = _OwnFlags()


def _old_flag_is_nearer(klass: type) -> bool:
    """Whether the MRO of a class has the old flag before the class in which Python finds `_supports_flash_attn`."""
    for index, ancestor in enumerate(klass.__mro__):
        if FLAG in vars(ancestor):
            before = klass.__mro__[:index]
            return not is_base(ancestor) and sets(ancestor, FLAG) and any(sets(nearer, LEGACY) for nearer in before)
    return False


def _subclasses(klass: Any) -> Iterator[type]:
    for subclass in klass.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["__init_subclass__"].__func__

    @wraps(original)
    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        original(cls, **kwargs)
        _own_flags.set_on(cls)

    hook: Any = __init_subclass__
    base = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return {FLAG: FlashFlag(originals[FLAG], home=base), "__init_subclass__": classmethod(hook)}


SHIM = Shim(
    name="tf5_5_legacy_flag",
    distribution="transformers",
    versions=">=5.4,<6",
    reason=(
        "transformers no longer reads _supports_flash_attn_2, and refuses flash attention to models that set it alone, such as "
        "those with remote code for older releases"
    ),
    upstream="huggingface/transformers#38974; PreTrainedModel._flash_attn_can_dispatch of 5.4.0",
    delete_when="models that set the old flag alone need no support any more",
    seams=(
        Seam(f"{_MODEL}.{FLAG}", holds=bool),
        Seam(f"{_MODEL}.__init_subclass__"),
    ),
    replace=_replace,
    complete=_own_flags.activate,
)

"""transformers 5.4 on (often said to be 5.5): models that set the legacy flag alone don't get flash attention."""

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

    As an object it has the value, the truth and the equality of the bool that it replaces: other code may keep
    `PreTrainedModel.__dict__["_supports_flash_attn"]` as its default. On a class or an instance other than `home` it is
    that bool. A property would be true as an object.

    Attributes:
        home: the class it is placed on.
    """

    home: type

    def __new__(cls, default: bool, home: type) -> FlashFlag:
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


class _Bridges:
    """The classes with a flag of ours of their own: nearer to them than a class with the flag is one with the legacy flag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = False
        self._classes: WeakSet[type] = WeakSet()

    def over(self, klass: type) -> None:
        with self._lock:
            if self._active and _legacy_is_nearer(klass):
                setattr(klass, FLAG, FlashFlag(False, home=klass))
                self._classes.add(klass)

    def build(self) -> Callable[[], None]:
        self._active = True
        for klass in _subclasses(sys.modules["transformers.modeling_utils"].PreTrainedModel):
            self.over(klass)
        return self.take_down

    def take_down(self) -> None:
        with self._lock:
            self._active = False
            for klass in list(self._classes):
                if isinstance(vars(klass).get(FLAG), FlashFlag):
                    delattr(klass, FLAG)
            self._classes.clear()


_bridges = _Bridges()


def _legacy_is_nearer(klass: type) -> bool:
    """Whether Python would find a class' `_supports_flash_attn` behind another's legacy flag."""
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
        _bridges.over(cls)

    hook: Any = __init_subclass__
    base = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return {FLAG: FlashFlag(originals[FLAG], home=base), "__init_subclass__": classmethod(hook)}


SHIM = Shim(
    name="tf5_5_legacy_flag",
    distribution="transformers",
    versions=">=5.4,<6",
    reason=(
        "transformers no longer reads _supports_flash_attn_2: it refuses flash attention to models, such as those with "
        "remote code for older releases, that set it alone"
    ),
    seams=(
        Seam(f"{_MODEL}.{FLAG}", holds=bool),
        Seam(f"{_MODEL}.__init_subclass__"),
    ),
    replace=_replace,
    complete=_bridges.build,
)

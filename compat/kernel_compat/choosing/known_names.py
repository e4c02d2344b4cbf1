"""Which attention names exist in this environment."""

from __future__ import annotations

from ..attention import registry
from ..errors import UnknownNameError
from ..kernels import known_kernels
from .ladder import LADDER

__all__ = ["require_known"]


def require_known(name: str) -> None:
    """Check that an attention name exists: a kernel, a registered name, one of transformers' own or a kernel of the hub.

    Args:
        name: the attention name, with or without the prefix ``paged|``. A name with a slash is a kernel of the hub and is
            not looked up.

    Raises:
        UnknownNameError: nothing has that name, or it isn't a valid name; the message lists the names that exist.
        TypeError: `name` is not a string.
    """
    name = name.removeprefix("paged|") if isinstance(name, str) else name
    if isinstance(name, str) and "/" in name:
        return
    try:
        registry._check_name(name)
    except ValueError as error:
        raise UnknownNameError(str(error)) from None
    known = {*known_kernels(), *registry.registered_attention(), *registry._UPSTREAM}
    if name in known:
        return
    if name in LADDER:
        raise UnknownNameError(f"{name!r} is a kernel that this version of kernel-compat doesn't have")
    raise UnknownNameError(f"{name!r} is no attention name here; there are: {', '.join(sorted(known))}")

"""Refuses models that are wrong under a registered name as they are loaded: by the table, or by a proof made then."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import AttentionRefusedError, UnsupportedFeatureError
from .isolated import prove_here
from .kept import kept_or_made
from .outcomes import Proof
from .sources import essential, fingerprint, replaced
from .table import wrong_cases
from .underway import is_proving

__all__ = ["require_padding_free", "require_proof"]

_logger = logging.getLogger(__name__)
#: The proofs of this process, by their keys.
_proofs: dict[str, Proof] = {}
_lock = threading.Lock()


def require_proof(model: Any, name: str, unproven: str) -> None:
    """Refuse a model that is proven wrong under a registered name.

    A class that only adds attributes to its base counts as its base. One that isn't in the table, or whose code in transformers
    other code has replaced, is proven on a tiny model of it, on the CPU. That takes some seconds, once: the proof is kept in the
    user's cache. Of the processes that load it at once, one proves it and the others wait.

    Args:
        model: a model that is being built; only its class and its config are read.
        name: the attention name.
        unproven: for a type of which no tiny model can be made: ``"warn"`` warns, ``"refuse"`` raises; ``"allow"`` accepts
            every type that isn't in the table, and proves nothing.

    Raises:
        AttentionRefusedError: the type is wrong in some case, or can't be proven and `unproven` is ``"refuse"``.
    """
    import transformers

    if is_proving():
        return
    owner, config = essential(type(model)), essential(type(model.config))
    known = _in_table(owner, config, str(getattr(model.config, "model_type", "")), str(transformers.__version__))
    if unproven == "allow":
        if known:
            raise _wrong(owner, name, known)
        return
    foreign = replaced(owner, config)
    if known is not None and not foreign:
        if known:
            raise _wrong(owner, name, known)
        return
    proof = _proof(owner, model.config, foreign)
    if wrong := sorted({outcome.case for outcome in proof.outcomes if outcome.verdict == "wrong"}):
        raise _wrong(owner, name, wrong)
    if lost := [f"{outcome.case}: {outcome.reason}" for outcome in proof.outcomes if outcome.verdict == "lost"]:
        why = f"cases that ran on an earlier release can't be tried on this one ({'; '.join(lost)})"
        raise AttentionRefusedError(name, owner.__name__, f"the attention name {name!r}", f"{why}. Use 'eager'.")
    if proof.no_recipe or proof.verdict == "untested":
        how = f"under {name!r} as with eager attention"
        _report_unproven(
            owner,
            how,
            proof,
            unproven,
            partial(AttentionRefusedError, name, owner.__name__, f"the attention name {name!r}"),
        )


def require_padding_free(model: Any, name: str, unproven: str, by_name: bool = False) -> None:
    """Refuse a model that isn't proven to compute the same without its padding. Proven as in `require_proof`, for each class.

    Args:
        model, name, unproven: as in `require_proof`.
        by_name: whether it is the name that wants it, under which a model to which padding doesn't apply stays as it is.

    Raises:
        UnsupportedFeatureError: the class differs, or can't be proven and `unproven` is ``"refuse"``.
    """
    if is_proving() or unproven == "allow":
        return
    owner = next(kind for kind in type(model).__mro__ if _is_importable(kind))
    proof = _proof(owner, model.config, replaced(owner, type(model.config)), padding_free=True)
    if proof.no_recipe:
        error = partial(UnsupportedFeatureError, "padding_free", owner.__name__)
        _report_unproven(owner, "without padding as with it", proof, unproven, error)
        return
    accepted = ("equal", "not applicable") if by_name else ("equal",)
    for outcome in proof.outcomes:
        if outcome.verdict not in accepted:
            raise UnsupportedFeatureError(
                "padding_free", owner.__name__, f"{outcome.reason}. `kernel-compat prove --case padding_free` shows it."
            )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _is_importable(kind: type) -> bool:
    """False for a class made at run time, such as those of FSDP2."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _report_unproven(
    owner: type, how: str, proof: Proof, unproven: str, error: Callable[[str], UnsupportedFeatureError]
) -> None:
    why = proof.no_recipe or "; ".join(dict.fromkeys(one.reason for one in proof.outcomes))
    message = f"{owner.__name__} isn't proven to compute the same {how}: no tiny model of it could be made ({why})"
    if unproven == "refuse":
        raise error(f"{message}. install(unproven='allow') takes it as it is.")
    warnings.warn(f"{message}. Compare the two yourself, or pass install(unproven=...).", stacklevel=3)


def _in_table(owner: type, config: type, model_type: str, version: str) -> tuple[str, ...] | None:
    if not all(one.__module__.startswith("transformers.models.") for one in (owner, config)):
        return None
    known = wrong_cases(model_type, version)
    # A part of a model, such as its vision tower, is proven with the whole model.
    return wrong_cases(owner.__module__.split(".")[2], version) if known is None else known


def _wrong(owner: type, name: str, cases: Any) -> AttentionRefusedError:
    return AttentionRefusedError(
        name,
        owner.__name__,
        f"the attention name {name!r}",
        f"Its outputs differ from eager attention's ({', '.join(cases)}). Use 'eager', or 'sdpa' if the model has it; "
        "`kernel-compat prove` shows by how much.",
    )


def _proof(owner: type, config: Any, foreign: list[tuple[str, Any]], padding_free: bool = False) -> Proof:
    """The proof of a class: of this process, of the user's cache, or made now.

    In transformers the other classes of its module, such as the base model of a model with a head, share the proof of the first
    one loaded. Without padding a head matters, so that each class has a proof.
    """
    shared = owner.__module__.startswith("transformers.models.") and not padding_free
    key = fingerprint(owner, type(config), foreign, shared)
    if padding_free:
        key += "-padding-free"

    def make() -> Proof:
        _logger.warning(
            "%s %s: comparing it with eager attention on a tiny model, once. This takes some seconds",
            owner.__name__,
            f"has other code than its release ({_listed([path for path, _ in foreign])})"
            if foreign
            else "isn't proven yet",
        )
        return prove_here(owner, config, padding_free)

    with _lock:
        if key not in _proofs:
            _proofs[key] = kept_or_made(key, make)
        return _proofs[key]

"""Proves a model that is loaded under a registered name and that the table of proofs doesn't have: a `kernel_compat.gates.LoadGate`."""

from __future__ import annotations

import logging
import threading
from typing import Any

from kernel_compat.errors import AttentionRefusedError, UnsupportedFeatureError
from kernel_compat.gates import Claim
from kernel_compat.proofs.gate import importable_class, listed, proving_command, wrong
from kernel_compat.proofs.sources import essential, replaced

from .fingerprint import fingerprint
from .isolated import prove_here
from .kept import kept_or_made
from .outcomes import Proof

__all__ = ["gate"]

_logger = logging.getLogger(__name__)
#: The proofs of this process, by their keys.
_proofs: dict[str, Proof] = {}
_lock = threading.Lock()


def gate(model: Any, name: str, claim: Claim, *, by_name: bool) -> str | None:
    """Prove a model on a tiny one of its class, on the CPU.

    That takes some seconds, once: the proof is kept in the user's cache. Of the processes that load it at once, one proves it and
    the others wait.

    Args:
        model: a model that is being built; only its class and its config are read.
        name: the attention name.
        claim: what must hold, as in `kernel_compat.gates`.
        by_name: for ``padding_free``, whether it needn't apply to the model.

    Returns:
        None if it holds; why no tiny model of the class could be made.

    Raises:
        AttentionRefusedError: the class is wrong in some case under the name, or can't be tried in one that ran on an earlier release.
        UnsupportedFeatureError: it isn't the same without its padding.
    """
    if claim == "padding_free":
        return _padding_free(model, by_name)
    owner, config = essential(type(model)), essential(type(model.config))
    proof = _proof(owner, model.config, replaced(owner, config))
    if cases := sorted({outcome.case for outcome in proof.outcomes if outcome.verdict == "wrong"}):
        raise wrong(model, name, cases)
    if lost := [f"{outcome.case}: {outcome.reason}" for outcome in proof.outcomes if outcome.verdict == "lost"]:
        problem = f"cases that ran on an earlier release can't be tried on this one ({'; '.join(lost)})"
        raise AttentionRefusedError(name, owner.__name__, f"the attention name {name!r}", f"{problem}. Use 'eager'.")
    return _no_tiny_model(proof) if proof.no_recipe or proof.verdict == "untested" else None


def _padding_free(model: Any, by_name: bool) -> str | None:
    owner = importable_class(model)
    proof = _proof(owner, model.config, replaced(owner, type(model.config)), padding_free=True)
    if proof.no_recipe:
        return _no_tiny_model(proof)
    accepted = ("equal", "not applicable") if by_name else ("equal",)
    for outcome in proof.outcomes:
        if outcome.verdict not in accepted:
            advice = f"{outcome.reason}. `{proving_command(model, '--case padding_free')}` shows it."
            raise UnsupportedFeatureError("padding_free", owner.__name__, advice)
    return None


def _no_tiny_model(proof: Proof) -> str:
    reason = proof.no_recipe or "; ".join(dict.fromkeys(outcome.reason for outcome in proof.outcomes))
    return f"no tiny model of it could be made ({reason})"


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
            f"has other code than its release ({listed([path for path, _ in foreign])})"
            if foreign
            else "isn't proven yet",
        )
        return prove_here(owner, config, padding_free)

    with _lock:
        if key not in _proofs:
            _proofs[key] = kept_or_made(key, make)
        return _proofs[key]

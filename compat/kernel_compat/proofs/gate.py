"""Refuses models that are wrong under a registered name as they are loaded: by the table of proofs, and by the gates of other packages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import AttentionRefusedError, UnprovenWarning, UnsupportedFeatureError
from ..gates import LOAD_GATES, Claim, entries, install_hint
from .sources import essential, replaced
from .table import wrong_cases
from .underway import is_proving

__all__ = ["importable_class", "listed", "require_padding_free", "require_proof", "wrong"]


def require_proof(model: Any, name: str, unproven: str) -> None:
    """Refuse a model that is proven wrong under a registered name.

    A class that only adds attributes to its base counts as its base. One that isn't in the table, or whose code in transformers
    other code has replaced, is left to the gates of other packages, as kernel-compat-prove's, which proves it on a tiny model.

    Args:
        model: a model that is being built; only its class and its config are read.
        name: the attention name.
        unproven: for a type that no gate can prove: ``"warn"`` warns, ``"refuse"`` raises; ``"allow"`` accepts every type that
            isn't in the table, and calls no gate.

    Raises:
        AttentionRefusedError: the type is wrong in some case, or can't be proven and `unproven` is ``"refuse"``.
    """
    import transformers

    if is_proving():
        return
    owner, config = essential(type(model)), essential(type(model.config))
    known = _in_table(owner, config, str(getattr(model.config, "model_type", "")), str(transformers.__version__))
    foreign = replaced(owner, config) if known is not None and unproven != "allow" else []
    if known and not foreign:
        raise wrong(model, name, known)
    if unproven == "allow" or (known is not None and not foreign):
        return
    if why := _unproven(model, name, "attention", by_name=True):
        if foreign:
            why = f"it has other code than its release ({listed([path for path, _ in foreign])}), and {why}"
        refusal = partial(AttentionRefusedError, name, owner.__name__, f"the attention name {name!r}")
        _report(owner, f"under {name!r} as with eager attention", why, unproven, refusal)


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
    if why := _unproven(model, name, "padding_free", by_name=by_name):
        owner = importable_class(model)
        refusal = partial(UnsupportedFeatureError, "padding_free", owner.__name__)
        _report(owner, "without padding as with it", why, unproven, refusal)


def _in_table(owner: type, config: type, model_type: str, version: str) -> tuple[str, ...] | None:
    if not all(kind.__module__.startswith("transformers.models.") for kind in (owner, config)):
        return None
    known = wrong_cases(model_type, version)
    # A part of a model, such as its vision tower, is proven with the whole model.
    return wrong_cases(owner.__module__.split(".")[2], version) if known is None else known


def _unproven(model: Any, name: str, claim: Claim, *, by_name: bool) -> str:
    """The reason why a claim isn't proven; empty if a gate returns None for it. A gate that finds it false raises."""
    reasons: list[str | None] = []
    for point in entries(LOAD_GATES).values():
        try:
            gate = point.load()
        except Exception as error:  # another project's package
            reasons.append(f"its entry point {point.name} could not be loaded: {type(error).__name__}: {error}")
            continue
        reason = gate(model, name, claim, by_name=by_name)
        reasons.append(reason if reason is None else str(reason) or f"the gate {point.name} says no reason")
    if not reasons:
        return f"nothing that could prove it is installed. {install_hint('prove')}"
    return "" if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))


def listed(paths: list[str]) -> str:
    """The first of some paths, and the number of the others."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _report(owner: type, how: str, why: str, unproven: str, error: Callable[[str], UnsupportedFeatureError]) -> None:
    message = f"{owner.__name__} isn't proven to compute the same {how}: {why}"
    if unproven == "refuse":
        raise error(f"{message}. install(unproven='allow') takes it as it is.")
    warnings.warn(f"{message}. Compare the two yourself, or pass install(unproven=...).", UnprovenWarning, stacklevel=3)


def proving_command(model: Any, *options: str) -> str:
    """The command that proves models of a model's type."""
    return " ".join(["kernel-compat prove", getattr(model.config, "model_type", "") or "FOLDER", *options])


def wrong(model: Any, name: str, cases: Any) -> AttentionRefusedError:
    """The error for a model whose outputs differ from eager attention's in some cases."""
    return AttentionRefusedError(
        name,
        essential(type(model)).__name__,
        f"the attention name {name!r}",
        f"Its outputs differ from eager attention's ({', '.join(cases)}). Use 'eager', or 'sdpa' if the model has it; "
        f"`{proving_command(model)}` shows by how much.",
    )


def importable_class(model: Any) -> type:
    """The first class of a model that its module has; classes made at run time, such as those of FSDP2, aren't."""
    return next(kind for kind in type(model).__mro__ if _is_importable(kind))


def _is_importable(kind: type) -> bool:
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind

"""Refuses models that are wrong under a registered name as they are loaded: by the table, or by a proof made then."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import UnsupportedFeatureError
from .outcomes import Proof
from .table import wrong_cases

__all__ = ["nothing_to_prove", "require_padding_free", "require_proof"]

_SECONDS = 180
_logger = logging.getLogger(__name__)
#: The proofs of this process, by module; by class for those of ``__main__``.
_proofs: dict[Any, Proof] = {}
_proving: ContextVar[bool] = ContextVar("proving", default=False)


@contextmanager
def nothing_to_prove() -> Iterator[None]:
    """Models that this thread builds in the block pass `require_proof`: they are built to be proven."""
    token = _proving.set(True)
    try:
        yield
    finally:
        _proving.reset(token)


def require_proof(model: Any, name: str, unproven: str) -> None:
    """Refuse a model that is proven wrong under a registered name.

    A type that isn't in the table is proven on a tiny model of its own class, in another process on the CPU. That takes some
    seconds, once: the proof is kept in the user's cache.

    Args:
        model: a model that is being built; only its class and its config are read.
        name: the attention name.
        unproven: for a type of which no tiny model can be made: ``"warn"`` warns, ``"refuse"`` raises; ``"allow"`` accepts
            every type that isn't in the table, and proves nothing.

    Raises:
        UnsupportedFeatureError: the type is wrong in some case, or can't be proven and `unproven` is ``"refuse"``.
    """
    import transformers

    if _proving.get():
        return
    owner = type(model)
    known = _in_table(owner, str(getattr(model.config, "model_type", "")), str(transformers.__version__))
    if known:
        raise _wrong(owner, name, known)
    if known is not None or unproven == "allow":
        return
    proof = _proof(owner, model.config)
    if wrong := sorted({outcome.case for outcome in proof.outcomes if outcome.verdict == "wrong"}):
        raise _wrong(owner, name, wrong)
    if proof.no_recipe or proof.verdict == "untested":
        _report_unproven(
            owner, f"under {name!r} as with eager attention", proof, unproven, f"the attention name {name!r}"
        )


def require_padding_free(model: Any, name: str, unproven: str, by_name: bool = False) -> None:
    """Refuse a model that isn't proven to compute the same without its padding. Proven as in `require_proof`, for each class.

    Args:
        model, name, unproven: as in `require_proof`.
        by_name: whether it is the name that wants it, under which a model to which padding doesn't apply stays as it is.

    Raises:
        UnsupportedFeatureError: the class differs, or can't be proven and `unproven` is ``"refuse"``.
    """
    if _proving.get() or unproven == "allow":
        return
    owner = next(kind for kind in type(model).__mro__ if _is_importable(kind))
    proof = _proof(owner, model.config, padding_free=True)
    if proof.no_recipe:
        _report_unproven(owner, "without padding as with it", proof, unproven, "padding_free")
        return
    accepted = ("equal", "not applicable") if by_name else ("equal",)
    for outcome in proof.outcomes:
        if outcome.verdict not in accepted:
            raise UnsupportedFeatureError(
                "padding_free", owner.__name__, f"{outcome.reason}. `kernel-compat prove --case padding_free` shows it."
            )


def _is_importable(kind: type) -> bool:
    """False for a class made at run time, such as those of FSDP2."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _report_unproven(owner: type, how: str, proof: Proof, unproven: str, feature: str) -> None:
    why = proof.no_recipe or "; ".join(dict.fromkeys(one.reason for one in proof.outcomes))
    message = f"{owner.__name__} isn't proven to compute the same {how}: no tiny model of it could be made ({why})"
    if unproven == "refuse":
        raise UnsupportedFeatureError(
            feature, owner.__name__, f"{message}. install(unproven='allow') takes it as it is."
        )
    warnings.warn(f"{message}. Compare the two yourself, or pass install(unproven=...).", stacklevel=3)


def _in_table(owner: type, model_type: str, version: str) -> tuple[str, ...] | None:
    if not owner.__module__.startswith("transformers.models."):
        return None
    known = wrong_cases(model_type, version)
    # A part of a model, such as its vision tower, is proven with the whole model.
    return wrong_cases(owner.__module__.split(".")[2], version) if known is None else known


def _wrong(owner: type, name: str, cases: Any) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"the attention name {name!r}",
        owner.__name__,
        f"Its outputs differ from eager attention's ({', '.join(cases)}). Use 'eager', or 'sdpa' if the model has it; "
        "`kernel-compat prove` shows by how much.",
    )


def _proof(owner: type, config: Any, padding_free: bool = False) -> Proof:
    """The proof of a class: from this process, from the user's cache, or made now.

    The other classes of its module, such as the base model of a model with a head, share the proof of the first one loaded.
    Without padding a head matters, so that each class has a proof.
    """
    key = owner if padding_free or owner.__module__ == "__main__" else owner.__module__
    if key not in _proofs:
        kind = "-padding-free" if padding_free else ""
        kept = _cache_folder() / f"{_fingerprint(owner)}{kind}.json"
        if kept.exists():
            _proofs[key] = Proof.from_json(json.loads(kept.read_text()))
        else:
            _logger.info("proving %s on a tiny model", owner.__name__)
            _proofs[key] = proof = _prove_elsewhere(owner, config, padding_free)
            if proof.outcomes:
                _keep(proof, kept)
    return _proofs[key]


def _keep(proof: Proof, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(proof.to_json()))
        written.replace(path)
    except OSError as error:  # a home that can't be written: the type is proven again next time
        _logger.info("the proof could not be kept: %s", error)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernel-compat" / "proofs"


def _fingerprint(owner: type) -> str:
    """A hash of the source of a class and of its base classes, and of the versions of the packages."""
    parts = [owner.__qualname__]
    for klass in owner.__mro__:
        if not klass.__module__.startswith(("torch.", "builtins")):
            try:
                parts.append(inspect.getsource(sys.modules[klass.__module__]))
            except (KeyError, OSError, TypeError):
                parts.append(repr(klass))
    parts += [f"{name} {metadata.version(name)}" for name in ("kernel-compat", "torch", "transformers")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _prove_elsewhere(owner: type, config: Any, padding_free: bool) -> Proof:
    """Prove a class in another process, unaffected by this one's devices, default dtype and patches."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",
        "KERNEL_COMPAT_UNPROVEN": "allow",
    }
    command = [sys.executable, "-m", __package__]
    try:
        given = pickle.dumps((owner, config, padding_free))
        done = subprocess.run(command, input=given, env=environment, check=True, capture_output=True, timeout=_SECONDS)
        return Proof.from_json(json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        problem = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    except Exception as error:  # a class that can't be pickled, a proof that takes too long
        problem = f"{type(error).__name__}: {error}"
    return Proof(str(getattr(config, "model_type", "")), metadata.version("transformers"), no_recipe=problem)

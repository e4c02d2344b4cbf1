"""Prove many model types, each in its own process, so that a type that crashes or hangs doesn't stop the others."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from kernel_compat.api import installed

from .outcomes import Outcome, Proof

__all__ = ["sweep"]


def sweep(
    model_types: Sequence[str],
    cases: Sequence[str] | None = None,
    *,
    workers: int = 2,
    seconds: float = 60.0,
    attn_implementation: str | None = None,
    progress: Callable[[Proof, int, int], None] | None = None,
) -> list[Proof]:
    """Prove model types in parallel.

    torch and transformers are imported once; each type's process is forked from this one.

    Args:
        model_types: names of model types.
        cases: names of `CASES`; None for all.
        workers: number of processes at a time.
        seconds: time limit for one type; a type that takes longer counts as crashed.
        attn_implementation: the registered attention name to prove; None for the reference kernel.
        progress: called with each proof, the number of proofs so far, and their number at the end.

    Returns:
        The proofs, sorted by model type.
    """
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama  # noqa: F401  # here, and not in every process

    from .proof import warm_up

    warm_up()
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    waiting = sorted(model_types, reverse=True)
    running: dict[Any, tuple[str, Any, float]] = {}
    proofs: list[Proof] = []
    with installed():
        while waiting or running:
            while waiting and len(running) < workers:
                model_type = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_work, args=(model_type, cases, attn_implementation, sender), daemon=True
                )
                process.start()
                sender.close()
                running[receiver] = (model_type, process, time.monotonic() + seconds)
            ready = multiprocessing.connection.wait(list(running), timeout=0.5)
            for receiver, (model_type, process, deadline) in list(running.items()):
                if receiver in ready:
                    try:
                        proof = receiver.recv()
                    except EOFError:
                        process.join()
                        proof = _crashed(model_type, f"the process ended with exit code {process.exitcode}")
                elif time.monotonic() > deadline:
                    process.kill()
                    proof = _crashed(model_type, f"not done in {seconds:.0f} seconds")
                else:
                    continue
                process.join()
                del running[receiver]
                receiver.close()
                proofs.append(proof)
                if progress is not None:
                    progress(proof, len(proofs), len(model_types))
    return sorted(proofs, key=lambda proof: proof.model_type)


def _work(model_type: str, cases: Sequence[str] | None, name: str | None, sender: Any) -> None:
    import torch

    from .proof import prove_type

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        proof = prove_type(model_type, cases, attn_implementation=name)
    except Exception as error:  # an error of the prover itself: the other types go on
        proof = _crashed(model_type, f"the proof failed: {type(error).__name__}: {error}")
    sender.send(proof)
    sender.close()


def _crashed(model_type: str, reason: str) -> Proof:
    return Proof(model_type, version("transformers"), (Outcome("", "all", "crashed", reason=reason),))

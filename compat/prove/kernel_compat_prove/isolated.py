"""Prove a class of this process, with what other code has patched, unaffected by the modes, contexts and defaults of its caller."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from select import select
from types import FunctionType
from typing import Any

from .losses import with_losses
from .outcomes import PADDING_FREE, Proof

__all__ = ["prove_here"]

#: Without a result after this time a forked child may be waiting for a lock that another thread held, and the proof is made
#: in this process. It is no verdict: that is the same, whichever process finds it.
_SECONDS_OF_A_CHILD = 120
_CRASHES = tuple(getattr(signal, f"SIG{name}", None) for name in ("SEGV", "ABRT", "BUS", "ILL", "FPE"))


def prove_here(owner: type, config: Any, padding_free: bool) -> Proof:
    """Prove a class on a tiny model, on the CPU.

    A forked child makes the proof if a child could use this process' torch: then no backward runs here, and none of torch's
    engine threads starts. With CUDA or `torch.distributed` initialised, a fork may not touch their memory, and this process
    makes the proof, in a thread of its own: modes, contexts and default devices belong to threads. Other state is put back.

    Args:
        owner: the class.
        config: a config of it; it is not modified.
        padding_free: whether to prove the case `padding_free` instead of the quick cases.
    """
    from .cases import QUICK
    from .proof import prove_config, warm_up

    def prove() -> Proof:
        with _shielded():
            proof = prove_config(config, owner, (PADDING_FREE,) if padding_free else QUICK)
        known = owner.__module__.startswith("transformers.models.") and not padding_free
        return with_losses(proof, QUICK, owner.__name__) if known else proof

    def work() -> Proof:
        try:
            return (_in_child(prove, config) if _may_fork() else None) or prove()
        except BaseException as error:  # of the prover itself, a class that it can't read, or a model that exits
            return _failed(config, f"{type(error).__name__}: {error}")

    warm_up()  # imports: a child that was forked in one of another thread would wait for it
    return _in_thread(work)


def _failed(config: Any, problem: str) -> Proof:
    return Proof(str(getattr(config, "model_type", "")), metadata.version("transformers"), no_recipe=problem)


def _in_thread(work: Callable[[], Proof]) -> Proof:
    results: list[Proof] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="kernel-compat proof", daemon=True)
    thread.start()
    thread.join()
    return results[0]


def _may_fork() -> bool:
    import torch

    started = torch.cuda.is_initialized() or (torch.distributed.is_available() and torch.distributed.is_initialized())
    return sys.platform == "linux" and not started


def _in_child(prove: Callable[[], Proof], config: Any) -> Proof | None:
    """The proof that a forked child made; None if it couldn't make one, or was stopped from outside."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on forks of a process with threads, as torch's always is
        pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            os.close(reader)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(nowhere, standard)
            import torch

            torch.set_num_threads(1)  # threads of OpenMP don't survive a fork
            if not _engine_runs(torch):
                os._exit(2)
            with os.fdopen(writer, "w") as stream:
                json.dump(prove().to_json(), stream)
            status = 0
        os._exit(status)
    os.close(writer)
    text = b""
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while select([stream], [], [], _SECONDS_OF_A_CHILD)[0] and (part := stream.read(1 << 16)):
            text += part
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it has ended, unless it took too long
    _, status = os.waitpid(pid, 0)
    with suppress(ValueError, KeyError, TypeError):
        return Proof.from_json(json.loads(text))
    if os.WIFSIGNALED(status) and (number := os.WTERMSIG(status)) in _CRASHES:
        return _failed(config, f"its proof ended by {signal.Signals(number).name}")
    return None


def _engine_runs(torch: Any) -> bool:
    """Whether this process, a forked child, can run a backward: not if its parent's engine had started threads."""
    x = torch.ones((), requires_grad=True, device="cpu")
    try:
        (x * x).backward()
    except RuntimeError:
        return False
    return True


@contextmanager
def _shielded() -> Iterator[None]:
    """In this thread: torch and transformers build and compute models as in a new process; other state is put back afterwards.

    Undone for the block are defaults of the process, and patches by which `from_pretrained`, Accelerate's ``init_empty_weights``
    and DeepSpeed's ``zero.Init`` create models without weights.
    """
    import torch
    from torch import nn

    numpy = sys.modules.get("numpy")
    state, numbers = random.getstate(), numpy.random.get_state() if numpy else None
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
        if numpy:
            stack.callback(numpy.random.set_state, numbers)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_float32_matmul_precision, precision)
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=only_warn)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        _leave_deepspeed(stack)
        for name in ("register_parameter", "register_buffer", "__init__", "__setattr__"):
            _restore(stack, nn.Module, name, "torch")
        for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "linspace"):
            _restore(stack, torch, name, "torch")
        _initialise_weights(stack)
        stack.enter_context(torch.device("cpu"))  # a default tensor type may have another
        yield


def _leave_deepspeed(stack: ExitStack) -> None:
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is not None and getattr(zero, "zero_init_context", None):
        zero.shutdown_init_context()
        stack.callback(zero.restore_init_context)
    integration = sys.modules.get("transformers.integrations.deepspeed")
    reference = getattr(integration, "_hf_deepspeed_config_weak_ref", None)
    if integration is not None and reference is not None:
        _set(stack, integration, "_hf_deepspeed_config_weak_ref", None)


def _initialise_weights(stack: ExitStack) -> None:
    """Undo `no_init_weights` of transformers."""
    from torch.nn import init

    for module in (sys.modules.get("transformers.initialization"), sys.modules["transformers.modeling_utils"]):
        for name, function in getattr(module, "TORCH_INIT_FUNCTIONS", {}).items():
            if getattr(init, name) is not function:
                _set(stack, init, name, function)
        if getattr(module, "_init_weights", True) is False:
            _set(stack, module, "_init_weights", True)


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _restore(stack: ExitStack, owner: Any, name: str, package: str) -> None:
    """Set an attribute to what a wrapper has wrapped, if that is a function of the package."""
    value = original = getattr(owner, name)
    seen: set[int] = set()
    while isinstance(original, FunctionType) and original.__globals__.get("__name__", "").partition(".")[0] != package:
        seen.add(id(original))
        cells = [cell.cell_contents for cell in original.__closure__ or () if _has_contents(cell)]
        inner = [content for content in cells if callable(content) and getattr(content, "__name__", None) == name]
        if not inner or id(inner[0]) in seen:
            return
        original = inner[0]
    if original is not value:
        _set(stack, owner, name, original)


def _has_contents(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        cell.cell_contents  # noqa: B018
        return True
    return False

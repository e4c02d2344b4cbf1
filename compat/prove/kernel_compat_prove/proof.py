"""Prove one model type, or the model of any config."""

from __future__ import annotations

import inspect
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kernel_compat.api import installed, register_attention, unregister_attention
from kernel_compat.kernels import known_kernels
from kernel_compat.proofs.underway import nothing_to_prove

from . import recipes
from .architectures import classes_of
from .cases import CASES, Comparison
from .losses import with_losses
from .outcomes import PADDING_FREE, RAN, WORST_FIRST, Outcome, Proof, Verdict
from .subject import (
    CountedKernel,
    NoRecipeError,
    NotApplicableError,
    RefusedToLoadError,
    Subject,
    UntestedError,
    describe,
    distance,
    is_refusal,
)
from .tiny import LEVELS, shrink

__all__ = ["prove_config", "prove_type"]

#: The attention name that is registered and proven if none is passed; its kernel is the reference kernel.
NAME = "kernel_compat_proof_flash"
#: The tolerance, as a multiple of the change that rounding errors in the weights make in the eager model.
_SENSITIVITY = 10
#: If rounding errors alone make a larger difference, the case is untested.
_UNDECIDABLE = 1e-2
#: If attention changes the output by less, errors in attention may go unseen.
_SHARE_TO_SEE = 1e-3


def prove_type(model_type: str, cases: Sequence[str] | None = None, *, attn_implementation: str | None = None) -> Proof:
    """Prove a model type of transformers on tiny models of its classes; cases that ran on an earlier release and don't here are lost.

    Args:
        model_type: ``config.model_type``.
        cases: names of `CASES`; None for all.
        attn_implementation: the registered attention name to prove; None for the reference kernel.

    Raises:
        ValueError: transformers has no such model type, or no case has one of the names.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        raise ValueError(f"transformers has no model type {model_type!r}")
    proof = _proof(model_type, lambda problems: _default_configs(model_type, problems), cases, attn_implementation)
    return with_losses(proof, cases)


def prove_config(
    config: Any,
    model_class: type[Any] | None = None,
    cases: Sequence[str] | None = None,
    *,
    attn_implementation: str | None = None,
) -> Proof:
    """Prove a model class on a tiny model with the same kinds of layers as a config.

    Args:
        config: of any class, also of remote code; it is not modified.
        model_class: the class to prove; None for the class that transformers has for the config.
        cases: names of `CASES`; None for all. `QUICK` takes a second or two.
        attn_implementation: the registered attention name to prove; None for the reference kernel.

    Raises:
        ValueError: no case has one of the names.
    """
    model_type = getattr(config, "model_type", "") or type(config).__name__

    def configs(problems: list[str]) -> Iterator[tuple[type[Any], list[Any]]]:
        classes = [model_class] if model_class is not None else classes_of(model_type)[:1]
        if not classes:
            problems.append(f"no model class for {type(config).__name__}: pass model_class")
        for owner in classes:
            yield owner, [config]

    return _proof(model_type, configs, cases, attn_implementation)


def warm_up() -> None:
    """Import the modules that every proof needs, before processes are forked."""
    with _quiet(), _under_proof(None):
        pass


def require_cases(cases: Iterable[str] | None) -> None:
    """Check that cases of these names exist.

    Raises:
        ValueError: one does not; the message lists the cases.
    """
    for case in cases or ():
        if case not in CASES:
            raise ValueError(f"unknown case {case!r}; there are {', '.join(CASES)}")


def _proof(
    model_type: str,
    configs: Callable[[list[str]], Iterator[tuple[type[Any], list[Any]]]],
    cases: Sequence[str] | None,
    attn_implementation: str | None,
) -> Proof:
    """The proof of model classes, each on the first of its configs of which a tiny model can be made.

    Args:
        model_type: the type that the classes belong to.
        configs: yields classes, each with its configs; it may add reasons why there are none to the list it gets.
        cases: names of `CASES`; None for all.
        attn_implementation: the registered attention name; None for the reference kernel.
    """
    require_cases(cases)
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    problems: list[str] = []
    with _quiet(), _under_proof(attn_implementation) as (name, counted):
        for model_class, candidates in configs(problems):
            for config in candidates:
                try:
                    outcomes += _prove(model_class, config, cases, name, counted, model_type)
                    break
                except NoRecipeError as error:
                    problems.append(f"{model_class.__name__}: {error}")
    problem = "" if outcomes else "; ".join(problems) or "it has no model class"
    return Proof(model_type, version("transformers"), tuple(outcomes), problem, time.perf_counter() - start)


def _default_configs(model_type: str, problems: list[str]) -> Iterator[tuple[type[Any], list[Any]]]:
    """Yields the classes of a type, each with default configs that may belong to it, the most likely first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[model_type]
        classes = classes_of(model_type)
    except Exception as error:
        problems.append(describe(error))
        return
    for model_class in classes:
        try:
            own = getattr(model_class, "config_class", None) or config_class
        except ImportError as error:  # a placeholder for a class that needs another library
            problems.append(describe(error))
            continue
        order = (config_class, own) if issubclass(config_class, own) else (own, config_class)
        configs = []
        for candidate in dict.fromkeys(order):
            try:
                configs.append(candidate(**recipes.constructor(model_type, candidate)))
            except Exception as error:
                problems.append(f"{candidate.__name__}: {describe(error)}")
        yield model_class, configs


def _prove(
    model_class: type[Any],
    config: Any,
    cases: Sequence[str] | None,
    name: str,
    counted: CountedKernel | None,
    model_type: str,
) -> list[Outcome]:
    label = model_class.__name__
    try:
        subject = make_subject(model_class, config, name, model_type, counted)
    except RefusedToLoadError as error:
        (cause,) = error.args
        verdict: Verdict = "refused" if is_refusal(cause) else "crashed"
        return [Outcome(label, "load", verdict, reason=describe(cause))]
    before = counted.calls if counted is not None else 0
    outcomes = [_outcome(subject, case, counted) for case in cases or CASES]
    note = ""
    if counted is not None and counted.calls == before:
        note = "its forward never calls the kernel"
        outcomes = [_by_sdpa(subject, outcome) if outcome.verdict == "wrong" else outcome for outcome in outcomes]
    elif subject.attention_share is not None and subject.attention_share < _SHARE_TO_SEE:
        note = f"without attention the output differs by {subject.attention_share:.0e} alone"
    return [
        replace(outcome, reason=note) if note and outcome.verdict == "equal" and not outcome.reason else outcome
        for outcome in outcomes
    ]


def _by_sdpa(subject: Subject, wrong: Outcome) -> Outcome:
    """The outcome against sdpa of a model that computes its attention itself; `wrong` if that isn't equal either.

    Such a model may be right except with eager's additive masks: Gemma 4's audio tower negates its mask, which is right only
    for booleans, from 5.5 to 5.19.
    """
    try:
        outcome = _worst(subject.against("sdpa"), wrong.case)
    except Exception:  # it has no sdpa
        return wrong
    if outcome.verdict != "equal":
        return wrong
    return replace(outcome, reason="as sdpa, which eager attention differs from; its forward never calls the kernel")


def make_subject(
    model_class: type[Any],
    config: Any,
    attn_implementation: str,
    model_type: str = "",
    counted: CountedKernel | None = None,
) -> Subject:
    """The tiny model, of the smallest level that works.

    Raises:
        NoRecipeError: no level works.
        RefusedToLoadError: it can't be built under the name.
    """
    problems: dict[str, None] = {}
    sections = _has_sections(model_class, config)
    tried: list[str] = []
    for level in LEVELS:
        try:
            tiny = shrink(config, recipes.overrides(model_type), level=level, multimodal_rope=sections)
            if (values := repr(tiny.to_dict())) in tried:
                continue
            tried.append(values)
            return Subject(model_class, tiny, attn_implementation, counted)
        except RefusedToLoadError:
            raise
        except Exception as error:
            problems.setdefault(str(error) if isinstance(error, NoRecipeError) else f"shrink: {describe(error)}")
            if "library but it was not found" in str(error):
                break
    raise NoRecipeError("; then ".join(problems))


def _has_sections(model_class: type[Any], config: Any) -> bool:
    """Whether the source of a class, or of a nested model's class, divides rotary channels into sections."""
    nested = (getattr(value, "model_type", "") for value in vars(config).values() if hasattr(value, "to_dict"))
    classes: list[Any] = [owner for model_type in nested if model_type for owner in classes_of(model_type)[:1]]
    for owner in (model_class, *classes):
        with suppress(KeyError, OSError, TypeError):  # it has no source
            if "mrope_section" in inspect.getsource(sys.modules[owner.__module__]):
                return True
    return False


def _outcome(subject: Subject, case: str, counted: CountedKernel | None) -> Outcome:
    """The worst outcome of a case's comparisons. One that is refused must not be wrong under a kernel with masks of any kind."""
    outcome = _worst(subject, case)
    if outcome.verdict != "refused" or counted is None:
        return outcome
    with counted.with_masks():
        masked = _worst(subject, case)
    if masked.verdict in ("wrong", "crashed"):
        return replace(masked, reason=f"by a kernel with masks of any kind: {masked.reason}".removesuffix(": "))
    return outcome


def _worst(subject: Subject, case: str) -> Outcome:
    """The worst outcome of a case's comparisons."""
    result = partial(Outcome, subject.model_class.__name__, case)
    outcomes: list[Outcome] = []
    try:
        # Comparisons before an error count.
        outcomes.extend(_compare(subject, comparison, result) for comparison in CASES[case](subject))
    except NotApplicableError as error:
        outcomes.append(result("not applicable", reason=str(error)))
    except UntestedError as error:
        outcomes.append(result("untested", reason=str(error)))
    except Exception as error:  # raised by the eager model as the case is prepared
        outcomes.append(result("untested", reason=f"eager: {describe(error)}"))
    worst = min(outcomes, key=lambda outcome: (WORST_FIRST.index(outcome.verdict), -(outcome.difference or 0.0)))
    compared = sum(outcome.verdict in RAN for outcome in outcomes)
    worst = replace(worst, compared=compared, apart=any(outcome.apart for outcome in outcomes))
    if case == PADDING_FREE and worst.verdict in ("wrong", "crashed"):
        differs = worst.verdict == "wrong" and worst.difference is not None
        how = f"its results would differ by {worst.difference:.0e}" if differs else worst.reason
        return replace(worst, verdict="refused", reason=f"padding_free refuses it: {how}")
    return worst


def _compare(subject: Subject, comparison: Comparison, result: Callable[..., Outcome]) -> Outcome:
    try:
        expected = comparison.expected(subject.eager)
    except (NotApplicableError, UntestedError):
        raise
    except Exception as error:
        return result("untested", reason=f"eager: {describe(error)}")
    if not bool(expected.isfinite().all()):
        return result("untested", reason="eager: its output isn't finite")
    if expected.numel() == 0 or float(expected.norm()) == 0:
        return result("untested", reason="eager: its output is zero")
    run = comparison.actual or comparison.expected
    try:
        actual = run(subject.named)
    except (NotApplicableError, UntestedError):
        raise
    except Exception as error:
        if is_refusal(error):
            return result("refused", reason=describe(error))
        try:
            run(subject.eager)
        except Exception as same:
            if type(same) is type(error):
                return result("untested", reason=f"eager: {describe(same)}")
        return result("crashed", reason=f"{describe(error)} ({_place(error)})")
    note = ""
    if comparison.also is not None:
        try:
            other = comparison.also(subject.eager)
            apart = distance(expected, other)
        except Exception:
            apart = 0.0
        if apart > _allowed(subject, comparison, apart):
            note = f"{comparison.note} by {apart:.0e}"
            result = partial(result, apart=True)
            if distance(actual, other) < distance(actual, expected):
                expected = other
    try:
        difference = distance(actual, expected)
    except ValueError as error:
        return result("wrong", reason=str(error))
    allowed = _allowed(subject, comparison, difference)
    if difference <= allowed:
        return result("equal", difference, allowed, note)
    if allowed >= _UNDECIDABLE:
        reason = f"rounding errors of the weights alone make a difference of {allowed / _SENSITIVITY:.0e}"
        return result("untested", difference, allowed, reason)
    return result("wrong", difference, allowed, note)


def _allowed(subject: Subject, comparison: Comparison, difference: float) -> float:
    """The tolerance of a comparison, raised if the eager model itself is more sensitive to rounding."""
    if difference <= comparison.tolerance:
        return comparison.tolerance
    try:
        sensitivity = distance(comparison.expected(subject.perturbed), comparison.expected(subject.eager))
    except Exception:
        return comparison.tolerance
    return max(comparison.tolerance, min(_SENSITIVITY * sensitivity, _UNDECIDABLE))


def _place(error: BaseException) -> str:
    """The last file and function of transformers or this library in an error's traceback."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if re.search(r"transformers|kernel_compat", frame.filename):
            return f"{Path(frame.filename).name}:{frame.name}"
    return "?"


@contextmanager
def _under_proof(name: str | None) -> Iterator[tuple[str, CountedKernel | None]]:
    """Install the library for the block; yields the name, or without one a temporary name and its counted reference kernel."""
    if name is not None:
        with installed(), nothing_to_prove():
            yield name, None
        return
    counted = CountedKernel(known_kernels()["flash_attention_reference"])
    register_attention(NAME, kernel=counted.kernel)
    try:
        with installed(), nothing_to_prove():
            yield NAME, counted
    finally:
        unregister_attention(NAME)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs for the block; afterwards restore torch's random state and transformers' verbosity."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)

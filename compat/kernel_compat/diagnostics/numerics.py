"""Attention names checked against a float64 reference: tiny problems, forward and backward.

The reference is the formula of attention in float64, which shares no code with any kernel. Importing this module imports
neither torch nor transformers; `run` does.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

from ..api import Report, installed, registered_attention, status
from ..attention.roles import LENGTHS, POSITIONS, SINKS, SOFTCAP, WINDOW, Role
from ..environment import Environment
from ..environment import torch_flash_backend as active_backend
from ..errors import KernelUnavailableError, UnknownNameError, UnsupportedFeatureError
from ..kernels import Features, Kernel, known_kernels
from ..kernels.catalog import TRANSFORMERS
from ..policy.capabilities import kernel_of
from ..policy.torch_backend import use_torch_flash_backend

__all__ = ["CaseResult", "CheckReport", "NameResult", "run"]

Verdict = Literal["right", "WRONG", "failed", "lost", "not usable"]
CaseVerdict = Literal["right", "WRONG", "failed", "lost", "skipped"]
#: Called with the name that runs next, its position from 1, and the number of names.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CaseResult:
    """The result of one case under one attention name.

    Attributes:
        case: the name of the case.
        verdict: ``skipped`` if the kernel lacks a feature that the case needs, ``lost`` if its installed version should have that
            feature, ``failed`` if the case raised.
        errors: relative errors of ``output``, ``dq``, ``dk``, ``dv`` and ``dsinks``: the norm of the difference over the norm of the
            reference. Without gradients if the kernel has no backward.
        max_abs: the largest absolute difference of any element.
        tolerance: the largest relative error that counts as right.
        reason: why the case isn't right, or why there are no gradients.
    """

    case: str
    verdict: CaseVerdict
    errors: Mapping[str, float] = field(default_factory=dict)
    max_abs: float | None = None
    tolerance: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class NameResult:
    """The result of all cases under one attention name.

    Attributes:
        name: the attention name.
        kernel: the name of its kernel; None for transformers' own sdpa.
        verdict: the worst verdict of its cases, or ``not usable``.
        reasons: why it can't run here, or why it failed before the first case.
        install: a sentence with the command that would make it run, if installing something would.
        device: the device it ran on, such as ``"cpu"``; empty if it didn't run.
        dtype: the dtype of its inputs, such as ``"bfloat16"``.
        cases: a result for each case, in the order of `CASES`.
    """

    name: str
    kernel: str | None
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    install: str = ""
    device: str = ""
    dtype: str = ""
    cases: tuple[CaseResult, ...] = ()


@dataclass(frozen=True)
class CheckReport:
    """The results of `run`.

    Attributes:
        installation: the report of `install()`, or of `status()` if torch or transformers can't be imported.
        names: a result for each attention name.
        problems: torch or transformers raising on import, `install()` failing, or the torch backend not being available.
        missing: a sentence for each of torch and transformers that isn't installed. Not a problem.
        torch_flash_backend: the FlashAttention that torch's own attention ran on; None for torch's built-in one.
    """

    installation: Report
    names: tuple[NameResult, ...]
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    torch_flash_backend: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every name that can run is right, every needed shim is applied and there are no problems."""
        wrong = any(result.verdict in ("WRONG", "failed", "lost") for result in self.names)
        return self.installation.ok and not self.problems and not wrong


# The cases. The sequences are short, and no length is a multiple of a kernel's block size.

HEADS, HEAD_DIM = 4, 64
Layout = Literal["batch", "padded left", "padded right", "packed positions", "packed lengths"]


@dataclass(frozen=True)
class Case:
    """A causal attention problem.

    Attributes:
        name: the name of the case.
        lengths: the length of each sequence.
        layout: how transformers passes the sequences: a row each, padded to one length, or packed into one row with
            position ids or cumulative lengths.
        kv_heads: the number of key and value heads.
        value_dim: the head dimension of the values.
        window: the sliding window, in tokens; None for none.
        softcap: of the scores; None for none.
        sinks: whether each head has a sink.
        needs: the `Features` that a kernel needs for it.
    """

    name: str
    lengths: tuple[int, ...]
    layout: Layout = "batch"
    kv_heads: int = HEADS
    value_dim: int = HEAD_DIM
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    needs: tuple[str, ...] = ("causal",)

    def places(self) -> list[tuple[int, slice]]:
        """Row and positions of each sequence in the attention function's input of shape ``(rows, length)``."""
        if self.layout.startswith("packed"):
            ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
            return [(0, slice(end - length, end)) for end, length in zip(ends, self.lengths, strict=True)]
        longest = max(self.lengths)
        start = [longest - length if self.layout == "padded left" else 0 for length in self.lengths]
        return [(row, slice(s, s + self.lengths[row])) for row, s in enumerate(start)]


CASES = (
    Case("causal", (33, 33)),
    Case("padded left", (33, 20, 5), "padded left", needs=("causal", "varlen")),
    Case("padded right", (33, 20, 5), "padded right", needs=("causal", "varlen")),
    Case("packed position_ids", (20, 5, 33), "packed positions", needs=("causal", "varlen")),
    Case("packed cu_seq_lens", (20, 5, 33), "packed lengths", needs=("causal", "varlen")),
    Case("window", (33, 33), window=8, needs=("causal", "window")),
    Case("softcap", (33, 33), softcap=2.0, needs=("causal", "softcap")),
    Case("sinks", (33, 20, 5), "padded left", sinks=True, needs=("causal", "varlen", "sinks")),
    Case("GQA", (33, 33), kv_heads=HEADS // 2, needs=("causal", "gqa")),
    Case("value head dim smaller", (33, 33), value_dim=HEAD_DIM // 2),
)


def run(
    names: Sequence[str] | None = None,
    progress: Progress = lambda name, number, total: None,
    torch_flash_backend: Literal["FA3", "FA4"] | None = None,
) -> CheckReport:
    """Run attention names forward and backward and compare them with float64 math.

    Calls `install()` for the duration of the check, unless it is already in force.

    Args:
        names: attention names: of kernels, registered names, and ``sdpa`` of transformers. All of them by default.
        progress: called before each name.
        torch_flash_backend: activated for the duration of the check, as `use_torch_flash_backend` does. One that isn't
            available is a problem of the report.

    Returns:
        A result for each name, and the problems of the environment.

    Raises:
        UnknownNameError: `names` holds a name that can't be checked here.
        TypeError: `names` is a string.
    """
    if isinstance(names, str):
        raise TypeError(f"names takes a list of attention names, not the string {names!r}")
    environment = Environment.detect()
    known = [*dict.fromkeys((*known_kernels(), *status().attention))]
    if unknown := [name for name in names or () if name not in (*known, "sdpa")]:
        raise UnknownNameError(f"{unknown[0]!r} can't be checked here; these can: {', '.join([*known, 'sdpa'])}")
    problems: list[str] = []
    missing: list[str] = []
    failed = _import_frameworks(environment, problems, missing)
    if names is None:
        names = known if failed else [*known, "sdpa"]
    wanted = list(dict.fromkeys(names))
    results = []
    with ExitStack() as stack:
        report = status()
        if not failed and not report.installed:
            try:
                report = stack.enter_context(installed())
            except Exception as error:
                problems.append(f"install() failed ({_one_line(error)})")
        if torch_flash_backend is not None:
            try:
                stack.enter_context(use_torch_flash_backend(torch_flash_backend))
            except KernelUnavailableError as error:
                problems.append(str(error))
        backend = active_backend()
        for number, name in enumerate(wanted, 1):
            progress(name, number, len(wanted))
            results.append(_check_name(name, report, failed))
    return CheckReport(report, tuple(results), tuple(problems), tuple(missing), backend)


def _import_frameworks(environment: Environment, problems: list[str], missing: list[str]) -> dict[str, str]:
    """Import torch, then transformers, which has no attention without torch.

    Returns:
        By distribution, in a few words, why it can't be imported.
    """
    failed: dict[str, str] = {}
    for distribution, module in (("torch", "torch"), ("transformers", "transformers.modeling_utils")):
        if distribution not in environment.packages and distribution not in environment.imports:
            failed[distribution] = f"{distribution} is not installed"
            missing.append(f"{distribution} is not installed: pip install {distribution}")
        elif not failed:
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken install may raise anything
                failed[distribution] = f"{distribution} does not import"
                problems.append(f"{distribution} is installed but does not import ({_one_line(error)})")
    return failed


def _check_name(name: str, report: Report, failed: Mapping[str, str]) -> NameResult:
    kernel = kernel_of(name)
    kernel_name = kernel.name if kernel else None

    def unchecked(verdict: Verdict, reasons: Sequence[str], install: str = "") -> NameResult:
        return NameResult(name, kernel_name, verdict, tuple(reasons), install)

    state = report.attention.get(name, "pending")
    if state not in ("available", "pending"):
        return unchecked("failed", [f"refused: {name} {state}"])
    if kernel is None and failed:
        return unchecked("not usable", list(failed.values()))
    if kernel is not None:
        reasons = kernel.unavailable_because(report.environment)
        if "torch" in failed:
            reasons = [*(reason for reason in reasons if reason != failed["torch"]), failed["torch"]]
        if reasons:
            provider = kernel.provider(report.environment)
            return unchecked("not usable", reasons, provider.install_hint(report.environment))
    try:
        subject = _Subject(name, kernel)
    except KernelUnavailableError as error:
        return unchecked("not usable", error.reasons, error.install)
    except Exception as error:
        return unchecked("failed", [_one_line(error)])
    place = _place(subject.features)
    if isinstance(place, str):
        return unchecked("not usable", [place])
    device, dtype = place
    cases = tuple(_check_case(case, subject, device, dtype) for case in CASES)
    verdicts = {case.verdict for case in cases}
    worst_first: tuple[Literal["WRONG", "failed", "lost", "right"], ...] = ("WRONG", "failed", "lost", "right")
    verdict: Verdict = next((verdict for verdict in worst_first if verdict in verdicts), "not usable")
    why = tuple(dict.fromkeys(case.reason for case in cases)) if verdict == "not usable" else ()
    dtype_name = str(dtype).removeprefix("torch.")
    return NameResult(name, kernel_name, verdict, why, "", device, dtype_name, cases)


class _Subject:
    """The attention function that transformers calls for a name: of its kernel, or without one its own for sdpa."""

    def __init__(self, name: str, kernel: Kernel | None) -> None:
        self.name = name
        self.entry = registered_attention().get(name)
        self.sdpa = kernel is None
        self.kernel = kernel
        self.forward: Callable[..., Any]
        if kernel is None:
            features = replace(TRANSFORMERS["sdpa"], dtypes=("float32",), devices=("cuda", "cpu"), varlen=True)
            self.features = features
            self.forward = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS["sdpa"]
        else:
            from ..attention.forward import attention_forward

            kernel.load()
            self.features = self.entry.supported if self.entry else kernel.features
            self.forward = (self.entry and self.entry.forward) or attention_forward(kernel, name)

    def skip_because(self, case: Case) -> str | None:
        if self.sdpa and case.layout == "packed lengths":
            return "it takes masks only"
        if self.entry and self.entry.mask and case.layout.startswith("padded"):
            return "its own mask function decides the mask"
        return next((f"no {feature}" for feature in case.needs if not getattr(self.features, feature)), None)

    def lost(self, case: Case) -> list[str]:
        """The features that a case needs, and that the kernel's installed version should have."""
        own = self.entry is None or self.entry.forward is None
        return [name for name in case.needs if self.kernel is not None and own and name in self.kernel.lost]

    def mask_and_options(self, case: Case, visible: Any) -> tuple[Any, dict[str, Any]]:
        """The mask and the keywords that transformers passes for a case; `visible` is its mask of every row in full."""
        import torch

        if self.sdpa:
            return None if case.layout == "batch" and case.window is None else visible[:, None], {}
        rows, length = visible.shape[0], visible.shape[-1]
        mask = None
        by_role: dict[Role, Any] = {POSITIONS: torch.arange(length, device=visible.device)[None]}
        if case.layout.startswith("padded"):
            mask = torch.zeros(rows, length, dtype=torch.bool, device=visible.device)
            for row, place in case.places():
                mask[row, place] = True
        elif case.layout == "packed positions":
            by_role[POSITIONS] = torch.cat([torch.arange(n, device=visible.device) for n in case.lengths])[None]
        elif case.layout == "packed lengths":
            ends, longest = [0, *(place.stop for _, place in case.places())], max(case.lengths)
            offsets = torch.tensor(ends, dtype=torch.int32, device=visible.device)
            by_role = dict(zip(LENGTHS, (offsets, offsets, longest, longest), strict=True))
        options = {role.named(): value for role, value in by_role.items()}
        if case.window is not None:
            options[WINDOW.named()] = case.window
        if case.softcap is not None:
            options[SOFTCAP.named()] = case.softcap
        return mask, options


def _place(features: Features) -> tuple[str, Any] | str:
    """A device that the kernel runs on, CUDA if possible, and a dtype that it takes; or why there is no such device."""
    import torch

    low, high = features.min_capability or (0, 0), features.max_capability or (99, 0)
    if "cuda" in features.devices and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if low <= torch.cuda.get_device_capability(index) <= high:
                return f"cuda:{index}", getattr(torch, features.dtypes[0])
    if "cpu" in features.devices:
        return "cpu", getattr(torch, "float32" if "float32" in features.dtypes else features.dtypes[0])
    cuda = torch.version.cuda
    why = f"(CUDA {cuda}) finds no such device: is the driver too old?" if cuda else "is a build without CUDA"
    return f"it runs on {' or '.join(features.devices)}, and torch {torch.__version__} {why}"


def _tolerance(device: str, dtype: Any) -> float:
    """The largest relative error that counts as right.

    The inputs are exact in `dtype`, so a right kernel differs from float64 by rounding only. In 16 bits it rounds
    probabilities, score gradients and results, which amounts to 0.8 u, where u is the unit roundoff (2^-11 in float16,
    2^-8 in bfloat16); another order of summation adds little. The tolerance is 4u: 2e-3 and 1.6e-2. In float32 the error
    is a few times 2^-24, and the tolerance 1e-5. Wrong results are far beyond: a boundary or window that is off by one
    gives 0.2 and more, one key too many or too few for one query mostly 2e-2.
    """
    import torch

    if dtype in (torch.float16, torch.bfloat16):
        return 2 * float(torch.finfo(dtype).eps)  # eps is 2u
    # TF32, which NVIDIA's containers enable, has 10 bits of fraction, as float16 has.
    if device.startswith("cuda") and torch.get_float32_matmul_precision() != "highest":
        return 4 * 2.0**-11
    return 1e-5


def _check_case(case: Case, subject: _Subject, device: str, dtype: Any) -> CaseResult:
    import torch

    if lost := subject.lost(case):
        return CaseResult(
            case.name, "lost", reason=f"the installed version has {', '.join(lost)}, its functions don't take it"
        )
    if reason := subject.skip_because(case):
        return CaseResult(case.name, "skipped", reason=reason)
    features = subject.features
    backward = features.backward and set(case.needs).isdisjoint(features.forward_only)
    backward = backward and torch.device(device).type not in features.no_backward_on
    try:
        # The caller's no_grad, inference mode and autocast must not change the result.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(backward),
            torch.autocast(torch.device(device).type, enabled=False),
        ):
            results, expected = _compute(case, subject, device, dtype, backward)
    except UnsupportedFeatureError as error:
        # A registered forward may refuse a feature that its kernel has; the default forward must not.
        return CaseResult(
            case.name, "skipped" if subject.entry and subject.entry.forward else "failed", reason=_one_line(error)
        )
    except Exception as error:
        return CaseResult(case.name, "failed", reason=_one_line(error))
    differences = [x - y for x, y in zip(results, expected, strict=True)]
    names = ("output", "dq", "dk", "dv", "dsinks")
    errors = {name: float(d.norm() / y.norm()) for name, d, y in zip(names, differences, expected, strict=False)}
    max_abs = float(torch.cat([d.flatten() for d in differences]).abs().max())
    tolerance = _tolerance(device, dtype)
    wrong = [name for name, error in errors.items() if not error <= tolerance]  # NaN is wrong
    reason = f"wrong: {', '.join(wrong)}" if wrong else "" if backward else "no backward: forward only"
    return CaseResult(case.name, "WRONG" if wrong else "right", errors, max_abs, tolerance, reason)


def _compute(case: Case, subject: _Subject, device: str, dtype: Any, backward: bool) -> tuple[list[Any], list[Any]]:
    """Output and gradients (dq, dk, dv, and dsinks) at the real tokens, by the attention function and by the reference.

    Float64 tensors on the CPU, of shape ``(real tokens, heads, head dim)``.
    """
    import torch

    places = case.places()
    rows, length = places[-1][0] + 1, max(place.stop for _, place in places)
    generator = torch.Generator("cpu").manual_seed(0)

    def random(heads: int, dim: int) -> Any:
        x = torch.randn(rows, heads, length, dim, generator=generator, device="cpu", dtype=torch.float64)
        return x.to(dtype).to(device).requires_grad_(backward)

    inputs: tuple[Any, ...] = (
        random(HEADS, HEAD_DIM),
        random(case.kv_heads, HEAD_DIM),
        random(case.kv_heads, case.value_dim),
    )
    weight = random(HEADS, case.value_dim).detach().transpose(1, 2)
    visible = torch.eye(length, dtype=torch.bool, device="cpu").repeat(rows, 1, 1)  # padding sees itself
    for row, place in places:
        visible[row, place, place] = _visible(place.stop - place.start, case.window)
    mask, options = subject.mask_and_options(case, visible.to(device))
    if case.sinks:
        sinks = torch.randn(HEADS, generator=generator, device="cpu").to(dtype).to(device).requires_grad_(backward)
        inputs, options = (*inputs, sinks), {**options, SINKS.named(): sinks}
    module = _stub(subject.name, case).to(device)

    def joined(x: Any) -> Any:  # (rows, length, ...) to (real tokens, ...)
        return torch.cat([x[row, place] for row, place in places])

    def results(output: Any, inputs: Any) -> list[Any]:
        if output.shape != weight.shape or output.dtype != inputs[0].dtype:
            raise ValueError(
                f"the output is {output.dtype} of shape {tuple(output.shape)}, "
                f"not {inputs[0].dtype} of shape {tuple(weight.shape)}"
            )
        tensors = [joined(output)]
        if backward:
            gradients = torch.autograd.grad(tensors[0], inputs, joined(weight).to(tensors[0]))
            tensors += [joined(x.transpose(1, 2)) for x in gradients[:3]] + list(gradients[3:])
        return [x.detach().cpu().double() for x in tensors]

    output = subject.forward(module, *inputs[:3], mask, scaling=HEAD_DIM**-0.5, dropout=0.0, **options)[0]
    exact = [x.detach().cpu().double().requires_grad_(backward) for x in inputs]
    return results(output, inputs), results(_reference(*exact, visible=visible, softcap=case.softcap), exact)


def _visible(length: int, window: int | None) -> Any:
    """A mask of shape ``(length, length)``: True where the query of the row attends to the key of the column."""
    import torch

    distance = torch.arange(length, device="cpu")[:, None] - torch.arange(length, device="cpu")[None]
    return (distance >= 0) & (distance < (window or length))


def _reference(q: Any, k: Any, v: Any, sinks: Any = None, *, visible: Any, softcap: float | None = None) -> Any:
    """Attention by the formula. Shares no code with any kernel.

    Args:
        q: of shape ``(rows, heads, length, head dim)``.
        k: of shape ``(rows, key heads, length, head dim)``.
        v: of shape ``(rows, key heads, length, value dim)``.
        sinks: of shape ``(heads,)``.
        visible: of shape ``(rows, length, length)``: True where the query attends to the key.

    Returns:
        The output, of shape ``(rows, length, heads, value dim)``.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    exponents = scores.masked_fill(~visible[:, None], -math.inf).exp()
    total = exponents.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[:, None, None].exp())
    return (exponents / total @ v).transpose(1, 2)


def _stub(name: str, case: Case) -> Any:
    """A stand-in for a model's attention module, with the attributes that attention functions read."""
    import torch

    module = torch.nn.Module()
    module.is_causal = True
    module.layer_idx = 0
    module.head_dim = HEAD_DIM
    module.scaling = HEAD_DIM**-0.5
    module.num_key_value_groups = HEADS // case.kv_heads
    module.config = SimpleNamespace(
        _attn_implementation=name,
        num_attention_heads=HEADS,
        num_key_value_heads=case.kv_heads,
        head_dim=HEAD_DIM,
        hidden_size=HEADS * HEAD_DIM,
        sliding_window=case.window,
    )
    return module


def _one_line(error: BaseException) -> str:
    """An exception's type and message on one line, at most 400 characters of it: kernel compilers write pages."""
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

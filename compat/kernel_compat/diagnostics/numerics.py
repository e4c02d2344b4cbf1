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

from ..attention.defaults import Report, installed, registered_attention, status
from ..attention.names import AttentionName
from ..choosing.torch_backend import use_torch_flash_backend
from ..environment import Environment
from ..environment import torch_flash_backend as active_backend
from ..errors import KernelUnavailableError, UnknownNameError, UnsupportedFeatureError
from ..kernels import Features, Kernel, known_kernels
from ..kernels.catalog import TRANSFORMERS
from .names import attention_names
from .packages import import_frameworks, one_line

__all__ = ["CaseResult", "CheckReport", "NameResult", "run"]

Verdict = Literal["right", "WRONG", "failed", "not usable"]
CaseVerdict = Literal["right", "WRONG", "failed", "skipped"]
#: Called with the case that runs next, the number of cases that are done, and the number of cases.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CaseResult:
    """The result of one case under one attention name.

    Attributes:
        case: the name of the case.
        verdict: ``skipped`` if the kernel lacks a feature that the case needs, ``failed`` if it raised.
        errors: relative errors of ``output``, ``dq``, ``dk`` and ``dv``: the norm of the difference over the norm of the
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
    def environment(self) -> Environment:
        """The environment that the names ran in."""
        return self.installation.environment

    @property
    def ok(self) -> bool:
        """Whether every name that can run is right, every needed shim is applied and there are no problems."""
        wrong = any(result.verdict in ("WRONG", "failed") for result in self.names)
        return self.installation.ok and not self.problems and not wrong


# The cases. The sequences are short, and no length is a multiple of a kernel's block size.

HEADS, HEAD_DIM = 4, 64
Layout = Literal["batch", "padded left", "padded right", "position_ids", "cu_seq_lens"]


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
        needs: the `Features` that a kernel needs for it.
    """

    name: str
    lengths: tuple[int, ...]
    layout: Layout = "batch"
    kv_heads: int = HEADS
    value_dim: int = HEAD_DIM
    window: int | None = None
    needs: tuple[str, ...] = ("causal",)

    def places(self) -> list[tuple[int, slice]]:
        """Row and positions of each sequence in the attention function's input of shape ``(rows, length)``."""
        if self.layout in ("position_ids", "cu_seq_lens"):
            ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
            return [(0, slice(end - length, end)) for end, length in zip(ends, self.lengths, strict=True)]
        longest = max(self.lengths)
        start = [longest - length if self.layout == "padded left" else 0 for length in self.lengths]
        return [(row, slice(s, s + self.lengths[row])) for row, s in enumerate(start)]


CASES = (
    Case("causal", (33, 33)),
    Case("padded left", (33, 20, 5), "padded left", needs=("causal", "varlen")),
    Case("padded right", (33, 20, 5), "padded right", needs=("causal", "varlen")),
    Case("packed position_ids", (20, 5, 33), "position_ids", needs=("causal", "varlen")),
    Case("packed cu_seq_lens", (20, 5, 33), "cu_seq_lens", needs=("causal", "varlen")),
    Case("window", (33, 33), window=8, needs=("causal", "window")),
    Case("GQA", (33, 33), kv_heads=HEADS // 2, needs=("causal", "gqa")),
    Case("value head dim smaller", (33, 33), value_dim=HEAD_DIM // 2),
)


def run(
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    torch_flash_backend: Literal["FA3", "FA4"] | None = None,
) -> CheckReport:
    """Run attention names forward and backward and compare them with float64 math.

    Calls `install()` for the duration of the check, unless it is already in force.

    Args:
        names: attention names: of kernels, registered names, and ``sdpa`` of transformers. All of them by default.
        progress: called before each case and after the last.
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
    known = [status.name for status in attention_names(environment)]
    if unknown := [name for name in names or () if name not in (*known, "sdpa")]:
        raise UnknownNameError(f"{unknown[0]!r} can't be checked here; these can: {', '.join([*known, 'sdpa'])}")
    imports = import_frameworks(environment)
    problems = [*imports.problems]
    with ExitStack() as stack:
        report = status() if imports.failed else _installation(stack, problems)
        if torch_flash_backend is not None:
            try:
                stack.enter_context(use_torch_flash_backend(torch_flash_backend))
            except KernelUnavailableError as error:
                problems.append(str(error))
        backend = active_backend()
        if names is None:
            names = known if imports.failed else [*known, "sdpa"]
        wanted = list(dict.fromkeys(names))
        counter = _Counter(progress, len(wanted))
        results = tuple(_check_name(name, report, imports.failed, counter) for name in wanted)
        counter.end()
    return CheckReport(report, results, tuple(problems), imports.missing, backend)


def _installation(stack: ExitStack, problems: list[str]) -> Report:
    """Enter `installed()` until the stack unwinds, unless `install()` is already in force."""
    report = status()
    if report.installed:
        return report
    try:
        return stack.enter_context(installed())
    except Exception as error:
        problems.append(f"install() failed ({one_line(error)})")
        return status()


class _Counter:
    """Calls `progress` with the number of cases that are done."""

    def __init__(self, progress: Progress | None, count: int) -> None:
        self.progress = progress
        self.total = count * len(CASES)
        self.done = 0

    def begin(self, case: str) -> None:
        if self.progress is not None:
            self.progress(case, self.done, self.total)
        self.done += 1

    def skip_name(self) -> None:
        self.done += len(CASES)

    def end(self) -> None:
        if self.progress is not None:
            self.progress("", self.total, self.total)


def _check_name(name: str, report: Report, failed: Mapping[str, str], counter: _Counter) -> NameResult:
    environment = report.environment
    entry = registered_attention().get(name)
    kernel = entry.kernel if entry else known_kernels().get(name)
    kernel_name = kernel.name if kernel else None

    def unchecked(verdict: Verdict, reasons: Sequence[str], install: str = "") -> NameResult:
        counter.skip_name()
        return NameResult(name, kernel_name, verdict, tuple(reasons), install)

    state = report.attention.get(name, "pending")
    if state not in ("available", "pending"):
        return unchecked("failed", [f"refused: {name} {state}"])
    if kernel is not None:
        unusable = kernel.unavailable_because(environment)
        install = kernel.provider(environment).install_hint(environment)
        reasons = [reason for reason in unusable if reason != failed.get("torch")]
        if "torch" in failed:
            reasons.append(failed["torch"])
        if reasons:
            return unchecked("not usable", reasons, install)
    elif failed:
        return unchecked("not usable", list(failed.values()))
    try:
        subject = _Sdpa() if kernel is None else _Registered(name, kernel, entry)
    except KernelUnavailableError as error:
        return unchecked("not usable", error.reasons, error.install)
    except Exception as error:
        return unchecked("failed", [one_line(error)])
    place = _place(subject.features)
    if place is None:
        wanted = " or ".join(subject.features.devices)
        return unchecked("not usable", [f"it runs on {wanted}, and {_why_no_cuda()}"])
    device, dtype = place
    cases = []
    for case in CASES:
        counter.begin(f"{name}: {case.name}")
        cases.append(_check_case(case, subject, device, dtype))
    verdicts = {case.verdict for case in cases}
    worst_first: tuple[Literal["WRONG", "failed", "right"], ...] = ("WRONG", "failed", "right")
    verdict: Verdict = next((verdict for verdict in worst_first if verdict in verdicts), "not usable")
    why = tuple(dict.fromkeys(case.reason for case in cases)) if verdict == "not usable" else ()
    return NameResult(name, kernel_name, verdict, why, "", device, str(dtype).removeprefix("torch."), tuple(cases))


class _Registered:
    """The attention function that transformers calls for a name, with its kernel."""

    def __init__(self, name: str, kernel: Kernel, entry: AttentionName | None) -> None:
        from ..attention.forward import attention_forward

        kernel.load()
        self.name = name
        self.features = kernel.features
        self.forward = (entry and entry.forward) or attention_forward(kernel, name)
        self.own_forward = bool(entry and entry.forward)
        self.own_mask = bool(entry and entry.mask)

    def skip_because(self, case: Case) -> str | None:
        lacking = [feature for feature in case.needs if not getattr(self.features, feature)]
        if lacking:
            return f"no {lacking[0]}"
        if self.own_mask and case.layout.startswith("padded"):
            return "its own mask function decides the mask"
        return None

    def mask_and_options(self, case: Case, visible: Any) -> tuple[Any, dict[str, Any]]:
        import torch

        rows, length = visible.shape[0], visible.shape[-1]
        mask = None
        options: dict[str, Any] = {"position_ids": torch.arange(length, device=visible.device)[None]}
        if case.layout.startswith("padded"):
            mask = torch.zeros(rows, length, dtype=torch.bool, device=visible.device)
            for row, place in case.places():
                mask[row, place] = True
        elif case.layout == "position_ids":
            options["position_ids"] = torch.cat([torch.arange(n, device=visible.device) for n in case.lengths])[None]
        elif case.layout == "cu_seq_lens":
            ends = [0, *(place.stop for _, place in case.places())]
            offsets = torch.tensor(ends, dtype=torch.int32, device=visible.device)
            longest = max(case.lengths)
            options = {
                "cu_seq_lens_q": offsets,
                "cu_seq_lens_k": offsets,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        if case.window is not None:
            options["sliding_window"] = case.window
        return mask, options


class _Sdpa:
    """transformers' own attention function over torch's scaled_dot_product_attention."""

    def __init__(self) -> None:
        self.name = "sdpa"
        self.features = replace(TRANSFORMERS["sdpa"], dtypes=("float32",), devices=("cuda", "cpu"))
        functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        self.forward = functions["sdpa"]
        self.own_forward = False

    def skip_because(self, case: Case) -> str | None:
        return "it takes masks only" if case.layout == "cu_seq_lens" else None

    def mask_and_options(self, case: Case, visible: Any) -> tuple[Any, dict[str, Any]]:
        plain = case.layout == "batch" and case.window is None
        return None if plain else visible[:, None], {}


def _place(features: Features) -> tuple[str, Any] | None:
    """A device that the kernel runs on, CUDA if possible, and a dtype that it takes; None if there is no such device."""
    import torch

    low, high = features.min_capability or (0, 0), features.max_capability or (99, 0)
    if "cuda" in features.devices and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if low <= torch.cuda.get_device_capability(index) <= high:
                return f"cuda:{index}", getattr(torch, features.dtypes[0])
    if "cpu" in features.devices:
        dtype = "float32" if "float32" in features.dtypes else features.dtypes[0]
        return "cpu", getattr(torch, dtype)
    return None


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no such device: is the driver too old?"


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


def _check_case(case: Case, subject: _Registered | _Sdpa, device: str, dtype: Any) -> CaseResult:
    import torch

    if reason := subject.skip_because(case):
        return CaseResult(case.name, "skipped", reason=reason)
    features = subject.features
    backward = features.backward and set(case.needs).isdisjoint(features.forward_only)
    try:
        # The caller's no_grad, inference mode and autocast must not change the result.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(backward),
            torch.autocast(torch.device(device).type, enabled=False),
        ):
            found, expected = _compute(case, subject, device, dtype, backward)
    except UnsupportedFeatureError as error:
        # A registered forward may refuse a feature that its kernel has; the default forward must not.
        return CaseResult(case.name, "skipped" if subject.own_forward else "failed", reason=one_line(error))
    except Exception as error:
        return CaseResult(case.name, "failed", reason=one_line(error))
    errors, max_abs = {}, 0.0
    for name, x in found.items():
        difference = x - expected[name]
        errors[name] = float(difference.norm() / expected[name].norm())
        greatest = float(difference.abs().max())
        max_abs = greatest if math.isnan(greatest) else max(max_abs, greatest)
    tolerance = _tolerance(device, dtype)
    wrong = [name for name, error in errors.items() if not error <= tolerance]  # NaN is wrong
    reason = f"wrong: {', '.join(wrong)}" if wrong else "" if backward else "no backward: forward only"
    return CaseResult(case.name, "WRONG" if wrong else "right", errors, max_abs, tolerance, reason)


def _compute(
    case: Case, subject: _Registered | _Sdpa, device: str, dtype: Any, backward: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Output and gradients at the real tokens, by the attention function and by the reference.

    Both as float64 tensors on the CPU, of shape ``(real tokens, heads, head dim)``.
    """
    import torch

    places = case.places()
    rows, length = places[-1][0] + 1, max(place.stop for _, place in places)
    generator = torch.Generator("cpu").manual_seed(0)

    def random(heads: int, dim: int) -> Any:
        x = torch.randn(rows, heads, length, dim, generator=generator, device="cpu", dtype=torch.float64)
        return x.to(dtype).to(device).requires_grad_(backward)

    inputs = random(HEADS, HEAD_DIM), random(case.kv_heads, HEAD_DIM), random(case.kv_heads, case.value_dim)
    weight = random(HEADS, case.value_dim).detach().transpose(1, 2)

    visible = torch.eye(length, dtype=torch.bool, device=device).repeat(rows, 1, 1)  # padding sees itself
    for row, place in places:
        visible[row, place, place] = _visible(place.stop - place.start, case.window).to(device)
    mask, options = subject.mask_and_options(case, visible)
    module = _stub(subject.name, case).to(device)
    output = subject.forward(module, *inputs, mask, scaling=HEAD_DIM**-0.5, dropout=0.0, **options)[0]
    if output.shape != weight.shape or output.dtype != dtype:
        raise ValueError(
            f"the output is {output.dtype} of shape {tuple(output.shape)}, not {dtype} of shape {tuple(weight.shape)}"
        )

    def joined(x: Any) -> Any:  # (rows, length, ...) to (real tokens, ...)
        return torch.cat([x[row, place] for row, place in places]).detach().cpu().double()

    found = {"output": joined(output)}
    parts: dict[str, list[Any]] = {"output": [], "dq": [], "dk": [], "dv": []}
    if backward:
        real = [output[row, place] for row, place in places]
        gradients = torch.autograd.grad(real, inputs, [weight[row, place] for row, place in places])
        found.update(zip(("dq", "dk", "dv"), (joined(x.transpose(1, 2)) for x in gradients), strict=True))
    for row, place in places:
        q, k, v = sequence = [x[row, :, place].detach().cpu().double().requires_grad_(backward) for x in inputs]
        out = _reference(q, k, v, case.window)
        parts["output"].append(out.detach())
        if backward:
            gradients = torch.autograd.grad(out, sequence, weight[row, place].cpu().double())
            for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
                parts[name].append(x.transpose(0, 1))
    return found, {name: torch.cat(parts[name]) for name in found}


def _visible(length: int, window: int | None) -> Any:
    """A mask of shape ``(length, length)``: True where the query of the row attends to the key of the column."""
    import torch

    distance = torch.arange(length, device="cpu")[:, None] - torch.arange(length, device="cpu")[None]
    return (distance >= 0) & (distance < (window or length))


def _reference(q: Any, k: Any, v: Any, window: int | None) -> Any:
    """Attention of one sequence by the formula. Shares no code with any kernel.

    Args:
        q: of shape ``(heads, length, head dim)``.
        k: of shape ``(key heads, length, head dim)``.
        v: of shape ``(key heads, length, value dim)``.
        window: the sliding window, in tokens.

    Returns:
        The output, of shape ``(length, heads, value dim)``.
    """
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = ~_visible(q.shape[1], window)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)


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

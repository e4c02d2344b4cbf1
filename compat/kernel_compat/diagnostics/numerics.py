"""What works here: attention names and why they are usable or not, and each run against a float64 reference.

Nothing here imports torch or transformers before `run` is called.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from ..attention.defaults import Report, installed, registered_attention, status
from ..attention.registry import UPSTREAM, AttentionName, check_name, upstream_owner
from ..choosing.ladder import LADDER, Step, ladder
from ..choosing.torch_backend import use_torch_flash_backend
from ..environment import Environment
from ..environment import torch_flash_backend as active_backend
from ..errors import KernelCompatError, KernelUnavailableError, UnsupportedFeatureError
from ..kernels import Features, Kernel, known_kernels
from ..patching.report import ShimReport

__all__ = [
    "CaseResult",
    "CheckReport",
    "Explanation",
    "NameResult",
    "NameStatus",
    "UnknownNameError",
    "attention_names",
    "explain",
    "require_known",
    "run",
]

Owner = Literal["transformers", "kernel-compat", "registered"]
Verdict = Literal["right", "WRONG", "failed", "not usable"]
CaseVerdict = Literal["right", "WRONG", "failed", "skipped"]
#: Called with what runs next, how many cases are done and how many there are.
Progress = Callable[[str, int, int], None]


class UnknownNameError(KernelCompatError, ValueError):
    """No attention name of this environment; the message says which there are."""


@dataclass(frozen=True)
class NameStatus:
    """One attention name.

    Attributes:
        name: as it is written in ``attn_implementation=``.
        kernel: the name of the kernel behind it; None where transformers computes it itself.
        owner: who answers to the name in transformers. Where that is transformers and a kernel has the same name,
            the kernel is what `register_attention` takes by it.
        reasons: why its kernel is not usable here; empty when it is.
        install: the sentence that says how to install it, where that would help.
    """

    name: str
    kernel: str | None
    owner: Owner
    reasons: tuple[str, ...] = ()
    install: str = ""


@dataclass(frozen=True)
class ProviderStatus:
    """One package that has a kernel's functions; `reasons` as in `NameStatus`."""

    distribution: str
    module: str
    version: str | None
    features: Features
    reasons: tuple[str, ...]
    install: str


@dataclass(frozen=True)
class Explanation:
    """What is known of one name: `shims` are those that touch registered names in this environment, and `ladder` is what
    `policy.load_with_fallback` would try, the name itself first."""

    environment: Environment
    status: NameStatus
    forward: str | None
    state: str | None
    providers: tuple[ProviderStatus, ...]
    shims: tuple[ShimReport, ...]
    ladder: tuple[Step, ...]


@dataclass(frozen=True)
class TypeExplanation:
    """What the table of proofs says of a model type on the installed transformers.

    Attributes:
        transformers: the release; None where none is installed.
        verdict: the worst of its cases, ``equal`` where all are; None where the type isn't in the table.
        cases: for each verdict besides equal, the names of the cases that have it.
        ladder: what its model can be loaded with.
    """

    model_type: str
    transformers: str | None
    verdict: str | None
    cases: Mapping[str, tuple[str, ...]]
    ladder: tuple[Step, ...]


@dataclass(frozen=True)
class CaseResult:
    """One problem, computed by one name.

    Attributes:
        verdict: ``skipped`` where the kernel doesn't have the feature, ``failed`` where it raised.
        errors: of ``output``, ``dq``, ``dk`` and ``dv``: norm of the difference over norm of the reference. Without
            the gradients where the kernel has none.
        max_abs: the greatest absolute difference in any of them.
        tolerance: what the relative errors may be.
        reason: why not right, or why no gradients.
    """

    case: str
    verdict: CaseVerdict
    errors: Mapping[str, float] = field(default_factory=dict)
    max_abs: float | None = None
    tolerance: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class NameResult:
    """What became of one attention name.

    Attributes:
        reasons: why it is not usable, or why it failed as a whole.
        install: what would make it run, where an installation would.
        device: what it ran on, e.g. ``"cpu"``; empty when it didn't run.
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
    """All of it.

    Attributes:
        installation: what `install()` did; nothing was installed where torch or transformers can't be imported.
        problems: what is broken beside names and shims: a torch or transformers that is there and doesn't import.
        missing: what isn't there, and how to install it. Not a problem.
        torch_flash_backend: what torch's own flash attention ran on; None for the FlashAttention-2 it is built with.
    """

    installation: Report
    names: tuple[NameResult, ...]
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    torch_flash_backend: str | None = None

    @property
    def environment(self) -> Environment:
        return self.installation.environment

    @property
    def ok(self) -> bool:
        """Whether everything that is usable is right and every shim that is needed is in place."""
        wrong = any(result.verdict in ("WRONG", "failed") for result in self.names)
        return self.installation.ok and not self.problems and not wrong


def attention_names(environment: Environment) -> tuple[NameStatus, ...]:
    """Every kernel's name and every registered name, the kernels first."""
    registered = registered_attention()
    kernels = {name: registered[name].kernel if name in registered else k for name, k in known_kernels().items()}
    kernels.update((name, entry.kernel) for name, entry in registered.items())
    return tuple(_status(name, kernel, environment) for name, kernel in kernels.items())


def _status(name: str, kernel: Kernel, environment: Environment) -> NameStatus:
    provider = kernel.provider(environment)
    return NameStatus(
        name,
        kernel.name,
        _owner(name, environment),
        tuple(provider.unavailable_because(environment)),
        provider.install_hint(environment),
    )


def _owner(name: str, environment: Environment) -> Owner:
    entry = registered_attention().get(name)
    if entry is not None:
        return "kernel-compat" if entry.builtin else "registered"
    return "transformers" if upstream_owner(name, environment) else "kernel-compat"


def require_known(name: str) -> None:
    """Check that a name means something: a kernel, a registered name, one of transformers' own or of the hub's.

    Raises:
        UnknownNameError: it doesn't; the message says which there are.
        TypeError: `name` is not a string.
    """
    name = name.removeprefix("paged|") if isinstance(name, str) else name
    if isinstance(name, str) and "/" in name:
        return
    try:
        check_name(name)
    except ValueError as error:
        raise UnknownNameError(str(error)) from None
    known = {*known_kernels(), *registered_attention(), *UPSTREAM}
    if name in known:
        return
    if name in LADDER:
        raise UnknownNameError(f"{name!r} is a kernel that this version of kernel-compat doesn't have")
    raise UnknownNameError(f"{name!r} is no attention name here; there are: {', '.join(sorted(known))}")


def explain_type(model_type: str, name: str = LADDER[0]) -> TypeExplanation:
    """What is proven of a model type here, and the ladder from `name` down for it. Imports neither torch nor transformers."""
    from ..proving.table import WORSE, known

    environment = status().environment
    release = environment.version("transformers")
    cases = known(str(release)).get(model_type) if release else None
    verdict = None if cases is None else next((one for one in (*WORSE, "no recipe") if one in cases), "equal")
    steps = ladder(name, environment, model_type=model_type)
    return TypeExplanation(model_type, str(release) if release else None, verdict, cases or {}, steps)


def explain(name: str) -> Explanation:
    """What a name means here, and why it is or isn't usable. Imports neither torch nor transformers.

    Raises:
        UnknownNameError: nothing has that name, or nothing can have it.
        TypeError: `name` is not a string.
    """
    require_known(name)
    report = status()
    environment = report.environment
    steps = ladder(name, environment)
    name = name.removeprefix("paged|")
    known = {status.name: status for status in attention_names(environment)}
    if name not in known:
        return Explanation(environment, NameStatus(name, None, "transformers"), None, None, (), (), steps)
    entry = registered_attention().get(name)
    kernel = entry.kernel if entry else known_kernels()[name]
    return Explanation(
        environment,
        known[name],
        _qualified(entry.forward) if entry and entry.forward else None,
        report.attention.get(name),
        tuple(
            ProviderStatus(
                provider.distribution,
                provider.module,
                environment.packages.get(provider.distribution),
                provider.features_in(environment),
                tuple(provider.unavailable_because(environment)),
                provider.install,
            )
            for provider in kernel.providers
        ),
        tuple(shim for shim in report.shims if shim.state != "not needed"),
        steps,
    )


def _qualified(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)


# The problems. Short, and no length a multiple of a kernel's block.

HEADS, HEAD_DIM = 4, 64
Layout = Literal["batch", "padded left", "padded right", "position_ids", "cu_seq_lens"]


@dataclass(frozen=True)
class Case:
    """A causal attention problem: sequences of these lengths, and how transformers would hand them over."""

    name: str
    lengths: tuple[int, ...]
    layout: Layout = "batch"
    kv_heads: int = HEADS
    value_dim: int = HEAD_DIM
    window: int | None = None
    needs: tuple[str, ...] = ("causal",)

    def places(self) -> list[tuple[int, slice]]:
        """Row and positions of each sequence in the (rows, length) that the attention function is given."""
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

    Calls `install()` for as long as it takes, so that the shims are verified and applied as they are in use.

    Args:
        names: kernels' names, registered names and ``sdpa``, transformers' own; None for all of them.
        progress: called before each case and at the end.
        torch_flash_backend: activated for as long as it takes, as `use_torch_flash_backend` does; None leaves it as it is. One
            that can't be is a problem of the report.

    Raises:
        UnknownNameError: `names` holds one that isn't there.
        TypeError: `names` is a single string.
    """
    if isinstance(names, str):
        raise TypeError(f"names takes a list of attention names, not the string {names!r}")
    environment = Environment.detect()
    known = [status.name for status in attention_names(environment)]
    if unknown := [name for name in names or () if name not in (*known, "sdpa")]:
        raise UnknownNameError(f"{unknown[0]!r} can't be checked here; these can: {', '.join([*known, 'sdpa'])}")
    problems: list[str] = []
    missing: list[str] = []
    lacking = _lacking(environment, problems, missing)
    with ExitStack() as stack:
        report = _installation(stack, not lacking, problems)
        if torch_flash_backend is not None:
            try:
                stack.enter_context(use_torch_flash_backend(torch_flash_backend))
            except KernelUnavailableError as error:
                problems.append(str(error))
        backend = active_backend()
        if names is None:
            names = known if "transformers" in lacking or "torch" in lacking else [*known, "sdpa"]
        wanted = list(dict.fromkeys(names))
        steps = _Steps(progress, len(wanted))
        results = tuple(_check_name(name, report, lacking, steps) for name in wanted)
        steps.end()
    return CheckReport(report, results, tuple(problems), tuple(missing), backend)


def _lacking(environment: Environment, problems: list[str], missing: list[str]) -> dict[str, str]:
    """Which of torch and transformers can't be imported, with the reason in short; in full in the two lists."""
    lacking: dict[str, str] = {}
    for distribution, module in (("torch", "torch"), ("transformers", "transformers.modeling_utils")):
        if distribution not in environment.packages and distribution not in environment.imports:
            lacking[distribution] = f"{distribution} is not installed"
            missing.append(f"{distribution} is not installed: pip install {distribution}")
        elif not lacking:  # transformers without torch has no attention to speak of
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken install fails in any way it likes
                lacking[distribution] = f"{distribution} does not import"
                problems.append(f"{distribution} is installed but does not import ({_message(error)})")
    return lacking


def _installation(stack: ExitStack, wanted: bool, problems: list[str]) -> Report:
    """`installed()` until the stack unwinds, where that can work and the caller hasn't installed already."""
    report = status()
    if report.installed or not wanted:
        return report
    try:
        return stack.enter_context(installed())
    except Exception as error:
        problems.append(f"install() failed ({_message(error)})")
        return status()


class _Steps:
    def __init__(self, progress: Progress | None, count: int) -> None:
        self.progress = progress
        self.total = count * len(CASES)
        self.done = 0

    def __call__(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, self.done, self.total)
        self.done += 1

    def skip_name(self) -> None:
        self.done += len(CASES)

    def end(self) -> None:
        if self.progress is not None:
            self.progress("", self.total, self.total)


def _check_name(name: str, report: Report, lacking: Mapping[str, str], steps: _Steps) -> NameResult:
    environment = report.environment
    entry = registered_attention().get(name)
    kernel = entry.kernel if entry else known_kernels().get(name)
    kernel_name = kernel.name if kernel else None

    def unchecked(verdict: Verdict, reasons: Sequence[str], install: str = "") -> NameResult:
        steps.skip_name()
        return NameResult(name, kernel_name, verdict, tuple(reasons), install)

    state = report.attention.get(name, "pending")
    if state not in ("available", "pending"):
        return unchecked("failed", [f"refused: {name} {state}"])
    if kernel is not None:
        unusable = kernel.unavailable_because(environment)
        install = kernel.provider(environment).install_hint(environment)
        reasons = [reason for reason in unusable if reason != lacking.get("torch")]
        if "torch" in lacking:
            reasons.append(lacking["torch"])
        if reasons:
            return unchecked("not usable", reasons, install)
    elif lacking:
        return unchecked("not usable", list(lacking.values()))
    try:
        subject = _Sdpa() if kernel is None else _Registered(name, kernel, entry)
    except KernelUnavailableError as error:
        return unchecked("not usable", error.reasons, error.install)
    except Exception as error:
        return unchecked("failed", [_message(error)])
    place = _place(subject.features)
    if place is None:
        wanted = " or ".join(subject.features.devices)
        return unchecked("not usable", [f"it runs on {wanted}, and {_why_no_cuda()}"])
    device, dtype = place
    cases = []
    for case in CASES:
        steps(f"{name}: {case.name}")
        cases.append(_check_case(case, subject, device, dtype))
    verdicts = {case.verdict for case in cases}
    worst_first: tuple[Literal["WRONG", "failed", "right"], ...] = ("WRONG", "failed", "right")
    verdict: Verdict = next((verdict for verdict in worst_first if verdict in verdicts), "not usable")
    why = tuple(dict.fromkeys(case.reason for case in cases)) if verdict == "not usable" else ()
    return NameResult(name, kernel_name, verdict, why, "", device, str(dtype).removeprefix("torch."), tuple(cases))


class _Registered:
    """A kernel behind the forward that transformers calls for a name."""

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
            return "its own mask function decides what it is given"
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
    """transformers' own function over torch's scaled_dot_product_attention: what others are compared with."""

    def __init__(self) -> None:
        self.name = "sdpa"
        self.features = Features(dtypes=("float32",), devices=("cuda", "cpu"))
        functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        self.forward = functions["sdpa"]
        self.own_forward = False

    def skip_because(self, case: Case) -> str | None:
        return "it is given masks alone" if case.layout == "cu_seq_lens" else None

    def mask_and_options(self, case: Case, visible: Any) -> tuple[Any, dict[str, Any]]:
        plain = case.layout == "batch" and case.window is None
        return None if plain else visible[:, None], {}


def _place(features: Features) -> tuple[str, Any] | None:
    """A device the kernel runs on, CUDA where there is one, and a dtype it takes; None where there is none."""
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
    """What the relative error may be.

    The inputs are exact in `dtype`, so the error of a right kernel is rounding. With 16 bits it rounds probabilities,
    score gradients and results, which comes to 0.8 of the unit roundoff u (2^-11 in float16, 2^-8 in bfloat16), and
    sums in another order add little: 4u, 2e-3 and 1.6e-2. In float32 it is a few times 2^-24: 1e-5. Wrong is far from
    either: a boundary or window off by one is 0.2 and more, one key too many or too few for one query mostly 2e-2.
    """
    import torch

    if dtype in (torch.float16, torch.bfloat16):
        return 2 * float(torch.finfo(dtype).eps)  # eps is 2u
    # TF32, which NVIDIA's containers switch on, has 10 bits of fraction, as float16.
    if device.startswith("cuda") and torch.get_float32_matmul_precision() != "highest":
        return 4 * 2.0**-11
    return 1e-5


def _check_case(case: Case, subject: _Registered | _Sdpa, device: str, dtype: Any) -> CaseResult:
    import torch

    if reason := subject.skip_because(case):
        return CaseResult(case.name, "skipped", reason=reason)
    backward = subject.features.backward
    try:
        # The caller's no_grad, inference mode and autocast are not what is being checked.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(backward),
            torch.autocast(torch.device(device).type, enabled=False),
        ):
            found, expected = _compute(case, subject, device, dtype, backward)
    except UnsupportedFeatureError as error:
        # A forward that isn't ours may refuse what the kernel behind it can do; ours must not.
        return CaseResult(case.name, "skipped" if subject.own_forward else "failed", reason=_message(error))
    except Exception as error:
        return CaseResult(case.name, "failed", reason=_message(error))
    errors, max_abs = {}, 0.0
    for what, x in found.items():
        difference = x - expected[what]
        errors[what] = float(difference.norm() / expected[what].norm())
        greatest = float(difference.abs().max())
        max_abs = greatest if math.isnan(greatest) else max(max_abs, greatest)
    tolerance = _tolerance(device, dtype)
    wrong = [what for what, error in errors.items() if not error <= tolerance]  # NaN is wrong
    reason = f"wrong: {', '.join(wrong)}" if wrong else "" if backward else "no backward: forward only"
    return CaseResult(case.name, "WRONG" if wrong else "right", errors, max_abs, tolerance, reason)


def _compute(
    case: Case, subject: _Registered | _Sdpa, device: str, dtype: Any, backward: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Output and gradients at the real tokens, on the CPU in float64: by the attention function, and by the oracle."""
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
    oracle: dict[str, list[Any]] = {"output": [], "dq": [], "dk": [], "dv": []}
    if backward:
        real = [output[row, place] for row, place in places]
        gradients = torch.autograd.grad(real, inputs, [weight[row, place] for row, place in places])
        found.update(zip(("dq", "dk", "dv"), (joined(x.transpose(1, 2)) for x in gradients), strict=True))
    for row, place in places:
        q, k, v = sequence = [x[row, :, place].detach().cpu().double().requires_grad_(backward) for x in inputs]
        out = _oracle(q, k, v, case.window)
        oracle["output"].append(out.detach())
        if backward:
            gradients = torch.autograd.grad(out, sequence, weight[row, place].cpu().double())
            for what, x in zip(("dq", "dk", "dv"), gradients, strict=True):
                oracle[what].append(x.transpose(0, 1))
    return found, {what: torch.cat(oracle[what]) for what in found}


def _visible(length: int, window: int | None) -> Any:
    import torch

    distance = torch.arange(length, device="cpu")[:, None] - torch.arange(length, device="cpu")[None]
    return (distance >= 0) & (distance < (window or length))


def _oracle(q: Any, k: Any, v: Any, window: int | None) -> Any:
    """One sequence, by the formula: (heads, length, dim) to (length, heads, dim). Shares no code with any kernel."""
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = ~_visible(q.shape[1], window)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)


def _stub(name: str, case: Case) -> Any:
    """What attention functions ask of a model's attention module."""
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


def _message(error: BaseException) -> str:
    """An exception on one line; compilers of kernels write pages."""
    text = " ".join(str(error).split())
    if len(text) > 400:
        text = text[:397] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

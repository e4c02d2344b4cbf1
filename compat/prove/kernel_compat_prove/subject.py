"""A subject: a tiny model built twice with the same weights, with eager attention and under the attention name to prove."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernel_compat
from kernel_compat.attention.roles import DECODER_TOKENS, MASK, POSITIONS, TOKENS, USE_CACHE, Role
from kernel_compat.errors import KernelCompatError
from kernel_compat.kernels import Functions, Kernel
from kernel_compat.versions import within

from .images import image_inputs
from .inputs import LENGTH, Fresh, candidates, parameters, sound_padding, vocabulary_of
from .weights import perturbed, randomize

__all__ = [
    "CountedKernel",
    "NoRecipeError",
    "NotApplicableError",
    "RefusedToLoadError",
    "Subject",
    "UntestedError",
    "main_output",
]

#: Scales of the random weights, in the order of trying; None keeps the initial weights.
_SCALES = (2.0, 1.0, 0.5, None)
#: Logits of a larger magnitude are masked.
_MASKED = 1e30
_NOT_FINITE = "its output is zero or isn't finite"
#: The least share of the output that must come from attention. Below it, an error in attention barely changes the output.
_LEAST_SHARE = 1e-2
#: transformers' own refusals, by their text.
_NAMES_ATTENTION = re.compile(r"attn_implementation|[Ff]lash attention cannot")
_LIBRARY = Path(kernel_compat.__file__).parent
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: The most inputs that are tried. A limit of time would let a slow machine find fewer, and the ranks of a job differ.
_MOST_TRIES = 3000
#: The most parameters of a model that can be proven in a second.
_LARGEST = 40_000_000


class NoRecipeError(Exception):
    """No tiny model could be made, or no inputs were found that it takes."""


class NotApplicableError(Exception):
    """The model lacks what a case is about."""


class UntestedError(Exception):
    """The prover can't make the inputs of a case."""


class RefusedToLoadError(Exception):
    """The model can't be built under the name; the only argument is the error."""


class CountedKernel:
    """A copy of a kernel that counts its calls and can be silenced, to find models that never call it or ignore its output.

    It refuses masks that not every kernel has, except within `with_masks`: a proof without them holds for every kernel.

    Attributes:
        kernel: the copy; it computes the same as the original.
        calls: number of calls of its functions.
        silent: whether its outputs are multiplied by zero.
    """

    def __init__(self, original: Kernel) -> None:
        self.calls = 0
        self.silent = False
        functions = original.load()
        self.kernel = Kernel(original.name, original.providers)
        self._features = original.features
        paged = functions.attend_paged
        self._counted = (self._count(functions.attend), None if paged is None else self._count(paged))
        self._masks = functions.masks
        self._load(masks=False)

    @contextmanager
    def with_masks(self) -> Iterator[None]:
        """Compute masks of any kind as well, within the block."""
        self._load(masks=True)
        try:
            yield
        finally:
            self._load(masks=False)

    def _load(self, masks: bool) -> None:
        self.kernel.preload(self._features, Functions(*self._counted, masks=masks and self._masks))

    def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            output = function(*args, **kwargs)
            return output * 0 if self.silent else output

        return call


class Subject:
    """A tiny model under proof.

    Attributes:
        eager: the model with eager attention.
        named: the model with the same weights under the attention name.
        inputs: keyword arguments of one forward; rows of `LENGTH` tokens for a model of tokens.
        config: the tiny config.
        attention_share: the relative change of the output without attention; None if it can't be measured.
    """

    def __init__(
        self, model_class: type[Any], config: Any, attn_implementation: str, counted: CountedKernel | None = None
    ) -> None:
        self.config = config
        self.model_class = model_class
        try:
            with torch.device("meta"):
                skeleton = build(model_class, config, attn_implementation)
        except Exception as error:
            if is_refusal(error):
                raise RefusedToLoadError(error) from error
            skeleton = nn.Module()  # it computes with its weights as it is built
        if (size := sum(p.numel() for p in skeleton.parameters())) > _LARGEST:
            raise NoRecipeError(f"the smallest model has {size:,} parameters")
        try:
            self.eager = build(model_class, config, "eager")
        except Exception as error:
            raise NoRecipeError(f"eager: {describe(error)}") from error
        self.names, self.takes_any = parameters(self.eager)
        try:
            self.named = build(model_class, config, attn_implementation)
        except Exception as error:
            raise RefusedToLoadError(error) from error
        self.inputs, self.attention_share = self._working(counted)
        self.known: dict[Any, Tensor] = {}

    def against(self, attn_implementation: str) -> Subject:
        """The same subject with another attention instead of eager."""
        other = copy.copy(self)
        other.eager = build(self.model_class, self.config, attn_implementation)
        other.eager.load_state_dict(self.named.state_dict())
        other.known = {}
        return other

    def once(self, key: Any, run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """The function `run`, memoised for the eager model: many cases expect the same outputs."""

        def known(model: Any) -> Tensor:
            if model is not self.eager:
                return run(model)
            if key not in self.known:
                self.known[key] = run(model)
            return self.known[key]

        return known

    def _working(self, counted: CountedKernel | None) -> tuple[dict[str, Any], float | None]:
        """Find inputs, and weights under which attention changes the output; load the weights into both models."""
        problems: dict[str, None] = {}
        tries = itertools.count()
        begun = copy.deepcopy(self.eager.state_dict())
        best: tuple[float, dict[str, Any], dict[str, Any]] | None = None
        for scale in _SCALES:
            self.eager.load_state_dict(begun)
            if scale is not None:
                randomize(self.eager, scale)
            inputs = self._find_inputs(problems, tries)
            if inputs is None and _NOT_FINITE not in problems:
                break
            if inputs is None:
                continue
            weights = copy.deepcopy(self.eager.state_dict())
            self.named.load_state_dict(weights)
            share = self._share_of_attention(counted, inputs)
            if share is None or share >= _LEAST_SHARE:
                return inputs, share
            if best is None or share > best[0]:
                best = share, inputs, weights
        if best is None:
            reasons = "; ".join(list(problems)[:3]) or "the forward takes nothing that is known"
            raise NoRecipeError(f"no inputs found: {reasons}")
        for model in (self.eager, self.named):
            model.load_state_dict(best[2])
        return best[1], best[0]

    def _find_inputs(self, problems: dict[str, None], tries: Iterator[int]) -> dict[str, Any] | None:
        """The first inputs that the eager model takes; None, with reasons added to `problems`, if it takes none."""
        untried = itertools.chain(candidates(self.eager), image_inputs(self.eager))
        before = itertools.takewhile(lambda inputs: next(tries) < _MOST_TRIES, untried)
        for inputs, output in self._taken(before, problems):
            if bool(output.isfinite().all()) and float(output.abs().max()) > 0:
                return inputs
            problems.setdefault(_NOT_FINITE)
            break
        return None

    def _taken(
        self, untried: Iterable[dict[str, Any]], problems: dict[str, None]
    ) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yields inputs that the eager model takes, with its output; with ``use_cache=False`` if no cache can be made."""
        uses_cache = USE_CACHE.spelled(self.names)
        for inputs in untried:
            for arguments in (inputs, {**inputs, uses_cache: False}) if uses_cache else (inputs,):
                try:
                    output = main_output(forward(self.eager, arguments))
                except Exception as error:
                    problems.setdefault(describe(error))
                    continue
                yield arguments, output
                break

    def _share_of_attention(self, counted: CountedKernel | None, inputs: dict[str, Any]) -> float | None:
        """The relative change of the output without attention; None if it can't be measured."""
        if counted is None:
            return None
        calls = counted.calls
        try:
            expected = main_output(forward(self.named, inputs))
            if counted.calls == calls:
                return None
            counted.silent = True
            return distance(main_output(forward(self.named, inputs)), expected)
        except Exception:  # the cases will show the error
            return None
        finally:
            counted.silent = False

    def takes(self, argument: str | Role) -> bool:
        """Whether the model's forward takes this argument."""
        return self.takes_any or not self.names.isdisjoint(getattr(argument, "spellings", (argument,)))

    def spell(self, values: Mapping[Role, Any]) -> dict[str, Any]:
        """Arguments by the names that the model's forward has for them, or the forwards that it passes ``**kwargs`` on to."""
        return {role.spelled(self.names) or role.named(self._inner_names): value for role, value in values.items()}

    def inputs_with(self, values: Mapping[Role, Any]) -> dict[str, Any]:
        """The subject's inputs, with these arguments replaced or added."""
        return {**self.inputs, **self.spell(values)}

    @cached_property
    def _inner_names(self) -> frozenset[str]:
        return frozenset().union(*(parameters(module)[0] for module in self.eager.modules()))

    @cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        return vocabulary_of(self.config)

    @property
    def shape(self) -> tuple[int, int]:
        """The inputs' number of rows and of tokens in a row."""
        if not self.has_tokens:
            raise NotApplicableError("it takes no tokens")
        rows, length = TOKENS.of(self.inputs).shape[:2]
        return rows, length

    @cached_property
    def has_tokens(self) -> bool:
        """Whether the model takes token ids."""
        return TOKENS.spelled(self.inputs) is not None

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether the model takes token ids for a decoder of its own."""
        return DECODER_TOKENS.spelled(self.inputs) is not None

    @cached_property
    def has_sequence(self) -> bool:
        """Whether the model has an output for every token."""
        if not self.has_tokens:
            return False
        output = main_output(forward(self.eager, self.inputs))
        return output.ndim >= 3 and tuple(output.shape[:2]) == tuple(TOKENS.of(self.inputs).shape)

    @cached_property
    def is_causal(self) -> bool:
        """Whether the outputs of the first tokens are independent of the last token, measured with eager attention."""
        if not self.has_sequence or self.is_encoder_decoder:
            return False
        ids = TOKENS.of(self.inputs)
        other = ids.clone()
        other[:, -1] = torch.where(ids[:, -1] == 7, 8, 7)
        first, second = (main_output(forward(self.eager, self.inputs_with({TOKENS: i}))) for i in (ids, other))
        return not torch.equal(first, second) and distance(second[:, :-1], first[:, :-1]) < 1e-4

    @cached_property
    def has_positions_of_its_own(self) -> bool:
        """Whether the model embeds positions but ignores the argument for them, which it takes only by ``**kwargs``."""
        if POSITIONS.spelled(self.names):
            return False
        embeds = any("position" in type(m).__name__.lower() for m in self.eager.modules())
        positions = torch.arange(LENGTH).flip(0)[None].expand(self.shape[0], -1)
        with_positions = main_output(forward(self.eager, self.inputs_with({POSITIONS: positions})))
        return embeds and torch.equal(main_output(forward(self.eager, self.inputs)), with_positions)

    @cached_property
    def has_sections(self) -> bool:
        """Whether rotary channels are divided into sections of time, height and width."""
        return "mrope_section" in str(self.config.to_dict())

    @cached_property
    def inputs_with_images(self) -> dict[str, Any] | None:
        """Inputs of text with an image in every row; None if the model takes none."""
        if not self.has_tokens or "pixel_values" in self.inputs:
            return None
        taken = self._taken(itertools.islice(image_inputs(self.eager), 8), {})
        return next((inputs for inputs, output in taken if bool(output.isfinite().all())), None)

    @cached_property
    def sound_frames(self) -> int | None:
        """The number of columns of a padding mask for sound; None if the model takes no such mask."""
        names = ("input_features", "input_values")
        sound = next((self.inputs[name] for name in names if name in self.inputs), None)
        if self.has_tokens or MASK.spelled(self.names) is None or sound is None:
            return None
        for length in dict.fromkeys(reversed(sound.shape[1:])):
            try:
                forward(self.eager, self.inputs_with({MASK: sound_padding(len(sound), length)}))
                return int(length)
            except Exception:  # the mask is over another dimension
                continue
        return None

    @cached_property
    def perturbed(self) -> Any:
        """The eager model with rounding errors in its weights, to measure how sensitive its outputs are."""
        model = copy.deepcopy(self.eager)
        model.load_state_dict(perturbed(self.eager))
        return model


def build(model_class: type[Any], config: Any, attn_implementation: str) -> Any:
    """A model as ``from_config`` of the auto classes builds it, in float32 and in evaluation mode."""
    import transformers

    torch.default_generator.manual_seed(0)
    config = copy.deepcopy(config)
    make = getattr(model_class, "_from_config", None)
    if make is None:
        raise NoRecipeError(f"{model_class.__name__} is no model")
    dtype = "dtype" if within(transformers.__version__, ">=4.56") else "torch_dtype"
    model = make(config, attn_implementation=attn_implementation, **{dtype: torch.float32})
    for module in model.modules():
        if isinstance(module, _DROPOUTS):  # a dropout whose probability is not in the config
            module.p = 0.0
    return model.float().eval()


def forward(model: Any, inputs: dict[str, Any], gradients: bool = False) -> Any:
    """The model's output, with the same random seed each time."""
    torch.default_generator.manual_seed(0)
    arguments = {name: value.make() if isinstance(value, Fresh) else value for name, value in inputs.items()}
    with torch.set_grad_enabled(gradients):
        return model(**arguments)


def main_output(output: Any) -> Tensor:
    """An output's logits, else its hidden states, else its first floating-point tensor."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state", "prediction_logits", "logits_per_image", "pooler_output"):
        value = output.get(name) if hasattr(output, "get") else None
        if isinstance(value, Tensor):
            # The masked logits of tokens that must not be predicted would dominate the norm.
            return value.masked_fill(value.abs() > _MASKED, 0)
    values = list(output.values() if hasattr(output, "values") else output)
    values += [inner for value in values if isinstance(value, (list, tuple)) for inner in value]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return value
    raise TypeError(f"{type(output).__name__} has no tensor of numbers")


def distance(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of the expected values."""
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    difference = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return difference if difference == difference else float("inf")


def describe(error: BaseException) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def is_refusal(error: BaseException) -> bool:
    """Whether this library raised the error on purpose, or transformers refused the attention name."""
    if isinstance(error, KernelCompatError):
        return True
    if isinstance(error, ValueError) and _NAMES_ATTENTION.search(str(error)):
        return True
    if not isinstance(error, (ValueError, TypeError, ImportError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").startswith("raise") and _is_ours(frames[-1].filename)


def _is_ours(filename: str) -> bool:
    """Whether a file is of the library, its shims or its kernel selection, and not of the prover."""
    path = Path(filename)
    return "kernel_compat_shims" in path.parts or "kernel_compat_ops" in path.parts or _LIBRARY in path.parents


@contextmanager
def training(model: Any) -> Iterator[None]:
    """Set the model to training mode for the block, except for norms over the batch."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    try:
        yield
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)

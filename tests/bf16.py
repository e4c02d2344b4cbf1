"""Models in half precision, compared with the same weights in float32 under eager attention.

The bound is eager's own error in half precision: a kernel computes the softmax in float32 and rounds its output once, so
its error may be at most twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from tiny import TRANSFORMERS, VOCAB, distance, load
from torch import Tensor

#: The name of `from_pretrained`'s argument for the dtype.
DTYPE = "dtype" if Version("4.56") <= TRANSFORMERS else "torch_dtype"

#: The largest error of eager itself: above it, a bound of twice that error can't tell a correct result from a wrong one.
TELLING = 0.25


class Three:
    """The same weights three times: float32 eager (the truth), eager in `dtype` (the yardstick), and `dtype` under test.

    Args:
        path: a saved model.
        name: the attention under test.
        auto: the class whose `from_pretrained` loads it.
        dtype: of the weights. With float32 all three are equal, and `judge`'s `run` has to lower the precision.
    """

    def __init__(
        self,
        path: Path,
        name: Any,
        auto: Any = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        options = {DTYPE: dtype}
        self.yardstick = load(path, "eager", auto, **options).to(device)
        self.ours = load(path, name, auto, **options).to(device)
        self.truth = load(path, "eager", auto).to(device)
        with torch.no_grad():  # the truth has the rounded weights
            for exact, rounded in zip(self.truth.parameters(), self.yardstick.parameters(), strict=True):
                exact.copy_(rounded)

    def judge(self, run: Callable[[Any], Tensor], backward: bool = True) -> None:
        """Compare the logits of the three models, and the gradients of their weight matrices.

        Args:
            run: computes the logits to compare with one of the models.
        """
        (truth, true), (yardstick, rough), (ours, found) = (
            measured(model, run, backward) for model in (self.truth, self.yardstick, self.ours)
        )
        require_as_close(ours, yardstick, truth)
        assert true.keys() == rough.keys() == found.keys()
        if backward:
            # Each gradient is normalised, so that all count equally; they are compared together, as a single ratio is noisy.
            norms = {name: gradient.norm() for name, gradient in true.items()}
            joined = (torch.cat([(g[name] / norms[name]).flatten() for name in norms]) for g in (found, rough, true))
            require_as_close(*joined)

    def judge_generated(
        self,
        inputs: Mapping[str, Any],
        options: Mapping[str, Any],
        read: Callable[[Any, Tensor], Tensor],
    ) -> Any:
        """Compare the logits from which `generate` chose its tokens.

        Args:
            inputs, options: the arguments of `generate`.
            read: computes the logits of the new tokens with one of the models in one forward over all tokens.

        Returns:
            The output of `generate`.
        """
        out = self.ours.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
        with torch.no_grad():
            truth, yardstick = (read(model, out.sequences).float() for model in (self.truth, self.yardstick))
        require_as_close(torch.stack(out.logits, 1).float(), yardstick, truth)
        return out


def llama(name: str, device: str = "cuda") -> Any:
    """A Llama in bfloat16 that is large enough to measure its time and memory, under an attention name."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    dtype = {DTYPE: torch.bfloat16}
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name, **dtype).to(device)


def measured(model: Any, run: Callable[[Any], Tensor], backward: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits and, by name, the gradient of each weight matrix, for a loss that depends on every logit."""
    with torch.set_grad_enabled(backward):
        logits = run(model).float()
    if not backward:
        return logits, {}
    model.zero_grad()
    logits.square().mean().backward()
    # Without biases and norms: a key's bias has no effect without rotary embeddings, so its gradient is only rounding error.
    matrices = {n: p.grad.float() for n, p in model.named_parameters() if p.ndim > 1 and p.grad is not None}
    assert matrices
    return logits.detach(), matrices


def require_as_close(found: Tensor, yardstick: Tensor, truth: Tensor) -> None:
    """Assert that a result's error is at most twice the yardstick's."""
    assert found.shape == truth.shape
    own = distance(yardstick, truth)
    assert own < TELLING
    error = distance(found, truth)
    assert error <= 2 * own, f"off by {error:.2e}, and eager in half precision by {own:.2e}"

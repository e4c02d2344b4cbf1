"""Random weights that make mistakes visible: attention patterns are sharp, and nothing is zero that could hide a layer."""

from __future__ import annotations

import re

import torch
from torch import nn

__all__ = ["perturbed", "randomize"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
#: Parameters of one dimension that scale a branch, and often start at zero.
_BRANCH_SCALES = re.compile(r"gate|gamma|lambda|layer_?scale|logit_scale|alpha")


def randomize(model: nn.Module, scale: float = 2.0, seed: int = 0) -> None:
    """Overwrite the weights in place. Norms and biases stay as they are.

    Args:
        scale: the standard deviation of what a linear layer makes of unit inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.ndim > 1:
                owner = owners[name.rpartition(".")[0]]
                convolution = isinstance(owner, _CONVOLUTIONS)
                fan_in = parameter.shape[1:].numel() if convolution else parameter.shape[-1]
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                if not name.endswith("A_log"):
                    # Convolutions follow one another without norms.
                    parameter.copy_(values * ((1.0 if convolution else scale) / max(fan_in, 1) ** 0.5))
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif not bool(parameter.isfinite().all()):
                parameter.fill_(1.0)
            elif isinstance(owners[name.rpartition(".")[0]], nn.BatchNorm2d) and name.endswith("weight"):
                parameter.fill_(1.0)  # some begin near zero, and one follows another
            elif _BRANCH_SCALES.search(name) and float(parameter.abs().max()) < 0.05:
                parameter.fill_(0.5)


def perturbed(model: nn.Module, relative: float = 1e-7, seed: int = 1) -> dict[str, torch.Tensor]:
    """The model's weights with random relative errors of float32's rounding size, as a state dict."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + relative * torch.randn(tensor.shape, generator=generator))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in model.state_dict().items()
    }

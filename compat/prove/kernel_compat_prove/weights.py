"""Random weights that make errors visible: attention is sharp, and no scale that could hide a layer is zero."""

from __future__ import annotations

import re

import torch
from torch import nn

__all__ = ["perturbed", "randomize"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
#: Names of one-dimensional parameters that scale a branch and often start at zero.
_BRANCH_SCALES = re.compile(r"gate|gamma|lambda|layer_?scale|logit_scale|alpha")


def randomize(model: nn.Module, scale: float = 2.0) -> None:
    """Overwrite a model's weights in place, except norms and biases.

    Args:
        model: its floating-point parameters of two or more dimensions are overwritten.
        scale: the standard deviation of a linear layer's output for inputs of unit variance.
    """
    generator = torch.Generator().manual_seed(0)
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
                    # There are no norms between convolutions.
                    parameter.copy_(values * ((1.0 if convolution else scale) / max(fan_in, 1) ** 0.5))
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif not bool(parameter.isfinite().all()):
                parameter.fill_(1.0)
            elif isinstance(owners[name.rpartition(".")[0]], nn.BatchNorm2d) and name.endswith("weight"):
                parameter.fill_(1.0)  # some start near zero, several in a row
            elif _BRANCH_SCALES.search(name) and float(parameter.abs().max()) < 0.05:
                parameter.fill_(0.5)


def perturbed(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict of the model's weights with random relative errors of the size of float32 rounding."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor * (1 + 1e-7 * torch.randn(tensor.shape, generator=generator))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in model.state_dict().items()
    }

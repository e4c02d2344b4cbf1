"""Orders and numbers of sequences, against torch's sort and the definition; compiled, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_compat.kernels.indices import sequence_numbers, true_first


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("call", [lambda function: function, compiled])
@pytest.mark.parametrize("shape", [(1,), (9,), (3, 7), (2, 1, 5, 6), (2, 0)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_true_first(shape: tuple[int, ...], share: float, call: Callable[..., Any]) -> None:
    mask = torch.rand(shape) < share
    for given in (mask, mask.mT if len(shape) > 1 else mask):
        order, place = call(true_first)(given)
        assert torch.equal(order, torch.argsort(~given, dim=-1, stable=True))
        assert torch.equal(place, torch.argsort(order, dim=-1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [[0, 4], [0, 3, 3, 7], [0, 0, 5], [0, 3, 8, 6, 9]])
def test_sequence_numbers(offsets: list[int], dtype: torch.dtype) -> None:
    """The last of them decrease, as those of transformers 5.0 to 5.5 do for padding."""
    tokens = max(offsets) + 2
    found = sequence_numbers(torch.tensor(offsets, dtype=dtype), tokens).tolist()
    assert found == [sum(max(offsets[: i + 1]) <= token for i in range(1, len(offsets))) for token in range(tokens)]

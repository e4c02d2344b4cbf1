"""Repairs for Triton's interpreter: triton 3.6's differs from devices, or refuses code that devices run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

assert triton.knobs.runtime.interpret


def _repair() -> None:
    convert, patch, wrap = interpreter._convert_float, interpreter._patch_lang_tensor, interpreter._implicit_cvt

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        """Round float32 to bfloat16; the interpreter truncates it."""
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.from_numpy(np.array(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def indexing(tensor: Any, scope: Any) -> None:
        """Give tensors `__index__`: newer numpy refuses them as bounds of loops."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wrapping(value: Any) -> Any:
        """Wrap Python floats as tensors, so that they have methods."""
        if not isinstance(value, float):
            return wrap(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._convert_float, interpreter._patch_lang_tensor = rounding, indexing
    interpreter._implicit_cvt = wrapping


_repair()

"""Fixtures for kernels that need a GPU. Tests are skipped without one; run them by hand on a GPU (see CONTRIBUTING.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
import transformers
from tiny import installation

import kernel_compat

#: The kernels by name, with the cells of the matrix that test them; torch's also with each backend besides its default.
CELLS = {
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
    "flash_attention_4": "fa4",
    "flash_attention_torch": "torch",
    "flash_attention_torch on FA3": "fa3",
    "flash_attention_torch on FA4": "fa4",
    "flash_attention_flex": "torch",
}

#: The value of the matrix' axis; none outside of the matrix, where all kernels are tested.
CELL = json.loads(os.environ.get("KERNEL_COMPAT_MATRIX_AXES", "{}")).get("flash_attention")
KERNELS = [kernel for kernel, cell in CELLS.items() if CELL in (None, cell)]


def require(kernel: str) -> None:
    """Skip the test with the reason if a kernel can't run."""
    reasons = kernel_compat.known_kernels()[kernel].unavailable_because(kernel_compat.Environment.detect())
    if reasons:
        pytest.skip(f"{kernel}: {'; '.join(reasons)}")


@pytest.fixture
def usable() -> Callable[[str], None]:
    return require


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    kernel, _, backend = str(request.param).partition(" on ")
    require(kernel)
    if not backend:
        yield kernel
        return
    with kernel_compat.installed():
        try:
            handle = kernel_compat.use_torch_flash_backend(backend)  # type: ignore[arg-type]
        except kernel_compat.KernelUnavailableError as error:
            pytest.skip(str(error))
        with handle:
            yield kernel


@pytest.fixture
def name(kernel: str) -> Iterator[str]:
    """A private name for the kernel, with the library installed."""
    transformers.logging.set_verbosity_error()
    private = f"mine_{kernel}"
    with installation(private, kernel):
        yield private


@pytest.fixture
def with_backward(kernel: str) -> None:
    """Skip the test of a kernel without a backward."""
    if not kernel_compat.known_kernels()[kernel].features.backward:
        pytest.skip(f"{kernel} has no backward")

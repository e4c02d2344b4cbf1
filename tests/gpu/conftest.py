"""The kernels that need a GPU. Skipped where there is none; run by hand on one (see CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import transformers

import kernel_compat

KERNELS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def require(kernel: str) -> None:
    """Skip the test where a kernel can't run, and say why."""
    reasons = kernel_compat.known_kernels()[kernel].unavailable_because(kernel_compat.Environment.detect())
    if reasons:
        pytest.skip(f"{kernel}: {'; '.join(reasons)}")


@pytest.fixture
def usable() -> Callable[[str], None]:
    return require


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


@pytest.fixture
def name(kernel: str) -> Iterator[str]:
    """A private name for the kernel, installed."""
    transformers.logging.set_verbosity_error()
    private = f"mine_{kernel}"
    kernel_compat.register_attention(private, kernel=kernel)
    try:
        with kernel_compat.installed() as report:
            assert report.ok, report
            yield private
    finally:
        kernel_compat.unregister_attention(private)

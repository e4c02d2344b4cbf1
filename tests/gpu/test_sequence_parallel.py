"""The cases of tests/integration/test_sequence_parallel.py on two GPUs or on one that both ranks share, and each kernel that runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import KERNEL, assert_same_as_alone, assert_same_as_one_process, cases, start

import kernel_compat

pytestmark = pytest.mark.gpu

ALONE = "my_flash_on_one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[dict[str, Any]]:
    kernel_compat.register_attention(ALONE, KERNEL)
    with kernel_compat.installed():
        yield start(folder, "cuda", 2)[2]
    kernel_compat.unregister_attention(ALONE)


@pytest.mark.parametrize("name", cases(2))
def test_same_numbers_as_one_process(found: dict[str, Any], folder: Path, name: str) -> None:
    assert_same_as_one_process(found, folder, name, ALONE, "cuda")


def test_functions(found: dict[str, Any]) -> None:
    assert_same_as_alone(found)


def test_skipped(found: dict[str, Any]) -> None:
    assert found["skipped"] == [0, 0, 0]

"""The reasons in axes.toml for cells that can't exist, compared with what is published.

A check says for any cell whether its reason holds. It has to hold in exactly the cells that the exclusion names, so a test fails when
upstream lifts a limit, and when a bound is wrong.
"""

from __future__ import annotations

import ast
import io
import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from email import message_from_bytes
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from remotezip import RemoteZip  # type: ignore[import-untyped]

from compat_matrix import axes
from compat_matrix.cells import Cell
from compat_matrix.errors import MatrixError
from kernel_compat_atlas import index, releases
from kernel_compat_doctor import shared_object

OWN = axes.load(axes.OWN)

# What is published ---------------------------------------------------------------------------------------------------


@cache
def published(distribution: str, minor: str = "") -> index.File:
    """The file of the newest patch of a minor release, or of the newest release, which may be a pre-release."""
    available = index.Index().files(distribution)
    (release,) = (
        releases.select(distribution, minor, available) if minor else releases.covered(distribution, (), available)
    )
    return release.file


@cache
def wheel(distribution: str, minor: str = "") -> RemoteZip:
    """A wheel, of which only the members that are read are fetched."""
    upstream = index.Index()
    return RemoteZip(upstream.fetchable(published(distribution, minor)), session=upstream.session)


def members(distribution: str, minor: str, pattern: str) -> bytes:
    """The members of a wheel whose paths match, one after the other."""
    archive = wheel(distribution, minor)
    paths = [path for path in archive.namelist() if re.fullmatch(pattern, path)]
    assert paths, f"{distribution} {minor} has no {pattern}"
    return b"\n".join(map(archive.read, paths))


@cache
def setup_of_fa2() -> str:
    with io.BytesIO() as content:
        index.Index().download(published("flash-attn"), content)
        content.seek(0)
        with tarfile.open(fileobj=content) as archive:
            (path,) = (path for path in archive.getnames() if re.fullmatch("[^/]+/setup.py", path))
            setup = archive.extractfile(path)
            assert setup is not None
            return setup.read().decode()


@cache
def extension_of_fa3() -> shared_object.SharedObject:
    with NamedTemporaryFile(suffix=".so") as file:
        file.write(members("fa3-fwd", "", r"fa3_fwd/_C\.abi3\.so"))
        file.flush()
        return shared_object.read(Path(file.name))


# The checks ----------------------------------------------------------------------------------------------------------


def python_refused(distribution: str) -> Callable[[Cell], bool]:
    """Whether the metadata of the cell's release refuse its Python."""

    def check(cell: Cell) -> bool:
        accepted = published(distribution, getattr(cell, distribution)).requires_python
        return cell.python not in SpecifierSet(accepted or "")

    return check


@cache
def devices_of_torch(minor: str) -> set[str]:
    """The devices for which torch implements its own FlashAttention."""
    functions = yaml.safe_load(members("torch", minor, r"torchgen/packaged/ATen/native/native_functions\.yaml"))
    (dispatch,) = (one["dispatch"] for one in functions if one["func"].startswith("_flash_attention_forward("))
    return {device for key in dispatch for device in key.lower().split(", ")}


@cache
def cuda_alone(kernel: str, torch: str) -> bool:
    """Whether a kernel is built for CUDA and nothing else."""
    if kernel == "fa2":
        called = {ast.unparse(one.func) for one in ast.walk(ast.parse(setup_of_fa2())) if isinstance(one, ast.Call)}
        return {name for name in called if name.endswith("Extension")} == {"CUDAExtension"}
    if kernel == "fa3":
        return "libtorch_cuda.so" in extension_of_fa3().needed
    if kernel == "fa4":  # CuTe's compiler has no other target
        metadata = message_from_bytes(members("flash-attn-4", "", r"[^/]+\.dist-info/METADATA"))
        required = map(Requirement, metadata.get_all("Requires-Dist", ()))
        return any(one.name == "nvidia-cutlass-dsl" and one.marker is None for one in required)
    return kernel == "torch" and devices_of_torch(torch) == {"cuda"}


def has_torch_kernel(cell: Cell) -> bool:
    """Whether torch's own FlashAttention runs in a cell, whose environment is that of the cell that tests it."""
    other = replace(cell, flash_attention="torch")
    return cell.device in devices_of_torch(cell.torch) and (cell.base, cell.layer) == (other.base, other.layer)


@cache
def needs_newer_cpp(torch: str) -> bool:
    """Whether torch's headers refuse the C++ standard that flash-attn is compiled as."""
    compiled = {int(one) for one in re.findall(r"-std=c\+\+(\d+)", setup_of_fa2())}
    header = members("torch", torch, "torch/include/ATen/ATen.h").decode()
    (required,) = re.findall(r"#error C\+\+(\d+) or later", header)
    return max(compiled) < int(required)


@cache
def lacks_symbol(torch: str) -> bool:
    """Whether fa3-fwd imports the function for float4 of torch's stable ABI, and torch doesn't declare it."""
    function = "torch_dtype_float4_e2m1fn_x2"
    headers = members("torch", torch, r"torch/include/torch/csrc/stable/c/shim\.h").decode()
    return function in extension_of_fa3().torch_symbols and not re.search(rf"\b{function}\(", headers)


CHECKS: dict[str, Callable[[Cell], bool]] = {
    "transformers 5.21 and later need Python 3.11": python_refused("transformers"),
    "torch 2.15 and later need Python 3.11": python_refused("torch"),
    "FlashAttention has kernels for CUDA alone": (
        lambda cell: cell.device != "cuda" and cuda_alone(cell.flash_attention, cell.torch)
    ),
    "on CUDA every torch has a FlashAttention of its own: the environment is that of flash-attn==torch": (
        lambda cell: cell.flash_attention == "none" and has_torch_kernel(cell)
    ),
    "flash-attn 2.8.3 compiles as C++17, and torch 2.14 and later need C++20": (
        lambda cell: cell.flash_attention == "fa2" and needs_newer_cpp(cell.torch)
    ),
    "fa3-fwd 0.0.3 imports torch_dtype_float4_e2m1fn_x2, which torch has from 2.11 on": (
        lambda cell: cell.flash_attention == "fa3" and lacks_symbol(cell.torch)
    ),
}


def test_every_exclusion_has_a_check() -> None:
    assert {rule.because for rule in OWN.exclude} == {*CHECKS}


@pytest.mark.slow
@pytest.mark.parametrize("rule", OWN.exclude, ids=lambda rule: rule.because)
def test_reason(rule: axes.Exclude) -> None:
    try:
        index.Index().files("torch")
    except MatrixError as error:
        pytest.skip(f"the package index can't be reached: {error}")
    reason = CHECKS[rule.because]
    wrong = {cell.name: rule.when(cell) for cell in OWN.all_cells if rule.when(cell) != reason(cell)}
    assert not wrong, f"{len(wrong)} cells, with whether they are excluded"

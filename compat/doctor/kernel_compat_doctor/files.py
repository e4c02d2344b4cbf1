"""One shared object, compared with the installed torch, the interpreter and the machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from .libraries import is_found
from .libtorch import LibTorch, cuda_major, has_cxx11_abi, releases_with
from .shared_object import TORCH_LIBRARY, SharedObject, not_defined

__all__ = ["Disagreement", "disagreements", "python_of"]

#: ELF's name of a processor by the name that the kernel reports.
_MACHINES = {
    "x86_64": ("EM_X86_64", 64),
    "amd64": ("EM_X86_64", 64),
    "i686": ("EM_386", 32),
    "aarch64": ("EM_AARCH64", 64),
    "arm64": ("EM_AARCH64", 64),
    "armv7l": ("EM_ARM", 32),
    "ppc64le": ("EM_PPC64", 64),
    "s390x": ("EM_S390", 64),
    "riscv64": ("EM_RISCV", 64),
}
_CUDA_LIBRARY = re.compile(r"lib(?:cu|nv|npp)\w+(?:-\w+)?\.so")


@dataclass(frozen=True)
class Disagreement:
    """Something that a file needs and that isn't so here; `cause` and `problem` as in a `Finding`."""

    cause: str
    problem: str


def disagreements(
    path: Path, file: SharedObject, torch: LibTorch | None, siblings: dict[str, Path]
) -> Iterator[Disagreement]:
    """The disagreements of a shared object with its surroundings.

    Args:
        path: where it is.
        file: its headers.
        torch: the installed torch.
        siblings: the other shared objects of its package by file name, which may define some of the symbols.
    """
    yield from _interpreter(path.name)
    if (processor := _processor(file)) is not None:
        yield processor
        return
    yield from _c_library(file)
    if torch is None:
        yield Disagreement("torch-missing", "it is linked to libtorch, and torch is not installed")
        return
    if (build := _build(file, torch, siblings)) is not None:
        yield build
        return
    cuda = cuda_major(file.needed)
    other_cuda = cuda is not None and torch.cuda is not None and cuda != torch.cuda
    if other_cuda:
        yield Disagreement("cuda", f"it is built for CUDA {cuda}, and {torch} for CUDA {torch.cuda}")
    for name in file.needed:
        if TORCH_LIBRARY.fullmatch(name) or (other_cuda and _CUDA_LIBRARY.match(name)):
            continue
        if name not in torch.needed and name not in siblings and not is_found(name, file.search):
            yield Disagreement("library", _no_library(name))
    yield from _symbols(file, torch, siblings)


def python_of(name: str) -> str:
    """The Python that an extension module is built for, by its file name; empty if it names none."""
    if ".abi3." in name:
        return "3, stable ABI"
    version = re.search(r"\.(?:cpython-|cp|pypy)(\d)(\d+)(t?)", name)
    return f"{version[1]}.{version[2]}{version[3]}" if version else ""


def _interpreter(name: str) -> Iterator[Disagreement]:
    suffix = "." + name.partition(".")[2]
    if python_of(name) and suffix not in EXTENSION_SUFFIXES:
        here = f"{sys.version_info.major}.{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
        yield Disagreement("python", f"it is named {suffix}, for Python {python_of(name)}, and this is Python {here}")


def _processor(file: SharedObject) -> Disagreement | None:
    here = _MACHINES.get(platform.machine().lower())
    if here is None or here == (file.machine, file.bits):
        return None
    return Disagreement(
        "platform",
        f"it is built for {file.machine.removeprefix('EM_')} ({file.bits} bits), and this is {platform.machine()}",
    )


def _c_library(file: SharedObject) -> Iterator[Disagreement]:
    try:
        version = re.fullmatch(r"glibc (\d+)\.(\d+).*", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, OSError, ValueError):
        version = None
    if version and file.glibc and file.glibc > (here := (int(version[1]), int(version[2]))):
        yield Disagreement(
            "glibc", "it needs glibc {}.{} or later, and this system has {}.{}".format(*file.glibc, *here)
        )


def _build(file: SharedObject, torch: LibTorch, siblings: dict[str, Path]) -> Disagreement | None:
    of_torch = [name for name in file.needed if TORCH_LIBRARY.fullmatch(name) and name not in siblings]
    missing = [name for name in of_torch if not torch.has(name)]
    if not missing:
        return None
    names = ", ".join(missing)
    if not torch.has("libc10.so"):
        return Disagreement("torch-build", f"{torch} is incomplete, or its folder can't be read: there is no {names}")
    if any(part in names for part in ("cuda", "hip")):
        wanted = "CUDA" if "cuda" in names else "AMD GPUs"
        return Disagreement("torch-build", f"it is built for {wanted} ({names}), and {torch} for {torch.build}")
    return Disagreement("torch-version", f"{torch} has no {names}")


def _no_library(name: str) -> str:
    if name == "libcuda.so.1":
        return "it needs libcuda.so.1, and no NVIDIA driver is installed"
    return f"it needs {name}, which neither torch nor the system has"


def _symbols(file: SharedObject, torch: LibTorch, siblings: dict[str, Path]) -> Iterator[Disagreement]:
    missing = torch.lacks(file.torch_symbols)
    missing = not_defined(missing, [path for name, path in siblings.items() if name in file.needed])
    abi, torch_abi = has_cxx11_abi(missing), torch.cxx11_abi
    if abi is not None and torch_abi is not None and abi != torch_abi:
        words = {True: "the C++11 ABI", False: "the old C++ ABI"}
        of_abi = [symbol for symbol in missing if has_cxx11_abi([symbol]) is not None]
        yield Disagreement(
            "cxx11-abi", f"it is built with {words[abi]}, and {torch} with {words[torch_abi]}: {_undefined(of_abi)}"
        )
        missing = [symbol for symbol in missing if symbol not in of_abi]
    if missing:
        # Where no missing symbol is in the table, the releases that the others tell include this one.
        releases = releases_with(file.torch_symbols) if releases_with(missing) else ""
        built = f"it is built for torch {releases}, and this is {torch}" if releases else f"it isn't built for {torch}"
        yield Disagreement("torch-version", f"{built}: {_undefined(missing)}")


def _undefined(symbols: list[str]) -> str:
    more = f" and {len(symbols) - 1} more" if len(symbols) > 1 else ""
    return f"undefined symbol {symbols[0]}{more}"

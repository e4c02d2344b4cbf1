"""The installed torch, read from its files: nothing of it is imported."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from glob import escape, glob
from pathlib import Path

from packaging.version import Version

from kernel_compat.environment import Environment

from .shared_object import needed_by, not_defined

__all__ = ["LibTorch", "cuda_major", "has_cxx11_abi", "releases_with"]

_NEW_ABI = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#: The constructor of c10::Error, in each spelling of std::string. torch's wheels have the new one since 2.6.0+cu126 and 2.7
#: (Dao-AILab/flash-attention#1644).
_ABI_PROBE = "_ZN3c105ErrorC2ENS_14SourceLocationE"
_OLD_ABI = re.compile(r"[A-Z0-9]Ss(?:[A-Z_]|$)")
_CUDA_RUNTIME = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc)(?:-\w+)?\.so\.(\d+)")

#: Symbols that extensions of torch use, with the first and the last minor release that has each; empty for no limit. Measured on the
#: wheels for Linux x86-64 of 2.4 to 2.15; the first line is from Dao-AILab/flash-attention#931.
_DATED = {
    "_ZN3c104cuda9SetDeviceEi": ("", "2.2"),
    "_ZN3c104cuda9SetDeviceEa": ("2.3", "2.7"),
    "_ZN3c104cuda9SetDeviceEab": ("2.8", ""),
    "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib": ("", "2.9"),
    "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb": ("2.10", "2.13"),
    "_ZN3c104impl3cow23materialize_cow_storageERNS_11StorageImplE": ("", "2.12"),
    "_ZNK3c1011StorageImpl27throw_data_ptr_access_errorEv": ("2.6", ""),
    "_ZNK3c106SymInt22maybe_as_int_slow_pathEv": ("2.9", ""),
    "_ZNK3c1010TensorImpl15incref_pyobjectEv": ("2.10", ""),
    "_ZNK3c104cuda10CUDAStream5queryEv": ("2.11", ""),
    "aoti_torch_abi_version": ("2.7", ""),
    "aoti_torch_is_contiguous": ("2.8", ""),
    "aoti_torch_create_device_guard": ("2.9", ""),
    "torch_call_dispatcher": ("2.10", ""),
    "torch_dtype_float8_e8m0fnu": ("2.11", ""),
}


@dataclass(frozen=True)
class LibTorch:
    """The shared libraries of the installed torch.

    Attributes:
        version: of its metadata, None if that can't be read.
        libraries: the paths of torch's shared libraries, which define its symbols.
    """

    version: Version | None = None
    libraries: tuple[Path, ...] = ()

    @classmethod
    def find(cls, environment: Environment) -> LibTorch | None:
        """The torch that ``import torch`` would import; None if torch isn't installed."""
        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError, AttributeError):
            spec = None
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not folders:
            return None
        paths = [Path(name) for name in glob(f"{escape(folders[0])}/lib/lib*.so") if _defines(os.path.basename(name))]
        paths = [path for path in paths if os.path.isfile(path)]
        # The largest last: most symbols are found before it is read.
        return cls(environment.version("torch"), tuple(sorted(paths, key=lambda path: path.stat().st_size)))

    def __str__(self) -> str:
        return f"torch {self.version}" if self.version else "torch of an unknown version"

    @property
    def minor(self) -> str:
        """Its release as wheels are named for it, e.g. ``2.11``; empty if the version is unknown."""
        return f"{self.version.major}.{self.version.minor}" if self.version else ""

    def has(self, library: str) -> bool:
        """Whether it ships a library of this file name."""
        return any(path.name == library for path in self.libraries)

    @cached_property
    def needed(self) -> frozenset[str]:
        """File names of the libraries that are loaded once torch is imported."""
        return frozenset(name for library in self.libraries for name in (library.name, *needed_by(library)))

    @cached_property
    def cuda(self) -> int | None:
        """The major version of CUDA that it is built for; None for builds without CUDA."""
        return next((cuda_major(needed_by(path)) for path in self.libraries if path.name == "libc10_cuda.so"), None)

    @property
    def build(self) -> str:
        """The devices that it is built for, in words."""
        if not self.has("libc10.so"):
            return "an unknown device"
        return f"CUDA {self.cuda}" if self.cuda else "AMD GPUs" if self.rocm else "the CPU alone"

    @property
    def rocm(self) -> bool:
        """Whether it is a build for AMD GPUs."""
        return self.has("libc10_hip.so")

    @cached_property
    def cxx11_abi(self) -> bool | None:
        """Whether it is built with the C++11 ABI of std::string; None if that can't be seen."""
        spellings = {f"{_ABI_PROBE}{_NEW_ABI}": True, f"{_ABI_PROBE}Ss": False}
        missing = self.lacks(spellings)
        return next((new for symbol, new in spellings.items() if symbol not in missing), None)

    def lacks(self, symbols: Iterable[str]) -> list[str]:
        """The symbols that it doesn't define."""
        return not_defined(symbols, self.libraries)


def _defines(name: str) -> bool:
    return name.startswith(("libtorch", "libc10", "libshm", "libcaffe2"))


def cuda_major(needed: Iterable[str]) -> int | None:
    """The major version of the CUDA runtime among the libraries that a shared object needs."""
    return next((int(match[1]) for match in map(_CUDA_RUNTIME.fullmatch, _plain(needed)) if match), None)


def _plain(names: Iterable[str]) -> Iterable[str]:
    # libcudart.so.11.0 of CUDA 11 has a minor version.
    return (re.sub(r"(\.so\.\d+)(\.\d+)+$", r"\1", name) for name in names)


def has_cxx11_abi(symbols: Iterable[str]) -> bool | None:
    """Whether symbols spell std::string as the C++11 ABI does; None if none of them has a std::string."""
    symbols = list(symbols)
    if any("__cxx11" in symbol for symbol in symbols):
        return True
    return False if any(map(_OLD_ABI.search, symbols)) else None


def releases_with(symbols: Iterable[str]) -> str:
    """The releases of torch that have all the symbols, e.g. ``2.11 to 2.12``; empty if the symbols tell nothing."""
    known = [_DATED[symbol] for symbol in symbols if symbol in _DATED]
    first = max((since for since, _ in known if since), key=Version, default="")
    last = min((until for _, until in known if until), key=Version, default="")
    if first and last:
        return first if first == last else f"{first} to {last}"
    return f"{first} or later" if first else f"{last} or earlier" if last else ""

"""The GPU code in a shared object: for which architectures, and whether a GPU runs it.

nvcc embeds its output in a section of "fat binaries". NVIDIA documents what they are for, but not their layout, which is the one
that LLVM and others found: a header of 16 bytes and then entries, each a header of its own followed by a cubin or PTX.
Verified against nvcc 13.0 and against the published wheels of flash-attn, fa3-fwd and xformers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from mmap import mmap

__all__ = ["SECTIONS", "GpuCode", "gpu_code", "runs_on", "targets_text"]

#: The sections of an ELF file that hold fat binaries; the second one if it was linked with ``-rdc``.
SECTIONS = (".nv_fatbin", "__nv_relfatbin")

#: https://reviews.llvm.org/D120932
_MAGIC = struct.pack("<I", 0xBA55ED50)
#: Magic, version, size of this header, size of the entries.
_HEADER = struct.Struct("<IHHQ")
#: Kind, size of this header, size of the code behind it, architecture, flags.
_ENTRY = struct.Struct("<H2xIQ12xI8xQ")
_PTX, _CUBIN = 1, 2
#: Flags of code for one architecture alone (sm_90a) and for one family (sm_100f).
_SPECIFIC, _FAMILY = 1 << 20, 1 << 21


@dataclass(frozen=True, order=True)
class GpuCode:
    """An architecture that code was compiled for.

    Attributes:
        capability: the compute capability, e.g. ``(9, 0)``.
        suffix: ``a`` for code that runs on this capability alone, ``f`` for code of one family, or empty.
        ptx: whether it is PTX, which the driver compiles, instead of a cubin.
    """

    capability: tuple[int, int]
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.capability[0]}{self.capability[1]}{self.suffix}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU runs it.

        A cubin runs on its major compute capability, from its minor one on; PTX runs on every later capability
        (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#application-compatibility). Confirmed on an H100 for 80, 89, 90, 90a,
        100 and 100f.

        Args:
            capability: the compute capability of the GPU.
        """
        if self.suffix == "a":
            return capability == self.capability
        if self.ptx and not self.suffix:
            return capability >= self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]


def runs_on(code: Iterable[GpuCode], capability: tuple[int, int]) -> bool:
    """Whether any of the code runs on a GPU of this compute capability."""
    return any(binary.runs_on(capability) for binary in code)


def targets_text(code: Iterable[GpuCode]) -> str:
    """The architectures as nvcc names them, in order."""
    return " ".join(map(str, sorted(code)))


def gpu_code(file: mmap, start: int, end: int) -> Iterator[GpuCode]:
    """The architectures of the fat binaries between two offsets of a file; what can't be read is left out."""
    end = min(end, len(file))
    while (start := file.find(_MAGIC, start, end)) >= 0 and start + _HEADER.size <= end:
        _, version, size, length = _HEADER.unpack_from(file, start)
        if version != 1 or size < _HEADER.size:
            start += len(_MAGIC)
            continue
        yield from _entries(file, start + size, min(start + size + length, end))
        start += size + length


def _entries(file: mmap, start: int, end: int) -> Iterator[GpuCode]:
    while start + _ENTRY.size <= end:
        kind, size, length, architecture, flags = _ENTRY.unpack_from(file, start)
        if size < _ENTRY.size:
            return
        if kind in (_PTX, _CUBIN) and architecture:
            suffix = "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
            yield GpuCode(divmod(architecture, 10), suffix, ptx=kind == _PTX)
        start += size + length

"""A shared object as the dynamic loader sees it: the libraries and symbols that it needs, and its GPU code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elftools.common.exceptions import ELFParseError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from .gpu_code import SECTIONS, GpuCode, gpu_code

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["TORCH_LIBRARY", "BrokenFileError", "SharedObject", "needed_by", "not_defined", "read"]

#: Symbols of libtorch: C++ names in the namespaces at, c10, torch and caffe2, functions of its Python binding, and the C
#: functions of its stable ABI.
_OF_TORCH = re.compile(
    r"_Z(?:T[VTISW]|GV)?N[rVKRO]*(?:2at|3c10|5torch|6caffe2)(?=\w)|_Z\d+THP|THP[A-Z]|aoti_torch_|torch_[a-z]"
)
#: The libraries of torch; other packages have a libtorchcodec_core or a libtorch_my-cuda.
TORCH_LIBRARY = re.compile(r"lib(?:torch|c10)(?:_\w+)?\.so")
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)")

#: First bytes of files that are sometimes there instead of an ELF file.
_OTHERS = {
    b"version https://git-lfs": "a Git LFS pointer, whose content was never fetched",
    b"\xcf\xfa\xed\xfe": "built for macOS",
    b"\xca\xfe\xba\xbe": "built for macOS",
    b"MZ": "built for Windows",
    b"!<arch>": "a static library",
    b"<": "a web page",
}


class BrokenFileError(Exception):
    """A file that the dynamic loader can't load, whatever else is installed; `cause` is the cause of a `Finding`."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause = cause
        super().__init__(message)


@dataclass(frozen=True)
class SharedObject:
    """The ELF headers of a shared object.

    Attributes:
        machine: the processor, as ELF names it, e.g. ``EM_X86_64``.
        bits: 32 or 64.
        needed: file names of the libraries that the loader loads first.
        search: folders in which it looks for them, ``$ORIGIN`` replaced.
        torch_symbols: names that libtorch must define; empty if it isn't linked to libtorch.
        glibc: the oldest GNU C library that it loads with, None if it names none.
        gpu_code: the architectures of its CUDA code.
    """

    machine: str
    bits: int
    needed: tuple[str, ...]
    search: tuple[Path, ...]
    torch_symbols: tuple[str, ...]
    glibc: tuple[int, int] | None
    gpu_code: frozenset[GpuCode]

    @property
    def of_torch(self) -> bool:
        """Whether it is linked to libtorch."""
        return any(map(TORCH_LIBRARY.fullmatch, self.needed))


def read(path: Path) -> SharedObject:
    """Read the headers of a shared object.

    Raises:
        BrokenFileError: it is missing, can't be read, isn't an ELF file or is damaged.
    """
    try:
        with open(path, "rb") as stream:
            head = stream.read(32)
            _check_head(head)
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as file:
                return _read(path, stream, file)
    except FileNotFoundError:
        raise BrokenFileError("missing-file", "it isn't there") from None
    except OSError as error:
        raise BrokenFileError("unreadable", f"it can't be read: {error.strerror or error}") from None
    except BrokenFileError:
        raise
    except ELFParseError:
        raise BrokenFileError("truncated", "it is cut off: its ELF headers point beyond its end") from None
    except Exception as error:  # a damaged file may hold any bytes, and pyelftools raises what they lead to
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BrokenFileError("damaged", f"its ELF headers are damaged ({cause})") from None


def _check_head(head: bytes) -> None:
    if not head:
        raise BrokenFileError("empty", "it is empty")
    if head.startswith(b"\x7fELF"):
        return
    for start, kind in _OTHERS.items():
        if head.startswith(start):
            raise BrokenFileError("not-elf", f"it is {kind}")
    raise BrokenFileError("not-elf", "it is not an ELF file")


def _read(path: Path, stream: BinaryIO, file: mmap) -> SharedObject:
    elf = ELFFile(stream)
    end = max((segment["p_offset"] + segment["p_filesz"] for segment in elf.iter_segments()), default=0)
    if end > len(file):
        raise BrokenFileError("truncated", f"it is cut off: {len(file):,} bytes of at least {end:,}")
    dynamic = _dynamic(elf)
    if dynamic is None:
        raise BrokenFileError("damaged", "it has no dynamic section, so it is not a shared object")
    needed = tuple(_values(dynamic, "DT_NEEDED", "needed"))
    folders = (*_values(dynamic, "DT_RPATH", "rpath"), *_values(dynamic, "DT_RUNPATH", "runpath"))
    search = [
        Path(re.sub(r"\$ORIGIN|\$\{ORIGIN\}", lambda _: str(path.parent), folder))
        for entry in folders
        for folder in entry.split(":")
        if folder
    ]
    headers = SharedObject(elf["e_machine"], elf.elfclass, needed, tuple(search), (), None, frozenset())
    if not headers.of_torch:
        return headers
    # The section is read in a third of the time; a stripped file has the segment alone.
    table: Any = elf.get_section_by_name(".dynsym") or dynamic
    symbols = tuple(
        symbol.name
        for symbol in table.iter_symbols()
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and _OF_TORCH.match(symbol.name)
    )
    sections = [section for name in SECTIONS if (section := elf.get_section_by_name(name)) is not None]
    bounds = [(section["sh_offset"], section["sh_offset"] + section["sh_size"]) for section in sections]
    code = frozenset(target for start, end in bounds for target in gpu_code(file, start, end))
    return SharedObject(headers.machine, headers.bits, needed, headers.search, symbols, _glibc(elf), code)


def _dynamic(elf: ELFFile) -> DynamicSegment | None:
    return next((segment for segment in elf.iter_segments() if isinstance(segment, DynamicSegment)), None)


def _values(dynamic: DynamicSegment, tag: str, attribute: str) -> Iterator[str]:
    for entry in dynamic.iter_tags(tag):
        yield getattr(entry, attribute)


def _glibc(elf: ELFFile) -> tuple[int, int] | None:
    section: Any = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return None
    names = (version.name for _, versions in section.iter_versions() for version in versions)
    return max(
        ((int(version[1]), int(version[2])) for version in map(_GLIBC.fullmatch, names) if version), default=None
    )


def needed_by(library: Path) -> tuple[str, ...]:
    """File names of the libraries that a library needs; none if it can't be read."""
    try:
        with open(library, "rb") as stream:
            dynamic = _dynamic(ELFFile(stream))
            return tuple(_values(dynamic, "DT_NEEDED", "needed")) if dynamic is not None else ()
    except Exception:  # damaged, see `read`
        return ()


def not_defined(symbols: Iterable[str], libraries: Iterable[Path]) -> list[str]:
    """The symbols that none of the libraries defines; a library that can't be read defines none."""
    left = list(symbols)
    for library in libraries:
        if not left:
            break
        try:
            with open(library, "rb") as stream:
                left = list(_missing_from(ELFFile(stream), left))
        except Exception:  # damaged, see `read`
            continue
    return left


def _missing_from(elf: ELFFile, symbols: Iterable[str]) -> Iterator[str]:
    # Its hash table: reading all 200,000 symbols of libtorch_cpu takes seconds.
    table: Any = elf.get_section_by_name(".gnu.hash") or elf.get_section_by_name(".hash")
    for name in symbols:
        symbol = table and table.get_symbol(name)
        if symbol is None or symbol["st_shndx"] == "SHN_UNDEF":
            yield name

"""Small real ELF files: a shared object of this environment, given other libraries, symbols and GPU code by lief."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import lief
import yaml._yaml

lief.logging.disable()

__all__ = ["ERROR", "OLD_ERROR", "fat_binary", "library", "shared_object", "with_machine", "without_glibc"]

#: The constructor of c10::Error, in both C++ ABIs of std::string.
ERROR = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OLD_ERROR = "_ZN3c105ErrorC2ENS_14SourceLocationESs"


def _base() -> lief.ELF.Binary:
    found = lief.ELF.parse(str(Path(yaml._yaml.__file__)))
    assert found is not None
    return found


def _bytes(binary: lief.ELF.Binary) -> bytes:
    return bytes(binary.write_to_bytes())


def fat_binary(targets: Iterable[str]) -> bytes:
    """The content of a section .nv_fatbin with an empty entry for each target, e.g. ``sm_90a`` or ``compute_80``."""
    entries = b""
    for target in targets:
        kind, _, architecture = target.partition("_")
        flags = {"a": 1 << 20, "f": 1 << 21}.get(architecture[-1], 0) | 0x11
        number = int(architecture.rstrip("af"))
        # As nvcc 13 writes them: headers of 64 bytes and more, code in multiples of 8 bytes.
        entries += (
            struct.pack("<HHIQ12xI8xQ16x", 1 if kind == "compute" else 2, 0x101, 64, 16, number, flags) + b"\x7f" * 16
        )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


@cache
def shared_object(
    needed: Sequence[str] = ("libtorch.so", "libc10.so"),
    undefined: Sequence[str] = (),
    targets: Sequence[str] = (),
    runpath: str = "",
) -> bytes:
    """An extension of torch.

    Args:
        needed: libraries, besides those of C.
        undefined: symbols that libraries must define.
        targets: architectures that it has GPU code for.
        runpath: where its libraries are looked for.
    """
    binary = _base()
    for name in reversed(needed):
        binary.add_library(name)
    for name in undefined:
        symbol = lief.ELF.Symbol()
        symbol.name = name
        symbol.type = lief.ELF.Symbol.TYPE.FUNC
        symbol.binding = lief.ELF.Symbol.BINDING.GLOBAL
        binary.add_dynamic_symbol(symbol)
    if targets:
        section = lief.ELF.Section(".nv_fatbin")
        section.content = list(fat_binary(targets))
        binary.add(section)
    if runpath:
        binary.add(lief.ELF.DynamicEntryRunPath(runpath))
    return _bytes(binary)


@cache
def library(defined: Sequence[str] = (), needed: Sequence[str] = ()) -> bytes:
    """A library that defines symbols."""
    binary = _base()
    for name in reversed(needed):
        binary.add_library(name)
    for name in defined:
        binary.add_exported_function(0x1000, name)
    return _bytes(binary)


def with_machine(content: bytes, machine: lief.ELF.ARCH) -> bytes:
    """The same file for another processor."""
    return content[:18] + struct.pack("<H", int(machine)) + content[20:]


def without_glibc() -> bytes:
    """An extension of torch that needs a C library which doesn't exist yet."""
    found = lief.ELF.parse(list(shared_object()))
    assert found is not None
    for requirement in found.symbols_version_requirement:
        for version in requirement.get_auxiliary_symbols():
            version.name = "GLIBC_9.99"
    return _bytes(found)

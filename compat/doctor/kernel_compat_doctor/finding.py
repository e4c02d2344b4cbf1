"""A finding: something that is wrong with an installed package, and the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAUSES", "Finding"]

#: The causes of findings, with what each means.
CAUSES = {
    "not-installed": "the package is not installed",
    "torch-missing": "torch is not installed",
    "torch-build": "torch is a build without CUDA, or for other GPUs, and the package needs CUDA; or it is incomplete",
    "torch-version": "it needs symbols that this torch doesn't have",
    "cxx11-abi": "it spells std::string in another C++ ABI than torch",
    "cuda": "it is built for another major version of CUDA than torch",
    "library": "it needs a library that can't be found",
    "python": "it is built for another Python",
    "platform": "it is built for another processor",
    "glibc": "it needs a newer C library",
    "gpu": "it has no code for a GPU of this machine",
    "missing-file": "a file is missing",
    "unreadable": "a file can't be read",
    "empty": "a file is empty",
    "truncated": "a file is cut off",
    "damaged": "the headers of a file are damaged",
    "not-elf": "a file is not a shared object of Linux",
    "no-metadata": "its metadata can't be read",
    "no-record": "the list of its files is missing",
    "overwritten": "another package has overwritten its files",
    "shadowed": "Python imports something else under its name",
    "two-copies": "it is installed twice",
    "placeholder": "it is an empty placeholder",
    "old-cute": "flash_attn.cute is FlashAttention-2's old copy",
    "claim": "its name says that it is built for something else",
}


@dataclass(frozen=True)
class Finding:
    """A disagreement between a package and what is installed beside it.

    Attributes:
        package: the distribution.
        file: its file that disagrees, relative to the folder it is installed in; empty for the whole package.
        cause: one of `CAUSES`.
        problem: one sentence: what disagrees.
        command: the command that mends it; empty where no command does.
        breaks: whether the package can't be used because of it. A note otherwise.
    """

    package: str
    file: str
    cause: str
    problem: str
    command: str
    breaks: bool = True

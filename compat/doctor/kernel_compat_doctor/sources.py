"""Where packages come from: wheels on the index, wheels on a release page, a build; and the commands that install them.

The catalog of kernels has their features. This table has what an installation needs, for packages without an attention kernel too.
Nothing here asks the network.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from packaging.tags import sys_tags
from packaging.version import InvalidVersion, Version

from kernel_compat.kernels.catalog import CATALOG
from kernel_compat.versions import within

from .libtorch import LibTorch

__all__ = ["SOURCES", "Build", "Source", "Wheel", "reinstall", "wheel_name"]


@dataclass(frozen=True)
class Wheel:
    """The newest wheel on the package index.

    Attributes:
        tags: its tags, as its file name ends.
        cuda: the major version of CUDA that it is linked to; None if it isn't.
        torch: the oldest torch that has all its symbols; empty for any.
    """

    tags: tuple[str, ...]
    cuda: int | None = None
    torch: str = ""

    def unusable_because(self, torch: LibTorch | None) -> list[str]:
        """Why it can't be used with this interpreter and torch."""
        here = set(map(str, sys_tags()))
        reasons = [] if here.intersection(self.tags) else [f"its wheels are for {', '.join(self.tags)}"]
        if torch is None:
            return reasons
        if self.cuda and torch.cuda != self.cuda:
            reasons.append(f"its wheel is built for CUDA {self.cuda}, {torch} for {torch.build}")
        if self.torch and torch.version and within(torch.version, f"<{self.torch}"):
            reasons.append(f"its wheel needs torch {self.torch} or later")
        return reasons


@dataclass(frozen=True)
class Build:
    """A build from the published source.

    Attributes:
        force: the variable that makes it build where a wheel is published.
        architectures: the variable that limits it to some GPUs, and the values it takes if not every capability. Without a
            variable it builds for all GPUs that it supports.
        job: memory of one compiler job, in GiB; None if unknown.
        core_minutes: minutes on one core; None if unknown.
        cxx17: whether it compiles as C++17, which the headers of torch 2.14 and later refuse (``ATen/ATen.h``).
    """

    force: str = ""
    architectures: tuple[str, tuple[int, ...]] = ("TORCH_CUDA_ARCH_LIST", ())
    job: float | None = None
    core_minutes: int | None = None
    cxx17: bool = False

    def target(self, capability: tuple[int, int]) -> str | None:
        """The value of its variable for a GPU; empty if there is no variable, None if it has no code for that GPU."""
        variable, values = self.architectures
        if not variable or not values:
            return f"{capability[0]}.{capability[1]}" if variable else ""
        fits = [value for value in values if divmod(value, 10) <= capability and value // 10 == capability[0]]
        return str(max(fits)) if fits else None

    def refused_because(self, torch: LibTorch | None) -> str:
        """Why it doesn't compile with this torch; empty if nothing is known against it."""
        if not self.cxx17 or torch is None or torch.version is None or within(torch.version, "<2.14"):
            return ""
        return f"its build asks for C++17, and {torch} for C++20"


@dataclass(frozen=True)
class Source:
    """Where a distribution comes from.

    Attributes:
        modules: top-level imports of its own.
        wheel: the wheel on the index, if there is one.
        build: how it is built, if its source is on the index.
        project: the GitHub project whose release page has wheels by `wheel_name`, if there is one.
        published: what is known of those wheels.
    """

    modules: tuple[str, ...] = ()
    wheel: Wheel | None = None
    build: Build | None = None
    project: str = ""
    published: str = ""


#: The builds of flash-attn, causal-conv1d and mamba-ssm look for a wheel by `wheel_name` first (setup.py of flash-attn 2.8.3.post2,
#: causal-conv1d 1.7.0 and mamba-ssm 2.3.2.post1). flash-attn's counts 9 GB a job there, and its README 3 to 5 minutes on 64 cores.
SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "flash-attn": Source(
            ("flash_attn", "flash_attn_2_cuda"),
            build=Build(
                "FLASH_ATTENTION_FORCE_BUILD", ("FLASH_ATTN_CUDA_ARCHS", (80, 90, 100, 120)), 9, 256, cxx17=True
            ),
            project="Dao-AILab/flash-attention",
            published=(
                "known of 2.8.3: torch up to 2.9 with CUDA 12; not torch 2.10 with CUDA 12, not torch 2.11 with CUDA 13 "
                "(Dao-AILab/flash-attention#2299, #2442). Where no wheel was published, the command builds the package"
            ),
        ),
        "flash-attn-3": Source(("flash_attn_interface", "flash_attn_3")),
        "fa3-fwd": Source(
            ("fa3_fwd_interface", "fa3_fwd"), Wheel(("cp39-abi3-manylinux_2_24_x86_64",), cuda=13, torch="2.11")
        ),
        "flash-attn-4": Source(wheel=Wheel(("py3-none-any",))),
        "flash-attn-cute": Source(),
        "causal-conv1d": Source(
            ("causal_conv1d", "causal_conv1d_cuda"),
            build=Build("CAUSAL_CONV1D_FORCE_BUILD", ("", ()), cxx17=True),
            project="Dao-AILab/causal-conv1d",
        ),
        "mamba-ssm": Source(
            ("mamba_ssm", "selective_scan_cuda"),
            build=Build("MAMBA_FORCE_BUILD", ("", ()), cxx17=True),
            project="state-spaces/mamba",
        ),
        "xformers": Source(
            ("xformers",), Wheel(("py39-none-manylinux_2_28_x86_64",), cuda=12, torch="2.10"), build=Build()
        ),
    }
)


def wheel_name(distribution: str, version: str, torch: LibTorch) -> str:
    """The file name of the wheel that a project publishes for this interpreter and torch, if it does."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    abi = "FALSE" if torch.cxx11_abi is False else "TRUE"
    built = f"cu{torch.cuda}torch{torch.minor}cxx11abi{abi}"
    system = f"linux_{platform.machine()}"
    return f"{distribution.replace('-', '_')}-{version}+{built}-{python}-{python}-{system}.whl"


def reinstall(
    distribution: str,
    version: str = "",
    *,
    torch: LibTorch | None = None,
    rebuild: bool = False,
    force: bool = False,
    compiled: bool = False,
    refuses: bool = False,
    capability: tuple[int, int] | None = None,
) -> str:
    """The command that installs a package again.

    Args:
        distribution: the package.
        version: its version; empty for the newest.
        torch: the torch that is installed.
        rebuild: whether the installed files don't fit this torch, so that they must not come from pip's cache again.
        force: whether it must be built even if its project publishes a wheel for these versions.
        compiled: whether a package that isn't in `SOURCES` was compiled where it is installed.
        refuses: whether it asks for another torch.
        capability: the compute capability that it must have code for.
    """
    if distribution == "flash-attn-cute":
        return "pip uninstall -y flash-attn-cute && pip install --pre flash-attn-4"
    if distribution == "flash-attn-3":
        return f"# {_sentence(distribution)}"
    source = SOURCES.get(distribution, Source(build=Build() if compiled else None))
    if rebuild and torch is not None and torch.version is not None:
        if refuses:  # another version of it asks for this torch.
            return _line(["pip", "install", "--upgrade", distribution, f"torch=={torch.version.public}"])
        if source.build is None and source.wheel is not None and source.wheel.unusable_because(torch):
            # The torch of the index, which its wheel on the index is made for.
            return _line(["pip", "install", "--force-reinstall", distribution, f"torch>={source.wheel.torch}"])
    words = ["pip", "install", "--force-reinstall", "--no-deps"]
    if distribution == "flash-attn-4":
        words.append("--pre")
    if rebuild:
        words.append("--no-cache-dir")
    build = source.build
    if build is not None and (
        source.wheel is None or (rebuild and (force or capability or source.wheel.unusable_because(torch)))
    ):
        words.append("--no-build-isolation")
        if not source.project:
            words += ["--no-binary", distribution]
        words = [*_variables(build, force or capability is not None, capability), *words]
    line = _line([*words, f"{distribution}=={_public(version)}" if version else distribution])
    if rebuild and build is not None and (reason := build.refused_because(torch)):
        return f"pip install 'torch<2.14' && {line}  # {reason}"
    return line


def _variables(build: Build, force: bool, capability: tuple[int, int] | None) -> list[str]:
    words = [f"{build.force}=TRUE"] if force and build.force else []
    if capability is not None and (target := build.target(capability)):
        words.append(f"{build.architectures[0]}={target}")
    return words


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def _line(words: list[str]) -> str:
    return " ".join(word if re.fullmatch(r"\w+=[\w.]+", word) else shlex.quote(word) for word in words)


def _sentence(distribution: str) -> str:
    packages = (package for kernel in CATALOG.values() for package in kernel)
    return next(package.install for package in packages if package.distribution == distribution)

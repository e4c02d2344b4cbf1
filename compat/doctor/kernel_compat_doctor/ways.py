"""The ways to install kernels on this machine: the fastest kernel first, and each kernel by its fastest way first.

No network: which wheels exist is stated as far as it is known, and by their file names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kernel_compat.kernels import Provider
from kernel_compat.kernels.catalog import CATALOG, TORCH

from .diagnosis import Diagnosis
from .libtorch import LibTorch
from .sources import SOURCES, Build, Source, reinstall, wheel_name

__all__ = ["Machine", "Way", "ways"]


@dataclass(frozen=True)
class Machine:
    """The cores, the memory and the compilers that a build can use.

    Attributes:
        cores: the cores that this process may use.
        memory: the memory it may use, in GiB; None if unknown.
        nvcc: the version of the CUDA compiler, e.g. ``13.0``; empty if no compiler is installed.
        compiler: whether there is a C++ compiler.
    """

    cores: int
    memory: float | None = None
    nvcc: str = ""
    compiler: bool = True

    @classmethod
    def detect(cls) -> Machine:
        """This machine. Runs ``nvcc --version``."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cores, _memory(), _nvcc(), any(map(shutil.which, ("c++", "g++", "clang++"))))


@dataclass(frozen=True)
class Way:
    """One way to get a kernel or a package here.

    Attributes:
        kernel: the attention name; empty for a package without an attention kernel.
        package: the distribution.
        how: ``installed``, ``wheel on the index``, ``published wheel``, ``build`` or ``nothing to install``.
        cost: time and memory, in words.
        command: the command; empty where there is nothing to run.
        reasons: why it doesn't work here; empty where it does.
        file: the file name of a published wheel, ``VERSION`` for its version, and where it would be.
    """

    kernel: str
    package: str
    how: str
    cost: str
    command: str
    reasons: tuple[str, ...] = ()
    file: str = ""


def ways(diagnosis: Diagnosis, machine: Machine | None = None) -> list[Way]:
    """The ways to every kernel and package of `SOURCES`, in the order of the catalog of kernels.

    Args:
        diagnosis: the GPUs, the torch and the packages that are here. A broken package counts as not installed.
        machine: the machine that a build runs on; this one by default.
    """
    machine = Machine.detect() if machine is None else machine
    ways_here: list[Way] = []
    for kernel, packages in CATALOG.items():
        for package in packages:
            if not package.bundled:
                ways_here += _ways(kernel, package, package.distribution, diagnosis, machine)
            elif package is TORCH:
                reasons = package.unavailable_because(diagnosis.environment)
                ways_here.append(Way(kernel, package.distribution, "nothing to install", "none", "", tuple(reasons)))
    named = {way.package for way in ways_here} | {"flash-attn-cute"}
    for distribution in SOURCES:
        if distribution not in named:
            ways_here += _ways("", None, distribution, diagnosis, machine)
    return ways_here


def _ways(
    kernel: str, package: Provider | None, distribution: str, diagnosis: Diagnosis, machine: Machine
) -> Iterator[Way]:
    torch, environment = diagnosis.torch, diagnosis.environment
    source = SOURCES[distribution]
    device = package.no_device_because(environment) if package is not None else []
    if any(
        installed.name == distribution and installed.folder and not installed.broken for installed in diagnosis.packages
    ):
        yield Way(kernel, distribution, "installed", "none", "", tuple(device))
        return
    if source.wheel is not None:
        command = f"pip install {'--pre ' if distribution == 'flash-attn-4' else ''}{distribution}"
        reasons = (*device, *source.wheel.unusable_because(torch))
        yield Way(kernel, distribution, "wheel on the index", "a download", command, reasons)
    without_torch = [] if torch else ["torch must be installed first"]
    if source.project:
        yield _published(kernel, distribution, source, torch, [*device, *without_torch])
    if source.build is not None:
        jobs, cost = _cost(source.build, machine)
        refused = source.build.refused_because(torch)
        command = reinstall(distribution, rebuild=True, force=True).replace("--force-reinstall ", "")
        reasons = (*device, *without_torch, *filter(None, [refused]), *_no_build_because(torch, machine))
        yield Way(kernel, distribution, "build", cost, f"MAX_JOBS={jobs} {command}", reasons)
    elif package is not None and source.wheel is None:
        yield Way(kernel, distribution, "build", "not known", f"# {package.install}", tuple(device))


def _published(kernel: str, distribution: str, source: Source, torch: LibTorch | None, reasons: list[str]) -> Way:
    if torch is None or not torch.minor or not torch.cuda:
        built = f"{torch} is built for {torch.build}" if torch else ""
        return Way(kernel, distribution, "published wheel", "a download", "", (*reasons, *filter(None, [built])))
    page = f"https://github.com/{source.project}/releases"
    return Way(
        kernel,
        distribution,
        "published wheel",
        f"a download, if it exists: {source.published}" if source.published else "a download, if it exists",
        f"pip install --no-build-isolation {distribution}",
        tuple(reasons),
        f"{wheel_name(distribution, 'VERSION', torch)} on {page}",
    )


def _cost(build: Build, machine: Machine) -> tuple[int, str]:
    """The number of jobs, and time and memory in words."""
    jobs = machine.cores
    if build.job and machine.memory is not None:
        jobs = max(1, min(jobs, int(machine.memory / build.job)))
    words = f"{jobs} {'job' if jobs == 1 else 'jobs'} on {machine.cores} cores"
    if build.job:
        words += f", {build.job:.0f} GiB of memory each"
    if build.core_minutes:
        minutes = build.core_minutes / jobs
        words += f", about {minutes / 60:.1f} hours" if minutes >= 90 else f", about {minutes:.0f} minutes"
    return jobs, words


def _no_build_because(torch: LibTorch | None, machine: Machine) -> Iterator[str]:
    if not machine.compiler:
        yield "there is no C++ compiler"
    if not machine.nvcc:
        yield "there is no CUDA compiler (nvcc)"
    elif torch is not None and torch.cuda and machine.nvcc.partition(".")[0] != str(torch.cuda):
        yield f"nvcc is of CUDA {machine.nvcc}, and {torch} is built for CUDA {torch.cuda}"
    if torch is not None and not torch.cuda:
        yield f"{torch} is built for {torch.build}"


def _memory() -> float | None:
    """Available memory in GiB, as the system and the control group limit it."""
    limits = []
    with suppress(OSError, ValueError, IndexError):
        line = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        limits += [int(line[1]) / 2**20] if line else []
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**30)
    return min(limits, default=None)


def _nvcc() -> str:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    program = shutil.which("nvcc") or next(
        (f"{home}/bin/nvcc" for home in homes if home and os.path.isfile(f"{home}/bin/nvcc")), ""
    )
    if not program:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
        version = re.search(r"release (\d+\.\d+)", done.stdout)
        return version[1] if version else ""
    return ""

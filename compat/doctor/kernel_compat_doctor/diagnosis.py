"""Every installed extension of torch, and what is wrong with it."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_compat.environment import Device, Environment
from kernel_compat.kernels.catalog import CATALOG, kernels_with

from .contents import copies_of, files_of, hidden, overwritten, shared_objects
from .distributions import Claim, Installed, installed
from .files import disagreements, python_of
from .finding import Finding
from .gpu_code import GpuCode, runs_on, targets_text
from .libtorch import LibTorch, cuda_major, has_cxx11_abi, releases_with
from .shared_object import BrokenFileError, SharedObject, read
from .sources import SOURCES, reinstall

__all__ = ["Built", "Diagnosis", "Package", "diagnose", "findings_of"]


#: torchaudio 2.8 loads them at their first use, and works without SoX and FFmpeg (``_extension/__init__.py`` of both packages).
_OPTIONAL = re.compile(r"torchaudio/lib/\w*sox|torio/lib/\w*ffmpeg")


@dataclass(frozen=True)
class Built:
    """The torch, CUDA, C++ ABI, Python and GPUs that a package is built for, as far as its files tell.

    Attributes:
        torch: releases of torch, e.g. ``2.11 to 2.12``; empty if unknown.
        cuda: the major version of the CUDA runtime, None if it is linked to none.
        cxx11_abi: the C++ ABI of std::string, None if it passes none to torch.
        python: its Python, e.g. ``3.12``; empty for any.
        gpu_code: the GPU architectures that it has code for.
    """

    torch: str = ""
    cuda: int | None = None
    cxx11_abi: bool | None = None
    python: str = ""
    gpu_code: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """An installed package.

    Attributes:
        name: the distribution.
        version: its version; empty if it isn't installed or can't be read.
        folder: the folder it is installed in; empty if it isn't installed.
        built: the torch, CUDA, C++ ABI, Python and GPUs that its files were compiled for.
        findings: what is wrong with it; empty for a healthy one.
        extends_torch: whether it is linked to libtorch, asks for torch, or is known to extend it.
    """

    name: str
    version: str
    folder: str
    built: Built
    findings: tuple[Finding, ...]
    extends_torch: bool = True

    @property
    def broken(self) -> bool:
        """Whether it can't be used."""
        return any(finding.breaks for finding in self.findings)


@dataclass(frozen=True)
class Diagnosis:
    """The extensions of torch in an environment.

    Attributes:
        environment: the environment.
        torch: the installed torch; None if torch isn't installed.
        packages: the installed extensions of torch, or the packages that `diagnose` was called with.
    """

    environment: Environment
    torch: LibTorch | None
    packages: tuple[Package, ...]

    @property
    def ok(self) -> bool:
        """Whether no package is broken."""
        return not any(package.broken for package in self.packages)


def diagnose(names: Collection[str] = (), environment: Environment | None = None) -> Diagnosis:
    """Compare every installed extension of torch with what is installed beside it. Imports neither torch nor the extension.

    Args:
        names: normalized names of distributions; every installed extension of torch by default.
        environment: the GPUs and versions to compare with; default: this one.

    Example:
        >>> from kernel_compat_doctor import diagnose
        >>> [finding.problem for package in diagnose(["flash-attn-4"]).packages for finding in package.findings]
        ['flash-attn-4 is not installed']
    """
    environment = Environment.detect(names) if environment is None else environment
    torch = LibTorch.find(environment)
    distributions = installed(names)
    everything = distributions if not names else installed(SOURCES)
    packages = []
    for name in dict.fromkeys((*names, *distributions)):
        copies = distributions.get(name, [])
        package = _diagnose(copies, everything, torch, environment) if copies else _absent(name)
        if package.extends_torch or name in names:
            packages.append(package)
    return Diagnosis(environment, torch, tuple(packages))


def findings_of(distribution: str, environment: Environment) -> list[Finding]:
    """The findings of one distribution: a `kernel_compat.gates.Diagnose`."""
    return [finding for package in diagnose([distribution], environment).packages for finding in package.findings]


def _absent(name: str) -> Package:
    command = reinstall(name).replace(" --force-reinstall --no-deps", "")
    return Package(name, "", "", Built(), (Finding(name, "", "not-installed", f"{name} is not installed", command),))


def _diagnose(
    copies: Sequence[Installed],
    everything: Mapping[str, Sequence[Installed]],
    torch: LibTorch | None,
    environment: Environment,
) -> Package:
    dist = copies[0]
    findings = [*copies_of(copies), *files_of(dist), *hidden(dist), *overwritten(dist, everything, environment)]
    built, extends = Built(), dist.name in SOURCES or dist.requires_torch is not None
    if platform.system() == "Linux":
        paths = dict(shared_objects(dist))
        siblings = {path.name: path for path in paths.values()}
        extends = dist.name in SOURCES or (extends and bool(paths))
        of_torch: dict[str, SharedObject] = {}
        by_file: dict[str, list[Finding]] = {}
        for name, path in paths.items():
            try:
                file = read(path)
            except BrokenFileError as error:
                by_file[name] = [_finding(dist, name, error.cause, str(error), torch)]
                continue
            if file.of_torch:
                of_torch[name] = file
                wrong = disagreements(path, file, torch, siblings)
                by_file[name] = [
                    _finding(dist, name, disagreement.cause, disagreement.problem, torch) for disagreement in wrong
                ]
        extends = extends or bool(of_torch)
        findings += _of_variants(by_file)
        findings += _gpus(dist, of_torch, torch, environment)
        built = _built(dist.claim, of_torch)
        findings += _claim(dist, torch, findings)
    return Package(dist.name, dist.version, str(dist.folder), built, tuple(findings), extends)


def _of_variants(by_file: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """The findings of files; none for the variants of a file if one of them loads.

    Some packages have a file for each release of another library, named for it, as torchcodec has for FFmpeg. A package with a file
    for each release of torch, as torch-c-dlpack-ext, does without on a torch that it has none for.
    """
    groups: dict[str, list[str]] = {}
    for name in by_file:
        module = name.partition(".")[0] if python_of(name) else ""
        groups.setdefault(module or re.sub(r"\d+", "#", name), []).append(name)
    for key, names in groups.items():
        variants = [by_file[name] for name in names]
        same_module = len(names) > 1 and bool(python_of(names[0]))
        if len(names) < 3 and not same_module:
            yield from (finding for several in variants for finding in several)
        elif all(variants) and "torch#" not in key:
            last = variants[-1][0]
            yield replace(last, problem=f"of its {len(names)} variants none loads here: {last.problem}")


def _finding(dist: Installed, file: str, cause: str, problem: str, torch: LibTorch | None) -> Finding:
    foreign = not (dist.name in SOURCES or dist.compiled)
    if cause == "torch-missing":
        command = f"pip install {shlex.quote(f'torch{dist.requires_torch or str()}')}"
    elif cause == "torch-build":
        command = (
            "pip install --force-reinstall torch  # the build for this GPU: https://pytorch.org/get-started/locally"
        )
    elif cause == "library" and foreign:
        command = "# install that library: the system's package manager or the package's own documentation has it"
    elif cause in ("missing-file", "unreadable", "empty", "truncated", "damaged", "not-elf"):
        command = reinstall(dist.name, dist.version)
    elif foreign and torch and cause in ("cuda", "cxx11-abi", "torch-version") and not dist.refuses(torch.version):
        # The index has one wheel of a version, which is the installed one.
        command = f"# install a build of {dist.name} for {torch} and {torch.build}: its documentation says which"
    else:
        published = bool(dist.claim and torch and (dist.claim.torch, dist.claim.cuda) == (torch.minor, torch.cuda))
        command = _rebuild(dist, torch, force=published or cause == "glibc")
    # A wheel for this interpreter loads a file of another one by its path, as torchao does, or not at all.
    optional = (cause == "python" and dist.for_this_python) or (cause == "library" and bool(_OPTIONAL.match(file)))
    return Finding(dist.name, file, cause, problem, command, breaks=not optional)


def _rebuild(
    dist: Installed, torch: LibTorch | None, *, force: bool = False, capability: tuple[int, int] | None = None
) -> str:
    return reinstall(
        dist.name,
        dist.version if capability is None else "",  # an older one may not know the GPU
        torch=torch,
        rebuild=True,
        force=force,
        compiled=dist.compiled,
        refuses=torch is not None and dist.refuses(torch.version),
        capability=capability,
    )


def _gpus(
    dist: Installed, files: Mapping[str, SharedObject], torch: LibTorch | None, environment: Environment
) -> Iterator[Finding]:
    code: set[GpuCode] = set().union(*(file.gpu_code for file in files.values()))
    if not code:
        return
    by_capability = {device.capability: device for device in environment.devices}
    for capability, device in sorted(by_capability.items()):
        if runs_on(code, capability):
            continue
        problem = f"it has code for {targets_text(code)}, none of which runs on {device}"
        if instead := _instead(dist.name, device):
            problem, command = f"{problem}. {instead}", ""
        else:
            command = _rebuild(dist, torch, capability=capability)
        file = next(name for name, file in files.items() if file.gpu_code)
        yield Finding(dist.name, file, "gpu", problem, command)


def _instead(distribution: str, device: Device) -> str:
    """A sentence that names the kernels for a GPU which no version of a package supports; empty if one does."""
    environment = Environment(packages={"torch": ""}, imports={"torch": ("torch",)}, devices=(device,))
    packages = [package for kernel in CATALOG.values() for package in kernel if package.distribution == distribution]
    reasons = [reason for package in packages for reason in package.no_device_because(environment)]
    build = SOURCES[distribution].build if distribution in SOURCES else None
    if not reasons and build is not None and build.target(device.capability) is None:
        reasons = [f"its build has code for {', '.join(f'sm_{value}' for value in build.architectures[1])} alone"]
    if not reasons:
        return ""
    names = ", ".join(kernels_with(lambda package, features: package.bundled, environment))
    return f"No build has: {reasons[0]}. Kernels that run there: {names}"


def _built(claim: Claim | None, files: Mapping[str, SharedObject]) -> Built:
    symbols = [symbol for file in files.values() for symbol in file.torch_symbols]
    code: set[GpuCode] = set().union(*(file.gpu_code for file in files.values()))
    return Built(
        torch=releases_with(symbols) or (claim.torch if claim else ""),
        cuda=cuda_major(name for file in files.values() for name in file.needed),
        cxx11_abi=has_cxx11_abi(symbols),
        python=next(filter(None, map(python_of, files)), ""),
        gpu_code=tuple(map(str, sorted(code))),
    )


def _claim(dist: Installed, torch: LibTorch | None, findings: Sequence[Finding]) -> Iterator[Finding]:
    """A note on a wheel whose name says that it is for another torch, although this one has all its symbols."""
    claim = dist.claim
    if claim is None or torch is None or any(finding.breaks for finding in findings):
        return
    if torch.minor and claim.torch != torch.minor:
        problem = (
            f"it says that it is built for torch {claim.torch}, and this is {torch}: it may compute wrong or crash"
        )
        yield replace(_finding(dist, "", "claim", problem, torch), breaks=False)

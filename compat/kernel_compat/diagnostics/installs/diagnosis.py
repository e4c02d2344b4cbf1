"""Every installed extension of torch, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...environment import Device, Environment, is_recorded
from ...kernels.catalog import CATALOG, kernels_with
from .distributions import Claim, Installed, installed
from .files import disagreements, python_of
from .finding import Finding
from .gpu_code import GpuCode, runs_on, targets_text
from .libtorch import LibTorch, cuda_major, has_cxx11_abi, releases_with
from .shared_object import BrokenFileError, SharedObject, read
from .sources import SOURCES, reinstall

__all__ = ["Built", "Diagnosis", "Package", "diagnose"]

_CUTE = "flash_attn/cute/"


@dataclass(frozen=True)
class Built:
    """What a package is built for, as far as its files say.

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
        folder: the folder it is installed in.
        built: what it is built for.
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
        torch: the installed torch, None if there is none.
        packages: every extension of torch that is installed, and those that were asked for.
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
        environment: the GPUs and versions to compare with; by default those that are here.

    Example:
        >>> from kernel_compat.diagnostics.installs import diagnose
        >>> [finding.problem for package in diagnose(["flash-attn-4"]).packages for finding in package.findings]
        ['flash-attn-4 is not installed']
    """
    environment = Environment.detect(names) if environment is None else environment
    torch = LibTorch.find(environment)
    found = installed(names)
    everything = found if not names else installed(SOURCES)
    packages = []
    for name in dict.fromkeys((*names, *found)):
        copies = found.get(name, [])
        package = _diagnose(copies, everything, torch, environment) if copies else _absent(name)
        if package.extends_torch or name in names:
            packages.append(package)
    return Diagnosis(environment, torch, tuple(packages))


def _absent(name: str) -> Package:
    command = reinstall(name).replace(" --force-reinstall --no-deps", "")
    return Package(name, "", "", Built(), (Finding(name, "", "not-installed", f"{name} is not installed", command),))


def _diagnose(
    copies: Sequence[Installed],
    everything: Mapping[str, Sequence[Installed]],
    torch: LibTorch | None,
    environment: Environment,
) -> Package:
    one = copies[0]
    findings = [*_copies(copies), *_files_of(one), *_namespace(one, everything, environment)]
    built, extends = Built(), one.name in SOURCES or one.requires_torch is not None
    if platform.system() == "Linux":
        paths = dict(_shared_objects(one))
        siblings = {path.name: path for path in paths.values()}
        of_torch: dict[str, SharedObject] = {}
        by_file: dict[str, list[Finding]] = {}
        for name, path in paths.items():
            try:
                file = read(path)
            except BrokenFileError as error:
                by_file[name] = [_finding(one, name, error.cause, str(error), torch)]
                continue
            if file.of_torch:
                of_torch[name] = file
                wrong = disagreements(path, file, torch, siblings)
                by_file[name] = [_finding(one, name, found.cause, found.problem, torch) for found in wrong]
        extends = extends or bool(of_torch)
        findings += _of_variants(by_file)
        findings += _gpus(one, of_torch, torch, environment)
        built = _built(one.claim, of_torch)
        findings += _claim(one, torch, findings)
    return Package(one.name, one.version, str(one.folder), built, tuple(findings), extends)


def _of_variants(by_file: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """The findings of files, without those of variants of which one is well.

    Some packages have a file for each release of torch or of another library, named for it: torch-c-dlpack-ext, torchcodec.
    """
    groups: dict[str, list[str]] = {}
    for name in by_file:
        module = name.partition(".")[0] if python_of(name) else ""
        groups.setdefault(module or re.sub(r"\d+", "#", name), []).append(name)
    for names in groups.values():
        found = [by_file[name] for name in names]
        same_module = len(names) > 1 and bool(python_of(names[0]))
        if len(names) < 3 and not same_module:
            yield from (finding for findings in found for finding in findings)
        elif all(found):
            last = found[-1][0]
            yield replace(
                last, problem=f"of its {len(names)} variants none loads here: {last.problem}", breaks=same_module
            )


def _finding(one: Installed, file: str, cause: str, problem: str, torch: LibTorch | None) -> Finding:
    if cause == "torch-missing":
        command = "pip install torch"
    elif cause == "torch-build":
        command = (
            "pip install --force-reinstall torch  # the build for this GPU: https://pytorch.org/get-started/locally"
        )
    elif cause == "library" and "libcuda.so.1" in problem:
        command = ""
    elif cause in ("missing-file", "unreadable", "empty", "truncated", "damaged", "not-elf"):
        command = reinstall(one.name, one.version)
    else:
        published = bool(one.claim and torch and (one.claim.torch, one.claim.cuda) == (torch.minor, torch.cuda))
        command = _rebuild(one, torch, force=published or cause == "glibc")
    # A wheel for this interpreter loads a file of another one by its path, as torchao does, or not at all.
    return Finding(one.name, file, cause, problem, command, breaks=not (cause == "python" and one.for_this_python))


def _rebuild(
    one: Installed, torch: LibTorch | None, *, force: bool = False, capability: tuple[int, int] | None = None
) -> str:
    return reinstall(
        one.name,
        one.version,
        torch=torch,
        rebuild=True,
        force=force,
        compiled=one.compiled,
        requires_torch=one.requires_torch,
        capability=capability,
    )


def _copies(copies: Sequence[Installed]) -> Iterator[Finding]:
    first = copies[0]
    for other in copies[1:]:
        same = first.folder.resolve() == other.folder.resolve()
        where = f"twice in {first.folder}" if same else f"in {first.folder} and in {other.folder}"
        removal = f"pip uninstall -y {first.name}"
        yield Finding(
            first.name,
            "",
            "two-copies",
            f"{first.name} is installed {where}: {first.version or '?'} and {other.version or '?'}"
            + ("" if same else f"; Python imports {first.version or 'the first'}"),
            f"{removal} && {removal} && {reinstall(first.name, first.version)}",
            breaks=same,
        )


def _shared_objects(one: Installed) -> Iterator[tuple[str, Path]]:
    """Its shared objects by recorded name; those that its imports lead to where RECORD doesn't list them."""
    for name in one.shared_objects:
        yield name, one.folder / name
    if one.record is None or one.editable:
        for module in SOURCES[one.name].modules if one.name in SOURCES else ():
            for path in _module_files(module):
                if path.suffix == ".so":
                    yield str(path), path
                else:
                    yield from ((str(inner), inner) for inner in sorted(path.parent.rglob("*.so")))


def _module_files(module: str) -> list[Path]:
    """Where `import module` finds its file; empty if it finds none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    if spec.origin:
        return [Path(spec.origin)]
    return [Path(folder, "__init__.py") for folder in spec.submodule_search_locations or ()][:1]


def _files_of(one: Installed) -> Iterator[Finding]:
    """What RECORD and the imports say about its files."""
    command = reinstall(one.name, one.version)
    if one.name == "flash-attn-cute":
        problem = "flash-attn-cute is an empty placeholder, not FlashAttention-4"
        yield Finding(one.name, "", "placeholder", problem, command)
        return
    if one.record is None and not one.editable:
        problem = "its metadata has no RECORD, so its files aren't known and pip can't remove it"
        yield Finding(one.name, "", "no-record", problem, command, breaks=False)
    present = [path for path in one.record or () if not path.endswith((".so", ".pyc")) and not path.startswith("..")]
    missing = [path for path in present if not (one.folder / path).exists()]
    if missing:
        problem = f"files are missing: {len(missing)} of {len(present)}"
        needless = one.name == "flash-attn" and all(path.startswith(_CUTE) for path in missing)
        yield Finding(one.name, missing[0], "missing-file", problem, command, breaks=not needless)
    for module in SOURCES[one.name].modules if one.name in SOURCES else ():
        files = _module_files(module)
        listed = [path for path in one.record or () if path.startswith((f"{module}/", f"{module}."))]
        if not files and not listed and one.record is not None and not one.editable:
            problem = f"it has no module {module}: it was built without CUDA"
            yield Finding(one.name, "", "missing-file", problem, _rebuild(one, None, force=True))
        elif files and listed and not files[0].resolve().is_relative_to(one.folder.resolve()):
            problem = f"import {module} finds {files[0]}, which isn't the installed one"
            yield Finding(
                one.name, listed[0], "shadowed", problem, f"# start Python elsewhere, or remove {files[0].parent}"
            )


def _namespace(
    one: Installed, everything: Mapping[str, Sequence[Installed]], environment: Environment
) -> Iterator[Finding]:
    """FlashAttention-2 and -4 share the folder flash_attn; other packages may share files too."""
    for other in (copies[0] for name, copies in everything.items() if name != one.name):
        shared = set(one.record or ()) & set(other.record or ())
        lost = sorted(path for path in shared if _overwritten(one, other, path))
        if not lost:
            continue
        files = f"{len(lost)} of its files" if len(lost) > 1 else "one of its files"
        if one.name == "flash-attn" and all(path.startswith(_CUTE) for path in lost):
            problem = f"{other.name} has replaced {files}, as it should: FlashAttention-2 doesn't use them"
            command = f"# after `pip uninstall flash-attn`: {reinstall(other.name, other.version)}"
            yield Finding(one.name, lost[0], "overwritten", problem, command, breaks=False)
        else:
            problem = f"{other.name} {other.version} has overwritten {files}"
            yield Finding(one.name, lost[0], "overwritten", problem, reinstall(one.name, one.version))
    old_cute = one.name == "flash-attn" and any(path.startswith(_CUTE) for path in one.record or ())
    if old_cute and "flash-attn-4" not in everything and "nvidia-cutlass-dsl" in environment.packages:
        problem = (
            "its flash_attn.cute is an old copy, not FlashAttention-4, and fails with newer releases of nvidia-cutlass-dsl: "
            "code that imports it to look for FlashAttention-4 fails (NVIDIA/Megatron-LM#6964)"
        )
        command = "pip install --pre flash-attn-4"
        yield Finding(one.name, f"{_CUTE}__init__.py", "old-cute", problem, command, breaks=False)


def _overwritten(one: Installed, other: Installed, path: str) -> bool:
    mine, theirs = (one.record or {})[path], (other.record or {})[path]
    file = one.folder / path
    return mine != theirs and file.exists() and not is_recorded(file, mine) and is_recorded(file, theirs)


def _gpus(
    one: Installed, files: Mapping[str, SharedObject], torch: LibTorch | None, environment: Environment
) -> Iterator[Finding]:
    code: set[GpuCode] = set().union(*(file.gpu_code for file in files.values()))
    if not code:
        return
    by_capability = {device.capability: device for device in environment.devices}
    for capability, device in sorted(by_capability.items()):
        if runs_on(code, capability):
            continue
        problem = f"it has code for {targets_text(code)}, none of which runs on {device}"
        if instead := _instead(one.name, device):
            problem, command = f"{problem}. {instead}", ""
        else:
            command = _rebuild(one, torch, capability=capability)
        file = next(name for name, file in files.items() if file.gpu_code)
        yield Finding(one.name, file, "gpu", problem, command)


def _instead(distribution: str, device: Device) -> str:
    """A sentence that names the kernels for a GPU which no version of a package supports; empty if one does."""
    there = Environment(packages={"torch": ""}, imports={"torch": ("torch",)}, devices=(device,))
    packages = [package for kernel in CATALOG.values() for package in kernel if package.distribution == distribution]
    reasons = [reason for package in packages for reason in package.no_device_because(there)]
    if not reasons:
        return ""
    names = ", ".join(kernels_with(lambda package, features: package.bundled, there))
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


def _claim(one: Installed, torch: LibTorch | None, findings: Sequence[Finding]) -> Iterator[Finding]:
    """A wheel for another torch whose symbols are all there, as far as names tell."""
    claim = one.claim
    if claim is None or torch is None or any(finding.breaks for finding in findings):
        return
    if torch.minor and claim.torch != torch.minor:
        problem = (
            f"it says that it is built for torch {claim.torch}, and this is {torch}: it may compute wrong or crash"
        )
        yield replace(_finding(one, "", "claim", problem, torch), breaks=False)

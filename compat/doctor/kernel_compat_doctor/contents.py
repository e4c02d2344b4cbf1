"""The files of a package, compared with its metadata, with what Python imports, and with other packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kernel_compat.environment import Environment, hider_of, is_recorded, package_folders

from .distributions import Installed
from .finding import Finding
from .sources import SOURCES, reinstall

__all__ = ["copies_of", "files_of", "hidden", "overwritten", "shared_objects"]

_CUTE = "flash_attn/cute/"


def copies_of(copies: Sequence[Installed]) -> Iterator[Finding]:
    """Other copies of a package: in the same folder, or further along sys.path."""
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


def shared_objects(dist: Installed) -> Iterator[tuple[str, Path]]:
    """The names and paths of its shared objects, from its RECORD; without a complete RECORD, also those of its modules."""
    for name in dist.shared_objects:
        yield name, dist.folder / name
    if dist.record is None or dist.editable:
        for module in SOURCES[dist.name].modules if dist.name in SOURCES else (dist.name.replace("-", "_"),):
            for path in _module_files(module):
                if path.suffix == ".so":
                    yield str(path), path
                elif path.name == "__init__.py":
                    yield from ((str(inner), inner) for inner in sorted(path.parent.rglob("*.so")))


def _is_inside(file: Path, folder: Path) -> bool:
    # uv can fill site-packages with links to its cache.
    return file.is_relative_to(folder) or file.parent.resolve().is_relative_to(folder.resolve())


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


def files_of(dist: Installed) -> Iterator[Finding]:
    """Findings about its files: files in RECORD that don't exist, and modules that Python imports from elsewhere."""
    command = reinstall(dist.name, dist.version)
    if dist.name == "flash-attn-cute":
        problem = "flash-attn-cute is an empty placeholder, not FlashAttention-4"
        yield Finding(dist.name, "", "placeholder", problem, command)
        return
    if not dist.version:
        problem = (
            "its metadata has no readable version: an install or an uninstall was interrupted, or the file is damaged"
        )
        yield Finding(dist.name, "", "no-metadata", problem, reinstall(dist.name))
    elif dist.record is None and not dist.editable:
        problem = "its metadata has no RECORD, so its files aren't known and pip can't remove it"
        yield Finding(dist.name, "", "no-record", problem, command, breaks=False)
    present = [path for path in dist.record or () if not path.endswith((".so", ".pyc")) and not path.startswith("..")]
    missing = [path for path in present if not os.path.exists(dist.folder / path)]  # False for a locked folder
    if missing:
        problem = f"files are missing: {len(missing)} of {len(present)}"
        needless = dist.name == "flash-attn" and all(path.startswith(_CUTE) for path in missing)
        yield Finding(dist.name, missing[0], "missing-file", problem, command, breaks=not needless)
    for module in SOURCES[dist.name].modules if dist.name in SOURCES else ():
        files = _module_files(module)
        listed = [path for path in dist.record or () if path.startswith((f"{module}/", f"{module}."))]
        if module.endswith("_cuda") and not files and not listed and dist.record is not None and not dist.editable:
            problem = f"it has no module {module}: it was built without CUDA"
            yield Finding(
                dist.name, "", "missing-file", problem, reinstall(dist.name, dist.version, rebuild=True, force=True)
            )
        elif files and listed and not _is_inside(files[0], dist.folder):
            problem = f"import {module} finds {files[0]}, which isn't the installed one"
            yield Finding(
                dist.name, listed[0], "shadowed", problem, f"# start Python elsewhere, or remove {files[0].parent}"
            )


def hidden(dist: Installed) -> Iterator[Finding]:
    """Packages of a distribution that Python doesn't find: another folder of sys.path has a package of the same name."""
    record = {} if dist.editable else dist.record or {}
    files = [path for path in record if path.endswith((".py", ".so")) and not path.startswith("..")]
    packages = {path.rpartition("/")[0].replace("/", ".") for path in files}
    shadowed: list[str] = list(SOURCES[dist.name].modules) if dist.name in SOURCES else []  # `files_of` looks for them
    well: set[str] = set()
    for name in sorted(filter(_is_package, packages), key=lambda name: (name.count("."), name)):
        top = name.partition(".")[0]
        if top in well or any(name == known or name.startswith(f"{known}.") for known in shadowed):
            continue
        if len(package_folders(top)) == 1 and not hider_of(
            dist.name, dist.version, str(dist.folder), lambda: record, top
        ):
            well.add(top)  # one folder has all of it
        elif hider := hider_of(dist.name, dist.version, str(dist.folder), lambda: record, name):
            shadowed.append(name)
            file = next(path for path in files if path.startswith(f"{name.replace('.', '/')}/"))
            problem = f"{hider}: `import {name}` fails, or finds another one"
            yield Finding(dist.name, file, "shadowed", problem, hider.command)


def _is_package(name: str) -> bool:
    return all(map(str.isidentifier, name.split(".")))


def overwritten(
    dist: Installed, everything: Mapping[str, Sequence[Installed]], environment: Environment
) -> Iterator[Finding]:
    """Files of a distribution that another one has overwritten. FlashAttention-2 and -4 share the folder flash_attn."""
    for other in (copies[0] for name, copies in everything.items() if name != dist.name):
        shared = set(dist.record or ()) & set(other.record or ())
        lost = sorted(path for path in shared if _is_overwritten(dist, other, path))
        if not lost:
            continue
        files = f"{len(lost)} of its files" if len(lost) > 1 else "one of its files"
        if dist.name == "flash-attn" and all(path.startswith(_CUTE) for path in lost):
            problem = f"{other.name} has replaced {files}, as it should: FlashAttention-2 doesn't use them"
            command = f"# after `pip uninstall flash-attn`: {reinstall(other.name, other.version)}"
            yield Finding(dist.name, lost[0], "overwritten", problem, command, breaks=False)
        else:
            problem = f"{other.name} {other.version} has overwritten {files}"
            yield Finding(dist.name, lost[0], "overwritten", problem, reinstall(dist.name, dist.version))
    old_cute = dist.name == "flash-attn" and any(path.startswith(_CUTE) for path in dist.record or ())
    if old_cute and "flash-attn-4" not in everything and "nvidia-cutlass-dsl" in environment.packages:
        problem = (
            "its flash_attn.cute is an old copy, not FlashAttention-4, and fails with newer releases of nvidia-cutlass-dsl: "
            "code that imports it to look for FlashAttention-4 fails (NVIDIA/Megatron-LM#6964)"
        )
        command = "pip install --pre flash-attn-4"
        yield Finding(dist.name, f"{_CUTE}__init__.py", "old-cute", problem, command, breaks=False)


def _is_overwritten(dist: Installed, other: Installed, path: str) -> bool:
    mine, theirs = (dist.record or {})[path], (other.record or {})[path]
    file = dist.folder / path
    return mine != theirs and os.path.exists(file) and not is_recorded(file, mine) and is_recorded(file, theirs)

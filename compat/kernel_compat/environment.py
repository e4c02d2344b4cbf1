"""Installed distributions and visible GPUs, found without importing a framework."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from .versions import within

__all__ = ["Device", "Environment"]

#: Distributions by name, with the imports whose files each ships, its own import first.
SHIPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("torch",),
        "transformers": ("transformers",),
        "flash-attn": ("flash_attn", "flash_attn.cute"),
        "flash-attn-3": ("flash_attn_interface",),
        "fa3-fwd": ("fa3_fwd_interface",),
        "flash-attn-4": ("flash_attn.cute", "flash_attn"),
    }
)

#: Distributions that are looked up. Looking each up by name takes microseconds; reading every installed distribution, as
#: ``packages_distributions()`` does, takes seconds in a large environment.
DISTRIBUTIONS = ("kernel-compat", *SHIPS, "flash-attn-cute", "kernels", "nvidia-cutlass-dsl")

#: Imports, with the distributions that may ship each.
KNOWN_IMPORTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(distribution for distribution, shipped in SHIPS.items() if name in shipped)
        for name in dict.fromkeys(name for shipped in SHIPS.values() for name in shipped)
    }
)


@dataclass(frozen=True)
class Device:
    """One GPU: its marketing name and its CUDA compute capability, e.g. ``(9, 0)``."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"


@dataclass(frozen=True)
class Environment:
    """A frozen description of an installation; `Environment.detect()` describes this one, tests build their own.

    Attributes:
        python: version of the interpreter.
        system: operating system and machine, e.g. ``"Linux x86_64"``.
        packages: version by normalized distribution name, as the metadata gives it.
        imports: for each contested import that is there, the distributions that ship it, the one whose
            files are on disk first. Empty tuple: importable, but no distribution records it.
        devices: the GPUs that are visible to this process.
        problems: defects of the installation, one sentence each.
    """

    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    packages: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    devices: tuple[Device, ...] = field(default_factory=tuple)
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", MappingProxyType(dict(self.packages)))
        object.__setattr__(self, "imports", MappingProxyType(dict(self.imports)))

    def __getattr__(self, name: str) -> Any:
        # NVML starts a thread that stays in the process. Most callers don't need the devices, so `detect` leaves them out.
        if name != "devices":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, "devices", _devices())
        return self.devices

    def version(self, distribution: str) -> Version | None:
        """The version of a distribution, or None where it isn't installed or its version can't be read."""
        try:
            return Version(self.packages[distribution])
        except (KeyError, InvalidVersion):
            return None

    @classmethod
    def detect(cls, distributions: Iterable[str] = ()) -> Environment:
        """Describe the running interpreter from metadata, without importing a framework. Reading `devices` queries the NVIDIA driver.

        Never raises for a broken installation: `problems` describes it.

        Args:
            distributions: names of further distributions to look up.
        """
        problems: list[str] = []
        installed: dict[str, importlib.metadata.Distribution] = {}
        for name in dict.fromkeys((*DISTRIBUTIONS, *map(canonicalize_name, distributions))):
            with suppress(importlib.metadata.PackageNotFoundError):
                installed[name] = importlib.metadata.distribution(name)
        packages: dict[str, str] = {}
        for name, dist in installed.items():
            version = _metadata_version(dist)
            if version is None:
                problems.append(f"{name} is installed without a readable version: reinstall it.")
            else:
                packages[name] = version
        hidden = _hidden(installed, packages)
        problems += [f"{hider}: {hider.command}" for hider in hidden.values()]
        imports = _imports(installed, problems, hidden)
        problems += _conflicts(installed, packages)
        environment = cls(packages=packages, imports=imports, problems=tuple(problems))
        object.__delattr__(environment, "devices")
        return environment


def torch_flash_backend() -> str | None:
    """The FlashAttention behind torch's own attention in this process: ``"FA3"``, ``"FA4"``.

    None for the built-in one, and where torch is not imported.
    """
    current: Any = getattr(sys.modules.get("torch.nn.attention"), "current_flash_attention_impl", lambda: None)
    backend: str | None = current()
    return backend


def _metadata_version(dist: importlib.metadata.Distribution) -> str | None:
    try:
        # Searched as text: `dist.version` parses all the metadata as an email.
        headers = (dist.read_text("METADATA") or "").partition("\n\n")[0]
        match = re.search(r"^Version:(.*)$", headers, re.MULTILINE)
        version = match[1].strip() if match else dist.version
        Version(version or "")
    except (KeyError, OSError, TypeError, ValueError):  # InvalidVersion and UnicodeDecodeError are ValueErrors
        return None
    return version


def _hidden(installed: Mapping[str, importlib.metadata.Distribution], packages: Mapping[str, str]) -> dict[str, Hider]:
    """What hides the own package of each distribution that Python doesn't find."""
    hiders = {}
    for owner, version in packages.items():
        for name in SHIPS.get(owner, ())[:1]:
            site = str(installed[owner].locate_file(""))
            if hider := hider_of(owner, version, site, partial(_record, installed[owner], name), name):
                hiders[owner] = hider
    return hiders


def _imports(
    installed: Mapping[str, importlib.metadata.Distribution], problems: list[str], hidden: Collection[str]
) -> dict[str, tuple[str, ...]]:
    imports: dict[str, tuple[str, ...]] = {}
    for name, candidates in KNOWN_IMPORTS.items():
        if not importable(name):
            absent = [c for c in candidates if c in installed and not name.endswith(".cute")]
            problems += [f"{candidate} is installed but {name} can't be found: reinstall it." for candidate in absent]
            continue
        records = {c: _record(installed[c], name) for c in candidates if c in installed and c not in hidden}
        # Without a record a distribution ships the import that it is named for.
        by_name = {c for c in records if "." not in name or name == SHIPS[c][0]}
        owners = [c for c, record in records.items() if record or (record is None and c in by_name)]
        if len(owners) > 1:
            owners.sort(key=lambda owner: not _on_disk(installed[owner], records[owner]))
        imports[name] = tuple(owners)
        if not owners and name in ("torch", "transformers"):
            problems.append(f"{name} can be imported but has no metadata, so its version is unknown.")
    return imports


def importable(name: str) -> bool:
    """Whether `name` would be found, without importing its parent."""
    if sys.modules.get(name) is not None:
        return True
    return bool(package_folders(name)) if "." in name else _spec(name) is not None


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None


def package_folders(name: str) -> list[str]:
    """The folders that Python searches for the modules of a package, found without importing it; empty if there is none."""
    top, *rest = name.split(".")
    spec = _spec(top)
    folders = list((spec and spec.submodule_search_locations) or ())
    if spec is not None and spec.origin and folders and _extends_path(spec.origin):
        folders += [folder for entry in sys.path if os.path.isdir(folder := os.path.join(entry, top))]
    for part in rest:
        candidates = [os.path.join(folder, part) for folder in folders]
        regular = [folder for folder in candidates if os.path.isfile(os.path.join(folder, "__init__.py"))]
        folders = regular[:1] or [folder for folder in candidates if os.path.isdir(folder)]
    return folders


def _extends_path(origin: str) -> bool:
    """Whether a package adds the folders of its name on sys.path when it is imported, as before namespace packages."""
    try:
        with open(origin, "rb") as file:
            return bool(re.search(rb"extend_path|declare_namespace", file.read(10_000)))
    except OSError:
        return False


@dataclass(frozen=True)
class Hider:
    """A package that hides another one of its name, or a part of it.

    A package with an ``__init__.py`` is searched in one folder alone. It hides the packages of its name in other folders of
    sys.path, also in earlier ones if they have no ``__init__.py``.

    Attributes:
        package: its name.
        folder: the folder of sys.path that it is in.
        owner: the distribution of the hidden package.
        version: its version.
        hidden: the name of the hidden package, such as ``flash_attn.cute``.
        site: the folder that the hidden package is installed in.
    """

    package: str
    folder: str
    owner: str
    version: str
    hidden: str
    site: str

    def __str__(self) -> str:
        path = self.hidden.replace(".", "/")
        return f"the package {self.package} in {self.folder} hides {path} of {self.owner} in {self.site}"

    @property
    def command(self) -> str:
        """The command that brings the hidden package into the folder of the other one."""
        prefix, library, _ = self.folder.rpartition(f"/lib/python{sys.version_info[0]}.{sys.version_info[1]}/")
        if library and os.path.basename(self.folder) == "site-packages":
            pre = ["--pre"] if Version(self.version).is_prerelease else []
            words = [
                "--ignore-installed",
                "--no-deps",
                *pre,
                "--prefix",
                prefix or "/",
                f"{self.owner}=={self.version}",
            ]
            return shlex.join(["pip", "install", *words])
        parts = self.hidden.split(".")[: self.package.count(".") + 2]
        return shlex.join(["cp", "-r", os.path.join(self.site, *parts), os.path.join(self.folder, *parts[:-1])])


def hider_of(
    owner: str, version: str, site: str, record: Callable[[], Mapping[str, str] | None], name: str
) -> Hider | None:
    """What hides an installed package; None if Python finds it, or nothing of its name.

    Args:
        owner: the distribution that ships it.
        version: the distribution's version.
        site: the folder in which it is installed.
        record: returns files of the distribution, with their hashes; called where Python finds another package.
        name: the package.
    """
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        own, searched = os.path.join(site, *parts[:count]), package_folders(".".join(parts[:count]))
        if not searched or not os.path.isdir(own):
            return None
        if os.path.realpath(own) not in map(os.path.realpath, searched):
            folders = package_folders(name)
            inside = {f: h for f, h in (record() or {}).items() if f.rpartition("/")[0] == "/".join(parts)}
            if folders and inside and all(is_recorded(Path(folders[0], Path(f).name), h) for f, h in inside.items()):
                return None  # a copy of it
            folder = os.path.normpath(os.path.join(searched[0], *[os.pardir] * count))
            return Hider(".".join(parts[:count]), folder, owner, version, name, site)
    return None


def _record(dist: importlib.metadata.Distribution, name: str) -> dict[str, str] | None:
    """The recorded files of `dist` that make up the import `name`, with their hashes; None without such a record.

    An editable or damaged install has none. Searched as text: `dist.files` parses every row, which takes 0.2 s for torch.
    """
    try:
        text = dist.read_text("RECORD") or ""
    except (OSError, ValueError):
        return None
    text = f"\n{text}\n"  # str.find takes a hundredth of the time of a regular expression with ^
    top, path = name.partition(".")[0], name.replace(".", "/")
    if f"\n{top}/" not in text and f"\n{top}.py," not in text:
        return None
    rows = {}
    for file in (f"{path}.py", f"{path}/__init__.py", f"{path}/interface.py"):
        if (at := text.find(f"\n{file},")) >= 0:
            rows[file] = text[at + 1 : text.find("\n", at + 1)].split(",")[1]
    if not rows and name == "flash_attn":  # FA4 ships flash_attn/cute without flash_attn/__init__.py
        return _record(dist, "flash_attn.cute")
    return rows


def _on_disk(dist: importlib.metadata.Distribution, record: Mapping[str, str] | None) -> bool:
    """Whether the files on disk are the recorded ones: another distribution may have overwritten them."""
    return all(is_recorded(str(dist.locate_file(path)), recorded) for path, recorded in (record or {}).items())


def is_recorded(path: str | os.PathLike[str], recorded: str) -> bool:
    """Whether a file has the hash that RECORD gives it; True for a hash other than SHA-256, and for none."""
    algorithm, _, expected = recorded.partition("=")
    if algorithm != "sha256":
        return True
    try:
        with open(path, "rb") as stream:
            digest = hashlib.sha256(stream.read()).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == expected.strip()


def _conflicts(installed: Mapping[str, importlib.metadata.Distribution], packages: Mapping[str, str]) -> list[str]:
    problems = []
    if "flash-attn-cute" in packages and within(packages["flash-attn-cute"], "<=0.0.1"):
        problems.append(
            "flash-attn-cute 0.0.1 is an empty placeholder, not FlashAttention-4: "
            "uninstall it and install flash-attn-4."
        )
    fa4 = installed.get("flash-attn-4")
    if fa4 is not None and not _on_disk(fa4, _record(fa4, "flash_attn.cute")):
        culprit = "flash-attn" if "flash-attn" in installed else "another package"
        problems.append(
            f"{culprit} has overwritten flash_attn/cute of flash-attn-4 with its own old copy: "
            "reinstall flash-attn-4, last (pip install --force-reinstall --no-deps --pre flash-attn-4)."
        )
    return problems


def _devices() -> tuple[Device, ...]:
    """The visible NVIDIA GPUs.

    Queries NVML, which neither imports torch nor creates a CUDA context (a context would break later forks);
    where torch has initialised CUDA already, its own list is exact and is used.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            return tuple(
                Device(torch.cuda.get_device_name(i), tuple(torch.cuda.get_device_capability(i)))
                for i in range(torch.cuda.device_count())
            )
    except Exception:  # a half-imported or broken torch must not break the diagnosis
        pass
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append((str(uuid), Device(str(name), (int(major), int(minor)))))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
    return tuple(_visible(gpus, visible))


def _visible(gpus: list[tuple[str, Device]], visible: str | None) -> list[Device]:
    """Apply CUDA_VISIBLE_DEVICES: indices or UUID prefixes; entries behind an invalid one are hidden."""
    if visible is None:
        return [device for _, device in gpus]
    chosen = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)][1])
        elif matches := [device for uuid, device in gpus if entry and uuid.startswith(entry)]:
            chosen.append(matches[0])
        elif entry.startswith("MIG-") and gpus:
            chosen.append(gpus[0][1])  # a slice of a GPU, listed by another name; GPUs are seldom mixed
        else:
            break
    return chosen

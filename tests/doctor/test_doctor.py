"""`kernel-compat doctor`: broken installs of real ELF files and metadata, each with its cause and the command that mends it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if platform.system() != "Linux":
    pytest.skip("ELF files are Linux'", allow_module_level=True)
pytest.importorskip("lief")

import lief
import shared_objects
from shared_objects import ERROR, OLD_ERROR, library, shared_object

from kernel_compat import cli
from kernel_compat.environment import Device, Environment
from kernel_compat_doctor import CAUSES, Diagnosis, Finding, LibTorch, Machine, diagnose, ways
from kernel_compat_doctor.gpu_code import GpuCode
from kernel_compat_doctor.libtorch import _DATED, releases_with
from kernel_compat_doctor.shared_object import BrokenFileError, read
from kernel_compat_doctor.sources import wheel_name

H100, A100, T4 = Device("NVIDIA H100", (9, 0)), Device("NVIDIA A100", (8, 0)), Device("Tesla T4", (7, 5))
B200 = Device("NVIDIA B200", (10, 0))

PYTHON = f"{sys.version_info.major}{sys.version_info.minor}"
SUFFIX = f".cpython-{PYTHON}-{platform.machine()}-linux-gnu.so"
EXTENSION = f"flash_attn_2_cuda{SUFFIX}"
CUDA_LIBRARIES = ("libc10.so", "libtorch.so", "libc10_cuda.so", "libtorch_cuda.so", "libcudart.so.13")
SET_DEVICE = "_ZN3c104cuda9SetDeviceEab"
FA2 = {"flash_attn/__init__.py": "raise RuntimeError('imported')\n", "flash_attn/flash_attn_interface.py": "\n"}
OLD_CUTE = {"flash_attn/cute/__init__.py": "old = 1\n", "flash_attn/cute/interface.py": "old = 1\n"}
FA4 = {"flash_attn/cute/__init__.py": "new = 1\n", "flash_attn/cute/interface.py": "new = 1\n"}


class Bench:
    """A site-packages to break."""

    def __init__(self, site: Any) -> None:
        self.site = site
        self.path: Path = site.path

    def torch(
        self,
        version: str = "2.11.0",
        cuda: int | None = 13,
        symbols: Sequence[str] = (ERROR, SET_DEVICE),
        extra: Sequence[str] = (),
    ) -> None:
        names = ["libc10", "libtorch", "libtorch_cpu", "libtorch_python", *extra]
        files: dict[str, str | bytes] = {f"torch/lib/{name}.so": library() for name in names}
        files["torch/lib/libc10.so"] = library(tuple(symbols))
        if cuda is not None:
            files["torch/lib/libc10_cuda.so"] = library((), (f"libcudart.so.{cuda}",))
            files["torch/lib/libtorch_cuda.so"] = library()
        files["torch/__init__.py"] = "raise RuntimeError('torch was imported')\n"
        self.site.install("torch", version, files)

    def install(
        self,
        name: str,
        version: str = "1.0",
        files: dict[str, Any] | None = None,
        *,
        requires: str = "torch",
        url: str = "",
        tag: str = "",
        **metadata: Any,
    ) -> Path:
        folder: Path = self.site.install(name, version, files or {}, **metadata)
        with open(folder / "METADATA", "a") as file:
            file.write(f"Requires-Dist: {requires}\n")
        if url:
            (folder / "direct_url.json").write_text(json.dumps({"url": url}))
        if tag:
            (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
        return folder

    def fa2(self, content: bytes | None = None, file: str = EXTENSION, version: str = "2.8.3", **facts: Any) -> Path:
        content = shared_object(CUDA_LIBRARIES, (ERROR, SET_DEVICE), ("sm_80", "sm_90")) if content is None else content
        return self.install("flash-attn", version, {**FA2, file: content}, **facts)


@pytest.fixture
def bench(site: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("kernel_compat.environment._devices", lambda: ())
    for metadata in Path(sys.path[-1]).glob(
        "*.dist-info"
    ):  # links to the packages of the tests, whose files take a second
        metadata.unlink()
    return Bench(site)


def look(*names: str, devices: Sequence[Device] = ()) -> Diagnosis:
    found = diagnose(names, replace(Environment.detect(names), devices=tuple(devices)))
    assert "torch" not in sys.modules
    return found


def findings(*names: str, devices: Sequence[Device] = ()) -> list[Finding]:
    return [finding for package in look(*names, devices=devices).packages for finding in package.findings]


def built(needed: Sequence[str] = CUDA_LIBRARIES, undefined: Sequence[str] = (ERROR,), *targets: str) -> bytes:
    return shared_object(tuple(needed), tuple(undefined), targets)


Break = Callable[[Bench], Any]

#: Broken installs by name: what makes one, the cause, words of the problem, and words of the command. A note has `note` as the
#: first word of its cause.
BROKEN: dict[str, tuple[Break, str, str, str]] = {}


def broken(cause: str, problem: str, command: str = "") -> Callable[[Break], Break]:
    def enter(make: Break) -> Break:
        BROKEN[make.__name__.replace("_", " ")] = (make, cause, problem, command)
        return make

    return enter


REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation flash-attn==2.8.3"
NEWEST = REBUILD.removesuffix("==2.8.3")
AGAIN = "pip install --force-reinstall --no-deps --no-build-isolation flash-attn==2.8.3"


@broken(
    "torch-version",
    f"built for torch 2.3 to 2.7, and this is torch 2.11.0: undefined symbol {SET_DEVICE[:-1]}",
    REBUILD,
)
def built_for_torch_2_7(bench: Bench) -> None:
    """Dao-AILab/flash-attention#1832: _ZN3c104cuda9SetDeviceEa."""
    bench.torch()
    bench.fa2(built(undefined=(ERROR, "_ZN3c104cuda9SetDeviceEa")))


@broken("torch-version", "built for torch 2.2 or earlier, and this is torch 2.11.0", REBUILD)
def built_for_torch_2_2(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built(undefined=("_ZN3c104cuda9SetDeviceEi",)))


@broken("torch-version", "built for torch 2.11 or later, and this is torch 2.8.0: undefined symbol _ZNK3c10", REBUILD)
def built_for_a_newer_torch(bench: Bench) -> None:
    bench.torch("2.8.0")
    bench.fa2(
        built(undefined=("_ZNK3c1010TensorImpl15incref_pyobjectEv", "_ZNK3c104cuda10CUDAStream5queryEv", SET_DEVICE))
    )


@broken(
    "torch-version",
    "built for torch 2.10 or later, and this is torch 2.9.1: undefined symbol torch_call",
    "pip install --force-reinstall fa3-fwd 'torch>=2.11'",
)
def a_stable_abi_that_is_newer(bench: Bench) -> None:
    bench.torch("2.9.1")
    bench.install(
        "fa3-fwd",
        "0.0.3",
        {"fa3_fwd_interface.py": "", "fa3_fwd/_C.abi3.so": built(undefined=("torch_call_dispatcher",))},
    )


@broken("torch-version", "isn't built for torch 2.11.0: undefined symbol _ZTIN5torch6secretE and 1 more", REBUILD)
def symbols_of_an_unknown_torch(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built(undefined=("_ZTIN5torch6secretE", "_Z20THPVariable_ForgottenN2at10TensorBaseE")))


@broken("torch-version", "torch 2.11.0 has no libtorch_stable.so", REBUILD)
def a_library_of_another_torch(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built((*CUDA_LIBRARIES, "libtorch_stable.so")))


@broken(
    "cxx11-abi",
    "built with the C++11 ABI, and torch 2.6.0 with the old C++ ABI: undefined symbol _ZN3c105ErrorC2",
    REBUILD,
)
def the_new_abi_on_an_old_torch(bench: Bench) -> None:
    """Dao-AILab/flash-attention#1832 and #1717: torch 2.6.0 of the index has the old ABI."""
    bench.torch("2.6.0", 12, (OLD_ERROR, SET_DEVICE))
    bench.fa2(built((*CUDA_LIBRARIES[:-1], "libcudart.so.12")))


@broken(
    "cxx11-abi",
    "built with the old C++ ABI, and torch 2.7.0 with the C++11 ABI: undefined symbol " + OLD_ERROR,
    REBUILD,
)
def the_old_abi_on_a_new_torch(bench: Bench) -> None:
    """Dao-AILab/flash-attention#1644."""
    bench.torch("2.7.0")
    bench.fa2(built(undefined=(OLD_ERROR,)))


@broken("cxx11-abi", "the old C++ ABI", f"FLASH_ATTENTION_FORCE_BUILD=TRUE {REBUILD.replace('2.8.3', '2.8.0.post2')}")
def a_published_wheel_that_is_not_what_its_name_says(bench: Bench) -> None:
    """Dao-AILab/flash-attention#1717: the wheel for torch 2.6 was built with another one."""
    bench.torch("2.6.0", 12, (OLD_ERROR,))
    name = f"flash_attn-2.8.0.post2%2Bcu12torch2.6cxx11abiFALSE-cp{PYTHON}-cp{PYTHON}-linux_x86_64.whl"
    bench.fa2(
        built((*CUDA_LIBRARIES[:-1], "libcudart.so.12")), version="2.8.0.post2", url=f"https://example.org/{name}"
    )


@broken("cuda", "it is built for CUDA 12, and torch 2.11.0 for CUDA 13", REBUILD)
def another_cuda(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built((*CUDA_LIBRARIES[:-1], "libcudart.so.12", "libcublas.so.12")))


@broken("cuda", "it is built for CUDA 11, and torch 2.11.0 for CUDA 13", REBUILD)
def cuda_11(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built((*CUDA_LIBRARIES[:-1], "libcudart.so.11.0")))


@broken(
    "torch-build",
    "built for CUDA (libc10_cuda.so, libtorch_cuda.so), and torch 2.11.0 for the CPU alone",
    "pip install --force",
)
def a_torch_for_the_cpu(bench: Bench) -> None:
    bench.torch(cuda=None)
    bench.fa2()


@broken("torch-build", "and torch 2.11.0 for AMD GPUs", "pip install --force-reinstall torch")
def a_torch_for_amd(bench: Bench) -> None:
    bench.torch(cuda=None, extra=("libc10_hip", "libtorch_hip"))
    bench.fa2()


@broken(
    "torch-build",
    "built for AMD GPUs (libc10_hip.so), and torch 2.11.0 for CUDA 13",
    "pip install --force-reinstall torch",
)
def a_package_for_amd(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built(("libtorch.so", "libc10_hip.so")))


@broken(
    "torch-build", "torch 2.11.0 is incomplete, or its folder can't be read: there is no lib", "--force-reinstall torch"
)
def a_torch_without_its_libraries(bench: Bench) -> None:
    bench.torch()
    for path in (bench.path / "torch" / "lib").iterdir():
        path.unlink()
    bench.fa2()


@broken("torch-missing", "torch is not installed", "pip install torch==2.6.0")
def no_torch_for_a_package_of_one_release(bench: Bench) -> None:
    bench.install("torchvision", "0.21.0", {"torchvision/_C.so": built()}, requires="torch==2.6.0")


@broken("torch-missing", "linked to libtorch, and torch is not installed", "pip install torch")
def no_torch(bench: Bench) -> None:
    bench.fa2()


@broken("library", "it needs libcutlass_secret.so.3, which neither torch nor the system has", REBUILD)
def a_library_that_is_nowhere(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built((*CUDA_LIBRARIES, "libcutlass_secret.so.3")))


@broken("python", f"for Python 3.9, and this is Python {PYTHON[0]}.{PYTHON[1:]}", REBUILD)
def another_python(bench: Bench) -> None:
    bench.torch()
    bench.fa2(file="flash_attn_2_cuda.cpython-39-x86_64-linux-gnu.so")


@broken("note python", "for Python 3.9, and this is Python", "pip install --force-reinstall")
def another_python_in_a_wheel_for_this_one(bench: Bench) -> None:
    """torchao 0.18.0 has such a file, and loads it by its path."""
    bench.torch()
    files = {"torchao/_C.cpython-39-x86_64-linux-gnu.so": built()}
    bench.install("torchao", "0.18.0", files, tag="cp39-abi3-manylinux_2_28_x86_64")


@broken("python", "for Python 3.13t, and this is", REBUILD)
def a_free_threaded_python(bench: Bench) -> None:
    bench.torch()
    bench.fa2(file="flash_attn_2_cuda.cpython-313t-x86_64-linux-gnu.so")


@broken("platform", "it is built for PPC64 (64 bits), and this is", REBUILD)
def another_processor(bench: Bench) -> None:
    bench.torch()
    bench.fa2(shared_objects.with_machine(shared_object(), lief.ELF.ARCH.PPC64))


@broken("glibc", "it needs glibc 9.99 or later, and this system has", "FLASH_ATTENTION_FORCE_BUILD=TRUE")
def a_newer_c_library(bench: Bench) -> None:
    bench.torch()
    bench.fa2(shared_objects.without_glibc())


@broken("empty", "it is empty", AGAIN)
def an_empty_file(bench: Bench) -> None:
    bench.torch()
    bench.fa2(b"")


@broken("truncated", "it is cut off: its ELF headers point beyond its end", AGAIN)
def half_a_file(bench: Bench) -> None:
    bench.torch()
    bench.fa2(shared_object()[:1_000_000])


@broken("truncated", "it is cut off", AGAIN)
def the_first_bytes_of_a_file(bench: Bench) -> None:
    bench.torch()
    bench.fa2(shared_object()[:40])


@broken("truncated", "it is cut off", AGAIN)
def an_elf_header_and_noise(bench: Bench) -> None:
    bench.torch()
    bench.fa2(shared_object()[:64] + bytes(range(256)) * 40)


@broken("damaged", "not a shared object", AGAIN)
def an_object_file(bench: Bench) -> None:
    bench.torch()
    bench.fa2(shared_object()[:56] + bytes(2) + shared_object()[58:])  # no program headers


@broken("not-elf", "it is not an ELF file", AGAIN)
def a_text(bench: Bench) -> None:
    bench.torch()
    bench.fa2(b"echo not a library\n")


@broken("not-elf", "a Git LFS pointer, whose content was never fetched", AGAIN)
def a_git_lfs_pointer(bench: Bench) -> None:
    bench.torch()
    bench.fa2(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


@broken("not-elf", "built for macOS", AGAIN)
def a_file_for_macos(bench: Bench) -> None:
    bench.torch()
    bench.fa2(b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01" + bytes(64))


@broken("not-elf", "built for Windows", AGAIN)
def a_file_for_windows(bench: Bench) -> None:
    bench.torch()
    bench.fa2(b"MZ\x90\x00" + bytes(64))


@broken("not-elf", "a web page", AGAIN)
def a_failed_download(bench: Bench) -> None:
    bench.torch()
    bench.fa2(b"<!DOCTYPE html><title>404</title>")


@broken("unreadable", "it can't be read", AGAIN)
def a_folder_in_its_place(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    (bench.path / EXTENSION).unlink()
    (bench.path / EXTENSION).mkdir()


@broken("missing-file", "it isn't there", AGAIN)
def a_link_to_nowhere(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    (bench.path / EXTENSION).unlink()
    (bench.path / EXTENSION).symlink_to("nowhere.so")


@broken("missing-file", "it isn't there", AGAIN)
def a_missing_extension(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    (bench.path / EXTENSION).unlink()


@broken("missing-file", "files are missing: 1 of 4", AGAIN)
def a_missing_python_file(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    (bench.path / "flash_attn" / "flash_attn_interface.py").unlink()


@broken(
    "missing-file",
    "no module flash_attn_2_cuda: it was built without CUDA",
    f"FLASH_ATTENTION_FORCE_BUILD=TRUE {REBUILD}",
)
def a_build_without_cuda(bench: Bench) -> None:
    bench.torch()
    bench.install("flash-attn", "2.8.3", FA2)


@broken("note no-record", "no RECORD", AGAIN)
def no_record(bench: Bench) -> None:
    bench.torch()
    bench.fa2(record=None)


@broken("note no-record", "no RECORD", AGAIN)
def an_empty_record(bench: Bench) -> None:
    bench.torch()
    bench.fa2(record=b"\n")


@broken("note no-record", "no RECORD", AGAIN)
def a_record_that_is_not_text(bench: Bench) -> None:
    bench.torch()
    bench.fa2(record=b"\xff\xfe\x00\x9d,,\n")


@broken("no-metadata", "no readable version", "pip install --force-reinstall --no-deps --no-build-isolation flash-attn")
def an_interrupted_uninstall(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    for file in (bench.path / "flash_attn-2.8.3.dist-info").iterdir():
        file.unlink()


@broken("no-metadata", "no readable version", "pip install --force-reinstall --no-deps --no-build-isolation flash-attn")
def metadata_that_is_not_text(bench: Bench) -> None:
    bench.torch()
    folder = bench.fa2()
    (folder / "METADATA").write_bytes(b"Name: flash-attn\nVersion: \xff\xfe\n")
    (folder / "direct_url.json").write_text("[1, 2]")


@broken("note no-record", "no RECORD", AGAIN)
def a_record_with_a_broken_row(bench: Bench) -> None:
    bench.torch()
    bench.fa2(record=b"\n\n")


@broken("overwritten", "flash-attn 2.8.3 has overwritten 2 of its files", "--pre flash-attn-4==4.0.0b36")
def fa2_over_fa4(bench: Bench) -> None:
    bench.torch()
    bench.install("flash-attn-4", "4.0.0b36", FA4)
    bench.install("flash-attn", "2.8.3", {**FA2, **OLD_CUTE, EXTENSION: built()})


@broken("note overwritten", "flash-attn-4 has replaced 2 of its files, as it should", "--pre flash-attn-4==4.0.0b36")
def fa4_over_fa2(bench: Bench) -> None:
    bench.torch()
    bench.install("flash-attn", "2.8.3", {**FA2, **OLD_CUTE, EXTENSION: built()})
    bench.install("flash-attn-4", "4.0.0b36", FA4)


@broken(
    "missing-file",
    "files are missing: 2 of 4",
    "pip install --force-reinstall --no-deps --pre flash-attn-4==4.0.0b36",
)
def fa4_whose_files_went_with_fa2(bench: Bench) -> None:
    bench.torch()
    bench.install("flash-attn-4", "4.0.0b36", FA4)
    for file in FA4:
        (bench.path / file).unlink()


@broken("note old-cute", "NVIDIA/Megatron-LM#6964", "pip install --pre flash-attn-4")
def the_cute_of_fa2_beside_a_newer_dsl(bench: Bench) -> None:
    bench.torch()
    bench.install("flash-attn", "2.8.3", {**FA2, **OLD_CUTE, EXTENSION: built()})
    bench.install("nvidia-cutlass-dsl", "4.6.2")


@broken(
    "placeholder",
    "an empty placeholder, not FlashAttention-4",
    "pip uninstall -y flash-attn-cute && pip install --pre flash-attn-4",
)
def the_placeholder(bench: Bench) -> None:
    bench.torch()
    bench.install("flash-attn-cute", "0.0.1")


@broken(
    "two-copies", "is installed twice in", "pip uninstall -y flash-attn && pip uninstall -y flash-attn && pip install"
)
def two_versions_in_one_folder(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    bench.fa2(version="2.7.4")


@broken(
    "note two-copies",
    "Python imports 2.8.3",
    "pip uninstall -y flash-attn && pip uninstall -y flash-attn && pip install",
)
def two_folders(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    other = type(bench.site)(bench.path.parent / "user-site")
    Bench(other).fa2(version="2.7.4")
    sys.path.insert(sys.path.index(str(bench.path)) + 1, str(other.path))


@broken("shadowed", "import flash_attn finds", "# start Python elsewhere")
def a_checkout_in_the_current_folder(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    checkout = bench.path.parent / "checkout"
    (checkout / "flash_attn").mkdir(parents=True)
    (checkout / "flash_attn" / "__init__.py").write_text("")
    sys.path.insert(0, str(checkout))
    importlib.invalidate_caches()


@broken("torch-version", "built for torch 2.10 or later", "pip install --upgrade xformers torch==2.9.1")
def a_package_that_asks_for_another_torch(bench: Bench) -> None:
    bench.torch("2.9.1", 12)
    bench.install(
        "xformers",
        "0.0.35",
        {"xformers/__init__.py": "", "xformers/_C.so": built(CUDA_LIBRARIES[:2], ("torch_call_dispatcher",))},
        requires="torch>=2.10",
    )


@broken(
    "torch-version",
    "undefined symbol",
    "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation --no-binary my-ops my-ops==3.0",
)
def an_unknown_extension_that_was_compiled_here(bench: Bench) -> None:
    bench.torch()
    bench.install(
        "my-ops",
        "3.0",
        {f"my_ops/_C{SUFFIX}": built(undefined=("_ZN2at6secretEv",))},
        requires="numpy",
        tag=f"cp{PYTHON}-cp{PYTHON}-linux_x86_64",
    )


@broken("torch-version", "undefined symbol", "pip install --upgrade torchvision torch==2.11.0")
def an_unknown_extension_of_the_index(bench: Bench) -> None:
    bench.torch()
    bench.install(
        "torchvision",
        "0.21.0",
        {"torchvision/_C.so": built(undefined=("_ZN2at6secretEv",))},
        requires="torch==2.6.0",
        tag=f"cp{PYTHON}-cp{PYTHON}-manylinux_2_28_x86_64",
    )


@broken("cuda", "built for CUDA 12", "# install a build of torchcodec for torch 2.11.0 and CUDA 13")
def a_wheel_that_the_index_would_serve_again(bench: Bench) -> None:
    bench.torch()
    bench.install("torchcodec", "0.7.0", {"torchcodec/core.so": built(("libtorch.so", "libcudart.so.12"))})


@broken(
    "torch-version", "it isn't built for torch 2.9.1: undefined symbol _ZN2at6secretEv", "--upgrade torchaudio torch=="
)
def built_for_a_release_that_its_known_symbols_do_not_tell_from_this_one(bench: Bench) -> None:
    """torchaudio 2.8 beside torch 2.9.1: its symbols of the table are those of 2.8 and of 2.9."""
    bench.torch("2.9.1")
    content = built(undefined=(SET_DEVICE, "_ZN2at6secretEv"))
    bench.install("torchaudio", "2.8.0", {"torchaudio/lib/libtorchaudio.so": content}, requires="torch==2.8.0")


@broken("note library", "it needs libsox.so", "# install that library")
def torchaudio_without_sox(bench: Bench) -> None:
    bench.torch()
    bench.install("torchaudio", "2.8.0", {"torchaudio/lib/libtorchaudio_sox.so": built(("libtorch.so", "libsox.so"))})


@broken("torch-version", "undefined symbol", "CAUSAL_CONV1D_FORCE_BUILD=TRUE pip install")
def a_causal_conv1d_whose_name_fits(bench: Bench) -> None:
    bench.torch()
    bench.install(
        "causal-conv1d",
        "1.7.0+cu13torch2.11cxx11abiTRUE",
        {"causal_conv1d/__init__.py": "", f"causal_conv1d_cuda{SUFFIX}": built(undefined=("_ZN2at6secretEv",))},
    )


@broken(
    "cuda",
    "built for CUDA 12",
    "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation mamba-ssm==2.3.2",
)
def mamba_of_another_cuda(bench: Bench) -> None:
    bench.torch()
    bench.install(
        "mamba-ssm",
        "2.3.2",
        {"mamba_ssm/__init__.py": "", f"selective_scan_cuda{SUFFIX}": built(("libtorch.so", "libcudart.so.12"))},
    )


@broken("note claim", "it says that it is built for torch 2.8, and this is torch 2.11.0", REBUILD)
def a_wheel_for_another_torch_that_loads(bench: Bench) -> None:
    bench.torch()
    bench.fa2(url="https://example.org/flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_install(bench: Bench, name: str) -> None:
    make, cause, problem, command = BROKEN[name]
    make(bench)
    found = look()
    (finding,) = [finding for package in found.packages for finding in package.findings]
    kind, _, cause = cause.rpartition(" ")
    assert finding.cause == cause
    assert finding.breaks == (kind != "note")
    assert problem in finding.problem
    assert command in finding.command
    assert found.ok == (kind == "note")


def test_there_are_enough_of_them_and_every_cause_has_one() -> None:
    assert len(BROKEN) >= 30
    tested = {cause.rpartition(" ")[2] for _, cause, _, _ in BROKEN.values()} | {"gpu", "not-installed"}
    assert tested == set(CAUSES)


@pytest.mark.parametrize(
    ("targets", "device", "command"),
    [
        (("sm_80",), H100, f"FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=90 {NEWEST}"),
        (("sm_90a",), B200, f"FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=100 {NEWEST}"),
        (("sm_86", "sm_90"), A100, f"FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=80 {NEWEST}"),
        (("compute_100",), H100, f"FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=90 {NEWEST}"),
        (("sm_80", "sm_90"), Device("NVIDIA RTX 5090", (12, 0)), "FLASH_ATTN_CUDA_ARCHS=120"),
        (("sm_80",), T4, ""),
    ],
)
def test_no_code_for_the_gpu(bench: Bench, targets: tuple[str, ...], device: Device, command: str) -> None:
    bench.torch()
    bench.fa2(built(CUDA_LIBRARIES, (ERROR,), *targets))
    assert findings() == []
    (finding,) = findings(devices=[device])
    assert finding.cause == "gpu"
    assert f"it has code for {' '.join(targets)}, none of which runs on {device}" in finding.problem
    assert command in finding.command
    if device is T4:
        assert "8.0 or greater" in finding.problem
        assert finding.problem.endswith("Kernels that run there: flash_attention_flex, flash_attention_reference")
        assert finding.command == ""


def test_a_gpu_that_no_build_of_the_package_knows(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built(CUDA_LIBRARIES, (ERROR,), "sm_80", "sm_100"))
    (finding,) = findings(devices=[Device("NVIDIA Thor", (11, 0))])
    assert "No build has: its build has code for sm_80, sm_90, sm_100, sm_120 alone" in finding.problem
    assert finding.command == ""


def test_a_build_for_all_gpus_takes_no_variable(bench: Bench) -> None:
    bench.torch()
    files = {"causal_conv1d/__init__.py": "", f"causal_conv1d_cuda{SUFFIX}": built(CUDA_LIBRARIES, (ERROR,), "sm_80")}
    bench.install("causal-conv1d", "1.4.0", files)
    (finding,) = findings(devices=[H100])
    assert finding.command.startswith("CAUSAL_CONV1D_FORCE_BUILD=TRUE pip install")
    assert finding.command.endswith(" causal-conv1d")


def test_of_two_gpus_the_one_without_code_is_named(bench: Bench) -> None:
    bench.torch()
    bench.fa2(built(CUDA_LIBRARIES, (ERROR,), "sm_90"))
    (finding,) = findings(devices=[H100, A100, A100])
    assert f"none of which runs on {A100}" in finding.problem


def test_packages_that_are_not_in_the_table_are_built_by_torchs_variable(bench: Bench) -> None:
    bench.torch()
    files = {f"my_ops{SUFFIX}": built(CUDA_LIBRARIES, (ERROR,), "sm_80")}
    bench.install("my-ops", "3.0", files, tag="cp39-abi3-linux_x86_64")
    (finding,) = findings(devices=[H100])
    assert finding.command.startswith("TORCH_CUDA_ARCH_LIST=9.0 pip install")


@pytest.mark.parametrize(
    ("target", "runs", "does_not"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),
        ("sm_90a", [(9, 0)], [(9, 1), (10, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("compute_80", [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
    ],
)
def test_which_gpus_run_a_target(
    target: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]], tmp_path: Path
) -> None:
    (tmp_path / "a.so").write_bytes(built(CUDA_LIBRARIES, (), target))
    (code,) = read(tmp_path / "a.so").gpu_code
    assert str(code) == target
    assert [one for one in (*runs, *does_not) if code.runs_on(one)] == runs


def test_a_healthy_install(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    bench.install("flash-attn-4", "4.0.0b36", FA4)
    found = look(devices=[H100])
    assert found.ok
    assert {package.name: package.findings for package in found.packages} == {"flash-attn": (), "flash-attn-4": ()}
    fa2 = next(package for package in found.packages if package.name == "flash-attn")
    assert fa2.built.torch == "2.8 or later"
    assert fa2.built.cuda == 13
    assert fa2.built.cxx11_abi is True
    assert fa2.built.python == f"{PYTHON[0]}.{PYTHON[1:]}"
    assert fa2.built.gpu_code == ("sm_80", "sm_90")
    assert found.torch is not None
    assert (found.torch.cuda, found.torch.cxx11_abi, found.torch.minor) == (13, True, "2.11")


def test_libraries_beside_the_file_and_symbols_of_a_sibling_are_found(bench: Bench) -> None:
    bench.torch()
    files = {
        "my_ops/_C.so": shared_object(
            ("libtorch.so", "libmy.so", "libextra.so.3"), ("_ZN2at2myEv",), (), "$ORIGIN/libs"
        ),
        "my_ops/libmy.so": library(("_ZN2at2myEv",), ("libc10.so",)),
        "my_ops/libs/libextra.so.3": library(),
    }
    bench.install("my-ops", "3.0", files)
    assert findings() == []


def test_of_variants_one_that_loads_is_enough(bench: Bench) -> None:
    """torch-c-dlpack-ext has a file for each release of torch, and does without on a torch that it has none for."""
    bench.torch()
    old, fits = built(undefined=("_ZN2at3oldEv",)), built()
    files = {f"ops/libtorch_ops_torch{release}-cpu.so": old for release in (25, 26, 27)}
    bench.install("ops", "1.0", {**files, "ops/libtorch_ops_torch211-cpu.so": fits})
    bench.install("others", "1.0", {name.replace("ops", "others"): old for name in files})
    pythons = {f"one{SUFFIX}": fits, "one.cpython-39-x86_64-linux-gnu.so": fits}
    bench.install("pythons", "1.0", pythons)
    assert findings() == []


def test_variants_for_something_else_than_torch_must_load(bench: Bench) -> None:
    bench.torch()
    files = {
        f"codec/libcodec{release}.so": built((*CUDA_LIBRARIES, f"libav_none.so.{release}")) for release in (4, 5, 6)
    }
    bench.install("codec", "1.0", files)
    (finding,) = findings()
    assert finding.breaks
    assert "of its 3 variants none loads here: it needs libav_none.so.6" in finding.problem
    assert finding.command.startswith("# install that library")


def test_an_editable_install_is_found_by_its_import(bench: Bench) -> None:
    bench.torch()
    source = bench.path.parent / "source"
    source.mkdir()
    (source / EXTENSION).write_bytes(built(undefined=("_ZN2at6secretEv",)))
    (source / "flash_attn").mkdir()
    (source / "flash_attn" / "__init__.py").write_text("")
    folder = bench.install("flash-attn", "2.8.3", {"__editable__.flash_attn.pth": f"{source}\n"})
    (folder / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    sys.path.append(str(source))
    importlib.invalidate_caches()
    (finding,) = findings()
    assert finding.cause == "torch-version"
    assert finding.file == str(source / EXTENSION)


@pytest.mark.parametrize("editable", [True, False])
def test_an_unknown_extension_whose_metadata_lists_no_files_is_found_by_its_name(bench: Bench, editable: bool) -> None:
    """An editable install, and packages of conda without RECORD."""
    bench.torch()
    for name, file in (("my-ops", "_C.so"), ("my-python", "code.py")):
        source = bench.path.parent / "source" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__init__.py").write_text("")
        (source / file).write_bytes(built(undefined=("_ZN2at6secretEv",)))
        folder = bench.install(name, "3.0", {f"{name}.pth": f"{source.parent}\n"})
        if editable:
            (folder / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
        else:
            (folder / "RECORD").unlink()
    sys.path.append(str(bench.path.parent / "source"))
    importlib.invalidate_caches()
    (package,) = look().packages
    assert [finding.cause for finding in package.findings if finding.breaks] == ["torch-version"]


def test_packages_that_do_not_extend_torch_are_left_out(bench: Bench) -> None:
    bench.torch()
    bench.install("other", "1.0", {"other.so": library()}, requires="numpy")
    bench.install("broken", "1.0", {"broken.so": b"text"}, requires="numpy")
    assert look().packages == ()
    (finding,) = findings("broken")  # unless it is asked for
    assert finding.cause == "not-elf"


def test_a_package_that_is_asked_for_and_absent(bench: Bench) -> None:
    bench.torch()
    (finding,) = findings("flash-attn")
    assert (finding.cause, finding.command) == ("not-installed", "pip install --no-build-isolation flash-attn")
    (finding,) = findings("flash-attn-4")
    assert finding.command == "pip install --pre flash-attn-4"


def test_names_that_the_system_refuses_are_not_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/" + "x" * 300)
    bench.torch()
    folder = bench.fa2(built(("libtorch.so", "libsecret.so.3")))
    with open(folder / "RECORD", "a") as record:
        record.write(f"{'x' * 300},,\n")
    assert [finding.cause for finding in findings()] == ["missing-file", "library"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
@pytest.mark.parametrize("locked", ["torch", "torch/lib", "flash_attn"])
def test_a_folder_without_permissions_is_no_traceback(bench: Bench, locked: str) -> None:
    bench.torch()
    bench.fa2()
    (bench.path / locked).chmod(0)
    try:
        assert not look().ok
    finally:
        (bench.path / locked).chmod(0o755)


def test_a_damaged_torch_is_no_traceback(bench: Bench) -> None:
    bench.torch()
    for path in (bench.path / "torch" / "lib").iterdir():
        path.write_bytes(b"\x7fELF\x02\x01")
    bench.fa2()
    assert {finding.cause for finding in findings()} >= {"torch-version"}


@given(st.data())
def test_any_damage_is_told_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(
        built(CUDA_LIBRARIES, (ERROR,), "sm_90")[: data.draw(st.integers(0, 3_000_000), label="length")]
    )
    for _ in range(data.draw(st.integers(0, 8), label="changes")):
        if content:
            content[data.draw(st.integers(0, min(len(content), 4096) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "a.so"
    path.write_bytes(content)
    with suppress(BrokenFileError):
        read(path)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_installed_torch_has_the_symbols_of_its_release() -> None:
    """The table of dated symbols, on whichever release the tests run on."""
    torch = LibTorch.find(Environment.detect())
    assert torch is not None
    assert torch.version is not None
    assert torch.cxx11_abi is True
    if torch.cuda is None:
        pytest.skip("a build without CUDA")
    missing = set(torch.lacks(_DATED))
    for symbol in _DATED:
        first, _, last = releases_with([symbol]).replace(" or later", "").replace(" or earlier", "").partition(" to ")
        since, until = _DATED[symbol]
        inside = (not since or torch.version.release[:2] >= _release(since)) and (
            not until or torch.version.release[:2] <= _release(until)
        )
        assert (symbol not in missing) == inside, symbol
        assert {first, last} - {""} == {since, until} - {""}


def _release(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


MACHINE = Machine(cores=32, memory=100.0, nvcc="13.0")


def test_what_can_be_installed_on_a_hopper(bench: Bench) -> None:
    bench.torch()
    found = ways(look(devices=[H100]), MACHINE)
    assert [(way.kernel, way.package, way.how) for way in found[:6]] == [
        ("flash_attention_4", "flash-attn-4", "wheel on the index"),
        ("flash_attention_3", "flash-attn-3", "build"),
        ("flash_attention_3", "fa3-fwd", "wheel on the index"),
        ("flash_attention_2", "flash-attn", "published wheel"),
        ("flash_attention_2", "flash-attn", "build"),
        ("flash_attention_torch", "torch", "nothing to install"),
    ]
    published, build, torch = found[3:6]
    assert published.file.startswith(f"flash_attn-VERSION+cu13torch2.11cxx11abiTRUE-cp{PYTHON}-cp{PYTHON}-linux_")
    assert published.file.endswith(" on https://github.com/Dao-AILab/flash-attention/releases")
    assert "not torch 2.11 with CUDA 13" in published.cost  # Dao-AILab/flash-attention#2442
    assert build.cost == "11 jobs on 32 cores, 9 GiB of memory each, about 23 minutes"
    assert build.command.startswith("MAX_JOBS=11 FLASH_ATTENTION_FORCE_BUILD=TRUE pip install --no-deps")
    assert [way.reasons for way in found if way.package in ("flash-attn", "torch", "flash-attn-4")] == [()] * 4
    assert torch.command == ""


def test_what_cannot_be_installed_says_why(bench: Bench) -> None:
    bench.torch("2.9.1", 12)
    found = {(way.package, way.how): way for way in ways(look(devices=[A100]), Machine(2, 4.0, "13.0", compiler=False))}
    assert "it needs compute capability 9.0" in found["flash-attn-4", "wheel on the index"].reasons[0]
    assert "its wheel is built for CUDA 13, torch 2.9.1 for CUDA 12" in found["fa3-fwd", "wheel on the index"].reasons
    build = found["flash-attn", "build"]
    assert build.reasons == ("there is no C++ compiler", "nvcc is of CUDA 13.0, and torch 2.9.1 is built for CUDA 12")
    assert build.cost.startswith("1 job on 2 cores")
    assert "older than 2.10" in found["torch", "nothing to install"].reasons[0]


def test_a_build_as_cxx17_is_refused_by_torch_2_14(bench: Bench) -> None:
    """ATen/ATen.h of torch 2.14 asks for C++20; setup.py of flash-attn 2.8.3.post2 passes -std=c++17."""
    bench.torch("2.14.0")
    bench.fa2(built(undefined=("_ZN2at6secretEv",)))
    found = look(devices=[H100])
    (finding,) = found.packages[0].findings
    why = "its build asks for C++17, and torch 2.14.0 for C++20"
    assert finding.command == f"pip install 'torch<2.14' && {REBUILD}  # {why}"
    assert [way.reasons for way in ways(found, MACHINE) if (way.package, way.how) == ("flash-attn", "build")] == [
        (why,)
    ]


def test_nothing_is_installed_twice(bench: Bench) -> None:
    bench.torch()
    bench.fa2()
    bench.install("xformers", "0.0.35", {"xformers/_C.so": b""})
    found = ways(look(devices=[H100]), MACHINE)
    assert [way.how for way in found if way.package == "flash-attn"] == ["installed"]
    wheel, build = (way for way in found if way.package == "xformers")  # it is broken
    assert (wheel.how, wheel.reasons) == (
        "wheel on the index",
        ("its wheel is built for CUDA 12, torch 2.11.0 for CUDA 13",),
    )
    assert (build.how, "--no-binary xformers" in build.command) == ("build", True)


def test_the_name_of_a_published_wheel_for_an_old_torch(bench: Bench) -> None:
    bench.torch("2.6.0", 12, (OLD_ERROR,))
    torch = LibTorch.find(Environment.detect())
    assert torch is not None
    name = wheel_name("flash-attn", "2.8.3", torch)
    assert name == f"flash_attn-2.8.3+cu12torch2.6cxx11abiFALSE-cp{PYTHON}-cp{PYTHON}-linux_{platform.machine()}.whl"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as exit:
        code = int(str(exit.code))
    return (code, *capsys.readouterr())


def test_the_command(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.torch()
    bench.fa2()
    code, out, _ = call(capsys, "doctor")
    assert code == 0
    assert "torch 2.11.0 for CUDA 13, the C++11 ABI" in out
    assert "CUDA 13, C++11 ABI, Python" in out
    assert "What can be installed here, the fastest kernel first" in out
    (bench.path / EXTENSION).write_bytes(b"")
    code, out, _ = call(capsys, "doctor", "Flash_Attn")
    assert code == 1
    lines = out.splitlines()
    at = lines.index(f"flash-attn, {EXTENSION}")
    assert lines[at + 1 : at + 3] == ["  it is empty", f"  {AGAIN}"]


def test_json(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.torch()
    bench.fa2(b"")
    code, out, _ = call(capsys, "doctor", "flash-attn", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["ok"] is False
    assert found["torch"] == {"version": "2.11.0", "build": "CUDA 13", "cuda": 13, "cxx11_abi": True}
    (package,) = found["packages"]
    assert package["broken"] is True
    assert package["findings"] == [
        {
            "package": "flash-attn",
            "file": EXTENSION,
            "cause": "empty",
            "problem": "it is empty",
            "command": AGAIN,
            "breaks": True,
        }
    ]
    assert {way["package"] for way in found["ways"]} == {"flash-attn"}


def test_bad_arguments_and_absent_packages(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = call(capsys, "doctor", "flash attn")
    assert code == 2
    assert "'flash attn'" in error
    code, out, _ = call(capsys, "doctor", "no-such-package")
    assert code == 1
    assert "no-such-package is not installed" in out
    assert call(capsys, "doctor")[0] == 0


def test_explain_names_a_broken_package(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.torch()
    bench.fa2(b"")
    found = json.loads(call(capsys, "explain", "flash_attention_2", "--json")[1])
    (provider,) = found["providers"]
    assert f"{EXTENSION}: it is empty" in provider["reasons"]
    assert provider["findings"][0]["command"] == AGAIN
    text = call(capsys, "explain", "flash_attention_2")[1]
    assert "it is empty" in text
    assert AGAIN in text
    (bench.path / EXTENSION).write_bytes(built())
    (provider,) = json.loads(call(capsys, "explain", "flash_attention_2", "--json")[1])["providers"]
    assert provider["findings"] == []


def test_targets_print_as_nvcc_names_them() -> None:
    assert list(map(str, sorted([GpuCode((12, 0)), GpuCode((9, 0), "a"), GpuCode((9, 0), ptx=True)]))) == [
        "compute_90",
        "sm_90a",
        "sm_120",
    ]


def two_sites(bench: Bench, *, hidden_first: bool, fa2: dict[str, str], layout: str = "site-packages") -> Path:
    """FlashAttention-2 in a site-packages of its own, before or after the one with FlashAttention-4; returns the former."""
    bench.torch()
    folder = bench.path.parent / "other" / layout
    folder.mkdir(parents=True)
    other = Bench(type(bench.site)(folder))
    other.install("flash-attn", "2.8.3", {**fa2, EXTENSION: built()})
    bench.install("flash-attn-4", "4.0.0b36", FA4)
    sys.path.insert(sys.path.index(str(bench.path)) + hidden_first, str(other.path))
    importlib.invalidate_caches()
    return other.path


@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("fa2", [{"flash_attn/__init__.py": ""}, {"flash_attn/__init__.py": "", **OLD_CUTE}])
def test_flash_attention_2_in_another_folder_hides_flash_attention_4(
    bench: Bench, capsys: pytest.CaptureFixture[str], hidden_first: bool, fa2: dict[str, str]
) -> None:
    other = two_sites(bench, hidden_first=hidden_first, fa2=fa2)
    found = look()
    assert not found.ok
    (finding,) = [finding for package in found.packages for finding in package.findings if finding.breaks]
    assert (finding.package, finding.cause) == ("flash-attn-4", "shadowed")
    assert f"the package flash_attn in {other} hides flash_attn/cute of flash-attn-4 in {bench.path}" in finding.problem
    (provider,) = json.loads(call(capsys, "explain", "flash_attention_4", "--json")[1])["providers"]
    assert any(str(other) in reason and str(bench.path) in reason for reason in provider["reasons"])
    assert not any("is not installed" in reason for reason in provider["reasons"])
    text = call(capsys, "explain", "flash_attention_4")[1]
    assert f"mend it with: {finding.command}" in text
    assert "pip install --pre flash-attn-4" not in text
    subprocess.run(finding.command, shell=True, check=True)
    importlib.invalidate_caches()
    assert look().ok
    module = importlib.import_module("flash_attn.cute")
    assert module.new == 1
    assert "no CUDA device is visible" in call(capsys, "explain", "flash_attention_4")[1]


def test_a_hidden_package_is_installed_beside_the_other_by_pip(bench: Bench) -> None:
    layout = f"lib/python{PYTHON[0]}.{PYTHON[1:]}/site-packages"
    other = two_sites(bench, hidden_first=True, fa2={"flash_attn/__init__.py": ""}, layout=layout)
    (finding,) = findings("flash-attn-4")
    prefix = str(other).removesuffix(f"/{layout}")
    words = f"pip install --ignore-installed --no-deps --pre --prefix {prefix} flash-attn-4==4.0.0b36"
    assert finding.command == words


@pytest.mark.parametrize("hidden_first", [False, True])
def test_any_package_may_be_hidden(bench: Bench, hidden_first: bool) -> None:
    bench.torch()
    other = type(bench.site)(bench.path.parent / "other")
    other.install("first", "1.0", {"shared/__init__.py": "", "shared/mine.py": ""})
    bench.install("second", "1.0", {"shared/deep/ops/__init__.py": "", "shared/deep/ops/kernel.so": built()})
    sys.path.insert(sys.path.index(str(bench.path)) + hidden_first, str(other.path))
    importlib.invalidate_caches()
    (finding,) = findings("second")
    assert (finding.cause, finding.breaks) == ("shadowed", True)
    assert f"the package shared in {other.path} hides shared/deep/ops of second in {bench.path}" in finding.problem
    subprocess.run(finding.command, shell=True, check=True)
    importlib.invalidate_caches()
    assert findings("second") == []


@pytest.mark.parametrize(
    "init",
    ["", "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"],
    ids=["namespace", "legacy namespace"],
)
def test_packages_that_share_a_namespace_hide_nothing(bench: Bench, init: str) -> None:
    bench.torch()
    other = type(bench.site)(bench.path.parent / "other")
    own = {"shared/__init__.py": init} if init else {}
    other.install("first", "1.0", {**own, "shared/one/__init__.py": ""})
    bench.install("second", "1.0", {**own, "shared/two/__init__.py": "", "shared/two/kernel.so": built()})
    sys.path.append(str(other.path))
    importlib.invalidate_caches()
    assert findings("second") == []

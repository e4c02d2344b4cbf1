from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from kernel_compat.environment import Device, Environment, _visible
from kernel_compat.kernels import known_kernels

H100 = Device("NVIDIA H100", (9, 0))
FA2 = {"flash_attn/__init__.py": "fa2 = 1\n", "flash_attn/flash_attn_interface.py": ""}
FA2_WITH_CUTE = {
    **FA2,
    "flash_attn/cute/__init__.py": "old = 1\n",
    "flash_attn/cute/interface.py": "old = 1\n",
}
FA4 = {"flash_attn/cute/__init__.py": "new = 1\n", "flash_attn/cute/interface.py": "new = 1\n"}
TORCH = {"torch/__init__.py": "raise RuntimeError('imported')\n"}


def on_hopper(environment: Environment) -> Environment:
    return Environment(
        packages=environment.packages,
        imports=environment.imports,
        devices=(H100,),
        problems=environment.problems,
    )


def reasons(kernel: str, environment: Environment) -> list[str]:
    return known_kernels()[kernel].unavailable_because(on_hopper(environment))


def test_nothing_installed(site: Any) -> None:
    found = Environment.detect()
    assert dict(found.packages) == {}
    assert dict(found.imports) == {}
    assert found.problems == ()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.version("torch") is None


def test_fa2_alone(site: Any) -> None:
    site.install("torch", "2.11.0", TORCH)
    site.install("flash-attn", "2.8.3", FA2)
    found = Environment.detect()
    assert dict(found.packages) == {"torch": "2.11.0", "flash-attn": "2.8.3"}
    assert dict(found.imports) == {"torch": ("torch",), "flash_attn": ("flash-attn",)}
    assert found.problems == ()
    assert found.version("flash-attn") == Version("2.8.3")
    assert reasons("flash_attention_2", found) == []
    assert reasons("flash_attention_4", found) == ["flash-attn-4 is not installed"]


def test_the_old_cute_of_fa2_is_not_fa4(site: Any) -> None:
    site.install("torch", "2.11.0", TORCH)
    site.install("flash-attn", "2.8.3", FA2_WITH_CUTE)
    found = Environment.detect()
    assert found.imports["flash_attn.cute"] == ("flash-attn",)
    assert found.problems == ()
    assert reasons("flash_attention_4", found) == ["flash-attn-4 is not installed"]


def test_fa4_alone_is_not_fa2(site: Any) -> None:
    site.install("torch", "2.11.0", TORCH)
    site.install("flash-attn-4", "4.0.0b20", FA4)
    assert not (site.path / "flash_attn" / "__init__.py").exists()
    found = Environment.detect()
    assert found.imports["flash_attn"] == ("flash-attn-4",)
    assert found.imports["flash_attn.cute"] == ("flash-attn-4",)
    assert found.problems == ()
    assert reasons("flash_attention_2", found) == ["flash-attn is not installed"]
    assert reasons("flash_attention_4", found) == []


@pytest.mark.parametrize("fa2", [FA2, FA2_WITH_CUTE], ids=["without its cute", "with its old cute"])
def test_fa4_installed_after_fa2(site: Any, fa2: dict[str, str]) -> None:
    site.install("torch", "2.11.0", TORCH)
    site.install("flash-attn", "2.8.3", fa2)
    site.install("flash-attn-4", "4.0.0b20", FA4)
    found = Environment.detect()
    assert found.problems == ()
    assert set(found.imports["flash_attn"]) == {"flash-attn", "flash-attn-4"}
    assert found.imports["flash_attn.cute"][0] == "flash-attn-4"  # its files are the ones on disk
    assert reasons("flash_attention_2", found) == []
    assert reasons("flash_attention_4", found) == []


def test_fa2_installed_after_fa4_overwrites_it(site: Any) -> None:
    site.install("torch", "2.11.0", TORCH)
    site.install("flash-attn-4", "4.0.0b20", FA4)
    site.install("flash-attn", "2.8.3", FA2_WITH_CUTE)
    found = Environment.detect()
    assert len(found.problems) == 1
    assert found.problems[0].startswith("flash-attn has overwritten flash_attn/cute of flash-attn-4")
    assert "--force-reinstall" in found.problems[0]
    assert found.imports["flash_attn.cute"][0] == "flash-attn"
    assert reasons("flash_attention_4", found) == list(found.problems)
    assert reasons("flash_attention_2", found) == []


def test_fa2_uninstalled_with_the_files_of_fa4(site: Any) -> None:
    site.install("flash-attn-4", "4.0.0b20", FA4)
    for file in FA4:
        (site.path / file).unlink()
    (site.path / "flash_attn" / "cute").rmdir()
    (site.path / "flash_attn").rmdir()
    found = Environment.detect()
    assert "flash-attn-4 is installed but flash_attn can't be found: reinstall it." in found.problems
    assert reasons("flash_attention_4", found)


def test_the_placeholder(site: Any) -> None:
    site.install("flash-attn-cute", "0.0.1")
    (problem,) = Environment.detect().problems
    assert "empty placeholder" in problem
    assert "install flash-attn-4" in problem
    assert reasons("flash_attention_4", Environment.detect())[0] == "flash-attn-4 is not installed"


@pytest.mark.parametrize("version", [None, "not a version"])
def test_metadata_without_a_version(site: Any, version: str | None) -> None:
    folder = site.install("transformers", "5.0.0", {"transformers/__init__.py": ""})
    line = "" if version is None else f"Version: {version}\n"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\n{line}")
    found = Environment.detect()
    assert "transformers" not in found.packages
    assert found.version("transformers") is None
    assert "transformers is installed without a readable version: reinstall it." in found.problems


def test_an_interrupted_uninstall_leaves_an_empty_metadata_folder(site: Any) -> None:
    (site.path / "torch-2.11.0.dist-info").mkdir()
    found = Environment.detect()
    assert "torch" not in found.packages
    assert any("torch is installed without a readable version" in problem for problem in found.problems)


def test_metadata_that_is_not_text(site: Any) -> None:
    folder = site.install("torch", "2.11.0", TORCH)
    (folder / "METADATA").write_bytes(b"Name: torch\nVersion: \xff\xfe\n")
    found = Environment.detect()
    assert "torch" not in found.packages
    assert any("torch is installed without a readable version" in problem for problem in found.problems)


def test_importable_without_metadata(site: Any) -> None:
    (site.path / "torch").mkdir()
    (site.path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    found = Environment.detect()
    assert found.imports["torch"] == ()
    assert found.problems == ("torch can be imported but has no metadata, so its version is unknown.",)
    # The version may be a supported one: loading finds out.
    assert known_kernels()["flash_attention_reference"].unavailable_because(found) == []


def test_metadata_without_an_import(site: Any) -> None:
    site.install("transformers", "5.23.0")
    assert Environment.detect().problems == (
        "transformers is installed but transformers can't be found: reinstall it.",
    )


@pytest.mark.parametrize(
    "record",
    [
        b"torch/__init__.py,sha256=abc,7,one too many\n",
        b"torch/__init__.py,sha256=abc,7\n\n\n",
        b"torch/__init__.py,sha256=abc,not a number\n",
        b"torch/__init__.py,md5\n",
        b"torch/\xff\xfe.py,,\n",
        b'"torch/__init__.py\n',
        b"\x00\x00\x00",
        b"",
    ],
)
def test_a_damaged_record(site: Any, record: bytes) -> None:
    """The distribution counts as installed by its name, because its files are unknown."""
    site.install("torch", "2.11.0", TORCH, record=record)
    site.install("flash-attn", "2.8.3", FA2, record=record)
    site.install("flash-attn-4", "4.0.0b20", FA4, record=record)
    found = Environment.detect()
    assert found.packages["torch"] == "2.11.0"
    assert found.imports["torch"] == ("torch",)
    assert "flash-attn" in found.imports["flash_attn"]
    assert found.problems == ()
    assert reasons("flash_attention_2", found) == []
    assert reasons("flash_attention_4", found) == []


def test_no_record_at_all(site: Any) -> None:
    site.install("transformers", "5.23.0", {"transformers/__init__.py": ""}, record=None)
    found = Environment.detect()
    assert found.imports["transformers"] == ("transformers",)
    assert found.problems == ()


def test_an_editable_install(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its RECORD lists only the metadata and a .pth file; the package is in another folder."""
    checkout = tmp_path / "checkout"
    (checkout / "transformers").mkdir(parents=True)
    (checkout / "transformers" / "__init__.py").write_text("")
    site.install("transformers", "5.24.0.dev0", {"__editable__.transformers-5.24.0.dev0.pth": f"{checkout}\n"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(checkout)])
    found = Environment.detect()
    assert found.version("transformers") == Version("5.24.0.dev0")
    assert found.imports["transformers"] == ("transformers",)
    assert found.problems == ()


def test_a_hash_of_another_kind_is_not_held_against_a_file(site: Any) -> None:
    site.install("flash-attn-4", "4.0.0b20", FA4, record="flash_attn/cute/__init__.py,md5=abc,3\n")
    assert Environment.detect().problems == ()


def test_further_distributions_are_looked_at_on_request(site: Any) -> None:
    site.install("Some.Framework", "3.2")
    assert "some-framework" not in Environment.detect().packages
    assert Environment.detect(["some_framework"]).version("some-framework") == Version("3.2")


GPUS = [
    ("GPU-aaaa-1111", Device("A", (8, 0))),
    ("GPU-bbbb-2222", Device("B", (9, 0))),
    ("GPU-bbcc-3333", Device("C", (10, 0))),
]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "ABC"),
        ("0", "A"),
        ("2,0", "CA"),
        (" 1 , 2 ", "BC"),
        ("", ""),
        ("-1", ""),
        ("1,-1,0", "B"),
        ("1,9,0", "B"),
        ("GPU-bbbb-2222", "B"),
        ("GPU-bbcc,0", "CA"),
        ("GPU-zzzz,0", ""),
        ("0,,1", "A"),
        ("nonsense", ""),
        ("\u00b2", ""),
    ],
)
def test_cuda_visible_devices(visible: str | None, expected: str) -> None:
    assert "".join(device.name for device in _visible(GPUS, visible)) == expected


def test_hidden_devices_are_not_asked_for(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def fail() -> None:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    for hidden in ("", "-1", " "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert Environment.detect().devices == ()


def test_no_driver_is_no_device(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Environment.detect().devices == ()


def test_a_broken_torch_in_the_process_does_not_break_the_diagnosis(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert Environment.detect().devices == ()


def test_it_is_a_value() -> None:
    packages = {"torch": "2.11.0", "transformers": "?"}
    environment = Environment(packages=packages, imports={"torch": ("torch",)})
    packages["torch"] = "1.0"
    assert environment.packages["torch"] == "2.11.0"
    with pytest.raises(TypeError):
        environment.packages["torch"] = "1.0"  # type: ignore[index]
    with pytest.raises(AttributeError):
        environment.python = "3"  # type: ignore[misc]
    assert environment.version("transformers") is None  # not a version
    assert environment.version("torch") == Version("2.11.0")
    assert environment == Environment(packages={"torch": "2.11.0", "transformers": "?"}, imports={"torch": ("torch",)})
    assert str(H100) == "NVIDIA H100 (sm_90)"


def test_detection_imports_no_framework() -> None:
    """In the real environment, where torch and transformers are installed."""
    code = (
        "import json, sys\n"
        "from kernel_compat import Environment\n"
        "found = Environment.detect()\n"
        "heavy = [m for m in sys.modules if m.partition('.')[0] in ('torch', 'transformers', 'numpy', 'flash_attn')]\n"
        "print(json.dumps([dict(found.packages), list(found.imports), heavy]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    packages, imports, heavy = json.loads(done.stdout)
    assert heavy == []
    assert {"torch", "transformers", "kernel-compat"} <= set(packages)
    assert {"torch", "transformers"} <= set(imports)
    assert importlib.util.find_spec("torch") is not None


def test_without_torch_and_transformers(bare: Callable[..., Any]) -> None:
    code = (
        "import json, kernel_compat as k\n"
        "e = k.Environment.detect()\n"
        "print(json.dumps([dict(e.packages), dict(e.imports), e.problems,"
        " {n: v.unavailable_because(e) for n, v in k.known_kernels().items()}]))"
    )
    packages, imports, problems, unavailable = bare(code)
    assert (packages, imports, problems) == ({"kernel-compat": importlib.metadata.version("kernel-compat")}, {}, [])
    assert all("torch is not installed" in because for because in unavailable.values())
    assert set(unavailable) == set(known_kernels())

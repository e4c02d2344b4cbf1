"""Stand-ins for site-packages, and a process without torch and transformers."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bare_site
import pytest

import kernel_compat

__all__ = ["Site", "bare", "site"]

COMPAT = Path(kernel_compat.__file__).parents[1]


class Site:
    """A folder filled as an installer fills site-packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)

    def install(
        self,
        name: str,
        version: str | None = "1.0",
        files: Mapping[str, str | bytes] | None = None,
        record: str | bytes | None = "",
        entry_points: Mapping[str, str] | None = None,
    ) -> Path:
        """Write the files of a distribution and its metadata; existing files are overwritten.

        Args:
            record: the content of RECORD instead of the right one; None for no RECORD.
            entry_points: the entry points of the group kernel_compat.shims.

        Returns:
            The folder of the metadata.
        """
        rows = []
        for relative, content in (files or {}).items():
            target = self.path / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode() if isinstance(content, str) else content
            target.write_bytes(data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{relative},sha256={digest},{len(data)}")
        folder = self.path / f"{name.replace('-', '_')}-{version or '0'}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\n" + (f"Version: {version}\n" if version is not None else "")
        )
        if entry_points is not None:
            lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
            (folder / "entry_points.txt").write_text(f"[kernel_compat.shims]\n{lines}")
        if record == "":
            rows += [f"{folder.name}/METADATA,,", f"{folder.name}/RECORD,,"]
            record = "\n".join(rows) + "\n"
        if isinstance(record, bytes):
            (folder / "RECORD").write_bytes(record)
        elif record is not None:
            (folder / "RECORD").write_text(record)
        importlib.invalidate_caches()
        return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Replaces the real site-packages: it is on sys.path, and no other folder has distributions.

    What a test imports from its folders is forgotten afterwards.
    """
    here = Site(tmp_path / "site-packages")
    # Other packages stay importable: pytest and hypothesis import some of their modules late.
    rest = tmp_path / "rest"
    rest.mkdir()
    hidden = ("torch", "transformers", "flash", "fa3", "kernel", "nvidia")
    kept = []
    for entry in sys.path:
        if "site-packages" not in entry:
            kept.append(entry)
            continue
        for item in Path(entry).iterdir():
            if not item.name.startswith(hidden) and not (rest / item.name).exists():
                (rest / item.name).symlink_to(item)
    monkeypatch.setattr(sys, "path", [str(here.path), *kept, str(rest)])
    for name in ("torch", "transformers", "flash_attn", "flash_attn.cute", "flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    yield here
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in f"{vars(module).get('__file__')} {vars(module).get('__path__')}":
            del sys.modules[name]


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., Any]:
    """Run code in an interpreter with the library and its dependencies, but without torch and transformers.

    The code prints JSON, which is returned.
    """
    needed = tmp_path / "needed"
    needed.mkdir()
    for name in ("packaging", "pynvml", "wrapt"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        source = origin.parent if spec.submodule_search_locations else origin
        (needed / source.name).symlink_to(source)
    bare_site.add_shims(needed)

    def run(code: str, *paths: Path, env: Mapping[str, str] | None = None) -> Any:
        search = os.pathsep.join(map(str, (*paths, COMPAT, needed)))
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={**os.environ, "PYTHONPATH": search, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run

"""A site-packages with the command line's dependencies, but without torch and transformers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import kernel_compat_shims


def make(site: Path) -> None:
    site.mkdir()
    names = ["packaging", "elftools", "pynvml", "yaml", "typing_extensions"]
    for name in [*names, "requests", "urllib3", "certifi", "charset_normalizer", "idna"]:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if spec.submodule_search_locations else origin
            (site / source.name).symlink_to(source)
    add_shims(site)
    for name in ("kernel_compat_doctor", "kernel_compat_ops", "kernel_compat_prove", "kernel_compat_run"):
        package = importlib.util.find_spec(name)
        if package is not None and package.submodule_search_locations:
            (site / name).symlink_to(package.submodule_search_locations[0])
            _add_metadata(name, site)


def add_shims(site: Path) -> Path:
    """Add the shims, and the metadata by which they are found; returns the folder of the metadata."""
    (site / "kernel_compat_shims").symlink_to(kernel_compat_shims.__path__[0])
    return _add_metadata("kernel-compat", site)


def _add_metadata(name: str, site: Path) -> Path:
    file = next(file for file in importlib.metadata.files(name) or () if file.name == "entry_points.txt")
    metadata = Path(str(file.locate())).parent
    (site / metadata.name).symlink_to(metadata)
    return site / metadata.name

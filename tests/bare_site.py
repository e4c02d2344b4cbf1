"""A site-packages with the command line's dependencies, but without torch and transformers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import kernel_compat_shims


def make(site: Path) -> None:
    site.mkdir()
    names = ["packaging", "elftools", "pynvml", "rich", "markdown_it", "mdurl", "pygments", "typing_extensions"]
    for name in [*names, "requests", "urllib3", "certifi", "charset_normalizer", "idna"]:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if spec.submodule_search_locations else origin
            (site / source.name).symlink_to(source)
    add_shims(site)


def add_shims(site: Path) -> Path:
    """Add the shims, and the metadata by which they are found; returns the folder of the metadata."""
    (site / "kernel_compat_shims").symlink_to(kernel_compat_shims.__path__[0])
    file = next(file for file in importlib.metadata.files("kernel-compat") or () if file.name == "entry_points.txt")
    metadata = Path(str(file.locate())).parent
    (site / metadata.name).symlink_to(metadata)
    return site / metadata.name

"""A site-packages with the command line's dependencies, but without torch and transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def make(site: Path) -> None:
    site.mkdir()
    names = ["packaging", "elftools", "pynvml", "rich", "markdown_it", "mdurl", "pygments", "typing_extensions"]
    for name in [*names, "requests", "urllib3", "certifi", "charset_normalizer", "idna"]:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if spec.submodule_search_locations else origin
            (site / source.name).symlink_to(source)

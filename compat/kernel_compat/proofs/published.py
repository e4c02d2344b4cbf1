"""Whether the installed transformers is one that was published: what the table proves of a release isn't proven of an edited copy.

A wheel's RECORD has the hash of each of its files. `published.json` has, for each release, a digest of these hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata, resources
from pathlib import Path

from packaging.version import Version

__all__ = ["PATH", "changed_modules", "digest_of", "published", "write"]

PATH = Path(str(resources.files(__package__))) / "published.json"
_PACKAGE = "transformers"
#: Modules that take no part in a model's forward or in generation.
_ELSEWHERE = re.compile(
    r"\.(trainer|training_args|tokenization|processing|image_|video_|audio_|feature_extraction|pipelines|data|testing_utils"
    r"|debug_utils|commands|cli|hyperparameter|hf_argparser|dependency|convert_|modelcard|safetensors_conversion)"
)


def published() -> Mapping[str, str]:
    """The digest of each published release."""
    digests: dict[str, str] = json.loads(PATH.read_text())
    return digests


def write(digests: Mapping[str, str]) -> None:
    """Write `published.json`."""
    lines = (f'"{version}": "{digests[version]}"' for version in sorted(digests, key=Version))
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def digest_of(record: str) -> str:
    """The digest of a RECORD: of the hashes of transformers' own Python files."""
    return hashlib.sha256("\n".join(sorted(_hashes(record))).encode()).hexdigest()[:16]


def _hashes(record: str) -> list[str]:
    return [line for line in record.splitlines() if line.startswith(f"{_PACKAGE}/") and ".py,sha256=" in line]


def changed_modules(models: frozenset[str]) -> list[str]:
    """The imported modules of transformers whose files aren't those of a published release.

    Args:
        models: the modules below ``transformers.models`` that count; of the others all count that a forward may run.

    Returns:
        Their names, sorted; all that count, if what is installed is no published release that is known.
    """
    hashes = _recorded()
    names = [
        name
        for name in list(sys.modules)
        if name.startswith(f"{_PACKAGE}.")
        and not _ELSEWHERE.search(name)
        and (name in models or not name.startswith(f"{_PACKAGE}.models."))
    ]
    root = Path(str(sys.modules[_PACKAGE].__file__)).parent
    return sorted(name for name in names if hashes is None or not _is_published(name, root, hashes))


@cache
def _recorded() -> Mapping[str, str] | None:
    """The hash of each file of the installed release; None if it isn't a published one."""
    try:
        installed = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    record = installed.read_text("RECORD") or ""
    if published().get(installed.version) != digest_of(record):
        return None
    return {path: value for path, value, _ in (line.rsplit(",", 2) for line in _hashes(record))}


_known: dict[str, bool] = {}


def _is_published(name: str, root: Path, hashes: Mapping[str, str]) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # no module of a file, such as a lazy stand-in
        return True
    if file not in _known:
        try:
            path = f"{_PACKAGE}/{Path(file).relative_to(root).as_posix()}"
            digest = base64.urlsafe_b64encode(hashlib.sha256(Path(file).read_bytes()).digest()).decode().rstrip("=")
        except (OSError, ValueError):  # of another place
            return False
        _known[file] = hashes.get(path) == f"sha256={digest}"
    return _known[file]

"""``python -m kernel_compat_atlas.digests``: note by which hashes a published release of transformers is recognised."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from kernel_compat.proofs.published import PATH, digest_of, published, write
from kernel_compat.releases import TRANSFORMERS
from kernel_compat.versions import minor

from .errors import AtlasError
from .index import THREADS, File, Index
from .published import Cache, Published

_MINORS = {str(minor(version)) for version in TRANSFORMERS}


def main() -> int:
    """Add every release of a supported minor release that isn't known yet; returns the exit code."""
    known = dict(published())
    try:
        new = _new(Index(), known)
    except AtlasError as error:
        print(error, file=sys.stderr)
        return 2
    write({**known, **new})
    print(f"{len(new)} new of {len(known) + len(new)} releases in {PATH.name}")
    return 0


def _new(index: Index, known: Mapping[str, str]) -> dict[str, str]:
    """The digests of the releases on the index that aren't known."""
    cache = Cache(None, lambda note: print(note, file=sys.stderr))
    wheels = {
        str(version): file
        for version, files in index.files("transformers").items()
        if str(minor(version)) in _MINORS and not version.is_prerelease and str(version) not in known
        for file in files
        if file.is_wheel
    }

    def digest(file: File) -> str:
        with Published(file, index, cache) as wheel:
            return digest_of(wheel.record())

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(wheels, pool.map(digest, wheels.values()), strict=True))


if __name__ == "__main__":
    sys.exit(main())

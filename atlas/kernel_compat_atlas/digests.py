"""``python -m kernel_compat_atlas.digests``: note by which hashes a published release of transformers is recognised."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from remotezip import RemoteZip  # type: ignore[import-untyped]

from kernel_compat.proving.published import PATH, digest_of, published, write
from kernel_compat.releases import TRANSFORMERS
from kernel_compat.versions import minor

from .index import THREADS, TIMEOUT, File, Index

_MINORS = {str(minor(version)) for version in TRANSFORMERS}


def main() -> int:
    """Add every release of a supported minor release that isn't known yet; returns the exit code."""
    index, known = Index(), dict(published())
    wheels = {
        str(version): file
        for version, files in index.files("transformers").items()
        if str(minor(version)) in _MINORS and not version.is_prerelease and str(version) not in known
        for file in files
        if file.is_wheel
    }

    def digest(file: File) -> str:
        with RemoteZip(index.fetchable(file), session=index.session, timeout=TIMEOUT) as wheel:
            (record,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
            return digest_of(wheel.read(record).decode())

    with ThreadPoolExecutor(THREADS) as pool:
        known.update(zip(wheels, pool.map(digest, wheels.values()), strict=True))
    write(known)
    print(f"{len(wheels)} new of {len(known)} releases in {PATH.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

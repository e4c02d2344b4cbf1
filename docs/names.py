"""Writes docs/names.md: every name of transformers that the library reads, with the releases that have it. Needs the atlas and the index.

python docs/names.py
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from kernel_compat.releases import TRANSFORMERS, minors
from kernel_compat_atlas.index import Index
from kernel_compat_atlas.published import Cache
from kernel_compat_atlas.releases import select
from kernel_compat_atlas.seams import installed_shims, read_seams

PAGE = Path(__file__).with_name("names.md")
HEAD = """# Names that are read

What kernel-compat reads of transformers without replacing it, by the shim that verifies it at `install()`, in every minor release from {} to {}. A
name that is missing, or a parameter that isn't known, is refused: [when a shim fails](shims.md#when-a-shim-fails). Written by `python docs/names.py` from the
published wheels; `kernel-compat-atlas` shows the seams that are replaced.

| shim | attribute | name | releases |
|---|---|---|---|
"""


def runs(order: list[str], there: set[str]) -> str:
    """Consecutive releases as ranges."""
    found = []
    for inside, group in groupby(order, key=there.__contains__):
        several = list(group)
        if inside:
            found.append(several[0] if len(several) == 1 else f"{several[0]} to {several[-1]}")
    return ", ".join(found)


def main() -> int:
    """Write the page; returns the exit code."""
    index, shims = Index(), installed_shims()
    order = minors(TRANSFORMERS)
    releases = select("transformers", f"{order[0]}-{order[-1]}", index.files("transformers"))
    seams = read_seams({"transformers": releases}, shims, index, Cache(None, lambda note: None))
    label = dict(zip(releases, order, strict=True))
    lines = []
    for read in seams.reads():
        name = f" `{read.name}`" if read.name else ""
        start = f"| `{read.shim}` | `{read.target.removeprefix('transformers.')}` |{name} |"
        lines.append(f"{start} {runs(order, {label[one] for one in read.releases})} |")
    PAGE.write_text(HEAD.format(order[0], order[-1]) + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The scan of a source tree: its files, the names of its modules, and the uses in them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import decode_source
from pathlib import Path

from ...errors import MatrixError
from ..scopes import Scope, parse
from .resolver import Resolver
from .walker import Context, Effects, Use, Walker

#: Folders that are no part of a project.
_SKIPPED = ("__pycache__", "node_modules", "site-packages")


@dataclass(frozen=True)
class Scan:
    """The uses in a project, by place, and the files that can't be parsed, with the reason."""

    uses: tuple[Use, ...]
    unread: dict[str, str]
    files: int


def scan(folder: Path, packages: Sequence[str], calls: Sequence[str] = (), exclude: Sequence[str] = ()) -> Scan:
    """Find all uses of some packages in a source tree.

    Args:
        folder: the tree, or a package in it.
        packages: the top-level packages whose names count, e.g. ``"transformers"``.
        calls: patterns of functions whose calls count too, e.g. ``"liger_kernel.*.apply_liger_kernel_to_*"``.
        exclude: patterns of files and folders to leave out, relative to `folder`.

    Raises:
        MatrixError: `folder` isn't a folder, or has no Python file.
    """
    if not folder.is_dir():
        raise MatrixError(f"{folder} is no folder")
    files = {file.relative_to(folder).as_posix(): file for file in _files(folder, exclude)}
    if not files:
        raise MatrixError(f"{folder} has no Python file")
    resolver = Resolver(packages)
    parsed: dict[str, tuple[str, Scope]] = {}
    unread: dict[str, str] = {}
    uses: set[Use] = set()
    collecting = gc.isenabled()
    gc.disable()  # the trees have no circles that could be freed, and looking for some takes half of the time
    try:
        for path, file in files.items():
            try:
                source = decode_source(file.read_bytes())
                name = _module_name(file, folder)
                package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                parsed[path] = source, Scope(name, parse(source), package)
                resolver.modules.setdefault(name, parsed[path][1])
            except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
                unread[path] = getattr(error, "strerror", None) or str(error) or type(error).__name__
        effects: Effects = {}
        for path, (source, scope) in parsed.items():
            walker = Walker(resolver, calls, effects, path, source, scope)
            try:
                walker.block(scope.node.body, Context(scope, {}))
            except RecursionError as error:
                unread[path] = str(error)
            else:
                uses |= walker.uses
    finally:
        if collecting:
            gc.enable()
    return Scan(tuple(sorted(uses)), unread, len(files))


def _files(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)

        def wanted(name: str, here: Path = here) -> bool:
            relative = (here / name).relative_to(folder).as_posix()
            return not any(fnmatchcase(relative, pattern) for pattern in exclude)

        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and wanted(name)
            and not os.path.exists(here / name / "pyvenv.cfg")  # False for a locked folder
        )
        yield from (here / name for name in sorted(names) if name.endswith(".py") and wanted(name))


def _module_name(file: Path, folder: Path) -> str:
    """The name that a file is imported under: from the outermost package around it, else from the project's folder."""
    parts = [] if file.name == "__init__.py" else [file.stem]
    above = file.resolve().parent
    if not (above / "__init__.py").exists():
        within = file.relative_to(folder).parent.parts
        return ".".join([*(within[1:] if within[:1] == ("src",) else within), *parts])
    while (above / "__init__.py").exists():
        parts.insert(0, above.name)
        above = above.parent
    return ".".join(parts)

"""The scan of a source tree: its files, the names of its modules, and the uses in them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import decode_source
from pathlib import Path

from ...errors import MatrixError
from .checks import Checks
from .patches import HelperCall, Patches
from .places import Context
from .resolver import Resolver
from .scopes import Module
from .uses import Scan, Use
from .walker import Walker

__all__ = ["scan"]

#: Folders that are no part of a project.
_SKIPPED = ("__pycache__", "node_modules", "site-packages")


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
    resolver = Resolver(packages)
    modules = []
    unread = {}
    files = 0
    collecting = gc.isenabled()
    gc.disable()  # the trees have no circles that could be freed, and looking for some takes half of the time
    try:
        for file in _files(folder, exclude):
            files += 1
            relative = file.relative_to(folder).as_posix()
            try:
                source = decode_source(file.read_bytes())
                modules.append(resolver.add(_module_name(file, folder), file.name == "__init__.py", relative, source))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                unread[relative] = str(error) or type(error).__name__
            except OSError as error:
                unread[relative] = error.strerror or type(error).__name__
        if not files:
            raise MatrixError(f"{folder} has no Python file")
        uses = _uses(resolver, modules, calls, unread)
        return Scan(tuple(sorted(uses)), unread, files)
    finally:
        if collecting:
            gc.enable()


def _uses(resolver: Resolver, modules: Iterable[Module], calls: Sequence[str], unread: dict[str, str]) -> set[Use]:
    """The uses in some modules; those that are nested too deeply are added to `unread`."""
    patches = Patches(resolver)
    checks = Checks(resolver)
    found: set[Use] = set()
    helper_calls: list[HelperCall] = []
    for module in modules:
        walker = Walker(resolver, checks, patches, calls, module)
        try:
            walker.block(module.tree.body, Context(module.scope))
        except RecursionError as error:
            unread[module.path] = str(error)
        else:
            found |= walker.uses
            helper_calls += walker.helper_calls
    return found | patches.by_helpers(helper_calls)


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

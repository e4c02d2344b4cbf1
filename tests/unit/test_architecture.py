"""The list of global state in docs/architecture.md is the state that the library's modules have.

`test_shims` checks the page's table of modules, which is generated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kernel_compat

LIBRARY = Path(kernel_compat.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"

#: Calls whose results don't change (`operator` creates custom operators of torch). Names in capitals are constants,
#: whichever call creates them.
UNCHANGING = {"frozenset", "re.compile", "MappingProxyType", "TypeVar", "logging.getLogger", "operator"}


def mutable() -> Iterator[str]:
    """The module-level objects of the library and its neighbours that can change, such as ``kernel_compat_ops.registry.default``."""
    folders = [LIBRARY, *(package.parent for package in LIBRARY.parent.glob("*/kernel_compat_*"))]
    files = [(folder, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    for root, path in files:
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                continue
            value = statement.value
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [ast.unparse(target) for target in targets]
            changes = isinstance(
                value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp, ast.Call)
            )
            constant = isinstance(value, ast.Call) and ast.unparse(value.func) in UNCHANGING
            yield from (
                f"{module}.{n}" for n in names if changes and not constant and not n.isupper() and n != "__all__"
            )


def test_all_global_state_is_listed_with_its_reason() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## State\n")[1].split("\n## ")[0]
    listed = []
    for row in re.findall(r"^\| (`.*?) \| .+ \|$", section, re.MULTILINE):
        module = ""
        for name in re.findall(r"`(.*?)`", row):
            module = module if name.startswith(".") else name.rpartition(".")[0]
            listed.append(f"{module}{name}" if name.startswith(".") else name)
    assert sorted(listed) == sorted(mutable())

"""Write the parts of README.md and docs/ that are generated from code: the supported releases, the shims and the modules.

Usage: python docs/generate.py [--check]

With --check it writes nothing and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import kernel_compat_shims
from kernel_compat import Shim
from kernel_compat.releases import TORCH, TRANSFORMERS, minors

ROOT = Path(__file__).parent.parent

#: The layers of the library from top to bottom, in the order of the first import contract.
ROOMS = re.findall(
    r"\w+", re.findall(r"^layers = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)[0]
)


def documents() -> Iterator[tuple[Path, str]]:
    """The files with generated parts, and the text that each should have."""
    parts = {
        "releases": _range(TRANSFORMERS),
        "torch": _range(TORCH),
        "shims": f"\n{_table()}\n",
        "modules": f"\n{_modules()}\n",
    }
    for path in (ROOT / "README.md", ROOT / "docs" / "shims.md", ROOT / "docs" / "architecture.md"):
        text = path.read_text(encoding="utf-8")
        for name, part in parts.items():
            text = re.sub(rf"(<!-- {name} -->).*?(<!-- / -->)", rf"\g<1>{part}\g<2>", text, flags=re.DOTALL)
        yield path, text


def shims() -> list[Shim]:
    """Every shim of `kernel_compat_shims`, in the order of the modules."""
    names = sorted(module.name for module in iter_modules(kernel_compat_shims.__path__) if module.name[0] != "_")
    modules = [import_module(f"kernel_compat_shims.{name}") for name in names]
    return [shim for module in modules for shim in (getattr(module, "SHIMS", None) or (module.SHIM,))]


def _range(releases: dict[str, str]) -> str:
    oldest, *_, newest = minors(releases)
    return f"{oldest} to {newest}"


def _table() -> str:
    lines = ["| shim | releases | without it | upstream | delete when |", "|---|---|---|---|---|"]
    for shim in shims():
        link = r"[\2#\3](https://github.com/\1/\2/issues/\3)"
        upstream = re.sub(r"([\w-]+)/([\w-]+)#(\d+)", link, shim.upstream)
        fields = (f"`{shim.name}`", f"{shim.distribution} `{shim.versions}`", shim.reason, upstream, shim.delete_when)
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def _modules() -> str:
    """Every module of the library with the first line of its docstring, by layer from the top."""
    library = ROOT / "compat" / "kernel_compat"
    lines = ["| module | contents |", "|---|---|"]
    for room in ROOMS:
        found = sorted((library / room).rglob("*.py")) if (library / room).is_dir() else [library / f"{room}.py"]
        for path in sorted(found, key=lambda path: (path.parent, path.stem != "__init__", path.stem)):
            name = ".".join(path.relative_to(library).with_suffix("").parts)
            first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            package = name.removesuffix(".__init__")
            lines.append(f"| **`{package}`** | **{first}** |" if package != name else f"| `{name}` | {first} |")
    return "\n".join(lines)


def main() -> int:
    """Write the files that are out of date, or with --check list them; returns the exit code."""
    stale = [(path, text) for path, text in documents() if path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} is out of date: run python docs/generate.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

"""Reading seams from the sources of a release; nothing is installed or imported."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import decode_source
from pathlib import Path
from typing import Literal

from . import scopes
from .published import Published
from .scopes import Binding, Element, Scope, decorators, last_name, parse, signature_of

#: Methods that are class methods without a decorator.
_CLASS_METHODS = ("__init_subclass__", "__class_getitem__")
#: A value is quoted up to this length; for a longer one only its type counts.
_QUOTED = 60

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
#: A module that puts an object of its own in its place; transformers' lazy modules have what their source has.
_REPLACED = re.compile(r"^\s*sys\.modules\[__name__\] = (?!_LazyModule\b)", re.MULTILINE)
#: An ``__all__`` that is one literal list or tuple.
_ALL = re.compile(rb"""^__all__ *= *[\[(]((?:\s|,|"\w+"|'\w+')*)[\])] *$""", re.MULTILINE)

#: Identifies this module and the versions it depends on: cached results are valid as long as it stays the same.
FINGERPRINT = hashlib.sha256(
    f"{Path(__file__).read_text('utf-8')} {Path(scopes.__file__).read_text('utf-8')} {sys.version_info[:2]}".encode()
).hexdigest()[:16]


@dataclass(frozen=True)
class Found:
    """A seam as found in a release.

    Attributes:
        kind: ``unknown`` if it exists and the source doesn't show its kind.
        signature: that of a function or class when called through its owner: without `cls`, with `self`.
        type: the type of a value, if the source shows it.
        text: the source of a short value; otherwise why nothing was found or why it is unknown.
        home: the place of its definition, if that is a different one.
        inherited: whether it is inherited; if it is missing, a base class of a different distribution may have it.
        on_instances: whether the class lacks it, but its ``__init__`` sets it on instances.
        others: its definitions in other branches of an ``if`` or ``try``.
    """

    kind: Literal["missing", "function", "class", "value", "unknown"]
    signature: str | None = None
    type: str | None = None
    text: str = ""
    home: str = field(default="", compare=False)
    inherited: bool = False
    on_instances: bool = False
    others: tuple[Found, ...] = ()

    @property
    def parsed(self) -> inspect.Signature | None:
        """The signature; None if it isn't known."""
        if self.signature is None:
            return None
        (function,) = parse(f"def f{self.signature}: ...").body
        assert isinstance(function, ast.FunctionDef)
        return signature_of(function)

    def __str__(self) -> str:
        if self.kind in ("missing", "unknown"):
            text = self.text or self.kind
        elif self.kind == "value":
            text = f"= {self.text}" if self.text else f"a value of type {self.type}" if self.type else "a value"
        else:
            text = f"{'class' if self.kind == 'class' else ''}{self.signature or ''}"
        if self.inherited and self.home:
            text += f", inherited from {self.home.partition(':')[2].rpartition('.')[0]}"
        return " or ".join([text, *map(str, self.others)])


class Sources:
    """The modules of one published file, parsed on demand."""

    def __init__(self, published: Published) -> None:
        self._published = published
        self._modules: dict[str, Scope] = {}
        self._replaced: set[str] = set()
        self._listed: dict[str, frozenset[str] | None] = {}
        self._active: set[tuple[str, tuple[str, ...]]] = set()

    def find(self, target: str) -> Found:
        """The attribute at ``module:attribute``, resolved through imports, assignments and base classes.

        Of ``package.module.attribute``, without a colon, the longest part that is a module is the module, as for an import.

        Raises:
            AtlasError: the file can't be fetched, or is damaged.
        """
        module, colon, attribute = target.partition(":")
        if not colon:
            while "." in module and module not in self._files:
                module = module.rpartition(".")[0]
            attribute = target[len(module) + 1 :]
            if not attribute:
                return Found("value", type="module")
        for compiled in (module, f"{module}.{attribute.partition('.')[0]}"):
            if compiled in self._compiled and compiled not in self._files:
                return Found("unknown", text=f"the module {compiled} is compiled")
        if module not in self._files:
            return Found("missing", text=f"no module {module}")
        try:
            found = list(dict.fromkeys(self._look(module, tuple(attribute.split(".")))))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return Found("unknown", text=f"Python {'.'.join(map(str, sys.version_info[:2]))} can't parse it: {error}")
        if not found:
            names = self._module(module).names
            on_access = module in self._replaced or "__getattr__" in names
            if on_access and not self._look(module, (attribute.partition(".")[0],)):
                return Found("unknown", text=f"perhaps of {module}, which finds attributes when they are used")
            owner = attribute.rpartition(".")[0]
            of_class = bool(owner) and self.find(f"{module}:{owner}").kind == "class"
            set_ = of_class and self._is_set(module, attribute)
            return Found("missing", text="nothing of that name", inherited=of_class, on_instances=set_)
        first, *others = (replace(one, home="") if one.home == f"{module}:{attribute}" else one for one in found)
        return replace(first, others=tuple(others))

    def _look(self, module: str, names: tuple[str, ...]) -> list[Found]:
        """The definitions of a dotted name in a module; empty if there are none."""
        if (module, names) in self._active:
            return []
        self._active.add((module, names))
        try:
            return self._in(module, names)
        finally:
            self._active.remove((module, names))

    def _in(self, module: str, names: tuple[str, ...]) -> list[Found]:
        name, *rest = names
        scope = self._module(module)
        if bindings := _reaching(scope, name):
            return [one for binding in bindings for one in self._follow(scope, name, binding, tuple(rest))]
        for star, _ in reversed(scope.stars):
            if star in self._files and self._exports(star, name):
                found = self._look(star, names)
                if found:
                    return found
        if f"{module}.{name}" in self._files:
            return self._imported(f"{module}.{name}", tuple(rest))
        for star, branch in scope.stars:
            if branch != "typing" and star not in self._files:
                return [Found("unknown", text=f"perhaps of {star}, which has no source in the wheel")]
        # The names that a lazy package of transformers imports on first access, by the module that has them.
        structures = (_literal(one.expression) for one in scope.names.get("_import_structure", ()))
        lazy = next((one for one in structures if isinstance(one, dict)), {})
        part = next((part for part, exported in lazy.items() if name in exported), None)
        return self._imported(f"{module}.{part}.{name}", tuple(rest)) if part is not None else []

    def _imported(self, path: str, rest: tuple[str, ...]) -> list[Found]:
        parts = (*path.split("."), *rest)
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if module in self._files:
                return self._look(module, parts[length:]) if parts[length:] else [Found("value", type="module")]
            if module in self._compiled:
                return [Found("unknown", text=f"the module {module} is compiled")]
        return [Found("unknown", text=f"imported from {path}, which isn't in the wheel")]

    def _follow(self, scope: Scope, name: str, binding: Binding, rest: tuple[str, ...]) -> list[Found]:
        module = scope.outermost.path
        home = f"{module}:{f'{scope.path}.{name}'[len(module) + 1 :]}"
        if binding.path is not None:
            found = self._imported(binding.path, rest)
            if found or (rest and self._imported(binding.path, ())):
                return found
            return [Found("unknown", text=f"imported from {binding.path}, where it isn't defined")]
        definition, expression = binding.definition, binding.expression
        if isinstance(definition, ast.ClassDef):
            class_ = scope.inner(definition)
            if rest:
                return self._member(class_, definition, rest)
            made = self._member(class_, definition, ("__init__",))
            signature = made[0].parsed if made else None
            return [Found("class", None if signature is None else str(_bound(signature)), home=home)]
        if isinstance(expression, (ast.Name, ast.Attribute)) and _NAME.fullmatch(text := ast.unparse(expression)):
            # An alias: looked up in the class first, then in the module.
            owner = home.partition(":")[2].rpartition(".")[0]
            for around in dict.fromkeys((owner, "")):
                found = self._look(module, (*f"{around}.{text}".strip(".").split("."), *rest))
                if found:
                    return found
        if rest:
            return []
        if definition is not None and {"property", "cached_property"}.isdisjoint(decorators(definition)):
            signature = signature_of(definition)
            of_class = "classmethod" in decorators(definition) or name in _CLASS_METHODS
            return [Found("function", str(_bound(signature) if scope.is_class and of_class else signature), home=home)]
        if definition is not None:
            return [Found("value", type="property", home=home)]
        if binding.around.loops or isinstance(expression, Element):
            expression = None
        text = "" if expression is None else ast.unparse(expression)
        short = text if len(text) <= _QUOTED and "\n" not in text else ""
        return [Found("value", type=_type(expression), text=short, home=home)]

    def _member(self, class_: Scope, node: ast.ClassDef, rest: tuple[str, ...]) -> list[Found]:
        if own := _reaching(class_, rest[0]):
            return [one for binding in own for one in self._follow(class_, rest[0], binding, rest[1:])]
        module = class_.outermost.path
        if rest == ("__init__",) and "dataclass" in decorators(node):
            return [
                Found("unknown", text="made by dataclass", home=f"{module}:{class_.path[len(module) + 1 :]}.__init__")
            ]
        for base in node.bases:
            name = _NAME.match(ast.unparse(base))
            found = self._look(module, (*name[0].split("."), *rest)) if name else []
            if found and found[0].kind != "unknown":
                return [replace(one, inherited=True) for one in found]
        return []

    def _is_set(self, module: str, attribute: str) -> bool:
        """Whether the functions that make a class's instances set this attribute of them."""
        owner, _, name = attribute.rpartition(".")
        for maker in ("__init__", "__post_init__"):
            for found in self._look(module, (*owner.split("."), maker)):
                if any(_sets(node, name) for node in ast.walk(self._definition(found.home))):
                    return True
        return False

    def _definition(self, home: str) -> ast.AST:
        """The class or function at a place; an empty module if the source doesn't show it."""
        module, _, path = home.partition(":")
        nothing = ast.Module([], [])
        if module not in self._files:
            return nothing
        scope = self._module(module)
        for part in path.split("."):
            definition = next((one.definition for one in _reaching(scope, part) if one.definition), None)
            if definition is None:
                return nothing
            scope = scope.inner(definition)
        return scope.node

    def _exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` imports a name that the module has."""
        if module not in self._listed:  # parsing whole modules, of which there are thousands, takes long
            file = self._files[module]
            source = self._published.read(file) if file else b""
            listed = _ALL.search(source) if source.count(b"__all__") == 1 else None
            self._listed[module] = None if listed is None else frozenset(re.findall(r"\w+", listed[1].decode()))
        if (names := self._listed[module]) is not None:
            return name in names
        exported = [_literal(one.expression) for one in self._module(module).names.get("__all__", ())]
        if not exported:
            return not name.startswith("_")
        # An `__all__` that is computed from others can't be evaluated.
        return any(not isinstance(one, (list, tuple)) or name in one for one in exported)

    @cached_property
    def _files(self) -> dict[str, str | None]:
        """The source of each module; None for a folder without one."""
        files: dict[str, str | None] = {}
        for path in sorted(self._published.members):  # a package after a module of the same name
            module = path.partition(".")[0].removesuffix("/__init__").replace("/", ".")
            if path.endswith(".py"):
                files[module] = path
            while "." in module:
                module = module.rpartition(".")[0]
                files.setdefault(module, None)
        return files

    @cached_property
    def _compiled(self) -> set[str]:
        """The modules that have no source."""
        return {path.partition(".")[0].replace("/", ".") for path in self._published.members if path[-3:] != ".py"}

    def _module(self, name: str) -> Scope:
        if name not in self._modules:
            file = self._files[name]
            code = decode_source(self._published.read(file)) if file else ""
            package = name.rpartition(".")[0] if file and not file.endswith("/__init__.py") else name
            self._modules[name] = Scope(name, parse(code), package)
            if _REPLACED.search(code):
                self._replaced.add(name)
        return self._modules[name]


def _reaching(scope: Scope, name: str) -> list[Binding]:
    """The possible definitions of a name after the import of its module: the last unconditional one, and those after it."""
    itself = f"{scope.path}.{name}"  # a package imports its module under its own name
    bindings = [one for one in scope.names.get(name, ()) if one.path != itself]
    # A package that loads its parts on first access imports them only for type checkers.
    bindings = [one for one in bindings if one.around.branch != "typing"] or bindings
    always = [index for index, one in enumerate(bindings) if one.around.branch == "always"]
    return bindings[always[-1] if always else 0 :]


def _sets(node: ast.AST, attribute: str) -> bool:
    """Whether it is the target ``self.attribute`` of an assignment."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and (ast.unparse(node.value), node.attr) == ("self", attribute)
    )


def _literal(node: ast.expr | None) -> object:
    """The value of a literal; None for any other expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _bound(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=[*signature.parameters.values()][1:])


def _type(node: ast.expr | None) -> str | None:
    """The type of a value, as far as its source shows it."""
    try:
        return None if node is None else type(ast.literal_eval(node)).__name__
    except (ValueError, TypeError):
        pass
    if isinstance(node, (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.DictComp, ast.ListComp, ast.SetComp)):
        return type(node).__name__.removesuffix("Comp").lower()
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    return name if name[:1].isupper() else None  # a class, by its name

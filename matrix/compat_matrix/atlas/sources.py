"""Reading seams from the sources of a release with griffe; nothing is installed or imported."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import decode_source
from pathlib import Path
from typing import Any, Literal, TypeVar

import griffe

from .published import Published

#: Methods that are class methods without a decorator.
_CLASS_METHODS = ("__init_subclass__", "__class_getitem__")
#: A value is quoted up to this length; for a longer one only its type counts.
_QUOTED = 60

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
#: A module that puts an object of its own in its place; transformers' lazy modules have what their source has.
_REPLACED = re.compile(r"^\s*sys\.modules\[__name__\] = (?!_LazyModule\b)", re.MULTILINE)
#: An ``__all__`` that is one literal list or tuple.
_ALL = re.compile(rb"^__all__[ \t]*=[ \t]*([\[(][^\])]*[\])])[ \t]*(?:#.*)?$", re.MULTILINE)

#: Only one thread parses at a time: on Python 3.11, a thread switch within a parse (possible if the garbage collector runs a
#: finalizer) makes both threads fail with "AST constructor recursion depth mismatch".
_PARSING = threading.Lock()

T = TypeVar("T")


def _parsed(parse: Callable[[], T]) -> T:
    """The result of a parse, while no other thread parses here.

    Other code may parse in another thread all the same, as the formatting of a traceback does: then the parse is repeated.
    """
    for _ in range(9):
        try:
            with _PARSING:
                return parse()
        except SystemError:
            pass
    with _PARSING:
        return parse()


#: Identifies this module and the versions it depends on: cached results are valid as long as it stays the same.
FINGERPRINT = hashlib.sha256(
    f"{Path(__file__).read_text('utf-8')} {version('griffelib')} {sys.version_info[:2]}".encode()
).hexdigest()[:16]


class _Source(str):
    """A default value, shown as in the source."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, with the source of its default value."""

    name: str
    kind: Literal["positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword"]
    default: str | None = None

    def as_inspect(self) -> inspect.Parameter:
        """The parameter as an `inspect.Parameter`."""
        default = inspect.Parameter.empty if self.default is None else _Source(self.default)
        return inspect.Parameter(self.name, getattr(inspect.Parameter, self.kind.upper()), default=default)


@dataclass(frozen=True)
class Found:
    """A seam as found in a release.

    Attributes:
        kind: ``unknown`` if it exists and the source doesn't show its kind.
        parameters: the parameters of a function or class when called through its owner: without `cls`, with `self`.
        type: the type of a value, if the source shows it.
        text: the source of a short value; otherwise why nothing was found or why it is unknown.
        home: the place of its definition, if that is a different one.
        inherited: whether it is inherited; if it is missing, a base class of a different distribution may have it.
        others: its definitions in other branches of an ``if`` or ``try``.
    """

    kind: Literal["missing", "function", "class", "value", "unknown"]
    parameters: tuple[Parameter, ...] | None = None
    type: str | None = None
    text: str = ""
    home: str = field(default="", compare=False)
    inherited: bool = False
    others: tuple[Found, ...] = ()

    @property
    def signature(self) -> inspect.Signature | None:
        """The signature; None if its parameters aren't known."""
        return None if self.parameters is None else inspect.Signature([item.as_inspect() for item in self.parameters])

    def __str__(self) -> str:
        if self.kind in ("missing", "unknown"):
            text = self.text or self.kind
        elif self.kind == "value":
            text = f"= {self.text}" if self.text else f"a value of type {self.type}" if self.type else "a value"
        else:
            text = f"{'class' if self.kind == 'class' else ''}{'' if self.signature is None else self.signature}"
        if self.inherited and self.home:
            text += f", inherited from {self.home.partition(':')[2].rpartition('.')[0]}"
        return " or ".join([text, *map(str, self.others)])


@dataclass
class _Definition:
    what: griffe.Object | griffe.Alias
    branch: Literal["always", "sometimes", "typing"]


class _Recorder(griffe.Extension):
    """All definitions of a module in order; griffe itself keeps only one for each name."""

    def __init__(self) -> None:
        super().__init__()
        self.definitions: dict[str, list[_Definition]] = {}
        self.wildcards: list[str] = []
        self.executed_wildcards: list[str] = []

    def on_instance(self, *, node: Any, obj: griffe.Object, agent: Any, **kwargs: Any) -> None:
        if obj.parent is None or obj.parent.members.get(obj.name) is not obj or agent.current.is_function:
            return  # the module itself, a setter or an overload, an attribute of instances
        if obj.is_attribute and obj.labels == {"instance-attribute"}:
            return  # annotated without a value
        self._add(node, obj)

    def on_attribute_node(self, *, node: Any, agent: Any, **kwargs: Any) -> None:
        """Assignments that griffe skips: those to a name that has a value in a different branch."""
        if agent.current.is_function or not isinstance(node.parent, (ast.If, ast.ExceptHandler)) or node.value is None:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and target.id in agent.current.members:
                value = ast.unparse(node.value)
                self._add(node, griffe.Attribute(target.id, value=value, parent=agent.current))

    def on_alias_instance(self, *, node: Any, alias: griffe.Alias, agent: Any, **kwargs: Any) -> None:
        if alias.wildcard:
            self.wildcards.append(alias.wildcard)
            if _branch(node) != "typing":
                self.executed_wildcards.append(alias.wildcard)
        else:
            self._add(node, alias)

    def _add(self, node: ast.AST, what: griffe.Object | griffe.Alias) -> None:
        path: list[str] = [what.name]
        parent = what.parent
        while parent is not None and not parent.is_module:
            path.insert(0, parent.name)
            parent = parent.parent
        self.definitions.setdefault(".".join(path), []).append(_Definition(what, _branch(node)))


class Sources:
    """The modules of one published file, parsed on demand."""

    def __init__(self, published: Published) -> None:
        self._published = published
        self._modules: dict[str, _Module] = {}
        self._active: set[tuple[str, tuple[str, ...]]] = set()

    def find(self, target: str) -> Found:
        """The attribute at ``module:attribute``, resolved through imports, assignments and base classes.

        Of ``package.module.attribute``, without a colon, the longest part that is a module is the module, as for an import.

        Raises:
            MatrixError: the file can't be fetched, or is damaged.
        """
        module, colon, attribute = target.partition(":")
        if not colon:
            module = self._longest_module(target)
            attribute = target[len(module) + 1 :]
            if not attribute:
                return Found("value", type="module")
            if compiled := self._compiled(f"{module}.{attribute.partition('.')[0]}"):
                return compiled
        if not self._exists(module):
            return self._compiled(module) or Found("missing", text=f"no module {module}")
        try:
            found = list(dict.fromkeys(self._look(module, tuple(attribute.split(".")))))
        except (SyntaxError, UnicodeDecodeError) as error:
            return Found("unknown", text=f"Python {'.'.join(map(str, sys.version_info[:2]))} can't parse it: {error}")
        if not found and self._made_on_access(module, attribute.partition(".")[0]):
            return Found("unknown", text=f"perhaps of {module}, which finds attributes when they are used")
        if not found:
            owner = attribute.rpartition(".")[0]
            base_elsewhere = bool(owner) and self.find(f"{module}:{owner}").kind == "class"
            return Found("missing", text="nothing of that name", inherited=base_elsewhere)
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
        source = self._module(module)
        definitions = source.reaching(name)
        if definitions:
            return [one for what in definitions for one in self._follow(source, what, tuple(rest))]
        for wildcard in reversed(source.wildcards):
            if self._exists(wildcard) and self._exports(wildcard, name):
                found = self._look(wildcard, names)
                if found:
                    return found
        if self._exists(f"{module}.{name}"):
            return self._imported(f"{module}.{name}", tuple(rest))
        for wildcard in source.executed_wildcards:
            if not self._exists(wildcard):
                return [Found("unknown", text=f"perhaps of {wildcard}, which has no source in the wheel")]
        lazy = next((part for part, exported in source.lazy.items() if name in exported), None)
        return self._imported(f"{module}.{lazy}.{name}", tuple(rest)) if lazy is not None else []

    def _imported(self, path: str, rest: tuple[str, ...]) -> list[Found]:
        parts = (*path.split("."), *rest)
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if self._exists(module):
                return self._look(module, parts[length:]) if parts[length:] else [Found("value", type="module")]
            if compiled := self._compiled(module):
                return [compiled]
        return [Found("unknown", text=f"imported from {path}, which isn't in the wheel")]

    def _follow(self, source: _Module, what: griffe.Object | griffe.Alias, rest: tuple[str, ...]) -> list[Found]:
        if isinstance(what, griffe.Alias):
            found = self._imported(what.target_path, rest)
            if found or (rest and self._imported(what.target_path, ())):
                return found
            return [Found("unknown", text=f"imported from {what.target_path}, where it isn't defined")]
        if isinstance(what, griffe.Class):
            return self._member(source, what, rest) if rest else [self._class(source, what)]
        text = str(what.value) if isinstance(what, griffe.Attribute) else ""
        if _NAME.fullmatch(text):
            # An alias: looked up in the class first, then in the module.
            owner = source.path(what).rpartition(".")[0]
            for scope in dict.fromkeys((owner, "")):
                found = self._look(source.name, (*f"{scope}.{text}".strip(".").split("."), *rest))
                if found:
                    return found
        if rest:
            return []
        if isinstance(what, griffe.Function):
            return [Found("function", _parameters(what), home=source.home(what))]
        if not isinstance(what, griffe.Attribute):
            return [Found("unknown", text=f"a {what.kind.value}", home=source.home(what))]
        if "property" in what.labels:
            return [Found("value", type="property", home=source.home(what))]
        short = text if len(text) <= _QUOTED and "\n" not in text else ""
        return [Found("value", type=_type(text), text=short, home=source.home(what))]

    def _member(self, source: _Module, class_: griffe.Class, rest: tuple[str, ...]) -> list[Found]:
        own = source.reaching(f"{source.path(class_)}.{rest[0]}")
        if own:
            return [one for what in own for one in self._follow(source, what, rest[1:])]
        if rest == ("__init__",) and "dataclass" in class_.labels:
            return [Found("unknown", text="made by dataclass", home=f"{source.home(class_)}.__init__")]
        for base in class_.bases:
            name = _NAME.match(str(base))
            found = self._look(source.name, (*name[0].split("."), *rest)) if name else []
            if found and found[0].kind != "unknown":
                return [replace(one, inherited=True) for one in found]
        return []

    def _class(self, source: _Module, class_: griffe.Class) -> Found:
        initializers = self._member(source, class_, ("__init__",))
        parameters = initializers[0].parameters if initializers else None
        return Found("class", None if parameters is None else parameters[1:], home=source.home(class_))

    def _exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` imports a name that the module has."""
        file = self._file(module)
        exported = self._published.derived(f"exported-{FINGERPRINT}", file, _literal_all) if file else None
        return self._module(module).exports(name) if exported is None else name in exported

    def _made_on_access(self, module: str, name: str) -> bool:
        """Whether a module that doesn't define a name may have it all the same."""
        source = self._module(module)
        return not self._look(module, (name,)) and (bool(source.reaching("__getattr__")) or source.replaced)

    def _longest_module(self, path: str) -> str:
        """The longest beginning of a dotted path that is a module; the first part if there is none."""
        while "." in path and not self._exists(path):
            path = path.rpartition(".")[0]
        return path

    def _file(self, module: str) -> str | None:
        """The source of a module; None if it is a folder without one."""
        path = module.replace(".", "/")
        candidates = (f"{path}/__init__.py", f"{path}.py")
        return next((candidate for candidate in candidates if candidate in self._published.members), None)

    def _exists(self, module: str) -> bool:
        path = module.replace(".", "/")
        members = self._published.members
        return f"{path}.py" in members or f"{path}/__init__.py" in members or path in self._folders

    def _compiled(self, module: str) -> Found | None:
        start = module.replace(".", "/") + "."
        if any(path.startswith(start) and not path.endswith(".py") for path in self._published.members):
            return Found("unknown", text=f"the module {module} is compiled")
        return None

    @cached_property
    def _folders(self) -> set[str]:
        """Packages, with or without an ``__init__.py``."""
        folders: set[str] = set()
        for path in self._published.members:
            folder = path.rpartition("/")[0]
            while folder and folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        return folders

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            file = self._file(name)
            *packages, last = name.split(".")
            parent = None  # the package for relative imports
            for package in packages:
                parent = griffe.Module(package, filepath=Path(package, "__init__.py"), parent=parent)
            code = decode_source(self._published.read(file)) if file else ""

            def visit() -> tuple[_Recorder, griffe.Module]:
                recorder = _Recorder()
                extensions = griffe.load_extensions(recorder)
                return recorder, griffe.visit(
                    last,
                    Path(file or f"{name.replace('.', '/')}/__init__.py"),
                    code,
                    extensions=extensions,
                    parent=parent,
                )

            recorder, visited = _parsed(visit)
            self._modules[name] = _Module(name, recorder, visited.exports, _REPLACED.search(code) is not None)
        return self._modules[name]


class _Module:
    def __init__(
        self, name: str, recorder: _Recorder, exports: Sequence[str | griffe.ExprName] | None, replaced: bool
    ) -> None:
        self.name = name
        self.replaced = replaced
        self.wildcards = recorder.wildcards
        self.executed_wildcards = recorder.executed_wildcards
        self._definitions = recorder.definitions
        self._exports = exports

    def reaching(self, path: str) -> list[griffe.Object | griffe.Alias]:
        """The possible definitions of a name after the import of its module: the last unconditional one, and those after it."""
        definitions = self._definitions.get(path, [])
        # A package that loads its parts on first access imports them only for type checkers.
        definitions = [one for one in definitions if one.branch != "typing"] or definitions
        always = [index for index, one in enumerate(definitions) if one.branch == "always"]
        return [one.what for one in definitions[always[-1] if always else 0 :]]

    @cached_property
    def lazy(self) -> Mapping[str, Sequence[str]]:
        """The names that a lazy package of transformers imports on first access, by the module that has them."""
        structures = [_literal(one.what) for one in self._definitions.get("_import_structure", ())]
        return next((one for one in structures if isinstance(one, dict)), {})

    def exports(self, name: str) -> bool:
        """Whether ``from module import *`` imports a name that the module has."""
        if self._exports is None:
            return not name.startswith("_")
        # An `__all__` that is computed from others can't be evaluated.
        return name in self._exports or not all(isinstance(one, str) for one in self._exports)

    def path(self, what: griffe.Object) -> str:
        return what.path[len(self.name) + 1 :]

    def home(self, what: griffe.Object) -> str:
        return f"{self.name}:{self.path(what)}"


def _literal(what: griffe.Object | griffe.Alias) -> object:
    """The value of an attribute that is a literal; otherwise None."""
    try:
        return _parsed(lambda: ast.literal_eval(str(what.value))) if isinstance(what, griffe.Attribute) else None
    except (ValueError, SyntaxError):
        return None


def _literal_all(source: bytes) -> list[str] | None:
    """The names in the ``__all__`` of a module, found without parsing it; None if only parsing it shows them."""
    literal = _ALL.search(source)
    if literal is None or source.count(b"__all__") != 1:
        return None
    try:
        names = ast.literal_eval(literal[1].decode())
    except (ValueError, SyntaxError):
        return None
    return [name for name in names if isinstance(name, str)]


def _branch(node: Any) -> Literal["always", "sometimes", "typing"]:
    """Whether a definition is executed; griffe notes each node's parent while it visits."""
    sometimes = False
    while (parent := getattr(node, "parent", None)) and not isinstance(parent, (ast.Module, ast.ClassDef)):
        if isinstance(parent, ast.If):
            if ast.unparse(parent.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and node in parent.body:
                return "typing"
            sometimes = True
        sometimes = sometimes or isinstance(parent, (ast.Try, ast.ExceptHandler, ast.For, ast.While, ast.Match))
        node = parent
    return "sometimes" if sometimes else "always"


def _parameters(function: griffe.Function) -> tuple[Parameter, ...]:
    variadic = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
    parameters = [
        Parameter(
            one.name,
            one.kind.name,
            None if one.default is None or one.kind in variadic else str(one.default),
        )
        for one in function.parameters
    ]
    in_class = function.parent is not None and function.parent.is_class
    bound = in_class and ("classmethod" in function.labels or function.name in _CLASS_METHODS)
    return tuple(parameters[1:] if bound else parameters)


def _type(source: str) -> str | None:
    """The type of a value, as far as its source shows it."""
    try:
        node = _parsed(lambda: ast.parse(source, mode="eval").body)
    except SyntaxError:
        return None
    try:
        return type(ast.literal_eval(node)).__name__
    except (ValueError, TypeError):
        pass
    displays: dict[type[ast.expr], str] = {
        **dict.fromkeys((ast.Dict, ast.DictComp), "dict"),
        **dict.fromkeys((ast.List, ast.ListComp), "list"),
        **dict.fromkeys((ast.Set, ast.SetComp), "set"),
        **{ast.Tuple: "tuple", ast.JoinedStr: "str", ast.Lambda: "function"},
    }
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return name if name[:1].isupper() else None  # a class, by its name
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "bool"
    return displays.get(type(node))

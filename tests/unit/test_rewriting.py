"""Copies of functions in which a global name refers to another object."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernel_compat import KernelCompatError
from kernel_compat.patching.rewriting import callers, globals_read, with_globals

SOURCE = '''
import functools
import math

def rotate(x):
    return x + 1

def scale(x):
    return x * 10

def logged(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.calls += 1
        return function(self, *args, **kwargs)
    return wrapper

class Base:
    calls = 0

    def forward(self, x):
        return x

class Layer(Base):
    @logged
    @logged
    def forward(self, x, *, more: "Missing" = 0) -> "Missing":
        """With a docstring
            of two lines."""
        self.__hidden = math.floor(1.5)
        return super().forward(scale(rotate(x)) + more + self.__hidden)

    def nested(self, x):
        return [rotate(one) for one in x], (lambda: rotate(x[0]))()

    def declared(self, x):
        global rotate
        rotate = rotate
        return rotate(x)

    def rotate(self, x):
        return self.rotate, rotate(x)
'''
NAMES = re.compile("rotate")


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    path = tmp_path / "a_modeling_file.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def other(x: Any) -> Any:
    return x + 1000


def test_methods_that_read_a_global_are_found(file: ModuleType) -> None:
    assert callers(file.Layer, NAMES) == {
        name: {"rotate": file.rotate} for name in ("forward", "nested", "declared", "rotate")
    }
    assert globals_read(file.Base.forward, NAMES) == {}


def test_the_copy_alone_reads_another_object(file: ModuleType) -> None:
    before = dict(vars(file))
    layer, original = file.Layer(), file.Layer.forward
    copy: Any = with_globals(original, {"rotate": other})

    assert copy(layer, 1, more=5) == 10_016  # calls both wrappers and super()
    assert layer.calls == 2
    assert layer._Layer__hidden == 1
    assert layer.forward(1) == 21
    assert vars(file) == before
    assert (copy.__name__, copy.__qualname__, copy.__doc__) == ("forward", "Layer.forward", original.__doc__)
    assert copy.__wrapped__.__annotations__ == original.__wrapped__.__annotations__
    assert copy.__wrapped__.__wrapped__.__code__.co_filename == file.__file__

    again = with_globals(copy, {"scale": lambda x: x})
    assert again(layer, 1, more=5) == 1007
    assert copy(layer, 1, more=5) == 10_016


def test_nested_functions_read_it_too(file: ModuleType) -> None:
    assert with_globals(file.Layer.nested, {"rotate": other})(file.Layer(), [1, 2]) == ([1001, 1002], 1001)
    layer = file.Layer()
    assert with_globals(file.Layer.rotate, {"rotate": other})(layer, 1) == (layer.rotate, 1001)


def test_other_globals_are_those_of_the_moment(file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = with_globals(file.Layer.forward, {"rotate": other})
    monkeypatch.setattr(file, "scale", lambda x: x)
    assert copy(file.Layer(), 1) == 1002


def test_what_cannot_be_copied_is_refused(file: ModuleType) -> None:
    with pytest.raises(KernelCompatError, match="doesn't read the globals rotate"):
        with_globals(file.Base.forward, {"rotate": other})
    with pytest.raises(KernelCompatError, match="declares rotate as global"):
        with_globals(file.Layer.declared, {"rotate": other})
    namespace: dict[str, Any] = {}
    exec("def forward(x): return rotate(x)\ndef rotate(x): return x", namespace)
    # Python 3.13 finds another source under that name.
    with pytest.raises(KernelCompatError, match=r"forward of <string> (can't be read|isn't as it is written)"):
        with_globals(namespace["forward"], {"rotate": other})


def test_a_file_that_has_changed_since_is_refused(file: ModuleType) -> None:
    assert file.__file__ is not None
    Path(file.__file__).write_text(SOURCE.replace("+ more", "- more"))
    with pytest.raises(
        KernelCompatError, match=r"Layer\.forward of .*a_modeling_file\.py isn't as it is written there"
    ):
        with_globals(file.Layer.forward, {"rotate": other})


def test_torch_compile_takes_it_for_an_ordinary_function(file: ModuleType) -> None:
    compiled = torch.compile(
        functools.partial(with_globals(file.Layer.nested, {"rotate": other}), file.Layer()),
        fullgraph=True,
        backend="eager",
    )
    found, one = compiled([torch.zeros(2), torch.ones(2)])
    assert torch.equal(torch.stack([*found, one]), torch.tensor([[1000.0] * 2, [1001.0] * 2, [1000.0] * 2]))

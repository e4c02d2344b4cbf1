"""The modules that each use imports, in a new process where torch and transformers are installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kernel_compat

HEAVY = ("torch", "transformers", "numpy", "flash_attn", "rich")

ALLOWED = {
    "nothing but the import": "",
    "register_attention": "k.register_attention('a_flash', kernel='flash_attention_2')",
    "register_attention with a forward and a mask": (
        "k.register_attention('b_flash', kernel='flash_attention_reference', forward=print, mask=print)"
    ),
    "a refused registration": (
        "try:\n    k.register_attention('sdpa', kernel='flash_attention_2')\nexcept ValueError:\n    pass"
    ),
    "unregister_attention": "k.register_attention('c_flash', kernel='flash_attention_4'); k.unregister_attention('c_flash')",
    "status with a name": "k.status()",
    "the environment": "k.Environment.detect()",
    "why a kernel is not usable": (
        "[kernel.unavailable_because(k.Environment.detect()) for kernel in k.known_kernels().values()]"
    ),
    "what to load a model with": "k.policy.ladder(); k.policy.plan_attention('flash_attention_2', packed_sequence=True)",
    "uninstall": "k.uninstall()",
    "status without a name": "[k.unregister_attention(name) for name in ('a_flash', 'b_flash')]; k.status()",
    "every public name": "[getattr(k, name) for name in k.__all__]",
}

PROGRAM = """
import json, sys
import kernel_compat as k
loaded = {}
for name, code in json.loads(sys.argv[1]).items():
    exec(code)
    loaded[name] = sorted(sys.modules)
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The modules that are loaded after each step."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(ALLOWED)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("step", ALLOWED)
def test_no_framework_is_imported(loaded: dict[str, list[str]], step: str) -> None:
    assert [name for name in loaded[step] if name.partition(".")[0] in HEAVY] == []


def test_the_import_loads_nothing_else_of_ours(loaded: dict[str, list[str]]) -> None:
    """Each submodule is imported at the first use of one of its names."""
    first = loaded["nothing but the import"]
    assert [name for name in first if name.startswith("kernel_compat")] == ["kernel_compat"]
    assert not {"packaging", "importlib.metadata", "pynvml", "email"} & set(first)


def test_public_names() -> None:
    assert set(kernel_compat.__all__) <= set(dir(kernel_compat))
    for name in kernel_compat.__all__:
        assert getattr(kernel_compat, name) is getattr(kernel_compat, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        kernel_compat.no_such_name  # noqa: B018

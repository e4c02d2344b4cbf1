"""What is imported when: each in a process of its own, where torch and transformers are installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kernel_compat

HEAVY = ("torch", "transformers", "numpy", "flash_attn", "rich")

ALLOWED = {
    "nothing but the import": "",
    "register_attention": "k.register_attention('x_flash', kernel='flash_attention_2')",
    "register_attention with a forward and a mask": (
        "k.register_attention('x_flash', kernel='flash_attention_reference', forward=print, mask=print)"
    ),
    "a refused registration": (
        "try:\n    k.register_attention('sdpa', kernel='flash_attention_2')\nexcept ValueError:\n    pass"
    ),
    "unregister_attention": "k.register_attention('x_flash', kernel='flash_attention_4'); k.unregister_attention('x_flash')",
    "status": "k.status()",
    "status with a name": "k.register_attention('x_flash', kernel='flash_attention_2'); k.status()",
    "the environment": "k.Environment.detect()",
    "why a kernel is not usable": (
        "[kernel.unavailable_because(k.Environment.detect()) for kernel in k.known_kernels().values()]"
    ),
    "what to load a model with": "k.policy.ladder(); k.policy.resolve_preload('flash_attention_2', packed_sequence=True)",
    "uninstall": "k.uninstall()",
    "every public name": "[getattr(k, name) for name in k.__all__]",
}


def loaded_after(code: str) -> list[str]:
    program = f"import json, sys\nimport kernel_compat as k\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout)
    return modules


@pytest.mark.parametrize("what", ALLOWED)
def test_no_framework_is_imported(what: str) -> None:
    loaded = loaded_after(ALLOWED[what])
    assert [name for name in loaded if name.partition(".")[0] in HEAVY] == []


def test_the_import_loads_nothing_else_of_ours() -> None:
    """That is what makes it cheap: each part comes with the first use of one of its names."""
    loaded = loaded_after("")
    assert [name for name in loaded if name.startswith("kernel_compat")] == ["kernel_compat"]
    assert not {"packaging", "importlib.metadata", "pynvml", "email"} & set(loaded)


def test_public_names() -> None:
    assert set(kernel_compat.__all__) <= set(dir(kernel_compat))
    for name in kernel_compat.__all__:
        assert getattr(kernel_compat, name) is getattr(kernel_compat, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        kernel_compat.no_such_name  # noqa: B018

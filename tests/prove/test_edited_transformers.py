"""What is proven of a published release isn't taken to hold for an edited copy of it: its models are proven as they are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from linked import linked_copy, replace_text

_LOAD = """
import torch, transformers, kernel_compat
kernel_compat.register_attention("edited_flash", kernel="flash_attention_reference")
kernel_compat.install()
config = transformers.MistralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, sliding_window=4, attn_implementation="edited_flash",
)
try:
    model = transformers.MistralForCausalLM(config)
except kernel_compat.AttentionRefusedError as error:
    print("refused:", error)
else:
    print("loaded")
    try:
        model(torch.arange(9)[None])
    except kernel_compat.UnsupportedFeatureError as error:
        print("refused in the call:", error)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed transformers, of hard links."""
    folder = tmp_path_factory.mktemp("copy")
    linked_copy(Path(transformers.__file__).parent, folder / "transformers")
    return folder


def load(copy: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "XDG_CACHE_HOME": str(cache),
        "KERNEL_COMPAT_UNPROVEN": "refuse",
    }
    return subprocess.run([sys.executable, "-c", _LOAD], env=environment, capture_output=True, text=True, check=True)


def test_a_copy_as_published_is_not_proven_again(copy: Path, tmp_path: Path) -> None:
    done = load(copy, tmp_path)
    assert done.stdout == "loaded\n"
    assert "other code than its release" not in done.stderr


def edited(copy: Path, file: str, before: str, after: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """What loading says of a copy with an edit."""
    path = copy / "transformers" / file
    source = path.read_text()
    assert source.count(before) == 1
    replace_text(path, source.replace(before, after))
    try:
        return load(copy, cache)
    finally:
        replace_text(path, source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("key_states.transpose(2, 3)) * scaling", "key_states.transpose(2, 3)) * scaling * 1.1"),
        pytest.param(
            "return hidden_states.reshape(batch, num_key_value_heads * n_rep,",
            "return hidden_states.transpose(1, 2).reshape(batch, num_key_value_heads * n_rep,",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["scale", "which heads share keys"],
)
def test_an_edited_copy_is_proven_and_refused(copy: Path, tmp_path: Path, before: str, after: str) -> None:
    """What eager attention computes, and no kernel reads."""
    done = edited(copy, "models/mistral/modeling_mistral.py", before, after, tmp_path)
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr
    assert "transformers.models.mistral.modeling_mistral" in done.stderr  # says what has been edited


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("kv_idx > q_idx - sliding_window", "kv_idx > q_idx - sliding_window - 1", "loaded\nrefused in the call:"),
        ("return kv_idx <= q_idx", "return kv_idx < q_idx + 2", "refused:"),
    ],
    ids=["window", "causality"],
)
def test_masks_of_an_edited_copy(copy: Path, tmp_path: Path, before: str, after: str, said: str) -> None:
    done = edited(copy, "masking_utils.py", before, after, tmp_path)
    assert done.stdout.startswith(said), done.stdout + done.stderr
    assert "transformers.masking_utils" in done.stderr

"""The library in each Python process of a command, and in none without the environment variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

Python = Callable[..., "subprocess.CompletedProcess[str]"]

#: Modules of ours in a process; none of them without the variable.
LOADED = (
    "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('kernel_compat', 'kernel_compat_run', 'wrapt')))"
)


@pytest.mark.parametrize("variables", [{}, {"KERNEL_COMPAT": ""}, {"KERNEL_COMPAT": "0"}], ids=str)
def test_off_is_off(variables: dict[str, str], python: Python) -> None:
    done = python(f"import sys; {LOADED}; print(sys.meta_path)", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    loaded, finders = done.stdout.splitlines()
    assert loaded == "[]"
    assert "wrapt" not in finders


def test_off_is_off_in_a_process_with_transformers(python: Python) -> None:
    done = python(f"import sys, transformers; {LOADED}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_start_of_a_process_imports_no_framework(python: Python) -> None:
    done = python("import sys; print({'torch', 'transformers', 'yaml'} & {*sys.modules})", KERNEL_COMPAT="{}")
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_settings_that_are_wrong_end_every_process(python: Python) -> None:
    done = python("print('trained')", KERNEL_COMPAT="atention: {my_flash: auto}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the variable KERNEL_COMPAT: 'atention' is no setting" in done.stderr
    assert "did you mean attention?" in done.stderr


#: Code that can do without transformers.
WITHOUT = "try: import transformers\nexcept BaseException: pass\nprint('trained')"


def test_an_exception_that_code_would_catch_ends_the_process(python: Python) -> None:
    done = python(WITHOUT, KERNEL_COMPAT="attention: {my_flash: flash_attention_9}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "kernel-compat: error: 'flash_attention_9' is no kernel" in done.stderr


def test_other_settings_than_those_of_the_process_are_refused(python: Python) -> None:
    code = (
        "from kernel_compat_run import Settings\nfrom kernel_compat_run.start import start\n"
        "start(Settings(padding_free=True))\nstart(Settings())"
    )
    done = python(code, KERNEL_COMPAT="padding_free: true")
    assert 'SettingsError: this process has other settings already: {"padding_free": true}, and not {}' in done.stderr


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "2"}, False),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_rank_0_alone_says_so(variables: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_compat_run.start import is_first_rank

    for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_first_rank() is first


#: A model under a name of the settings, in this process, a forked one, and one that is spawned in another working directory.
CHILDREN = """
import multiprocessing, os, sys, tempfile

def here(queue=None):
    import torch, transformers
    from kernel_compat import ops, registered_attention
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="my_flash")
    bound = ops.applied(model)
    text = [os.environ["KERNEL_COMPAT"], bound and bound.config["cross_entropy_loss"], registered_attention()["my_flash"].kernel.name]
    return queue.put(text) if queue else text

if __name__ == "__main__":
    results = [here()]
    os.chdir(tempfile.mkdtemp())
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=here, args=(queue,))
        child.start()
        results.append(queue.get(timeout=100))
        child.join()
    import json
    print(json.dumps(results))
"""


@pytest.mark.slow
def test_children_have_it_too(tmp_path: Path) -> None:
    pytest.importorskip("kernel_compat_ops")
    script = tmp_path / "train.py"
    script.write_text(CHILDREN)
    (tmp_path / "kernel-compat.yaml").write_text("attention: {my_flash: flash_attention_reference}\nops: ops.yaml\n")
    kernels = "model: {ops_implementation: {cross_entropy_loss_implementation: chunk_loss}}"
    (tmp_path / "ops.yaml").write_text(kernels)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, str(script), "fork", "spawn"],
        cwd=tmp_path,
        env={**environment, "KERNEL_COMPAT": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 3
    settings = {"attention": {"my_flash": ["flash_attention_reference"]}, "ops": str(tmp_path / "ops.yaml")}
    for variable, loss, kernel in results:
        assert (json.loads(variable), loss, kernel) == (settings, "chunk_loss", "flash_attention_reference")
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("kernel-compat: "))
    assert line.startswith("kernel-compat: attention my_flash (flash_attention_reference); ops /")


#: Fails in its first life on rank 0; torchelastic then restarts all ranks.
RESTARTED = """
import os, sys
import transformers
from kernel_compat import registered_attention
assert "my_flash" in registered_attention()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
print("rank", os.environ["RANK"], "after", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@pytest.mark.slow
def test_a_restarted_rank_has_it_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [
        sys.executable,
        "-m",
        "kernel_compat",
        "run",
        "--attention",
        "my_flash=auto",
        "--",
        *launcher,
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 after 1", "rank 1 after 1"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("kernel-compat: attention my_flash")]
    assert len(lines) == 2  # rank 0, twice


#: A Trainer run as a user writes it; prints its losses on rank 0.
TRAINER = """
import json, sys, torch, transformers
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
model = transformers.LlamaForCausalLM._from_config(
    transformers.LlamaConfig(**sizes), attn_implementation="kernel_compat_flash_attention_reference"
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 99, (8, 64)).tolist()]
options = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "use_cpu": True, "report_to": []}
trainer = transformers.Trainer(model, transformers.TrainingArguments(sys.argv[1], **options, save_strategy="no"), train_dataset=rows)
trainer.train()
if trainer.is_world_process_zero():
    print("losses", json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
"""


@pytest.mark.slow
def test_two_ranks_share_the_sequences_of_a_trainer(tmp_path: Path) -> None:
    """The losses are those of one rank; without the option each rank has batches of its own, and they aren't."""
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    program = [str(script), str(tmp_path / "out")]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    losses = []
    for command in ([sys.executable, *program], ["--context-parallel", "2", "--", *two], two):
        words = command if "--" in command else ["--", *command]
        done = subprocess.run(
            [sys.executable, "-m", "kernel_compat", "run", *words],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("losses "))
        losses.append(json.loads(line.removeprefix("losses ")))
    one, shared, replicated = losses
    assert shared == pytest.approx(one, abs=1e-5)
    assert replicated != pytest.approx(one, abs=1e-5)

"""The plugins of frameworks, called as each of them does. tests/downstream runs some with the frameworks themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_compat_run import plugins

Python = Callable[..., "subprocess.CompletedProcess[str]"]

#: axolotl 0.19.0, axolotl/cli/config.py: `prepare_plugins`; and the start of its base class.
AXOLOTL = """
import importlib, sys, types
base = types.ModuleType("axolotl.integrations.base")
base.BasePlugin = type("BasePlugin", (), {})
sys.modules |= {"axolotl": types.ModuleType("axolotl"), "axolotl.integrations": types.ModuleType("i"), base.__name__: base}
module, _, name = "kernel_compat_run.plugins.axolotl.KernelCompatPlugin".rpartition(".")
plugin = getattr(importlib.import_module(module), name)()
plugin.register({"plugins": [], **CFG})
module, _, name = plugin.get_input_args().rpartition(".")
print(getattr(importlib.import_module(module), name)(**CFG).kernel_compat)
import os; print(os.environ["KERNEL_COMPAT"])
"""


def test_axolotl(python: Python) -> None:
    pytest.importorskip("pydantic")
    settings = {"attention": {"my_flash": "auto"}}
    done = python(AXOLOTL.replace("CFG", repr({"kernel_compat": settings})))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [str(settings), '{"attention": {"my_flash": ["auto"]}}']
    done = python(AXOLOTL.replace("CFG", "{'kernel_compat': None}"), KERNEL_COMPAT="padding_free: true")
    assert done.stdout.splitlines() == ["None", '{"padding_free": true}']


@pytest.mark.parametrize(
    ("cfg", "problem"),
    [
        ({"kernel_compat": {"attn": 1}}, "'attn' is no setting"),
        ({"kernel_compat": {"padding_free": False}}, "this process has other settings already"),
    ],
)
def test_what_axolotl_s_configuration_has_wrong_ends_the_process(cfg: object, problem: str, python: Python) -> None:
    pytest.importorskip("pydantic")
    done = python(AXOLOTL.replace("CFG", repr(cfg)), KERNEL_COMPAT="padding_free: true")
    assert (done.returncode, done.stdout) == (1, "")
    assert problem in done.stderr


#: ms-swift 4.6.0, swift/utils/utils.py: `import_external_file`.
MS_SWIFT = """
import importlib.util, os, sys
os.chdir(FOLDER)
sys.path.insert(0, os.path.dirname(FILE))
spec = importlib.util.spec_from_file_location("_swift_external_0", FILE)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(os.environ["KERNEL_COMPAT"])
"""


def test_ms_swift(python: Python, tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "kernel_compat_run.plugins.ms_swift"], capture_output=True, text=True, check=True
    )
    file = printed.stdout.removesuffix("\n")
    code = MS_SWIFT.replace("FOLDER", repr(str(tmp_path))).replace("FILE", repr(file))
    assert python(code).stdout == "{}\n"
    (tmp_path / "kernel-compat.yaml").write_text("padding_free: true")
    assert python(code).stdout == '{"padding_free": true}\n'
    (tmp_path / "kernel-compat.yaml").write_text("padding_free: 1")
    done = python(code)
    assert (done.returncode, done.stdout) == (1, "")
    assert "kernel-compat.yaml: padding_free is true or false, not 1" in done.stderr


def test_the_folder_that_ms_swift_puts_first_hides_no_package() -> None:
    folder = Path(next(iter(plugins.__path__))) / "ms_swift"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "__main__", "kernel_compat_plugin"}


#: verl 0.9.1, verl/__init__.py and verl/trainer/constants_ppo.py.
VERL = """
import importlib.metadata
for point in importlib.metadata.entry_points(group="verl.plugins"):
    try:
        point.load()
    except Exception as error:
        pass
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
print(get_ppo_ray_runtime_env({}))
"""


@pytest.mark.parametrize(
    ("variables", "forwarded"),
    [
        ({}, {"env_vars": {"NCCL_DEBUG": "WARN"}}),
        ({"KERNEL_COMPAT": "ops: auto"}, {"env_vars": {"NCCL_DEBUG": "WARN", "KERNEL_COMPAT": '{"ops": "auto"}'}}),
    ],
)
def test_verl(variables: dict[str, str], forwarded: object, python: Python, tmp_path: Path) -> None:
    trainer = tmp_path / "verl" / "trainer"
    trainer.mkdir(parents=True)
    (trainer / "constants_ppo.py").write_text(
        "def get_ppo_ray_runtime_env(config=None): return {'env_vars': {'NCCL_DEBUG': 'WARN'}}"
    )
    done = python(VERL, PYTHONPATH=str(tmp_path), **variables)
    assert (done.stdout, done.stderr) == (f"{forwarded}\n", "")


CALLBACK = """
from kernel_compat_run import Settings
from kernel_compat_run.plugins.trainer import KernelCompatCallback
callback = KernelCompatCallback(Settings(padding_free=True, ops=OPS))
import torch, transformers
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**sizes), attn_implementation=NAME)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 99, (2, 8)).tolist()]
options = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no", "output_dir": OUT}
transformers.Trainer(model, transformers.TrainingArguments(**options), train_dataset=rows, callbacks=[callback]).train()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ops", "problem"),
    [
        ("kernel_compat", "auto", ""),
        (
            "sdpa",
            None,
            "the model was loaded with attn_implementation='sdpa', which isn't registered: pass 'kernel_compat'",
        ),
    ],
)
def test_the_callback_of_a_trainer(name: str, ops: str | None, problem: str, python: Python, tmp_path: Path) -> None:
    code = CALLBACK.replace("OPS", repr(ops)).replace("NAME", repr(name)).replace("OUT", repr(str(tmp_path)))
    done = python(code, KERNEL_COMPAT_UNPROVEN="allow")
    assert ("trained" in done.stdout) is not bool(problem), done.stderr
    assert problem in done.stderr
    assert "kernel-compat: attention kernel_compat (any kernel)" in done.stderr

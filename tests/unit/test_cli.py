"""The command line, in this process; in a subprocess where imports, pipes or broken environments are tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import bare_site
import pytest
from command_line import Cli, imports_nothing_heavy

import kernel_compat
from kernel_compat import cli, gates
from kernel_compat.cli import explain, printing
from kernel_compat.patching.shim import discover
from kernel_compat.policy import LADDER
from kernel_compat.proofs import table
from kernel_compat.versions import minor

COMPAT = Path(kernel_compat.__file__).parents[1]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed",
)

#: A framework that registers names when it is imported; its second kernel is wrong: it ignores causality.
FRAMEWORK = """
from types import SimpleNamespace
from kernel_compat import register_attention
from kernel_compat.kernels import reference

print("a banner")

def varlen(q, k, v, causal=False, **keywords):
    return reference.flash_attn_varlen_func(q, k, v, **keywords)

register_attention("right_flash", "flash_attention_reference")
register_attention("wrong_flash", SimpleNamespace(flash_attn_varlen_func=varlen))
"""


def process(*arguments: str, paths: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The command line in a subprocess."""
    search = [str(path) for path in paths] + [p for p in [os.environ.get("PYTHONPATH")] if p]
    return subprocess.run(
        [sys.executable, "-m", "kernel_compat", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def module(folder: Path, name: str, code: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    return folder


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the module."""
    monkeypatch.syspath_prepend(module(tmp_path / "framework", "some_framework", FRAMEWORK))
    yield "some_framework"
    sys.modules.pop("some_framework", None)


@pytest.fixture
def bare_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in an environment without torch, transformers and metadata."""
    site = tmp_path / "site"
    bare_site.make(site)

    def run(*arguments: str, paths: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: PLW1510 - the exit code is what is tested
            [sys.executable, "-S", "-m", "kernel_compat", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, COMPAT, site)))},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_what_runs_nothing_imports_nothing_heavy() -> None:
    """In a new process: no framework is imported and, without a terminal, neither is rich."""
    imports_nothing_heavy(
        ["status"],
        ["explain", "flash_attention_2"],
        ["explain", "eager"],
        ["plan", "--attn", "flash_attention_2", "--packed"],
    )


def test_the_process_ends_with_the_exit_code() -> None:
    done = process("status", "--colour")
    assert done.returncode == 2
    assert "kernel-compat: error: unrecognized arguments: --colour" in done.stderr


def test_status_tells_the_environment_the_shims_and_the_names(run: Cli) -> None:
    found = json.loads(run("status", "--json").stdout)
    assert found["ok"] is True
    assert found["installed"] is False
    assert found["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(shim["state"] in ("pending", "not needed") and shim["reason"] for shim in found["shims"])
    assert all(shim["upstream"] and shim["delete_when"] for shim in found["shims"])
    names = {name["name"]: name for name in found["attention"]}
    assert list(names) == list(kernel_compat.known_kernels())
    text = run("status").stdout
    for shim in found["shims"]:
        # Without a terminal each row is one line, however long its reason.
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [shim["name"]]]
        assert shim["reason"] in line
        assert (f"Delete when {shim['delete_when']}" in line) == (shim["state"] == "pending")
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_colour_is_never_the_only_carrier(run: Cli) -> None:
    coloured = run("status", FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="200").stdout
    assert "\x1b[" in coloured
    assert "usable" in coloured


@needs_transformers
def test_check_of_the_reference_is_right(run: Cli) -> None:
    done = run("check", "flash_attention_reference", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["attention"]["flash_attention_reference"] == "available"
    states = {shim["name"]: shim["state"] for shim in found["shims"]}
    assert set(states.values()) <= {"applied", "not needed", "pending"}
    # Of modules that nothing has imported.
    waiting = {shim.name for shim in discover()[0] if shim.on_import}
    assert {name for name, state in states.items() if state == "pending"} <= waiting
    (name,) = found["names"]
    assert name["verdict"] == "right"
    assert all(case["errors"]["dk"] <= case["tolerance"] for case in name["cases"])


@needs_transformers
def test_a_wrong_kernel_ends_in_1_and_stdout_is_json_alone(run: Cli, framework: str) -> None:
    done = run("check", "right_flash", "wrong_flash", "--json", "--import", framework)
    assert done.returncode == 1, done.stderr
    assert "a banner" in done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert [(name["name"], name["verdict"]) for name in found["names"]] == [
        ("right_flash", "right"),
        ("wrong_flash", "WRONG"),
    ]


@needs_torch
def test_a_wrong_kernel_is_called_so_in_the_tables(run: Cli, framework: str) -> None:
    done = run("check", "wrong_flash", "--import", framework)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("wrong_flash: relative errors against float64") for line in lines)
    assert any(line.split()[:2] == ["causal", "WRONG"] and "wrong: output" in line for line in lines)
    assert lines[-1] == "Something is WRONG or failed: see above."
    assert "Traceback" not in done.stderr


def test_status_and_explain_know_registered_names(run: Cli, framework: str) -> None:
    found = json.loads(run("status", "--json", "--import", framework).stdout)
    assert found["attention"][-1]["name"] == "wrong_flash"
    done = run("explain", "right_flash", "--import", framework)
    assert done.returncode == 0
    assert "registered with register_attention (pending)" in done.stdout
    assert "Kernel: flash_attention_reference. Forward: the default." in done.stdout


def test_check_without_torch_says_what_to_install(bare_cli: Callable[..., Any]) -> None:
    done = bare_cli("check")
    assert done.returncode == 0, done.stderr
    assert "Missing: torch is not installed: pip install torch" in done.stdout
    assert "Missing: transformers is not installed: pip install transformers" in done.stdout
    assert "python             " in done.stdout
    found = json.loads(bare_cli("check", "--json").stdout)
    assert {name["verdict"] for name in found["names"]} == {"not usable"}
    assert all("torch is not installed" in name["reasons"] for name in found["names"])
    assert all(name["reasons"].count("torch is not installed") == 1 for name in found["names"])


@needs_torch
def test_check_without_transformers_still_runs_kernels(tmp_path: Path, bare_cli: Callable[..., Any]) -> None:
    hidden = module(tmp_path / "hide", "sitecustomize", "")
    # torch must lie in a site-packages: link everything of the real one except transformers.
    real = Path(importlib.util.find_spec("torch").origin).parents[1]  # type: ignore[union-attr, arg-type]
    for item in real.iterdir():
        if not item.name.startswith(("transformers", "kernel_compat", "_kernel_compat", "__editable__")):
            (hidden / item.name).symlink_to(item)
    done = bare_cli("check", "flash_attention_reference", "--json", paths=(hidden,))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == ["transformers is not installed: pip install transformers"]
    assert found["names"][0]["verdict"] == "right"


def test_a_broken_torch_is_diagnosed(tmp_path: Path, bare_cli: Callable[..., Any]) -> None:
    broken = module(tmp_path / "broken", "torch", "raise OSError('libcudart.so.12: cannot open [shared] object file')")
    for done in (bare_cli("check", paths=(broken,)), process("check", paths=(broken,))):
        assert done.returncode == 1
        assert "does not import (OSError: libcudart.so.12: cannot open [shared] object file)" in done.stdout
        assert "Traceback" not in done.stderr
    found = json.loads(bare_cli("check", "--json", paths=(broken,)).stdout)
    assert found["ok"] is False
    assert {name["verdict"] for name in found["names"]} == {"not usable"}
    assert all("torch does not import" in name["reasons"] for name in found["names"])


@needs_torch
def test_a_broken_transformers_is_diagnosed_and_kernels_still_run(tmp_path: Path) -> None:
    broken = module(tmp_path / "broken", "transformers", "raise RuntimeError('tokenizers is too old')")
    done = process("check", "flash_attention_reference", "sdpa", "--json", paths=(broken,))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (problem,) = found["problems"]
    assert "transformers is installed but does not import (RuntimeError: tokenizers is too old)" in problem
    assert [name["verdict"] for name in found["names"]] == ["right", "not usable"]
    assert found["names"][1]["reasons"] == ["transformers does not import"]


@pytest.mark.parametrize("command", ["status", "check"])
def test_a_failed_shim_ends_in_1(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    broken = module(tmp_path / "shim", "some_shim", "raise ValueError('made for another release')")
    (broken / "some_shim-1.0.dist-info").mkdir()
    (broken / "some_shim-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-shim\nVersion: 1.0\n"
    )
    (broken / "some_shim-1.0.dist-info" / "entry_points.txt").write_text(
        "[kernel_compat.shims]\nsome = some_shim:SHIM\n"
    )
    names = ["flash_attention_2"] if command == "check" else []
    monkeypatch.syspath_prepend(broken)
    done = run(command, *names, "--json")
    assert done.returncode == 1, done.stderr
    (shim,) = [shim for shim in json.loads(done.stdout)["shims"] if shim["state"] == "failed"]
    assert "made for another release" in shim["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required"),
        (["explain"], "explain takes an attention NAME, or --model"),
        (["explain", "--model", os.path.dirname(__file__)], "no model type in its config.json"),
        (["explain", "auto"], "explain auto takes --model FOLDER"),
        (["explain", "auto", "--model", "./llamma"], "--model ./llamma: there is no such folder"),
        (["explain", "eager", "--model="], "--model takes a model type, or a folder with a config.json, and is empty"),
        (["plan", "--model", "/nope/x"], "--model /nope/x: there is no such folder"),
        (["plan", "--model="], "--model takes a model type, or a folder with a config.json, and is empty"),
        (["explain", "nope"], "'nope' is no attention name here; there are: eager"),
        (["plan", "--attn", "flash_atention_2"], "'flash_atention_2' is no attention name here; there are: eager"),
        (["plan", "--attn="], "an attention name must not be empty"),
        (["check", "nope", "--json"], "'nope' can't be checked here; these can: flash_attention_4"),
        (["check", "eager"], "'eager' can't be checked here"),
        (["status", "--import", "no_such_module"], "--import no_such_module: ModuleNotFoundError"),
        (["status", "--colour"], "unrecognized arguments: --colour"),
        (["plan", "--tp", "two"], "argument --tp: invalid int value: 'two'"),
        (["plan", "--tp", "0"], "tp_size counts ranks"),
        (["plan", "--packed", "--cp", "2", "--json"], "packed sequences can't be split over context parallel ranks"),
    ],
)
def test_bad_arguments_end_in_2(run: Cli, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_explain_shows_features_and_reasons(run: Cli) -> None:
    text = run("explain", "flash_attention_3").stdout
    for expected in ("9.0 to 9.9", "bfloat16", "up to 256", "fa3-fwd", "lacks: window", "transformers' own"):
        assert expected in text
    assert "transformers' own" in run("explain", "sdpa").stdout
    found = json.loads(run("explain", "flash_attention_4", "--json").stdout)
    assert found["name"] == "flash_attention_4"
    assert found["providers"][0]["features"]["min_capability"] == [9, 0]


@pytest.mark.usefixtures("without_gpu")
def test_explain_shows_the_kernel_of_each_layer(run: Cli, tmp_path: Path) -> None:
    """Of a model of which there are no weights: Gemma 2's sliding and global layers."""
    config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "head_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = json.loads(run("explain", "auto", "--model", str(tmp_path), "--json").stdout)["layers"]
    assert [of["layers"] for of in found] == [[f"model.layers.{i}.self_attn" for i in one] for one in ((0, 2), (1, 3))]
    assert ["window" in of["needs"]["features"] for of in found] == [True, False]
    assert all(of["training"] == of["forward"] == "flash_attention_reference" for of in found)
    text = run("explain", "auto", "--model", str(tmp_path)).stdout
    assert "model.layers.1.self_attn and 1 more" in text
    text = run("explain", "flash_attention_2", "--model", str(tmp_path)).stdout
    assert "flash_attention_2: " in text


def test_explain_a_forward_without_a_kernel(run: Cli) -> None:
    """What was declared of it, and no package."""

    def ring(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    for name, kernel in (("ring_flash", None), ("ring_and_kernel", "flash_attention_2")):
        forward = kernel_compat.ForwardSpec(ring, features={"varlen", "softcap"})
        kernel_compat.register_attention(name, kernel=kernel, forward=forward)
        try:
            text = run("explain", name).stdout
            assert "lacks: causal, window, " in text
            (provider,) = json.loads(run("explain", name, "--json").stdout)["providers"]
        finally:
            kernel_compat.unregister_attention(name)
        assert ("its own forward" in text) is (kernel is None)
        assert ("imported as" in text) is (kernel is not None)
        assert (provider["module"] is None) is (kernel is None)
        assert (provider["features"]["softcap"], provider["features"]["window"]) == (True, False)


@pytest.mark.usefixtures("without_gpu")
def test_explain_torchs_own_kernel(run: Cli) -> None:
    text = run("explain", "flash_attention_torch").stdout
    for expected in ("torch.nn.attention.varlen", "8.0 or greater", "lacks: ", "no CUDA device is visible"):
        assert expected in text
    found = json.loads(run("explain", "flash_attention_torch", "--json").stdout)
    (provider,) = found["providers"]
    assert provider["features"]["head_dim_multiple"] == 8
    assert provider["version"] == found["environment"]["packages"].get("torch")
    assert [step["name"] for step in found["ladder"]] == ["flash_attention_torch", "sdpa", "eager"]


@pytest.mark.usefixtures("without_gpu")
def test_explain_shows_the_ladder_with_a_reason_a_step(run: Cli) -> None:
    done = run("explain", "flash_attention_3", "--json")
    steps = json.loads(done.stdout)["ladder"]
    walked = [step["name"] for step in steps]
    assert (walked[0], walked[-2:]) == ("flash_attention_3", ["sdpa", "eager"])
    assert "no CUDA device is visible" in steps[0]["reason"]
    text = run("explain", "flash_attention_3").stdout
    for step in steps:
        (line,) = [line for line in text.splitlines() if line.startswith(step["name"]) and step["reason"] in line]
        assert ("not usable" in line) is not step["usable"]


@needs_transformers
def test_explain_what_is_proven_of_a_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = minor(version("transformers"))
    types = {
        "bert": {"refused": ["load"]},
        "clvp": {"no recipe": []},
        "gpt2": {"wrong": ["packed_mask", "plain"], "refused": ["padded_holes"]},
        "llama": {},
    }
    monkeypatch.setattr(table, "_table", lambda: {release: types})

    def explained(*arguments: str) -> str:
        assert cli.main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    assert "proven equal to eager attention" in explained("--model", "llama")
    assert "refused: load." in explained("--model", "bert")
    monkeypatch.setattr(explain, "entries", lambda group: {})
    assert "no tiny model of it could be made; without kernel-compat-prove it isn't proven." in explained(
        "--model", "clvp"
    )
    said = explained("--model", "nonesuch")
    assert "not in the table; without kernel-compat-prove it isn't proven. Install it with: pip install" in said
    prover = EntryPoint("prove", "kernel_compat_prove.at_load:gate", gates.LOAD_GATES)
    monkeypatch.setattr(explain, "entries", lambda group: {"prove": prover})
    assert "no tiny model of it could be made; proven at load by kernel_compat_prove." in explained("--model", "clvp")
    assert "not in the table; proven at load by kernel_compat_prove." in explained("--model", "nonesuch")
    said = explained("--model", "gpt2", "flash_attention_reference")
    assert "wrong: packed_mask, plain." in said
    assert "refused: padded_holes." in said
    assert "gpt2 is proven wrong under it: packed_mask, plain" in said
    config: dict[str, Any] = {"model_type": "gpt2"}
    for code, verdict in (({}, "wrong"), ({"auto_map": {}}, None)):
        (tmp_path / "config.json").write_text(json.dumps({**config, **code}))
        found = json.loads(explained("--model", str(tmp_path), "--json"))
        assert found["model"]["verdict"] == verdict
        assert [step["name"] for step in found["ladder"]] == [*LADDER]


def test_explain_a_kernel_of_the_hub(run: Cli) -> None:
    steps = json.loads(run("explain", "org/repo", "--json").stdout)["ladder"]
    assert [step["name"] for step in steps] == ["org/repo", "eager"]
    assert "a kernel of the hub" in steps[0]["reason"]


class TestPlan:
    @pytest.mark.usefixtures("without_gpu")
    def test_what_is_decided_and_why(self, run: Cli) -> None:
        arguments = ("plan", "--tp", "2", "--packed", "--attn", "flash_attention_3", "--liger")
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        assert "attn_implementation  flash_attention_3\n" in done.stdout
        assert "use_liger_kernel     False\n" in done.stdout
        for reason in (
            "Liger is off: its kernels take one rank's shard for the whole under tensor parallelism (tp_size=2).",
            "flash_attention_3 is kept: it was requested, and takes packed sequences.",
            "flash_attention_3 is not usable here: ",
        ):
            assert reason in done.stdout
        found = json.loads(run(*arguments, "--json").stdout)
        assert found["ok"] is True
        assert (found["attn_implementation"], found["use_liger_kernel"]) == ("flash_attention_3", False)
        assert all(reason in done.stdout for reason in found["reasons"])

    def test_context_parallelism(self, run: Cli) -> None:
        found = json.loads(run("plan", "--cp", "2", "--attn", "eager", "--json").stdout)
        assert found["attn_implementation"] == "sdpa"

    def test_nothing_asked_for(self, run: Cli) -> None:
        assert "unset: sdpa where the model has it, else eager" in run("plan").stdout

    def test_registered_names(self, run: Cli, framework: str) -> None:
        arguments = ("plan", "--packed", "--attn", "right_flash", "--import", framework, "--json")
        assert json.loads(run(*arguments).stdout)["attn_implementation"] == "right_flash"

    @pytest.mark.usefixtures("without_gpu")
    @pytest.mark.parametrize("form", [(), ("--json",)])
    def test_no_plan_ends_in_1(self, run: Cli, form: tuple[str, ...]) -> None:
        done = run("plan", "--packed", *form)
        assert done.returncode == 1, done.stderr
        for name in LADDER:
            assert f"{name}: " in done.stdout
        assert "Traceback" not in done.stderr
        if form:
            assert json.loads(done.stdout)["ok"] is False

    def test_the_plans_of_other_packages_come_behind(self, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        own = types.ModuleType("another_package")
        monkeypatch.setitem(sys.modules, own.__name__, own)
        points = {"another": EntryPoint("another", "another_package:plan", gates.PLANS)}
        monkeypatch.setattr("kernel_compat.cli.plan.entries", lambda group: points if group == gates.PLANS else {})
        monkeypatch.setattr(own, "plan", lambda: {"ok": True, "text": ["another: all of it"]}, raising=False)
        assert run("plan").stdout.endswith("\nanother: all of it\n")
        assert json.loads(run("plan", "--json").stdout)["plans"]["another"]["ok"] is True

        monkeypatch.setattr(own, "plan", lambda: 1 / 0)
        done = run("plan")
        assert done.returncode == 1
        assert "The plan of another_package failed: ZeroDivisionError: division by zero" in done.stdout


def test_a_number_that_is_not_finite_is_null() -> None:
    assert printing.plain({"errors": (float("nan"), float("inf"), 1.0)}) == {"errors": [None, None, 1.0]}


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo terminals are POSIX")
@needs_torch
def test_the_progress_bar_goes_to_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pty

    leader, follower = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(leader, 4096):
                shown.extend(chunk)
        except OSError:  # Linux raises an error once the other end of the terminal is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        code = cli.main(["check", "flash_attention_reference"])
    reader.join()
    os.close(leader)
    text = capsys.readouterr().out
    assert code == 0
    assert b"flash_attention_reference" in shown
    assert "\x1b" not in text
    assert "flash_attention_reference" in text


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("explain", "flash_attention_reference")])
def test_a_reader_that_stops_reading_is_no_error(arguments: tuple[str, ...]) -> None:
    """As in `kernel-compat status | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-m", "kernel_compat", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_table_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table("Nothing", ("name", "reason"), [])
    assert capsys.readouterr().out == "\nNothing\n"

"""The command line as its users meet it: in a process of its own, in good and in broken environments."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bare_site
import pytest

import kernel_compat
from kernel_compat import cli
from kernel_compat.policy import LADDER
from kernel_compat.proving import table

COMPAT = Path(kernel_compat.__file__).parents[1]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed",
)

#: A framework that registers names when it is imported, the second one wrong: it ignores causality.
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


def kernel_compat_cli(*arguments: str, paths: tuple[Path, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    search = [str(path) for path in paths] + [p for p in [os.environ.get("PYTHONPATH")] if p]
    return subprocess.run(  # noqa: PLW1510 - the exit code is what is tested
        [sys.executable, "-m", "kernel_compat", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def module(folder: Path, name: str, code: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    return folder


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    return module(tmp_path / "framework", "some_framework", FRAMEWORK)


@pytest.fixture
def bare_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line where neither torch nor transformers nor any metadata is to be found."""
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["explain", "flash_attention_2"],
        ["explain", "eager"],
        ["plan", "--attn", "flash_attention_2", "--packed"],
    ],
)
@pytest.mark.parametrize("form", ["json", "tables"])
def test_what_runs_nothing_imports_nothing_heavy(arguments: list[str], form: str) -> None:
    code = (
        "import sys; from kernel_compat.cli import main; code = main(sys.argv[1:]);"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    options = ["--json"] if form == "json" else []
    done = subprocess.run(  # noqa: PLW1510 - the exit code is what is tested
        [sys.executable, "-c", code, *arguments, *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.splitlines()[-1].split())
    assert not imported & {"torch", "transformers", "numpy", "flash_attn"}
    assert ("rich" in imported) == (form == "tables")
    if form == "json":
        json.loads(done.stdout)


def test_status_tells_the_environment_the_shims_and_the_names() -> None:
    found = json.loads(kernel_compat_cli("status", "--json").stdout)
    assert found["ok"] is True
    assert found["installed"] is False
    assert found["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(shim["state"] in ("pending", "not needed") and shim["reason"] for shim in found["shims"])
    names = {name["name"]: name for name in found["attention"]}
    assert list(names) == list(kernel_compat.known_kernels())
    text = kernel_compat_cli("status").stdout
    for shim in found["shims"]:
        # Where nobody resizes the window a row is a line, however long its reason.
        assert any(shim["name"] in line and shim["reason"] in line for line in text.splitlines())
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_colour_is_never_the_only_carrier() -> None:
    coloured = kernel_compat_cli("status", FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="200").stdout
    assert "\x1b[" in coloured
    assert "usable" in coloured


@needs_transformers
def test_check_of_the_reference_is_right() -> None:
    done = kernel_compat_cli("check", "flash_attention_reference", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["attention"]["flash_attention_reference"] == "available"
    assert {shim["state"] for shim in found["shims"]} <= {"applied", "not needed"}
    (name,) = found["names"]
    assert name["verdict"] == "right"
    assert all(case["errors"]["dk"] <= case["tolerance"] for case in name["cases"])


@needs_transformers
def test_a_wrong_kernel_ends_in_1_and_stdout_is_json_alone(framework: Path) -> None:
    done = kernel_compat_cli(
        "check", "right_flash", "wrong_flash", "--json", "--import", "some_framework", paths=(framework,)
    )
    assert done.returncode == 1, done.stderr
    assert "a banner" in done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert [(name["name"], name["verdict"]) for name in found["names"]] == [
        ("right_flash", "right"),
        ("wrong_flash", "WRONG"),
    ]


@needs_torch
def test_a_wrong_kernel_is_called_so_in_the_tables(framework: Path) -> None:
    done = kernel_compat_cli("check", "wrong_flash", "--import", "some_framework", paths=(framework,))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.split()[:3] == ["wrong_flash", "causal", "WRONG"] and "wrong: output" in line for line in lines)
    assert lines[-1] == "Something is WRONG or failed: see above."
    assert "Traceback" not in done.stderr


def test_status_and_explain_know_registered_names(framework: Path) -> None:
    found = json.loads(kernel_compat_cli("status", "--json", "--import", "some_framework", paths=(framework,)).stdout)
    assert found["attention"][-1]["name"] == "wrong_flash"
    done = kernel_compat_cli("explain", "right_flash", "--import", "some_framework", paths=(framework,))
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
    # torch needs a site-packages of its own: all of the real one but transformers.
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
    for done in (bare_cli("check", paths=(broken,)), kernel_compat_cli("check", paths=(broken,))):
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
    done = kernel_compat_cli("check", "flash_attention_reference", "sdpa", "--json", paths=(broken,))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (problem,) = found["problems"]
    assert "transformers is installed but does not import (RuntimeError: tokenizers is too old)" in problem
    assert [name["verdict"] for name in found["names"]] == ["right", "not usable"]
    assert found["names"][1]["reasons"] == ["transformers does not import"]


@pytest.mark.parametrize("command", ["status", "check"])
def test_a_failed_shim_ends_in_1(tmp_path: Path, command: str) -> None:
    broken = module(tmp_path / "shim", "some_shim", "raise ValueError('made for another release')")
    (broken / "some_shim-1.0.dist-info").mkdir()
    (broken / "some_shim-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-shim\nVersion: 1.0\n"
    )
    (broken / "some_shim-1.0.dist-info" / "entry_points.txt").write_text(
        "[kernel_compat.shims]\nsome = some_shim:SHIM\n"
    )
    names = ["flash_attention_2"] if command == "check" else []
    done = kernel_compat_cli(command, *names, "--json", paths=(broken,))
    assert done.returncode == 1, done.stderr
    (shim,) = [shim for shim in json.loads(done.stdout)["shims"] if shim["state"] == "failed"]
    assert "made for another release" in shim["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required"),
        (["explain"], "explain takes an attention NAME, or --model"),
        (["explain", "--model", os.path.dirname(__file__)], "no model type in its config.json"),
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
def test_bad_arguments_end_in_2(arguments: list[str], message: str) -> None:
    done = kernel_compat_cli(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_explain_shows_features_and_reasons() -> None:
    text = kernel_compat_cli("explain", "flash_attention_3").stdout
    for expected in ("9.0 to 9.9", "bfloat16", "up to 256", "fa3-fwd", "lacks: window, sinks", "transformers' own"):
        assert expected in text
    assert "transformers' own" in kernel_compat_cli("explain", "sdpa").stdout
    found = json.loads(kernel_compat_cli("explain", "flash_attention_4", "--json").stdout)
    assert found["name"] == "flash_attention_4"
    assert found["providers"][0]["features"]["min_capability"] == [9, 0]


def test_explain_torchs_own_kernel() -> None:
    text = kernel_compat_cli("explain", "flash_attention_torch", CUDA_VISIBLE_DEVICES="").stdout
    for expected in ("torch.nn.attention.varlen", "8.0 or greater", "lacks: ", "no CUDA device is visible"):
        assert expected in text
    found = json.loads(kernel_compat_cli("explain", "flash_attention_torch", "--json", CUDA_VISIBLE_DEVICES="").stdout)
    (provider,) = found["providers"]
    assert provider["features"]["head_dim_multiple"] == 8
    assert provider["version"] == found["environment"]["packages"].get("torch")
    assert [step["name"] for step in found["ladder"]] == ["flash_attention_torch", "sdpa", "eager"]


def test_explain_shows_the_ladder_with_a_reason_a_step() -> None:
    done = kernel_compat_cli("explain", "flash_attention_3", "--json", CUDA_VISIBLE_DEVICES="")
    steps = json.loads(done.stdout)["ladder"]
    walked = [step["name"] for step in steps]
    assert (walked[0], walked[-2:]) == ("flash_attention_3", ["sdpa", "eager"])
    assert "no CUDA device is visible" in steps[0]["reason"]
    text = kernel_compat_cli("explain", "flash_attention_3", CUDA_VISIBLE_DEVICES="").stdout
    for step in steps:
        (line,) = [line for line in text.splitlines() if line.startswith(step["name"]) and step["reason"] in line]
        assert ("not usable" in line) is not step["usable"]


@needs_transformers
def test_explain_what_is_proven_of_a_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = table.minor(version("transformers"))
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
    assert "no tiny model of it could be made; proven at load." in explained("--model", "clvp")
    assert "not in the table; proven at load." in explained("--model", "nonesuch")
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


def test_explain_a_kernel_of_the_hub() -> None:
    steps = json.loads(kernel_compat_cli("explain", "org/repo", "--json").stdout)["ladder"]
    assert [step["name"] for step in steps] == ["org/repo", "eager"]
    assert "a kernel of the hub" in steps[0]["reason"]


class TestPlan:
    def test_what_is_decided_and_why(self) -> None:
        arguments = ("plan", "--tp", "2", "--packed", "--attn", "flash_attention_3", "--liger")
        done = kernel_compat_cli(*arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        assert "attn_implementation  flash_attention_3\n" in done.stdout
        assert "use_liger_kernel     False\n" in done.stdout
        for reason in (
            "Liger is off: its kernels take one rank's shard for the whole under tensor parallelism (tp_size=2).",
            "flash_attention_3 is kept: it was asked for, and takes packed sequences.",
            "flash_attention_3 is not usable here: ",
        ):
            assert reason in done.stdout
        found = json.loads(kernel_compat_cli(*arguments, "--json", CUDA_VISIBLE_DEVICES="").stdout)
        assert found["ok"] is True
        assert (found["attn_implementation"], found["use_liger_kernel"]) == ("flash_attention_3", False)
        assert all(reason in done.stdout for reason in found["reasons"])

    def test_context_parallelism(self) -> None:
        found = json.loads(kernel_compat_cli("plan", "--cp", "2", "--attn", "eager", "--json").stdout)
        assert found["attn_implementation"] == "sdpa"

    def test_nothing_asked_for(self) -> None:
        assert "unset: sdpa where the model has it, else eager" in kernel_compat_cli("plan").stdout

    def test_registered_names(self, framework: Path) -> None:
        arguments = ("plan", "--packed", "--attn", "right_flash", "--import", "some_framework", "--json")
        assert (
            json.loads(kernel_compat_cli(*arguments, paths=(framework,)).stdout)["attn_implementation"] == "right_flash"
        )

    @pytest.mark.parametrize("form", [(), ("--json",)])
    def test_no_plan_ends_in_1(self, form: tuple[str, ...]) -> None:
        done = kernel_compat_cli("plan", "--packed", *form, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 1, done.stderr
        for name in LADDER:
            assert f"{name}: " in done.stdout
        assert "Traceback" not in done.stderr
        if form:
            assert json.loads(done.stdout)["ok"] is False


def test_a_number_that_is_not_finite_is_null() -> None:
    assert cli._plain({"errors": (float("nan"), float("inf"), 1.0)}) == {"errors": [None, None, 1.0]}


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo terminals are POSIX")
@needs_torch
def test_the_progress_bar_goes_to_a_terminal_alone() -> None:
    import pty

    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "kernel_compat", "check", "flash_attention_reference"],
        env={**os.environ, "TERM": "xterm-256color"},
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
    ) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # Linux ends a terminal that nobody holds open any more with an error
            pass
        os.close(leader)
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0
    assert b"flash_attention_reference: " in shown
    assert "\x1b" not in text
    assert "flash_attention_reference" in text


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("explain", "flash_attention_reference")])
def test_a_reader_that_stops_reading_is_no_error(arguments: tuple[str, ...]) -> None:
    """As `kernel-compat status | head -1`."""
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


# ops -----------------------------------------------------------------------------------------------------------------


def test_ops_lists_every_field_and_value_with_the_reason() -> None:
    done = kernel_compat_cli("ops", "--json", CUDA_VISIBLE_DEVICES="")
    found = json.loads(done.stdout)

    assert done.returncode == 0
    choices = {(one["op"], one["value"]): one for one in found["choices"]}
    assert choices["cross_entropy_loss", "chunk_loss"]["reasons"] == []
    assert choices["rms_norm", "eager"]["note"] == "the model's own code"
    liger = choices["rms_norm", "liger_kernel"]
    assert liger["variants"] == ["standard", "offset"]
    assert any("it needs a CUDA device" in reason for reason in liger["reasons"])
    assert found["model"] == ""
    text = kernel_compat_cli("ops", CUDA_VISIBLE_DEVICES="").stdout
    assert "cross_entropy_loss_implementation" in text
    assert "eager" not in text


@needs_transformers
def test_ops_says_what_would_be_bound_to_a_saved_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "hidden_activation": "gelu",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "vocab_size": 50,
            }
        )
    )
    done = kernel_compat_cli("ops", "--model", str(tmp_path), "--json")
    fits = {(one["op"], one["value"]): one for one in json.loads(done.stdout)["fits"]}

    assert json.loads(done.stdout)["model"] == "Gemma2ForCausalLM"
    assert (fits["rms_norm", "liger_kernel"]["modules"], fits["rms_norm", "liger_kernel"]["variants"]) == (
        9,
        ["offset"],
    )
    assert "it differs from down(silu(gate(x)) * up(x))" in fits["swiglu_mlp", "liger_kernel"]["refused"]
    assert fits["load_balancing_loss", "triton"]["notes"] == ["load_balancing_loss: this model has none"]
    text = kernel_compat_cli("ops", "--model", str(tmp_path)).stdout
    assert "Gemma2ForCausalLM" in text
    assert "eps 1e-06, gemma casting" in text


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "has no config.json"),
        ("{}", "no model can be built from"),
        ('{"model_type": "nonesuch"}', "no model can be built from"),
    ],
)
@needs_transformers
def test_ops_refuses_what_is_no_model(tmp_path: Path, config: str | None, problem: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)

    done = kernel_compat_cli("ops", "--model", str(tmp_path), "--json")

    assert done.returncode == 2
    assert done.stdout == ""
    assert f"--model: {tmp_path} {problem}" in done.stderr or f"--model: {problem}" in done.stderr

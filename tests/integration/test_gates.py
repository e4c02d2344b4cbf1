"""What other packages add by entry points, and what happens without the library's neighbours."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from tiny import CAUSAL_LMS, NAME

import kernel_compat
from kernel_compat import cli, gates
from kernel_compat.errors import AttentionRefusedError, MissingExtraError

Install = Callable[..., None]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the entry points of this environment with others: by group, a name and an object each."""
    module = ModuleType("of_others")
    monkeypatch.setitem(sys.modules, "of_others", module)

    def install(**groups: dict[str, Any]) -> None:
        points = []
        for group, entries in groups.items():
            for name, value in entries.items():
                if value is not None:
                    setattr(module, f"{group}_{name}", value)
                points.append(EntryPoint(name, f"of_others:{group}_{name}", f"kernel_compat.{group}"))
        monkeypatch.setattr(gates, "entry_points", lambda group: EntryPoints(points).select(group=group))

    return install


class OwnConfig(transformers.LlamaConfig):
    model_type = "own_of_test_gates"


class Own(transformers.LlamaForCausalLM):
    """A class that no table has."""

    config_class = OwnConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def build() -> Any:
    return Own._from_config(OwnConfig(**CAUSAL_LMS["llama"]().to_dict()), attn_implementation=NAME)


@pytest.fixture
def default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNEL_COMPAT_UNPROVEN")  # the tests' own proves nothing


@pytest.mark.usefixtures("installed", "default_policy")
class TestModelsThatTheTableDoesNotHave:
    def test_without_a_prover_it_is_a_warning_that_names_the_extra(self, installs: Install) -> None:
        installs()
        with pytest.warns(UserWarning, match=r"Own isn't proven .* pip install \"kernel-compat\[prove\]\""):
            build()

    def test_without_a_prover_it_may_be_refused(self, installs: Install, monkeypatch: pytest.MonkeyPatch) -> None:
        installs()
        monkeypatch.setenv("KERNEL_COMPAT_UNPROVEN", "refuse")
        with pytest.raises(AttentionRefusedError, match=r"kernel-compat\[prove\]"):
            build()

    def test_padding_free_without_a_prover(self, installs: Install) -> None:
        installs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build()
        with pytest.warns(UserWarning, match=r"without padding as with it: .* pip install \"kernel-compat\[prove\]\""):
            kernel_compat.models.padding_free(model).undo()

    def test_a_type_of_the_table_needs_no_prover(self, installs: Install) -> None:
        installs()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            transformers.LlamaForCausalLM._from_config(CAUSAL_LMS["llama"](), attn_implementation=NAME)

    def test_a_gate_says_that_it_holds(self, installs: Install) -> None:
        seen = []

        def gate(model: Any, name: str, claim: str, *, by_name: bool) -> str | None:
            seen.append((type(model), name, claim))
            return None

        installs(load_gates={"theirs": gate})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build()
        assert seen[0] == (Own, NAME, "attention")

    def test_a_gate_refuses_whatever_another_says(self, installs: Install) -> None:
        def refuses(model: Any, name: str, claim: str, *, by_name: bool) -> str | None:
            raise AttentionRefusedError(name, "Own", claim, "Theirs says so.")

        installs(load_gates={"a": lambda *_, **__: None, "b": refuses})
        with pytest.raises(AttentionRefusedError, match="Theirs says so"):
            build()

    def test_a_gate_that_answers_with_an_empty_reason_proves_nothing(self, installs: Install) -> None:
        installs(load_gates={"theirs": lambda *_, **__: ""})
        with pytest.warns(UserWarning, match="isn't proven .*: the gate theirs says no reason"):
            build()

    def test_a_gate_that_does_not_load_proves_nothing(self, installs: Install) -> None:
        installs(load_gates={"broken": None})
        with pytest.warns(UserWarning, match="its entry point broken could not be loaded: AttributeError"):
            build()


@pytest.mark.parametrize("command", cli.NEIGHBOURS)
def test_a_command_that_is_not_installed(command: str, installs: Install, capsys: pytest.CaptureFixture[str]) -> None:
    installs()
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "--json", "llama"])
    assert f'pip install "kernel-compat[{command}]"' in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert f"kernel-compat[{command}]" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_public_names_that_are_not_installed(installs: Install) -> None:
    installs()
    importlib.import_module("kernel_compat.ops")._package.cache_clear()
    with pytest.raises(ImportError, match=r"pip install \"kernel-compat\[ops\]\""):
        kernel_compat.ops.OpsConfig  # noqa: B018
    with pytest.raises(MissingExtraError, match=r"kernel-compat\[ops\]"):
        kernel_compat.models.use_liger_kernel  # noqa: B018
    with pytest.raises(ImportError, match=r"kernel-compat\[ops\]"):
        exec("from kernel_compat.ops import OpsConfig")


def test_a_command_of_another_package(installs: Install, capsys: pytest.CaptureFixture[str]) -> None:
    class Greet:
        HELP = "says hello"

        @staticmethod
        def add_arguments(parser: Any) -> None:
            parser.add_argument("--json", action="store_true")
            parser.add_argument("who")

        @staticmethod
        def find(arguments: Any) -> dict[str, Any]:
            return {"ok": arguments.who != "nobody", "who": arguments.who}

        @staticmethod
        def show(found: dict[str, Any]) -> None:
            print(f"hello, {found['who']}")

    installs(commands={"greet": Greet})
    assert cli.main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello, you\n"
    assert cli.main(["greet", "nobody", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "who": "nobody"}


def test_explain_has_the_findings_of_other_packages(
    installs: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    from kernel_compat.cli.explain import explain

    environment = kernel_compat.Environment(
        packages={"flash-attn": "2.8.3", "torch": "2.11.0"}, imports={"flash_attn": ("flash-attn",)}
    )
    monkeypatch.setattr(
        "kernel_compat.cli.explain.status", lambda: kernel_compat.Report(environment, installed=False, shims=())
    )

    def diagnose(distribution: str, environment: Any) -> list[Any]:
        return [SimpleNamespace(package=distribution, file="a.so", problem="it is cut off", command="", breaks=True)]

    installs(diagnoses={"theirs": diagnose})
    (provider,) = explain("flash_attention_2")["providers"]
    assert "a.so: it is cut off" in provider["reasons"]
    assert cli.main(["explain", "flash_attention_2", "--json"]) == 0
    (provider,) = json.loads(capsys.readouterr().out)["providers"]
    assert provider["findings"][0]["problem"] == "it is cut off"
    installs()
    (provider,) = explain("flash_attention_2")["providers"]
    assert not provider["findings"]


@pytest.mark.parametrize("where", ["load", "call", "findings"])
def test_explain_goes_on_without_a_package_that_fails(
    where: str, installs: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = kernel_compat.Environment(
        packages={"flash-attn": "2.8.3", "torch": "2.11.0"}, imports={"flash_attn": ("flash-attn",)}
    )
    monkeypatch.setattr(
        "kernel_compat.cli.explain.status", lambda: kernel_compat.Report(environment, installed=False, shims=())
    )

    def diagnose(distribution: str, environment: Any) -> Any:
        if where == "call":
            raise ValueError("their own mistake")
        return ["no finding"]

    installs(diagnoses={"theirs": None if where == "load" else diagnose})
    assert cli.main(["explain", "flash_attention_2"]) == 0
    text = capsys.readouterr().out
    error = {"load": "AttributeError", "call": "ValueError: their own mistake", "findings": "AttributeError"}[where]
    assert f"of_others failed to diagnose it: {error}" in text
    assert "Ladder" in text
    assert cli.main(["explain", "flash_attention_2", "--json"]) == 0
    (provider,) = json.loads(capsys.readouterr().out)["providers"]
    assert error in provider["undiagnosed"][0]
    assert provider["findings"] == []


def test_the_neighbours_are_of_this_version() -> None:
    root = Path(__file__).parents[2]
    versions = set()
    for file in [root / "pyproject.toml", *sorted((root / "compat").glob("*/pyproject.toml"))]:
        text = file.read_text()
        versions |= {line.split('"')[1] for line in text.splitlines() if line.startswith("version = ")}
        versions |= {part.split('"')[0] for part in text.split("kernel-compat==")[1:]}
        for neighbour in ("doctor", "ops", "prove"):
            versions |= {part.split('"')[0] for part in text.split(f"kernel-compat-{neighbour}==")[1:]}
    assert len(versions) == 1

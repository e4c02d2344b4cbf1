"""One schema for options, the environment variable and the file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from kernel_compat_run import Settings, SettingsError, resolve
from kernel_compat_run.sources import variables_of

YAML = "attention: {my_flash: flash_attention_reference}\npadding_free: true\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"atention": {}},
            "'atention' is no setting: there are attention, ops, padding_free, context_parallel, unproven; did you",
        ),
        ({"padding-free": True}, ".* did you mean padding_free?"),
        ([], r"is no mapping of settings, but \[\]"),
        ({"attention": "auto"}, "attention is a mapping of attention names to kernels, not 'auto'"),
        ({"attention": {"a_flash": 3}}, "attention 'a_flash' has the name of a kernel, or several, not 3"),
        ({"attention": {"a_flash": "auto,"}}, "attention 'a_flash' has no kernel"),
        ({"ops": True}, "ops is the path of a file or 'auto', not True"),
        ({"padding_free": "yes"}, "padding_free is true or false, not 'yes'"),
        (
            {"context_parallel": "all"},
            "context_parallel is accelerate, world, a number of ranks N, or two, NxM, not 'all'",
        ),
        ({"context_parallel": [2, 2, 2]}, "context_parallel is accelerate, world, "),
        ({"context_parallel": 1}, "context_parallel has 1 rank along which keys travel: it takes 2 or more"),
        ({"unproven": "ignore"}, "unproven is warn, refuse, allow, not 'ignore'"),
    ],
)
def test_what_is_wrong_is_named_with_the_choices(values: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=f"here: {message}" if isinstance(values, dict) else message):
        Settings.of(values, "here")


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        (True, "accelerate"),
        (False, None),
        ("world", "world"),
        (2, (2, 1)),
        ("4", (4, 1)),
        ("4x2", (4, 2)),
        ([4, 2], (4, 2)),
    ],
)
def test_ranks(value: Any, ranks: Any) -> None:
    settings = Settings.of({"context_parallel": value})
    assert settings.context_parallel == ranks
    assert Settings.of(json.loads(settings.to_json())) == settings


def test_an_option_is_before_the_variable_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "kernel-compat.yaml").write_text(YAML)
    other = tmp_path / "folder" / "other.yaml"
    other.parent.mkdir()
    other.write_text("ops: ops.yaml\nunproven: refuse\n")

    of_file = resolve(folder=tmp_path)
    assert of_file.settings == Settings(attention={"my_flash": ("flash_attention_reference",)}, padding_free=True)
    assert of_file.origins == dict.fromkeys(("attention", "padding_free"), str(of_file.file))
    assert resolve(variable="1", folder=tmp_path) == of_file
    assert resolve(variable="{}", folder=tmp_path).settings == Settings()
    by_path = resolve(variable="folder/other.yaml", folder=tmp_path)
    assert by_path.settings == Settings(ops=str(other.parent / "ops.yaml"), unproven="refuse")
    assert by_path.file == other
    inline = resolve({"padding_free": False, "ops": "auto"}, "padding_free: true\nunproven: allow", tmp_path)
    assert inline.settings == Settings(ops="auto", unproven="allow")
    assert inline.origins == {
        "padding_free": "--padding-free",
        "ops": "--ops",
        "unproven": "the variable KERNEL_COMPAT",
    }


def test_the_table_of_pyproject(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.other]\nkernel-compat = "1"\n')
    assert resolve(folder=tmp_path).file is None
    project.write_text(
        '[tool.kernel-compat]\ncontext_parallel = [2, 2]\n[tool.kernel-compat.attention]\na_flash = "auto"\n'
    )
    assert resolve(folder=tmp_path).settings == Settings(attention={"a_flash": ("auto",)}, context_parallel=(2, 2))
    (tmp_path / "kernel-compat.yaml").write_text(YAML)
    with pytest.raises(SettingsError, match="both have settings: keep them in one of the two"):
        resolve(folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("kernel-compat.yaml", "attention: {", "kernel-compat.yaml is no YAML"),
        ("kernel-compat.yaml", "- 1", "is no mapping of settings"),
        ("kernel-compat.yaml", b"\xff", "kernel-compat.yaml can't be read"),
        ("pyproject.toml", "[tool.kernel-compat", "pyproject.toml can't be read"),
    ],
)
def test_bad_files(name: str, text: str | bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=problem):
        resolve(folder=tmp_path)


def test_the_error_passes_from_process_to_process() -> None:
    error = pickle.loads(pickle.dumps(SettingsError("a message")))
    assert (type(error), str(error)) == (SettingsError, "a message")


def test_a_variable_that_is_none_of_its_forms(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match="is 'nowhere.yaml': there is no such file, and it is neither 1 nor settings"
    ):
        resolve(variable="nowhere.yaml", folder=tmp_path)


def test_numbers_of_ranks_are_accelerate_s_variables() -> None:
    settings = Settings.of({"context_parallel": "4x2"})
    variables = variables_of(settings, {"PARALLELISM_CONFIG_CP_SIZE": "4"})
    assert variables == {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "4",
        "PARALLELISM_CONFIG_SP_SIZE": "2",
    }
    with pytest.raises(
        SettingsError, match="context_parallel is 4x2, and the variable PARALLELISM_CONFIG_CP_SIZE is 8"
    ):
        variables_of(settings, {"PARALLELISM_CONFIG_CP_SIZE": "8"})


def test_the_plan(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KERNEL_COMPAT", raising=False)
    shown = run("plan").stdout
    assert "kernel-compat run: no file, the defaults\n" in shown
    assert "would install attention kernel_compat (any kernel), " in shown

    file = tmp_path / "kernel-compat.yaml"
    file.write_text(YAML)
    document = json.loads(run("plan", "--json").stdout)["plans"]["run"]
    assert document["file"] == document["origins"]["attention"] == str(file)
    assert document["settings"] == {"attention": {"my_flash": ["flash_attention_reference"]}, "padding_free": True}
    assert document["installed"] == ["attention my_flash (flash_attention_reference)", "padding_free"]

    dry = run("run", "--dry-run", "--no-padding-free", "--", "nonesuch").stdout
    assert "  padding_free = False (--padding-free)\n" in dry
    assert "would install padding_free" not in dry

    file.write_text("attention: {my_flash: flash_attention_9}")
    done = run("plan")
    assert done.returncode == 1
    assert "can't be installed here: 'flash_attention_9' is no kernel; there are: " in done.stdout

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from compat_matrix.cli import main
from compat_matrix.service import tokens
from compat_matrix.store import Store

ROOT = Path(__file__).parents[2]


def added(folder: Path, name: str, file: str) -> int:
    store = str(folder / "store.db")
    return main(["token", "add", name, "--scope", "submit", "--store", store, "--file", str(folder / file)])


def test_a_token_in_a_file_is_its_owners_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(tmp_path, "me", "me.token") == 0
    path = tmp_path / "me.token"
    secret = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    output = capsys.readouterr()
    assert secret not in output.out + output.err
    with Store.open(str(tmp_path / "store.db")) as store:
        found = tokens.find(store, secret)
        assert found is not None
        assert found.name == "me"

    assert added(tmp_path, "other", "me.token") == 2
    assert "me.token can't be created: File exists" in capsys.readouterr().err
    assert path.read_text().strip() == secret
    assert added(tmp_path, "me", "again.token") == 2  # the name is taken
    assert added(tmp_path, "new", "no/such/folder.token") == 2
    assert sorted(one.name for one in tmp_path.iterdir() if one.suffix == ".token") == ["me.token"]
    with Store.open(str(tmp_path / "store.db")) as store:
        assert [one.name for one in tokens.every(store)] == ["me"]


def test_git_ignores_the_tokens_of_the_docs() -> None:
    text = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    files = {*re.findall(r"--file ([a-z.]+)", text), *re.findall(r"--token-file ([a-z.]+)", text)}
    assert files
    assert not re.findall(r"token add .*>", text)
    for file in files:
        ignored = subprocess.run(["git", "check-ignore", "-q", file], cwd=ROOT, check=False)
        assert ignored.returncode == 0, f"{file} could be committed"

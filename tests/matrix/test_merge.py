"""Stores from elsewhere: every part is checked before anything is copied."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from stored import cells, failed, passed, released, stored

from compat_matrix.cli import main
from compat_matrix.errors import MatrixError
from compat_matrix.results import Test
from compat_matrix.store import Store, database, inserts, models

CELLS = cells()

Merge = Callable[..., str]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A store with two runs, the second of which the tests make invalid."""
    path = tmp_path / "theirs.db"
    with Store.open(str(path)) as store:
        stored(store, [passed(CELLS[0])])
        stored(store, [failed(CELLS[1]), failed(CELLS[2])], label="second")
    return path


@pytest.fixture
def refused(tmp_path: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> Merge:
    """Change the other store with SQL; merging it must fail and copy nothing. Returns the message."""

    def refused(*statements: str | tuple[str, tuple[object, ...]]) -> str:
        connection = sqlite3.connect(theirs)
        for one in statements:
            connection.execute(*([one] if isinstance(one, str) else one))
        connection.commit()
        connection.close()
        ours = tmp_path / "ours.db"
        with Store.open(str(ours)) as store:
            kept = stored(store, [passed(CELLS[5])])
        assert main(["merge", "--store", str(ours), str(theirs)]) == 2
        with Store.open(str(ours)) as store:
            assert [one.id for one in store.runs()] == [kept]
            assert [*store.current()] == [CELLS[5]]
        return capsys.readouterr().err

    return refused


def second(path: Path) -> str:
    with Store.open(str(path)) as store:
        return store.resolve("second")


LAST = "(SELECT max(id) FROM result)"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"UPDATE result SET verdict = '<b>' WHERE id = {LAST}", r"{cell}: verdict: .*, not '<b>'"),
        (f"UPDATE result SET kind = 'x' WHERE id = {LAST}", r"{cell}: kind: .*, not 'x'"),
        (f"UPDATE result SET started = 'yesterday' WHERE id = {LAST}", r"{cell}: .*'yesterday"),
        (f"UPDATE result SET started = 5 WHERE id = {LAST}", r"{cell}: "),
        (f"UPDATE result SET seconds = 'long' WHERE id = {LAST}", r"{cell}: seconds.*, not 'long'"),
        (f"UPDATE result SET seconds = 9e999 WHERE id = {LAST}", r"{cell}: seconds.*finite"),
        (f"UPDATE result SET seconds = -1 WHERE id = {LAST}", r"{cell}: seconds.*, not -1"),
        (f"UPDATE result SET attempt = 4000000000 WHERE id = {LAST}", r"{cell}: attempt: .*, not 4000000000"),
        (f"UPDATE result SET reason = x'ff' WHERE id = {LAST}", r"{cell}: reason: "),
        ("UPDATE test SET outcome = '<b>'", r"{cell}: tests.0.outcome: .*, not '<b>'"),
        ("UPDATE test SET seconds = 'long'", r"{cell}: tests.0.seconds: .*, not 'long'"),
        ("UPDATE shared_text SET content = x'00'", r"{cell}: .* decompressing"),
        ("UPDATE shared_text SET content = 'text'", r"{cell}: a text can't be unpacked: it is 'text'"),
        ("UPDATE log SET content = x'00'", r"{cell}: .* decompressing"),
        ("UPDATE run SET started = 'yesterday' WHERE label = 'second'", r"run {run}: .*'yesterday"),
        ("UPDATE run SET state = '<b>' WHERE label = 'second'", r"run {run}: state: .*, not '<b>'"),
        ("UPDATE run SET name = '../../x', whole = '' WHERE label = 'second'", r"'\.\./\.\./x' isn't the id of a run"),
        ("UPDATE run SET name = '20250101-000000-abcd' || char(10) WHERE id = 2", r"isn't the id of a run"),
        (
            "UPDATE run SET host = hex(zeroblob(100000)) WHERE label = 'second'",
            r"run {run}: host: .* at most 100000 characters",
        ),
        ("UPDATE cell SET torch = '2.11/../../x'", r"run .*: cell: .*'2.11/\.\./\.\./x'.* isn't a cell"),
        ("UPDATE cell SET torch = '2.11' || char(27)", r"isn't a cell"),
        ("UPDATE cell SET name = 'py312-tf4.57-torch2.15' WHERE id = 3", r"{cell}: it has no attempt 1"),
        ("UPDATE cell SET transformers = '5.' || hex(zeroblob(200))", r"isn't a cell"),
        ("UPDATE planned SET excluded = x'ff'", r"excluded"),
        (
            "DELETE FROM cell WHERE id = 3",
            r"row .* of its table (planned|result|newest) refers to a row of (cell|planned)",
        ),
        (
            "DELETE FROM planned WHERE cell_id = 3",
            r"row .* of its table (result|newest) refers to a row of planned that",
        ),
        ("UPDATE result SET pins_id = 99", r"row .* of its table result refers to a row of shared_text that"),
        ("UPDATE test SET nodeid_id = 99", r"its table test refers to a row of nodeid that"),
        ("INSERT INTO log VALUES (99, x'00')", r"row 99 of its table log refers to a row of result that"),
        ("CREATE TRIGGER t AFTER UPDATE ON run BEGIN DELETE FROM run; END", r"it has the trigger 't'"),
        (
            "ALTER TABLE run ADD COLUMN huge GENERATED ALWAYS AS (zeroblob(1000000000))",
            r"its table 'run' isn't that of a",
        ),
        (
            "CREATE INDEX i ON run (hex(label))",
            r"its index 'i' isn't that of a store",
        ),
        ("ALTER TABLE log RENAME COLUMN content TO text", r"its table 'log' isn't that of a store"),
        ("DROP TABLE submission", r"its table 'submission' isn't that of a store"),
    ],
)
def test_an_invalid_part_is_named_and_nothing_copied(theirs: Path, refused: Merge, statement: str, said: str) -> None:
    said = said.replace("{run}", second(theirs)).replace("{cell}", r"run [-\da-f]{20}, py312-tf[.\d]+-torch[.\d]+")
    assert re.search(said, message := refused(statement)), message
    assert message.startswith(f"kernel-compat-matrix: the store {theirs}: ")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ([], r"environment: .*, not \[\]"),
        ({"shims": {"a": "applied"}}, "shims.a: .*, not 'applied'"),
        ({"shims": {"a": {"state": {}, "reason": ""}}}, "shims.a.state: "),
        ({"packages": ["torch"]}, r"packages: .*, not \['torch'\]"),
        ({"conflicts": "none"}, "conflicts: .*, not 'none'"),
    ],
)
def test_an_environment_of_another_shape(refused: Merge, environment: object, said: str) -> None:
    content = zlib.compress(json.dumps(environment).encode())
    change = "UPDATE shared_text SET content = ? WHERE id IN (SELECT environment_id FROM result)"
    assert re.search(said, message := refused((change, (content,)))), message


def test_deep_json(refused: Merge) -> None:
    content = zlib.compress(b"[" * 1_000_000)
    change = "UPDATE shared_text SET content = ? WHERE id IN (SELECT command_id FROM result)"
    assert "recursion" in refused((change, (content,)))


@pytest.mark.parametrize("table", ["log", "shared_text"])
def test_a_small_text_that_unpacks_to_a_large_one(refused: Merge, table: str) -> None:
    packer = zlib.compressobj(9)
    content = b"".join(packer.compress(bytes(2**24)) for _ in range(20)) + packer.flush()
    assert len(content) < 2**21
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = refused((f"UPDATE {table} SET content = ?", (content,)))
    assert "a text has more than 256 MiB" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_view_in_place_of_a_table(refused: Merge) -> None:
    """Reading it would never end."""
    said = refused(
        "ALTER TABLE run RENAME TO kept",
        "CREATE VIEW run AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id FROM n",
    )
    assert "it has the view 'run'" in said


def test_a_table_of_versions_that_is_a_view(refused: Merge) -> None:
    said = refused(
        f"DROP TABLE {database.VERSIONS}", f"CREATE VIEW {database.VERSIONS} AS SELECT '0001' AS version_num"
    )
    assert f"it has the view '{database.VERSIONS}'" in said


def test_a_constraint_that_runs_when_a_table_is_migrated(refused: Merge, theirs: Path) -> None:
    """It would never end."""
    endless = "length(hex(zeroblob(1000000000))) + length(hex(zeroblob(1000000000))) > 0"
    released(theirs)
    with sqlite3.connect(theirs) as connection:
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'run'").fetchone()
    said = refused(
        "DROP TABLE run",
        sql.replace("id INTEGER NOT NULL", f"id INTEGER NOT NULL CHECK ({endless})"),
    )
    assert "its table 'run' isn't that of a store" in said


def test_a_table_that_only_an_earlier_revision_has(tmp_path: Path) -> None:
    """Migrations read such tables, and this one computes a column."""
    path = tmp_path / "theirs.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        database.upgrade(connection, "0004")
        connection.execute(text("DROP TABLE lease"))
        connection.execute(text("DROP TABLE task"))
        connection.execute(
            text("CREATE TABLE task (id INTEGER, run_id GENERATED ALWAYS AS (hex(zeroblob(300000000))))")
        )
    with pytest.raises(MatrixError, match="its table '(task|lease)' isn't that of a store"):
        Store.open(str(path), create=False, foreign=True)


@pytest.mark.parametrize("revision", database.REVISIONS)
def test_a_store_of_each_revision_is_read(tmp_path: Path, revision: str) -> None:
    path = tmp_path / "theirs.db"
    with create_engine(f"sqlite:///{path}").begin() as connection:
        database.upgrade(connection, revision)
        connection.execute(text("ANALYZE"))
    with Store.open(str(path), create=False, foreign=True) as store:
        assert store.runs() == []


def test_a_store_of_an_earlier_revision_is_merged(tmp_path: Path, theirs: Path) -> None:
    released(theirs)
    assert main(["merge", "--store", str(tmp_path / "ours.db"), str(theirs)]) == 0
    with Store.open(str(tmp_path / "ours.db")) as store:
        assert len(store.runs()) == 2


def test_counts_are_those_of_the_tests(theirs: Path, tmp_path: Path) -> None:
    with sqlite3.connect(theirs) as connection:
        connection.execute("UPDATE result SET passed = 2000000000, failed = 'x'")
    assert main(["merge", "--store", str(tmp_path / "ours.db"), str(theirs)]) == 0
    with Store.open(str(tmp_path / "ours.db")) as store:
        summary = store.summary(store.resolve("second"))[CELLS[1]]
        assert (summary.passed, summary.failed, summary.skipped) == (0, 1, 1)


def test_what_is_no_store(tmp_path: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs.write_bytes(theirs.read_bytes()[:5000])
    assert main(["merge", "--store", str(tmp_path / "ours.db"), str(theirs)]) == 2
    assert "malformed" in capsys.readouterr().err


def test_a_log_that_is_too_long_is_kept_without_its_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every result that a store takes can be exported and merged."""
    for module in (inserts, models):
        monkeypatch.setattr(module, "MOST", 100_000)
    long = "begin " + "\N{GRINNING FACE}" * 25_000 + " end"
    found = failed(CELLS[0], tests=[Test("t", "failed", 0.0, long)])
    with Store.open(str(tmp_path / "ours.db")) as store:
        run = stored(store, [dataclasses.replace(found, log=long)])
        store.export([run], tmp_path / "copy.db")
    assert main(["merge", "--store", str(tmp_path / "other.db"), str(tmp_path / "copy.db")]) == 0
    with Store.open(str(tmp_path / "other.db")) as store:
        back = store.result(run, CELLS[0])
        for text in (back.log, back.tests[0].message):
            assert text.startswith("begin ")
            assert text.endswith(" end")
            assert re.search(r"\n\n\[\.\.\. \d+ characters were not kept \.\.\.\]\n\n", text)
            assert len(text.encode()) <= 100_000


def test_the_runs_of_another_project_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def merge(to: str, *names: str) -> tuple[int, str]:
        stores = [str(tmp_path / f"{name}.db") for name in names if not name.startswith("-")]
        code = main(["merge", "--store", str(tmp_path / f"{to}.db"), *stores, *(n for n in names if n.startswith("-"))])
        return code, capsys.readouterr().err

    runs = {}
    for name, project, cell in (
        ("ours", "my-Project", CELLS[0]),
        ("shard", "my_project", CELLS[1]),
        ("theirs", "quiet-adapters", dataclasses.replace(CELLS[0], extra=(("peft", "0.18"),))),
        ("old", "", CELLS[2]),
    ):
        with Store.open(str(tmp_path / f"{name}.db")) as store:
            store.claim(project)
            store.claim("a second one changes nothing" if project else "")
            runs[name] = stored(store, [passed(cell)])
            assert store.project == project
    assert merge("ours", "shard", "old") == (0, "")
    code, said = merge("ours", "theirs")
    assert code == 2
    assert "theirs.db has the runs of the project quiet-adapters, and this one those of my-Project" in said
    assert "--any-project" in said
    with Store.open(str(tmp_path / "ours.db")) as store:
        assert {one.id for one in store.runs()} == {runs["ours"], runs["shard"], runs["old"]}
    assert merge("ours", "theirs", "--any-project") == (0, "")
    with Store.open(str(tmp_path / "ours.db")) as store:
        assert (len(store.runs()), store.project) == (4, "my-Project")
        store.export([runs["ours"]], tmp_path / "export.db")
    assert merge("new", "export") == (0, ""), "a store of nothing is of the first project"
    assert merge("new", "theirs")[0] == 2
    assert merge("old", "ours") == (0, "")
    with Store.open(str(tmp_path / "old.db")) as store:
        assert store.project == "", "what it had may be of any"


@pytest.mark.parametrize("name", ["a\x1b[2J", "a" * 300])
def test_the_name_of_a_project_is_checked(refused: Merge, theirs: Path, name: str) -> None:
    with Store.open(str(theirs)) as store:
        store.claim(name)
    assert "isn't a name" in refused()

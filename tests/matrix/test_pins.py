from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import PYTHON, TAG, Small

from compat_matrix import pins
from compat_matrix.axes import OWN, Axes, load
from compat_matrix.errors import MatrixError
from compat_matrix.pins import Part, Pin

COMMITTED = OWN.parent / "pins"
HASH = "0123456789abcdef" * 4

some_pins = st.lists(
    st.builds(
        Pin,
        st.sampled_from(["numpy", "flash-attn-4", "nvidia-cublas-cu13", "a2"]),
        st.sampled_from(["1", "2.5.4", "4.0.0b36", "2.0rc1.dev3", "1!2.0", "0.1.15.post2", "2.11.0+cpu"]),
        st.binary(min_size=32, max_size=32).map(bytes.hex),
    ),
    max_size=4,
)


@given(some_pins)
@settings(max_examples=30)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, some: list[Pin]) -> None:
    folder = tmp_path_factory.mktemp("pins")
    part = Part("py311-tf5.23", "3.11", tuple(some))
    pins.write(part, folder)
    assert pins.read(folder / "py311-tf5.23.txt", "3.11") == part
    assert [path.name for path in folder.iterdir()] == ["py311-tf5.23.txt"]


def test_what_changes_is_written(tmp_path: Path) -> None:
    old, new = (Part("py311-tf5.23", "3.11", (Pin("transformers", f"5.23.{n}", HASH),)) for n in range(2))
    pins.write(old, tmp_path)
    pins.write(new, tmp_path)
    assert pins.read(tmp_path / "py311-tf5.23.txt", "3.11") == new
    assert old.key != new.key
    assert new.key != Part(new.name, "3.12", new.pins).key


def test_an_interrupted_write_leaves_the_old_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Part("py311-tf5.23", "3.11", (Pin("transformers", f"5.23.{n}", HASH),)) for n in range(2))
    pins.write(old, tmp_path)

    def interrupted(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[:20].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pins.write(new, tmp_path)
    assert pins.read(tmp_path / "py311-tf5.23.txt", "3.11") == old


def test_comments_and_empty_lines_are_no_pins(tmp_path: Path) -> None:
    path = tmp_path / "py311-tf5.23.txt"
    path.write_text(f"# made by hand\n\nnumpy==2.5.4 --hash=sha256:{HASH}\n")
    assert pins.read(path, "3.11").versions == {"numpy": "2.5.4"}


@pytest.mark.parametrize(
    "line",
    [
        "numpy",
        "numpy>=2",
        "numpy==2.5.4",
        f"numpy==2.5.4 --hash=md5:{HASH[:32]}",
        f"numpy==2.5.4 --hash=sha256:{HASH[1:]}",
        f"numpy==2.5.4 --hash=sha256:{HASH} --hash=sha256:{HASH}",
        f"numpy @ file:///tmp/numpy.whl --hash=sha256:{HASH}",
        "-e .",
        "-r other.txt",
        "--index-url somewhere",
        "--find-links wheels",
    ],
)
def test_a_line_that_is_no_pin_is_pointed_at(tmp_path: Path, line: str) -> None:
    path = tmp_path / "py311-tf5.23.txt"
    path.write_text(f"torch==2.11.0 --hash=sha256:{HASH}\n{line}\n")
    with pytest.raises(
        MatrixError, match=re.escape(f"{path}:2: not a pin of the form NAME==VERSION --hash=sha256:...")
    ):
        pins.read(path, "3.11")


def test_pins_that_are_not_there_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="py311-tf5.23 has no pins: create them with `kernel-compat-matrix pin`"):
        pins.read(tmp_path / "py311-tf5.23.txt", "3.11")


def test_pins_that_can_not_be_read_or_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "py311-tf5.23.txt").mkdir()
    with pytest.raises(MatrixError, match="py311-tf5.23.txt"):
        pins.read(tmp_path / "py311-tf5.23.txt", "3.11")
    with pytest.raises(MatrixError, match="py311-tf5.23.txt can't be written"):
        pins.write(Part("py311-tf5.23", "3.11", ()), tmp_path)


def test_committed_pins_are_of_the_cells_they_are_for() -> None:
    axes = load(OWN)
    for cell in axes.select("python==3.12 and device==cpu"):
        base = pins.read(COMMITTED / f"{cell.base}.txt", cell.python)
        layer = pins.read(COMMITTED / f"{cell.layer}.txt", cell.python)
        assert base.versions["torch"].startswith(f"{cell.torch}.")
        assert layer.versions["transformers"].startswith(f"{cell.transformers}.")
        assert "torch" not in layer.versions
        assert "transformers" not in base.versions
        assert "pytest-reportlog" in base.versions
        assert not base.versions.keys() & layer.versions.keys()


def test_committed_pins_are_pins_and_nothing_else() -> None:
    known = {part for cell in load(OWN).cells for part in (cell.base, cell.layer)}
    paths = [*COMMITTED.iterdir()]
    assert {path.stem for path in paths} <= known
    for path in paths:
        part = pins.read(path, "3.12")
        assert path.read_text(encoding="utf-8") == part.text  # equal texts: no index and no address is in the file
        assert [pin.name for pin in part.pins] == sorted(pin.name for pin in part.pins)


@pytest.fixture
def project(small: Small, monkeypatch: pytest.MonkeyPatch) -> Small:
    """A project with its own wheels: the numpy of torch 2.11 conflicts with one release of transformers."""
    for name, value in small.environment().items():
        if name.startswith("UV_"):
            monkeypatch.setenv(name, value)
    for version in ("1.26.0", "2.0.0"):
        small.wheel("numpy", version, {})
    for version in ("2.11.0", "2.11.1", "2.12.0"):
        small.wheel("torch", version, {}, requires=["numpy>=2" if version == "2.11.1" else "numpy"])
    small.wheel("flash_attn_4", "4.0.0b5", {}, requires=["torch"])
    small.wheel("transformers", "5.0.0", {}, requires=["numpy", "tokenizers"])
    small.wheel("transformers", "5.1.0", {}, requires=["numpy<2"])
    small.wheel("tokenizers", "1.0", {})
    small.axes(
        torch=("2.11", "2.12"),
        axes='flash_attention = ["none", "fa4"]',
        more='[[packages]]\nwhen = "fa==fa4"\nrequires = ["flash-attn-4>=4.0.0b1"]\n',
    )
    return small


@pytest.fixture
def axes(project: Small) -> Axes:
    return load(project.folder / "matrix" / "axes.toml")


def test_a_layer_has_what_no_base_brings(axes: Axes) -> None:
    found = pins.resolve_parts(axes, axes.select("transformers==5.0"))
    assert {name: part.versions for name, part in found.items()} == {
        f"{TAG}-torch2.11": {"numpy": "2.0.0", "torch": "2.11.1"},
        f"{TAG}-torch2.12": {"numpy": "2.0.0", "torch": "2.12.0"},
        f"{TAG}-torch2.11-fa4": {"flash-attn-4": "4.0.0b5", "numpy": "2.0.0", "torch": "2.11.1"},
        f"{TAG}-torch2.12-fa4": {"flash-attn-4": "4.0.0b5", "numpy": "2.0.0", "torch": "2.12.0"},
        f"{TAG}-tf5.0": {"tokenizers": "1.0", "transformers": "5.0.0"},
    }
    assert all(part.python == PYTHON for part in found.values())


def test_the_wheel_that_installers_prefer_is_pinned(project: Small, axes: Axes) -> None:
    old = project.folder / "wheels" / "tokenizers-1.0-py3-none-any.whl"
    for tag in ("py30", TAG, "py31"):
        project.wheel("tokenizers", "1.0", {"tokenizers.py": f"# {tag}"})
        old.rename(project.folder / "wheels" / f"tokenizers-2.0-{tag}-none-any.whl")
    layer = pins.resolve_parts(axes, axes.select("transformers==5.0"))[f"{TAG}-tf5.0"]
    wheel = (project.folder / "wheels" / f"tokenizers-2.0-{TAG}-none-any.whl").read_bytes()
    assert {pin.sha256 for pin in layer.pins if pin.name == "tokenizers"} == {hashlib.sha256(wheel).hexdigest()}


def test_what_can_not_be_resolved_has_the_resolvers_reason(axes: Axes) -> None:
    found = pins.resolve_parts(axes, axes.cells)
    assert found[f"{TAG}-tf5.0"].problem == ""
    part = found[f"{TAG}-tf5.1"]
    assert part.pins == ()
    assert "5.1.0 depends on numpy<2" in part.problem
    assert "unsatisfiable" in part.problem


def test_flash_attention_without_a_solution_of_the_base_below_it_has_none(project: Small) -> None:
    """Resolved by itself, it would have packages that the base without it can't have."""
    project.axes(
        torch=("2.11",),
        axes='flash_attention = ["none", "fa4"]',
        more='[[packages]]\nwhen = "fa==fa4"\nrequires = ["flash-attn-4>=4.0.0b1"]\n'
        '[[packages]]\nwhen = "fa==none"\nrequires = ["numpy<2", "torch==2.11.1"]\n',
    )
    axes = load(project.folder / "matrix" / "axes.toml")
    found = pins.resolve_parts(axes, axes.select("transformers==5.0"))
    below, with_kernel = found[f"{TAG}-torch2.11"], found[f"{TAG}-torch2.11-fa4"]
    assert "2.11.1 depends on numpy>=2" in below.problem
    assert (with_kernel.pins, with_kernel.problem) == ((), below.problem)


def test_the_command_pins_what_can_be_pinned(project: Small) -> None:
    for path in (project.folder / "matrix" / "pins").iterdir():
        path.unlink()
    done = project.run("pin")
    assert done.returncode == 1
    assert f"{TAG}-tf5.1: " in done.stderr
    assert "numpy<2" in done.stderr
    assert "5 parts pinned" in done.stdout
    assert sorted(path.stem for path in (project.folder / "matrix" / "pins").iterdir()) == sorted(
        [f"{TAG}-tf5.0", *(f"{TAG}-torch{minor}{rest}" for minor in ("2.11", "2.12") for rest in ("", "-fa4"))]
    )
    assert "5 parts pinned" in project.run("pin", "--only", "transformers==5.0").stdout


def test_what_the_newest_releases_can_not_do_fails_and_is_stored(project: Small) -> None:
    project.write("test_it.py", "def test_a(): pass")
    done = project.run("run", "--latest", "--only", "torch==2.11 and fa==none")
    assert done.returncode == 1, done
    old, new = project.results().values()
    assert (old.verdict, new.verdict, new.kind) == ("passed", "failed", "installation")
    assert "5.1.0 depends on numpy<2" in new.log
    assert old.environment["packages"]["torch"] == "2.11.1"


def test_a_folder_that_can_not_be_written_is_told(project: Small) -> None:
    pins = project.folder / "matrix" / "pins"
    pins.rename(project.folder / "elsewhere")
    pins.write_text("")
    done = project.run("pin", "--only", "transformers==5.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "matrix/pins/py3" in done.stderr
    assert "can't be written" in done.stderr


def test_pins_from_before_a_requirement_are_refused(small: Small) -> None:
    """The tested project is installed without its dependencies: they would be missing, or too old."""
    small.write("test_it.py", "def test(): pass")
    small.axes(["5.0"])
    project = small.folder / "pyproject.toml"
    before = project.read_text()
    for requirement, said in (
        ("late-one>=2", "have no release of it"),
        ("some>=2; python_version > '3'", "have 1.5"),
    ):
        small.wheel("some", "1.5", {"some.py": ""}, part=f"{TAG}-tf5.0")
        project.write_text(f"{before}dependencies = [{requirement!r}]\n")
        done = small.run("run", "--all")
        assert done.returncode == 2
        assert said in done.stderr
        assert "kernel-compat-matrix pin" in done.stderr
    for requirement in ("some>=1", "late-one; python_version < '3'"):
        project.write_text(f"{before}dependencies = [{requirement!r}]\n")
        assert small.run("run", "--all").returncode == 0


def test_requirements_of_members_are_the_projects_but_for_those_on_each_other(
    small: Small, members: Callable[..., Axes]
) -> None:
    small.axes()
    members("one", "deep/two")
    for folder, more in (
        ("", 'dependencies = ["a>=1"]\n[project.optional-dependencies]\nall = ["One==1.0", "two[b, c]"]\nmore = ["d"]'),
        ("one/", '[project.optional-dependencies]\nx = ["e"]'),
        ("deep/two/", '[project.optional-dependencies]\nb = ["b-of-two"]\nc = ["two[b]", "one[x]", "small[more]"]'),
    ):
        path = small.folder / folder / "pyproject.toml"
        path.write_text(f"{path.read_text()}{more}\n")
    path = small.folder / "matrix" / "axes.toml"

    def required() -> list[str]:
        return [str(one) for one in pins.project_requirements(load(path))]

    assert required() == ["a>=1"]
    one = small.folder / "one" / "pyproject.toml"
    one.write_text(one.read_text().replace('"small==1.0"', '"small==1.0", "f; python_version > \'3\'"'))
    assert required() == ["a>=1", 'f; python_version > "3"']
    done = small.run("run", "--all")
    assert f"the project requires a>=1, and the pins of {TAG}-tf5.0-torch2.11 have no release of it" in done.stderr
    path.write_text(path.read_text().replace("members =", 'extras = ["all"]\nmembers ='))
    assert required() == ["a>=1", 'f; python_version > "3"', "b-of-two", "e", "d"]
    path.write_text(path.read_text().replace('["all"]', '["none"]'))
    with pytest.raises(MatrixError, match="/small/pyproject.toml has no extra 'none'"):
        required()


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda folder: None, "/lost/pyproject.toml: no project to test: .*No such file"),
        (lambda folder: (folder / "lost").mkdir(), "/lost/pyproject.toml: no project to test: .*No such file"),
        (lambda folder: (folder / "lost").touch(), "/lost/pyproject.toml: no project to test: .*Not a directory"),
        (
            lambda folder: [(folder / "lost").mkdir(), (folder / "lost/pyproject.toml").touch()],
            "/lost/pyproject.toml: no project to test: 'project'",
        ),
        (
            lambda folder: [
                (folder.parent / "other").mkdir(),
                (folder.parent / "other/pyproject.toml").write_text("[project]"),
                (folder / "lost").symlink_to(folder.parent / "other"),
            ],
            "/lost/pyproject.toml isn't in the project's folder /.*small$",
        ),
    ],
)
def test_a_member_that_is_none_is_named(
    small: Small, members: Callable[..., Axes], prepare: Callable[[Path], object], says: str
) -> None:
    small.axes()
    members("one")
    axes = small.folder / "matrix" / "axes.toml"
    axes.write_text(axes.read_text().replace("['one']", "['one', 'lost']"))
    prepare(small.folder)
    for words in (["run", "--all"], ["pin"], ["fetch", "house"]):
        done = small.run(*words)
        assert done.returncode == 2
        assert re.search(says, done.stderr.strip()), done.stderr
        assert "Traceback" not in done.stderr

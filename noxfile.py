"""The sessions: `nox -l` lists them, `nox -j 2` runs those of CI."""

from __future__ import annotations

import argparse
import lzma
import runpy
import tarfile
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.allow_parallel = True
nox.options.error_on_missing_interpreters = True
nox.options.tags = ["ci"]

#: The one list of upstream releases. It is run by path, because nox's own environment doesn't have kernel-compat.
RELEASES = runpy.run_path(str(Path(__file__).parent / "compat" / "kernel_compat" / "releases.py"))

#: Releases of transformers for the session `versions`. The newest one has the session `tests` in CI.
TRANSFORMERS = [
    nox.param(release, tags=["ci"] if tested == "ci" else [])
    for release, tested in RELEASES["TRANSFORMERS"].items()
    if tested
]

NEWEST = list(RELEASES["TRANSFORMERS"])[-1]

#: Releases of torch for the session `torches`, each with the releases of transformers in CI and the newest one.
TORCHES = [
    nox.param(torch, transformers, tags=["ci"] if tested == "ci" and transformers == NEWEST else [])
    for torch, tested in RELEASES["TORCH"].items()
    for transformers, in_ci in RELEASES["TRANSFORMERS"].items()
    if in_ci == "ci" or transformers == NEWEST
]

#: The torch of `versions`: one for all sessions, because uv links its files into each environment instead of copying them.
TORCH = "2.11.0"

#: The tests that depend on the release of torch.
ON_TORCH = (
    "tests/unit/test_flash_attention_torch.py",
    "tests/unit/test_torch_backend.py",
    "tests/integration/test_flash_attention_torch.py",
)

#: The tests that depend on the release of transformers. `nightly` runs all tests on each.
ON_TRANSFORMERS = (
    "tests/integration/test_architectures.py",
    "tests/integration/test_boundaries.py",
    "tests/integration/test_decoders.py",
    "tests/integration/test_legacy_flag.py",
    "tests/integration/test_loading.py",
    "tests/integration/test_own_forward.py",
    "tests/integration/test_padding_free.py",
    "tests/ops/test_padding_free.py",
    "tests/prove/test_padding_free.py",
    "tests/integration/test_upstream_failures.py",
)

#: The Pythons on which the distributions can be installed. torch and transformers are tested on those of `NIGHTLY`.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: The requirements of each framework of the session `frameworks`.
FRAMEWORKS = sorted((Path(__file__).parent / "tests" / "downstream" / "requirements").glob("*.txt"))

#: Every supported Python with the newest releases; the lowest versions of the direct dependencies; and every release of
#: transformers that `versions` has.
NIGHTLY = [
    *(nox.param(python, "newest") for python in ("3.10", "3.11", "3.12", "3.13")),
    nox.param("3.10", "lowest"),
    *(nox.param("3.11", release) for release, tested in RELEASES["TRANSFORMERS"].items() if tested),
]

#: The releases of transformers whose copies are mutated: the last one of transformers 4 and the two newest.
MUTATED = [
    [release for release in RELEASES["TRANSFORMERS"] if release.startswith("4.")][-1],
    *[*RELEASES["TRANSFORMERS"]][-2:],
]

#: The dependencies of the tests of the library, of the atlas and of the matrix.
GROUPS = ("--group", "test", "--group", "atlas", "--group", "matrix")

#: The packages beside the library that its tests need, too.
NEIGHBOURS = (
    *("--editable", "compat/doctor", "--editable", "compat/ops", "--editable", "compat/prove"),
    *("--editable", "compat/run"),
)

#: The matrix with the extras that its tests need, and the atlas that it needs.
MATRIX = (*NEIGHBOURS, "--editable", "atlas", "--editable", "matrix[postgres,service,tox]")

#: The tests of the core, and those of it and its neighbours: of each alone, and of all together.
CORE = ("tests/unit", "tests/integration")
TOGETHER = (
    "tests/together",
    "tests/unit/test_shims.py",
    "tests/unit/test_versions.py",
    "tests/doctor/test_doctor.py::test_the_installed_torch_has_the_symbols_of_its_release",
)
SUITES = (*CORE, "tests/ops", "tests/prove", "tests/doctor", "tests/run", "tests/together")

#: Two processes, each with a stretch of the tests: what is cached for a module is made once. Where `nox -j 2` runs another session
#: beside it, a session of a minute or less has one: each process imports torch and transformers, for 5 s.
TWO = ("-n", "2", "--dist", "worksteal")

#: A second thread slows tiny models down. No test may access the hub. Where Python doesn't keep bytecode, each of the many
#: processes compiles torch and transformers again, for 10 s.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}

#: The bytecode of sessions with torch, which would each compile the same releases.
BYTECODE = Path(__file__).parent.absolute() / ".nox" / "bytecode"


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Formatting, lint rules, the arrows between the rooms, and the form of the workflows and of CITATION.cff."""
    session.install("--group", "lint")
    session.run("ruff", "format", "--check")
    session.run("ruff", "check")
    session.run(
        "lint-imports",
        "--no-cache",
        env={"PYTHONPATH": "compat:compat/doctor:compat/ops:compat/prove:compat/run:shims:atlas:matrix"},
    )
    workflows = map(str, sorted(Path(".github/workflows").glob("*.yml")))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("check-jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff")


@nox.session(tags=["ci"])
def types(session: nox.Session) -> None:
    """Mypy on the packages, the tests and this file; torch and transformers are not needed for it."""
    session.install(
        "--editable", ".", *NEIGHBOURS, "--editable", "atlas", "--editable", "matrix[service,tox]", "--group", "types"
    )
    session.run("mypy", *session.posargs)


@nox.session(tags=["ci"])
def docs(session: nox.Session) -> None:
    """The documentation as pages; a link that leads nowhere, or a generated part that is out of date, is an error."""
    session.install("--editable", ".", *NEIGHBOURS, "--group", "docs")
    session.run("python", "docs/generate.py", "--check")
    session.run("mkdocs", "build", "--strict", "--site-dir", f"{session.create_tmp()}/site", *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """The published site: the documentation in versions, and the report of docs/compatibility.sqlite.xz. The arguments after -- are its folder, a version, and aliases.

    Commits the version to the branch gh-pages, which has the others; the default is "dev". The report is made anew, in the folder matrix/.
    """
    session.install("--editable", ".", *NEIGHBOURS, "--editable", "atlas", "--editable", "matrix", "--group", "site")
    scratch = Path(session.create_tmp()).absolute()
    folder, *versions = session.posargs or [str(scratch / "site")]
    versions = versions or ["dev"]
    session.run("mike", "deploy", "--update-aliases", *versions)
    begun = session.run("git", "ls-tree", "--name-only", "gh-pages", "index.html", external=True, silent=True)
    if "latest" in versions or not begun:
        session.run("mike", "set-default", versions[-1])
    archive, results = scratch / "site.tar", scratch / "results.sqlite"
    session.run("git", "archive", "--output", str(archive), "gh-pages", external=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    results.write_bytes(lzma.decompress(Path("docs/compatibility.sqlite.xz").read_bytes()))
    report = ["--store", str(results), "--axes", "matrix/axes.toml", f"{folder}/matrix"]
    session.run("kernel-compat-matrix", "report", *report)


@nox.session(tags=["ci"])
def core(session: nox.Session) -> None:
    """Unit and integration tests of the core on the newest transformers and torch, without its neighbours. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu,transformers5-exp]", "--group", "test")
    session.run("pytest", *TWO, *CORE, *session.posargs, env=_with_bytecode(session))


@nox.session(tags=["ci"])
def ops(session: nox.Session) -> None:
    """The tests of kernel selection, without the other neighbours. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu,transformers5-exp]", "--editable", "compat/ops", "--group", "test")
    session.run("pytest", "tests/ops", *session.posargs, env=_with_bytecode(session))


@nox.session(tags=["ci"])
def prove(session: nox.Session) -> None:
    """The tests of the prover, without the other neighbours. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu,transformers5-exp]", "--editable", "compat/prove", "--group", "test")
    session.run("pytest", "tests/prove", *session.posargs, env=_with_bytecode(session))


@nox.session(tags=["ci"])
def doctor(session: nox.Session) -> None:
    """The tests of the doctor, without torch and the other neighbours. Arguments after -- go to pytest."""
    session.install("--editable", ".", "--editable", "compat/doctor", "--group", "doctor")
    session.run("pytest", "tests/doctor", *session.posargs, env=ENVIRONMENT)


@nox.session(tags=["ci"])
def run(session: nox.Session) -> None:
    """The tests of `kernel-compat run`, with kernel selection, which it starts, too. Arguments after -- go to pytest."""
    session.install(
        "--editable",
        ".[gpu,transformers5-exp]",
        "--editable",
        "compat/ops",
        "--editable",
        "compat/run",
        "--group",
        "test",
    )
    session.run("pytest", "tests/run", *session.posargs, env=_with_bytecode(session))


@nox.session(tags=["ci"])
def together(session: nox.Session) -> None:
    """With all neighbours: what needs several, all shims, and what the doctor reads of torch. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu,transformers5-exp]", *NEIGHBOURS, "--group", "test")
    session.run("pytest", *TOGETHER, *session.posargs, env=_with_bytecode(session))


@nox.session(tags=["ci"])
def atlas(session: nox.Session) -> None:
    """The tests of the atlas, without the matrix. Arguments after -- go to pytest."""
    session.install("--editable", ".", *NEIGHBOURS, "--editable", "atlas", "--group", "atlas")
    session.run("pytest", "tests/atlas", *session.posargs, env=ENVIRONMENT)


@nox.session(tags=["ci"])
def matrix(session: nox.Session) -> None:
    """The tests of the matrix itself. Arguments after -- go to pytest."""
    session.install("--editable", ".", *MATRIX, "--group", "matrix")
    # A third process: many of these tests wait for others.
    session.run("pytest", "-n", "3", "--dist", "worksteal", "tests/matrix", *session.posargs, env=ENVIRONMENT)


@nox.session(tags=["ci"])
def packages(session: nox.Session) -> None:
    """Builds and checks every distribution, and installs each from its files into an empty environment. Arguments after -- go to pytest."""
    _distributions(session, Path(session.create_tmp(), "dist").absolute())


@nox.session
def release(session: nox.Session) -> None:
    """The same with what a release publishes, in dist/, and with an environment of every supported Python. Arguments after -- go to pytest."""
    _distributions(session, Path("dist").absolute(), PYTHONS=" ".join(PYTHONS))


@nox.session(tags=["ci"])
def examples(session: nox.Session) -> None:
    """The scripts in examples/ print what docs/examples.md shows, and the notebook draws its picture. Arguments after -- go to pytest."""
    session.install(
        "--editable", ".[gpu,transformers5-exp]", *NEIGHBOURS, "./examples/shim_package", "--group", "examples"
    )
    session.run("pytest", "tests/examples", *session.posargs, env=_with_bytecode(session))


@nox.session(name="cpu-matrix")
def cpu_matrix(session: nox.Session) -> None:
    """The cells of the matrix that need no GPU. Arguments after -- go to `kernel-compat-matrix run`."""
    session.install("--editable", ".", *NEIGHBOURS, "--editable", "atlas", "--editable", "matrix")
    session.run("kernel-compat-matrix", "run", *_on("cpu", session.posargs))


@nox.session(name="gpu-matrix")
def gpu_matrix(session: nox.Session) -> None:
    """The cells of the matrix that need a GPU. Arguments after -- go to `kernel-compat-matrix run`."""
    session.install("--editable", ".", *NEIGHBOURS, "--editable", "atlas", "--editable", "matrix")
    visible = session.run(
        "python", "-c", "from compat_matrix.gpus import visible; print(*visible())", silent=True, stderr=None
    )
    if not str(visible).strip() and "ray" not in session.posargs:  # whose cluster may have some
        session.error("no GPU is visible here: none of these cells could run")
    session.run("kernel-compat-matrix", "run", *_on("cuda", session.posargs))


@nox.session
@nox.parametrize("transformers", TRANSFORMERS)
def versions(session: nox.Session, transformers: str) -> None:
    """The tests that tell one release of transformers from the next. Arguments after -- go to pytest."""
    session.install("--editable", ".", *NEIGHBOURS, *_pins(transformers, TORCH), "--group", "test")
    session.run("pytest", *ON_TRANSFORMERS, *session.posargs, env=_with_bytecode(session))


@nox.session
@nox.parametrize("torch, transformers", TORCHES)
def torches(session: nox.Session, torch: str, transformers: str) -> None:
    """What depends on torch, `flash_attention_torch` above all, on one release of it. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu]", *NEIGHBOURS, *_pins(transformers, torch), "--group", "test")
    session.run("pytest", *ON_TORCH, *session.posargs, env=_with_bytecode(session))


@nox.session
@nox.parametrize("python, transformers", NIGHTLY)
def nightly(session: nox.Session, transformers: str) -> None:
    """All tests, slow ones included, on one Python and one release of transformers. Arguments after -- go to pytest."""
    suites = [*SUITES]
    if transformers == "lowest":
        oldest = next(iter(RELEASES["TORCH"]))
        arguments = [
            "--resolution",
            "lowest-direct",
            "--editable",
            ".[gpu,transformers4]",
            *NEIGHBOURS,
            "--group",
            "test",
        ]
        session.install(*arguments, f"torch=={oldest}")  # also required by others, of which the newest would be taken
    elif transformers == "newest":
        session.install("--editable", ".[gpu,transformers5-exp]", *MATRIX, *GROUPS)
        suites += ["tests/atlas", "tests/matrix", "tests/mutations"]
    else:
        session.install("--editable", ".", *NEIGHBOURS, *_pins(transformers, TORCH), "--group", "test")
    session.run(
        "pytest", *TWO, "-m", "", *suites, *session.posargs, env={**ENVIRONMENT, "HYPOTHESIS_PROFILE": "nightly"}
    )


@nox.session
@nox.parametrize("transformers", MUTATED)
def mutations(session: nox.Session, transformers: str) -> None:
    """Is each change of a copy of transformers refused, red, or still right? Arguments after -- go to tests/mutations/run.py."""
    session.install("--editable", ".", *NEIGHBOURS, *_pins(transformers, TORCH), "--group", "test")
    session.run("python", "tests/mutations/run.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def downstream(session: nox.Session) -> None:
    """The frameworks on their published packages, cells of tests/downstream/axes.toml. Arguments after -- go to `kernel-compat-matrix run`."""
    session.install("--editable", ".", *NEIGHBOURS, "--editable", "atlas", "--editable", "matrix")
    session.run("kernel-compat-matrix", "run", "--axes", "tests/downstream/axes.toml", *(session.posargs or ["--all"]))


@nox.session(python="3.11")
@nox.parametrize("framework", [path.stem for path in FRAMEWORKS])
def frameworks(session: nox.Session, framework: str) -> None:
    """Frameworks whose requirements exclude the pins that the cells of `downstream` share. Arguments after -- go to pytest."""
    requirements = f"tests/downstream/requirements/{framework}.txt"
    session.install("--editable", ".", *NEIGHBOURS, "--requirement", requirements, "--group", "pytest")
    for tests in (framework, "groups"):  # each in a process of its own: VeOmni replaces the losses of transformers
        session.run("pytest", "-m", "", f"tests/downstream/test_{tests}.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def coverage(session: nox.Session) -> None:
    """Line coverage of the library and its shims by all tests on the newest releases; fails below the floor in pyproject.toml."""
    session.install("--editable", ".[gpu,transformers5-exp]", *NEIGHBOURS, "--group", "test", "--group", "coverage")
    arguments = ["--cov", "--cov-report", "term:skip-covered", "--cov-report", "xml"]
    session.run("pytest", *TWO, "-m", "", *SUITES, *arguments, *session.posargs, env=ENVIRONMENT)


def _distributions(session: nox.Session, built: Path, **variables: str) -> None:
    session.install("--group", "packages")
    session.run("uv", "build", "-q", "--all-packages", "--clear", "--out-dir", str(built))
    session.run("twine", "check", "--strict", *map(str, sorted(built.glob("kernel_compat*"))))
    session.run("check-wheel-contents", *map(str, sorted(built.glob("*.whl"))))
    session.run(
        "pytest",
        "tests/packages",
        *session.posargs,
        env={**ENVIRONMENT, "DISTRIBUTIONS": str(built), **variables},
    )


def _with_bytecode(session: nox.Session) -> dict[str, str]:
    """The environment of a session in which each release of a package has one folder of bytecode, for all sessions."""
    for info in Path(session.virtualenv.location).absolute().glob("lib/*/site-packages/*.dist-info"):
        distribution = info.name.removesuffix(".dist-info")
        package = info.with_name(distribution.partition("-")[0])
        if package.is_dir():
            link, shared = BYTECODE / package.relative_to("/"), BYTECODE / distribution
            shared.mkdir(parents=True, exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(shared)
    return {**ENVIRONMENT, "PYTHONPYCACHEPREFIX": str(BYTECODE)}


def _on(device: str, arguments: list[str]) -> list[str]:
    """The arguments of `run`, with the device added to the selection; a run that goes on has its cells already."""
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        return arguments
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--only")
    found, rest = parser.parse_known_args(arguments)
    return ["--only", f"device=={device} and ({found.only})" if found.only else f"device=={device}", *rest]


def _pins(transformers: str, torch: str) -> list[str]:
    pins = [f"transformers=={transformers}", f"torch=={torch}"]
    if transformers.startswith("4."):
        pins.append("liger-kernel<0.8.5")  # which asks for transformers 5 as it is imported, and not before
    return pins

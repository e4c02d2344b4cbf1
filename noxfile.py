"""What there is to run: `nox -l` lists it, `nox -j 2` runs what CI runs."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.allow_parallel = True
nox.options.error_on_missing_interpreters = True
nox.options.tags = ["ci"]

#: The one list of upstream releases. It is run by its path, because nox has no kernel-compat installed.
RELEASES = runpy.run_path(str(Path(__file__).parent / "compat" / "kernel_compat" / "releases.py"))

#: Releases of transformers for the session `versions`. In CI the session `tests` runs on the newest.
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

#: What depends on torch.
ON_TORCH = (
    "tests/unit/test_flash_attention_torch.py",
    "tests/unit/test_torch_backend.py",
    "tests/integration/test_flash_attention_torch.py",
)

#: The models are tiny, so that a second thread costs more than it brings; no test may ask the hub for anything; and where Python
#: is told not to keep what it compiles, each of the many processes would compile torch and transformers for 10 s.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Formatting and lint rules, and the form of the workflows."""
    session.install("--group", "lint", "check-jsonschema>=0.33")
    session.run("ruff", "format", "--check")
    session.run("ruff", "check")
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/matrix.yml")


@nox.session(tags=["ci"])
def types(session: nox.Session) -> None:
    """mypy --strict on everything that is installed; torch and transformers are not needed for it."""
    session.install("--editable", ".", "--editable", "matrix[service,tox]", "--group", "types")
    session.run("mypy", *session.posargs)


@nox.session(tags=["ci"])
def docs(session: nox.Session) -> None:
    """The documentation as pages; a link that leads nowhere, or a generated part that is out of date, is an error."""
    session.install("--editable", ".", "--group", "docs")
    session.run("python", "docs/generate.py", "--check")
    session.run("mkdocs", "build", "--strict", "--site-dir", f"{session.create_tmp()}/site", *session.posargs)


@nox.session(tags=["ci"])
def tests(session: nox.Session) -> None:
    """Unit and integration tests on the newest transformers and torch. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu,transformers5-exp]", "--group", "test")
    session.run("pytest", "-n", "2", "tests/unit", "tests/integration", *session.posargs, env=ENVIRONMENT)


@nox.session(tags=["ci"])
def matrix(session: nox.Session) -> None:
    """The tests of the matrix itself. Arguments after -- go to pytest."""
    session.install("--editable", ".", "--editable", "matrix[postgres,service,tox]", "--group", "matrix")
    session.run("pytest", "-n", "2", "tests/matrix", *session.posargs, env=ENVIRONMENT)


@nox.session(name="cpu-matrix")
def cpu_matrix(session: nox.Session) -> None:
    """The cells of the matrix that need no GPU. Arguments after -- go to `kernel-compat-matrix run`."""
    session.install("--editable", ".", "--editable", "matrix")
    session.run("kernel-compat-matrix", "run", *_on("cpu", session.posargs))


@nox.session(name="gpu-matrix")
def gpu_matrix(session: nox.Session) -> None:
    """The cells of the matrix that need a GPU. Arguments after -- go to `kernel-compat-matrix run`."""
    session.install("--editable", ".", "--editable", "matrix")
    visible = session.run(
        "python", "-c", "from compat_matrix.gpus import visible; print(*visible())", silent=True, stderr=None
    )
    if not str(visible).strip() and "ray" not in session.posargs:  # whose cluster may have some
        session.error("no GPU is visible here: none of these cells could run")
    session.run("kernel-compat-matrix", "run", *_on("cuda", session.posargs))


@nox.session
@nox.parametrize("transformers", TRANSFORMERS)
def versions(session: nox.Session, transformers: str) -> None:
    """Integration tests on one release of transformers. Arguments after -- go to pytest."""
    session.install("--editable", ".", *_pins(transformers, TORCH), "--group", "test")
    session.run("pytest", "tests/integration", *session.posargs, env=ENVIRONMENT)


@nox.session
@nox.parametrize("torch, transformers", TORCHES)
def torches(session: nox.Session, torch: str, transformers: str) -> None:
    """What depends on torch, `flash_attention_torch` above all, on one release of it. Arguments after -- go to pytest."""
    session.install("--editable", ".[gpu]", *_pins(transformers, torch), "--group", "test")
    session.run("pytest", *ON_TORCH, *session.posargs, env=ENVIRONMENT)


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

"""``kernel-compat-matrix check`` queries a real server about an environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bare_site
import pytest
from recorded_service import EVIDENCE, NEAREST, PASSED, WRONG, Service
from waiting import LONG

import compat_matrix
import kernel_compat
import kernel_compat_atlas
from compat_matrix.cli import main
from compat_matrix.matrix_client import ServiceError, ask, questions
from kernel_compat.environment import Device, Environment

SOURCES = [Path(str(module.__file__)).parents[1] for module in (kernel_compat, kernel_compat_atlas, compat_matrix)]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command in this process, with its own environment variables."""
    monkeypatch.setattr(Environment, "detect", classmethod(lambda cls, distributions=(): here()))

    def run(*arguments: str) -> Done:
        try:
            code = main(["check", *arguments])
        except SystemExit as exit:
            code = int(str(exit.code))
        return Done(code, *capsys.readouterr())

    return run


def install(site: Path, name: str, version: str) -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_it_asks_about_its_own_environment_and_imports_nothing_heavy(service: Service, tmp_path: Path) -> None:
    """In a process with only the metadata of torch and transformers, without SQLAlchemy and pydantic."""
    site = tmp_path / "site"
    bare_site.make(site)
    for name, version in (("torch", "2.11.0+cu130"), ("transformers", "5.9.0")):
        install(site, name, version)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "compat_matrix", "check", service.url],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*SOURCES, site))),
            "CUDA_VISIBLE_DEVICES": "",
            "KERNEL_COMPAT_SERVICE_TOKEN": "secret",
        },
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ((path, asked, headers),) = service.asked
    assert path == "/api/v1/compat"
    assert asked == {
        "transformers": "5.9.0",
        "torch": "2.11.0+cu130",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "flash_attn": "none",
        "device": "cpu",
    }
    assert headers["Authorization"] == "Bearer secret"
    assert "device cpu: passed" in done.stdout
    assert "passed: py312-tf5.9-torch2.11, in run 20261121-114502-7f3a of 2026-11-21" in done.stdout
    assert "transformers 5" in done.stdout  # the shim's reason


def test_what_is_known_to_be_bad_is_1(service: Service, cli: Callable[..., Done]) -> None:
    service.answer = WRONG
    done = cli(service.url)
    assert done.returncode == 1
    assert "wrong: test_generate: off by 3" in done.stdout
    assert "known to be bad" in done.stdout
    service.answer = WRONG | {"verdict": "refused", "reason": "needs C++20"}
    assert cli(service.url).returncode == 1


def test_what_only_something_near_is_known_of_is_not_bad(service: Service, cli: Callable[..., Done]) -> None:
    service.answer = NEAREST
    done = cli(f"{service.url}/")
    assert done.returncode == 0
    assert "unknown: another patch of it was tested" in done.stdout
    assert "wrong: py312-tf5.9-torch2.11, with transformers 5.9.0, in run" in done.stdout


def test_json(service: Service, cli: Callable[..., Done]) -> None:
    service.answer = WRONG
    done = cli(service.url, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["answers"][0]["tested"]) == (1, False, [EVIDENCE])
    assert found["environment"]["packages"]["torch"] == "2.11.0"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1", "can't be reached: .*refused"),
        ("matrix.example", "isn't the address of a service"),
        ("file:///etc/passwd", "isn't the address of a service"),
        ("http://:80", "isn't the address of a service"),
        ("http://a b/", "isn't the address of a service"),
        ("http://[::1", "isn't the address of a service"),
        ("http://host:99999", "isn't the address of a service"),
        ("http://me:secret@127.0.0.1:1", "^kernel-compat-matrix: http://127.0.0.1:1 can't be reached"),
    ],
)
def test_a_service_that_is_not_there_is_2(cli: Callable[..., Done], url: str, says: str) -> None:
    done = cli(url, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert re.search(says, done.stderr)


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, b"<html>", "responds without a verdict: it isn't a matrix service"),
        (200, b"\xff\xfe", "responds without a verdict"),
        (200, [], "responds without a verdict"),
        (200, {"verdict": "splendid"}, "responds without a verdict"),
        (200, b" " * 5_000_000, "longer than"),
        (404, b"", "responds with 404"),
        (401, {"detail": "a token is needed"}, "responds with 401: a token is needed"),
        (422, {"detail": [{"msg": "no release", "loc": ["query", "torch"]}]}, "responds with 422: no release"),
        (
            503,
            {"detail": "the database\x1b[31m doesn't answer"},
            r"responds with 503: the database \[31m doesn't answer",
        ),
        (500, {"detail": {"a": 1}}, "responds with 500"),
    ],
)
def test_an_answer_that_is_none_is_an_error(service: Service, status: int, answer: Any, says: str) -> None:
    service.status, service.answer = status, answer
    with pytest.raises(ServiceError, match=says):
        ask(service.url, here())


@pytest.mark.parametrize("how", ["slow", "drip"])
def test_a_service_that_takes_its_time_is_given_up(service: Service, how: str) -> None:
    setattr(service, how, LONG)
    with pytest.raises(ServiceError, match="it didn't respond in time"):
        ask(service.url, here(), timeout=0.2)


def test_a_redirect_doesn_t_take_the_token_along(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_COMPAT_SERVICE_TOKEN", "secret")
    elsewhere = Service()
    try:
        service.status, service.headers = 302, {"Location": f"{elsewhere.url}/api/v1/compat"}
        assert ask(service.url, here()).ok
        assert [("Authorization" in headers) for _, _, headers in service.asked + elsewhere.asked] == [True, False]
        service.headers = {"Location": "file:///etc/passwd"}
        with pytest.raises(ServiceError, match="isn't the address of a service"):
            ask(service.url, here())
    finally:
        elsewhere.stop()


def test_odd_evidence_is_shown_as_far_as_it_goes(service: Service, cli: Callable[..., Done]) -> None:
    service.answer = PASSED | {
        "tested": [3, {"cell": "\x1b[2J", "started": None, "differs": [1, {"axis": []}], "shims": [{"name": 1}, 2]}]
    }
    done = cli(service.url)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("arguments", [(), ("http://127.0.0.1:1", "sdpa")])
def test_bad_arguments_are_2(cli: Callable[..., Done], arguments: tuple[str, ...]) -> None:
    assert cli(*arguments).returncode == 2


def here(devices: tuple[Device, ...] = (), **packages: str) -> Environment:
    named = {name.replace("_", "-"): version for name, version in packages.items()}
    return Environment(python="3.12.7", packages={"torch": "2.11.0", "transformers": "5.9.0", **named}, devices=devices)


def test_what_is_asked_depends_on_what_a_gpu_could_use() -> None:
    gpu = (Device("H200", (9, 0)),)

    def kinds(environment: Environment) -> list[tuple[str, str | None]]:
        return [(question["flash_attn"], question.get("device")) for question in questions(environment)]

    assert kinds(here()) == [("none", "cpu")]
    assert kinds(here(flash_attn="2.8.3")) == [("none", "cpu")]  # installed, but unusable without a GPU
    assert kinds(here(gpu)) == [("torch", "cuda")]  # its own, as the axes file has it
    assert kinds(here(gpu, flash_attn_4="4.0.0b36")) == [("flash-attn-4 4.0.0b36", "cuda")]
    assert kinds(here(gpu, flash_attn="2.8.3", flash_attn_3="3.0", fa3_fwd="0.0.3")) == [
        ("flash-attn 2.8.3", "cuda"),
        ("flash-attn-3 3.0", "cuda"),
        ("fa3-fwd 0.0.3", "cuda"),
    ]
    assert kinds(here(gpu, flash_attn="1.0.9+cu118")) == [("flash-attn 1.0.9", "cuda")]  # which no cell has
    with pytest.raises(ServiceError, match="the installed version of flash-attn can't be determined"):
        questions(here(gpu, flash_attn="of my own"))


def test_an_older_service_is_asked_about_the_flash_attention_without_its_version(service: Service) -> None:
    service.older = True
    gpu = Device("H200", (9, 0))
    (answer,) = ask(service.url, here((gpu,), flash_attn="2.8.3")).answers
    assert answer.asked["flash_attn"] == "fa2"
    with pytest.raises(ServiceError, match="responds with 422"):
        ask(service.url, here((gpu,), flash_attn="1.0.9"))


def test_without_torch_or_transformers_there_is_nothing_to_ask(service: Service) -> None:
    for packages in ({"torch": "2.11.0"}, {"torch": "2.11.0", "transformers": "of somebody's own"}):
        with pytest.raises(ServiceError, match="the installed version of transformers can't be determined"):
            ask(service.url, Environment(packages=packages))
    assert service.asked == []

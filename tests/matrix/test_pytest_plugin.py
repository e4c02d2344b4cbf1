"""The pytest plugin in another project's test suite."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from recorded_service import NEAREST, PASSED, WRONG, Service

import compat_matrix
import kernel_compat

pytest_plugins = ["pytester"]

SOURCES = [str(Path(str(module.__file__)).parents[1]) for module in (kernel_compat, compat_matrix)]
PLUGIN = ("-p", "compat_matrix.pytest_plugin")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with metadata of torch and transformers; collecting its test writes to a file."""
    for name, version in (("torch", "2.11.0"), ("transformers", "5.9.0")):
        (pytester.path / "site" / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = pytester.path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (pytester.path / "site" / name).mkdir()
        (pytester.path / "site" / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path / "site"), *SOURCES]))
    monkeypatch.syspath_prepend(pytester.path / "site")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(test_it="open('collected', 'a').write('x')\ndef test_it(): pass\n")
    return pytester


def collected(project: pytest.Pytester) -> bool:
    return (project.path / "collected").exists()


def test_a_suite_whose_environment_is_known_to_be_bad_does_not_begin(
    service: Service, project: pytest.Pytester
) -> None:
    service.answer = WRONG
    found = project.runpytest_inprocess(*PLUGIN, "-o", f"kernel_compat_service={service.url}")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(
        [
            f"ERROR: {service.url} knows that this environment is bad:",
            "*transformers 5.9.0, torch 2.11.0*: wrong: test_generate: off by 3",
            "  wrong: py312-tf5.9-torch2.11, in run 20261121-114502-7f3a of 2026-11-21",
        ]
    )
    assert not collected(project)


@pytest.mark.parametrize(("answer", "says"), [(PASSED, "passed"), (NEAREST, "unknown: another patch of it was tested")])
def test_any_other_suite_runs_and_its_header_says_what_is_known(
    service: Service, project: pytest.Pytester, answer: object, says: str
) -> None:
    service.answer = answer
    found = project.runpytest_inprocess(*PLUGIN, "-o", f"kernel_compat_service={service.url}")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines([f"kernel-compat: transformers 5.9.0, torch 2.11.0, *, device cpu: {says}"])


def test_a_service_that_does_not_answer_is_a_warning(service: Service, project: pytest.Pytester) -> None:
    service.stop()
    found = project.runpytest_inprocess(*PLUGIN, "-o", f"kernel_compat_service={service.url}")
    found.assert_outcomes(passed=1, warnings=1)
    found.stdout.fnmatch_lines(["*UserWarning: nothing is known about this environment: *can't be reached*"])


def test_with_several_processes_it_asks_once(service: Service, project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    found = project.runpytest_subprocess(
        *PLUGIN, "-p", "xdist", "-n", "2", "-o", f"kernel_compat_service={service.url}"
    )
    found.assert_outcomes(passed=1)
    assert len(service.asked) == 1


@pytest.mark.parametrize("active", [False, True])
def test_inactive_it_imports_nothing_and_active_neither_torch_nor_transformers(
    service: Service, project: pytest.Pytester, active: bool
) -> None:
    project.makepyfile(
        test_it="""
        import json, sys
        def test_it():
            open("modules", "w").write(json.dumps(sorted(sys.modules)))
        """
    )
    options = ("-o", f"kernel_compat_service={service.url}") if active else ()
    project.runpytest_subprocess(*PLUGIN, *options).assert_outcomes(passed=1)
    modules = set(json.loads((project.path / "modules").read_text()))
    ours = {name for name in modules if name.startswith(("kernel_compat", "compat_matrix"))}
    assert ("compat_matrix.matrix_client" in ours) == active
    assert not {"torch", "transformers", "numpy", "sqlalchemy", "pydantic", "starlette"} & modules
    if not active:
        parts = (
            "kernel_compat_cell",
            "kernel_compat_versions",
        )  # of the cell, which imports pytest and packaging alone
        cell = {"compat_matrix.cell", *(f"compat_matrix.cell.{part}" for part in parts)}
        assert ours == {"compat_matrix", "compat_matrix.pytest_plugin", *cell}
        assert "urllib.request" not in modules


@pytest.mark.parametrize("file", ["pytest.ini", "conftest.py"])
def test_a_project_loads_it_by_a_line_of_its_own(service: Service, project: pytest.Pytester, file: str) -> None:
    service.answer = WRONG
    loads = {"pytest.ini": "addopts = -p compat_matrix.pytest_plugin\n", "conftest.py": ""}[file]
    project.makeini(f"[pytest]\nkernel_compat_service = {service.url}\n{loads}")
    if file == "conftest.py":
        project.makeconftest('pytest_plugins = ["compat_matrix.pytest_plugin"]')
    assert project.runpytest_inprocess().ret == pytest.ExitCode.USAGE_ERROR
    assert not collected(project)
    assert project.runpytest_inprocess("-o", "kernel_compat_service=").ret == pytest.ExitCode.OK
    assert len(service.asked) == 1


def test_figures_are_recorded_outside_of_the_matrix_too(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="""
        def test_it(figure):
            figure("step time", 12.5, "ms", better="higher")
        def test_bad(figure):
            figure("step time", float("nan"), "ms")
        """
    )
    project.runpytest_subprocess(*PLUGIN, "--junit-xml=report.xml").assert_outcomes(passed=1, failed=1)
    report = (project.path / "report.xml").read_text()
    assert "'name': 'step time', 'value': 12.5, 'unit': 'ms', 'better': 'higher'" in report


def test_pytest_does_not_find_it_by_itself() -> None:
    """pytest would import a plugin with an entry point, and rewrite the assertions of its whole distribution."""
    root = Path(__file__).parents[2]
    for project in (root / "pyproject.toml", root / "atlas" / "pyproject.toml", root / "matrix" / "pyproject.toml"):
        assert "pytest11" not in project.read_text()

"""A pytest plugin: ends a suite before it begins where a matrix service knows that its environment is bad.

``-p kernel_compat.pytest_plugin`` loads it: were it found by itself, every pytest of every project that has this package installed
would start later. It does nothing, and imports nothing, unless a service is named: by ``--kernel-compat-service URL`` or the ini
option ``kernel_compat_service``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .service import ServiceReport

__all__ = ["ServiceWarning"]


class ServiceWarning(UserWarning):
    """The matrix service gave no answer, so that nothing is known of the environment."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel-compat")
    group.addoption(
        "--kernel-compat-service",
        metavar="URL",
        help="ask this matrix service about the environment first, and end where it is known to be bad",
    )
    group.addoption(
        "--kernel-compat-service-required", action="store_true", help="end also where the service doesn't answer"
    )
    parser.addini("kernel_compat_service", "as --kernel-compat-service; an empty option turns it off", default="")


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    url = config.getoption("--kernel-compat-service")
    url = config.getini("kernel_compat_service") if url is None else url
    if url and not hasattr(config, "workerinput"):  # of pytest-xdist: the process that started it has asked
        _ask(config, url)


def _ask(config: pytest.Config, url: str) -> None:
    from . import service

    try:
        report = service.ask(url)
    except service.ServiceError as error:
        if config.getoption("--kernel-compat-service-required"):
            raise pytest.UsageError(f"kernel-compat: {error}") from None
        config.issue_config_time_warning(ServiceWarning(f"nothing is known of this environment: {error}"), stacklevel=2)
        return
    lines = [line for answer in report.answers for line in service.describe(answer)]
    if not report.ok:
        raise pytest.UsageError("\n".join([f"{report.url} knows that this environment is bad:", *lines]))
    config.stash[_REPORT] = report


_REPORT: pytest.StashKey[ServiceReport] = pytest.StashKey()


def pytest_report_header(config: pytest.Config) -> list[str]:
    report = config.stash.get(_REPORT, None)
    if report is None:
        return []
    from . import service

    return [f"kernel-compat: {next(service.describe(answer))}" for answer in report.answers]

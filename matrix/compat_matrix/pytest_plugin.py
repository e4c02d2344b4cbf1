"""A pytest plugin: the fixture `figure`, and a check before a suite begins that no matrix service knows the environment as bad.

Load it with ``-p compat_matrix.pytest_plugin``. It isn't registered as an entry point: pytest would then import it in every
project that has this package installed. Without the ini option ``kernel_compat_service`` it asks no service and imports nothing else.
"""

import pytest

from .cell.kernel_compat_cell import figure

__all__ = ["figure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's option."""
    about = "ask this matrix service about the environment first, and stop if it is known to be bad"
    parser.addini("kernel_compat_service", about, default="")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ask the service; not in the worker processes of pytest-xdist, whose controller has asked."""
    config = session.config
    url = config.getini("kernel_compat_service")
    if not url or hasattr(config, "workerinput"):
        return
    from . import matrix_client

    try:
        report = matrix_client.ask(url)
    except matrix_client.ServiceError as error:
        warning = UserWarning(f"nothing is known about this environment: {error}")
        config.issue_config_time_warning(warning, stacklevel=2)
        return
    said = [[*matrix_client.describe(answer)] for answer in report.answers]
    if not report.ok:
        lines = [line for answer in said for line in answer]
        raise pytest.UsageError("\n".join([f"{report.url} knows that this environment is bad:", *lines]))
    for verdict, *_ in said:
        config.get_terminal_writer().line(f"kernel-compat: {verdict}")

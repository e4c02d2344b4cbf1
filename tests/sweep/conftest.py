from __future__ import annotations

import pytest

from kernel_compat_prove import Proof, summary

PROOFS: list[Proof] = []


@pytest.fixture(scope="session")
def proofs() -> list[Proof]:
    """What is proven, in order."""
    return PROOFS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in summary(PROOFS).items())
    terminalreporter.write_line(f"proven: {counts}")

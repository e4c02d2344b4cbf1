"""Tests wait for events. Their clocks are for hangs alone: a number of seconds is right until the machine is busy."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from waiting import LONG, until

TESTS = Path(__file__).parents[1]
MODULES = [*TESTS.glob("*.py"), *Path(__file__).parent.glob("*.py")]

#: Calls whose time is what is tested, or in which nothing is to happen until it is over, by module and name.
MEANT = {
    ("forked.py", "wait"),  # whether it has ended
    ("test_check.py", "ask"),  # the service responds later
    ("test_ray.py", "communicate"),  # it waits for a GPU
    ("test_runner.py", "wait"),  # the second waits for the first
}


def limits(path: Path) -> set[tuple[str, str]]:
    """The calls of a module with a number of seconds after which they fail."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [one.value for one in node.keywords if one.arg == "timeout"]
        given += node.args if name in ("wait", "join", "settimeout") else []
        numbers = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, (int, float))]
        if numbers and name != "timeout":  # `pytest.mark.timeout` is far more than all waits of a test
            found.add((path.name, name))
    return found


def test_no_test_fails_by_its_clock() -> None:
    support = {"network.py", "forked.py", "served.py", "small.py", "postgresql.py", "recorded_service.py"}
    chosen = [path for path in MODULES if path.parent != TESTS or path.name in support]
    assert {one for path in chosen for one in limits(path)} == MEANT


def test_a_number_of_seconds_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("a.wait(60)\nrun(['x'], timeout=5)\nb.wait(LONG)\nrequests.get(c, timeout=LONG)\ne.join(1.5)\n")
    assert limits(path) == {("module.py", "wait"), ("module.py", "run"), ("module.py", "join")}


def test_a_test_has_time_for_several_waits(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args[0] >= 3 * LONG


def test_a_wait_that_can_not_end_well_ends_at_once() -> None:
    def died() -> bool:
        raise AssertionError("the service has died")

    with pytest.raises(AssertionError, match="the service has died"):
        until(died, "an end of the run")

"""From pytest's output to the verdict on a cell: the outcomes of its tests, and the kind of failure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .axes import Known
from .results import Figure, Kind, Outcome, Recorded, Test, Verdict
from .words import plural

#: The size of a difference in messages of torch.testing, numpy and pytest's comparisons; the largest counts. In a comparison, a bound
#: without a decimal point is a count, not a difference.
_DISTANCE = re.compile(
    r"(?:(?:[Gg]reatest|Max) (?:absolute|relative) difference[^:\n]*: |\boff by )(?P<said>[-+.\deinfa]+)"
    r"|assert (?P<compared>[\d.]+(?:e[-+]?\d+)?|nan|inf) <=? \(?(?:\d+ \* )?(?:\d*\.\d|\d+e[-+]?\d)"
)
_IMPORT = re.compile(r"\b(?:ImportError|ModuleNotFoundError): [^\n]+")
_CRASH = re.compile(
    r"Fatal Python error: [^\n]*|worker '\w+' crashed[^\n]*|CUDA error: [^\n]*|Segmentation fault[^\n]*"
)

#: The reason if pytest found no test.
NO_TEST = "no test ran"

#: The message of a test that started and never reported.
UNENDED = "it didn't finish"


def read_report_log(path: Path) -> tuple[list[Test], list[str]]:
    """The tests in a pytest report log, and the errors of files that couldn't be collected.

    A log that ends in the middle of a line, as a killed process leaves it, is read up to there.
    """
    phases: dict[str, list[dict[str, Any]]] = {}
    uncollected = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        kind = entry.get("$report_type")
        if kind == "TestReport":
            phases.setdefault(entry["nodeid"], []).append(entry)
        elif kind == "CollectReport" and entry["outcome"] == "failed":
            uncollected.append(f"{entry['nodeid']}: {message_of(entry)}")
    return [_test(nodeid, some) for nodeid, some in phases.items()], uncollected


def _test(nodeid: str, entries: Sequence[Mapping[str, Any]]) -> Test:
    # The failures after which pytest-rerunfailures repeated the test, if the project uses it. Properties of all tries add up.
    reruns = [entry for entry in entries if entry["outcome"] == "rerun"]
    before = len(reruns[-1].get("user_properties", ())) if reruns else 0
    outcome, entry = _outcome(entries)
    seconds = sum(entry.get("duration", 0.0) for entry in entries)
    if outcome == "passed" and reruns:
        outcome, entry = "flaky", reruns[0]
    message = UNENDED if entry is None else message_of(entry)
    return _with_figures(Test(nodeid, outcome, seconds, message), entries[-1].get("user_properties"), before)


def _outcome(entries: Sequence[Mapping[str, Any]]) -> tuple[Outcome, Mapping[str, Any] | None]:
    """The outcome of a test, and the report of its phase that tells why; None if it didn't end."""
    for entry in entries:
        expected = entry.get("wasxfail") is not None
        if entry["outcome"] == "failed":
            return "failed" if entry["when"] == "call" else "error", entry
        if entry["outcome"] == "skipped":
            return "xfailed" if expected else "skipped", entry
        if expected:
            return "xpassed", {}
    return ("passed", {}) if entries[-1]["when"] == "teardown" else ("error", None)


def message_of(entry: Mapping[str, Any]) -> str:
    """The text of a report's failure or skip."""
    representation = entry.get("longrepr")
    if isinstance(representation, (list, tuple)) and len(representation) == 3:  # file, line and reason of a skip
        return str(representation[2]).removeprefix("Skipped: ")
    if isinstance(representation, dict):
        crash = (representation.get("reprcrash") or {}).get("message", "")
        lines = []
        chain = representation.get("chain") or [[representation.get("reprtraceback"), None, None]]
        for trace, *_ in chain:
            for part in (trace or {}).get("reprentries", ()):
                data = part.get("data") or {}
                lines += data.get("lines", ())
                place = data.get("reprfileloc")
                if place:
                    lines.append(f"{place['path']}:{place['lineno']}: {place['message']}")
        return "\n".join(lines) or crash
    return "" if representation is None else str(representation)


def _with_figures(test: Test, properties: Any, skipped: int = 0) -> Test:
    """A test with the figures in its properties, as the report log has them; failed if one is invalid.

    Args:
        skipped: the number of properties at the beginning that don't count.
    """
    if isinstance(properties, str):  # pytest-reportlog writes properties as one text if one of them isn't JSON
        unreadable = "('figure'," in properties
        return _failed(test, [f"its figures aren't JSON: {properties}"]) if unreadable else test
    found, problems = [], []
    for entry in properties[skipped:] if isinstance(properties, list) else ():
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == "figure":  # a project may append anything
            try:
                found.append(Figure(**Recorded.model_validate(entry[1]).model_dump()))
            except ValidationError as error:
                wrong = f"the figure {repr(entry[1])[:200]} is invalid"
                said = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
                problems += [f"{wrong}: {where}: {text.removeprefix('Value error, ')}" for where, text in said]
    test = replace(test, figures=tuple(found))
    return _failed(test, problems) if problems else test


def distinct(tests: Iterable[Test]) -> list[Test]:
    """The tests with figures of different names: a test that repeats the name of an earlier figure fails."""
    first: dict[str, tuple[str, Figure]] = {}
    checked = []
    for one in tests:
        kept, problems = [], []
        for figure in one.figures:
            if figure.name not in first:
                first[figure.name] = (one.nodeid, figure)
                kept.append(figure)
            else:
                nodeid, other = first[figure.name]
                units = f", in {other.unit!r} there and in {figure.unit!r} here" * (other.unit != figure.unit)
                problems.append(f"the figure {figure.name!r} was recorded before, by {nodeid}{units}")
        test = replace(one, figures=tuple(kept))
        checked.append(_failed(test, problems) if problems else test)
    return checked


def _failed(test: Test, problems: Iterable[str]) -> Test:
    outcome = test.outcome if test.outcome in ("failed", "error") else "failed"
    return replace(test, outcome=outcome, message="\n".join([*problems, *filter(None, [test.message])]))


def tied(tests: Sequence[Test], known: Iterable[Known], today: date) -> tuple[list[Test], list[str]]:
    """Tie the failures of a cell to the issues that they are known for.

    Returns:
        The tests, failures that are tied to an issue as ``known``; and for each entry that ran out or isn't needed any more, a
        text about it.
    """
    found, stale = list(tests), []
    for entry in known:
        matching = [n for n, test in enumerate(found) if entry.matches(test.nodeid)]
        bad = [n for n in matching if found[n].bad and found[n].message != UNENDED]
        if bad and entry.until < today.isoformat():
            stale.append(f"{found[bad[0]].nodeid} was known to fail until {entry.until}: {entry.issue}")
        elif bad:
            for n in bad:
                message = f"{entry.issue}: {entry.because}\n{found[n].message}"
                found[n] = replace(found[n], outcome="known", message=message)
        elif {"passed", "xpassed"} & (outcomes := {found[n].outcome for n in matching}) and "known" not in outcomes:
            stale.append(f"{entry.test} passes: it needs no entry as a known failure any more, for {entry.issue}")
    return found, stale


def retried(tests: Iterable[Test], again: Iterable[Test]) -> list[Test]:
    """The tests; failed ones that passed when they were run again as ``flaky``, with the message of the failure."""
    passed = {test.nodeid: test for test in again if test.outcome == "passed"}
    return [
        replace(passed[test.nodeid], outcome="flaky", message=test.message)
        if test.bad and test.nodeid in passed
        else test
        for test in tests
    ]


def judge(
    tests: Sequence[Test],
    uncollected: Sequence[str],
    environment: Mapping[str, Any],
    log: str,
    returncode: int | None,
    minutes: float,
    stale: Sequence[str] = (),
) -> tuple[Verdict, Kind | None, str]:
    """The verdict on a cell.

    Args:
        returncode: the return code of its process; None if it was ended at its time limit of `minutes`.
        stale: as returned by `tied`.

    Returns:
        The verdict, the kind of failure, and the reason in a line or two.
    """
    bad = [test for test in tests if test.bad]
    failed = {name: shim for name, shim in environment.get("shims", {}).items() if shim["state"] == "failed"}
    within = next((f", in {test.nodeid}" for test in reversed(tests) if test.message == UNENDED), "")
    if returncode is None:
        last = f", the last test that ended was {tests[-1].nodeid}" if tests else ""
        return "failed", "timeout", f"ended after {minutes:g} min{within or last}"
    tolerated = {outcome: [test for test in tests if test.outcome == outcome] for outcome in ("known", "flaky")}
    if returncode in ((0, 1) if any(tolerated.values()) else (0,)) and not bad and not failed and not uncollected:
        if stale:
            return "failed", "stale", "; ".join(stale)
        if known := tolerated["known"]:
            issues = dict.fromkeys(test.message.partition("\n")[0] for test in known)
            return "known", None, f"{len(known)} of {len(tests)} tests fail, as is known: {'; '.join(issues)}"
        if flaky := tolerated["flaky"]:
            failed_once = f"{len(flaky)} of {len(tests)} tests failed, and passed when repeated"
            return "flaky", None, f"{failed_once}, the first of them {flaky[0].nodeid}"
        if any(test.outcome != "skipped" for test in tests) or not tests:
            return "passed", None, ""
        reasons = sorted({test.message for test in tests if test.message})
        return "not run", "hardware", f"every test was skipped: {'; '.join(reasons[:3])}"
    kind, reason = _cause(tests, bad, uncollected, failed, log, returncode, within)
    conflicts = "; ".join(environment.get("conflicts", ())[:3])
    if conflicts and kind == "import":  # most of them are said so
        return "failed", "installation", f"{conflicts}: {reason}"
    more = "; ".join([*stale, *filter(None, [conflicts])])
    return "failed", kind, f"{reason} (and {more})" if more else reason


def _cause(
    tests: Sequence[Test],
    bad: Sequence[Test],
    uncollected: Sequence[str],
    failed: Mapping[str, Mapping[str, Any]],
    log: str,
    returncode: int,
    within: str,
) -> tuple[Kind, str]:
    """The kind of failure, and the reason."""
    texts = [*uncollected, *(test.message for test in bad)]
    for text in uncollected or ([log] if not tests else []):
        if found := _IMPORT.findall(text):
            return "import", found[-1].strip()
    if failed:
        return "seam", "; ".join(f"{name}: {shim['reason']}" for name, shim in failed.items())
    for text in [*texts, *([log] if returncode not in (0, 1) else [])]:
        if match := _CRASH.search(text):
            return "crash", f"{match[0]}{within}"
    if returncode < 0:
        return "crash", f"killed by signal {-returncode}{within}"
    if within:
        return "crash", f"ended with {returncode}{within}"
    if bad and all(_IMPORT.search(test.message) for test in bad):
        return "import", _IMPORT.findall(bad[0].message)[-1].strip()
    distances = [distance for test in bad if (distance := distance_in(test.message)) is not None]
    if (far := _farthest(distances)) is not None:
        are = "is" if len(tests) == 1 else "are"
        return "wrong", f"{len(distances)} of {plural(len(tests), 'test')} {are} off, by up to {far:.3g}"
    if bad:
        return "test", f"{len(bad)} of {plural(len(tests), 'test')} failed, the first of them {bad[0].nodeid}"
    if uncollected:
        return "test", f"{uncollected[0].split(': ')[0]}: {_said(uncollected[0])}"
    return "test", NO_TEST if returncode == 5 else f"its command ended with {returncode}: {_tail(log)}"


def distance_in(message: str) -> float | None:
    """The size of the difference, if a failure's report has one."""
    found = []
    for match in _DISTANCE.finditer(message):
        with suppress(ValueError):
            found.append(float(match["said"] or match["compared"]))
    return _farthest(found)


def _farthest(distances: Iterable[float]) -> float | None:
    return max(distances, key=lambda value: (value != value, value), default=None)


def _said(failure: str) -> str:
    """The last line that pytest marks as an error."""
    lines = [line for line in failure.splitlines() if line.strip()]
    return next((line[1:].strip() for line in reversed(lines) if line.startswith("E  ")), lines[-1].strip())


def _tail(log: str) -> str:
    return (log.strip().splitlines() or ["it printed nothing"])[-1][:300]

"""From pytest's output to the verdict on a cell: the outcomes of its tests, and the kind of failure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .axes import Known
from .results import Figure, Kind, Outcome, Test, Verdict
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

_FIGURE = TypeAdapter(Figure)

#: The reason if pytest found no test.
NO_TEST = "no test ran"

#: The message of a test that started and never reported.
UNENDED = "it didn't finish"


def read_report_log(path: Path) -> tuple[list[Test], list[str]]:
    """The tests in a pytest report log, with the files that were skipped as a whole, and the errors of files that couldn't be collected.

    A log that ends in the middle of a line, as a killed process leaves it, is read up to there.
    """
    phases: dict[str, list[dict[str, Any]]] = {}
    uncollected, skipped = [], []
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
            uncollected.append(f"{entry['nodeid']}: {_message_of(entry)}")
        elif kind == "CollectReport" and entry["outcome"] == "skipped":
            skipped.append(Test(entry["nodeid"], "skipped", 0.0, _message_of(entry)))
    return [*skipped, *(_test(nodeid, some) for nodeid, some in phases.items())], uncollected


def _test(nodeid: str, entries: Sequence[Mapping[str, Any]]) -> Test:
    # The failures after which pytest-rerunfailures repeated the test, if the project uses it. Properties of all tries add up.
    reruns = [entry for entry in entries if entry["outcome"] == "rerun"]
    before = len(reruns[-1].get("user_properties", ())) if reruns else 0
    outcome, message = _outcome(entries)
    if outcome == "passed" and reruns:
        outcome, message = "flaky", _message_of(reruns[0])
    seconds = sum(entry.get("duration", 0.0) for entry in entries)
    return _with_figures(Test(nodeid, outcome, seconds, message), entries[-1].get("user_properties"), before)


def _outcome(entries: Sequence[Mapping[str, Any]]) -> tuple[Outcome, str]:
    """The outcome of a test from the reports of its phases, and the message of the one that decides it."""
    for entry in entries:
        expected = entry.get("wasxfail") is not None
        if entry["outcome"] == "failed":
            return "failed" if entry["when"] == "call" else "error", _message_of(entry)
        if entry["outcome"] == "skipped":
            return "xfailed" if expected else "skipped", _message_of(entry)
        if expected:
            return "xpassed", ""
    return ("passed", "") if entries[-1]["when"] == "teardown" else ("error", UNENDED)


def _message_of(entry: Mapping[str, Any]) -> str:
    """The text of a report's failure or skip."""
    representation = entry.get("longrepr")
    if isinstance(representation, list):  # file, line and reason of a skip
        return str(representation[2]).removeprefix("Skipped: ")
    if not isinstance(representation, dict):
        return str(representation or "")
    lines = []
    for trace, *_ in representation["chain"] or [[representation["reprtraceback"]]]:
        for part in trace["reprentries"]:
            lines += part["data"]["lines"]
            if place := part["data"].get("reprfileloc"):
                lines.append(f"{place['path']}:{place['lineno']}: {place['message']}")
    return "\n".join(lines)


def _with_figures(test: Test, properties: Any, skipped: int) -> Test:
    """A test with the figures in its properties, without the first ones; failed if one is invalid."""
    if isinstance(properties, str):  # pytest-reportlog writes properties as one text if one of them isn't JSON
        return _failed(test, [f"its figures aren't JSON: {properties}"] if "('figure'," in properties else [])
    found, problems = [], []
    for entry in properties[skipped:] if isinstance(properties, list) else ():
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == "figure":  # a project may append anything
            try:
                found.append(_FIGURE.validate_python(entry[1]))
            except ValidationError as error:
                for one in error.errors():
                    where, said = ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")
                    problems.append(f"the figure {repr(entry[1])[:200]} is invalid: {where}: {said}")
    return _failed(replace(test, figures=tuple(found)), problems)


def distinct(tests: Iterable[Test]) -> list[Test]:
    """The tests with figures of different names: a test that repeats the name of an earlier figure fails."""
    first: dict[str, str] = {}
    checked = []
    for one in tests:
        kept, problems = [], []
        for figure in one.figures:
            if figure.name in first:
                before = first[figure.name]
                alike = before != one.nodeid and before.partition("[")[0] == one.nodeid.partition("[")[0]
                advice = ": put the parameter into its name" if alike else ""
                problems.append(f"the figure {figure.name!r} was recorded before, by {before}{advice}")
            else:
                first[figure.name] = one.nodeid
                kept.append(figure)
        checked.append(_failed(replace(one, figures=tuple(kept)), problems))
    return checked


def _failed(test: Test, problems: Sequence[str]) -> Test:
    """The test, failed if there are problems."""
    if not problems:
        return test
    outcome = test.outcome if test.bad else "failed"
    return replace(test, outcome=outcome, message="\n".join([*problems, *filter(None, [test.message])]))


def tied(tests: Sequence[Test], known: Iterable[Known], today: date) -> tuple[list[Test], list[str]]:
    """The tests, failures that are tied to an issue as ``known``; and a text about each entry that ran out or isn't needed any more."""
    found, stale = list(tests), []
    for entry in known:
        matching = [n for n, test in enumerate(found) if entry.matches(test.nodeid)]
        bad = [n for n in matching if found[n].bad and found[n].message != UNENDED]
        if bad and entry.until < today:
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
    """The verdict on a cell, the kind of failure, and the reason in a line or two.

    Args:
        returncode: the return code of its process; None if it was ended at its time limit of `minutes`.
        stale: as returned by `tied`.
    """
    if returncode is None:
        last = f", the last test that ended was {tests[-1].nodeid}" if tests else ""
        return "failed", "timeout", f"ended after {minutes:g} min{_within(tests) or last}"
    shims = environment.get("shims", {}).items()
    changed = [f"{name}: {shim['reason']}" for name, shim in shims if shim["state"] == "failed"]
    known, flaky = ([test for test in tests if test.outcome == outcome] for outcome in ("known", "flaky"))
    good = returncode == 0 or (returncode == 1 and (known or flaky))
    if good and not any(test.bad for test in tests) and not changed and not uncollected:
        if stale:
            return "failed", "stale", "; ".join(stale)
        if known:
            issues = dict.fromkeys(test.message.partition("\n")[0] for test in known)
            return "known", None, f"{len(known)} of {len(tests)} tests fail, as is known: {'; '.join(issues)}"
        if flaky:
            failed_once = f"{len(flaky)} of {len(tests)} tests failed, and passed when repeated"
            return "flaky", None, f"{failed_once}, the first of them {flaky[0].nodeid}"
        if any(test.outcome != "skipped" for test in tests) or not tests:
            return "passed", None, ""
        reasons = sorted({test.message for test in tests if test.message})
        return "not run", "hardware", f"every test was skipped: {'; '.join(reasons[:3])}"
    kind, reason = _cause(tests, uncollected, changed, log, returncode)
    conflicts = "; ".join(environment.get("conflicts", ())[:3])
    if conflicts and kind == "import":  # most of them are said so
        return "failed", "installation", f"{conflicts}: {reason}"
    more = "; ".join([*stale, *filter(None, [conflicts])])
    return "failed", kind, f"{reason} (and {more})" if more else reason


def _within(tests: Sequence[Test]) -> str:
    """In which test a process ended, as words to append."""
    return next((f", in {test.nodeid}" for test in reversed(tests) if test.message == UNENDED), "")


def _cause(
    tests: Sequence[Test], uncollected: Sequence[str], changed: Sequence[str], log: str, returncode: int
) -> tuple[Kind, str]:
    """The kind of failure, and the reason."""
    bad, within = [test for test in tests if test.bad], _within(tests)
    for text in uncollected or ([log] if not tests else []):
        if found := _IMPORT.findall(text):
            return "import", found[-1].strip()
    if changed:
        return "seam", "; ".join(changed)
    for text in [*uncollected, *(test.message for test in bad), *([log] if returncode not in (0, 1) else [])]:
        if match := _CRASH.search(text):
            return "crash", f"{match[0]}{within}"
    if returncode < 0:
        return "crash", f"killed by signal {-returncode}{within}"
    if within:
        return "crash", f"ended with {returncode}{within}"
    if bad and all(_IMPORT.search(test.message) for test in bad):
        return "import", _IMPORT.findall(bad[0].message)[-1].strip()
    if distances := [distance for test in bad if (distance := distance_in(test.message)) is not None]:
        are = "is" if len(tests) == 1 else "are"
        far = max(distances, key=_nan_last)
        return "wrong", f"{len(distances)} of {plural(len(tests), 'test')} {are} off, by up to {far:.3g}"
    if bad:
        return "test", f"{len(bad)} of {plural(len(tests), 'test')} failed, the first of them {bad[0].nodeid}"
    if uncollected:
        nodeid, _, failure = uncollected[0].partition(": ")
        lines = [line for line in failure.splitlines() if line.strip()]
        marked = (line[1:] for line in reversed(lines) if line.startswith("E  "))
        return "test", f"{nodeid}: {next(marked, lines[-1]).strip()}"
    last = (log.strip().splitlines() or ["it printed nothing"])[-1][:300]
    return "test", NO_TEST if returncode == 5 else f"its command ended with {returncode}: {last}"


def distance_in(message: str) -> float | None:
    """The size of the difference, if a failure's report has one."""
    found = []
    for match in _DISTANCE.finditer(message):
        with suppress(ValueError):
            found.append(float(match["said"] or match["compared"]))
    return max(found, key=_nan_last, default=None)


def _nan_last(distance: float) -> tuple[bool, float]:
    return distance != distance, distance

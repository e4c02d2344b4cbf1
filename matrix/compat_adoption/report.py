"""The report on an adopted release, as JSON and as Markdown: what is right, refused, lost and wrong, and what a person must write."""

from collections.abc import Mapping
from typing import Any

from .steps import STEPS, Adoption

_WORDS = ("right", "refused", "lost", "wrong", "untested")


def report(one: Adoption, done: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """The report as JSON; `done` has the finished steps, each with its `found` and `seconds`."""
    found = {name: step["found"] for name, step in done.items()}
    counts = {kind: numbers for step in found.values() for kind, numbers in step["counts"].items()}
    red = [text for step in found.values() for text in step["red"]]
    named = f"{one.release.distribution} {one.release.version}"
    said = f"{len(red)} not right" if red else "right, or refused as before"
    missing = [name for name in STEPS if name not in done]
    without = f" (without {', '.join(missing)})" if missing else ""
    return {
        "release": named.replace(" ", "=="),
        "before": one.before and str(one.before.version),
        "ok": not red,
        "title": f"{named}: {said}{without}",
        "branch": one.checkout.branch,
        "base": one.checkout.base,
        "commit": commit,
        "counts": counts,
        "red": red,
        "write": [text for step in found.values() for text in step["write"]],
        "notes": [text for step in found.values() for text in step["notes"]],
        "seconds": {name: step["seconds"] for name, step in done.items()},
        "not run": missing,
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The report for a reader."""
    lines = [
        f"# {report['title']}",
        "",
        f"The changes are the branch `{report['branch']}`, from {report['base'][:12]}.",
    ]
    if report["counts"]:
        lines += ["", f"| | {' | '.join(_WORDS)} |", "|---" * (len(_WORDS) + 1) + "|"]
        lines += [
            f"| {kind} | {' | '.join(str(numbers.get(word, 0)) for word in _WORDS)} |"
            for kind, numbers in report["counts"].items()
        ]
    for heading, key in (("Not right", "red"), ("What a person must write", "write"), ("Also", "notes")):
        lines += ["", f"## {heading}", "", *(f"- {text}" for text in report[key] or ["nothing"])]
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report["seconds"].items())
    lines += ["", f"Steps: {spent}."]
    lines += [f"Not run: {', '.join(report['not run'])}."] if report["not run"] else []
    return "\n".join(lines) + "\n"

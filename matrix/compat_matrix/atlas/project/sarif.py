"""SARIF 2.1.0, which code review reads: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from ... import __version__
from .walker import Use

__all__ = ["Finding", "as_sarif"]

#: The rules and what they find.
_RULES = {
    "missing-name": "A release lacks a name that is used.",
    "changed-signature": "A function that is patched has other parameters in some releases.",
    "unnecessary-patch": "kernel-compat makes a patch unnecessary.",
}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


@dataclass(frozen=True)
class Finding:
    """A result of a rule at a place."""

    rule: str
    level: Literal["error", "warning", "note"]
    message: str
    use: Use


def as_sarif(findings: Sequence[Finding], unread: Mapping[str, str]) -> dict[str, Any]:
    """A log with one run.

    Args:
        findings: the results.
        unread: files that weren't analysed, and why.
    """
    rules = list(_RULES)
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "kernel-compat-matrix",
                        "version": __version__,
                        "rules": [{"id": rule, "shortDescription": {"text": text}} for rule, text in _RULES.items()],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [
                            {"level": "warning", "message": {"text": f"{path}: {why}"}, "locations": [_location(path)]}
                            for path, why in unread.items()
                        ],
                    }
                ],
                "results": [
                    {
                        "ruleId": one.rule,
                        "ruleIndex": rules.index(one.rule),
                        "level": one.level,
                        "message": {"text": one.message},
                        "locations": [_location(one.use.path, one.use)],
                        "partialFingerprints": {"nameInFile/v1": _fingerprint(one)},
                    }
                    for one in findings
                ],
            }
        ],
    }


def _location(path: str, use: Use | None = None) -> dict[str, Any]:
    region = {} if use is None else {"region": {"startLine": use.line, "startColumn": use.column}}
    return {"physicalLocation": {"artifactLocation": {"uri": quote(path), "uriBaseId": "%SRCROOT%"}, **region}}


def _fingerprint(finding: Finding) -> str:
    """The same where lines above a place are added or removed."""
    use = finding.use
    return hashlib.sha256(f"{finding.rule} {use.path} {use.kind} {use.name}".encode()).hexdigest()[:32]

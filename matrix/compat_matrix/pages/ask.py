"""The question of the first page, *does my combination work?*: reading what people type, and the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple
from urllib.parse import unquote

from ..cells import WORD, Cell
from ..errors import MatrixError
from ..store import Newest
from ..versions import checked, release
from ..views import common
from ..views.verdicts import Judged, Verdict, Wanted, differs, value, verdict_of
from .filters import Filters

#: How near the evidence is to the question: the same releases, other patches of the same minor releases, or neighbours.
Closeness = Literal["patch", "minor", "rule", "neighbour", "none"]

#: The fields of the form, by the axis that they are about: the parameter, the label and an example.
FIELDS = {
    "transformers": ("tf", "transformers", "5.9.1"),
    "torch": ("pt", "torch", "2.11.0+cu130"),
    "flash_attention": ("fa", "FlashAttention", "flash-attn 2.8.3"),
    "python": ("py", "Python", "3.12"),
}

#: The largest text that is read: a lock file of a large project has half of it.
LONGEST = 1_000_000

_FLASH = re.compile(
    r"(?:flash[-_ ]?att(?:n|ention)|fa)(?:[-_ ]?(?P<kind>[234]))?(?:[-_]fwd)?(?:[\s=@:v-]+(?P<version>\d[\w.+]*))?"
)
_PACKAGE = re.compile(
    r"^[ \t]*(?P<name>[A-Za-z0-9][\w.-]*?)[ \t]*(?:\[[^\]\n]*\])?[ \t]*(?P<sign>===?|@|[<>~!]=?|[ \t])[ \t]*(?P<version>[^\s;,\\]+)",
    re.MULTILINE,
)
_LOCKED = re.compile(r"""^name\s*=\s*["']([\w.-]+)["']\s*\nversion\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
_FLASH_PACKAGES = ("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4")

#: The state, the headline and the word of each verdict. The script of a report has them too.
HEADLINES: Mapping[Verdict, tuple[str, str, str]] = {
    "passed": ("passed", "It works", "ok"),
    "flaky": ("flaky", "It works, but a test is flaky", "flaky"),
    "known": ("known", "It works but for failures that are known", "known"),
    "wrong": ("wrong", "It computes something else", ""),
    "failed": ("failed", "It fails", ""),
    "refused": ("refused", "It is excluded", ""),
    "unknown": ("not run", "It was not tested", ""),
}

#: How exact an answer is.
CLOSENESS: Mapping[Closeness, str] = {
    "patch": "Exactly these releases were tested.",
    "minor": "These minor releases were tested; the patch releases are below.",
    "rule": "A rule of the axes says so, for every patch release.",
    "neighbour": "Only its neighbours were tested: the nearest are below.",
    "none": "Nothing was tested yet.",
}


class Question(NamedTuple):
    """The form.

    Attributes:
        fields: as `FIELDS`, with the project's own axes.
        typed: the text of each field by its parameter, as it was typed.
        text: the pasted text.
        errors: why a field can't be read, by its parameter; that of the text is under ``text``.
        wanted: the combination, unless there are errors; None if nothing was typed.
    """

    fields: Mapping[str, tuple[str, str, str]]
    typed: Mapping[str, str]
    text: str
    errors: Mapping[str, str]
    wanted: Wanted | None


class Evidence(NamedTuple):
    """A tested combination in an answer.

    Attributes:
        axes: each with its value in words, and whether it differs from the question there.
    """

    state: str
    word: str
    found: Newest
    axes: list[tuple[str, str, bool]]


class Answer(NamedTuple):
    """An answer, with the tested combinations, and the nearest one that works if this one doesn't."""

    state: str
    headline: str
    closeness: Closeness
    reason: str
    evidence: list[Evidence]
    works: Evidence | None


def own_axes(cells: Iterable[Cell]) -> dict[str, str]:
    """The project's own axes of cells, each with one of its values."""
    return {axis: value for cell in cells for axis, value in cell.extra}


def fields(own: Mapping[str, str] = {}) -> dict[str, tuple[str, str, str]]:
    """The fields of the form, with those of a project's own axes, each with an example."""
    return FIELDS | {axis: (axis, axis, own[axis]) for axis in sorted(own)}


def question(filters: Filters, text: str = "", own: Mapping[str, str] = {}) -> Question:
    """The question in the fields of the form, and in a pasted text; what is typed in a field counts more.

    Args:
        own: the project's own axes, each with an example.
    """
    given = filters.given
    typed = {name: given.get(name, "") for name, *_ in fields(own).values()}
    errors: dict[str, str] = {}
    found: dict[str, str] = {}
    if text.strip():
        try:
            typed |= {name: said for name, said in pasted(text).items() if not typed[name]}
        except MatrixError as error:
            errors["text"] = str(error)
    for axis, (name, *_) in fields(own).items():
        try:
            if typed[name]:
                found[axis] = _READ[axis](typed[name]) if axis in _READ else _own(axis, typed[name])
        except MatrixError as error:
            errors[name] = str(error)
    return Question(fields(own), typed, text, errors, Wanted.of(found) if found and not errors else None)


def pasted(text: str) -> dict[str, str]:
    """The fields in the output of ``pip freeze`` or ``pip list``, a requirements.txt, a uv.lock or a poetry.lock.

    Raises:
        MatrixError: it names neither transformers nor torch, or not one version of one of them.
    """
    if len(text) > LONGEST:
        raise MatrixError(
            f"this is longer than {LONGEST:,} characters: the lines of transformers, torch and flash-attn are enough"
        )
    found: dict[str, set[str]] = {}
    for name, version in _packages(text):
        if name in ("transformers", "torch", *_FLASH_PACKAGES):
            found.setdefault(name, set()).add(version)
    for name, versions in found.items():
        if len(versions) > 1:
            raise MatrixError(f"{name} is there as {' and '.join(sorted(versions))}: type the one that you have")
    if not found.keys() & {"transformers", "torch"}:
        raise MatrixError("neither transformers nor torch is in this text, as in the line torch==2.11.0")
    flash = [f"{name} {found[name].pop()}" for name in _FLASH_PACKAGES if name in found]
    if len(flash) > 1:
        raise MatrixError(f"{' and '.join(flash)} are there: type the one that you use")
    fields = {FIELDS[axis][0]: found[axis].pop() for axis in ("transformers", "torch") if axis in found}
    return fields | {"fa": flash[0] if flash else "none"}


def _packages(text: str) -> Iterator[tuple[str, str]]:
    """The packages in a text, with their versions.

    Raises:
        MatrixError: one that matters has a range or an address without a version.
    """
    if locked := _LOCKED.findall(text):
        yield from ((_normal(name), version) for name, version in locked)
        return
    for match in _PACKAGE.finditer(text):
        name, sign, version = _normal(match["name"]), match["sign"], match["version"]
        if name not in ("transformers", "torch", *_FLASH_PACKAGES) or (sign.isspace() and not version[0].isdigit()):
            continue
        if sign == "@":
            file = "[-_.]".join(name.split("-"))
            wheel = re.search(rf"{file}-(\d[^-/]*)(?:-|\.tar)", unquote(version))
            if wheel is None:
                raise MatrixError(f"{match[0].strip()[:100]} has no version: type it")
            version = wheel[1]
        elif sign[0] in "<>~!":
            raise MatrixError(f"{match[0].strip()[:100]} is a range: type the release that you have")
        yield name, version


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(names: str, example: str, text: str) -> str:
    text = text.strip().strip("\"'`,;")
    if re.search(r"[<>~!*,]", text):
        raise MatrixError(f"{text[:60]!r} is a range: one release, such as {example}")
    match = re.fullmatch(rf"(?i:(?:{names})[\s=:-]*)?[vV]?(\d\S*)", text)
    try:
        return checked(match[1] if match else text)
    except MatrixError:
        raise MatrixError(f"{text[:60]!r} isn't a release such as {example}") from None


def _python(text: str) -> str:
    short = re.fullmatch(r"(?i:python|py|cp)?\s*(3)(\d{1,2})", text.strip())
    return f"{short[1]}.{short[2]}" if short else _version("c?python|py|cp", "3.12", text)


def _flash_attention(text: str) -> str:
    text = text.strip().strip("\"'`,;").lower()
    if text in ("none", "no", "without", "-"):
        return "none"
    if text == "torch":
        return "torch"
    match = _FLASH.fullmatch(text) or re.fullmatch(r"(?P<kind>)v?(?P<version>\d[\w.+]*)", text)
    kind = match and (match["kind"] or (match["version"] or "2").partition(".")[0])
    if kind not in ("2", "3", "4"):
        raise MatrixError(f"{text[:60]!r} isn't a FlashAttention such as flash-attn 2.8.3, fa4, torch or none")
    return f"fa{kind}"


def _own(axis: str, text: str) -> str:
    text = text.strip().lower()
    return text if re.fullmatch(WORD, text) else _version(re.escape(axis).replace("_", "[-_]"), "0.18", text)


_READ: Mapping[str, Callable[[str], str]] = {
    "transformers": lambda text: _version("transformers", "5.9.1", text),
    "torch": lambda text: _version("torch|pytorch", "2.11.0+cu130", text),
    "flash_attention": _flash_attention,
    "python": _python,
}


def shown(wanted: Wanted, judged: Judged) -> Answer:
    """An answer, with at most five tested combinations as its evidence."""
    asked = wanted.asked
    patches = [asked[axis] for axis in ("transformers", "torch") if axis in asked]
    exact = judged.exact and patches and all(one.count(".") >= 2 for one in patches)
    closeness: Closeness = "patch" if exact else "minor"
    if judged.verdict == "refused":
        closeness = "rule"
    elif not judged.found:
        closeness = "neighbour" if judged.near else "none"
    state, headline, _ = HEADLINES[judged.verdict]
    kind = judged.found[0].past.summary.kind if judged.found and judged.verdict == "failed" else None
    tested = judged.found or judged.near[:3] if closeness != "rule" else []
    return Answer(
        state,
        f"{headline}: {kind}" if kind else headline,
        closeness,
        "; ".join(one.reason for one in judged.refusals) if closeness == "rule" else judged.reason,
        [evidence(one, asked) for one in tested[:5]],
        evidence(judged.works, asked) if judged.works else None,
    )


def evidence(found: Newest, asked: Mapping[str, str] = {}) -> Evidence:
    """A tested combination, as the evidence for what was asked."""
    verdict = verdict_of(found)
    state, _, word = HEADLINES[verdict]
    other = differs(found, asked)
    labels = {axis: label for axis, (_, label, _) in FIELDS.items()} | {axis: axis for axis, _ in found.cell.extra}
    axes = [
        (axis, common.KERNELS.get(text, text) if axis == "flash_attention" else f"{label} {text}", axis in other)
        for axis, label in labels.items()
        if (text := value(found, axis))
    ]
    return Evidence(state, word or str(found.past.summary.kind or verdict), found, axes)


def minor(version: str) -> str:
    """The minor release of a version, as cells are named."""
    return ".".join(map(str, release(version)[:2]))

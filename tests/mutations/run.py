"""Mutations prove the proof: is each change of transformers refused, red, or still right?

``python tests/mutations/run.py`` tries every mutant on the installed transformers and prints a line for each. Silent ones, wrong
without a word from `install()`, `status()`, ``kernel-compat check`` or ``kernel-compat prove``, make its exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from linked import linked_copy, replace_text
from mutations.mutants import MUTANTS, Mutant

#: The verdicts, in the order in which the table counts them.
_WORDS = ("red", "refused", "right", "silent")


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        mutant: its name.
        word: ``red``: something says so; ``refused``: its wrong results are errors; ``right``: no result changed;
            ``silent``: results are wrong, and nothing says so; ``absent``: the release has nothing to change; ``invalid``: eager
            attention doesn't work either, even without padding and caches.
        caught_by: what says so, or the first error.
        wrong: the wrong results.
    """

    mutant: str
    word: str
    caught_by: str = ""
    wrong: tuple[str, ...] = ()


class Bench:
    """A copy of the installed transformers to be changed, and a process that says what is found on it."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("transformers")
        assert spec is not None
        assert spec.origin is not None
        original = Path(spec.origin).parent
        self.release = importlib.metadata.version("transformers")
        self.folder = folder
        self.copy = folder / "path" / "transformers"
        linked_copy(original, self.copy)
        self.texts = {
            str(path.relative_to(self.copy)): path.read_text(encoding="utf-8") for path in self.copy.rglob("*.py")
        }
        environment = {**os.environ, "KERNEL_COMPAT_UNPROVEN": "allow", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("probe.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.usual: list[str] = []
        self.ignored: list[str] = []
        if "modules" not in (written := self._ask(write=True)):
            raise RuntimeError(f"nothing is expected of this release: {written['red']}")
        found = self._ask()
        if found["red"]:
            self.usual = found["red"]
            found = self._ask()
        self.ignored = [key for key, text in found["results"].items() if text.startswith("wrong")]
        #: The results that aren't right without a mutation.
        self.before = {key: text for key, text in found["results"].items() if text != "right"}

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, names: Any = None, **more: Any) -> dict[str, Any]:
        found = self.folder / "found.json"
        found.unlink(missing_ok=True)
        request = {
            "path": str(self.copy.parent),
            "names": dict(names or {}),
            "expected": str(self.folder / "expected.pt"),
            "found": str(found),
            "usual": self.usual,
            "ignored": self.ignored,
            **more,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())["status"]
        if not found.exists():
            return {"red": [f"the process ended with {status}"], "results": {}}
        return dict(json.loads(found.read_text()))

    def try_(self, mutant: Mutant) -> Verdict:
        """Apply a mutant, see what is found, and undo it."""
        changed = mutant.apply(self.texts.items)
        if not changed:
            return Verdict(mutant.name, "absent")
        for path, text in changed.items():
            replace_text(self.copy / path, text)
        try:
            found = self._ask(mutant.names)
        finally:
            for path in changed:
                replace_text(self.copy / path, self.texts[path])
        return self._verdict(mutant, found)

    def _verdict(self, mutant: Mutant, found: dict[str, Any]) -> Verdict:
        if "invalid" in found:
            return Verdict(mutant.name, "invalid", found["invalid"])
        results = {key: text for key, text in found["results"].items() if text != self.before.get(key, "right")}
        wrong = tuple(f"{key} {text}" for key, text in results.items() if text.startswith("wrong"))
        errors = [f"{key}: {text}" for key, text in results.items() if not text.startswith(("wrong", "right"))]
        if found["red"]:
            return Verdict(mutant.name, "red", found["red"][0], wrong)
        if wrong:
            return Verdict(mutant.name, "silent", "", wrong)
        return Verdict(mutant.name, "refused" if errors else "right", errors[0] if errors else "")


@contextmanager
def bench() -> Iterator[Bench]:
    """A bench in a folder of its own, beside the installed package where that can be: there files can be linked."""
    with tempfile.TemporaryDirectory(prefix="mutations-", dir=os.environ.get("MUTATIONS_FOLDER")) as folder:
        made = Bench(Path(folder))
        try:
            yield made
        finally:
            made.close()


def table(documents: Sequence[dict[str, Any]]) -> str:
    """The page of the verdicts that ``--json`` has written, one for each release."""
    releases = [str(document["transformers"]) for document in documents]
    found = [{one["mutant"]: Verdict(**one) for one in document["verdicts"]} for document in documents]
    lines = [*_ABOUT, _row("", *releases), "|---" * (len(releases) + 1) + "|"]
    counts = {word: [str(sum(one.word == word for one in own.values())) for own in found] for word in _WORDS}
    lines += [_row(word, *numbers) for word, numbers in counts.items()]
    lines += ["", _row("change", *releases), "|---" * (len(releases) + 1) + "|"]
    for mutant in MUTANTS:
        own = [one.get(mutant.name, Verdict(mutant.name, "absent")) for one in found]
        if any(one.word in _WORDS for one in own):
            lines.append(_row(mutant.name, *(_said(one) for one in own)))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _said(verdict: Verdict) -> str:
    """A verdict with what caught it, in a few words."""
    if verdict.word not in _WORDS:
        return "-"
    caught = re.sub(r"<FrameSummary.*", "", verdict.caught_by).replace("|", "\\|")
    by = {"status": "`status()`", "install warns": "`install()`", "install raises": "`install()`", "check": "`check`"}
    where = next((name for start, name in by.items() if caught.startswith(start)), "")
    if found := re.match(r"prove (\w+): .*?(wrong|lost|crashed)", caught):
        where = f"`prove {found[1]}`: {found[2]}"
    elif verdict.word == "refused":
        kind = re.search(r"\b(\w+(?:Error|Exception))\b", caught)
        where = kind[1] if kind else ""
    return f"{verdict.word}: {where}" if where else verdict.word


#: The head of the page.
_ABOUT = (
    "# Mutations",
    "",
    "Does the library notice a release that renames or changes what it depends on? `nox -s mutations` tries: in a copy of transformers one",
    "name or behaviour is changed, tiny models run there under `flash_attention_reference`, and their results are compared with those of",
    "eager attention on the unchanged copy: padded, packed, cached, static caches, windows, generation, gradients, compiled models.",
    "",
    "| verdict | |",
    "|---|---|",
    "| red | `install()` warns or raises, or `status()`, `check` or `prove` fails |",
    "| refused | wrong results are errors |",
    "| right | every result is that of the unchanged copy |",
    "| silent | a result is wrong, and nothing says so |",
    "",
    "A copy in which eager attention raises errors without padding and caches isn't counted. Written by `tests/mutations/run.py --table`: edits are lost.",
    "",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants; returns 1 if one is silent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression for the names of the mutants")
    parser.add_argument("--json", help="write the verdicts to this file as well")
    parser.add_argument(
        "--table", nargs="+", metavar="FILE", help="write what --json has written to the first file, as a page"
    )
    options = parser.parse_args(arguments)
    if options.table:
        page, *documents = map(Path, options.table)
        page.write_text(table([json.loads(path.read_text()) for path in documents]))
        return 0
    verdicts = []
    with bench() as made:
        print(
            f"transformers {made.release}; not right without a mutation: {made.before or 'nothing'}; said: {made.usual}"
        )
        for mutant in MUTANTS:
            if not re.search(options.only, mutant.name):
                continue
            start = time.monotonic()
            verdict = made.try_(mutant)
            verdicts.append(verdict)
            print(
                f"{verdict.word:8} {time.monotonic() - start:5.1f} s  {mutant.name}: "
                f"{verdict.caught_by or '; '.join(verdict.wrong[:4])}"[:300],
                flush=True,
            )
            if options.json:
                document = {"transformers": made.release, "verdicts": [one._asdict() for one in verdicts]}
                Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return int(any(verdict.word == "silent" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())

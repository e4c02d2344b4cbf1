"""Words of messages, and printable text."""

import re

from kernel_compat_atlas.words import plural

__all__ = ["clean", "plural"]

# A sequence with its parameters, a string with its terminator, or a single character. A string contains no other sequence, so that
# text with a thousand unterminated ones is read once only.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# Control characters except tab and newline, bidirectional controls, and surrogates.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """The output of a program, without terminal control sequences and invisible characters."""
    if text.isprintable():  # most texts are, and a page has thousands
        return text
    text = _ANSI.sub("", text.replace("\r\n", "\n")).replace("\r", "\n")
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", text)

"""A badge: an SVG image with a label and a value. Its text says everything that its colour does."""

from __future__ import annotations

from typing import Literal
from xml.sax.saxutils import escape, quoteattr

Mood = Literal["good", "bad", "unknown"]

_COLOURS: dict[Mood, str] = {"good": "#2a7b2a", "bad": "#b3261e", "unknown": "#5c5c5c"}
#: Font metrics in units of the image. `textLength` makes the text fit with any other font.
_CHARACTER, _MARGIN = 6.6, 6.0


def svg(label: str, text: str, mood: Mood) -> str:
    """The badge as SVG; `mood` sets its colour."""
    left, right = (len(part) * _CHARACTER + 2 * _MARGIN for part in (label, text))
    said = quoteattr(f"{label}: {text}")

    def part(words: str, start: float, width: float) -> str:
        return (
            f'<text x="{start + _MARGIN:.1f}" y="14" textLength="{width - 2 * _MARGIN:.1f}" '
            f'lengthAdjust="spacingAndGlyphs">{escape(words)}</text>'
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.1f}" height="20" role="img" aria-label={said}>'
        f"<title>{escape(label)}: {escape(text)}</title>"
        f'<rect width="{left:.1f}" height="20" fill="#3d3d3d"/>'
        f'<rect x="{left:.1f}" width="{right:.1f}" height="20" fill="{_COLOURS[mood]}"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{part(label, 0, left)}{part(text, left, right)}</g></svg>\n"
    )

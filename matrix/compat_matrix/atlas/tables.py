"""The history of a seam as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .releases import Release
from .scan import Event


def heading(distribution: str, releases: Sequence[Release]) -> str:
    """The releases that were read, and the Python that each requires."""
    first, last = releases[0].version, releases[-1].version
    pythons: dict[str, str] = {}
    for release in releases:
        python = release.file.requires_python or "any"
        if python != next(reversed(pythons.values()), None):
            pythons[str(release.version)] = python
    python = ", ".join(f"{python} (since {version})" for version, python in pythons.items())
    many = f"{len(releases)} releases, {first} to {last}" if len(releases) > 1 else f"{first}"
    return f"{distribution}: {many}; Python {python}"


def history_table(events: Sequence[Event]) -> Table:
    """A line for each change."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        table.add_row(f"  {when(event)}", _what(event))
    return table


def when(event: Event) -> str:
    """The release of a change."""
    if event.what == "vanished":
        return f"gone from {event.release.version}"
    return f"since {event.release.version}{' or before' if event.what == 'there' else ''}"


def _what(event: Event) -> Text:
    if event.what == "vanished":
        return Text("")
    text = Text(str(event.found))
    for name in event.new:
        text.highlight_regex(rf"(?<=[(* ]){re.escape(name)}(?=[,)=])", "bold green")
    if event.gone:
        text.append(f"  without {', '.join(event.gone)}", "red")
    if event.found.home:
        text.append(f"  from {event.found.home}", "dim")
    return text

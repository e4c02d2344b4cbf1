"""The progress of a run: a live table in a terminal, elsewhere a line per cell."""

import time
from collections import Counter
from collections.abc import Callable
from statistics import mean

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .cells import Cell
from .results import CellResult
from .views.common import SIGNS, STYLES, counted, duration
from .words import plural


class Progress(Live):
    """The progress of a run, with the number of its cells and of those that run at a time."""

    def __init__(self, total: int, jobs: int, console: Console) -> None:
        self.total, self.jobs = total, jobs
        self.counts: Counter[str] = Counter()
        self.running: dict[Cell, float] = {}
        #: The end of the log of a cell that runs.
        self.log_end: Callable[[Cell], str] = lambda cell: ""
        self._spent: dict[Cell, float] = {}
        self._began = time.monotonic()
        super().__init__(console=console, refresh_per_second=4, transient=True)

    def started(self, cell: Cell) -> None:
        """Record the start of a cell; without effect if the cell has ended already."""
        if cell not in self._spent:  # another machine's message may arrive late
            self.running[cell] = time.monotonic()

    def ended(self, result: CellResult) -> None:
        """Record the result of a cell and print a line for it."""
        self._spent[result.cell] = result.seconds
        self.running.pop(result.cell, None)
        self.counts[result.verdict] += 1
        line = Text(f"{SIGNS[result.verdict]} {len(self._spent)}/{self.total} {result.cell} ")
        line.append(f"{result.verdict}{f' ({result.kind})' if result.kind else ''}", STYLES[result.verdict])
        line.append(f" {result.seconds:.1f} s{f': {result.reason}' if result.reason else ''}")
        self.console.print(line, soft_wrap=True, highlight=False)

    def get_renderable(self) -> Table:
        """The table with the running cells."""
        table = Table.grid(padding=(0, 2))
        ended, to_go = len(self._spent), self.total - len(self._spent)
        left = duration(mean(self._spent.values()) * to_go / self.jobs) if self._spent else "?"
        table.add_row(
            f"{ended} of {plural(self.total, 'cell')}{f': {counted(self.counts)}' if ended else ''}",
            f"{len(self.running)} running, {to_go - len(self.running)} to go",
            f"{duration(time.monotonic() - self._began)} so far, {left} left",
        )
        for cell, since in list(self.running.items()):
            table.add_row(f"  {cell}", duration(time.monotonic() - since), "")
        return table

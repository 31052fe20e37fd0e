"""The screen, or a log file: tables, and how far a program is."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LOG_WIDTH = 170  # a table's row has a line to itself
LOG_SECONDS = 60.0  # between two lines of a log file


def make_console() -> Console:
    """For the screen, or for a log file."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


class Bar:
    """How far a program is: a bar with the time left on a terminal, gone when it ends; a line a minute in a log file.

    Args:
        total: steps there are; done: how many of them are done already. unit: what they are.
    """

    def __init__(self, console: Console, total: int, unit: str, done: int = 0) -> None:
        self._console, self._total, self._unit, self._first, self._done = console, total, unit, done, done
        self._live = console.is_terminal
        columns = [TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit)]
        left = TimeRemainingColumn(), TextColumn("left")
        self._progress = Progress(*columns, *left, console=console, transient=True, disable=not self._live)
        self._task: TaskID | None = None
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def doing(self, what: str) -> None:
        """What the step that begins now is about; the bar appears with the first."""
        if self._task is None:
            self._task = self._progress.add_task(what, total=self._total, completed=self._done)
        self._progress.update(self._task, description=what)

    def advance(self) -> None:
        """A step is done."""
        self._done += 1
        if self._task is not None:
            self._progress.advance(self._task)
        now = time.monotonic()
        if not self._live and now - self._said >= LOG_SECONDS:
            self._said = now
            left = (now - self._start) / (self._done - self._first) * (self._total - self._done)
            line = f"{self._done:,} of {self._total:,} {self._unit}, about {left / 60:.0f} min left"
            self._console.print(line, markup=False, highlight=False)

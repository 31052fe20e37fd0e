"""What eval.pages does with a journal."""

from pathlib import Path
from typing import Any

from rich.console import Console

from eval.measure.journal import END, read_runs
from eval.report.build import build
from eval.report.files import write_pages, write_report


def run(journal: Path, out: Path, console: Console) -> dict[str, Any]:
    """Write all files of the journal's report; returns it.

    Raises:
        ValueError: it is no journal, or one without its last line.
        OSError: a file could not be written.
        PictureError: a page or the picture could not be drawn.
    """
    runs, end = read_runs(journal)
    if end is None:
        raise ValueError(
            f"{journal} has no line {END!r}, with which eval.speed ends it: it is of an earlier version, or cut off; "
            "measure again with the command in report.md"
        )
    try:
        report = build(end, runs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{journal} is of another version of eval.speed ({type(error).__name__}: {error})") from None
    out.mkdir(parents=True, exist_ok=True)
    write_report(report, out)
    write_pages(report, end, runs, out, console)
    return report

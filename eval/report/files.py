"""Write the files of a report. Files of an earlier run stay until there is something complete to replace them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from drafters.cli.program import Failure
from drafters.common.files import replace_json, replace_text
from drafters.hub.reports import REPORT
from eval.measure.journal import RunJournal
from eval.measure.runner import Run
from eval.report.by_prompt import as_csv, flat, in_report
from eval.report.charts import save, speedups
from eval.report.html import html
from eval.report.page import markdown
from eval.report.tables import say

PAGE, PICTURE, HTML = "report.md", "speedup.png", "report.html"
TABLE, PROMPTS = "report.csv", "prompts.csv"


class PictureError(Failure):
    """The picture could not be drawn; the rest of the report is complete."""


def write_report(report: dict[str, Any], out: Path, journal: RunJournal | None = None) -> None:
    """Write report.json (strict JSON: a NaN is an error), give the journal its final name, and write report.md.

    The pictures and tables of an earlier report are deleted, because they show another run.
    """
    replace_json(out / REPORT, report)
    if journal is not None:
        journal.finish()
    for name in (PICTURE, HTML, TABLE, PROMPTS):
        (out / name).unlink(missing_ok=True)
    replace_text(out / PAGE, markdown(report, Path(PICTURE)))


def write_pages(report: dict[str, Any], end: dict[str, Any], runs: list[Run], out: Path, console: Console) -> None:
    """Write report.csv, prompts.csv, report.html and speedup.png, and print all names.

    Args:
        end: the last line of the journal. runs: the runs before it.
    """
    replace_text(out / TABLE, as_csv(flat(report["rows"])))
    replace_text(out / PROMPTS, as_csv(in_report(end, runs)))
    with drawing(out / REPORT, out / PAGE, HTML):
        replace_text(out / HTML, html(report, end["texts"], runs))
    with drawing(out / REPORT, out / PAGE):
        save(speedups(report), out / PICTURE)
    say(console, ", ".join(str(out / name) for name in (HTML, PAGE, REPORT, PICTURE, TABLE, PROMPTS)))


@contextlib.contextmanager
def drawing(data: Path, page: Path, what: str = "the picture") -> Iterator[None]:
    """Turn any error while ``what`` is drawn into a PictureError that says the other files are complete."""
    try:
        yield
    except Exception as error:
        raise PictureError(
            f"{what} could not be drawn ({type(error).__name__}: {error}); {data} and {page} are complete"
        ) from error

"""The files of a report. What an earlier run left stays until there is something complete to put in its place."""

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
from eval.report.html import html
from eval.report.page import markdown
from eval.report.picture import draw

PAGE, PICTURE, HTML = "report.md", "speedup.png", "report.html"
TABLE, PROMPTS = "report.csv", "prompts.csv"


class PictureError(Failure):
    """The picture could not be drawn; the rest of the report is complete."""


def write_page(found: dict[str, Any], page: str, out: Path, stem: str, console: Console) -> None:
    """The figures as strict JSON and as Markdown, and their names on the screen."""
    out.mkdir(parents=True, exist_ok=True)
    files = out / f"{stem}.md", out / f"{stem}.json"
    replace_json(files[1], found)
    replace_text(files[0], page)
    console.print(f"{files[0]}, {files[1]}", markup=False, highlight=False)


def write_report(report: dict[str, Any], out: Path, journal: RunJournal | None = None) -> None:
    """report.json (strict JSON: a NaN is an error), the journal, if given, under its final name, and report.md.

    The most valuable first; each is replaced at once. The picture and the page of an earlier report go, for they show
    another run.
    """
    replace_json(out / REPORT, report)
    if journal is not None:
        journal.finish()
    for name in (PICTURE, HTML, TABLE, PROMPTS):
        (out / name).unlink(missing_ok=True)
    replace_text(out / PAGE, markdown(report, Path(PICTURE)))


def write_pages(report: dict[str, Any], end: dict[str, Any], runs: list[Run], out: Path, console: Console) -> None:
    """report.csv, prompts.csv, report.html and speedup.png, and all names on the screen.

    Args:
        end: the last line of the journal. runs: those before it.

    Raises:
        PictureError: one of them could not be drawn.
    """
    replace_text(out / TABLE, as_csv(flat(report["rows"])))
    replace_text(out / PROMPTS, as_csv(in_report(end, runs)))
    with drawing(out / REPORT, out / PAGE, HTML):
        replace_text(out / HTML, html(report, end["texts"], runs))
    with drawing(out / REPORT, out / PAGE):
        draw(report, out / PICTURE)
    names = HTML, PAGE, REPORT, PICTURE, TABLE, PROMPTS
    console.print(", ".join(str(out / name) for name in names), markup=False, highlight=False)


@contextlib.contextmanager
def drawing(data: Path, page: Path, what: str = "the picture") -> Iterator[None]:
    """Draw the last of a report's files, when the others are written; ``what``: of which the message speaks.

    Raises:
        PictureError: whatever stopped the drawing.
    """
    try:
        yield
    except Exception as error:
        raise PictureError(
            f"{what} could not be drawn ({type(error).__name__}: {error}); {data} and {page} are complete"
        ) from error

"""The files of a report. What an earlier run left stays until there is something complete to put in its place."""

import json
import time
from pathlib import Path
from typing import IO, Any

from drafters.program import Failure
from drafters.provenance import replace_text
from eval.page import markdown
from eval.picture import draw

REPORT, PAGE, PICTURE, JOURNAL = "report.json", "report.md", "speedup.png", "measurements.jsonl"
UNFINISHED = "measurements.unfinished.jsonl"


class PictureError(Failure):
    """The picture could not be drawn; the rest of the report is complete."""


def open_journal(out: Path, facts: dict[str, Any]) -> IO[str]:
    """The journal of a run: the environment in the first line, then one line a run.

    It bears the name ``measurements.unfinished.jsonl`` until the report is written; one that a run before left
    unfinished is kept under its date.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / UNFINISHED
    if path.exists():
        date = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
        path.rename(path.with_suffix(f".{date}.jsonl"))
    journal = path.open("w", encoding="utf-8")
    journal.write(json.dumps({"environment": facts}, allow_nan=False) + "\n")
    journal.flush()
    return journal


def write_report(report: dict[str, Any], out: Path) -> None:
    """report.json (strict JSON: a NaN is an error), the journal under its final name, and report.md.

    The most valuable first; each is replaced at once. The picture of an earlier report goes, for it shows another run.
    """
    replace_text(out / REPORT, json.dumps(report, indent=2, allow_nan=False) + "\n")
    (out / UNFINISHED).replace(out / JOURNAL)
    (out / PICTURE).unlink(missing_ok=True)
    replace_text(out / PAGE, markdown(report, Path(PICTURE)))


def draw_picture(report: dict[str, Any], out: Path) -> None:
    """speedup.png.

    Raises:
        PictureError: whatever stopped the drawing.
    """
    try:
        draw(report, out / PICTURE)
    except Exception as error:
        raise PictureError(
            f"the picture could not be drawn ({type(error).__name__}: {error}); {out / REPORT} and {out / PAGE} are "
            "complete"
        ) from error

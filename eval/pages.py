"""The files of a report of ``eval.speed`` again, from its measurements.jsonl alone.

    python -m eval.pages runs/speed/stdlib [--out F]

Needs neither the models nor the prompts. Writes report.json, report.md, report.html and speedup.png into --out, or
beside the journal: after a kill while they were written, or for the pages of a newer version.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_folder

JOURNAL = "measurements.jsonl"


def main(arguments: list[str] | None = None) -> None:
    """Read the journal and write the pages."""
    parser = CommandLine("eval.pages", __doc__)
    parser.add_argument("folder", type=Path, help="of a finished report, the `out` of its config")
    parser.add_argument("--out", type=Path, help="folder; default: the report's own")
    parsed = parser.parse(arguments)
    journal = parsed.folder if parsed.folder.name == JOURNAL else parsed.folder / JOURNAL
    if not journal.is_file():
        raise ValueError(
            f"there is no {journal}; give the folder of a report: python -m eval.speed writes it at its end"
        )
    out = parsed.out or journal.parent
    check_folder(out)

    from eval.pages_run import run
    from eval.report.screen import make_console

    run(journal, out, make_console())


if __name__ == "__main__":
    run_program(main)

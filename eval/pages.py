"""Make the files of a report again, only from its measurements.jsonl.

    python -m eval.pages runs/speed/stdlib [--out F]

Needs neither the models nor the prompts. Writes report.json, report.md, report.html and speedup.png into --out, or
beside the journal: after a kill during writing, or for the pages of a newer version.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_folder

JOURNAL = "measurements.jsonl"


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.pages", __doc__)
    parser.add_argument("folder", type=Path, help="folder of a finished report, the `out` of its config")
    parser.add_argument("--out", type=Path, help="folder; default: the report's own")
    parsed = parser.parse(arguments)
    journal = parsed.folder if parsed.folder.name == JOURNAL else parsed.folder / JOURNAL
    if not journal.is_file():
        raise ValueError(f"there is no {journal}; give the folder of a report that python -m eval.speed has finished")
    out = parsed.out or journal.parent
    check_folder(out)

    from eval.report.speed import write_again
    from eval.report.tables import make_console

    write_again(journal, out, make_console())


if __name__ == "__main__":
    run_program(main)

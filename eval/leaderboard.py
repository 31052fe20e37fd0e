"""The leaderboard: every method of the committed reports, one table per target and prompt set.

    python -m eval.leaderboard [--results docs/results] [--out docs]

Reads every report.json and lossless.json below --results, and the targets' names in targets.yaml there. Writes
leaderboard.md and leaderboard.html into --out.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_folder
from drafters.hub.reports import REPORT

RESULTS, OUT = Path("docs/results"), Path("docs")


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.leaderboard", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder; default: {RESULTS}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder; default: {OUT}")
    parsed = parser.parse(arguments)
    if not any(parsed.results.rglob(REPORT)):
        raise ValueError(f"there is no {REPORT} in {parsed.results} or below it; python -m eval.speed writes them")
    check_folder(parsed.out)

    from eval.report.leaderboard import run
    from eval.report.tables import make_console

    run(parsed.results, parsed.out, make_console())


if __name__ == "__main__":
    run_program(main)

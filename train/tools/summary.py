"""The summary of a run: summary.json and summary.png, from its run.json and metrics.jsonl alone.

    python -m train.tools.summary runs/stdlib-eagle

A run writes them when it ends, is interrupted or diverges; this makes them again, for example after a kill.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from train.run.summary import answers_line, write_summary


def main(arguments: list[str] | None = None) -> None:
    """Make the summary of a run again."""
    parser = CommandLine("train.tools.summary", __doc__)
    parser.add_argument("run", type=Path, help="run folder, the `out` of its config")
    run = parser.parse(arguments).run
    summary = write_summary(run)
    print(f"{run}: {summary['steps']} steps, {summary['tokens']:,} tokens; {summary['ended'] or 'killed or running'}")
    print(answers_line(summary["heldout_answers"]))
    print(f"{run / 'summary.json'}, {run / 'summary.png'}")


if __name__ == "__main__":
    run_program(main)

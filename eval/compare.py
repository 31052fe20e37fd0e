"""What changed significantly between two reports of ``eval.speed``, drafter by drafter; or one report's trainings.

    python -m eval.compare runs/before runs/after [--out F]
    python -m eval.compare runs/learned/seeds/speed [--over LABEL] [--out F]

Two reports: reads report.json and prompts.csv of both folders. Compares tau, tokens/s and the speedup over plain
decoding on the prompts that both measured, prompt by prompt; the page says what is not compared because machine,
prompts, target or limits differ. Over all tested figures together, two reports of the same thing differ significantly
in at most one of twenty comparisons; tokens/s varies with the machine's load and is not tested. Writes compare.json and
compare.md into --out, or into the second folder.

One report: reads its report.json, and writes trainings.json and trainings.md. Each trained model is a row with its
minutes, positions, acceptance and tau. An entry with a `grid` over trained models of several seeds is one row with the
95% interval over the seeds.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_folder
from drafters.hub import reports
from drafters.hub.reports import REPORT
from eval.report.pairs import differences, read


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.compare", __doc__)
    parser.add_argument("a", type=Path, help="folder of the first report, the `out` of its config")
    parser.add_argument(
        "b", type=Path, nargs="?", help="folder of the second report; without it, the first's trainings"
    )
    parser.add_argument("--out", type=Path, help="folder; default: the last report's")
    parser.add_argument(
        "--over",
        metavar="LABEL",
        action="append",
        default=[],
        help="one report: compare with this entry; default: first",
    )
    parsed = parser.parse(arguments)
    last = parsed.b or parsed.a
    out = parsed.out or (last.parent if last.name == REPORT else last)
    if parsed.b is not None:
        if parsed.over:
            raise ValueError("--over compares trainings within one report, found two reports; leave one out")
        a, b = read(parsed.a), read(parsed.b)
        differences(a[0], b[0])
    else:
        reports.read(parsed.a)
    check_folder(out)

    from eval.report.changes import compare_and_write
    from eval.report.tables import make_console
    from eval.report.trainings import write_trainings

    if parsed.b is None:
        write_trainings(parsed.a, parsed.over, out, parsed.command, make_console())
    else:
        compare_and_write(a, b, [str(parsed.a), str(parsed.b)], out, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)

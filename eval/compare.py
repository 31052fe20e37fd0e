"""What changed significantly between two reports of ``eval.speed``, drafter by drafter.

    python -m eval.compare runs/before runs/after [--out F]

Reads report.json and prompts.csv of both folders. Compares tau, tokens/s and the speedup over plain decoding on the
prompts that both measured, prompt by prompt; the page says what is not compared because machine, prompts, target or
limits differ. Over all tested figures together, two reports of the same thing
differ significantly in at most one of twenty comparisons; tokens/s varies with the machine's load and is not tested.
Writes compare.json and compare.md into --out, or into the second folder.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_folder
from drafters.hub.reports import REPORT
from eval.report.pairs import differences, read


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.compare", __doc__)
    parser.add_argument("a", type=Path, help="folder of the first report, the `out` of its config")
    parser.add_argument("b", type=Path, help="folder of the second report")
    parser.add_argument("--out", type=Path, help="folder; default: the second report's")
    parsed = parser.parse(arguments)
    out = parsed.out or (parsed.b.parent if parsed.b.name == REPORT else parsed.b)
    a, b = read(parsed.a), read(parsed.b)
    differences(a[0], b[0])
    check_folder(out)

    from eval.report.compare import compare_and_write
    from eval.report.tables import make_console

    compare_and_write(a, b, [str(parsed.a), str(parsed.b)], out, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)

"""tau against minutes and positions of training, for one run or several, and what more minutes would give.

    python -m train.tools.curve runs/eagle-5 runs/eagle-10 runs/eagle-20 runs/eagle3-5 ... [--out curve.json]

Runs of one method are points of one curve, each by its end; a single run gives all of its measurements. In a cosine
schedule all but the last are below what a run of these minutes reaches, so several runs show more. A line through tau
over the logarithm of minutes, from three points on, says what a doubling gives.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_file

AHEAD = (2, 4)  # times the longest run


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write the JSON."""
    parser = CommandLine("train.tools.curve", __doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folder, the `out` of a training's config"
    )
    parser.add_argument("--out", type=Path, help="JSON with all points and lines")
    parsed = parser.parse(arguments)
    if missing := [str(run) for run in parsed.runs if not run.is_dir()]:
        raise ValueError(f"there is no folder {missing[0]}; give the `out` of a training's config")
    if parsed.out is not None:
        check_file(parsed.out, "--out")

    from drafters.common.files import replace_json
    from train.run.curve import by_method, fitted

    content = {}
    for method, points in by_method(parsed.runs).items():
        line = fitted(points)
        content[method] = {"points": [point._asdict() for point in points], "line": line and line._asdict()}
        print(f"{method}:")
        for point in points:
            how = "" if point.measured else " (estimated from held-out acceptance)"
            print(f"  {point.minutes:8.1f} minutes {point.positions / 1e6:8.2f}M positions   tau {point.tau:.2f}{how}")
        if line is None:
            print("  no line: it needs three points of different minutes")
            continue
        last = max(point.minutes for point in points)
        more = ", ".join(f"{line.at(last * times):.2f} after {last * times:.0f} minutes" for times in AHEAD)
        print(f"  tau {line.doubling:+.2f} per doubling (off by {line.error:.2f} in the mean); extrapolated: {more}")
    if parsed.out is not None:
        replace_json(parsed.out, {"format_version": 1, "curves": content, "argv": parsed.command})


if __name__ == "__main__":
    run_program(main)

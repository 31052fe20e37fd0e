"""tau of recipes trained with several seeds, and their differences, with intervals.

    python -m eval.seeds runs/ablations/stdlib-eagle-inputs [--over "as shipped"]

Reads the report.json of ``eval.speed`` in the folder. A recipe is an entry with a ``grid`` over trained models, in the
same order of seeds; differences are taken seed by seed, because equal seeds see equal data. The 95% intervals (of
Student's t) are over the seeds, on the prompts of that report. Writes seeds.json and seeds.md beside it.
"""

import statistics
from pathlib import Path
from typing import Any

from drafters.cli.program import CommandLine, run_program
from drafters.hub.reports import REPORT, read
from eval.report.tables import make_console, run_again, table, write_page

# Two-sided 95% quantiles of Student's t, for 1 to 9 degrees of freedom.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
TRAINED = {"checkpoint", "draft_model", "draft_models"}  # options that name a trained model


def compare(report: dict[str, Any], over: list[str]) -> list[dict[str, Any]]:
    """Return tau by seed, its mean, and the percentage over each entry of ``over``, for every recipe and temperature.

    ``over`` may name an entry without seeds; default: the first recipe.
    """
    taus: dict[tuple[float, str], list[float]] = {}
    recipes: dict[str, int] = {}
    for row in report["rows"]:
        if row["tau"] is None:  # stock generation and engines that report no steps
            continue
        entry = row.get("entry", row["drafter"])
        taus.setdefault((row["temperature"], entry), []).append(row["tau"])
        if TRAINED & (row.get("grid") or {}).keys():
            recipes[entry] = len(taus[row["temperature"], entry])
    counts = set(recipes.values())
    if len(counts) != 1 or not 2 <= min(counts) <= len(STUDENT) + 1:
        raise ValueError(
            f"every recipe needs a grid over the same number of trained models, 2 to {len(STUDENT) + 1}; "
            f"found {recipes or 'none'}: give each entry grid: {{checkpoint: [its seeds]}}"
        )
    entries = dict.fromkeys(entry for _, entry in taus)
    if unknown := set(over) - entries.keys():
        raise ValueError(f"--over {sorted(unknown)} is no entry of the report; it has {list(entries)}")
    rows = []
    for (temperature, entry), found in taus.items():
        if entry in recipes:
            row = {"recipe": entry, "temperature": temperature, "tau_by_seed": found, **mean("tau", found), "over": {}}
            for other in over or list(recipes)[:1]:
                base = taus.get((temperature, other))
                if base and other != entry:
                    paired = zip(found, base if other in recipes else base * len(found), strict=True)
                    row["over"][other] = mean("percent", [100 * (tau / than - 1) for tau, than in paired])
            rows.append(row)
    return rows


def mean(name: str, values: list[float]) -> dict[str, Any]:
    """Return the mean as ``name`` and its 95% interval as ``name_ci``, for normally distributed values."""
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    middle = statistics.mean(values)
    return {name: middle, f"{name}_ci": [middle - half, middle + half]}


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.seeds", __doc__)
    parser.add_argument("report", type=Path, help="folder of a report, the `out` of its config")
    parser.add_argument(
        "--over", metavar="LABEL", action="append", default=[], help="compare with this entry; default: first"
    )
    parsed = parser.parse(arguments)
    file = parsed.report / REPORT
    if not file.is_file():
        raise ValueError(f"there is no {file}; measure first: python -m eval.speed --config F out={parsed.report}")
    report = read(file)
    rows = compare(report, parsed.over)
    made = {"format_version": 1, "report": REPORT, "commit": report["environment"]["commit"], "argv": parsed.command}
    write_page({**made, "rows": rows}, page(rows, report, parsed.command), parsed.report, "seeds", make_console())


def page(rows: list[dict[str, Any]], report: dict[str, Any], argv: list[str]) -> str:
    """Return ``seeds.md``."""

    def gain(found: dict[str, Any] | None) -> str:
        return "-" if found is None else "{:+.1f}% [{:+.1f}, {:+.1f}]".format(found["percent"], *found["percent_ci"])

    others = list(dict.fromkeys(other for row in rows for other in row["over"]))
    seeds = [f"seed {number}" for number in range(1, len(rows[0]["tau_by_seed"]) + 1)]
    lines = [
        [row["recipe"], f"{row['temperature']:g}", *(f"{tau:.2f}" for tau in row["tau_by_seed"])]
        + ["{:.2f} [{:.2f}, {:.2f}]".format(row["tau"], *row["tau_ci"])]
        + [gain(row["over"].get(other)) for other in others]
        for row in rows
    ]
    about = [
        f"- tokens committed per target forward, on {report['environment']['prompt_set']['prompts']} prompts",
        "- in brackets the 95% interval over the seeds (Student's t); differences are taken seed by seed",
    ]
    head = ["recipe", "T", *seeds, "tau", *(f"over {other}" for other in others)]
    return "\n".join(["# tau by recipe and seed", "", *about, "", *table(head, lines), "", *run_again(argv)])


if __name__ == "__main__":
    run_program(main)

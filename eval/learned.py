"""The table of learned drafters that were trained from one store: what each cost, and what it gains, by category.

    python -m eval.learned runs/learned/speed

Reads the report.json of ``eval.speed`` in the folder, whose labels are ``drafter; form``, with the forms chain, tree
and auto, and the drafters' checkpoints. Writes learned.json and learned.md beside the report.
"""

import json
import math
from pathlib import Path
from typing import Any

from drafters.cli.program import CommandLine, run_program
from drafters.hub.reports import REPORT, read
from eval.report.tables import machine_line, make_console, number, run_again, speedup_with_interval, table, write_page

FORMS = ("chain", "tree", "auto")
Row = dict[str, Any]


def collect(report: Row) -> list[Row]:
    """One row per temperature and drafter: its costs, and by form the row of the report.

    Raises:
        ValueError: no label of the report is of the form ``drafter; form``.
    """
    entries = {entry.get("label"): entry for entry in report["environment"]["config"]["drafters"]}
    found: dict[tuple[float, str], Row] = {}
    for row in report["rows"]:
        name, _, form = row["drafter"].rpartition("; ")
        if name and form in FORMS:
            one = found.setdefault((row["temperature"], name), {"drafter": name, "temperature": row["temperature"]})
            one |= {**costs(entries[row["drafter"]], row), form: row}
    if not found:
        names = ", ".join(row["drafter"] for row in report["rows"])
        raise ValueError(f"no label is 'drafter; form', with a form of {', '.join(FORMS)}; the report has {names}")
    return list(found.values())


def costs(entry: Row, row: Row) -> Row:
    """Weights, bytes of captured states per token (bf16), trained tokens and minutes; None: not recorded."""
    from safetensors import safe_open

    folder = Path(entry.get("checkpoint") or entry["draft_model"])
    with safe_open(folder / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    options = config.get("drafter", {})
    states = 1 + len(options.get("taps", [])) + ("exit_layer" in options)
    width = config["target"]["hidden_size"] if "target" in config else config["hidden_size"]
    trained = (row.get("trained") or [{}])[0]
    return {
        "parameters": sum(map(math.prod, shapes)),
        "bytes_per_token": 2 * width * states,
        "tokens": trained.get("tokens"),
        "minutes": trained.get("minutes"),
    }


def page(rows: list[Row], report: Row, argv: list[str]) -> str:
    """Return ``learned.md``."""
    facts = report["environment"]
    lines = ["# Learned drafters from one store", "", *_about(facts), ""]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        some = [row for row in rows if row["temperature"] == temperature]
        lines += [f"## T = {temperature:g}", "", *_costs_table(some), "", *_category_table(some), ""]
    return "\n".join([*lines, *run_again(argv)])


def _about(facts: Row) -> list[str]:
    return [
        f"- {facts['prompt_set']['prompts']} prompts, at most {facts['limits']['max_new_tokens']} new tokens",
        machine_line(facts),
        "- tau: tokens committed per target forward",
        "- accepted: share of a chain's tokens that were accepted, by depth, where all before them were",
        "- KB: captured states of a token in bf16",
    ]


def _costs_table(rows: list[Row]) -> list[str]:
    head = ["drafter", "weights", "KB", "minutes", "positions", "accepted", "chain tau", "tree tau", "auto tau"]
    head += ["draft ms", "verify ms", "speedup: chain", "tree", "auto"]
    lines = []
    for row in rows:
        forms = [row.get(form) for form in FORMS]
        chain = row.get("chain")
        lines.append(
            [
                row["drafter"],
                f"{row['parameters'] / 1e6:.1f}M",
                f"{row['bytes_per_token'] / 1e3:.1f}",
                number(row["minutes"], 1),
                number(row["tokens"] and row["tokens"] / 1e6, 2, "M"),
                " ".join(f"{share:.2f}" for share in (chain or {}).get("n_alpha") or []) or "-",
                *(number(form and form["tau"], 2) for form in forms),
                number(chain and chain["draft_ms"], 1),
                number(chain and chain["verify_ms"], 1),
                *(speedup_with_interval(form) if form else "-" for form in forms),
            ]
        )
    return table(head, lines)


def _category_table(rows: list[Row]) -> list[str]:
    """Tau of chain and tree by category."""
    names = list(dict.fromkeys(name for row in rows for form in FORMS for name in _categories(row.get(form))))

    def cell(row: Row, name: str) -> str:
        taus = [number(_categories(row.get(form)).get(name, {}).get("tau"), 2) for form in ("chain", "tree")]
        return " / ".join(taus)

    return table(
        ["tau of chain / tree", *names], [[row["drafter"], *(cell(row, name) for name in names)] for row in rows]
    )


def _categories(row: Row | None) -> Row:
    return (row or {}).get("categories") or {}


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.learned", __doc__)
    parser.add_argument("report", type=Path, help="folder of a report, the `out` of its config")
    parsed = parser.parse(arguments)
    file = parsed.report / REPORT
    if not file.is_file():
        raise ValueError(f"there is no {file}; measure first: python -m eval.speed --config configs/learned/speed.yaml")
    report = read(file)
    rows = collect(report)
    made = {"format_version": 1, "report": REPORT, "commit": report["environment"]["commit"], "argv": parsed.command}
    write_page({**made, "rows": rows}, page(rows, report, parsed.command), parsed.report, "learned", make_console())


if __name__ == "__main__":
    run_program(main)

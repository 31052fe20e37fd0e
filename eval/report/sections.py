"""The tables of a report, made once for the Markdown page, the HTML page and the screen."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eval.report.tables import Row, number, shown_name, speedup_with_interval

POSITIONS = 8  # of n-alpha, joint and CTAR on a page; the JSON has all
DEFINITIONS = """\
- **tau**: tokens committed over target forwards, over all steps of all prompts (micro); *by prompt*: mean of the
  prompts' tau (macro), in which short answers have the same weight as long ones.
- **n-alpha**: share of the steps with n accepted draft tokens, and more drafted, that accept the next one; n = 0, 1
- **joint**: share of all drafts with 1, 2, 3, ... or more accepted tokens. It is counted; the product of n-alphas
  equals it only if all drafts have one depth.
- **CTAR(w)**: share of all steps, those without a draft included, that commit more than w tokens, bonus included;
  w = 1, 2, 3, ..."""
TWO_ENGINES = """\
n-alpha by depth. One checkpoint has one acceptance in every engine. Differences are in standard errors of two shares
and are significant from 3 on. Intervals are 95%: of a share by its steps, of tau by the bootstrap over prompts."""
ACCURACY = """\
In percent. *right number*: the answer's last number is the reference's. *ROUGE-1*: mean F1 of single words, stemmed.
*BLEU*: of all answers together. A lossless method keeps plain decoding's accuracy, except for near ties in bf16 and, if
sampled, for chance; a **lossy** one may not.
"""

COLUMNS: dict[str, Callable[[Row], str]] = {
    "drafter": shown_name,
    "T": lambda row: f"{row['temperature']:g}",
    "batch": lambda row: str(row["batch"]),
    "tau": lambda row: number(row["tau"], 2),
    "tau, no loops": lambda row: number(row["tau_without_loops"], 2),
    "tokens/s": lambda row: number(row["tokens_per_second"], 1),
    "end to end": lambda row: number(row["end_to_end_tokens_per_second"], 1),
    "speedup": speedup_with_interval,
    "median": lambda row: number(row["speedup_median"], 2, "x"),
    "exact": lambda row: number(row["exact_match"], 3),
    "ppl": lambda row: number(row["perplexity"], 2),
    "J/token": lambda row: number(row["joules_per_token"], 3),
    "draft ms": lambda row: number(row["draft_ms"], 2),
    "verify ms": lambda row: number(row["verify_ms"], 2),
    "commit ms": lambda row: number(row["other_ms"], 2),
    "host ms": lambda row: number(row.get("host_ms"), 2),
    "prefill ms": lambda row: number(row["prefill_ms"], 1),
    "overhead": lambda row: "-" if row["overhead"] is None else f"{row['overhead']:.1%}",
    "drafted": lambda row: number(row["drafted_per_step"], 1),
}


@dataclass
class Section:
    """A table with its title, and a text in Markdown below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    texts: int = 1  # left-aligned columns
    about: str = ""


def columns_of(report: dict[str, Any]) -> dict[str, Callable[[Row], str]]:
    """Return the columns; the batch only if it is not 1."""
    return {name: cell for name, cell in COLUMNS.items() if name != "batch" or report["environment"]["batch"] != 1}


def failed_cells(row: Row, columns: list[str]) -> list[str]:
    """Return the cells of a method that failed; a warning says why."""
    return [
        COLUMNS[name](row) if name in ("drafter", "T", "batch") else "failed" if name == "tau" else "-"
        for name in columns
    ]


def sections(report: dict[str, Any]) -> list[Section]:
    """Return all sections that have rows."""
    rows = report["rows"]
    overall = [_by_batch(report), _accuracy(report), _acceptance(rows), *_two_engines(rows), _by_context(rows)]
    tables = [*overall, *_categories(rows)]
    return [section for section in tables if section.rows]


def best_lines(report: dict[str, Any]) -> list[str]:
    """Return each method's fastest batch size, if there are several sizes."""
    if not isinstance(report["environment"]["batch"], list):
        return []
    return [
        f"highest throughput, {shown_name(row)}, T = {row['temperature']:g}: {number(row['tokens_per_second'], 1)} "
        f"tokens/s at batch {row['batch']}, {number(row['over_plain'], 2)} times plain decoding's highest"
        for row in report["throughput"]
    ]


def _by_batch(report: dict[str, Any]) -> Section:
    """Speeds with the batch sizes across (EAGLE, Table 7)."""
    sizes = report["environment"]["batch"] if isinstance(report["environment"]["batch"], list) else []
    speeds: dict[tuple[str, str], dict[int, str]] = {}
    for row in report["rows"] if sizes else []:
        cell = f"{number(row['tokens_per_second'], 1)} ({number(row['speedup'], 2, 'x')})"
        speeds.setdefault((shown_name(row), f"{row['temperature']:g}"), {})[row["batch"]] = cell
    head = ["drafter", "T", *(f"batch {size}" for size in sizes)]
    cells = [[*key, *(line.get(size, "-") for size in sizes)] for key, line in speeds.items()]
    title = "tokens/s (speedup over plain decoding of the same batch size)"
    return Section(title, head, cells, about="\n".join(f"- {line}" for line in best_lines(report)))


def _accuracy(report: dict[str, Any]) -> Section:
    rows = [row for row in report["rows"] if row.get("accuracy")]
    marks: dict[str, Any] = rows[0]["accuracy"] if rows else {}
    head = ["drafter", "T", *(f"{name}: {mark['metric']} of {mark['answers']}" for name, mark in marks.items())]
    cells = [
        [shown_name(row), f"{row['temperature']:g}", *(number(row["accuracy"][name]["value"], 1) for name in marks)]
        for row in rows
    ]
    notes = []
    for name, mark in marks.items():
        if "unavailable" in mark:
            notes.append(f"- {name}: no {mark['metric']}: {mark['unavailable']}")
        elif mark["cut"]:
            notes.append(
                f"- {name}: {mark['cut']} of plain decoding's {mark['answers']} answers ended at the token limit"
            )
    return Section("Accuracy", head, cells, about="\n".join([*notes, "", ACCURACY]))


def _acceptance(rows: list[Row]) -> Section:
    lines = []
    for row in rows:
        if row.get("joint_alpha"):
            shares = [" ".join(number(x, 2) for x in row[k][:POSITIONS]) for k in ("n_alpha", "joint_alpha", "ctar")]
            place = [shown_name(row), f"{row['temperature']:g}", str(row["batch"])]
            lines.append([*place, number(row["tau"], 2), number(row["tau_by_prompt"], 2), *shares])
    head = ["drafter", "T", "batch", "tau", "by prompt", "n-alpha", "joint", "CTAR"]
    return Section("Acceptance by position", head, lines, about=DEFINITIONS)


def differences(one: Row, other: Row) -> list[float]:
    """Return by depth the number of standard errors between the n-alpha of two rows."""
    return [
        (b - a) / math.sqrt(max(_variance(a, n) + _variance(b, m), 1e-12))
        for (a, n), (b, m) in zip(_reached(one), _reached(other), strict=False)
    ]


def _by_context(rows: list[Row]) -> Section:
    """tau by the length of the text before a step, where texts of several lengths were decoded."""
    rows = [row for row in rows if row.get("by_context") and row["tau"] != 1.0]
    bins = sorted({(one["from"], one["to"]) for row in rows for one in row["by_context"]})
    lines = []
    for row in rows if len(bins) > 1 else []:
        known = {one["from"]: f"{one['tau']:.2f}" for one in row["by_context"]}
        place = [shown_name(row), f"{row['temperature']:g}", str(row["batch"])]
        lines.append([*place, *(known.get(low, "-") for low, _ in bins)])
    head = ["drafter", "T", "batch", *(f"{low:,} to {high:,}" for low, high in bins)]
    return Section("tau by the tokens before a step", head, lines)


def _two_engines(rows: list[Row]) -> list[Section]:
    """A table for every engine's row that has one of ours to compare with."""
    tables: list[Section] = []
    for row in rows:
        ours = [
            other
            for other in rows
            if (other["drafter"], other["temperature"]) == (row.get("beside"), row["temperature"])
        ]
        if not ours or not row["n_alpha"] or not ours[0]["n_alpha"]:
            continue
        depths = min(len(row["n_alpha"]), len(ours[0]["n_alpha"]))
        lines = []
        for each in (ours[0], row):
            shares = [f"{share:.3f} ± {1.96 * math.sqrt(_variance(share, n)):.3f}" for share, n in _reached(each)]
            tau = number(each["tau"], 3) + (" [{:.3f}, {:.3f}]".format(*each["tau_ci"]) if each.get("tau_ci") else "")
            lines.append([shown_name(each), f"{each['steps']:,}", tau, *shares[:depths]])
        lines.append(["difference, in standard errors", "", "", *(f"{x:+.1f}" for x in differences(ours[0], row))])
        head = [f"T = {row['temperature']:g}", "steps", "tau", *(f"depth {depth + 1}" for depth in range(depths))]
        tables.append(Section("Acceptance by depth in two engines", head, lines, about="" if tables else TWO_ENGINES))
    return tables


def _reached(row: Row) -> list[tuple[float, float]]:
    """Return n-alpha by depth with its approximate number of steps."""
    shares, steps = [], float(row["steps"])
    for share in row["n_alpha"]:
        shares.append((share, max(steps, 1.0)))
        steps *= share
    return shares


def _variance(share: float, count: float) -> float:
    """Return the variance of a share, smoothed (Agresti and Coull) so that 0 and 1 are not certain."""
    smooth = (share * count + 1) / (count + 2)
    return smooth * (1 - smooth) / (count + 2)


def _categories(rows: list[Row]) -> list[Section]:
    tables = []
    for kind, shown in (("categories", "category"), ("sub_categories", "sub-category")):
        with_kind = [row for row in rows if kind in row]
        counts = {name: c["prompts"] for row in with_kind for name, c in row[kind].items()}
        cells = [
            [shown_name(row), f"{row['temperature']:g}"]
            + [f"{number(c['speedup'], 2, 'x')} ({number(c['tau'], 2)})" for c in row[kind].values()]
            for row in with_kind
        ]
        head = ["drafter", "T", *(f"{name} ({count})" for name, count in counts.items())]
        tables.append(Section(f"Speedup (tau) by {shown} (prompts)", head, cells))
    return tables

"""Compare the figures of two reports, prompt by prompt, and make the page."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from drafters.common.wording import shortened
from eval.configs import BASELINE
from eval.figures.paired import Figure, change, holm
from eval.report.pairs import MACHINE, Line, Read, differences
from eval.report.tables import run_again, say, table, write_page

Key = tuple[str, float, int]  # method, temperature, batch size
Unit = tuple[str, int]  # a prompt or a batch of prompts: its name and its tokens
ALPHA = 0.05  # over all figures of a comparison together
FIGURES: dict[str, tuple[list[str], Figure]] = {  # the columns, and the figure of their sums
    "tau": (["tokens", "forwards"], lambda sums: sums[..., 0] / sums[..., 1]),
    "tokens/s": (["tokens", "seconds"], lambda sums: sums[..., 0] / sums[..., 1]),
    "speedup": (
        ["pair_tokens", "pair_seconds", "plain_tokens", "plain_seconds"],
        lambda sums: sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3]),
    ),
}
UNTESTED = "tokens/s"  # one run each cannot separate a method from the machine's load
# Standard deviation of the logarithm of a speedup between processes that run the same thing, on all prompts alike:
# placement in memory, sharing of cores. Measured by tests/compare_runs.py of commit 4a677327.
BETWEEN_RUNS = 0.012
FEWEST = 2  # prompts
ABOUT = f"""\
Figures are over the prompts that both reports measured; of several rounds, the median one. A batch counts as one
prompt, and so do the turns of a conversation. In brackets the 95% interval of the paired bootstrap over prompts. *p*:
of a sign-flip test (if both runs were of one thing, the two of a prompt could be swapped), with Holm's method over all
tested lines: two reports of the same thing show a change in at most one of twenty comparisons. A speedup's p and
interval include the difference of two processes of the same thing on all prompts, a standard deviation of
{BETWEEN_RUNS:.1%}, which was measured on a CPU of two cores. tokens/s is not tested: the speed of a machine changes for
all prompts and methods alike, as plain decoding's line shows. The speedup, of methods that take turns, does not depend
on it.
"""


def compare_and_write(a: Read, b: Read, names: list[str], out: Path, argv: list[str], console: Console) -> None:
    """Compare, print what changed and write both files."""
    comparison = compare(a, b, names)
    for line in statements(comparison):
        say(console, line)
    write_page({**comparison, "argv": argv}, page(comparison, argv), out, "compare", console)


def compare(a: Read, b: Read, names: list[str]) -> dict[str, Any]:
    """Return compare.json: every figure of every method that both reports have, on the prompts that both measured."""
    differ = differences(a[0], b[0])
    runs = [_by_key(lines) for _, lines in (a, b)]
    plain = [_plain(report) for report, _ in (a, b)]
    left_out = ["tokens/s"] if differ.keys() & set(MACHINE) else []
    rows: list[dict[str, Any]] = []
    keys = [
        [(row["drafter"], row["temperature"], row.get("batch", 1)) for row in report["rows"]] for report, _ in (a, b)
    ]
    for key in (key for key in keys[0] if key in keys[1]):
        units = [unit for unit in runs[0].get(key, {}) if unit in runs[1].get(key, {})]
        conversations = _conversations([name for name, _ in units])
        if len(set(conversations)) < FEWEST:
            continue
        for name, (columns, figure) in FIGURES.items():
            if name in left_out or (name != "tokens/s" and key[0] in plain):
                continue  # plain decoding has tau 1 and speedup 1
            pair = [np.array([[of[key][unit][c] or 0.0 for c in columns] for unit in units], float) for of in runs]
            usable = (pair[0] > 0).all(1) & (pair[1] > 0).all(1)  # without prompts of no decoded tokens or no steps
            named, places = np.unique(np.array(conversations)[usable], return_inverse=True)
            if len(named) >= FEWEST:
                of_conversation = np.arange(len(named))[:, None] == places  # [conversations, prompts]
                first, second = (of_conversation @ values[usable] for values in pair)
                between = BETWEEN_RUNS if name == "speedup" else 0.0
                comparison = asdict(change(first, second, figure, between))
                rows.append({"drafter": key[0], "temperature": key[1], "batch": key[2], "figure": name, **comparison})
    if not rows:
        methods = [sorted({key[0] for key in of}) for of in runs]
        raise ValueError(
            f"nothing can be compared: {names[0]} has {shortened(methods[0])} and {names[1]} {shortened(methods[1])}, "
            f"and no method decodes {FEWEST} or more of the same prompts in both"
        )
    tested = [row for row in rows if row["figure"] != UNTESTED]
    for row in rows:
        row |= {"p_adjusted": None, "significant": False} | ({} if row in tested else {"p_value": None})
    for row, adjusted in zip(tested, holm([row["p_value"] for row in tested]), strict=True):
        row |= {"p_adjusted": adjusted, "significant": adjusted < ALPHA}
    return {
        "format_version": 1,
        "reports": names,
        "differences": {name: list(values) for name, values in differ.items()},
        "not_compared": left_out,
        "baseline": plain[0],
        "rows": rows,
    }


def _by_key(lines: list[Line]) -> dict[Key, dict[Unit, Line]]:
    """Return every method's line of every prompt."""
    by_key: dict[Key, dict[Unit, Line]] = {}
    for line in lines:
        units = by_key.setdefault((line["drafter"], line["temperature"], line["batch"]), {})
        units[line["prompt"], line["prompt_tokens"]] = line
    return by_key


def _conversations(names: list[str]) -> list[str]:
    """Return the conversation of each prompt: later turns of ``q81`` are ``q81/2``, ``q81/3`` (eval.measure.turns)."""
    known, split = set(names), [name.rpartition("/") for name in names]
    return [first if turn.isdigit() and first in known else first + slash + turn for first, slash, turn in split]


def _plain(report: dict[str, Any]) -> str:
    """Return plain decoding's label."""
    entries = report["environment"]["config"]["drafters"]
    return next((entry.get("label") or BASELINE for entry in entries if entry["drafter"] == BASELINE), BASELINE)


def statements(comparison: dict[str, Any]) -> list[str]:
    """Return sentences: which settings differ, and what has changed."""
    lines = [
        f"{name}: {shortened(a)} in the first, {shortened(b)} in the second"
        for name, (a, b) in comparison["differences"].items()
    ]
    lines += [f"{name} is not compared: the machine is another" for name in comparison["not_compared"]]
    lines += [
        f"{_change_of(row)}: the machine's speed, or the loop for all methods; not tested"
        for row in comparison["rows"]
        if row["drafter"] == comparison["baseline"] and row["figure"] == UNTESTED
    ]
    changed = [row for row in comparison["rows"] if row["significant"]]
    lines += [_change_of(row) for row in changed]
    if not changed:
        tested = [row for row in comparison["rows"] if row["p_adjusted"] is not None]
        lines.append(f"of {len(tested)} figures, none has changed significantly")
    return lines


def _change_of(row: dict[str, Any]) -> str:
    return (
        f"{row['drafter']}, T = {row['temperature']:g}: {row['figure']} {100 * (row['ratio'] - 1):+.1f}%, "
        f"{_shown(row['a'])} to {_shown(row['b'])}"
    )


def page(comparison: dict[str, Any], argv: list[str]) -> str:
    """Return ``compare.md``."""
    first, second = comparison["reports"]
    cells = [
        [row["drafter"], f"{row['temperature']:g}", str(row["batch"]), row["figure"], str(row["prompts"])]
        + [_shown(row["a"]), _shown(row["b"])]
        + ["{:+.1f}% [{:+.1f}, {:+.1f}]".format(*(100 * (x - 1) for x in (row["ratio"], *row["ratio_ci"])))]
        + ["-" if row["p_adjusted"] is None else f"{row['p_adjusted']:.2g}"]
        + ["**changed**" if row["significant"] else ""]
        for row in comparison["rows"]
    ]
    head = ["drafter", "T", "batch", "figure", "prompts", "first", "second", "change", "p", ""]
    lines = ["# What changed", "", f"- first: {first}", f"- second: {second}"]
    lines += [f"- {line}" for line in statements(comparison)]
    lines += ["", *table(head, cells), "", ABOUT]
    return "\n".join([*lines, *run_again(argv)])


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.1f}"

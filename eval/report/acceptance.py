"""The acceptance of one drafter in two engines, depth by depth: what was trained is what is served."""

import math
from typing import Any

from eval.report.rows import number, shown_name

Row = dict[str, Any]
ABOUT = """\
Of the steps that came to a depth with everything accepted, the share that accepted the next token, too (n-alpha). One
checkpoint has one acceptance, whatever serves it: differences are in standard errors of two such shares, and mean
something from 3 on. Intervals are of 95%: of a share by its steps, of tau by the bootstrap over prompts."""

DEFINITIONS = """\
- **tau**: tokens committed over target forwards, over all steps of all prompts (micro); *by prompt*: the mean of the
  prompts' own (macro), in which short answers weigh like long ones.
- **n-alpha**: of the steps that accepted n draft tokens and had drafted more, the share that accepted the next one;
  for n = 0, 1, 2, ...
- **joint**: of all drafts, the share of which 1, 2, 3, ... or more tokens were accepted. It is counted: n-alphas
  multiplied give it only where all drafts are of one depth.
- **CTAR(w)**: of all steps, those without a draft included, the share that committed more than w tokens, bonus
  included; for w = 1, 2, 3, ..."""
POSITIONS = 8  # shown; the JSON has all


def acceptance_by_position(rows: list[Row]) -> list[list[str]]:
    """A table, head first, of the rows that tell their steps and drafted; nothing below the head where none does."""
    lines = [["drafter", "T", "batch", "tau", "by prompt", "n-alpha", "joint", "CTAR"]]
    for row in rows:
        if row.get("joint_alpha"):
            figures = [row["tau"], row["tau_by_prompt"]]
            shares = [" ".join(number(x, 2) for x in row[k][:POSITIONS]) for k in ("n_alpha", "joint_alpha", "ctar")]
            place = [shown_name(row), f"{row['temperature']:g}", str(row["batch"])]
            lines.append([*place, *(number(x, 2) for x in figures), *shares])
    return lines


def differences(one: Row, other: Row) -> list[float]:
    """By depth, how many standard errors lie between the two rows' n-alpha."""
    return [
        (b - a) / math.sqrt(max(_variance(a, n) + _variance(b, m), 1e-12))
        for (a, n), (b, m) in zip(_reached(one), _reached(other), strict=False)
    ]


def acceptance_beside(rows: list[Row]) -> list[list[list[str]]]:
    """A table, head first, for every engine's row that has one of ours to stand beside."""
    found = []
    for row in rows:
        ours = [own for own in rows if (own["drafter"], own["temperature"]) == (row.get("beside"), row["temperature"])]
        if not ours or not row["n_alpha"] or not ours[0]["n_alpha"]:
            continue
        depths = range(min(len(row["n_alpha"]), len(ours[0]["n_alpha"])))
        lines = [[f"T = {row['temperature']:g}", "steps", "tau", *(f"depth {depth + 1}" for depth in depths)]]
        for each in (ours[0], row):
            reached = _reached(each)
            shares = [
                f"{share:.3f} ± {1.96 * math.sqrt(_variance(share, n)):.3f}" for share, n in reached[: len(depths)]
            ]
            tau = number(each["tau"], 3) + (" [{:.3f}, {:.3f}]".format(*each["tau_ci"]) if each.get("tau_ci") else "")
            lines.append([shown_name(each), f"{each['steps']:,}", tau, *shares])
        apart = [f"{value:+.1f}" for value in differences(ours[0], row)]
        found.append([*lines, ["difference, in standard errors", "", "", *apart]])
    return found


def _reached(row: Row) -> list[tuple[float, float]]:
    """n-alpha by depth, and of about how many steps it is."""
    found, steps = [], float(row["steps"])
    for share in row["n_alpha"]:
        found.append((share, max(steps, 1.0)))
        steps *= share
    return found


def _variance(share: float, count: float) -> float:
    """Of a share, smoothed so that one of 0 or 1 is not taken for certain (Agresti and Coull's one more of each)."""
    smooth = (share * count + 1) / (count + 2)
    return smooth * (1 - smooth) / (count + 2)

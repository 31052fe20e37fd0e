"""The acceptance of one drafter in two engines, depth by depth: what was trained is what is served."""

import math
from typing import Any

from eval.report.rows import number, shown_name

Row = dict[str, Any]
ABOUT = """\
Of the steps that came to a depth with everything accepted, the share that accepted the next token, too (n-alpha). One
checkpoint has one acceptance, whatever serves it: differences are in standard errors of two such shares, and mean
something from 3 on."""


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
            shares = [number(each["n_alpha"][depth], 3) for depth in depths]
            lines.append([shown_name(each), f"{each['steps']:,}", number(each["tau"], 3), *shares])
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

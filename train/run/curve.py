"""How tau grows with a training's minutes: points of finished runs or of one run, and a line through them.

tau is that of the real loop where a run measured it. Else it is estimated from held-out acceptance: the expected length
of a chain, 1 + a_0 + a_0 a_1 + ..., with a_n the acceptance of step n behind accepted ones, and the bonus token.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from train.run.files import read_metrics, read_object
from train.run.keep import TAU

# Names of the held-out acceptance of step or slot n, the first of a method's figures that is there.
ACCEPTANCE = ("heldout_{}-alpha", "heldout_step_{}_top1", "heldout_slot_{}_top1", "heldout_head_{}_top1")
FEWEST = 3  # points of a line


class Point(NamedTuple):
    """A measurement: minutes and positions of training before it, and tau; ``measured``: by the real loop."""

    minutes: float
    positions: int
    tau: float
    measured: bool


class Line(NamedTuple):
    """tau = at_one + doubling log2(minutes), by least squares over ``points``; ``error``: root of the mean square."""

    at_one: float
    doubling: float
    error: float
    points: list[Point]

    def at(self, minutes: float) -> float:
        """Return tau after this number of minutes."""
        return self.at_one + self.doubling * math.log2(minutes)


def points_of(run: Path) -> list[Point]:
    """Return the measurements of a run after its first step, in order.

    Raises:
        ValueError: the folder holds no run, or one that measured neither tau nor acceptance.
    """
    rows, found = read_metrics(run), []
    positions = seconds = 0.0
    latest: dict[int, dict[str, float]] = {}
    for row in rows:
        positions, seconds = row.get("tokens", positions), row.get("seconds", seconds)
        latest.setdefault(int(row.get("step", 0)), {}).update(row | {"tokens": positions, "seconds": seconds})
    for step, row in latest.items():
        if step and row["seconds"] and (tau := row.get(TAU) or expected(row)):
            found.append(Point(row["seconds"] / 60, int(row["tokens"]), tau, TAU in row))
    if not found:
        missing = "neither heldout_tau nor acceptance in metrics.jsonl" if rows else "no metrics.jsonl"
        raise ValueError(f"{run} has {missing}; give run folders of train/<method>.py, the `out` of their configs")
    return found


def expected(row: dict[str, float]) -> float | None:
    """Return the expected tau by the held-out acceptance of an evaluation; None without any."""
    for name in ACCEPTANCE:
        first = 0 if name.format(0) in row else 1
        if name.format(first) in row:
            tau = product = 1.0
            while (share := row.get(name.format(first))) is not None:
                product, first = product * share, first + 1
                tau += product
            return tau
    return None


def fitted(points: list[Point]) -> Line | None:
    """Return the line through points of different minutes; None for fewer than ``FEWEST``."""
    if len({round(point.minutes, 2) for point in points}) < FEWEST:
        return None
    x, y = [math.log2(point.minutes) for point in points], [point.tau for point in points]
    middle, height = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)
    at_one = height - slope * middle
    error = math.sqrt(sum((at_one + slope * a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x))
    return Line(at_one, slope, error, points)


def by_method(runs: list[Path]) -> dict[str, list[Point]]:
    """Return the points of each method: the ends of its runs, or all measurements of its only one."""
    every: dict[str, list[list[Point]]] = {}
    for run in runs:
        config: dict[str, Any] = read_object(run / "config.json")
        every.setdefault(str(config.get("drafter_type") or run.name), []).append(points_of(run))
    curves = {
        method: parts[0] if len(parts) == 1 else sorted(part[-1] for part in parts) for method, parts in every.items()
    }
    for method, points in curves.items():  # an estimate is no point beside measurements
        curves[method] = [point for point in points if point.measured] or points
    return curves

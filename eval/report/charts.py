"""Coordinates of the page's charts; how they look is the templates'."""

from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from eval.report.rows import number, setting_of, shown_name

Row = dict[str, Any]
COLORS = 8  # of the style sheet; what comes after them is grey
LABEL = 6.4  # width of a letter, in the units of a chart


@dataclass(frozen=True)
class Axes:
    """A chart's inner field, and the values at its edges. y grows upwards."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float = 720.0
    height: float = 400.0
    left: float = 52.0
    right: float = 18.0
    top: float = 14.0
    bottom: float = 44.0
    whole: bool = False  # of x there are whole numbers alone

    def x(self, value: float) -> float:
        """Where a value stands."""
        low, high = self.x_range
        return round(self.left + (value - low) / (high - low) * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        """Where a value stands."""
        low, high = self.y_range
        return round(
            self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom), 1
        )

    def view(self) -> dict[str, Any]:
        """Edges and ticks, for the template."""
        edges = {
            "left": self.left,
            "right": self.width - self.right,
            "top": self.top,
            "base": self.height - self.bottom,
        }
        ticks = {
            "x_ticks": [(self.x(value), f"{value:g}") for value in _ticks(*self.x_range, whole=self.whole)],
            "y_ticks": [(self.y(value), f"{value:g}") for value in _ticks(*self.y_range)],
        }
        return {"width": self.width, "height": self.height, **edges, **ticks}


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    places = MaxNLocator(nbins=8 if whole else 6, integer=whole).tick_values(low, high)
    inside = [value for value in places if low <= value <= high]
    return [round(float(value), 6) for value in inside]


def kind(row: Row) -> str:
    """The class by which the style sheet colours a row."""
    if not row["lossless"]:
        return "lossy"
    if row["stock"] or row.get("engine"):
        return "other"
    return "plain" if row["tau"] == 1.0 and not row["drafted_per_step"] else "own"


def at_settings(report: dict[str, Any], smallest_batch: bool = False) -> list[tuple[str, Row, list[Row]]]:
    """By temperature and batch size: its name, plain decoding there, and the rows."""
    baselines = report["baseline"]["temperatures"]
    least = min(baseline["batch"] for baseline in baselines)
    found = []
    for baseline in baselines:
        if not smallest_batch or baseline["batch"] == least:
            name = "greedy" if baseline["temperature"] == 0 else f"temperature {baseline['temperature']:g}"
            name += f", batch {baseline['batch']}" if baseline["batch"] > 1 else ""
            rows = [row for row in report["rows"] if setting_of(row) == setting_of(baseline)]
            found.append((name, baseline, rows))
    return found


def panels(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The speedups of each temperature and batch size as bars, in percent of the widest one's end."""
    ends = [end for row in report["rows"] for end in (row["speedup"] or 0.0, *(row["speedup_ci"] or ()))]
    widest = max([1.0, *ends]) * 1.02
    found = []
    for title, baseline, rows in at_settings(report):
        bars = []
        for row in sorted(rows, key=lambda row: -(row["speedup"] or 0.0)):
            if row["speedup"] is None:
                continue
            interval = row["speedup_ci"] if row["speedup_ci"] and row["speedup_ci"][0] < row["speedup_ci"][1] else None
            low, high = (round(100 * end / widest, 2) for end in interval or (0.0, 0.0))
            place = {"width": round(100 * row["speedup"] / widest, 2), "low": low, "high": high}
            known = {"name": shown_name(row), "kind": kind(row), "speedup": row["speedup"], "tau": row["tau"]}
            bars.append({**known, **place, "interval": interval})
        over = baseline["over_stock_generate"]
        stock = {"at": round(100 / over / widest, 2), "speedup": 1 / over} if over else None
        found.append({"title": title, "bars": bars, "one": round(100 / widest, 2), "stock": stock})
    return found


def tau_against_speed(rows: list[Row]) -> dict[str, Any] | None:
    """A point for every row that tells both, and lines of equal cost of a step; None below two points."""
    told = [row for row in rows if row["tau"] is not None and row["speedup"] is not None]
    if len(told) < 2:
        return None
    most_x, most_y = max(row["tau"] for row in told) * 1.12, max(row["speedup"] for row in told) * 1.12
    lowest = min([1.0, *(row["speedup"] for row in told)])
    axes = Axes((min(0.9, 0.98 * min(row["tau"] for row in told)), max(most_x, 1.5)), (lowest * 0.9, max(most_y, 1.3)))
    points: list[dict[str, Any]] = []
    taken: list[tuple[float, float, float, float]] = []
    for row in told:
        taken.append((axes.x(row["tau"]) - 5, axes.y(row["speedup"]) - 5, 10, 10))
    costs = _costs(axes)
    taken += [(line["x1"] - 90, line["y1"], 90, 16) for line in costs]
    for row in sorted(told, key=lambda row: -row["speedup"]):
        x, y = axes.x(row["tau"]), axes.y(row["speedup"])
        label = _free_place(x, y, shown_name(row), axes, taken)
        about = f"{shown_name(row)}, {setting_of(row)}: tau {row['tau']:.2f}, {row['speedup']:.2f}x"
        points.append({"x": x, "y": y, "kind": kind(row), "name": shown_name(row), "about": about, "label": label})
    return {**axes.view(), "points": points, "costs": costs, "one": axes.y(1.0)}


def _costs(axes: Axes) -> list[dict[str, Any]]:
    """Lines through the origin, as far as they are in the field: along each a step costs as much."""
    found = []
    for cost in (1.0, 1.5, 2.0, 3.0):
        low, high = max(axes.x_range[0], cost * axes.y_range[0]), min(axes.x_range[1], cost * axes.y_range[1])
        if low < high:
            ends = {"x0": axes.x(low), "y0": axes.y(low / cost), "x1": axes.x(high), "y1": axes.y(high / cost)}
            found.append(ends | {"name": f"a step costs {cost:g}"})
    return found


def _free_place(
    x: float, y: float, text: str, axes: Axes, taken: list[tuple[float, float, float, float]]
) -> dict[str, Any] | None:
    """Where a label beside a point covers nothing; None where it would."""
    width = LABEL * len(text)
    right, left = (x + 9, y - 7, width, 14), (x - 9 - width, y - 7, width, 14)
    for box, anchor, at in (
        (right, "start", (x + 9, y + 4)),
        (left, "end", (x - 9, y + 4)),
        ((x - width / 2, y - 23, width, 14), "middle", (x, y - 12)),
        ((x - width / 2, y + 9, width, 14), "middle", (x, y + 20)),
    ):
        inside = axes.left <= box[0] and box[0] + box[2] <= axes.width - 2 and axes.top - 8 <= box[1]
        if inside and not any(_meet(box, other) for other in taken):
            taken.append(box)
            return {"x": round(at[0], 1), "y": round(at[1], 1), "anchor": anchor}
    return None


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    apart = one[0] + one[2] <= other[0] or other[0] + other[2] <= one[0]
    return not (apart or one[1] + one[3] <= other[1] or other[1] + other[3] <= one[1])


def curves(
    lines: list[tuple[str, str, list[tuple[float, float]]]], x_label: str, y_label: str, from_zero: bool = True
) -> dict[str, Any] | None:
    """Lines through points: of each a name, a remark for the pointer, and the points. None where there are none."""
    lines = [line for line in lines if line[2]]
    if not lines:
        return None
    xs, ys = ([point[i] for _, _, points in lines for point in points] for i in range(2))
    low, high = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    axes = Axes(
        (low, high), (0.0 if from_zero else 0.95 * min(ys), 1.05 * max(max(ys), 1e-9)), height=340.0, whole=True
    )
    found = []
    for index, (name, about, points) in enumerate(lines):
        places = [(axes.x(x), axes.y(y)) for x, y in points]
        color = index if index < COLORS else COLORS
        found.append({"name": name, "about": about, "color": color, "points": places})
    return {**axes.view(), "lines": found, "x_label": x_label, "y_label": y_label}


def steps_of_time(rows: list[Row]) -> list[dict[str, Any]]:
    """A step's milliseconds by row, stacked, in percent of the longest step."""
    told = [row for row in rows if row["draft_ms"] is not None and row["verify_ms"] is not None]
    longest = max((_step_ms(row) for row in told), default=0.0)
    found = []
    for row in told:
        total = _step_ms(row)
        parts = [(name, row[f"{name}_ms"], round(100 * row[f"{name}_ms"] / longest, 2)) for name in PARTS]
        host = None if row["overhead"] is None else row["overhead"] * total
        found.append(
            {"name": shown_name(row), "parts": parts, "total": total}
            | {"host": host, "host_width": round(100 * (host or 0.0) / longest, 2), "prefill": row["prefill_ms"]}
            | {"a_token": None if not row["tau"] else number(total / row["tau"], 2)}
        )
    return found


PARTS = ("draft", "verify", "other")


def _step_ms(row: Row) -> float:
    return float(sum(row[f"{name}_ms"] or 0.0 for name in PARTS))

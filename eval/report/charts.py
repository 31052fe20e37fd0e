"""The charts of a report, drawn by matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from drafters.common.files import replacing
from eval.report.tables import Row, at_settings, kind, shown_name
from eval.report.texts import visible

COLORS = {"own": "#3b6ea8", "lossy": "#c98a2b", "plain": "#9aa3ad", "other": "#5b8c6a"}
PARTS = {"draft": "#3b6ea8", "verify": "#9aa3ad", "other": "#c98a2b"}  # of a step's time
LONGEST_LABEL = 60  # characters
rcParams["text.parse_math"] = False  # a dollar in a label is a dollar
Line = tuple[str, list[tuple[float, float]]]  # a name and its points


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, replacing a file at once."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def speedups(report: dict[str, Any]) -> Figure:
    """Return bars of speedup over plain decoding: a column of panels per temperature, a line per batch size."""
    groups = at_settings(report)
    height = 1.9 + 0.42 * max(len(rows) for _, _, rows in groups)
    across = len({baseline["temperature"] for _, baseline, _ in groups})
    down = len(groups) // across
    figure = Figure(figsize=(6.4 * across, height * down))
    panels = figure.subplots(down, across, squeeze=False)
    widest = max([1.0, *(end for row in report["rows"] for end in (row["speedup"] or 0.0, *(row["speedup_ci"] or ())))])
    for panel, (title, baseline, rows) in zip(panels.T.flat, groups, strict=True):
        panel.set_title(title, fontsize=10)
        _bars(panel, rows, baseline, widest)
    facts = report["environment"]
    batch = f"batch {facts['batch']}" if down == 1 else "several batch sizes"
    about = f"{facts['dtype']}, {batch}, {facts['gpu'] or facts['cpu']}, {facts['prompt_set']['prompts']} prompts"
    figure.suptitle(visible(f"{facts['target']['name']}, {about}"), fontsize=10)
    figure.tight_layout()
    return figure


def _bars(panel: Axes, rows: list[Row], baseline: Row, widest: float) -> None:
    for place, row in enumerate(rows):
        speedup = row["speedup"] or 0.0
        hatch = None if row["lossless"] else "///"
        panel.barh(place, speedup, color=COLORS[kind(row)], hatch=hatch, edgecolor="white", linewidth=0, height=0.7)
        end = speedup
        if row["speedup_ci"]:
            low, high = row["speedup_ci"]
            panel.plot([low, high], [place, place], color="black", linewidth=1)
            end = max(end, high)
        tau = "" if row["tau"] is None else f"   τ {row['tau']:.2f}"
        panel.text(end + 0.02 * widest, place, f"{speedup:.2f}x{tau}", va="center", fontsize=9)
    panel.axvline(1.0, color="black", linewidth=0.8)
    if baseline["over_stock_generate"]:
        stock = 1 / baseline["over_stock_generate"]
        panel.axvline(stock, color="black", linewidth=0.8, linestyle="--", label=f"stock generate, {stock:.2f}x")
        panel.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), fontsize=8, frameon=False)
    _names(panel, rows)
    panel.set_xlim(0, widest * 1.32)
    panel.set_xlabel("speedup over plain decoding in the same loop (line: 95% interval)", fontsize=9)


def _label(name: str) -> str:
    return visible(name[:LONGEST_LABEL])


def _names(panel: Axes, rows: list[Row]) -> None:
    panel.set_yticks(range(len(rows)), [_label(shown_name(row)) for row in rows], fontsize=9)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)


def tau_against_speed(rows: list[Row]) -> Figure | None:
    """Return a point per row, and dotted lines of equal cost of a step; None below two points."""
    points = [row for row in rows if row["tau"] is not None and row["speedup"] is not None]
    if len(points) < 2:
        return None
    figure, panel = _panel("tau: tokens per target forward", "speedup over plain decoding")
    for row in points:
        panel.scatter(row["tau"], row["speedup"], color=COLORS[kind(row)])
        place: dict[str, Any] = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 8}
        panel.annotate(_label(shown_name(row)), (row["tau"], row["speedup"]), **place)
    widest, highest = max(row["tau"] for row in points) * 1.1, max(row["speedup"] for row in points) * 1.15
    for cost in (1.0, 1.5, 2.0, 3.0):
        x = min(widest, cost * highest)
        panel.plot([0, x], [0, x / cost], color="gray", linestyle=":", linewidth=0.8)
        panel.text(x, x / cost, f"a step costs {cost:g}", fontsize=8, color="gray")
    panel.set_xlim(min(0.9, *(row["tau"] for row in points)), widest)
    panel.set_ylim(0, highest)
    return figure


def curves(lines: list[Line], x_label: str, y_label: str) -> Figure | None:
    """Return a line through the points of every name; None if there are no points."""
    lines = [line for line in lines if line[1]]
    if not lines:
        return None
    figure, panel = _panel(x_label, y_label)
    for name, points in lines:
        panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=_label(name))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylim(bottom=0)
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    return figure


def acceptance(rows: list[Row]) -> Figure | None:
    """Return the joint acceptance of every row by number of draft tokens."""
    with_drafts = sorted((row for row in rows if row.get("joint_alpha")), key=lambda row: -(row["tau"] or 0.0))
    lines = [(shown_name(r), [(n + 1.0, share) for n, share in enumerate(r["joint_alpha"][:16])]) for r in with_drafts]
    return curves(lines, "draft tokens", "share of drafts with at least this many accepted")


def throughput(report: dict[str, Any]) -> Figure | None:
    """Return tokens/s of every method by batch size; None for one batch size."""
    if not isinstance(report["environment"]["batch"], list):
        return None
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        if row["tokens_per_second"] is not None:
            name = f"{shown_name(row)}, T = {row['temperature']:g}"
            lines.setdefault(name, []).append((float(row["batch"]), row["tokens_per_second"]))
    return curves(list(lines.items()), "prompts decoded together", "tokens/s of all of them")


def step_times(rows: list[Row]) -> Figure | None:
    """Return the milliseconds of a step of every row, divided into draft, verify and the rest."""
    bars = [row for row in rows if row["draft_ms"] is not None and row["verify_ms"] is not None]
    if not bars:
        return None
    figure = Figure(figsize=(7.2, 0.8 + 0.35 * len(bars)))
    panel = figure.subplots()
    left = [0.0] * len(bars)
    for part, color in PARTS.items():
        widths = [row[f"{part}_ms"] or 0.0 for row in bars]
        panel.barh(range(len(bars)), widths, left=left, color=color, height=0.7, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, (row, total) in enumerate(zip(bars, left, strict=True)):
        a_token = f", {total / row['tau']:.2f} ms per token" if row["tau"] else ""
        panel.text(total, place, f" {total:.2f} ms{a_token}", va="center", fontsize=8)
    _names(panel, bars)
    panel.set_xlabel("milliseconds per step", fontsize=9)
    panel.set_xlim(0, 1.4 * max(left))
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    return figure


def _panel(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.0))
    panel = figure.subplots()
    panel.set_xlabel(x_label, fontsize=9)
    panel.set_ylabel(y_label, fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel

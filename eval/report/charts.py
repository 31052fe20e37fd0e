"""The chart of a report, drawn by matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafters.common.files import replacing
from eval.report.tables import Row, at_settings, kind, shown_name
from eval.report.texts import visible

COLORS = {"own": "#3b6ea8", "lossy": "#c98a2b", "plain": "#9aa3ad", "other": "#5b8c6a"}
LONGEST_LABEL = 60  # characters
rcParams["text.parse_math"] = False  # a dollar in a label is a dollar


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
    panel.set_yticks(range(len(rows)), [visible(shown_name(row)[:LONGEST_LABEL]) for row in rows], fontsize=9)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlim(0, widest * 1.32)
    panel.set_xlabel("speedup over plain decoding in the same loop (line: 95% interval)", fontsize=9)

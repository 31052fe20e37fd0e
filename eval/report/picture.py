"""The report's picture: speedup over plain decoding, a panel for each temperature, lossy methods hatched."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from drafters.common.files import replacing  # noqa: E402
from eval.report.rows import setting_of, shown_name  # noqa: E402

LOSSLESS, LOSSY, BASELINE = "#3b6ea8", "#c98a2b", "#9aa3ad"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture to ``path`` (PNG)."""
    baselines = report["baseline"]["temperatures"]
    groups = [[row for row in report["rows"] if setting_of(row) == setting_of(b)] for b in baselines]
    height = 1.9 + 0.42 * max(len(rows) for rows in groups)
    across = len({baseline["temperature"] for baseline in baselines})
    down = len(groups) // across  # a line of panels for each batch size
    figure, panels = plt.subplots(down, across, figsize=(6.4 * across, height * down), squeeze=False)
    widest = max([1.0, *(end for row in report["rows"] for end in (row["speedup"] or 0.0, *(row["speedup_ci"] or ())))])
    for panel, rows, baseline in zip(panels.T.flat, groups, baselines, strict=True):
        _panel(panel, rows, baseline, widest)
    facts = report["environment"]
    batch = f"batch {facts['batch']}" if down == 1 else "several batch sizes"
    figure.suptitle(
        f"{facts['target']['name']}, {facts['dtype']}, {batch}, {facts['gpu'] or facts['cpu']}, "
        f"{facts['prompt_set']['prompts']} prompts",
        fontsize=10,
    )
    figure.tight_layout()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, replacing a file at once, and release it."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)


def _panel(panel: Axes, rows: list[dict[str, Any]], baseline: dict[str, Any], widest: float) -> None:
    for place, row in enumerate(rows):
        speedup = row["speedup"] or 0.0
        color = LOSSY if not row["lossless"] else BASELINE if row["tau"] == 1.0 else LOSSLESS
        hatch = None if row["lossless"] else "///"
        panel.barh(place, speedup, color=color, hatch=hatch, edgecolor="white", linewidth=0, height=0.7)
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
    panel.set_yticks(range(len(rows)), [shown_name(row) for row in rows], fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(0, widest * 1.32)
    panel.set_xlabel("speedup over plain decoding in the same loop (line: 95% interval)", fontsize=9)
    title = "greedy" if baseline["temperature"] == 0 else f"T = {baseline['temperature']:g}"
    panel.set_title(title + (f", batch {baseline['batch']}" if baseline["batch"] > 1 else ""), fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)

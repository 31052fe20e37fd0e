"""The picture of a run: small plots over the steps. matplotlib is imported late, because it takes half a second."""

import re
from pathlib import Path
from typing import Any

from drafters.common.files import replacing

COLORS = ("#3b6ea8", "#c98a2b", "#4f8f5b", "#a8513b", "#7a5ba8", "#6b747d")

Rows = list[dict[str, float]]
Line = tuple[str, str]  # a figure's name in metrics.jsonl, and its label


def draw(summary: dict[str, Any], rows: Rows, path: Path) -> None:
    """Write the picture to ``path`` (PNG, 15 x 8 inches), replacing a file at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plots, answers = panels(rows), summary["heldout_answers"]
    figure, axes = plt.subplots(2, 3, figsize=(15, 8))
    for axis, (title, lines, scale) in zip(axes.flat, plots, strict=True):
        _panel(axis, title, lines, rows, scale)
    if summary["kept"]:
        axes.flat[2].axvline(summary["kept"]["step"], color=COLORS[-1], linestyle=":", lw=1.2)
        axes.flat[2].set_title(f"{plots[2][0]}\nkept: step {summary['kept']['step']:,}", fontsize=10)
    config, speed = summary["config"] or {}, summary["speed"]
    facts = [f"{summary['steps']:,} steps, {summary['tokens']:,} tokens"]
    facts += [f"{speed['tokens_per_second']:,.0f} tokens/s"] if speed["tokens_per_second"] else []
    facts += [f"MFU {speed['mfu']:.0%}"] if speed["mfu"] else []
    facts += [f"peak memory {speed['peak_memory_gb']:.1f} GB"] if speed["peak_memory_gb"] else []
    end = (summary["ended"] or "not ended").split(":")[0]
    if answers["warning"]:
        text = f"{plots[1][0]}, {answers['own_share']:.0%} the target's own:\nnot what decoding gives"
        axes.flat[1].set_title(text, fontsize=10, color=COLORS[3])
    figure.suptitle(f"{config.get('out')} (target {config.get('target')}, {end})\n{', '.join(facts)}", fontsize=11)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def panels(rows: Rows) -> list[tuple[str, list[Line], str]]:
    """Title, lines and scale of the y axis of each of the six panels."""
    names, place = dict.fromkeys(name for row in rows for name in row), "heldout_top1_at_"
    alphas = [(name, name.removeprefix("heldout_")) for name in names if name.endswith("-alpha")]
    places = [(name, name.removeprefix(place)) for name in names if name.startswith(place)]
    alphas += [(name, name.removeprefix("heldout_")) for name in names if re.fullmatch(r"heldout_head_\d+_top1", name)]
    tau = [("heldout_tau", "chain"), ("heldout_tau_tree", "tree")]
    acceptance = [("heldout_expected_acceptance", "expected acceptance, sampled")]
    acceptance += [("heldout_top1_agreement", "top-1 agreement")]
    return [
        ("loss", [("loss", "training"), ("heldout_loss", "held out, no noise")], "log"),
        ("acceptance on held-out text", alphas or acceptance, "share"),
        ("tau of the decoding loop, held-out prompts", tau, "linear"),
        ("top-1 agreement by position in the answer", places, "share"),
        ("learning rate", [("learning_rate", "")], "linear"),
        ("tokens/s", [("tokens_per_second", "")], "linear"),
    ]


def _panel(axis: Any, title: str, lines: list[Line], rows: Rows, scale: str) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for color, (name, label) in zip(COLORS * 3, lines, strict=False):
        if points := [(row["step"], row[name]) for row in rows if name in row]:
            marker = "o" if len(points) < 40 else ""
            axis.plot(*zip(*points, strict=True), color=color, label=label, marker=marker, ms=3, lw=1.4)
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes, color=COLORS[-1])
        axis.set_yticks([])
        return
    if scale == "log":
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        axis.tick_params(axis="y", which="minor", labelsize=8)
    else:
        axis.set_ylim(bottom=0, top=1 if scale == "share" else None)
    axis.grid(axis="y", linewidth=0.4, alpha=0.6)
    if any(label for _, label in lines):
        axis.legend(fontsize=8, frameon=False, ncols=2 if len(lines) > 3 else 1)

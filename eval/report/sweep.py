"""What a sweep writes: sweep.json, the same as Markdown, and a picture of speed over the values."""

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from drafters.common.files import replace_json, replace_text
from eval.report.files import drawing
from eval.report.page import Row, number, run_again, setting, shown_name, speedup_with_interval, table
from eval.report.picture import Axes, plt, save
from eval.report.rows import warnings

DATA, PAGE, PICTURE = "sweep.json", "sweep.md", "sweep.png"
KEPT = (
    "drafter", "entry", "grid", "temperature", "lossless", "stock", "tokens_per_second", "speedup", "speedup_ci",
    "tau", "perplexity", "joules_per_token", "exact_match", "overhead", "prompts",
)  # fmt: skip


def summarise(
    key: str, values: list[Any], folders: list[str], reports: list[dict[str, Any]], argv: list[str]
) -> dict[str, Any]:
    """sweep.json: of every value's report, which lies in its folder, the figures that are compared."""
    made = []
    for value, folder, report in zip(values, folders, reports, strict=True):
        facts = report["environment"]
        rows = [{name: row[name] for name in KEPT if name in row} for row in report["rows"]]
        about = {name: facts[name] for name in ("date", "commit", "dirty", "load_average")}
        made.append({"value": value, "folder": folder, **about, "rows": rows})
    return {"format_version": 1, "key": key, "values": made, "argv": argv}


def write(found: dict[str, Any], reports: list[dict[str, Any]], out: Path) -> None:
    """sweep.json and sweep.md."""
    replace_json(out / DATA, found)
    replace_text(out / PAGE, markdown(found, reports))


def markdown(found: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    """``sweep.md``."""
    key, values = found["key"], found["values"]
    lines = [f"# Sweep over {key}", "", *setting(reports[0])]
    lines += [f"- that is the setting of {key} = {_shown(values[0]['value'])}; every value has a report of its own", ""]
    lines += [f"![speed over {key}]({PICTURE})", "", *_speeds(found), *_all_figures(found)]
    lines += ["## Every value's own report", ""]
    for value, report in zip(values, reports, strict=True):
        about = f"{value['date']}, commit {(value['commit'] or 'unknown')[:12]}"
        lines.append(f"- [{value['folder']}](<{value['folder']}/report.md>): {about}")
        lines += [f"  - **{line}**" for line in warnings(report)]
    lines += ["", "Speedups are over plain decoding at the same value. The columns are explained in every report.", ""]
    return "\n".join([*lines, *run_again(found["argv"])])


Series = dict[tuple[str, float | None], dict[int, Row]]


def series(found: dict[str, Any]) -> Series:
    """The rows by drafter and temperature, and in these by the index of the value.

    The temperature is None where each value has just one: it may be what varies.
    """
    single = all(len({row["temperature"] for row in value["rows"]}) == 1 for value in found["values"])
    lines: Series = {}
    for index, value in enumerate(found["values"]):
        for row in value["rows"]:
            name = row["drafter"], None if single else row["temperature"]
            lines.setdefault(name, {})[index] = row
    return lines


def _speeds(found: dict[str, Any]) -> list[str]:
    """A table with the values across and a drafter in each line."""
    values = [_shown(value["value"]) for value in found["values"]]
    head = ["drafter", "T", *(f"{found['key']} = {value}" for value in values)]
    lines = []
    for rows in series(found).values():
        first, *others = rows.values()
        varies = any(row["temperature"] != first["temperature"] for row in others)
        cells = [shown_name(first), "-" if varies else f"{first['temperature']:g}"]
        for row in map(rows.get, range(len(values))):
            cells.append(f"{number(row['tokens_per_second'], 1)} ({number(row['speedup'], 2, 'x')})" if row else "-")
        lines.append(cells)
    return ["## tokens/s (speedup)", "", *table(head, lines), ""]


def _all_figures(found: dict[str, Any]) -> list[str]:
    head = [found["key"], "drafter", "T", "tokens/s", "speedup", "tau", "ppl", "J/token"]
    lines = []
    for rows in series(found).values():
        for index, row in rows.items():
            about = [_shown(found["values"][index]["value"]), shown_name(row), f"{row['temperature']:g}"]
            speed = [number(row["tokens_per_second"], 1), speedup_with_interval(row), number(row["tau"], 2)]
            more = [number(row["perplexity"], 2), number(row.get("joules_per_token"), 3)]
            lines.append([*about, *speed, *more])
    return ["## All figures", "", *table(head, lines, texts=2), ""]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def numeric(values: list[Any]) -> list[float] | None:
    """The values as numbers, a list of one number being that number; None where one is something else."""
    flat = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in flat):
        return None
    return [float(value) for value in flat]


def draw_picture(found: dict[str, Any], out: Path) -> None:
    """Draw sweep.png; raises PictureError as ``drawing`` does."""
    with drawing(out / DATA, out / PAGE):
        _draw(found, out / PICTURE)


def _draw(found: dict[str, Any], path: Path) -> None:
    """Speed and speedup over the values, joined by lines where they are numbers; a row of panels a temperature."""
    lines = series(found)
    temperatures = list(dict.fromkeys(temperature for _, temperature in lines))
    size = (11, 3.6 * len(temperatures))
    figure, panels = plt.subplots(len(temperatures), 2, figsize=size, squeeze=False, sharex=True)
    for pair, temperature in zip(panels, temperatures, strict=True):
        chosen = [rows for (_, at), rows in lines.items() if at == temperature]
        _panels(pair, found, chosen, "" if temperature is None else f"T = {temperature:g}, ")
    panels[0][1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, path)


def _panels(pair: Sequence[Axes], found: dict[str, Any], lines: list[dict[int, Row]], where: str) -> None:
    given = [value["value"] for value in found["values"]]
    numbers = numeric(given)
    places = numbers or [float(index) for index in range(len(given))]
    style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.2 if numbers else 0}
    speeds, speedups = pair
    for rows in lines:
        shown = sorted(((places[i], row) for i, row in rows.items() if row["speedup"] is not None), key=itemgetter(0))
        x, y = [place for place, _ in shown], [row["speedup"] for _, row in shown]
        intervals = [row["speedup_ci"] or (row["speedup"], row["speedup"]) for _, row in shown]
        below = [middle - low for middle, (low, _) in zip(y, intervals, strict=True)]
        above = [high - middle for middle, (_, high) in zip(y, intervals, strict=True)]
        speeds.plot(x, [row["tokens_per_second"] for _, row in shown], **style)
        speedups.errorbar(x, y, yerr=[below, above], capsize=2, label=shown_name(next(iter(rows.values()))), **style)
    speedups.axhline(1.0, color="black", linewidth=0.8)
    for panel, title in ((speeds, "tokens/s"), (speedups, "speedup over plain decoding (95% interval)")):
        panel.set_title(where + title, fontsize=10)
        panel.set_xlabel(found["key"], fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        if numbers and min(numbers) > 0 and max(numbers) >= 8 * min(numbers):
            panel.set_xscale("log", base=2)
        panel.set_xticks(places, [_shown(value) for value in given], fontsize=8)
        panel.minorticks_off()

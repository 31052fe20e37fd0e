"""Measure every value of a sweep, and write sweep.json, sweep.md and sweep.png."""

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from drafters.common.files import replace_json, replace_text
from eval.configs import SweepConfig, folder_name
from eval.measure.lineup import check_options
from eval.measure.models import Models, load_models
from eval.report.charts import Axes, Figure, save
from eval.report.page import setting
from eval.report.remarks import warnings
from eval.report.speed import finished_report, measure_and_report
from eval.report.tables import Row, number, run_again, say, shown_name, speedup_with_interval, table

DATA, PAGE, PICTURE = "sweep.json", "sweep.md", "sweep.png"
KEPT = (
    "drafter", "entry", "grid", "temperature", "lossless", "stock", "tokens_per_second", "speedup", "speedup_ci",
    "tau", "perplexity", "joules_per_token", "exact_match", "overhead", "prompts",
)  # fmt: skip
Series = dict[tuple[str, float | None], dict[int, Row]]


def sweep(config: SweepConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure every value that has no report yet, write the files after each, and return sweep.json."""
    key, values = config.varied
    configs = config.speed_configs()
    for one in configs:
        check_options(one.entries)
    reports: list[dict[str, Any]] = []
    models: Models | None = None
    loaded = None
    for place, one in enumerate(configs, start=1):
        console.rule(f"{folder_name(key, values[place - 1])} ({place} of {len(values)})")
        report = finished_report(one)
        if report is None:
            if models is None or loaded != one.target:
                models = None  # freed before the next one is loaded
                models, loaded = load_models(one.target), one.target
            report = measure_and_report(one, argv, console, models)
        else:
            say(console, f"measured before, {report['environment']['date']}: kept")
        reports.append(report)
        summary = summarise(key, values[:place], [one.out.name for one in configs[:place]], reports, argv)
        replace_json(config.out / DATA, summary)
        replace_text(config.out / PAGE, markdown(summary, reports))
    draw(summary, config.out / PICTURE)
    say(console, f"{config.out / PAGE}")
    return summary


def summarise(
    key: str, values: list[Any], folders: list[str], reports: list[dict[str, Any]], argv: list[str]
) -> dict[str, Any]:
    """Return sweep.json: of every value's report the figures that are compared."""
    entries = []
    for value, folder, report in zip(values, folders, reports, strict=True):
        facts = report["environment"]
        rows = [{name: row[name] for name in KEPT if name in row} for row in report["rows"]]
        about = {name: facts[name] for name in ("date", "commit", "dirty", "load_average")}
        entries.append({"value": value, "folder": folder, **about, "rows": rows})
    return {"format_version": 1, "key": key, "values": entries, "argv": argv}


def markdown(summary: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    """Return ``sweep.md``."""
    key, values = summary["key"], summary["values"]
    lines = [f"# Sweep over {key}", "", *setting(reports[0])]
    lines += [f"- this is the setting at {key} = {_shown(values[0]['value'])}; every value has its own report", ""]
    lines += [f"![speed over {key}]({PICTURE})", "", *_tables(summary), "## Every value's own report", ""]
    for value, report in zip(values, reports, strict=True):
        about = f"{value['date']}, commit {(value['commit'] or 'unknown')[:12]}"
        lines.append(f"- [{value['folder']}](<{value['folder']}/report.md>): {about}")
        lines += [f"  - **{line}**" for line in warnings(report)]
    lines += ["", "Speedups are over plain decoding at the same value. Every report explains the columns.", ""]
    return "\n".join([*lines, *run_again(summary["argv"])])


def series(summary: dict[str, Any]) -> Series:
    """Return the rows by drafter and temperature, then by the index of the value.

    The temperature is None if each value has one temperature, which may be what varies.
    """
    single = all(len({row["temperature"] for row in value["rows"]}) == 1 for value in summary["values"])
    lines: Series = {}
    for index, value in enumerate(summary["values"]):
        for row in value["rows"]:
            lines.setdefault((row["drafter"], None if single else row["temperature"]), {})[index] = row
    return lines


def _tables(summary: dict[str, Any]) -> list[str]:
    """Return a table of speeds with the values across, and one with all figures."""
    values = [_shown(value["value"]) for value in summary["values"]]
    across, figures = [], []
    for rows in series(summary).values():
        first, *others = rows.values()
        varies = any(row["temperature"] != first["temperature"] for row in others)
        cells = [shown_name(first), "-" if varies else f"{first['temperature']:g}"]
        for row in map(rows.get, range(len(values))):
            cells.append(f"{number(row['tokens_per_second'], 1)} ({number(row['speedup'], 2, 'x')})" if row else "-")
        across.append(cells)
        for index, row in rows.items():
            about = [values[index], shown_name(row), f"{row['temperature']:g}"]
            speed = [number(row["tokens_per_second"], 1), speedup_with_interval(row), number(row["tau"], 2)]
            figures.append([*about, *speed, number(row["perplexity"], 2), number(row.get("joules_per_token"), 3)])
    lines = ["## tokens/s (speedup)", ""]
    lines += table(["drafter", "T", *(f"{summary['key']} = {value}" for value in values)], across)
    head = [summary["key"], "drafter", "T", "tokens/s", "speedup", "tau", "ppl", "J/token"]
    return [*lines, "", "## All figures", "", *table(head, figures, texts=2), ""]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def numeric(values: list[Any]) -> list[float] | None:
    """Return the values as numbers, a list of one number as that number; None if one is something else."""
    flat = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in flat):
        return None
    return [float(value) for value in flat]


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw speed and speedup over the values, with lines between numbers; a row of panels per temperature."""
    lines = series(summary)
    temperatures = list(dict.fromkeys(temperature for _, temperature in lines))
    figure = Figure(figsize=(11, 3.6 * len(temperatures)))
    panels = figure.subplots(len(temperatures), 2, squeeze=False, sharex=True)
    for pair, temperature in zip(panels, temperatures, strict=True):
        chosen = [rows for (_, at), rows in lines.items() if at == temperature]
        _panels(pair, summary, chosen, "" if temperature is None else f"T = {temperature:g}, ")
    panels[0][1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, path)


def _panels(pair: Sequence[Axes], summary: dict[str, Any], lines: list[dict[int, Row]], title: str) -> None:
    values = [value["value"] for value in summary["values"]]
    numbers = numeric(values)
    places = numbers or [float(index) for index in range(len(values))]
    style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.2 if numbers else 0}
    speeds, speedups = pair
    for rows in lines:
        shown = sorted(((places[i], row) for i, row in rows.items() if row["speedup"] is not None), key=itemgetter(0))
        x, y = [place for place, _ in shown], [row["speedup"] for _, row in shown]
        intervals = [row["speedup_ci"] or (row["speedup"], row["speedup"]) for _, row in shown]
        errors = [
            [y[n] - low for n, (low, _) in enumerate(intervals)],
            [high - y[n] for n, (_, high) in enumerate(intervals)],
        ]
        speeds.plot(x, [row["tokens_per_second"] for _, row in shown], **style)
        speedups.errorbar(x, y, yerr=errors, capsize=2, label=shown_name(next(iter(rows.values()))), **style)
    speedups.axhline(1.0, color="black", linewidth=0.8)
    for panel, what in ((speeds, "tokens/s"), (speedups, "speedup over plain decoding (95% interval)")):
        panel.set_title(title + what, fontsize=10)
        panel.set_xlabel(summary["key"], fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        if numbers and min(numbers) > 0 and max(numbers) >= 8 * min(numbers):
            panel.set_xscale("log", base=2)
        panel.set_xticks(places, [_shown(value) for value in values], fontsize=8)
        panel.minorticks_off()

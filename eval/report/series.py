"""Measure every value of a sweep, and write sweep.json and sweep.md."""

import json
from typing import Any

from rich.console import Console

from drafters.common.files import replace_json, replace_text
from eval.configs import SweepConfig, folder_name
from eval.measure.lineup import check_options
from eval.measure.models import Models, load_models
from eval.report.measured import finished_report, measure_and_report
from eval.report.page import setting
from eval.report.remarks import warnings
from eval.report.tables import Row, number, run_again, say, shown_name, speedup_with_interval, table

DATA, PAGE = "sweep.json", "sweep.md"
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
    lines += [*_tables(summary), "## Every value's own report", ""]
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

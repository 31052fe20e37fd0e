"""Search knobs, and write best.yaml, tune.json, tune.md and, for several searches, tuned.yaml."""

import shlex
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from drafters.common.files import replace_json, replace_text
from eval.configs import SpeedConfig, TuneConfig, common_folder
from eval.measure.lineup import Lineup, check_options
from eval.measure.models import Models, load_models
from eval.measure.runs import MeasurementError
from eval.report.measured import finished_report, measure_and_report
from eval.report.page import setting
from eval.report.tables import number, run_again, say, speedup_with_interval, table

BEST, DATA, PAGE, ALL = "best.yaml", "tune.json", "tune.md", "tuned.yaml"


def tune_all(configs: dict[Path, TuneConfig], overrides: list[str], console: Console) -> None:
    """Run the searches of all files in order; of several, tuned.yaml lists the results."""
    for config in configs.values():
        for one in config.planned():
            check_options(one.entries)
    loaded: dict[str, Models] = {}
    for config in configs.values():
        key = config.target.model_dump_json()
        loaded[key] = loaded.get(key) or load_models(config.target)
        for one in config.planned():
            Lineup(one.entries, loaded[key])  # finds wrong values of all knobs
    listed: list[str] = []
    for place, (file, config) in enumerate(configs.items(), start=1):
        if len(configs) > 1:
            console.rule(f"{file} ({place} of {len(configs)})")
        argv = ["python", "-m", "eval.tune", "--config", str(file), *overrides]
        best = tune(config, argv, console, loaded[config.target.model_dump_json()])
        listed.append(_listed(config, best, file))
        if len(configs) > 1:
            replace_text(common_folder(configs) / ALL, "\n".join(listed))
    console.print("\n".join(listed), markup=False, highlight=False, soft_wrap=True)


def tune(config: TuneConfig, argv: list[str], console: Console, models: Models) -> dict[str, Any]:
    """Search, writing the results so far after every knob; return tune.json."""
    chosen = config.first_values()
    stages: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for knob in config.knobs:
        one = config.stage(len(stages) + 1, knob, chosen)
        console.rule(f"{config.drafters[0].base}: {knob} in {config.knobs[knob]}")
        report = finished_report(one) or measure_and_report(one, argv, console, models)
        stages.append(summarise(knob, dict(chosen), one, report, config))
        chosen[knob] = stages[-1]["best"]
        results = {"format_version": 1, "best": dict(chosen), "stages": stages}
        write(config, results | {"argv": argv}, report)
        say(console, f"best {knob}: {chosen[knob]}")
    say(console, f"{config.out / BEST}")
    return results


def best_entry(config: TuneConfig, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a speed config with the values found."""
    entry = config.drafters[0].at(chosen)
    return {"drafter": entry.drafter} | ({"label": entry.label} if entry.label else {}) | entry.options


def _listed(config: TuneConfig, results: dict[str, Any], file: Path) -> str:
    """Return an entry for a speed config as one line of YAML, below a comment with its figures."""
    last = results["stages"][-1]
    row = next(row for row in last["values"] if row["value"] == last["best"])
    figures = (
        f"{number(row['tokens_per_second'], 1)} tokens/s, {speedup_with_interval(row)}, tau {number(row['tau'], 2)}"
    )
    if not row["lossless"]:
        figures += f", perplexity {number(row['perplexity'], 2)} (plain decoding {number(last['plain_perplexity'], 2)})"
    entry = best_entry(config, results["best"]) | {"temperatures": config.temperatures}
    line = yaml.safe_dump([entry], sort_keys=False, default_flow_style=True, width=10**6).strip()
    return f"# {file}: {figures}\n- {line.removeprefix('[').removesuffix(']')}"


def summarise(
    knob: str, chosen: dict[str, Any], one: SpeedConfig, report: dict[str, Any], config: TuneConfig
) -> dict[str, Any]:
    """Return one knob's figures and its best value.

    If no value keeps ``max_perplexity``, the one of least perplexity is best, because later knobs may lower it.
    """
    plain = next(row["perplexity"] for row in report["rows"] if row["grid"] is None)
    rows = [row for row in report["rows"] if row["grid"] is not None]
    columns = ("tokens_per_second", "speedup", "speedup_ci", "tau", "perplexity", "lossless")
    values = [{"value": row["grid"][knob]} | {name: row[name] for name in columns} for row in rows]
    usable = [row for row in values if row["tokens_per_second"] is not None and row["perplexity"] is not None]
    if not usable:
        raise MeasurementError(f"no value of {knob} could be measured; see {one.out}")
    bound = None if config.max_perplexity is None or plain is None else config.max_perplexity * plain
    allowed = [row for row in usable if bound is None or row["perplexity"] <= bound]
    if allowed:
        best = max(allowed, key=lambda row: row["tokens_per_second"])
    else:
        best = min(usable, key=lambda row: row["perplexity"])
    # Values whose intervals overlap the best one's: more prompts might choose them.
    others = (row for row in allowed or usable if row is not best)
    close = [row["value"] for row in others if _overlap(row["speedup_ci"], best["speedup_ci"])]
    return {
        "knob": knob,
        "others": {other: value for other, value in chosen.items() if other != knob},
        "values": values,
        "best": best["value"],
        "not_told_apart": close,
        "plain_perplexity": plain,
        "bound": bound,
        "folder": one.out.name,
    }


def _overlap(a: list[float] | None, b: list[float] | None) -> bool:
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def write(config: TuneConfig, results: dict[str, Any], report: dict[str, Any]) -> None:
    """Write best.yaml, tune.json and tune.md."""
    config.out.mkdir(parents=True, exist_ok=True)
    entry = yaml.safe_dump([best_entry(config, results["best"])], sort_keys=False)
    replace_text(config.out / BEST, f"# Found by: {shlex.join(results['argv'])}\n{entry}")
    replace_json(config.out / DATA, results)
    what = "speed"
    if config.max_perplexity is not None:
        what += f", with at most {config.max_perplexity:g} times the perplexity of plain decoding's outputs"
    lines = [f"# Tuning {config.drafters[0].base} for {what}, T = {config.temperatures[0]:g}", "", *setting(report), ""]
    for stage in results["stages"]:
        lines += _page_of(stage)
    lines += ["## Found", "", "```yaml", entry.rstrip(), "```", ""]
    replace_text(config.out / PAGE, "\n".join([*lines, *run_again(results["argv"])]))


def _page_of(stage: dict[str, Any]) -> list[str]:
    others = ", ".join(f"{knob}={value}" for knob, value in stage["others"].items())
    lines = [f"## {stage['knob']}" + (f" ({others})" if others else ""), ""]
    cells = []
    for row in stage["values"]:
        value = f"{row['value']}{' **best**' if row['value'] == stage['best'] else ''}"
        figures = number(row["tau"], 2), number(row["perplexity"], 2)
        cells.append([value, number(row["tokens_per_second"], 1), speedup_with_interval(row), *figures])
    lines += table([stage["knob"], "tokens/s", "speedup", "tau", "ppl"], cells, texts=0)
    if (bound := stage["bound"]) is not None:
        lines += ["", f"At most {bound:.2f} (plain decoding: {stage['plain_perplexity']:.2f})"]
        if all(row["perplexity"] is None or row["perplexity"] > bound for row in stage["values"]):
            lines[-1] += "; no value keeps this bound, so the one of least perplexity is best"
    if stage["not_told_apart"]:
        shown = ", ".join(map(str, stage["not_told_apart"]))
        lines += ["", f"Not significantly slower than the best (intervals overlap): {shown}"]
    return [*lines, ""]

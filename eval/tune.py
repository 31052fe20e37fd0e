"""Search a drafter's knobs one after the other: Ouroboros' heuristic search (Appendix B.2, Algorithm 1) for any method.

    python -m eval.tune --config configs/tune/ouroboros.yaml [key=value ...]

The config is a speed config with one drafter, one temperature and ``knobs: {option: [values]}``. The knobs are searched
in the order given, all values of one side by side in one alternating run while the others keep the value found, or, not
yet searched, one drawn at the start. ``out`` gets best.yaml (an entry for a speed config), tune.json and tune.md, and a
speed report for every knob. Run again, a search goes on where it stopped.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from drafters.config import load_config, validate
from drafters.provenance import replace_text
from eval import speed
from eval.lineup import Lineup, Models
from eval.measure import MeasurementError
from eval.output import PictureError, check_folder
from eval.page import number, setting, speedup_with_interval
from eval.sweep import finished_report

BEST, DATA, PAGE = "best.yaml", "tune.json", "tune.md"


class TuneConfig(speed.SpeedConfig):
    """A speed config of one drafter at one temperature, and what to search."""

    knobs: dict[str, list[Any]] = Field(min_length=1, description="options (dots for nested ones) and their values")
    start: dict[str, Any] = Field({}, description="values to start from; a knob not named gets one of its own, drawn")
    objective: Literal["speed", "perplexity"] = Field(
        "speed", description="what is best: tokens/s, or for lossy methods the outputs' perplexity under the target"
    )
    passes: int = Field(1, ge=1, description="times all knobs are searched; Algorithm 1 has one")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if len(self.drafters) != 1 or self.drafters[0].grid is not None or len(self.temperatures) != 1:
            raise ValueError(
                f"one drafter without a grid and one temperature are tuned at a time, found {len(self.drafters)} and "
                f"temperatures {self.temperatures}; give a config to each"
            )
        if alien := sorted(set(self.start) - set(self.knobs)):
            raise ValueError(f"start: {alien} are not among the knobs {sorted(self.knobs)}")
        for knob, values in self.knobs.items():
            if not values:
                raise ValueError(f"knobs: {knob} has no values; give two or more")
            if knob in self.start and self.start[knob] not in values:
                raise ValueError(f"start: {knob}={self.start[knob]} is not among its values {values}")
        return self

    def first_values(self) -> dict[str, Any]:
        """Where the search starts: drawn with the run's seed where ``start`` is silent (Algorithm 1's hats)."""
        draw = random.Random(self.seed)
        drawn = {knob: draw.choice(values) for knob, values in self.knobs.items()}
        return drawn | self.start

    def stage(self, number: int, knob: str, chosen: dict[str, Any]) -> speed.SpeedConfig:
        """The speed config that measures all values of ``knob``, the other knobs being as ``chosen``.

        Raises:
            ValueError: an option that the drafter does not have, or a value that it cannot have.
        """
        entry = self.drafters[0].model_dump(mode="json", exclude_unset=True)
        grid = {other: [value] for other, value in chosen.items()} | {knob: self.knobs[knob]}
        own = set(TuneConfig.model_fields) - set(speed.SpeedConfig.model_fields)
        data = self.model_dump(mode="json", exclude=own, exclude_unset=True)
        data |= {"drafters": [entry | {"grid": grid}], "out": str(self.out / f"{number}-{knob}")}
        return validate(speed.SpeedConfig, data, source=f"knobs: {knob}")


def run(config: TuneConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Search, writing what is known so far after every knob; returns what tune.json holds.

    Raises:
        ValueError: something configured is missing or does not fit; found before anything is measured.
        MeasurementError: a method failed while it was measured; the knobs before are kept.
        OSError: a file could not be written.
    """
    check_folder(config.out)
    chosen = config.first_values()
    planned = [config.stage(place, knob, chosen) for place, knob in enumerate(config.knobs, start=1)]
    for one in planned:
        speed.check(one)
    models = speed.load_models(config.target)
    for one in planned:
        Lineup(one.entries, models)  # a value that the last knob cannot have is found now
    stages: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for turn in range(config.passes):
        before = dict(chosen)
        for knob in config.knobs:
            one = config.stage(len(stages) + 1, knob, chosen)
            console.rule(f"{knob} in {config.knobs[knob]}")
            report = measured(one, argv, console, models)
            stage = summarise(knob, dict(chosen), one, report, config.objective)
            chosen[knob] = stage["best"]
            stages.append(stage)
            found = {"format_version": 1, "objective": config.objective, "best": dict(chosen), "stages": stages}
            write(config, found | {"argv": argv}, report)
            console.print(f"best {knob}: {chosen[knob]}", markup=False, highlight=False)
        if turn and chosen == before:
            break
    console.print(f"{config.out / BEST}", markup=False, highlight=False)
    return found


def measured(one: speed.SpeedConfig, argv: list[str], console: Console, models: Models) -> dict[str, Any]:
    """The report of one knob: the one that is there, else measured now."""
    report = finished_report(one)
    if report is None:
        try:
            return speed.run(one, argv, console, models)
        except PictureError as error:
            console.print(str(error), markup=False, highlight=False)
        report = finished_report(one)
        assert report is not None
    return report


def summarise(
    knob: str, chosen: dict[str, Any], one: speed.SpeedConfig, report: dict[str, Any], objective: str
) -> dict[str, Any]:
    """One knob's figures and its best value."""
    rows = [row for row in report["rows"] if row["grid"] is not None]
    kept = ("tokens_per_second", "speedup", "speedup_ci", "tau", "perplexity", "lossless")
    values = [{"value": row["grid"][knob]} | {name: row[name] for name in kept} for row in rows]
    usable = [row for row in values if row["tokens_per_second"] is not None and row["perplexity"] is not None]
    if not usable:
        raise MeasurementError(f"no value of {knob} could be measured; see {one.out}")
    if objective == "speed":
        best = max(usable, key=lambda row: row["tokens_per_second"])
    else:
        best = min(usable, key=lambda row: row["perplexity"])
    others = {other: value for other, value in chosen.items() if other != knob}
    # Within each other's intervals: more prompts might choose another one.
    close = [row["value"] for row in usable if row is not best and _overlap(row["speedup_ci"], best["speedup_ci"])]
    return {"knob": knob, "others": others, "values": values, "best": best["value"], "not_told_apart": close,
            "folder": one.out.name}  # fmt: skip


def _overlap(a: list[float] | None, b: list[float] | None) -> bool:
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def write(config: TuneConfig, found: dict[str, Any], report: dict[str, Any]) -> None:
    """best.yaml, tune.json and tune.md."""
    config.out.mkdir(parents=True, exist_ok=True)
    entry = config.drafters[0].model_copy(update={"grid": {knob: [value] for knob, value in found["best"].items()}})
    best = {"drafter": entry.drafter} | ({"label": entry.label} if entry.label else {}) | entry.options
    command = " ".join(found["argv"])
    replace_text(config.out / BEST, f"# Found by: {command}\n" + yaml.safe_dump([best], sort_keys=False))
    replace_text(config.out / DATA, json.dumps(found, indent=2, allow_nan=False) + "\n")
    lines = [f"# Tuning {entry.base} for {found['objective']}", "", *setting(report), ""]
    for stage in found["stages"]:
        lines += _page_of(stage)
    lines += ["## Found", "", "```yaml", yaml.safe_dump([best], sort_keys=False).rstrip(), "```", ""]
    lines += ["## To run it again", "", f"    {command}", ""]
    replace_text(config.out / PAGE, "\n".join(lines))


def _page_of(stage: dict[str, Any]) -> list[str]:
    others = ", ".join(f"{knob}={value}" for knob, value in stage["others"].items())
    lines = [f"## {stage['knob']}" + (f" ({others})" if others else ""), ""]
    lines += [f"| {stage['knob']} | tokens/s | speedup | tau | ppl |", "| ---: | ---: | ---: | ---: | ---: |"]
    for row in stage["values"]:
        mark = " **best**" if row["value"] == stage["best"] else ""
        lines.append(
            f"| {row['value']}{mark} | {number(row['tokens_per_second'], 1)} | {speedup_with_interval(row)} | "
            f"{number(row['tau'], 2)} | {number(row['perplexity'], 2)} |"
        )
    if stage["not_told_apart"]:
        shown = ", ".join(map(str, stage["not_told_apart"]))
        lines += ["", f"Not told apart from the best by these prompts (intervals overlap): {shown}"]
    return [*lines, ""]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="YAML, see TuneConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example prompts.count=8")
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args(given)
    disable_progress_bar()  # transformers' own, one for every model loaded
    try:
        config = load_config(TuneConfig, parsed.config, parsed.overrides)
        run(config, ["python", "-m", "eval.tune", *given], speed.make_console())
    except (ValueError, OSError, MeasurementError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

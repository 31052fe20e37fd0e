"""``eval.speed`` for several values of one key of its config, one after the other.

    python -m eval.sweep --config configs/sweep/X.yaml [key=value ...]

The config is a speed config and ``vary: {key: [values]}``, a dotted key such as ``max_new_tokens`` or
``prompts.consecutive``.

Every value has its own plain decoding, over which its speedups are, and its own report in ``out/<key>=<value>/``;
``out`` gets sweep.json, sweep.md and sweep.png. The target and the draft models are loaded once, and anew only where
``target`` itself varies. Run again, a sweep goes on where it stopped: a value that has a report, measured with the same
config, is not measured again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from drafters.config import load_config, validate
from eval import speed, sweep_report
from eval.lineup import Models
from eval.measure import MeasurementError
from eval.output import REPORT, PictureError, check_folder


class SweepConfig(speed.SpeedConfig):
    """A speed config, and what varies in it."""

    vary: dict[str, list[Any]] = Field(min_length=1, max_length=1, description="one key, dotted, and its values")

    @model_validator(mode="after")
    def _check_vary(self) -> Self:
        key, values = self.varied
        if not values:
            raise ValueError(f"vary: {key} has no values")
        if key.partition(".")[0] in ("out", "vary"):
            raise ValueError(f"vary: {key} cannot vary: every value's folder is named after it")
        names = [folder_name(key, value) for value in values]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"vary: values must be different, {repeated} stands there twice")
        return self

    @property
    def varied(self) -> tuple[str, list[Any]]:
        """The key and its values."""
        return next(iter(self.vary.items()))

    def speed_configs(self) -> list[speed.SpeedConfig]:
        """A complete config for every value, each with its own folder.

        Raises:
            ValueError: no such key, or a value that it cannot have.
        """
        key, values = self.varied
        configs = []
        for value in values:
            data = self.model_dump(mode="json", exclude={"vary"}, exclude_unset=True)
            name = folder_name(key, value)
            _set(data, key, value)
            data["out"] = str(self.out / name)
            configs.append(validate(speed.SpeedConfig, data, source=f"vary: {name}"))
        return configs


def folder_name(key: str, value: Any) -> str:
    """``key=value``, without the slashes of a path."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}={text}".replace("/", "_")


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"vary: {key} cannot be set, {parent!r} holds a value, not a group of keys")
    data[leaf] = value


def run(config: SweepConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure every value that has no report yet, and write the sweep's files after each.

    Raises:
        ValueError: something configured is missing or does not fit; found before anything is measured.
        MeasurementError: a method failed while it was measured; the values before it are kept.
        OSError: a file could not be written.
        PictureError: only a picture is missing.
    """
    key, values = config.varied
    configs = config.speed_configs()
    check_folder(config.out)
    for one in configs:
        speed.check(one)
    reports: list[dict[str, Any]] = []
    models: Models | None = None
    loaded, missing = None, None
    for place, (value, one) in enumerate(zip(values, configs, strict=True), start=1):
        console.rule(f"{folder_name(key, value)} ({place} of {len(values)})")
        report = finished_report(one)
        if report is None:
            if loaded != one.target:
                models = None  # released before the next is loaded
                models, loaded = speed.load_models(one.target), one.target
            try:
                report = speed.run(one, argv, console, models)
            except PictureError as error:
                missing, report = error, finished_report(one)
                assert report is not None
        else:
            console.print(f"measured before, {report['environment']['date']}: kept", markup=False, highlight=False)
        reports.append(report)
        found = sweep_report.summarise(key, values[:place], [one.out.name for one in configs[:place]], reports, argv)
        sweep_report.write(found, reports, config.out)
    sweep_report.draw_picture(found, config.out)
    console.print(f"{config.out / sweep_report.PAGE}", markup=False, highlight=False)
    if missing is not None:
        raise missing
    return found


def finished_report(config: speed.SpeedConfig) -> dict[str, Any] | None:
    """The report in ``config.out``, if there is one and this very config was measured."""
    file = config.out / REPORT
    if not file.is_file():
        return None
    try:
        report = json.loads(file.read_text())
        same = report["environment"]["config"] == config.model_dump(mode="json")
    except (ValueError, KeyError, TypeError):
        return None  # another program's, or another version's: measured again and replaced
    return report if same else None


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="YAML, see SweepConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example prompts.count=8")
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args(given)
    disable_progress_bar()  # transformers' own, one for every model loaded
    try:
        config = load_config(SweepConfig, parsed.config, parsed.overrides)
        run(config, ["python", "-m", "eval.sweep", *given], speed.make_console())
    except (ValueError, OSError, MeasurementError, PictureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

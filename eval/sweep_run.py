"""What eval.sweep does with its config."""

from typing import Any

from rich.console import Console

from drafters.hub.reports import REPORT, read
from eval import speed_run
from eval.measure.lineup import Models, check_options
from eval.prompts.files import files_sha256
from eval.report import sweep as sweep_report
from eval.report.files import PictureError
from eval.speed import SpeedConfig
from eval.sweep import SweepConfig, folder_name


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
    for one in configs:
        check_options(one.entries)
    reports: list[dict[str, Any]] = []
    models: Models | None = None
    loaded, missing = None, None
    for place, (value, one) in enumerate(zip(values, configs, strict=True), start=1):
        console.rule(f"{folder_name(key, value)} ({place} of {len(values)})")
        report = finished_report(one)
        if report is None:
            if loaded != one.target:
                models = None  # released before the next is loaded
                models, loaded = speed_run.load_models(one.target), one.target
            try:
                report = speed_run.run(one, argv, console, models)
            except PictureError as error:
                missing, report = error, read(one.out)
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


def finished_report(config: SpeedConfig) -> dict[str, Any] | None:
    """The report in ``config.out``, if this very config was measured with the same code, machine and files."""
    file = config.out / REPORT
    if not file.is_file():
        return None
    try:
        report = read(file)
        facts = report["environment"]
        same = facts["config"] == config.model_dump(mode="json")
        same = same and facts["prompt_set"]["sha256"] == files_sha256(config.prompts.read_files)
        same = same and all(facts[name] == value for name, value in speed_run.conditions_of(config).items())
    except (ValueError, KeyError, TypeError):
        return None  # another program's, or another version's: measured again and replaced
    return report if same else None

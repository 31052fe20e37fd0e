"""Every configured drafter on the same prompts, in one loop, beside plain decoding and stock ``generate``.

    python -m eval.speed --config configs/speed/stdlib.yaml [key=value ...]

Writes report.json, report.md, speedup.png and, while it runs, measurements.jsonl (every single run) into ``out``.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import ConfigDict, Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from drafters import Drafter, TargetModel, drafter_class, make_drafter
from drafters.config import Config, load_config
from eval.environment import environment, load_average, peak_memory_bytes
from eval.measure import STOCK, Limits, MeasurementError, Method, Run, drafter_method, measure, stock_method
from eval.picture import draw
from eval.prompts import PromptsConfig, PromptSet, check_prompt_file, load_prompts
from eval.report import make_rows, markdown, print_table, tolerance_note

BASELINE = "autoregressive"
FOLDER_OPTIONS = ("checkpoint", "draft_model")
REPORT, PAGE, PICTURE, JOURNAL = "report.json", "report.md", "speedup.png", "measurements.jsonl"


class TargetConfig(Config):
    """The target to load."""

    path: str = Field(description="folder or Hub repository, with its tokenizer")
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str | None = Field(None, description="None: a GPU where there is one, else the CPU")


class DrafterEntry(Config):
    """One row of the report. Every other key is an option of the drafter; learned ones take ``checkpoint``."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str = Field(description="the method: the name of its file in drafters/")
    label: str | None = Field(None, description="its name in the report; default: the method's")
    temperatures: list[float] | None = Field(None, description="default: all of the run's")

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.label or self.drafter

    @property
    def options(self) -> dict[str, Any]:
        """For ``make_drafter``."""
        return dict(self.model_extra or {})


class SpeedConfig(Config):
    """All paths are relative to the working directory."""

    target: TargetConfig
    prompts: PromptsConfig
    drafters: list[DrafterEntry] = Field(min_length=1, description="plain decoding is added where it is not among them")
    out: Path
    max_new_tokens: int = Field(128, ge=1)
    temperatures: list[float] = Field([0.0, 1.0], min_length=1, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="of sampled rows; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="of sampled rows; 1 is off")
    rounds: int = Field(1, ge=1, description="times every prompt is decoded by every method; the median one counts")
    warmup: int = Field(2, ge=1, description="other prompts that every method decodes first, unmeasured")
    threads: int | None = Field(None, ge=1, description="CPU threads; None leaves it to PyTorch")
    seed: int = Field(0, ge=0, description="of sampling, of the methods' order and of the confidence intervals")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [entry.name for entry in self.entries]
        repeated = sorted({name for name in names if names.count(name) > 1} | ({STOCK} & set(names)))
        if repeated:
            raise ValueError(f"rows need names of their own, {repeated} are taken twice; set label: on the entries")
        if len(set(self.temperatures)) < len(self.temperatures) or min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be different and none below 0, found {self.temperatures}")
        for entry in self.entries:
            if not set(entry.temperatures or []) <= set(self.temperatures):
                raise ValueError(
                    f"{entry.name} asks for temperatures {entry.temperatures}, the run has {self.temperatures}"
                )
        return self

    @property
    def entries(self) -> list[DrafterEntry]:
        """The drafters, plain decoding (at every temperature, for it is what all are compared with) first."""
        plain = [entry for entry in self.drafters if entry.drafter == BASELINE]
        first = plain[0] if plain else DrafterEntry.model_validate({"drafter": BASELINE})
        first = first.model_copy(update={"temperatures": None})
        return [first, *(entry for entry in self.drafters if entry not in plain[:1])]


def run(config: SpeedConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure, write the report and print its table; returns the report.

    Raises:
        ValueError: something configured is missing or does not fit; found before anything is measured.
        MeasurementError: a method failed while it was measured.
    """
    check_paths(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target, tokenizer = load_target(config.target)
    lineup = build_lineup(config.entries, target)
    limits = Limits(config.max_new_tokens, config.top_k, config.top_p, config.seed, eos_ids(target))
    prompts = load_prompts(
        config.prompts,
        tokenizer,
        warmup=config.warmup,
        max_new_tokens=config.max_new_tokens,
        max_context=target.max_context,
    )
    facts = describe(config, argv, target, prompts)
    runs = measure_all(config, target, prompts, limits, console)
    facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
    lossless = {name: drafter.lossless for name, drafter in lineup.items()}
    baseline, rows = make_rows(runs, lossless, config.entries[0].name, prompts.measured, target, config.seed)
    report = {"format_version": 1, "environment": facts, "baseline": baseline, "rows": rows}
    write_report(report, config.out)
    print_table(report, console)
    console.print(f"{config.out / PAGE}, {config.out / REPORT}, {config.out / PICTURE}", highlight=False)
    return report


def check_paths(config: SpeedConfig) -> None:
    """What can be found out before the target is loaded.

    Raises:
        ValueError: no prompt file, unknown drafters, or folders that are not there.
    """
    check_prompt_file(config.prompts.file)
    folders = {"target.path": config.target.path}
    for entry in config.entries:
        drafter_class(entry.drafter)
        folders |= {f"{entry.name}: {key}": entry.options[key] for key in FOLDER_OPTIONS if key in entry.options}
    missing = [f"{key} {path!r}" for key, path in folders.items() if _is_missing_folder(str(path))]
    if missing:
        raise ValueError(
            f"these folders do not exist: {', '.join(missing)}; train or fetch them first, or mend the path"
        )


def _is_missing_folder(path: str) -> bool:
    """A name like ``checkpoints/x`` could be a Hub repository's; where ``checkpoints`` is a folder here, it is not."""
    here = Path(path)
    return not here.exists() and (here.is_absolute() or path.startswith(".") or Path(here.parts[0]).is_dir())


def load_target(config: TargetConfig) -> tuple[TargetModel, Any]:
    """The target and its tokenizer.

    Raises:
        ValueError: nothing loadable there.
    """
    target = TargetModel.from_pretrained(config.path, config.dtype, config.device, config.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, revision=config.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer could be loaded from {config.path!r}: {error}") from error
    return target, tokenizer


def build_lineup(entries: list[DrafterEntry], target: TargetModel) -> dict[str, Drafter]:
    """All drafters by their names in the report.

    Raises:
        ValueError: some cannot be built; one message names them all.
    """
    lineup, problems = {}, []
    for entry in entries:
        try:
            lineup[entry.name] = make_drafter(entry.drafter, target, **entry.options)
        except ValueError as error:
            problems.append(f"{entry.name}: {error}")
    if problems:
        raise ValueError("cannot build the drafters\n  " + "\n  ".join(problems))
    return lineup


def eos_ids(target: TargetModel) -> frozenset[int]:
    """Where outputs end."""
    eos = target.model.generation_config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def describe(config: SpeedConfig, argv: list[str], target: TargetModel, prompts: PromptSet) -> dict[str, Any]:
    """The report's ``environment``."""
    limits = ("max_new_tokens", "temperatures", "top_k", "top_p", "rounds", "warmup", "seed")
    return environment(target.device) | {
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "parameters": sum(weights.numel() for weights in target.model.parameters()),
        },
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "batch": 1,
        "prompt_set": prompts.describe(),
        "limits": {name: getattr(config, name) for name in limits},
        "divergence_tolerance": tolerance_note(target),
        "config": config.model_dump(mode="json"),
        "argv": argv,
    }


def measure_all(
    config: SpeedConfig, target: TargetModel, prompts: PromptSet, limits: Limits, console: Console
) -> list[Run]:
    """Run everything, showing progress and journalling every run; an older report in ``out`` goes first."""
    config.out.mkdir(parents=True, exist_ok=True)
    for name in (REPORT, PAGE, PICTURE):
        (config.out / name).unlink(missing_ok=True)

    def build(temperature: float) -> Mapping[str, Method]:
        entries = [e for e in config.entries if e.temperatures is None or temperature in e.temperatures]
        lineup = build_lineup(entries, target)
        methods = {name: drafter_method(target, drafter, temperature, limits) for name, drafter in lineup.items()}
        return methods | ({STOCK: stock_method(target, limits)} if temperature == 0 else {})

    columns = [
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    ]
    with (
        (config.out / JOURNAL).open("w", encoding="utf-8") as journal,
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress,
    ):
        task = progress.add_task("", total=count_runs(config, prompts), rate="")

        def on_run(method: str) -> None:
            speed = progress.tasks[0].speed
            progress.update(task, description=method, advance=1, rate=f"{speed:.1f} outputs/s" if speed else "")

        return measure(
            build, prompts.measured, prompts.warmup, config.temperatures, config.rounds, limits, journal, on_run
        )


def count_runs(config: SpeedConfig, prompts: PromptSet) -> int:
    """How many outputs there are to make, warm-up included."""
    methods = sum(len(entry.temperatures or config.temperatures) for entry in config.entries)
    methods += 0.0 in config.temperatures
    return methods * config.rounds * (len(prompts.measured) + len(prompts.warmup))


def write_report(report: dict[str, Any], out: Path) -> None:
    """report.json (strict JSON: a NaN is an error), report.md and the picture, each replaced at once."""
    draw(report, out / PICTURE)
    _replace(out / PAGE, markdown(report, Path(PICTURE)))
    _replace(out / REPORT, json.dumps(report, indent=2, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML, see SpeedConfig")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example max_new_tokens=64 prompts.count=8"
    )
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args(given)
    disable_progress_bar()  # transformers' own, one for every model loaded
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)  # a log file: one line a row
    try:
        config = load_config(SpeedConfig, parsed.config, parsed.overrides)
        run(config, ["python", "-m", "eval.speed", *given], console)
    except (ValueError, MeasurementError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

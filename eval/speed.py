"""Every configured drafter on the same prompts, in one loop, beside plain decoding and stock ``generate``.

    python -m eval.speed --config configs/speed/stdlib.yaml [key=value ...]

Writes report.json, report.md, speedup.png and measurements.jsonl (the environment, then every single run with its
tokens and steps) into ``out``. They replace those of an earlier report when everything is measured; until then the runs
so far are in measurements.unfinished.jsonl. ``eval.sweep`` does this for several values of one key.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from data_prep.encoding import load_tokenizer
from drafters import TargetModel
from drafters.config import Config, load_config
from drafters.decoding.loop import eos_ids
from drafters.decoding.target import Engine, Quantization
from drafters.draft_model import load_draft_model
from drafters.environment import environment, load_average
from drafters.provenance import peak_memory_bytes
from eval.energy import Meter
from eval.journal import journal_line
from eval.lineup import DrafterEntry, Lineup, Models, check_entries
from eval.measure import Limits, MeasurementError, Method, Run, drafter_method, measure
from eval.output import PAGE, PICTURE, REPORT, PictureError, check_folder, draw_picture, open_journal, write_report
from eval.page import print_table
from eval.prompts import PromptsConfig, PromptSet, check_prompt_file, load_prompts
from eval.report import make_rows, shortage_line, tolerance_note
from eval.stock import STOCK, StockEntry, stock_method

BASELINE = "autoregressive"


class TargetConfig(Config):
    """The target to load."""

    path: str = Field(description="folder or Hub repository, with its tokenizer")
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str | None = Field(None, description="None: a GPU where there is one, else the CPU")
    engine: Engine | None = Field(None, description="of the target and the draft models; None: each its best")
    device_map: str | dict[str, int | str] | None = Field(
        None, description="in place of device: how accelerate spreads the layers over several GPUs, for example auto"
    )
    quantize: Quantization | None = Field(None, description="the target's layers; stock generate has them as they are")


class SpeedConfig(Config):
    """All paths are relative to the working directory."""

    target: TargetConfig
    prompts: PromptsConfig
    drafters: list[DrafterEntry] = Field(min_length=1, description="plain decoding is added where it is not among them")
    stock: list[StockEntry] = Field([], description="rows of transformers' accelerated generation")
    out: Path
    max_new_tokens: int = Field(128, ge=1)
    temperatures: list[float] = Field([0.0, 1.0], min_length=1, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="of sampled rows; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="of sampled rows; 1 is off")
    rounds: int = Field(1, ge=1, description="odd; times every method decodes every prompt; the median counts")
    warmup: int = Field(2, ge=1, description="other prompts that every method decodes first, unmeasured")
    threads: int | None = Field(None, ge=1, description="CPU threads; None leaves it to PyTorch")
    seed: int = Field(0, ge=0, description="of sampling, of the methods' order and of the confidence intervals")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [entry.name for entry in self.entries] + [entry.label for entry in self.stock]
        repeated = sorted({name for name in names if names.count(name) > 1} | ({STOCK} & set(names)))
        if repeated:
            raise ValueError(f"rows need names of their own, {repeated} are taken twice; set label: on the entries")
        if len(set(self.temperatures)) < len(self.temperatures) or min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be different and none below 0, found {self.temperatures}")
        if self.rounds % 2 == 0:
            raise ValueError(
                f"rounds is {self.rounds}, and of an even number none is the median: give {self.rounds - 1} or "
                f"{self.rounds + 1}"
            )
        for entry in self.entries:
            if not set(entry.temperatures or []) <= set(self.temperatures):
                raise ValueError(
                    f"{entry.name} asks for temperatures {entry.temperatures}, the run has {self.temperatures}"
                )
        return self

    @property
    def entries(self) -> list[DrafterEntry]:
        """The drafters, grids expanded; plain decoding, with which all are compared, at every temperature and first."""
        plain = [entry for entry in self.drafters if entry.drafter == BASELINE]
        first = plain[0] if plain else DrafterEntry.model_validate({"drafter": BASELINE})
        first = first.model_copy(update={"temperatures": None})
        others = [entry for entry in self.drafters if entry not in plain[:1]]
        return [entry for given in (first, *others) for entry in given.expand()]


def check(config: SpeedConfig) -> None:
    """What can be found out before the target is loaded.

    Raises:
        ValueError: unknown drafters, files or folders that are not there, or an ``out`` that cannot be written to.
    """
    for file in config.prompts.files:
        check_prompt_file(file)
    paths = {"target.path": config.target.path}
    paths |= {f"{e.label}: assistant_model": e.assistant_model for e in config.stock if e.assistant_model}
    check_entries(config.entries, paths)
    check_folder(config.out)


def load_models(chosen: TargetConfig, tokens: int = 0) -> Models:
    """The target; draft models join it when they are needed.

    Args:
        tokens: of the longest text that is known already, for whose cache the memory has to suffice, too.

    Raises:
        ValueError: it cannot be loaded, or there is too little memory.
    """

    def load(engine: Engine | None, quantize: Quantization | None) -> TargetModel:
        where = chosen.path, chosen.dtype, chosen.device, chosen.revision
        return TargetModel.from_pretrained(
            *where, engine, quantize, device_map=chosen.device_map, cache_tokens=(1, tokens)
        )

    target = load(chosen.engine, chosen.quantize)
    return Models(target, chosen.engine, load("eager", None) if chosen.quantize else target)


def run(config: SpeedConfig, argv: list[str], console: Console, models: Models | None = None) -> dict[str, Any]:
    """Measure, write the report and print its table; returns the report.

    Args:
        models: of ``config.target``, where they are loaded already.

    Raises:
        ValueError: something configured is missing or does not fit; found before anything is measured.
        MeasurementError: a method failed while it was measured.
        OSError: a file could not be written.
        PictureError: only the picture is missing.
    """
    check(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    longest = (config.prompts.max_prompt_tokens or 0) + config.max_new_tokens
    models = models or load_models(config.target, longest)
    target = models.target
    lineup = Lineup(config.entries, models)
    assistants = load_assistants(config.stock, models)
    prompts = load_prompts(
        config.prompts,
        load_tokenizer(config.target.path, config.target.revision).tokenizer,
        warmup=config.warmup,
        max_new_tokens=config.max_new_tokens,
        max_context=min([lineup.max_context, *(assistant.max_context for assistant in assistants.values())]),
    )
    if shortage := shortage_line(prompts.describe()):
        console.print(shortage, style="bold red", markup=False, highlight=False)
    facts = describe(config, argv, target, prompts)
    meter = Meter(target.device)
    runs = measure_all(config, target, models.stock, lineup, assistants, prompts, facts, meter, console)
    facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
    facts["energy"] = meter.describe()
    described = lineup.describe()
    for entry in config.stock:
        described[entry.label] = {"lossless": True, "stock": True, "entry": entry.label, "grid": None}
    baseline, rows = make_rows(runs, described, config.entries[0].name, prompts.measured, target, config.seed)
    report = {"format_version": 1, "environment": facts, "baseline": baseline, "rows": rows}
    try:
        write_report(report, config.out)
    finally:
        print_table(report, console)  # should the disk be full, the figures are at least on the screen
    draw_picture(report, config.out)
    console.print(f"{config.out / PAGE}, {config.out / REPORT}, {config.out / PICTURE}", markup=False, highlight=False)
    return report


def load_assistants(entries: list[StockEntry], models: Models) -> dict[str, TargetModel]:
    """The assistants of stock generation by the entries' labels, shared with drafters of the same draft model.

    Raises:
        ValueError: one cannot be loaded, or has another vocabulary than the target.
    """
    chosen = {entry.label: entry.assistant_model for entry in entries if entry.assistant_model is not None}
    return {label: load_draft_model(models.target, models.draft_model(path)) for label, path in chosen.items()}


def describe(config: SpeedConfig, argv: list[str], target: TargetModel, prompts: PromptSet) -> dict[str, Any]:
    """The report's ``environment``."""
    limits = ("max_new_tokens", "temperatures", "top_k", "top_p", "rounds", "warmup", "seed")
    return environment(target) | {
        "batch": 1,
        "prompt_set": prompts.describe(),
        "limits": {name: getattr(config, name) for name in limits},
        "divergence_tolerance": tolerance_note(target),
        "config": config.model_dump(mode="json"),
        "argv": argv,
    }


def measure_all(
    config: SpeedConfig,
    target: TargetModel,
    stock: TargetModel,
    lineup: Lineup,
    assistants: dict[str, TargetModel],
    prompts: PromptSet,
    facts: dict[str, Any],
    meter: Meter,
    console: Console,
) -> list[Run]:
    """Run everything, showing progress and journalling every run."""
    limits = Limits(config.max_new_tokens, config.top_k, config.top_p, config.seed, eos_ids(target, None))

    def build(temperature: float) -> Mapping[str, Method]:
        drafters = lineup.fresh(temperature).items()
        methods = {name: drafter_method(target, drafter, temperature, limits) for name, drafter in drafters}
        for entry in config.stock:
            methods[entry.label] = stock_method(stock, temperature, limits, entry, assistants.get(entry.label))
        return methods | {STOCK: stock_method(stock, temperature, limits)}

    columns = [
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    ]
    with (
        open_journal(config.out, facts) as journal,
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress,
    ):
        task = progress.add_task("", total=count_runs(config, prompts), rate="")

        def on_run(method: str) -> None:
            speed = progress.tasks[0].speed
            progress.update(task, description=method, advance=1, rate=f"{speed:.1f} outputs/s" if speed else "")

        def keep(run: Run) -> None:
            line = journal_line(run, prompts.measured[run.prompt])
            journal.write(json.dumps(line, allow_nan=False) + "\n")
            journal.flush()

        measured, others = prompts.measured, prompts.warmup
        return measure(build, measured, others, config.temperatures, config.rounds, limits, keep, on_run, meter)


def count_runs(config: SpeedConfig, prompts: PromptSet) -> int:
    """How many outputs there are to make, warm-up and stock ``generate`` included."""
    methods = sum(len(entry.temperatures or config.temperatures) for entry in config.entries)
    methods += (len(config.stock) + 1) * len(config.temperatures)
    return methods * config.rounds * (len(prompts.measured) + len(prompts.warmup))


def make_console() -> Console:
    """The screen, or a log file, where a row has a line to itself."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


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
    console = make_console()
    try:
        config = load_config(SpeedConfig, parsed.config, parsed.overrides)
        run(config, ["python", "-m", "eval.speed", *given], console)
    except (ValueError, OSError, MeasurementError, PictureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

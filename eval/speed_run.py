"""What eval.speed does with its config."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from data_prep.encoding import load_tokenizer
from drafters import TargetModel
from drafters.choices import Engine, Quantization
from drafters.decoding.loop import eos_ids
from drafters.draft_model import load_draft_model
from drafters.environment import environment, load_average
from drafters.provenance import peak_memory_bytes
from eval.energy import Meter
from eval.entries import STOCK, StockEntry
from eval.journal import journal_line
from eval.lineup import Lineup, Models
from eval.measure import Limits, Method, Run, drafter_method, measure
from eval.output import PAGE, PICTURE, REPORT, draw_picture, open_journal, write_report
from eval.page import print_table
from eval.prompts import PromptSet, load_prompts
from eval.report import make_rows, shortage_line, tolerance_note
from eval.speed import SpeedConfig, TargetConfig
from eval.stock import stock_method


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

    disable_progress_bar()  # transformers' own, one for every model loaded
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
        if config.stock_generate:
            methods[STOCK] = stock_method(stock, temperature, limits)
        return methods

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
    methods += (len(config.stock) + config.stock_generate) * len(config.temperatures)
    return methods * config.rounds * (len(prompts.measured) + len(prompts.warmup))


def make_console() -> Console:
    """The screen, or a log file, where a row has a line to itself."""
    console = Console()
    return console if console.is_terminal else Console(width=170)

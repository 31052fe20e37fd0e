"""What eval.speed does with its config."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from data_prep.dialogues.encoding import load_tokenizer
from data_prep.progress import Bar
from drafters import TargetModel
from drafters.decoding.call import eos_ids
from drafters.drafting.draft_model import load_draft_model
from drafters.program import keeping
from drafters.provenance import environment, load_average, peak_memory_bytes
from eval.entries import STOCK, StockEntry
from eval.figures.quantisation import quantisation_cost
from eval.measure.energy import EnergyMeter
from eval.measure.identity import Identity, conditions, digest
from eval.measure.journal import RunJournal
from eval.measure.lineup import Lineup, Models, check_options
from eval.measure.runner import Limits, Method, Run, drafter_method, measure
from eval.measure.stock import stock_method
from eval.prompts import PromptSet, load_prompts
from eval.report.files import PAGE, PICTURE, REPORT, draw_picture, write_report
from eval.report.page import print_table
from eval.report.rows import failures, make_rows, shortage_line, tolerance_note
from eval.speed import SpeedConfig, TargetEntry


class Guests(Protocol):
    """Methods that live elsewhere than in this process and take their turns beside ours (``eval.engines_run``).

    Attributes:
        described: by label, what the report's rows say of each. facts: for the report's environment.
    """

    described: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    def start(self, target: TargetModel, prompts: PromptSet, limits: Limits) -> None:
        """Load what can be loaded; before, ``described`` is empty."""

    def methods(self, temperature: float, limits: Limits) -> Mapping[str, Method]:
        """By label."""


def load_models(chosen: TargetEntry, tokens: int = 0) -> Models:
    """The target; draft models join it when they are needed.

    Args:
        tokens: of the longest text that is known already, for whose cache the memory has to suffice, too.

    Raises:
        ValueError: it cannot be loaded, or there is too little memory.
    """

    disable_progress_bar()  # transformers' own, one for every model loaded
    where = chosen.path, chosen.dtype, chosen.device, chosen.revision
    more: dict[str, Any] = {"device_map": chosen.device_map, "cache_tokens": (1, tokens)}
    target = TargetModel.from_pretrained(*where, chosen.engine, chosen.quantize, **more)
    stock = TargetModel.from_pretrained(*where, "eager", **more) if chosen.quantize else target
    return Models(target, chosen.engine, stock)


def run(
    config: SpeedConfig, argv: list[str], console: Console, models: Models | None = None, guests: Guests | None = None
) -> dict[str, Any]:
    """Measure, write the report and print its table; returns the report.

    Args:
        models: of ``config.target``, where they are loaded already.
        guests: methods from elsewhere.

    Raises:
        ValueError: something configured is missing or does not fit; found before anything is measured.
        MeasurementError: a method failed while it was measured.
        OSError: a file could not be written.
        PictureError: only the picture is missing.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_options(config.entries)
    models = models or load_models(config.target, config.prompts.longest + config.max_new_tokens)
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
    limits = Limits(config.max_new_tokens, config.top_k, config.top_p, config.seed, eos_ids(target, None))
    if guests is not None:
        guests.start(target, prompts, limits)
        facts |= guests.facts

    def methods(temperature: float) -> list[str]:
        return [*config.methods(temperature), *(guests.described if guests is not None else ())]

    with RunJournal(config.out, identity(facts, prompts), facts, methods) as journal, keeping(journal.kept):
        for note in journal.notes:
            console.print(note, markup=False, highlight=False)
        meter = EnergyMeter(target.device)
        measure_all(config, target, models.stock, lineup, assistants, prompts, journal, meter, limits, guests)
        facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
        facts["energy"] = meter.describe()
        names = described_rows(config, lineup, guests), config.entries[0].name
        facts |= quantised(models, [run for run in journal.runs if run.method == names[1]], prompts)
        baseline, rows = make_rows(journal.runs, *names, prompts.measured, target, config.seed)
        report = {"format_version": 1, "environment": facts, "baseline": baseline, "rows": rows}
        report["failures"] = failures(journal.runs, names[0], prompts.measured)
        try:
            write_report(report, config.out, journal)
        finally:
            print_table(report, console)  # should the disk be full, the figures are at least on the screen
        draw_picture(report, config.out)
    console.print(f"{config.out / PAGE}, {config.out / REPORT}, {config.out / PICTURE}", markup=False, highlight=False)
    return report


def described_rows(config: SpeedConfig, lineup: Lineup, guests: Guests | None) -> dict[str, dict[str, Any]]:
    """Every row's label, in the report's order, and what is known of it."""
    stock = {e.label: {"lossless": True, "stock": True, "entry": e.label, "grid": None} for e in config.stock}
    return {**lineup.described, **stock, **(guests.described if guests is not None else {})}


def quantised(models: Models, plain: list[Run], prompts: PromptSet) -> dict[str, Any]:
    """What quantising cost the target, over prompts and plain decoding's answers; nothing for one that is as it was."""
    if models.target.quantize is None:
        return {}
    texts = [prompts.measured[run.prompt].ids + run.tokens for run in plain if run.round == 0]
    return {"quantisation": quantisation_cost(models.stock, models.target, texts)}


def identity(facts: dict[str, Any], prompts: PromptSet) -> Identity:
    """What runs must share to stand in one report; see ``eval.measure.identity``."""
    config = {key: value for key, value in facts["config"].items() if key != "out"}
    names = ("device", "engine", "commit", "cpu", "cpu_cores", "gpu", "platform", "versions", "threads")
    kept = {name: facts[name] for name in (*names, "code", "host", "files")}
    kept |= {"engines": facts["engines"]} if "engines" in facts else {}
    ids = [[prompt.ids for prompt in some] for some in (prompts.measured, prompts.warmup)]
    return {"config": config, "weights": facts["target"]["fingerprint"], "prompt_tokens": digest(ids), **kept}


def conditions_of(config: SpeedConfig) -> Identity:
    """Code, commit, machine and files with which it would be measured now."""
    return conditions(config.paths, config.target.device, config.threads)


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
    return (
        environment(target)
        | conditions_of(config)
        | {
            "batch": 1,
            "prompt_set": prompts.describe(),
            "limits": {name: getattr(config, name) for name in limits},
            "divergence_tolerance": tolerance_note(target),
            "config": config.model_dump(mode="json"),
            "argv": argv,
        }
    )


def measure_all(
    config: SpeedConfig,
    target: TargetModel,
    stock: TargetModel,
    lineup: Lineup,
    assistants: dict[str, TargetModel],
    prompts: PromptSet,
    journal: RunJournal,
    meter: EnergyMeter,
    limits: Limits,
    guests: Guests | None,
) -> None:
    """Measure what the journal does not hold yet, with a progress bar; every run goes into the journal."""

    def build(temperature: float) -> Mapping[str, Method]:
        drafters = lineup.fresh(temperature).items()
        methods = {name: drafter_method(target, drafter, temperature, limits) for name, drafter in drafters}
        for entry in config.stock:
            methods[entry.label] = stock_method(stock, temperature, limits, entry, assistants.get(entry.label))
        if config.stock_generate:
            methods[STOCK] = stock_method(stock, temperature, limits)
        return methods if guests is None else {**methods, **guests.methods(temperature, limits)}

    measured, others = prompts.measured, prompts.warmup
    each = sum(len(config.methods(t)) + len(guests.described if guests else ()) for t in config.temperatures)
    total = each * config.rounds * len(measured)
    remembering = lineup.remembering | {entry.label for entry in config.stock if entry.remembers}
    done = list(journal.runs)
    with Bar(total=total, initial=len(done), unit=" outputs", leave=False) as bar:

        def on_run(method: str) -> None:
            bar.set_description(f"{method:<24}", refresh=False)

        rounds = config.temperatures, config.rounds
        for run in measure(build, measured, others, *rounds, limits, on_run, meter, done, remembering):
            journal.write(run, measured[run.prompt])
            bar.update()

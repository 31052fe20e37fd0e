"""What eval.speed does with its config."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from data_prep.answers.target import end_of_turn
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank, say_dtype
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from drafters import TargetModel, make_drafter
from drafters.cli.program import keeping
from drafters.common.energy import EnergyMeter
from drafters.common.machine import environment, peak_memory_bytes
from drafters.common.provenance import load_average
from drafters.common.threads import fewest_threads, set_threads
from drafters.common.wording import dtype_name, shortened
from drafters.drafting.draft_model import load_draft_model
from drafters.loop.call import eos_ids
from drafters.loop.state import until
from drafters.model.draft_head import TextTokens
from eval.figures.accuracy import accuracy
from eval.figures.coverage import add_coverage
from eval.figures.quantisation import quantisation_cost
from eval.measure.entries import STOCK, StockEntry
from eval.measure.identity import Identity, conditions, digest
from eval.measure.journal import ALONE, RunJournal
from eval.measure.lineup import Lineup, Models, check_options
from eval.measure.programs import confinement
from eval.measure.runner import Limits, Method, Run, drafter_method, measure
from eval.measure.stock import stock_method
from eval.measure.turns import ANSWERS, with_later_turns
from eval.prompts.prompts import Prompt, PromptSet, in_whole_batches, load_prompts, longest_prompt, shown_sizes
from eval.report.build import build, ending
from eval.report.files import write_pages, write_report
from eval.report.judged import judge
from eval.report.page import print_table
from eval.report.rows import shortage_line, tolerance_note
from eval.report.texts import make_texts
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


def load_models(chosen: TargetEntry, tokens: int = 0, batch: int = 1, rank: Rank = ALONE) -> Models:
    """The target; draft models join it when they are needed.

    Args:
        tokens: of the longest text that is known already. batch: of so many such texts the cache has to fit, too.
        rank: of several processes, each of which has a GPU of its own where no particular one is configured.

    Raises:
        ValueError: it cannot be loaded, or there is too little memory.
    """

    disable_progress_bar()  # transformers' own, one for every model loaded
    device = chosen.device if chosen.device_map is not None else rank.device(chosen.device)
    where = chosen.path, chosen.dtype, device, chosen.revision
    more: dict[str, Any] = {"device_map": chosen.device_map, "cache_tokens": (batch, tokens)}
    target = TargetModel.from_pretrained(*where, chosen.engine, chosen.quantize, **more)
    say_dtype(chosen.path, chosen.dtype, dtype_name(target.dtype), rank)
    stock = TargetModel.from_pretrained(*where, "eager", **more) if chosen.quantize else target
    return Models(target, chosen.engine, stock)


def tokenizer_of(chosen: TargetEntry) -> Any:
    """The target's tokenizer, with a chat template; raises ValueError where there is none."""
    return _chat_of(chosen).tokenizer


def _chat_of(chosen: TargetEntry) -> ChatTokenizer:
    template = None if chosen.chat_template is None else str(chosen.chat_template)
    return load_tokenizer(chosen.path, chosen.revision, template)


def answer_ends(chosen: TargetEntry, target: TargetModel) -> frozenset[int]:
    """Tokens that end an answer: the generation config's, and the one that the template prints behind answers."""
    return eos_ids(target, None) | end_of_turn(target, _chat_of(chosen))


def run(
    config: SpeedConfig,
    argv: list[str],
    console: Console,
    models: Models | None = None,
    guests: Guests | None = None,
    rank: Rank = ALONE,
) -> dict[str, Any]:
    """Measure, write the report and print its table; returns the report.

    Args:
        models: of ``config.target``, where they are loaded already.
        guests: methods from elsewhere.
        rank: of several processes that share the prompts. The one that ends last writes the report of all; the others
            return an empty one.

    Raises:
        ValueError: something configured is missing or does not fit; found before anything is measured.
        MeasurementError: a method failed while it was measured.
        OSError: a file could not be written.
        PictureError: only the picture is missing.
    """
    set_threads(config.threads)
    check_options(config.entries)
    longest = config.prompts.longest + config.max_new_tokens
    models = models or load_models(config.target, longest, max(config.batch), rank)
    target = models.target
    lineup = Lineup(config.entries, models)
    left_out = refused(config, lineup)
    assistants = load_assistants(config.stock, models)
    most = min([lineup.max_context, *(model.max_context for model in assistants.values())])
    limits = Limits(config.max_new_tokens, config.top_k, config.top_p, config.seed, answer_ends(config.target, target))
    prompts = prompts_for(config, target, most, limits)  # a dialogue's earlier answers end where they end
    limits = replace(limits, eos=frozenset()) if config.ignore_eos else limits
    if shortage := shortage_line(prompts.describe()):
        console.print(shortage, style="bold red", markup=False, highlight=False)
    share = share_of(rank, len(prompts.measured), config.batch)
    facts = describe(config, argv, target, prompts) | ({"processes": rank.count} if rank.count > 1 else {})
    if guests is not None:
        guests.start(target, prompts, limits)
        facts |= guests.facts

    def methods(temperature: float, batch: int) -> list[str]:
        alone = [row["drafter"] for row in left_out if (row["temperature"], row["batch"]) == (temperature, batch)]
        known = [*config.methods(temperature), *(guests.described if guests is not None else ())]
        return [name for name in known if name not in alone]

    with RunJournal(config.out, identity(facts, prompts), facts, methods, rank) as journal, keeping(journal.kept):
        for note in journal.notes:
            console.print(note, markup=False, highlight=False)
        meter = EnergyMeter(target.device, shared=rank.count > 1)
        measure_all(config, methods, models, lineup, assistants, prompts, share, journal, meter, limits, guests)
        facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
        facts["fewest_threads"] = fewest_threads()
        facts["energy"] = meter.describe()
        described = described_rows(config, lineup, guests)
        return finish(config, journal, facts, described, lineup.draft_vocabularies, left_out, models, prompts, console)


def finish(
    config: SpeedConfig,
    journal: RunJournal,
    facts: dict[str, Any],
    described: dict[str, dict[str, Any]],
    vocabularies: dict[str, TextTokens],
    left_out: list[dict[str, Any]],
    models: Models,
    prompts: PromptSet,
    console: Console,
) -> dict[str, Any]:
    """Make and write the report of what is in the journal; none while other processes are at work on their shares."""
    with journal.alone():
        if not journal.gather():
            told = f"{len(journal.runs):,} runs, this process's share, are measured; the last of all writes the report"
            console.print(told, markup=False, highlight=False)
            return {}
        plain = config.entries[0].name
        facts |= quantised(models, [run for run in journal.runs if run.method == plain], prompts)
        known = described, plain, prompts.measured
        tokenizer = tokenizer_of(config.target)

        def marks(outputs: list[Run]) -> dict[str, Any]:
            eos = answer_ends(config.target, models.target)
            ended = [until(run.tokens, eos) for run in outputs]
            answers = tokenizer.batch_decode(ended, skip_special_tokens=True)
            cut = [tokens[-1] not in eos for tokens in ended]
            return accuracy([prompts.measured[run.prompt] for run in outputs], answers, cut, config.prompts.run_code)

        judged = judge(journal.runs, *known, models.target, marks)
        add_coverage(judged, journal.runs, vocabularies, prompts.measured)
        end = ending(facts, *known, judged, left_out, make_texts(journal.runs, *known, tokenizer))
        journal.end(end)
        report = build(end, journal.runs)
        try:
            write_report(report, config.out, journal)
        finally:
            print_table(report, console)  # should the disk be full, the figures are at least on the screen
        write_pages(report, end, journal.runs, config.out, console)
    return report


def share_of(rank: Rank, count: int, batches: Sequence[int]) -> list[int]:
    """The numbers of the prompts that this process measures: in turn with the others, as many as the batches take.

    Raises:
        ValueError: there are more processes than shares.
    """
    unit = math.lcm(*batches)
    if rank.count > count // unit:
        raise ValueError(
            f"{rank.count} processes would share {count} prompts, {unit} at a time: start at most {count // unit}, or "
            "give more prompts"
        )
    return [number for number in range(count) if number // unit % rank.count == rank.index]


def described_rows(config: SpeedConfig, lineup: Lineup, guests: Guests | None) -> dict[str, dict[str, Any]]:
    """Every row's label, in the report's order, and what is known of it."""
    stock = {e.label: {"lossless": True, "stock": True, "entry": e.label, "grid": None} for e in config.stock}
    return {**lineup.described, **stock, **(guests.described if guests is not None else {})}


def prompts_for(config: SpeedConfig, target: TargetModel, max_context: int, limits: Limits) -> PromptSet:
    """The prompts that every batch size measures, with later turns where a suite has them.

    Raises:
        ValueError: as ``load_prompts``, too few for the largest batch, or of several lengths of answers in a batch.
    """
    tokenizer = tokenizer_of(config.target)
    found = load_prompts(
        config.prompts,
        tokenizer,
        warmup=config.warmup,
        max_new_tokens=limits.max_new_tokens,
        max_context=max_context,
    )
    answers = {prompt.max_new_tokens or limits.max_new_tokens for prompt in found.measured}
    if max(config.batch) > 1 and len(answers) > 1:
        raise ValueError(
            f"batch is {config.batch}, and the suites' answers have at most {shown_sizes(sorted(answers))} new tokens: "
            f"prompts of one batch need one limit; give max_new_tokens={min(answers)}, or batch=1"
        )
    plain = drafter_method(target, make_drafter("autoregressive", target), 0.0, limits)

    def answer(prompt: Prompt) -> list[int]:
        return plain([prompt.ids], limits.seed, prompt.max_new_tokens or limits.max_new_tokens).tokens

    def longest(prompt: Prompt) -> int:
        return longest_prompt(config.prompts, prompt.max_new_tokens or limits.max_new_tokens, max_context)

    decoding = [target.fingerprint(), target.dtype, target.quantize, limits.max_new_tokens]
    found = with_later_turns(found, tokenizer, answer, longest, config.out / ANSWERS, list(map(str, decoding)))
    return in_whole_batches(found, config.batch)


def refused(config: SpeedConfig, lineup: Lineup) -> list[dict[str, Any]]:
    """By batch size and temperature the methods that do not decode so many prompts together, and how many they do.

    Raises:
        ValueError: none of the configured drafters does at one of the batch sizes.
    """
    found: list[dict[str, Any]] = []
    for temperature, batch in itertools.product(config.temperatures, config.batch):
        most = lineup.refusing(temperature, batch) | ({e.label: 1 for e in config.stock} if batch > 1 else {})
        if most and lineup.fitting(temperature, batch) == [config.entries[0].name]:
            raise ValueError(
                f"batch is {batch}, and of the methods {shortened(list(most))} none decodes more than "
                f"{max(most.values())} row(s) at once: leave that batch size out, or add a drafter that does"
            )
        rows = ({"drafter": name, "temperature": temperature, "batch": batch, "most": n} for name, n in most.items())
        found += rows
    return found


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
    kept |= {name: facts[name] for name in ("engines", "processes") if name in facts}
    if "processes" in facts:
        del kept["host"]  # they may be of several machines of one kind
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
    found = {label: load_draft_model(models.target, models.draft_model(path)) for label, path in chosen.items()}
    for label, assistant in found.items():
        if (own := assistant.config.vocab_size) != (size := models.target.config.vocab_size):
            raise ValueError(
                f"{label}: the assistant {assistant.name} has a vocabulary of {own} tokens and the target one of "
                f"{size}; stock generate needs equal sizes, the drafter speculative does not: take the entry out"
            )
    return found


def describe(config: SpeedConfig, argv: list[str], target: TargetModel, prompts: PromptSet) -> dict[str, Any]:
    """The report's ``environment``."""
    limits = ("max_new_tokens", "ignore_eos", "temperatures", "top_k", "top_p", "rounds", "warmup", "seed")
    return (
        environment(target)
        | conditions_of(config)
        | {
            "batch": config.batch[0] if len(config.batch) == 1 else config.batch,
            "prompt_set": prompts.describe(),
            "limits": {name: getattr(config, name) for name in limits},
            "divergence_tolerance": tolerance_note(target),
            "config": config.model_dump(mode="json"),
            "argv": argv,
            **({"programs": confinement()} if config.prompts.run_code else {}),
        }
    )


def measure_all(
    config: SpeedConfig,
    names: Callable[[float, int], list[str]],
    models: Models,
    lineup: Lineup,
    assistants: dict[str, TargetModel],
    prompts: PromptSet,
    share: list[int],
    journal: RunJournal,
    meter: EnergyMeter,
    limits: Limits,
    guests: Guests | None,
) -> None:
    """Measure what the journal does not hold yet, with a progress bar; every run goes into the journal.

    Args:
        names: the labels of what decodes at a temperature and a batch size.
        share: the numbers of the prompts that this process measures.
    """
    longest = max((len(prompt.ids) for prompt in prompts.measured), default=0)

    def build(temperature: float, batch: int) -> Mapping[str, Method]:
        drafters = lineup.fresh(temperature, batch).items()
        methods = {n: drafter_method(models.target, one, temperature, limits, longest) for n, one in drafters}
        for entry in config.stock if batch == 1 else ():
            methods[entry.label] = stock_method(models.stock, temperature, limits, entry, assistants.get(entry.label))
        if config.stock_generate:
            methods[STOCK] = stock_method(models.stock, temperature, limits)
        return methods if guests is None else {**methods, **guests.methods(temperature, limits)}

    measured = [prompts.measured[number] for number in share]
    sizes = itertools.product(config.temperatures, config.batch)
    total = sum(len(names(t, batch)) * (len(measured) // batch) for t, batch in sizes) * config.rounds
    remembering = lineup.remembering | {entry.label for entry in config.stock if entry.remembers}
    done = list(journal.runs)
    with Bar(total=total, initial=len(done), unit=" outputs", leave=False) as bar:

        def on_run(method: str) -> None:
            bar.set_description(f"{method:<24}", refresh=False)

        found = measure(
            build,
            measured,
            prompts.warmup,
            config.temperatures,
            config.rounds,
            limits,
            on_run,
            meter,
            done,
            remembering,
            config.batch,
            numbers=share,
            needed=config.entries[0].name.__eq__,
        )
        for run in found:
            journal.write(run, *prompts.measured[run.prompt : run.prompt + run.batch])
            bar.update()

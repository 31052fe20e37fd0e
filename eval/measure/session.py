"""Measure what a speed config names: load models and prompts, and write every run into the journal."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank
from drafters import TargetModel, make_drafter
from drafters.common.energy import EnergyMeter
from drafters.common.machine import environment, peak_memory_bytes
from drafters.common.provenance import load_average
from drafters.common.threads import fewest_threads, set_threads
from drafters.common.wording import shortened
from eval.configs import SpeedConfig
from eval.entries import STOCK
from eval.measure.identity import Identity, conditions, digest
from eval.measure.lineup import Lineup, check_options
from eval.measure.models import ALONE, Models, answer_ends, chat_of, load_models
from eval.measure.other_engines import Engines
from eval.measure.run_journal import RunJournal
from eval.measure.runs import Limits, Method, drafter_method, measure
from eval.measure.stock_generate import stock_method
from eval.measure.turns import ANSWERS, with_later_turns
from eval.prompts.choice import shown_sizes
from eval.prompts.prompts import Prompt, PromptSet, in_whole_batches, load_prompts, longest_prompt


class Session:
    """Everything loaded for one speed config, and what its runs have in common.

    Raises ValueError, before anything is measured, for what is missing or does not fit.

    Attributes:
        share: indices of the prompts that this process measures.
        left_out: methods that cannot decode batches of a size.
        facts: the report's ``environment``.
    """

    def __init__(
        self,
        config: SpeedConfig,
        argv: list[str],
        models: Models | None = None,
        engines: Engines | None = None,
        rank: Rank = ALONE,
    ) -> None:
        self.config, self.engines = config, engines
        set_threads(config.threads)
        check_options(config.entries)
        longest = config.prompts.longest + config.max_new_tokens
        self.models = models or load_models(config.target, longest, max(config.batch), rank)
        target = self.models.target
        self.lineup = Lineup(config.entries, self.models)
        self.left_out = refused(config, self.lineup)
        self.assistants = self.models.assistants(config.assistants)
        most = min([self.lineup.max_context, *(model.max_context for model in self.assistants.values())])
        ends = answer_ends(config.target, target)
        limits = Limits(config.max_new_tokens, config.top_k, config.top_p, config.seed, ends)
        self.prompts = prompts_for(config, target, most, limits)  # earlier answers of a dialogue end at EOS
        self.limits = replace(limits, eos=frozenset()) if config.ignore_eos else limits
        self.share = share_of(rank, len(self.prompts.measured), config.batch)
        self.facts = describe(config, argv, target, self.prompts)
        self.facts |= {"processes": rank.count} if rank.count > 1 else {}
        if engines is not None:
            every = [*self.prompts.warmup, *self.prompts.measured]
            engines.start(target, [prompt.ids for prompt in every], self.limits)
            self.facts |= engines.facts

    @property
    def described(self) -> dict[str, dict[str, Any]]:
        """By label in the report's order, what is known of every row."""
        stock = {e.label: {"lossless": True, "stock": True, "entry": e.label, "grid": None} for e in self.config.stock}
        return {**self.lineup.described, **stock, **(self.engines.described if self.engines is not None else {})}

    @property
    def plain(self) -> str:
        """The label of plain decoding."""
        return self.config.entries[0].name

    def labels(self, temperature: float, batch: int) -> list[str]:
        """Return the labels of all methods at a temperature and a batch size."""
        out = [row["drafter"] for row in self.left_out if (row["temperature"], row["batch"]) == (temperature, batch)]
        known = [*self.config.methods(temperature), *(self.engines.described if self.engines is not None else ())]
        return [name for name in known if name not in out]

    def methods(self, temperature: float, batch: int) -> Mapping[str, Method]:
        """Build all methods at a temperature and a batch size."""
        longest = max((len(prompt.ids) for prompt in self.prompts.measured), default=0)
        target, limits, stock = self.models.target, self.limits, self.models.stock
        drafters = self.lineup.fresh(temperature, batch).items()
        methods = {name: drafter_method(target, one, temperature, limits, longest) for name, one in drafters}
        for entry in self.config.stock if batch == 1 else ():
            methods[entry.label] = stock_method(stock, temperature, limits, entry, self.assistants.get(entry.label))
        if self.config.stock_generate:
            methods[STOCK] = stock_method(stock, temperature, limits)
        return methods if self.engines is None else {**methods, **self.engines.methods(temperature, limits)}

    def identity(self) -> Identity:
        """Return what runs must share to be in one report; see ``eval.measure.identity``."""
        facts, prompts = self.facts, self.prompts
        config = {key: value for key, value in facts["config"].items() if key != "out"}
        names = ["device", "engine", "commit", "cpu", "cpu_cores", "gpu", "platform", "versions", "threads", "code"]
        names += ["files"] if "processes" in facts else ["files", "host"]  # processes may be on several equal machines
        names += [name for name in ("engines", "processes") if name in facts]
        ids = [[prompt.ids for prompt in some] for some in (prompts.measured, prompts.warmup)]
        inputs = {"config": config, "weights": facts["target"]["fingerprint"], "prompt_tokens": digest(ids)}
        return inputs | {name: facts[name] for name in names}


def share_of(rank: Rank, count: int, batches: Sequence[int]) -> list[int]:
    """Return the indices of the prompts that this process measures; the processes take whole batches in turn."""
    unit = math.lcm(*batches)
    if rank.count > count // unit:
        raise ValueError(
            f"{rank.count} processes would share {count} prompts, {unit} at a time: start at most {count // unit}, or "
            "give more prompts"
        )
    return [number for number in range(count) if number // unit % rank.count == rank.index]


def prompts_for(config: SpeedConfig, target: TargetModel, max_context: int, limits: Limits) -> PromptSet:
    """Return the prompts that every batch size measures, with later turns if a suite has them."""
    tokenizer, most = chat_of(config.target).tokenizer, limits.max_new_tokens
    prompts = load_prompts(
        config.prompts, tokenizer, warmup=config.warmup, max_new_tokens=most, max_context=max_context
    )
    answers = {prompt.max_new_tokens or most for prompt in prompts.measured}
    if max(config.batch) > 1 and len(answers) > 1:
        raise ValueError(
            f"batch is {config.batch}, and the suites' answers have at most {shown_sizes(sorted(answers))} new tokens: "
            f"prompts of one batch need one limit; give max_new_tokens={min(answers)}, or batch=1"
        )
    plain = drafter_method(target, make_drafter("autoregressive", target), 0.0, limits)

    def answer(prompt: Prompt) -> list[int]:
        return plain([prompt.ids], limits.seed, prompt.max_new_tokens or most).tokens

    def longest(prompt: Prompt) -> int:
        return longest_prompt(config.prompts, prompt.max_new_tokens or most, max_context)

    decoding = [str(fact) for fact in (target.fingerprint(), target.dtype, target.quantize, most)]
    prompts = with_later_turns(prompts, tokenizer, answer, longest, config.out / ANSWERS, decoding)
    return in_whole_batches(prompts, config.batch)


def refused(config: SpeedConfig, lineup: Lineup) -> list[dict[str, Any]]:
    """Return the methods that cannot decode batches of a size, with the largest batch of each."""
    refusals: list[dict[str, Any]] = []
    for temperature, batch in itertools.product(config.temperatures, config.batch):
        largest = lineup.largest(temperature)
        every = largest | {entry.label: 1 for entry in config.stock}
        most = {name: rows for name, rows in every.items() if rows < batch}
        if most and len(largest.keys() - most.keys()) == 1:  # only plain decoding is left
            raise ValueError(
                f"batch is {batch}, but the methods {shortened(list(most))} decode at most {max(most.values())} row(s) "
                "at once: remove that batch size, or add a drafter that decodes it"
            )
        refusals += [
            {"drafter": name, "temperature": temperature, "batch": batch, "most": n} for name, n in most.items()
        ]
    return refusals


def conditions_of(config: SpeedConfig) -> Identity:
    """Return code, commit, machine and files as they are now."""
    return conditions(config.paths, config.target.device, config.threads)


def describe(config: SpeedConfig, argv: list[str], target: TargetModel, prompts: PromptSet) -> dict[str, Any]:
    """Return the report's ``environment``."""
    limits = ("max_new_tokens", "ignore_eos", "temperatures", "top_k", "top_p", "rounds", "warmup", "seed")
    settings = {
        "batch": config.batch[0] if len(config.batch) == 1 else config.batch,
        "prompt_set": prompts.describe(),
        "limits": {name: getattr(config, name) for name in limits},
        "config": config.model_dump(mode="json"),
        "argv": argv,
    }
    return environment(target) | conditions_of(config) | settings


def measure_all(session: Session, journal: RunJournal, rank: Rank) -> None:
    """Measure what the journal does not have yet, with a progress bar, and complete ``session.facts``."""
    config, prompts = session.config, session.prompts
    measured = [prompts.measured[number] for number in session.share]
    sizes = itertools.product(config.temperatures, config.batch)
    total = sum(len(session.labels(t, batch)) * (len(measured) // batch) for t, batch in sizes) * config.rounds
    meter = EnergyMeter(session.models.target.device)
    done = list(journal.runs)
    with Bar(total=total, initial=len(done), unit=" outputs", leave=False) as bar:
        arguments = session.methods, measured, prompts.warmup, config.temperatures, config.rounds, session.limits
        remembering = session.lineup.remembering | {entry.label for entry in config.stock if entry.remembers}
        needed = session.plain.__eq__
        for run in measure(*arguments, meter, done, remembering, config.batch, session.share, needed):
            journal.write(run, *prompts.measured[run.prompt : run.prompt + run.batch])
            bar.set_description(f"{run.method:<24}", refresh=False)
            bar.update()
    device = session.models.target.device
    session.facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(device)}
    session.facts |= {"fewest_threads": fewest_threads(), "energy": meter.describe()}

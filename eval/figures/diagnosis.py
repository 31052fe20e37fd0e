"""Compare the acceptance of a head in an engine with that in our loop, and find the convention that is wrong.

The engine and our loop decode the same prompts greedily, with drafts that are chains of K tokens. Where acceptance
differs, the loop decodes them again with each known mistake, and the mistakes that reproduce the engine's are named.
Drafts that are shorter in the engine are a fault, too.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console

from data_prep.common.progress import Bar
from drafters import drafter_class, generate, load_drafter
from drafters.cli.program import Failure
from drafters.common.machine import environment
from drafters.common.provenance import load_average
from drafters.common.threads import set_threads
from drafters.hub.checkpoint import drafter_type
from drafters.learned import LearnedDrafter
from drafters.loop.call import eos_ids
from drafters.loop.generate import Trace
from drafters.methods.block import BlockDrafter, DSparkDrafter
from drafters.methods.dflash2 import DFlash2Drafter
from drafters.methods.eagle import Eagle3Drafter, EagleDrafter, FeatureHead
from drafters.methods.mtp import MTPDrafter
from eval.configs import ParityConfig
from eval.entries import EngineEntry
from eval.figures.certificate import begun
from eval.figures.readings import (
    AS_LOADED,
    CHECK_LENGTH,
    SHORTER,
    Reading,
    acceptance,
    as_json,
    explaining,
    gain,
    most_accepted,
    prompts_needed,
    reading,
)
from eval.measure.block_mistakes import BLOCK_MISTAKES
from eval.measure.identity import conditions
from eval.measure.mistakes import MISTAKES, Mistake, declared
from eval.measure.models import chat_of, load_models
from eval.measure.other_engines import Engines
from eval.measure.runs import Limits, Outcome
from eval.prompts.prompts import load_prompts

FEATURES = (EagleDrafter, Eagle3Drafter)
Head = EagleDrafter | Eagle3Drafter | BlockDrafter
PASS, FAULT, UNKNOWN = "pass", "fault", "unknown fault"


def parity(config: ParityConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Return what ``parity.json`` holds.

    Raises:
        ValueError: no such head, another target's, or prompts that do not fit.
        Failure: the engine is not installed, or ends.
    """
    set_threads(config.threads)
    kind = drafter_class(method := drafter_type(config.checkpoint))
    if not issubclass(kind, LearnedDrafter) or not (issubclass(kind, FEATURES) or declared(kind.shape)):
        raise ValueError(
            f"checkpoint: {config.checkpoint} is of the method {method!r}; give an EAGLE head, or one that reads "
            "several states of the target, such as EAGLE-3, DFlash or DSpark, or MTP layers"
        )
    if not issubclass(kind, (*FEATURES, BlockDrafter)) and config.engine != "ours":
        raise ValueError(
            f"engine is {config.engine}, which was not tried with heads of the method {method!r}; give --engine ours, "
            "which ranks the readings of the checkpoint"
        )
    if issubclass(kind, DSparkDrafter | DFlash2Drafter) and config.engine == "vllm":
        raise ValueError(
            f"engine is vllm, whose runner for CPUs does not serve {kind.forms.noun.split()[1]} heads, and its runner "
            "for GPUs has not been tried here; give --engine sglang, or --engine ours, which ranks the readings of the "
            "checkpoint"
        )
    longest = config.prompts.longest if config.prompts is not None else config.begun_tokens
    target = load_models(config.target, longest + config.max_new_tokens, config.batch).target
    drafter: Any = load_drafter(config.checkpoint, target, tree="chain", depth=config.depth)
    if config.engine != "ours" and isinstance(drafter, BlockDrafter):
        _check_block(drafter, "vLLM" if config.engine == "vllm" else "SGLang")
    prompts = prompts_of(config, drafter)
    facts = environment(target) | conditions(
        [config.target.path, config.checkpoint], str(target.device), config.threads
    )
    facts |= {"config": config.model_dump(mode="json"), "argv": argv, "prompts": len(prompts)}
    if config.engine == "ours":
        figures = ranked(drafter, decoded(drafter, prompts, config, AS_LOADED), prompts, config)
    else:
        theirs, facts["engine_facts"] = served(drafter, prompts, config, console)  # first: it may not run
        figures = compared(drafter, decoded(drafter, prompts, config, AS_LOADED), theirs, prompts, config)
    return {"format_version": 1, **figures, "environment": facts | {"load_average_after": load_average()}}


def _check_block(drafter: BlockDrafter, engine: str) -> None:
    """Raise ValueError if the engine would draft with shorter blocks than those of training.

    It runs ``depth`` + 1 rows; SGLang runs ``depth`` of a DSpark head, whose first row predicts a token, too.
    """
    anchor = 0 if isinstance(drafter, DSparkDrafter) else 1
    rows, trained = drafter.shaper.depth + anchor, cast(Any, drafter.module).shape.rows
    if rows < trained and not cast(Any, drafter.module).shape.causal:
        raise ValueError(
            f"depth is {drafter.shaper.depth}, so {engine}'s blocks have {rows} rows, and the head was trained with "
            f"{trained}, which attend to each other; leave depth out, or give depth={trained - anchor}"
        )


def prompts_of(config: ParityConfig, drafter: LearnedDrafter) -> list[list[int]]:
    """Return the configured prompts, or beginnings that the target samples."""
    if config.prompts is None:
        if (needed := config.begun_tokens + config.max_new_tokens) > drafter.max_context:
            raise ValueError(
                f"begun_tokens and max_new_tokens need {needed:,} positions, and the target has "
                f"{drafter.max_context:,}; lower one of them"
            )
        return begun(drafter.target, config.count, config.begun_tokens, config.seed)
    chosen = config.prompts
    if chosen.count is None and chosen.per_category is None:
        chosen = chosen.model_copy(update={"count": config.count})
    limits = {"max_new_tokens": config.max_new_tokens, "max_context": drafter.max_context}
    prompt_set = load_prompts(chosen, chat_of(config.target).tokenizer, warmup=0, **limits)
    return [prompt.ids for prompt in prompt_set.measured]


def decoded(drafter: LearnedDrafter, prompts: list[list[int]], config: ParityConfig, name: str) -> list[Outcome]:
    """Decode the prompts in our loop, in batches."""
    outcomes = []
    with Bar(total=len(prompts), unit=" prompts", desc=name, leave=False) as bar:
        for start in range(0, len(prompts), config.batch):
            some = prompts[start : start + config.batch]
            result = generate(
                drafter.target,
                drafter,
                some,
                prompt_lengths=list(map(len, some)),
                max_new_tokens=config.max_new_tokens,
            )
            for row, (tokens, length) in enumerate(zip(result.tokens.tolist(), result.lengths, strict=True)):
                trace = Trace([step for step in result.trace.steps if step.row == row])
                outcomes.append(Outcome(tokens[:length], 0.0, 0.0, trace))
            bar.update(len(some))
    return outcomes


def served(
    drafter: Head, prompts: list[list[int]], config: ParityConfig, console: Console
) -> tuple[list[Outcome], dict[str, Any]]:
    """Decode the prompts in the engine, one at a time; returns its facts, too."""
    options = {"label": config.engine, "engine": config.engine, "method": drafter.name, "gamma": drafter.shaper.depth}
    options |= {"checkpoint": config.checkpoint, "python": config.python, "module": config.module}
    entry = EngineEntry.model_validate(options)
    limits = Limits(config.max_new_tokens, eos=eos_ids(drafter.target, None))
    with contextlib.ExitStack() as stack:
        engines = Engines(config, [entry], stack, console)
        engines.start(drafter.target, prompts, limits)
        if (reason := engines.facts["engines_left_out"].get(entry.label)) is not None:
            raise Failure(f"{config.engine} does not run: {reason}")
        decode = engines.methods(0.0, limits)[entry.label]
        outcomes = []
        with Bar(total=len(prompts), unit=" prompts", desc=config.engine, leave=False) as bar:
            for prompt in prompts:
                outcomes.append(decode([prompt], 0, config.max_new_tokens))
                if (failure := outcomes[-1].failure) is not None:
                    raise Failure(f"{config.engine} failed on prompt {len(outcomes)} of {len(prompts)}: {failure}")
                if outcomes[-1].trace is None:
                    raise Failure(f"{config.engine} does not report its steps, so acceptance is not known")
                bar.update(1)
        return outcomes, engines.facts["engines"][entry.label]


def known(drafter: Head) -> tuple[Mistake, ...]:
    """Return the mistakes that heads of this kind have."""
    if isinstance(drafter, BlockDrafter):
        return BLOCK_MISTAKES
    shared = MISTAKES if isinstance(drafter.head, FeatureHead) and not isinstance(drafter, MTPDrafter) else ()
    names = {mistake.name for mistake in shared}
    return (*shared, *(mistake for mistake in declared(type(drafter).shape) if mistake.name not in names))


def mistaken(drafter: Head, prompts: list[list[int]], config: ParityConfig) -> Iterator[tuple[str, str, list[Outcome]]]:
    """Yield (name, what to check, outcomes) of every mistake that changes this head."""
    for mistake in known(drafter):
        if (wrong := mistake.plant(drafter)) is not None:
            yield mistake.name, mistake.check, decoded(wrong, prompts, config, mistake.name)


def compared(
    drafter: Head, ours: list[Outcome], theirs: list[Outcome], prompts: list[list[int]], config: ParityConfig
) -> dict[str, Any]:
    """Return the verdict on an engine; mistakes are tried only where its acceptance is not ours."""
    loaded = reading(AS_LOADED, "", ours, theirs, drafter.shaper.depth)
    readings, named = [loaded], list[Reading]()
    if not loaded.within:
        tried = mistaken(drafter, prompts, config)
        readings += [reading(name, check, outcomes, theirs, drafter.shaper.depth) for name, check, outcomes in tried]
        named = explaining(readings[1:])
    advice = {one.name: f"check {one.check}" for one in named}
    if loaded.drafted_apart < 0 and not loaded.as_long and not any(one.as_long for one in named):
        advice = {SHORTER: f"check {CHECK_LENGTH}"} | advice
    verdict = PASS if loaded.within and loaded.as_long else FAULT if advice else UNKNOWN
    return {
        "verdict": verdict,
        "named": [*advice],
        "advice": advice,
        "engine": as_json(acceptance(theirs, drafter.shaper.depth)),
        "readings": [*map(_described, readings)],
    }


def ranked(drafter: Head, ours: list[Outcome], prompts: list[list[int]], config: ParityConfig) -> dict[str, Any]:
    """Return which readings of the checkpoint accept most; that as loaded should be among them."""
    every = [(AS_LOADED, "", ours), *mistaken(drafter, prompts, config)]
    readings = [reading(name, check, outcomes, ours, drafter.shaper.depth) for name, check, outcomes in every]
    best = most_accepted({name: outcomes for name, _, outcomes in every})
    gains = {name: gain(ours, outcomes) for name, _, outcomes in every[1:]}
    fixes = {mistake.name: mistake.fix for mistake in known(drafter)}
    return {
        "verdict": PASS if AS_LOADED in best else FAULT,
        "named": best,
        "advice": {name: fixes[name] for name in best if name != AS_LOADED},
        "gains": {
            name: rate._asdict() | {"prompts_needed": prompts_needed(rate, len(prompts))}
            for name, rate in gains.items()
        },
        "engine": None,
        "readings": [*map(_described, readings)],
    }


def _described(one: Reading) -> dict[str, Any]:
    alike = None if one.alike is None else one.alike._asdict()
    figures = {"name": one.name, "check": one.check, **as_json(one.acceptance)}
    figures |= {"apart": one.apart, "tau_apart": one.tau_apart, "drafted_apart": one.drafted_apart}
    return figures | {"within": one.within, "alike": alike}

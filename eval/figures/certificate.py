"""Certify a drafter: decode greedily and by sampling, and test every token against transformers' own model."""

import itertools
from collections.abc import Iterator
from typing import Any, cast, get_args

import torch

from data_prep.common.progress import Bar
from drafters import Drafter, Sampling, TargetModel, generate, make_drafter
from drafters.common.machine import environment
from drafters.common.provenance import load_average
from drafters.common.threads import set_threads
from drafters.common.wording import dtype_name
from drafters.loop.acceptance import FEW_ROWS
from drafters.loop.call import eos_ids
from drafters.model.files import resolve_dtype
from eval.configs import LosslessConfig
from eval.entries import DrafterEntry, paths_of
from eval.figures.losslessness import Texts, greedy_fit, sampled_fit
from eval.measure.identity import conditions
from eval.measure.lineup import Lineup, check_options
from eval.measure.models import Models, chat_of, load_models
from eval.measure.watched import Watched
from eval.prompts.prompts import load_prompts

LOSSLESS, NOT_LOSSLESS = "lossless", "not lossless"
UNDECIDED, LOSSY = "not shown", "lossy by design"
BEGUN = 256  # prompts sampled in one batch
NEEDED = 2  # accepted draft tokens after which there must be enough tokens to test: a q of a wrong depth shows there
# Fixed values instead of auto: a chain (EAGLE's has five tokens, DFlash's and DSpark's the whole block) and the tree of
# the method, drafted also if not profitable.
FIXED: dict[str, tuple[Any, ...]] = {"tree": ("chain", "static", "tree"), "match": (2,), "gamma": (5,), "nodes": (16,)}


def certificate(config: LosslessConfig, argv: list[str]) -> dict[str, Any]:
    """Return what ``lossless.json`` holds."""
    set_threads(config.threads)
    check_options([config.drafter])
    models = _load(config, config.target.dtype)
    lineup, target = Lineup([config.drafter], models), models.target
    name, lossless = next((name, row["lossless"]) for name, row in lineup.described.items())
    paths = [config.target.path, *paths_of([config.drafter])]
    facts = environment(target) | conditions(paths, str(target.device), config.threads)
    facts |= {"config": config.model_dump(mode="json"), "argv": argv}
    report: dict[str, Any] = {"format_version": 1, "drafter": {"name": name, **config.drafter.model_dump(mode="json")}}
    if not lossless:
        report |= {"verdict": LOSSY, "reasons": [], "greedy": [], "sampled": None}
    else:
        prompts = prompts_of(config, lineup, target)
        entries = certified_entries(config.drafter, _fresh(lineup, 0.0))
        parts = [certify(config, target, Lineup([entry], models), prompts) for entry in entries]
        exact, device = target.dtype, target.device
        del target, lineup, models  # free the first target before the second is loaded
        if config.rounded is not None and resolve_dtype(config.rounded, device) != exact:
            models = _load(config, config.rounded)
            for part, entry in zip(parts, entries, strict=True):
                drafter = _fresh(Lineup([entry], models), 0.0)
                part["greedy"].append(greedy_part(config, models.target, drafter, prompts))
        report |= combined([entry.name for entry in entries], parts)
    report["environment"] = facts | {"load_average_after": load_average()}
    return report


def certified_entries(entry: DrafterEntry, drafter: Drafter) -> list[DrafterEntry]:
    """Return the entries to certify: if options of ``drafter`` are auto, one per FIXED shape, then ``entry`` itself.

    Only a fixed shape can show losslessness, because it is the same on every machine.
    """
    auto = _auto_options(drafter)
    if not auto:
        return [entry]
    count = max(len(values) for values in auto.values())
    shapes = [{name: values[min(index, len(values) - 1)] for name, values in auto.items()} for index in range(count)]
    return [*(entry.at(shape) for shape in shapes), entry]


def _auto_options(drafter: Drafter) -> dict[str, tuple[Any, ...]]:
    """Return the FIXED values of options that are auto, also of a hybrid's head, by dotted name."""
    options = {name: _fixed(drafter, name) for name, value in drafter.settings if value == "auto"}
    head = getattr(drafter, "head", None)
    if isinstance(head, Drafter):
        options |= {f"head.{name}": values for name, values in _auto_options(head).items()}
    return options


def _fixed(drafter: Drafter, option: str) -> tuple[Any, ...]:
    """Return the FIXED values of an option that the method has, without trees where the target verifies chains only."""
    words = get_args(type(drafter.settings).model_fields[option].annotation)
    if option == "tree" and drafter.target.chains_only:
        return ("chain",)
    return tuple(value for value in FIXED[option] if not isinstance(value, str) or value in words)


def combined(names: list[str], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one verdict on all ``parts``, the results of the first part, and, if there are several, all as ``shapes``.

    With several shapes, the last one is auto's: it can make the verdict "not lossless", but not "not shown".
    """
    for name, part in zip(names, parts, strict=True):
        part |= {"name": name, **judged(part["greedy"], part["sampled"])}
    needed = parts[:-1] or parts
    verdicts = {part["verdict"] for part in needed} | ({NOT_LOSSLESS} & {part["verdict"] for part in parts})
    verdict = next(one for one in (NOT_LOSSLESS, UNDECIDED, LOSSLESS) if one in verdicts)
    several = len(parts) > 1
    deciding = [part for part in parts if part["verdict"] == verdict]
    reasons = [f"{part['name']}: {reason}" if several else reason for part in deciding for reason in part["reasons"]]
    first = {"greedy": parts[0]["greedy"], "sampled": parts[0]["sampled"]}
    return {"verdict": verdict, "reasons": reasons, **first, "shapes": parts if several else []}


def judged(greedy: list[dict[str, Any]], sampled: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict and its reasons."""
    reasons = []
    for part in greedy:
        if part["unexplained"]:
            reasons.append(f"greedy, {part['dtype']}: {part['unexplained']:,} tokens are not the target's argmax")
    for place, part in [*((f"greedy, {part['dtype']}", part) for part in greedy), ("sampled", sampled)]:
        reasons += [f"{place}: {count:,} texts {what}" for what, count in part["broken_ends"].items()]
    if sampled["outside"] > sampled["outside_allowed"]:
        reasons.append(f"sampled: {sampled['outside']:,} tokens to which the target gives no probability")
    if sampled["p_value"] < sampled["alpha"]:
        reasons.append(f"sampled: the tokens are not distributed as the target's, p = {sampled['p_value']:.1e}")
    if reasons:
        return {"verdict": NOT_LOSSLESS, "reasons": reasons}
    needed = min(NEEDED, sampled["longest_draft"])
    if sampled["deepest"] < needed:
        reasons.append(
            f"sampled: too few tokens after {needed} accepted draft tokens (drafts have up to "
            f"{sampled['longest_draft']}): give more texts, or prompts with higher acceptance"
        )
    return {"verdict": UNDECIDED if reasons else LOSSLESS, "reasons": reasons}


def _load(config: LosslessConfig, dtype: Any) -> Models:
    chosen = config.target.model_copy(update={"dtype": dtype})
    longest = config.prompts.longest if config.prompts is not None else config.begun_tokens
    return load_models(chosen, longest + max(config.greedy_tokens, config.new_tokens), config.batch)


def _fresh(lineup: Lineup, temperature: float) -> Drafter:
    return next(iter(lineup.fresh(temperature).values()))


def prompts_of(config: LosslessConfig, lineup: Lineup, target: TargetModel) -> list[list[int]]:
    """Return the configured prompts, or beginnings that the target samples from one token each."""
    longest = max(config.greedy_tokens, config.new_tokens)
    if config.prompts is not None:
        limits = {"warmup": 0, "max_new_tokens": longest, "max_context": lineup.max_context}
        measured = load_prompts(config.prompts, chat_of(config.target).tokenizer, **limits).measured
        return [prompt.ids for prompt in measured]
    if config.begun_tokens + longest > lineup.max_context:
        raise ValueError(
            f"begun_tokens and new tokens need {config.begun_tokens + longest:,} positions, but the target and the "
            f"drafter have {lineup.max_context:,}: lower greedy_tokens, new_tokens or begun_tokens"
        )
    return begun(target, config.begun, config.begun_tokens, config.seed)


def begun(target: TargetModel, count: int, length: int, seed: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` tokens that the target samples, after its BOS or one random token.

    It samples ``BEGUN`` at a time.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(target.vocab_size, (count,), generator=generator).tolist()
    bos = getattr(target.config, "bos_token_id", None)
    starts = [[token if bos is None else bos] for token in first]
    if length == 1:
        return starts
    plain, prompts = make_drafter("autoregressive", target), list[list[int]]()
    settings: dict[str, Any] = {"temperature": 1.0, "eos_token_id": [], "max_new_tokens": length - 1}
    with Bar(total=count, unit=" prompts", desc="prompts", leave=False) as bar:
        for place in range(0, count, BEGUN):
            some = starts[place : place + BEGUN]
            result = generate(target, plain, some, prompt_lengths=_lengths(some), seed=seed + place, **settings)
            prompts += [start + row for start, row in zip(some, result.tokens.tolist(), strict=True)]
            bar.update(len(some))
    return prompts


def _lengths(prompts: list[list[int]]) -> list[int]:
    """Return the lengths, which tell ``generate`` that nothing is padding: a text may begin with the padding token."""
    return [len(prompt) for prompt in prompts]


def _sizes(drafter: Drafter, most: int) -> Iterator[int]:
    """Yield batch sizes: half of the texts in small batches, half in large ones, because these use other code."""
    most = min(most, drafter.max_batch or most)
    few = min(most, FEW_ROWS)
    return itertools.cycle([*[few] * (most // few), most])


def certify(config: LosslessConfig, target: TargetModel, lineup: Lineup, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the results of both tests in the target's dtype."""
    greedy = greedy_part(config, target, _fresh(lineup, 0.0), prompts)
    return {"greedy": [greedy], "sampled": sampled_part(config, target, _fresh(lineup, config.temperature), prompts)}


def greedy_part(
    config: LosslessConfig, target: TargetModel, drafter: Drafter, prompts: list[list[int]]
) -> dict[str, Any]:
    """Decode every prompt once, in batches of two sizes, and compare with the target's argmax."""
    texts, left = Texts(), prompts
    for rows in _sizes(drafter, config.batch):
        if not left:
            break
        some, left = left[:rows], left[rows:]
        result = generate(target, drafter, some, prompt_lengths=_lengths(some), max_new_tokens=config.greedy_tokens)
        texts.prompts += some
        texts.new += _rows(result)
    fit = greedy_fit(target, texts, eos_ids(target, None), config.greedy_tokens)
    return {"dtype": dtype_name(target.dtype), **fit}


def sampled_part(
    config: LosslessConfig, target: TargetModel, drafter: Drafter, prompts: list[list[int]]
) -> dict[str, Any]:
    """Sample many short texts after the prompts, and test every batch as soon as it is decoded."""
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    settings: dict[str, Any] = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    longest = 0

    def batches() -> Iterator[Texts]:
        nonlocal longest
        waiting, started = itertools.cycle(prompts), 0
        with Bar(total=config.texts, unit=" texts", leave=False) as bar:
            for number, rows in enumerate(_sizes(drafter, config.batch)):
                if started >= config.texts:
                    return
                watched, some = Watched(drafter), list(itertools.islice(waiting, rows))
                inputs = target, cast(Drafter, watched), some
                seed = config.seed + 1 + number  # the prompts' seed would repeat the numbers that drew them
                new = config.new_tokens
                result = generate(*inputs, prompt_lengths=_lengths(some), max_new_tokens=new, seed=seed, **settings)
                longest = max(longest, *(max(verdict.depths) for verdict, _ in watched.seen), 0)
                yield Texts(some, _rows(result), [watched.known(row) for row in range(len(some))])
                started += len(some)
                bar.update(len(some))

    eos = eos_ids(target, None)
    fit = sampled_fit(target, batches(), sampling, eos, config.new_tokens, config.alpha, config.seed)
    return {**fit, "longest_draft": longest}


def _rows(result: Any) -> list[list[int]]:
    return [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]

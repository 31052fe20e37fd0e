"""Prompt files to token ids, with the chat template: which prompts a run decodes, how long and in which order."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.dialogues.messages import DroppedError, Message
from data_prep.dialogues.reader import ReadCounts, first_question, read_dialogues, same_question
from data_prep.dialogues.template import REFUSALS, for_template
from eval.prompts.choice import PromptsConfig, check_prompt_files, shown_sizes
from eval.prompts.context import with_earlier_turns
from eval.prompts.prompt_files import Format, Record, detect_format, files_sha256, read_prompts
from eval.prompts.suites import WARM_UP, load_suite, read_suite, suite_name


@dataclass(frozen=True)
class Prompt:
    """What every method answers.

    Attributes:
        ids: token ids with the chat template, up to where the assistant's answer begins.
        question: its messages, without earlier turns that the run puts before them.
        record: the file's record. turn: number of the turn in its conversation, from 1.
        max_new_tokens: limit of its answer, if smaller than the run's.
    """

    id: str
    category: str | None
    ids: list[int]
    question: list[Message] = field(default_factory=list, compare=False, repr=False)
    record: Record | None = field(default=None, compare=False, repr=False)
    turn: int = 1
    max_new_tokens: int | None = None

    @property
    def sub_category(self) -> str | None:
        """Its sub-category, if the file has one."""
        return self.record.sub_category if self.record is not None else None


@dataclass
class PromptSet:
    """The prompts of a run.

    ``measured`` and ``warmup`` are disjoint; ``skipped`` counts unused prompts by reason. ``requested`` is the wanted
    number of measured prompts (None for all), which may be more than the file has.
    """

    config: PromptsConfig
    format: str
    sha256: str
    measured: list[Prompt]
    warmup: list[Prompt]
    skipped: Counter[str] = field(default_factory=Counter)
    requested: int | None = None

    def describe(self) -> dict[str, Any]:
        """Return the report's ``prompt_set``."""
        wanted = self.config.context_tokens
        lengths = [len(prompt.ids) for prompt in self.measured]
        by_category = Counter(prompt.category for prompt in self.measured if prompt.category is not None)
        later = sum(prompt.turn > 1 for prompt in self.measured)
        suites = {suite_name(name): load_suite(name).model_dump(mode="json") for name in self.config.suites}
        return {
            "file": self.config.shown_files,
            "format": self.format,
            "sha256": self.sha256,
            "prompts": len(self.measured),
            "requested": self.requested,
            "categories": dict(sorted(by_category.items())),
            "consecutive": self.config.consecutive,
            "warmup_prompts": len(self.warmup),
            "context": {"tokens": wanted, "files": ", ".join(map(str, self.config.context_files))} if wanted else None,
            "prompt_tokens": {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
            "skipped": dict(self.skipped),
            **({"later_turns": later} if later else {}),
            **({"suites": suites} if suites else {}),
        }


def load_prompts(
    config: PromptsConfig, tokenizer: Any, *, warmup: int, max_new_tokens: int, max_context: int
) -> PromptSet:
    """Choose the prompts to measure, as many as there are up to the wanted number, and ``warmup`` others.

    The prompt of a dialogue is everything before its first assistant turn. A prompt that is in the file twice is used
    once, because a drafter that remembers phrases would have seen the answer. ``consecutive`` and ``context_tokens``
    do not change which prompts are chosen.

    Raises:
        ValueError: a missing file or category, fewer than ``warmup`` + 1 usable prompts (the message has the counts of
            skipped ones), too little room for ``context_tokens``, or too few dialogues for them.
    """
    check_prompt_files(config)
    limit = longest_prompt(config, max_new_tokens, max_context)
    reader = _Reader(config, tokenizer, max_new_tokens, max_context)
    formats, skipped = [detect_format(file) for file in config.files], reader.skipped
    records = _of_categories(config, _records(config, formats, skipped), skipped)
    random.Random(config.seed).shuffle(records)
    if config.per_category is None and not config.suites:
        usable = (prompt for record in records if (prompt := reader.prompt(record)) is not None)
        spare, requested = list(itertools.islice(usable, warmup)), config.count
        measured = list(itertools.islice(usable, config.count))
    else:
        measured, spare, requested = _draw_by_group(config, records, reader, warmup)
    if config.suites:
        spare += _warm_up(tokenizer, warmup - len(spare))
    if not measured and (elsewhere := skipped["asked_elsewhere"]) and elsewhere == max(skipped.values()):
        raise ValueError(
            f"{config.shown_files}: no prompt is left to measure, {elsewhere} are also in "
            f"{', '.join(map(str, config.apart_from))}; skipped: {dict(skipped)}; give prompts with other questions"
        )
    if not measured or len(spare) < warmup:
        raise ValueError(
            f"{config.shown_files}: {len(measured) + len(spare)} usable prompts, {len(spare)} of them for "
            f"warm-up, which needs {warmup}; skipped: {dict(skipped)} (at most {limit} prompt tokens); give a longer "
            "file, fewer warm-up prompts or prompts per category, or a smaller max_new_tokens"
        )
    if config.context_tokens is not None:
        both = [*measured, *spare]
        context = config.context_files, partial(render, tokenizer), config.context_tokens, config.seed
        filled = with_earlier_turns([prompt.question for prompt in both], *context)
        both = [replace(prompt, ids=ids) for prompt, ids in zip(both, filled, strict=True)]
        measured, spare = both[: len(measured)], both[len(measured) :]
    if config.consecutive is not None:
        measured = in_turns(measured, config.consecutive, config.categories)
    shown = ", ".join(dict.fromkeys(formats)) or "suite"
    return PromptSet(config, shown, files_sha256(config.read_files), measured, spare, skipped, requested)


def load_questions(config: PromptsConfig) -> tuple[list[Record], list[Record], Counter[str]]:
    """Return the questions to measure, the unused ones, and why others were skipped; for a server, without a tokenizer.

    Order and choice are those of ``load_prompts``, except that a prompt's number of tokens is not known.

    Raises:
        ValueError: a missing file or category, or no question.
    """
    check_prompt_files(config)
    skipped = Counter[str]()
    records = _of_categories(config, _records(config, [detect_format(file) for file in config.files], skipped), skipped)
    random.Random(config.seed).shuffle(records)
    asked = {key for file in config.apart_from for key in asked_questions(file)}
    usable: dict[str, Record] = {}
    for record in records:
        text = json.dumps([[message["role"], message["content"]] for message in record.messages])
        if any(same_question(m["content"]) in asked for m in record.messages if m["role"] == "user"):
            skipped["asked_elsewhere"] += 1
        elif usable.setdefault(text, record) is not record:
            skipped["duplicate"] += 1
    if not usable:
        raise ValueError(f"{config.shown_files}: no question can be used; skipped: {dict(skipped)}; give another file")
    questions = list(usable.values())
    return questions[: config.count], questions[config.count or len(questions) :], skipped


def in_whole_batches(prompts: PromptSet, batches: Sequence[int]) -> PromptSet:
    """Return as many of the prompts as fill batches of every size, so that all sizes measure the same prompts."""
    count, unit = len(prompts.measured), math.lcm(*batches)
    if count < unit:
        raise ValueError(
            f"there are {count} prompts to measure, and batches of {shown_sizes(batches)} need {unit}: give more "
            "prompts or other batch sizes"
        )
    left = count % unit
    skipped = prompts.skipped + Counter(fills_no_batch=left)
    return replace(prompts, measured=prompts.measured[: count - left], skipped=skipped)


def in_turns(prompts: list[Prompt], consecutive: int, categories: list[str] | None = None) -> list[Prompt]:
    """Return ``consecutive`` prompts of one category in a row, then of the next, and so on (Ouroboros, Appendix F).

    The order within a category stays. ``categories`` is their order (default: alphabetical).
    """
    names = categories or sorted({prompt.category or "" for prompt in prompts})
    queues = [[prompt for prompt in prompts if (prompt.category or "") == name] for name in names]
    rounds = range(0, max(map(len, queues)), consecutive)
    return [prompt for start in rounds for queue in queues for prompt in queue[start : start + consecutive]]


def longest_prompt(config: PromptsConfig, max_new_tokens: int, max_context: int) -> int:
    """Return the largest number of tokens of a prompt, before dialogues are put in front of it."""
    if max_new_tokens >= max_context:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens:,}, but the target and the drafters have {max_context:,} positions, "
            f"prompt included; give at most {max(max_context - 1, 1):,}"
        )
    most = max_context - max_new_tokens
    if (config.context_tokens or 0) > most:
        raise ValueError(
            f"context_tokens is {config.context_tokens:,}, but the target and the drafters have {max_context:,} "
            f"positions, {max_new_tokens:,} of them for max_new_tokens; give at most {most:,}"
        )
    return min(config.max_prompt_tokens or most, config.context_tokens or most, most)


class _Reader:
    """Renders the prompts of records, and counts in ``skipped`` why some cannot be used."""

    def __init__(self, config: PromptsConfig, tokenizer: Any, max_new_tokens: int, max_context: int) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.max_new_tokens, self.max_context = max_new_tokens, max_context
        self.skipped = Counter[str]()
        self._seen: set[tuple[int, ...]] = set()
        self._asked = {key for file in config.apart_from for key in asked_questions(file)}

    def prompt(self, record: Record) -> Prompt | None:
        """Return the record's prompt; None if it cannot be used."""
        suite_limit = load_suite(record.suite).max_new_tokens if record.suite is not None else None
        most = min(suite_limit or self.max_new_tokens, self.max_new_tokens)
        try:
            ids = render(self.tokenizer, record.messages)
            bare = [{key: message[key] for key in ("role", "content")} for message in record.messages]
            unprinted = "tools" in record.messages[0] and render(self.tokenizer, bare) == ids
        except DroppedError as error:
            self.skipped[error.reason] += 1
            return None
        too_long = len(ids) > longest_prompt(self.config, most, self.max_context)
        asked = any(same_question(m["content"]) in self._asked for m in record.messages if m["role"] == "user")
        faults = {"asked_elsewhere": asked, "tools_not_printed": unprinted, "duplicate": tuple(ids) in self._seen}
        faults |= {"too_long": too_long}
        if reason := next((name for name, true in faults.items() if true), "" if ids else "empty_prompt"):
            self.skipped[reason] += 1
            return None
        self._seen.add(tuple(ids))
        fewer = most if most < self.max_new_tokens else None
        return Prompt(record.id, record.category, ids, record.messages, record, max_new_tokens=fewer)


def asked_questions(file: Path) -> set[str]:
    """Return the first questions of a file's dialogues, as ``same_question`` writes them."""
    return {first_question(dialogue) for dialogue in read_dialogues(file, ReadCounts())}


def _draw_by_group(
    config: PromptsConfig, records: list[Record], reader: _Reader, warmup: int
) -> tuple[list[Prompt], list[Prompt], int]:
    """Return the prompts to measure, those for warm-up, and how many were to be measured.

    Every category has a quota of ``per_category``, or every suite a quota of its ``count``; of suites, all together
    have ``config.count``. Warm-up takes prompts beyond the quotas.
    """
    by_category = config.per_category is not None
    groups = [record.category if by_category else record.suite for record in records]
    there = Counter(groups)
    quota = {group: config.per_category if by_category else load_suite(group or "").count for group in there}
    left = {group: there[group] if most is None else most for group, most in quota.items()}
    requested = sum(left.values())
    if not by_category and config.count is not None:
        requested = min(config.count, requested)
    measured: list[Prompt] = []
    spare: list[Prompt] = []
    for record, group in zip(records, groups, strict=True):
        full = len(measured) == requested or left[group] == 0
        if not (full and len(spare) == warmup) and (prompt := reader.prompt(record)) is not None:
            (spare if full else measured).append(prompt)
            left[group] -= not full
    return measured, spare, requested


def _warm_up(tokenizer: Any, count: int) -> list[Prompt]:
    """Return questions of no suite, because a suite that is measured whole has none left."""
    messages = [[{"role": "user", "content": text}] for text in itertools.islice(itertools.cycle(WARM_UP), count)]
    return [Prompt(f"warm-up {n}", None, render(tokenizer, each), each) for n, each in enumerate(messages, start=1)]


def _records(config: PromptsConfig, formats: list[Format], skipped: Counter[str]) -> list[Record]:
    records = []
    for file, format_ in zip(config.files, formats, strict=True):
        fallback = file.name.partition(".")[0] if len(config.files) > 1 else None
        read = read_prompts(file, format_, skipped)
        records += [replace(record, category=record.category or fallback) for record in read]
    for name in config.suites:
        of_suite = read_suite(name, config.data, skipped)
        if len(config.suites) > 1:  # each suite becomes a category, and two may have a "line 1"
            named = suite_name(name)
            of_suite = [
                replace(record, id=f"{named}/{record.id}", category=named, sub_category=record.category)
                for record in of_suite
            ]
        records += of_suite
    return records


def _of_categories(config: PromptsConfig, records: list[Record], skipped: Counter[str]) -> list[Record]:
    """Return the records of ``config.categories``; if the config uses categories at all, those that have one."""
    wanted = config.categories
    if wanted is None and config.per_category is None and config.consecutive is None:
        return records
    there = {record.category for record in records if record.category is not None}
    if not there or (wanted and not set(wanted) <= there):
        missing = sorted(set(wanted or []) - there)
        raise ValueError(
            f"{config.shown_files}: no prompt has {'category ' + repr(missing[0]) if missing else 'a category'}; "
            f"there are: {', '.join(sorted(there)) or 'none'}"
        )
    chosen = [record for record in records if record.category in (there if wanted is None else wanted)]
    if len(chosen) < len(records):
        skipped["other_category" if wanted else "no_category"] += len(records) - len(chosen)
    return chosen


def render(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Return the messages as token ids, up to where the assistant's answer begins."""
    prepared, tools = [for_template(message) for message in messages], messages[0].get("tools")
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    try:
        encoded = tokenizer.apply_chat_template(prepared, tools=tools, **options)
    except REFUSALS as error:
        raise DroppedError("template_refused", f"the chat template refuses {messages[0]['role']!r}: {error}") from error
    return list(encoded["input_ids"])

"""Prompt files to token ids, with the chat template: which prompts a run decodes, how long they are, in which order."""

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from data_prep.dialogues.messages import DroppedError, Message
from data_prep.dialogues.template import REFUSALS, for_template
from drafters.config import Amount, Config, Length, Seed
from eval.prompts.context import Earlier, check_context_files
from eval.prompts.files import KNOWN, Format, Record, check_prompt_file, detect_format, files_sha256, read_prompts
from eval.prompts.suites import WARM_UP, check_suite, load_suite, local_files, read_suite, source, suite_name

SPARE_TOKENS = 64  # of a text that was cut: its last few may be others than the whole text's


class PromptsConfig(Config):
    """Which prompts to decode, and in which order."""

    file: Path | list[Path] | None = Field(
        None,
        description=f"{KNOWN}; of several files, the name without its ending is the category of the prompts that have "
        "none",
    )
    suite: str | list[str] | None = Field(
        None, description="in place of file: names of configs/suites, or YAML files; of several each is a category"
    )
    data: Path = Field(Path("data"), description="folder in which suites look for their files")
    run_code: bool = Field(False, description="run the programs that the model writes, where a suite judges by that")
    count: Amount | None = Field(None, ge=1, description="prompts measured; None takes all that can be used")
    categories: list[str] | None = Field(None, min_length=1, description="only prompts of these; None: of any and none")
    per_category: Amount | None = Field(None, ge=1, description="prompts measured of every category, in place of count")
    consecutive: Amount | None = Field(
        None, ge=1, description="this many of one category in a row, then of the next, and round again; None: shuffled"
    )
    seed: Seed = Field(0, description="of the draw of prompts from the file, and of their order")
    max_prompt_tokens: Length | None = Field(None, ge=1, description="longer prompts are skipped and counted")
    context_tokens: Length | None = Field(
        None, ge=1, description="prompts of that many, or a little less: dialogues come first, as earlier turns"
    )
    context_file: Path | None = Field(
        None, description="ShareGPT dialogues for that; None: those of file of which no question is drawn"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count is not None and self.per_category is not None:
            raise ValueError(f"count is {self.count} and per_category {self.per_category}: give one of the two")
        for key, values in (("file", self.files), ("suite", self.suites), ("categories", self.categories or [])):
            if len(set(values)) < len(values):
                raise ValueError(f"{key}: each must be given once, found {[str(value) for value in values]}")
        if bool(self.files) == bool(self.suites):
            raise ValueError(
                f"file is {self.file} and suite {self.suite}: give one of the two (--suite NAME leaves out file)"
            )
        if self.suites and self.context_tokens is not None and self.context_file is None:
            raise ValueError("context_tokens takes dialogues, and a suite has none: give a context_file of them")
        if self.context_file is not None and self.context_tokens is None:
            raise ValueError(
                f"context_file is {self.context_file}, but how long prompts should be is not said: give context_tokens"
            )
        return self

    @property
    def files(self) -> list[Path]:
        """The prompt files, of which there may be one."""
        if self.file is None:
            return []
        return self.file if isinstance(self.file, list) else [self.file]

    @property
    def suites(self) -> list[str]:
        """The suites, of which there may be one."""
        if self.suite is None:
            return []
        return self.suite if isinstance(self.suite, list) else [self.suite]

    @property
    def context_files(self) -> list[Path]:
        """Where earlier turns come from, if there are any."""
        if self.context_tokens is None:
            return []
        return self.files if self.context_file is None else [self.context_file]

    @property
    def read_files(self) -> list[Path]:
        """All files of this machine that are read."""
        of_suites = [file for name in self.suites for file in local_files(name, self.data)]
        return list(dict.fromkeys([*self.files, *of_suites, *self.context_files]))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, as far as it is said."""
        return self.context_tokens or self.max_prompt_tokens or 0

    @property
    def shown_files(self) -> str:
        """Their names, for messages and reports."""
        of_suites = [f"suite {suite_name(name)}: {source(name, self.data)}" for name in self.suites]
        return ", ".join([*map(str, self.files), *of_suites])


@dataclass(frozen=True)
class Prompt:
    """What every method answers.

    Attributes:
        ids: token ids, chat template applied, up to where the assistant's answer begins.
        question: its messages, without earlier turns that the run puts before them.
        record: as it was read. turn: of a conversation, counted from 1.
        max_new_tokens: of its answer, where that is less than the run's.
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
        """Within its category."""
        return self.record.sub_category if self.record is not None else None


@dataclass
class PromptSet:
    """The prompts of a run.

    ``measured`` and ``warmup`` share none; ``skipped`` counts what was left out, by reason. ``requested`` is how many
    were to be measured (None: all), which the file may not have.
    """

    config: PromptsConfig
    format: str
    sha256: str
    measured: list[Prompt]
    warmup: list[Prompt]
    skipped: Counter[str] = field(default_factory=Counter)
    requested: int | None = None

    def describe(self) -> dict[str, Any]:
        """For the report."""
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


def check_prompt_files(config: PromptsConfig) -> None:
    """Raise ValueError where a file is missing, or earlier turns should come from one that has none; needs no model."""
    for file in (*config.files, *config.context_files):
        check_prompt_file(file)
    for name in config.suites:
        check_suite(name, config.data)
    check_context_files(config.context_files)


def load_prompts(
    config: PromptsConfig, tokenizer: Any, *, warmup: int, max_new_tokens: int, max_context: int
) -> PromptSet:
    """Draw the prompts to measure, or as many as there are, and ``warmup`` others.

    The prompt of a dialogue is what stands before its first assistant turn, and with ``context_tokens`` other dialogues
    before that. A prompt that is in the file twice is used once, or a drafter that remembers phrases would meet an
    answer that it has already seen. Which prompts are drawn does not depend on ``config.consecutive``, which only
    orders them, nor on what is put before them.

    Raises:
        ValueError: a missing file or category, or fewer than ``warmup`` + 1 usable prompts; the message says what was
            skipped and why. Too little room for ``context_tokens``, or too few dialogues for them.
    """
    check_prompt_files(config)
    formats, skipped = [detect_format(file) for file in config.files], Counter[str]()
    records = _of_categories(config, _records(config, formats, skipped), skipped)
    random.Random(config.seed).shuffle(records)
    limit = longest_prompt(config, max_new_tokens, max_context)
    usable = _usable(config, tokenizer, max_new_tokens, max_context, skipped)
    draw = _draw_by_category if config.per_category is not None else _draw_of_suites if config.suites else _draw
    measured, spare, requested = draw(config, records, usable, warmup)
    if config.suites:
        spare += _warm_up(tokenizer, warmup - len(spare))
    if not measured or len(spare) < warmup:
        raise ValueError(
            f"{config.shown_files}: {len(measured) + len(spare)} usable prompts, of which warm-up has {len(spare)} and "
            f"takes {warmup}; skipped: {dict(skipped)} (at most {limit} prompt tokens); give a longer file, fewer "
            "warm-up prompts or prompts per category, or a smaller max_new_tokens"
        )
    if config.context_tokens is not None:
        measured, spare = _with_context(config, tokenizer, measured, spare)
    if config.consecutive is not None:
        measured = in_turns(measured, config.consecutive, config.categories)
    shown = ", ".join(dict.fromkeys(formats)) or "suite"
    return PromptSet(config, shown, files_sha256(config.read_files), measured, spare, skipped, requested)


def _with_context(
    config: PromptsConfig, tokenizer: Any, measured: list[Prompt], spare: list[Prompt]
) -> tuple[list[Prompt], list[Prompt]]:
    """Both with dialogues before them, none of which answers a question of the run."""
    assert config.context_tokens is not None
    asked = {prompt.question[-1]["content"] for prompt in [*measured, *spare]}
    render_here = functools.partial(render, tokenizer)
    earlier = Earlier(config.context_files, asked, render_here, config.context_tokens, config.seed)
    longer = [replace(prompt, ids=earlier.before(prompt.question)) for prompt in [*measured, *spare]]
    return longer[: len(measured)], longer[len(measured) :]


def in_whole_batches(prompts: PromptSet, batches: Sequence[int]) -> PromptSet:
    """As many of the prompts as fill batches of every size: at each of them the same ones are measured.

    Raises:
        ValueError: there are too few.
    """
    count, unit = len(prompts.measured), math.lcm(*batches)
    if count < unit:
        raise ValueError(
            f"there are {count} prompts to measure, and to fill batches of {shown_sizes(batches)} it takes {unit}: "
            "give more prompts or other batch sizes"
        )
    left = count % unit
    skipped = prompts.skipped + Counter(fills_no_batch=left)
    return replace(prompts, measured=prompts.measured[: count - left], skipped=skipped)


def shown_sizes(batches: Sequence[int]) -> str:
    """Batch sizes, for messages and reports."""
    *before, last = map(str, batches)
    return f"{', '.join(before)} and {last}" if before else last


def in_turns(prompts: list[Prompt], consecutive: int, categories: list[str] | None = None) -> list[Prompt]:
    """``consecutive`` prompts of one category in a row, as many of the next, and round again (Ouroboros, Appendix F).

    Within a category the order stays. What is left of a category that runs out first is decoded in shorter rows.

    Args:
        categories: their order; None: alphabetical.
    """
    names = categories or sorted({prompt.category or "" for prompt in prompts})
    queues = [[prompt for prompt in prompts if (prompt.category or "") == name] for name in names]
    rounds = range(0, max(map(len, queues)), consecutive)
    return [prompt for start in rounds for queue in queues for prompt in queue[start : start + consecutive]]


def longest_prompt(config: PromptsConfig, max_new_tokens: int, max_context: int) -> int:
    """Tokens of the longest prompt that can be used, before dialogues are put in front of it."""
    if max_new_tokens >= max_context:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens:,}, but the target and the drafters were made for {max_context:,} "
            f"positions, the prompt's included; give at most {max(max_context - 1, 1):,}"
        )
    most = max_context - max_new_tokens
    if (config.context_tokens or 0) > most:
        raise ValueError(
            f"context_tokens is {config.context_tokens:,}, but of the {max_context:,} positions that the target and "
            f"the drafters were made for max_new_tokens takes {max_new_tokens:,}; give at most {most:,}"
        )
    return min(config.max_prompt_tokens or most, config.context_tokens or most, most)


Usable = Callable[[Record], Prompt | None]


def _usable(
    config: PromptsConfig, tokenizer: Any, max_new_tokens: int, max_context: int, skipped: Counter[str]
) -> Usable:
    """What renders a record's prompt, or returns None and counts why it cannot be used."""
    seen: set[tuple[int, ...]] = set()

    def usable(record: Record) -> Prompt | None:
        own = load_suite(record.suite).max_new_tokens if record.suite is not None else None
        most = min(own or max_new_tokens, max_new_tokens)
        limit = longest_prompt(config, most, max_context)
        try:
            ids = render_up_to(tokenizer, record.messages, limit)
            bare = [{key: message[key] for key in ("role", "content")} for message in record.messages]
            unprinted = "tools" in record.messages[0] and render_up_to(tokenizer, bare, limit) == ids
        except DroppedError as error:
            skipped[error.reason] += 1
            return None
        reason = "duplicate" if tuple(ids) in seen else "too_long" if len(ids) > limit else ""
        reason = "tools_not_printed" if unprinted else reason
        if reason or not ids:
            skipped[reason or "empty_prompt"] += 1
            return None
        seen.add(tuple(ids))
        fewer = most if most < max_new_tokens else None
        return Prompt(record.id, record.category, ids, record.messages, record, max_new_tokens=fewer)

    return usable


Drawn = tuple[list[Prompt], list[Prompt], int | None]  # to measure, for warm-up, how many were to be measured


def _draw(config: PromptsConfig, records: list[Record], usable: Usable, warmup: int) -> Drawn:
    """``config.count`` prompts in the records' order; the first are for warm-up."""
    found = (prompt for record in records if (prompt := usable(record)) is not None)
    spare = list(itertools.islice(found, warmup))
    return list(itertools.islice(found, config.count)), spare, config.count


def _draw_by_category(config: PromptsConfig, records: list[Record], usable: Usable, warmup: int) -> Drawn:
    """``config.per_category`` prompts of every category in the records' order; warm-up takes from what is left."""
    assert config.per_category is not None
    counts = dict.fromkeys((record.category for record in records), 0)
    measured: list[Prompt] = []
    spare: list[Prompt] = []
    for record in records:
        full = counts[record.category] == config.per_category
        if not (full and len(spare) == warmup) and (prompt := usable(record)) is not None:
            (spare if full else measured).append(prompt)
            counts[record.category] += not full
    return measured, spare, config.per_category * len(counts)


def _draw_of_suites(config: PromptsConfig, records: list[Record], usable: Usable, warmup: int) -> Drawn:
    """Of each suite as many as it draws, and ``config.count`` of all; warm-up takes from what is left."""
    left = {name: load_suite(name).count for name in config.suites}
    there = Counter(record.suite for record in records)
    wanted = sum(there[name] if most is None else most for name, most in left.items())
    requested = wanted if config.count is None else min(config.count, wanted)
    measured: list[Prompt] = []
    spare: list[Prompt] = []
    for record in records:
        most = left[record.suite or ""]
        full = len(measured) == requested or most == 0
        if not (full and len(spare) == warmup) and (prompt := usable(record)) is not None:
            (spare if full else measured).append(prompt)
            if not full and most is not None:
                left[record.suite or ""] = most - 1
    return measured, spare, requested


def _warm_up(tokenizer: Any, count: int) -> list[Prompt]:
    """Questions of no suite: one that is measured whole has none to spare."""
    messages = [[{"role": "user", "content": text}] for text in itertools.islice(itertools.cycle(WARM_UP), count)]
    return [Prompt(f"warm-up {n}", None, render(tokenizer, each), each) for n, each in enumerate(messages, start=1)]


def _records(config: PromptsConfig, formats: list[Format], skipped: Counter[str]) -> list[Record]:
    found = []
    for file, format_ in zip(config.files, formats, strict=True):
        fallback = file.name.partition(".")[0] if len(config.files) > 1 else None
        read = read_prompts(file, format_, skipped)
        found += [replace(record, category=record.category or fallback) for record in read]
    for name in config.suites:
        of_suite = read_suite(name, config.data, skipped)
        if len(config.suites) > 1:  # then each is a category, and two may have a "line 1"
            named = suite_name(name)
            of_suite = [
                replace(record, id=f"{named}/{record.id}", category=named, sub_category=record.category)
                for record in of_suite
            ]
        found += of_suite
    return found


def _of_categories(config: PromptsConfig, records: list[Record], skipped: Counter[str]) -> list[Record]:
    """Those of ``config.categories``; where categories matter at all, those that have one."""
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
    kept = [record for record in records if record.category in (there if wanted is None else wanted)]
    if len(kept) < len(records):
        skipped["other_category" if wanted else "no_category"] += len(records) - len(kept)
    return kept


def render(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Messages -> token ids, ending where the assistant's answer begins.

    Raises:
        DroppedError: the template refuses them.
    """
    given, tools = [for_template(message) for message in messages], messages[0].get("tools")
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    try:
        encoded = tokenizer.apply_chat_template(given, tools=tools, **options)
    except REFUSALS as error:
        raise DroppedError("template_refused", f"the chat template refuses {messages[0]['role']!r}: {error}") from error
    return list(encoded["input_ids"])


def render_up_to(tokenizer: Any, messages: list[Message], limit: int) -> list[int]:
    """``render``; of messages with more than ``limit`` tokens perhaps only a part, but one with more than ``limit``.

    10 MB take a minute, where their beginning tells at once that they are too long.
    """
    length = sum(len(message["content"]) for message in messages)
    part = 16 * (limit + SPARE_TOKENS)  # characters
    while part < length:
        ids = render(tokenizer, _beginning(messages, part))
        if len(ids) > limit + SPARE_TOKENS:
            return ids
        part *= 4
    return render(tokenizer, messages)


def _beginning(messages: list[Message], characters: int) -> list[Message]:
    """The first ``characters`` of the messages; each keeps one, since templates refuse a prompt without the user's."""
    found = []
    for message in messages:
        found.append(message | {"content": message["content"][: max(characters, 1)]})
        characters -= len(message["content"])
    return found

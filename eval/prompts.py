"""Prompt files to token ids: held-out ShareGPT dialogues or Spec-Bench questions, told apart by their content."""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from data_prep.dialogues.json_records import Unreadable, read_records
from data_prep.dialogues.reader import Message, ReadCounts, read_dialogues
from drafters.config import Config

Format = Literal["sharegpt", "spec-bench"]
SPARE_TOKENS = 64  # of a text that was cut: its last few may be others than the whole text's


class PromptsConfig(Config):
    """Which prompts to decode, and in which order."""

    file: Path | list[Path] = Field(
        description="ShareGPT dialogues, or JSONL in Spec-Bench's question format; of several files, the name without "
        "its ending is the category of the prompts that have none"
    )
    count: int | None = Field(None, ge=1, description="prompts measured; None takes all that can be used")
    categories: list[str] | None = Field(None, min_length=1, description="only prompts of these; None: of any and none")
    per_category: int | None = Field(None, ge=1, description="prompts measured of every category, in place of count")
    consecutive: int | None = Field(
        None, ge=1, description="this many of one category in a row, then of the next, and round again; None: shuffled"
    )
    seed: int = Field(0, description="of the draw of prompts from the file, and of their order")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are skipped and counted")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count is not None and self.per_category is not None:
            raise ValueError(f"count is {self.count} and per_category {self.per_category}: give one of the two")
        for key, values in (("file", self.files), ("categories", self.categories or [])):
            if len(set(values)) < len(values):
                raise ValueError(f"{key}: each must be given once, found {[str(value) for value in values]}")
        if not self.files:
            raise ValueError("file is an empty list: name at least one")
        return self

    @property
    def files(self) -> list[Path]:
        """The prompt files, of which there may be one."""
        return self.file if isinstance(self.file, list) else [self.file]

    @property
    def shown_files(self) -> str:
        """Their names, for messages and reports."""
        return ", ".join(map(str, self.files))


@dataclass(frozen=True)
class Prompt:
    """``ids``: token ids, chat template applied, up to where the assistant's answer begins."""

    id: str
    category: str | None
    ids: list[int]


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
        lengths = [len(prompt.ids) for prompt in self.measured]
        by_category = Counter(prompt.category for prompt in self.measured if prompt.category is not None)
        return {
            "file": self.config.shown_files,
            "format": self.format,
            "sha256": self.sha256,
            "prompts": len(self.measured),
            "requested": self.requested,
            "categories": dict(sorted(by_category.items())),
            "consecutive": self.config.consecutive,
            "warmup_prompts": len(self.warmup),
            "prompt_tokens": {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
            "skipped": dict(self.skipped),
        }


Record = tuple[str, str | None, list[Message]]  # id, category, messages


def load_prompts(
    config: PromptsConfig, tokenizer: Any, *, warmup: int, max_new_tokens: int, max_context: int
) -> PromptSet:
    """Draw the prompts to measure, or as many as there are, and ``warmup`` others.

    The prompt of a dialogue is what stands before its first assistant turn; of a Spec-Bench question its first turn (a
    later one would depend on the method's own earlier answer). A prompt that is in the file twice is used once, or a
    drafter that remembers phrases would meet an answer that it has already seen. Which prompts are drawn does not
    depend on ``config.consecutive``, which only orders them.

    Raises:
        ValueError: a missing file or category, or fewer than ``warmup`` + 1 usable prompts; the message says what was
            skipped and why.
    """
    for file in config.files:
        check_prompt_file(file)
    formats, skipped = [detect_format(file) for file in config.files], Counter[str]()
    records = _of_categories(config, _records(config, formats, skipped), skipped)
    random.Random(config.seed).shuffle(records)
    if max_new_tokens >= max_context:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens:,}, but the target and the drafters were made for {max_context:,} "
            f"positions, the prompt's included; give at most {max(max_context - 1, 1):,}"
        )
    limit = min(config.max_prompt_tokens or max_context, max_context - max_new_tokens)
    usable = _usable(tokenizer, limit, skipped)
    draw = _draw if config.per_category is None else _draw_by_category
    measured, spare, requested = draw(config, records, usable, warmup)
    if not measured or len(spare) < warmup:
        raise ValueError(
            f"{config.shown_files}: {len(measured) + len(spare)} usable prompts, of which warm-up has {len(spare)} and "
            f"takes {warmup}; skipped: {dict(skipped)} (at most {limit} prompt tokens); give a longer file, fewer "
            "warm-up prompts or prompts per category, or a smaller max_new_tokens"
        )
    if config.consecutive is not None:
        measured = in_turns(measured, config.consecutive, config.categories)
    shown = ", ".join(dict.fromkeys(formats))
    return PromptSet(config, shown, files_sha256(config.files), measured, spare, skipped, requested)


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


Usable = Callable[[Record], Prompt | None]


def _usable(tokenizer: Any, limit: int, skipped: Counter[str]) -> Usable:
    """What renders a record's prompt, or returns None and counts why it cannot be used."""
    seen: set[tuple[int, ...]] = set()

    def usable(record: Record) -> Prompt | None:
        id_, category, messages = record
        ids = render_up_to(tokenizer, messages, limit)
        reason = "duplicate" if tuple(ids) in seen else "too_long" if len(ids) > limit else ""
        if reason or not ids:
            skipped[reason or "empty_prompt"] += 1
            return None
        seen.add(tuple(ids))
        return Prompt(id_, category, ids)

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
    counts = dict.fromkeys((category for _, category, _ in records), 0)
    measured: list[Prompt] = []
    spare: list[Prompt] = []
    for record in records:
        full = counts[record[1]] == config.per_category
        if not (full and len(spare) == warmup) and (prompt := usable(record)) is not None:
            (spare if full else measured).append(prompt)
            counts[record[1]] += not full
    return measured, spare, config.per_category * len(counts)


def _records(config: PromptsConfig, formats: list[Format], skipped: Counter[str]) -> list[Record]:
    found = []
    for file, format_ in zip(config.files, formats, strict=True):
        fallback = file.name.partition(".")[0] if len(config.files) > 1 else None
        read = _spec_bench if format_ == "spec-bench" else _sharegpt
        found += [(id_, category or fallback, messages) for id_, category, messages in read(file, skipped)]
    return found


def _of_categories(config: PromptsConfig, records: list[Record], skipped: Counter[str]) -> list[Record]:
    """Those of ``config.categories``; where categories matter at all, those that have one."""
    wanted = config.categories
    if wanted is None and config.per_category is None and config.consecutive is None:
        return records
    there = {category for _, category, _ in records if category is not None}
    if not there or (wanted and not set(wanted) <= there):
        missing = sorted(set(wanted or []) - there)
        raise ValueError(
            f"{config.shown_files}: no prompt has {'category ' + repr(missing[0]) if missing else 'a category'}; "
            f"there are: {', '.join(sorted(there)) or 'none'}"
        )
    kept = [record for record in records if record[1] in (there if wanted is None else wanted)]
    if len(kept) < len(records):
        skipped["other_category" if wanted else "no_category"] += len(records) - len(kept)
    return kept


def files_sha256(files: list[Path]) -> str:
    """SHA-256 of the files' bytes, one file after the other, in hex."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def check_prompt_file(file: Path) -> None:
    """Raise ValueError where there is no such file."""
    if not file.is_file():
        make = f"; python -m data_prep.stdlib_corpus --out {file.parent} makes it"
        raise ValueError(
            f"no prompt file at {file}; give held-out ShareGPT dialogues or questions in Spec-Bench's format "
            f"(JSONL){make if file.parent.name == 'stdlib' else ''}"
        )


def detect_format(file: Path) -> Format:
    """By the first readable record: ``turns`` is Spec-Bench's, anything else is read (and checked) as ShareGPT."""
    first: dict[str, Any] = next((record for _, record in read_records(file) if isinstance(record, dict)), {})
    return "spec-bench" if "turns" in first else "sharegpt"


def render(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Messages -> token ids, ending where the assistant's answer begins."""
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
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


def _sharegpt(file: Path, skipped: Counter[str]) -> Iterator[Record]:
    counts = ReadCounts()
    for dialogue in read_dialogues(file, counts):
        messages = list(dialogue.messages)
        first_answer = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        yield dialogue.id, dialogue.category, messages[:first_answer]
    skipped.update(counts.dropped)


def _spec_bench(file: Path, skipped: Counter[str]) -> Iterator[Record]:
    for number, record in read_records(file):
        turns = record.get("turns") if isinstance(record, dict) else None
        if isinstance(record, Unreadable):
            skipped[record.reason] += 1
        elif not isinstance(record, dict):
            skipped["not_an_object"] += 1
        elif not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            skipped["no_turns"] += 1
        elif not turns[0].strip():
            skipped["empty_prompt"] += 1
        else:
            category = record.get("category")
            id_ = record.get("question_id", f"line {number}")
            yield str(id_), None if category is None else str(category), [{"role": "user", "content": turns[0]}]

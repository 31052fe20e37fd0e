"""Prompt files to token ids: held-out ShareGPT dialogues or Spec-Bench questions, told apart by their content."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from data_prep.dialogues import ReadCounts, read_dialogues
from drafters.config import Config

Format = Literal["sharegpt", "spec-bench"]
Message = dict[str, str]


class PromptsConfig(Config):
    """Which prompts to decode."""

    file: Path = Field(description="ShareGPT dialogues, or JSONL in Spec-Bench's question format")
    count: int | None = Field(None, ge=1, description="prompts measured; None takes all that can be used")
    seed: int = Field(0, description="of the draw of `count` prompts from the file")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are skipped and counted")


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

    file: Path
    format: Format
    sha256: str
    measured: list[Prompt]
    warmup: list[Prompt]
    skipped: Counter[str] = field(default_factory=Counter)
    requested: int | None = None

    def describe(self) -> dict[str, Any]:
        """For the report."""
        lengths = [len(prompt.ids) for prompt in self.measured]
        return {
            "file": str(self.file),
            "format": self.format,
            "sha256": self.sha256,
            "prompts": len(self.measured),
            "requested": self.requested,
            "warmup_prompts": len(self.warmup),
            "prompt_tokens": {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
            "skipped": dict(self.skipped),
        }


def load_prompts(
    config: PromptsConfig, tokenizer: Any, *, warmup: int, max_new_tokens: int, max_context: int
) -> PromptSet:
    """Draw ``config.count`` prompts to measure, or as many as there are, and ``warmup`` others.

    The prompt of a dialogue is what stands before its first assistant turn; of a Spec-Bench question its first turn (a
    later one would hang on the method's own earlier answer). A prompt that stands twice in the file is used once, or a
    drafter that remembers phrases would meet an answer that it has already seen.

    Raises:
        ValueError: a missing file, or fewer than ``warmup`` + 1 usable prompts; the message says what was skipped and
            why.
    """
    check_prompt_file(config.file)
    format_, skipped = detect_format(config.file), Counter[str]()
    records = list(_spec_bench(config.file, skipped) if format_ == "spec-bench" else _sharegpt(config.file, skipped))
    random.Random(config.seed).shuffle(records)
    limit = min(config.max_prompt_tokens or max_context, max_context - max_new_tokens)
    wanted = warmup + config.count if config.count else len(records)
    found: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    for id_, category, messages in records:
        if len(found) == wanted:
            break
        ids = render(tokenizer, messages)
        if not ids:
            skipped["empty_prompt"] += 1
        elif len(ids) > limit:
            skipped["too_long"] += 1
        elif tuple(ids) in seen:
            skipped["duplicate"] += 1
        else:
            seen.add(tuple(ids))
            found.append(Prompt(id_, category, ids))
    if len(found) <= warmup:
        raise ValueError(
            f"{config.file} has {len(found)} usable prompts and warm-up alone takes {warmup}; skipped: {dict(skipped)} "
            f"(at most {limit} prompt tokens); give a longer file, fewer warm-up prompts or a smaller max_new_tokens"
        )
    digest = hashlib.sha256(config.file.read_bytes()).hexdigest()
    return PromptSet(config.file, format_, digest, found[warmup:], found[:warmup], skipped, config.count)


def check_prompt_file(file: Path) -> None:
    """Raise ValueError where there is no such file."""
    if not file.is_file():
        raise ValueError(
            f"no prompt file at {file}; give held-out ShareGPT dialogues or questions in Spec-Bench's format (JSONL)"
        )


def detect_format(file: Path) -> Format:
    """By the first readable record: ``turns`` is Spec-Bench's, anything else is read (and checked) as ShareGPT."""
    if file.suffix != ".gz":
        for _, record in _lines(file):
            if isinstance(record, dict):
                return "spec-bench" if "turns" in record else "sharegpt"
    return "sharegpt"


def render(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Messages -> token ids, ending where the assistant's answer begins."""
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def _sharegpt(file: Path, skipped: Counter[str]) -> Iterator[tuple[str, str | None, list[Message]]]:
    counts = ReadCounts()
    for dialogue in read_dialogues(file, counts):
        messages = list(dialogue.messages)
        first_answer = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        yield dialogue.id, None, messages[:first_answer]
    skipped.update(counts.dropped)


def _spec_bench(file: Path, skipped: Counter[str]) -> Iterator[tuple[str, str | None, list[Message]]]:
    for number, record in _lines(file):
        turns = record.get("turns") if isinstance(record, dict) else None
        if record is None:
            skipped["broken_json"] += 1
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


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed JSON; None where it is broken) of every line that is not blank."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line.removeprefix(b"\xef\xbb\xbf"))
                except (ValueError, RecursionError):
                    yield number, None

"""Prompt files of several published formats, told apart by their content, to what stands before the first answer."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from data_prep.dialogues.json_records import Unreadable, read_records
from data_prep.dialogues.reader import TURN_KEYS, Message, ReadCounts, read_dialogues

Format = Literal["sharegpt", "spec-bench", "gsm8k", "humaneval"]
# Formats of questions without a dialogue, by the key that has the question; MT-bench's is Spec-Bench's.
QUESTION_KEYS: dict[str, Format] = {"turns": "spec-bench", "question": "gsm8k", "prompt": "humaneval"}
ID_KEYS = ("question_id", "task_id")
KNOWN = "held-out ShareGPT dialogues or questions in Spec-Bench's, MT-bench's, GSM8K's or HumanEval's format"

Record = tuple[str, str | None, list[Message]]  # id, category, messages


def check_prompt_file(file: Path) -> None:
    """Raise ValueError where there is no such file."""
    if not file.is_file():
        make = f"; python -m data_prep.stdlib_corpus --out {file.parent} makes it"
        raise ValueError(
            f"no prompt file at {file}; give {KNOWN} (JSONL){make if file.parent.name == 'stdlib' else ''}"
        )


def files_sha256(files: list[Path]) -> str:
    """SHA-256 of the files' bytes, one file after the other, in hex."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def detect_format(file: Path) -> Format:
    """By the first readable record: one without a question's key is read (and checked) as ShareGPT."""
    first: dict[str, Any] = next((record for _, record in read_records(file) if isinstance(record, dict)), {})
    if any(key in first for key in TURN_KEYS):  # whatever stands beside the turns
        return "sharegpt"
    return next((format_ for key, format_ in QUESTION_KEYS.items() if key in first), "sharegpt")


def read_prompts(file: Path, format_: Format, skipped: Counter[str]) -> Iterator[Record]:
    """What stands before the first answer: of a dialogue, or a question alone. ``skipped`` counts the others."""
    if format_ == "sharegpt":
        return _sharegpt(file, skipped)
    return _questions(file, next(key for key, each in QUESTION_KEYS.items() if each == format_), skipped)


def _sharegpt(file: Path, skipped: Counter[str]) -> Iterator[Record]:
    counts = ReadCounts()
    for dialogue in read_dialogues(file, counts):
        messages = list(dialogue.messages)
        first_answer = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        yield dialogue.id, dialogue.category, messages[:first_answer]
    skipped.update(counts.dropped)


def _questions(file: Path, key: str, skipped: Counter[str]) -> Iterator[Record]:
    """Of several turns the first: a later one would depend on the method's own earlier answer."""
    for number, record in read_records(file):
        text = record.get(key) if isinstance(record, dict) else None
        if key == "turns":
            text = text[0] if isinstance(text, list) and text else None
        if isinstance(record, Unreadable):
            skipped[record.reason] += 1
        elif not isinstance(record, dict):
            skipped["not_an_object"] += 1
        elif not isinstance(text, str):
            skipped[f"no_{key}"] += 1
        elif not text.strip():
            skipped["empty_prompt"] += 1
        else:
            category = record.get("category")
            id_ = next((record[name] for name in ID_KEYS if name in record), f"line {number}")
            yield str(id_), None if category is None else str(category), [{"role": "user", "content": text}]

"""Read prompt files of several published formats, detected by content, up to the first answer."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data_prep.dialogues.json_records import Unreadable, read_records
from data_prep.dialogues.messages import Message, first_value
from data_prep.dialogues.reader import TURN_KEYS, ReadCounts, read_dialogues
from drafters.common.wording import shortened

Format = Literal["sharegpt", "spec-bench", "gsm8k", "humaneval"]
# Formats of single questions by the question's key; MT-bench and SPEED-Bench use Spec-Bench's.
QUESTION_KEYS: dict[str, Format] = {"turns": "spec-bench", "question": "gsm8k", "prompt": "humaneval"}
ID_KEYS = ("question_id", "task_id", "id")
KNOWN = "held-out ShareGPT dialogues or questions in Spec-Bench's, MT-bench's, GSM8K's or HumanEval's format"
FORMS = (
    '{"turns": ["..."]} (Spec-Bench, MT-bench, SPEED-Bench), {"question": "..."} (GSM8K), {"prompt": "..."} '
    '(HumanEval) or ShareGPT\'s {"conversations": [{"from": "human", "value": "..."}, ...]}'
)
# In the published SPEED-Bench, instead of prompts that it may not redistribute; its prepare_data.py fills them in.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Record:
    """A question as read from its file.

    Attributes:
        messages: messages before the first answer. later: the user's turns after it.
        fields: the whole record, which judges an answer.
        suite: the suite it comes from, or None. metric: how that suite judges the answer, or None.
    """

    id: str
    category: str | None
    messages: list[Message]
    sub_category: str | None = None
    later: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    suite: str | None = None
    metric: str | None = None


def check_prompt_file(file: Path) -> None:
    """Raise ValueError if there is no such file."""
    if not file.is_file():
        make = f"; python -m data_prep.stdlib_corpus --out {file.parent} makes it"
        raise ValueError(
            f"no prompt file at {file}; give {KNOWN} (JSONL){make if file.parent.name == 'stdlib' else ''}"
        )


def files_sha256(files: list[Path]) -> str:
    """Return the SHA-256 of all files' bytes in order, in hex."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def detect_format(file: Path) -> Format:
    """Detect the format by the first record with turns or a question; without one, ShareGPT."""
    for _, record in read_records(file):
        if isinstance(record, dict):
            if first_value(record, TURN_KEYS):  # also if there is a question
                return "sharegpt"
            if key := question_key(record):
                return QUESTION_KEYS[key]
    return "sharegpt"


def question_key(record: dict[str, Any]) -> str | None:
    """Return the key of a record's question in the published formats."""
    return next((key for key in QUESTION_KEYS if record.get(key) is not None), None)


def first_record(records: Iterable[tuple[int, Any]]) -> dict[str, Any]:
    """Return the first JSON object, or an empty one."""
    return next((record for _, record in records if isinstance(record, dict)), {})


def read_prompts(file: Path, format_: Format, skipped: Counter[str]) -> Iterator[Record]:
    """Yield the dialogues up to their first answers that count, or the questions; ``skipped`` counts unusable records.

    An answer of weight 0 does not count: data_prep.traffic gives it to the answers before the last request.
    """
    if format_ == "sharegpt":
        return _sharegpt(file, skipped)
    key = next(key for key, each in QUESTION_KEYS.items() if each == format_)
    return questions(read_records(file), partial(turns_under, key=key), f"no_{key}", skipped)


def _sharegpt(file: Path, skipped: Counter[str]) -> Iterator[Record]:
    counts = ReadCounts()
    try:
        for dialogue in read_dialogues(file, counts):
            messages = list(dialogue.messages)
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            first = next((i for i in answers if messages[i].get("weight") != 0), answers[0])
            yield Record(dialogue.id, dialogue.category, messages[:first])
    except ValueError:
        opening = first_record(read_records(file))
        if counts.usable or not opening or first_value(opening, TURN_KEYS) is not None:
            raise
        raise ValueError(
            f"{file} has fields of no known format; the first record is {shortened(opening, 60)}, expected {FORMS}; "
            "for other fields, write a suite (docs/measuring.md)"
        ) from None
    skipped.update(counts.dropped)


def turns_under(record: dict[str, Any], key: str) -> list[str]:
    """Return the user's turns under ``key``, which holds a text or a list of texts; [] for anything else."""
    value = record.get(key)
    turns: list[Any] = value if isinstance(value, list) else [value]
    return turns if all(isinstance(turn, str) for turn in turns) else []


def questions(
    records: Iterable[tuple[int, Any]],
    turns: Callable[[dict[str, Any]], list[str]],
    missing: str,
    skipped: Counter[str],
    id_: str | None = None,
) -> Iterator[Record]:
    """Yield the records whose user ``turns`` can be read, with id and categories under the published formats' keys.

    Args:
        missing: reason to skip a record without turns. id_: key of the id (default: one of ``ID_KEYS``).
    """
    for number, record in records:
        if not isinstance(record, dict):
            skipped[record.reason if isinstance(record, Unreadable) else "not_an_object"] += 1
            continue
        texts = turns(record)
        if not texts:
            skipped[missing] += 1
        elif not texts[0].strip():
            skipped["empty_prompt"] += 1
        elif any(PLACEHOLDER in text for text in texts):
            skipped["placeholder"] += 1
        else:
            name = first_value(record, [key for key in (id_, *ID_KEYS) if key is not None])
            kinds = (record.get(name) for name in ("category", "sub_category"))
            category, sub_category = (str(kind) if kind not in (None, "") else None for kind in kinds)
            messages = [{"role": "user", "content": texts[0]}]
            id_of = f"line {number}" if name is None else str(name)
            yield Record(id_of, category, messages, sub_category, tuple(texts[1:]), record)

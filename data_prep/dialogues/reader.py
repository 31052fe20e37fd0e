"""Read ShareGPT files or a Hub dataset as validated dialogues, and write dialogues as such records.

A record has its turns under ``conversations`` (or ``conversation``, ``messages``); a turn is ``{"from", "value"}`` or
``{"role", "content"}``. A record may also have an ``id``, a ``category`` and definitions of ``tools``. Unusable records
are dropped and counted by reason; one bad record never ends a run.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_prep.common.disk import file_sha256
from data_prep.dialogues.json_records import Unreadable, read_records
from data_prep.dialogues.messages import FOLLOWING, DroppedError, Message, first_value, parse_messages, parse_tools

TURN_KEYS = ("conversations", "conversation", "messages")
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".gz")
FROM = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}  # in records that are written
DATASET_SUFFIXES = (".parquet", ".arrow", ".csv")  # further formats of the `datasets` library


@dataclass(frozen=True)
class Dialogue:
    """A dialogue whose roles alternate user, assistant, ...; the last turn is an answer unless read ``unanswered``.

    A system message may come first, and tool results between two answers. ``category``: the record's own.
    """

    id: str
    messages: tuple[Message, ...]
    category: str | None = None


@dataclass
class ReadCounts:
    """Numbers of usable records, of dropped ones by reason, and of changed ones by change."""

    usable: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """One line: ``120 kept, dropped 3 (broken_json 2, no_assistant_turn 1)``."""
        dropped = f"dropped {self.dropped.total():,}" + (f" ({listed(self.dropped)})" if self.dropped else "")
        changes = listed(self.changed)
        return f"{self.usable:,} kept, {dropped}" + (f", changed: {changes}" if changes else "")


def listed(reasons: Counter[str]) -> str:
    """Reasons with their counts, the most frequent first."""
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())


def read_dialogues(source: str | Path, counts: ReadCounts, unanswered: bool = False) -> Iterator[Dialogue]:
    """Yield the usable dialogues of ``source`` in its order, and fill ``counts`` on the way.

    Args:
        source: a ``.json`` (a list of records, or one per line), ``.jsonl`` or gzipped file; else a local dataset
            folder or a Hub dataset's name, ``owner/name[:config][:split]`` (default split ``train``), read with the
            `datasets` library.
        unanswered: see ``parse_record``.

    Raises:
        ValueError: no such file or dataset, a damaged file, or no usable dialogue (with the counts).
    """
    seen = 0
    for position, record in enumerate(_records(str(source))):
        seen += 1
        try:
            dialogue = parse_record(record, f"record {position}", counts.changed, unanswered)
        except DroppedError as error:
            counts.dropped[error.reason] += 1
            continue
        counts.usable += 1
        yield dialogue
    if not seen:
        raise ValueError(f"{source} is empty: it holds no record; give a ShareGPT .json, .jsonl or .gz file")
    if counts.usable == 0:
        raise ValueError(
            f"{source}: none of {seen:,} records is a usable dialogue ({counts.describe()}); expected ShareGPT records "
            '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
        )


def parse_record(
    record: Any, fallback_id: str, changed: Counter[str] | None = None, unanswered: bool = False
) -> Dialogue:
    """One record as a Dialogue.

    A leading assistant turn is removed (as in EAGLE's data preparation). A trailing user turn or tool result, which has
    no answer, is removed as well; with ``unanswered`` it is kept, and may be the only turn. ``changed`` counts this.

    Raises:
        DroppedError: with one of the reasons ``broken_json``, ``not_utf8``, ``not_an_object``, ``no_conversations``,
            ``empty_dialogue``, ``broken_turn``, ``unknown_role``, ``non_string_value``, ``invalid_text``,
            ``empty_turn``, ``broken_tools``, ``broken_tool_call``, ``wrong_role_order``, ``no_assistant_turn`` (if
            ``unanswered``, ``no_user_turn``).
    """
    if isinstance(record, Unreadable):
        raise DroppedError(record.reason)
    if not isinstance(record, dict):
        raise DroppedError("not_an_object")
    turns = first_value(record, TURN_KEYS)
    if isinstance(turns, dict):  # some versions of `datasets` store a list of structs as a struct of lists
        turns = _rows(turns)
    if not isinstance(turns, list):
        raise DroppedError("no_conversations")
    if not turns:
        raise DroppedError("empty_dialogue")
    messages, changes = _in_order(parse_messages(turns), unanswered)
    in_turns = [turn["tools"] for turn in turns if turn.get("tools")]  # some data sets put them into a turn
    if tools := parse_tools(record.get("tools") or next(iter(in_turns), None)):
        messages[0] = messages[0] | {"tools": tools}
    if changed is not None:
        changed.update(changes)
    category = record.get("category") if isinstance(record.get("category"), str) else None
    return Dialogue(str(record.get("id") or fallback_id), tuple(messages), category)


def _in_order(messages: list[Message], unanswered: bool) -> tuple[list[Message], list[str]]:
    """The messages from the first question to the last answer, and the names of the removals."""
    changes = []
    head = messages[:1] if messages[0]["role"] == "system" else []
    body = messages[len(head) :]
    wanted = "user" if unanswered else "assistant"
    if not any(message["role"] == wanted for message in body):
        raise DroppedError(f"no_{wanted}_turn")
    if body[0]["role"] == "assistant":
        body = body[1:]
        changes.append("leading_assistant_removed")
    last = body[-1]["role"] if body else "assistant"
    if last != "assistant" and not unanswered:
        changes.append(f"trailing_{last}_removed")
        while body and body[-1]["role"] == last:
            body = body[:-1]
    if not body:
        raise DroppedError("no_assistant_turn")
    order = [message["role"] for message in body]
    if order[0] != "user" or any(after not in FOLLOWING.get(role, ()) for role, after in itertools.pairwise(order)):
        raise DroppedError("wrong_role_order")
    return [*head, *body], changes


def record(dialogue: Dialogue) -> dict[str, object]:
    """The ShareGPT record of a dialogue."""
    turns = [
        {"from": FROM[message["role"]], "value": message["content"]}
        | {key: value for key, value in message.items() if key not in ("role", "content", "tools")}
        for message in dialogue.messages
    ]
    category = {"category": dialogue.category} if dialogue.category else {}
    tools = {"tools": dialogue.messages[0]["tools"]} if "tools" in dialogue.messages[0] else {}
    return {"id": dialogue.id, **category, **tools, "conversations": turns}


def unanswered_record(name: str, question: str) -> dict[str, object]:
    """The ShareGPT record of a question without an answer."""
    return {"id": name, "conversations": [{"from": FROM["user"], "value": question}]}


def same_question(text: str) -> str:
    """A key that is equal for questions that differ only in case and white space."""
    return " ".join(text.lower().split())


def first_question(dialogue: Dialogue) -> str:
    """The first question of a dialogue, as ``same_question`` writes it."""
    return same_question(next(message["content"] for message in dialogue.messages if message["role"] == "user"))


def source_digest(source: str | Path) -> str:
    """Identity of the data: the start of a file's SHA-256; for a Hub dataset, whose content is unknown, its name."""
    path = Path(source)
    return file_sha256(path)[:16] if path.is_file() else f"hub:{source}"


def is_text(source: str) -> bool:
    """Whether ``source`` is a plain text file."""
    return source.endswith(".txt") and Path(source).is_file()


def check_source(source: str | Path) -> None:
    """Raise ValueError if ``source`` is a missing file, or a folder that cannot be read as a dataset."""
    path, (repository, *parts) = Path(source), dataset_parts(str(source))
    is_named = not str(source).endswith(DATA_SUFFIXES) and repository.count("/") == 1
    if path.is_dir():
        there = [file for file in sorted(path.rglob("*")) if file.name.endswith((*DATA_SUFFIXES, *DATASET_SUFFIXES))]
        if not there:
            raise ValueError(f"{path} is a folder without data files; give a ShareGPT .json, .jsonl or .gz file")
        if find_spec("datasets") is None:
            raise ValueError(
                f"{path} is a folder: give one of its files, for example {there[0]}; reading it as a data set needs "
                "`pip install datasets`"
            )
    elif path.exists() and not path.is_file():
        raise ValueError(f"{source} is neither a file nor a folder; write the data into a file and give that")
    elif not path.exists() and (len(parts) > 2 or not (is_named or Path(repository).is_dir())):
        raise ValueError(
            f"no data file at {source}; give a ShareGPT .json, .jsonl or .gz file, or a Hub dataset as "
            "owner/name[:config][:split]"
        )


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]] | None:
    columns = {name: column for name, column in columns.items() if column is not None}
    lists = list(columns.values())
    if not lists or not all(isinstance(column, list) and len(column) == len(lists[0]) for column in lists):
        return None
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def _records(source: str) -> Iterable[Any]:
    check_source(source)
    if Path(source).is_file():
        return (record for _, record in read_records(Path(source)))
    return dataset_records(source)


def dataset_parts(name: str) -> list[str]:
    """A dataset's folder or repository, followed by the parts of ``name`` after it: ``[:config][:split]``."""
    candidates = (name.rsplit(":", count) for count in range(3))
    return next((parts for parts in candidates if Path(parts[0]).exists()), name.split(":"))


def dataset_records(name: str, subset: str | None = None) -> Iterable[Any]:
    """The records of a local dataset folder or of a Hub dataset, ``owner/name[:config][:split]``.

    ``subset``: the configuration if ``name`` has none. Raises ValueError without `datasets` or such a dataset.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"reading the Hub dataset {name!r} needs `pip install datasets`; "
            "or download its ShareGPT file and give its path"
        ) from error
    repository, *parts = dataset_parts(name)
    if len(parts) > 2 or not all(parts):
        raise ValueError(f"{name!r} names no dataset; write owner/name, owner/name:config or owner/name:config:split")
    if len(parts) == 2:
        subset, split = parts
    elif parts and subset is None and parts[0] in _config_names(repository):
        subset, split = parts[0], "train"
    else:
        split = parts[0] if parts else "train"
    try:
        return datasets.load_dataset(repository, subset, split=split)  # from 4.0 on it runs no repository's script
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        what = f"a configuration {subset!r} and a split {split!r}" if subset else f"a split {split!r}"
        names = _config_names(repository)
        hint = ""
        if len(names) > 1 and subset not in names:
            hint = f": it has the configurations {', '.join(names)}; name one, as {repository}:{names[0]}"
        raise ValueError(
            f"no dataset {repository!r} with {what} could be loaded{hint} ({type(error).__name__}: {error})"
        ) from error


def _config_names(repository: str) -> list[str]:
    """The dataset's configurations; [] if they cannot be read, as without a network."""
    import datasets

    with contextlib.suppress(OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError):
        return list(datasets.get_dataset_config_names(repository))
    return []

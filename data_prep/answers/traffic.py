"""Choose, split and write served conversations, for data_prep.traffic.

The log is read twice, line by line. The first pass keeps 56 bytes of each record, at its peak 2 GB for 9 million. The
second one keeps the chosen dialogues, of at most ``MOST_BYTES`` of text.
"""

import argparse
import hashlib
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.json_records import read_records
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.messages import DroppedError, Message
from data_prep.dialogues.reader import Dialogue, ReadCounts, dataset_records, record, source_digest
from data_prep.dialogues.served import Served, parse_served
from drafters.common.files import replace_json, replace_text

# Conversations of each side: with fewer, training has no new text, tau on valid is noise, or no gain is significant.
FEWEST = {"train": 25, "valid": 3, "heldout": 10}
MOST_BYTES = 1 << 27  # of the chosen records in the log: 10 times that in memory
LARGEST_LIST = 1 << 28  # bytes of a log that is one JSON list, which cannot be read line by line
HELD_OUT, VALID = 0.2, 0.1  # shares of the conversations, the newest and the ones before
FEWEST_HELD_OUT = 20
COMPARED = 200  # prompts whose tokens are counted
FIT = 0.9  # least share of prompts with as many tokens as the server counted
NAMES = ("train", "valid", "heldout")


@dataclass
class Index:
    """Facts of all usable records, one row each, in the log's order; hashes are of 8 bytes."""

    numbers: np.ndarray  # of the records in the log
    times: np.ndarray
    conversations: np.ndarray
    prompts: np.ndarray
    questions: np.ndarray  # of the whole dialogue
    openings: np.ndarray  # of the first question if the target answered it, else of the whole dialogue
    lengths: np.ndarray  # messages
    sizes: np.ndarray  # characters

    @classmethod
    def read(cls, records: Iterator[tuple[int, Served | None]]) -> "Index":
        """Read all records; one without a time has that of the record before it, or none has."""
        columns: list[Any] = [array(kind) for kind in "qdQQQQii"]
        before = -np.inf
        for number, served in records:
            if served is None:
                continue
            before = before if served.time is None else served.time
            messages = served.dialogue.messages
            text = json.dumps([_plain(message) for message in messages[:-1]], sort_keys=True)
            asked = served.questions
            opening = asked[:1] if len(served.answers) > 1 else asked
            row = number, before, hashed(served.conversation), hashed(text), hashed("\n".join(asked))
            sizes = len(messages), len(text) + len(messages[-1]["content"])
            for column, value in zip(columns, (*row, hashed("\n".join(opening)), *sizes), strict=True):
                column.append(value)
        return cls(*(np.frombuffer(column, column.typecode) if column else np.zeros(0) for column in columns))

    def of(self, rows: np.ndarray) -> "Index":
        """Return some of the rows."""
        return Index(*(column[rows] for column in vars(self).values()))

    def newest_of_each_prompt(self) -> "Index":
        """Return the rows without earlier records of the same prompt, the oldest first."""
        order = np.lexsort((self.numbers, self.times))
        _, last = np.unique(self.prompts[order][::-1], return_index=True)
        return self.of(order[np.sort(len(order) - 1 - last)])

    def by_age(self) -> np.ndarray:
        """Return the conversations, the one with the newest record first."""
        names, first = np.unique(self.conversations[::-1], return_index=True)
        return names[np.argsort(first)]

    def longest_of_each_conversation(self) -> "Index":
        """Return one row of each conversation, whose question is the one that is measured (``last_request``)."""
        order = np.lexsort((self.lengths, self.conversations))[::-1]
        return self.of(order[np.unique(self.conversations[order], return_index=True)[1]])


def hashed(text: str) -> int:
    """An 8-byte hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def write_traffic(parsed: argparse.Namespace) -> None:
    """Read the log twice, and write the three files and traffic.json.

    Raises:
        ValueError: no record is usable, too few conversations, or prompts that this target's template does not give.
    """
    counts = ReadCounts()
    check_lines(Path(parsed.log))
    index = Index.read(read_served(parsed.log, counts, parsed.chat_template is not None))
    if not len(index.numbers):
        raise ValueError(f"{parsed.log}: no record is usable ({counts.describe()}); {expected(counts)}")
    count, index = len(index.numbers), index.newest_of_each_prompt()
    counts.dropped["repeated_prompt"] += count - len(index.numbers)
    sides = split(index, parsed.conversations, counts)
    index = index.of(np.isin(index.conversations, np.concatenate([*sides.values()])))
    counts.usable, counts.dropped = len(index.numbers), +counts.dropped  # without reasons that count 0
    if any(len(sides[name]) < fewest for name, fewest in FEWEST.items()):
        raise ValueError(
            f"{parsed.log}: {', '.join(f'{name} {len(sides[name])}' for name in NAMES)} usable conversations "
            f"({counts.describe()}), and at least {', '.join(f'{name} {FEWEST[name]}' for name in NAMES)} are needed; "
            "give a longer log or a larger --conversations. Records without a conversation_id are one conversation if "
            "their system message and first question are the same"
        )
    dialogues = collect(parsed, index, sides)
    compared = compare_prompts(dialogues, load_tokenizer(parsed.target, None, parsed.chat_template), parsed.log)
    facts = {"log_digest": source_digest(parsed.log), **compared, "dropped": dict(counts.dropped)}
    write(parsed.out, dialogues, facts, counts)


def check_lines(log: Path) -> None:
    """Raise ValueError if the log is one JSON list too large for the memory."""
    if not log.is_file() or log.stat().st_size <= LARGEST_LIST or log.suffix == ".gz":
        return
    with log.open("rb") as file:
        if file.read(64).lstrip().startswith(b"["):
            raise ValueError(f"{log} is one JSON list; give a record per line: jq -c '.[]' {log} > log.jsonl")


def read_served(source: str, counts: ReadCounts, own_template: bool) -> Iterator[tuple[int, Served | None]]:
    """Yield (number, record) of every record; None for one that is dropped and counted."""
    path = Path(source)
    records = read_records(path) if path.is_file() else enumerate(dataset_records(source), start=1)
    for number, each in records:
        try:
            served = parse_served(each, f"record {number}", counts.changed, own_template)
        except DroppedError as error:
            counts.dropped[error.reason] += 1
            yield number, None
            continue
        counts.usable += 1
        yield number, served


def expected(counts: ReadCounts) -> str:
    """What to give, by the most frequent reason of the drops."""
    reason = counts.dropped.most_common(1)[0][0] if counts.dropped else ""
    if reason == "template_options":
        return "requests set chat_template_kwargs: write these into a copy of the template, and give --chat-template"
    if reason == "broken_json":
        return "a server's text log (vLLM's 'Received request') lacks the messages; log requests and responses as JSON"
    if reason == "streamed_chunks":
        return "answers are logged as streamed chunks: join those of each request into one message"
    if reason == "text_completion":
        return "requests of /v1/completions have a prompt and no messages: log /v1/chat/completions"
    return 'a line is {"request": {"messages": [...]}, "response": {"choices": [...]}} or a dialogue with its answers'


def split(index: Index, most: int, counts: ReadCounts) -> dict[str, np.ndarray]:
    """Return the conversations of each side; count those left out. Drop one if a conversation of an older side asks the
    same questions in this order, or begins with its only question."""
    names = index.by_age()[:most]
    whole, index = len(index.numbers), index.of(np.isin(index.conversations, names))
    unique, of_unique = np.unique(index.conversations, return_inverse=True)
    sizes = np.bincount(of_unique, index.sizes)[np.searchsorted(unique, names)]
    chosen = names[: max(1, int((np.cumsum(sizes) <= MOST_BYTES).sum()))]
    index = index.of(np.isin(index.conversations, chosen))
    counts.dropped["older_conversation"] += whole - len(index.numbers)
    held = min(max(FEWEST_HELD_OUT, int(HELD_OUT * len(chosen))), len(chosen) // 2)
    valid = held + max(1, int(VALID * len(chosen)))
    sides = {"train": chosen[valid:], "valid": chosen[held:valid], "heldout": chosen[:held]}
    measured, older = index.longest_of_each_conversation(), sides["train"]
    for name in ("valid", "heldout"):
        before = index.of(np.isin(index.conversations, older))
        asked = np.isin(measured.questions, np.concatenate([before.questions, before.openings]))
        again = np.intersect1d(measured.conversations[asked], sides[name])
        counts.dropped["question_asked_before"] += int(np.isin(index.conversations, again).sum())
        older, sides[name] = np.concatenate([older, sides[name]]), np.setdiff1d(sides[name], again)
    return sides


def collect(parsed: argparse.Namespace, index: Index, sides: dict[str, np.ndarray]) -> dict[str, list[list[Served]]]:
    """Read the log again; return the records of ``index``, by side and conversation, the oldest first."""
    side_of = {key: name for name, keys in sides.items() for key in keys.tolist()}
    rows = enumerate(zip(index.numbers.tolist(), index.conversations.tolist(), strict=True))
    wanted = {number: (side_of[key], key, place) for place, (number, key) in rows}
    records: dict[str, dict[int, list[tuple[int, Served]]]] = {name: {} for name in NAMES}
    for number, served in read_served(parsed.log, ReadCounts(), parsed.chat_template is not None):
        if served is not None and number in wanted:
            side, key, place = wanted[number]
            records[side].setdefault(key, []).append((place, served))
    return {
        side: [[served for _, served in sorted(each, key=itemgetter(0))] for each in by_key.values()]
        for side, by_key in records.items()
    }


def compare_prompts(dialogues: dict[str, list[list[Served]]], chat: ChatTokenizer, log: str) -> dict[str, int]:
    """Return how many prompts have as many tokens as the server counted; ValueError if too few have."""
    every = [served for side in dialogues.values() for each in side for served in each if served.prompt_tokens]
    same, pairs = 0, list[tuple[int, int]]()
    for served in random.Random(0).sample(every, min(COMPARED, len(every))):
        try:
            ours = len(chat.prompt(list(served.dialogue.messages[:-1]))[0])
        except DroppedError:
            continue  # counted when the features are made
        same += ours == served.prompt_tokens
        pairs += [(ours, served.prompt_tokens or 0)]
    if pairs and same < FIT * len(pairs):
        ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"{log}: {len(pairs) - same} of {len(pairs)} prompts have another number of tokens than {chat.name} gives "
            f"(for example {ours} instead of the server's {theirs}): the log is of another model, or the server used "
            "another template; give that model as --target, or the template as --chat-template"
        )
    return {"prompts_compared": len(pairs), "prompts_of_equal_length": same}


def write(out: Path, dialogues: dict[str, list[list[Served]]], facts: dict[str, Any], counts: ReadCounts) -> None:
    """Write all files, traffic.json last, and print the counts."""
    out.mkdir(parents=True, exist_ok=True)
    conversations, answers = {name: len(side) for name, side in dialogues.items()}, {}
    for name, side in dialogues.items():
        lines = [line for each in side for line in ([last_request(each)] if name == "heldout" else merged(each))]
        answers[name] = sum(m["role"] == "assistant" and m.get("weight") != 0 for line in lines for m in line)
        records = (record(Dialogue(f"{name}-{n:06d}", tuple(line))) for n, line in enumerate(lines))
        replace_text(out / f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in records))
    replace_json(out / "traffic.json", facts | {"conversations": conversations, "answers": answers})
    shown = ", ".join(f"{name} {conversations[name]:,} conversations with {answers[name]:,} answers" for name in NAMES)
    print(f"{counts.describe()}\n{shown} -> {out}")
    if facts["prompts_compared"]:
        print(
            f"{facts['prompts_of_equal_length']} of {facts['prompts_compared']} prompts have the server's token count"
        )


def last_request(conversation: list[Served]) -> list[Message]:
    """The longest dialogue, of several the newest. Only its last answer counts: its whole request is the prompt."""
    messages = max(reversed(conversation), key=lambda served: len(served.dialogue.messages)).dialogue.messages
    return _counting(messages, {len(messages) - 1})


def merged(conversation: list[Served]) -> list[list[Message]]:
    """The records in which each served answer counts once.

    A record that a longer one continues word by word is part of it. An answer that the client changed or sent back
    without its reasoning is no part: then its own record stays, and the copy does not count.
    """
    kept: list[tuple[tuple[Message, ...], set[int]]] = []
    for served in sorted(conversation, key=lambda one: -len(one.dialogue.messages)):
        messages = served.dialogue.messages
        counting = next((those for longer, those in kept if longer[: len(messages)] == messages), None)
        if counting is None:
            kept.append((messages, set(served.answers)))
        else:
            counting |= served.answers
    return [_counting(messages, those) for messages, those in kept]


def _counting(messages: tuple[Message, ...], answers: set[int]) -> list[Message]:
    """The messages, with weight 0 on the other answers."""
    return [
        message if message["role"] != "assistant" or n in answers else message | {"weight": 0}
        for n, message in enumerate(messages)
    ]


def _plain(message: Message) -> Message:
    """A message without reasoning, which clients do not send back, and without a weight."""
    return {key: value for key, value in message.items() if key not in ("reasoning_content", "weight")}

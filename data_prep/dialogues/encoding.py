"""One split's dialogues as masked tokens: read, filtered, truncated and counted, before the target is loaded."""

import hashlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.common.progress import Bar
from data_prep.dialogues.loss_mask import NO_ANSWER, ChatTokenizer, MaskedTokens
from data_prep.dialogues.messages import Message
from data_prep.dialogues.reader import Dialogue, DroppedError, ReadCounts, listed, read_dialogues
from drafters.common.files import read_text
from drafters.model.files import load_bare_tokenizer

CHUNK = 256  # dialogues tokenized in one call
FIRST_WITHOUT_ANSWER = 32  # dialogues without a printed answer, and none with one: then it is the template


@dataclass
class EncodedSplit:
    """Tokenized records of the kept dialogues, in the order of the data file, and counts of all.

    If the template prints earlier answers without their reasoning, a dialogue becomes one record per turn. ``used`` is
    the number of kept dialogues; ``ids`` and ``dialogues`` have one item per record.
    """

    ids: list[str] = field(default_factory=list)
    dialogues: list[MaskedTokens] = field(default_factory=list)
    counts: ReadCounts = field(default_factory=ReadCounts)
    used: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all dialogues together."""
        return sum(len(dialogue.input_ids) for dialogue in self.dialogues)


def load_tokenizer(
    name: str, revision: str | None = None, chat_template: str | None = None, date: str | None = None
) -> ChatTokenizer:
    """The target's tokenizer with its chat template, or the one in the file ``chat_template``; no remote code is run.

    Args:
        date: YYYY-MM-DD, printed if the template prints a date; default: today.

    Raises:
        ValueError: no tokenizer or template there, or a tokenizer without a chat template where none is given.
    """
    template = _read_template(chat_template) if chat_template else None
    tokenizer = load_bare_tokenizer(name, revision)
    if template is not None:
        tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, name, date)


def _read_template(file: str) -> str:
    try:
        text = read_text(Path(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"chat_template {file} is no readable text file ({error})") from error
    if not text.strip():
        raise ValueError(f"chat_template {file} is empty; leave the key out to use the tokenizer's own template")
    return text


def encode_split(source: str, chat: ChatTokenizer, max_length: int, limit: int | None = None) -> EncodedSplit:
    """Tokens and masks of the usable dialogues of ``source``, at most ``limit``, each at most ``max_length`` long.

    Raises:
        ValueError: unreadable data, a template that prints no answers (of the first dialogues, or of all), or no
            dialogue left (with the counts).
    """
    counts = ReadCounts()
    return _encode(read_dialogues(source, counts), counts, source, chat, max_length, limit)


@dataclass
class Sample:
    """Some dialogues of a file, each as likely as any other and in no order.

    ``looked_at``: how many; ``encoded``: those that can be used. ``counts``: of the whole file, what the reader made of
    it. ``limit``: as ``encode_split`` takes it. ``seconds``: of reading the file.
    """

    looked_at: int
    encoded: EncodedSplit
    counts: ReadCounts
    limit: int | None
    seconds: float

    @property
    def usable(self) -> int:
        """Dialogues of the file that can be used, by the sample's share, as far as the limit takes them."""
        found = round(self.counts.kept * self.encoded.used / self.looked_at)
        return found if self.limit is None else min(found, self.limit)

    @property
    def tokens(self) -> int:
        """Of all that can be used."""
        return round(self.usable * self.encoded.tokens / self.encoded.used)

    @property
    def trained(self) -> int:
        """Tokens of answers, of all that can be used."""
        answers = sum(int(one.loss_mask.sum()) for one in self.encoded.dialogues)
        return round(self.usable * answers / self.encoded.used)

    def describe(self) -> str:
        """What became of the file's dialogues, in a line."""
        dropped = self.encoded.counts.dropped
        if not dropped:
            return self.counts.describe()
        useless = f"{dropped.total():,} cannot be used ({listed(dropped)})"
        return f"{self.counts.describe()}; of {self.looked_at:,} looked at {useless}"


def sample_split(source: str, chat: ChatTokenizer, max_length: int, count: int, limit: int | None = None) -> Sample:
    """``count`` dialogues from everywhere in ``source``, for files are often sorted; with a ``limit``, of its first.

    Raises:
        ValueError: as ``encode_split``.
    """
    counts, chosen, draw, began = ReadCounts(), list[Dialogue](), random.Random(0), time.perf_counter()
    for number, dialogue in enumerate(read_dialogues(source, counts)):
        if number < count:
            chosen.append(dialogue)
        elif limit is not None and number >= limit:
            continue
        elif (place := draw.randrange(number + 1)) < count:  # Vitter's algorithm R
            chosen[place] = dialogue
    seconds = time.perf_counter() - began
    draw.shuffle(chosen)
    try:
        encoded = _encode(iter(chosen), ReadCounts(), source, chat, max_length)
    except ValueError:
        if len(chosen) == counts.kept:
            raise
        # Few can be used: the first of them, or the error for the whole file.
        encoded = encode_split(source, chat, max_length, count)
        return Sample(counts.kept, encoded, counts, limit, seconds)
    return Sample(len(chosen), encoded, counts, limit, seconds)


def _encode(
    stream: Iterator[Dialogue],
    counts: ReadCounts,
    source: str,
    chat: ChatTokenizer,
    max_length: int,
    limit: int | None = None,
) -> EncodedSplit:
    split = EncodedSplit(counts=counts)
    details: dict[str, str] = {}  # of the last dialogue dropped for each reason
    with Bar(desc=f"tokenizing {source}", unit=" dialogues", leave=False) as progress:
        while chunk := list(itertools.islice(stream, CHUNK if limit is None else min(CHUNK, limit - split.used))):
            for dialogue, (results, changes) in zip(chunk, _records(chat, chunk, max_length), strict=True):
                try:
                    kept = _fit(results, max_length, counts.changed)
                except DroppedError as error:
                    counts.drop(error.reason)
                    details[error.reason] = str(error)
                    continue
                counts.changed.update(changes)
                split.used += 1
                split.ids += [dialogue.id] if len(kept) == 1 else [f"{dialogue.id}/{n}" for n in range(len(kept))]
                split.dialogues += kept
            progress.update(len(chunk))
            if not split.ids and counts.dropped[NO_ANSWER] >= FIRST_WITHOUT_ANSWER:
                raise ValueError(f"{source}: {details[NO_ANSWER]}")
    counts.kept = split.used
    if not split.ids:
        detail = details.get(NO_ANSWER) or next(reversed(details.values()), "")
        example = f"; for example: {detail}" if detail else ""
        raise ValueError(f"{source}: no dialogue is left for training: {counts.describe()}{example}")
    return split


def _records(
    chat: ChatTokenizer, dialogues: list[Dialogue], max_length: int
) -> Iterator[tuple[list[MaskedTokens | DroppedError], list[str]]]:
    """What each dialogue becomes, and what is changed for that; all of them are tokenized in one call."""
    settled: list[tuple[list[list[Message]], list[str]] | DroppedError] = []
    for dialogue in dialogues:
        try:
            settled.append(chat.printer.settle(dialogue.messages))
        except DroppedError as error:
            settled.append(error)
    views = [view for one in settled if not isinstance(one, DroppedError) for view in one[0]]
    encoded = iter(chat.encode(views, max_length))
    for one in settled:
        if isinstance(one, DroppedError):
            yield [one], []
        else:
            yield list(itertools.islice(encoded, len(one[0]))), one[1]


def _fit(results: list[MaskedTokens | DroppedError], max_length: int, changed: Counter[str]) -> list[MaskedTokens]:
    """Cut the records of one dialogue to ``max_length`` tokens, and leave out those whose answers are all cut off.

    Raises:
        DroppedError: a record was dropped, or none is left.
    """
    if refused := next((result for result in results if isinstance(result, DroppedError)), None):
        raise refused
    whole = [result for result in results if isinstance(result, MaskedTokens)]
    kept = [short for result in whole if (short := result.cut(max_length)).loss_mask.any()]
    if not kept:
        raise DroppedError("no_response_left", f"no answer begins within the first {max_length} tokens")
    if any(len(result.input_ids) > max_length for result in whole):
        changed["truncated"] += 1
    return kept


def tokenizer_hash(tokenizer: Any) -> str:
    """Tells tokenizers apart: a hash of vocabulary and special tokens, the same on every machine and version."""
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    added = sorted((index, str(token)) for index, token in tokenizer.added_tokens_decoder.items())
    content = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items()), added], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def template_hash(template: str) -> str:
    """A hash of the chat template's text."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]

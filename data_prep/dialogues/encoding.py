"""Read, filter, truncate, tokenize and count one split's dialogues."""

import hashlib
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.common.progress import Bar
from data_prep.dialogues.loss_mask import NO_ANSWER, ChatTokenizer, MaskedTokens
from data_prep.dialogues.reader import Dialogue, DroppedError, ReadCounts, listed, read_dialogues
from drafters.common.wording import read_text
from drafters.model.files import load_bare_tokenizer

CHUNK = 256  # dialogues tokenized in one call
FIRST_WITHOUT_ANSWER = 32  # dialogues; if none of the first ones has a printed answer, the template is wrong


@dataclass
class EncodedSplit:
    """Tokenized records of the ``used`` dialogues, in the order of the data file, and counts of all.

    ``ids`` and ``dialogues`` have one item per record: a dialogue may become one record per turn.
    """

    ids: list[str] = field(default_factory=list)
    dialogues: list[MaskedTokens] = field(default_factory=list)
    counts: ReadCounts = field(default_factory=ReadCounts)
    used: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each record."""
        return [len(dialogue.input_ids) for dialogue in self.dialogues]

    @property
    def tokens(self) -> int:
        """Tokens of all records together."""
        return sum(self.lengths)


def load_tokenizer(
    name: str, revision: str | None = None, chat_template: str | None = None, date: str | None = None
) -> ChatTokenizer:
    """The target's tokenizer with its own chat template or the one in the file ``chat_template``; no remote code runs.

    ``date``: see ``ChatTokenizer``. Raises ValueError without a tokenizer, or without a usable template.
    """
    tokenizer = load_bare_tokenizer(name, revision)
    if chat_template:
        try:
            tokenizer.chat_template = read_text(Path(chat_template))
        except (OSError, ValueError) as error:
            raise ValueError(f"chat_template {chat_template} is no readable text file ({error})") from error
    return ChatTokenizer(tokenizer, name, date)


def encode_split(source: str, chat: ChatTokenizer, max_length: int, limit: int | None = None) -> EncodedSplit:
    """Tokens and masks of the first ``limit`` usable dialogues of ``source``, each at most ``max_length`` tokens.

    Raises ValueError for unreadable data, a template that prints no answers, or no usable dialogue (with the counts).
    """
    counts = ReadCounts()
    return _encode(read_dialogues(source, counts), counts, source, chat, max_length, limit)


@dataclass
class Sample:
    """A random sample of a file's dialogues.

    Attributes:
        looked_at: dialogues in the sample. encoded: the usable ones.
        counts: the reader's, of the whole file. limit: most dialogues to use. seconds: time to read the file.
    """

    looked_at: int
    encoded: EncodedSplit
    counts: ReadCounts
    limit: int | None
    seconds: float

    @property
    def usable(self) -> int:
        """Estimated number of usable dialogues in the file, at most ``limit``."""
        estimate = round(self.counts.usable * self.encoded.used / self.looked_at)
        return estimate if self.limit is None else min(estimate, self.limit)

    @property
    def tokens(self) -> int:
        """Estimated tokens of all usable dialogues."""
        return round(self.usable * self.encoded.tokens / self.encoded.used)

    @property
    def trained(self) -> int:
        """Estimated tokens of answers in all usable dialogues."""
        answers = sum(int(one.loss_mask.sum()) for one in self.encoded.dialogues)
        return round(self.usable * answers / self.encoded.used)

    def describe(self) -> str:
        """One line of counts: of the file, and of the sample's unusable dialogues."""
        dropped = self.encoded.counts.dropped
        if not dropped:
            return self.counts.describe()
        useless = f"{dropped.total():,} of a sample of {self.looked_at:,} cannot be used ({listed(dropped)})"
        return f"{self.counts.describe()}; {useless}"


def sample_split(source: str, chat: ChatTokenizer, max_length: int, count: int, limit: int | None = None) -> Sample:
    """Encode ``count`` random dialogues of ``source`` (of its first ``limit``); raises ValueError as ``encode_split``.

    Files are often sorted, so their first dialogues alone would mislead.
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
        if len(chosen) == counts.usable:
            raise
        # The sample has no usable dialogue: take the file's first usable ones, or raise the error for all of it.
        encoded = encode_split(source, chat, max_length, count)
        return Sample(counts.usable, encoded, counts, limit, seconds)
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

    def drop(error: DroppedError) -> None:
        counts.dropped[error.reason] += 1
        details[error.reason] = str(error)

    with Bar(desc=f"tokenizing {source}", unit=" dialogues", leave=False) as progress:
        while chunk := list(itertools.islice(stream, CHUNK if limit is None else min(CHUNK, limit - split.used))):
            # Render each dialogue's records, and tokenize all of them in one call.
            rendered = []
            for dialogue in chunk:
                try:
                    views, changes = chat.printer.settle(dialogue.messages)
                    rendered.append((dialogue.id, [chat.render(view) for view in views], changes))
                except DroppedError as error:
                    drop(error)
            tokens = iter(chat.tokenize([text for _, texts, _ in rendered for text in texts]))
            # Cut them to max_length, and remove those without an answer before the cut.
            for name, texts, changes in rendered:
                whole = list(itertools.islice(tokens, len(texts)))
                records = [short for one in whole if (short := one.cut(max_length)).loss_mask.any()]
                if not records:
                    drop(DroppedError("no_response_left", f"no answer begins within the first {max_length} tokens"))
                    continue
                is_cut = any(len(one.input_ids) > max_length for one in whole)
                counts.changed.update([*changes, "truncated"] if is_cut else changes)
                split.used += 1
                split.ids += [name] if len(records) == 1 else [f"{name}/{n}" for n in range(len(records))]
                split.dialogues += records
            progress.update(len(chunk))
            if not split.ids and counts.dropped[NO_ANSWER] >= FIRST_WITHOUT_ANSWER:
                raise ValueError(f"{source}: {details[NO_ANSWER]}")
    counts.usable = split.used
    if not split.ids:
        detail = details.get(NO_ANSWER) or next(reversed(details.values()), "")
        example = f"; for example: {detail}" if detail else ""
        raise ValueError(f"{source}: no dialogue is left for training: {counts.describe()}{example}")
    return split


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of vocabulary and special tokens, the same on every machine and version."""
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    added = sorted((index, str(token)) for index, token in tokenizer.added_tokens_decoder.items())
    content = json.dumps([sorted(tokenizer.get_vocab().items()), sorted(special.items()), added], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def template_hash(template: str) -> str:
    """A hash of the chat template's text."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]

"""State of a regeneration: conversations that are being answered, and the journal that survives a kill.

While a run lasts, ``<out>.unfinished/`` has ``run.json`` (the settings on which the answers depend) and one journal per
process, ``rank-0-of-2.jsonl``, with a line for each finished batch, flushed to the disk. A dialogue's number is its
place among the usable ones of the source. All journals together give the state of each dialogue.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from data_prep.common.disk import write_error
from data_prep.common.ranks import Rank
from data_prep.dialogues.messages import Message, uses_tools
from data_prep.dialogues.reader import Dialogue
from data_prep.store.lock import RankLock, folder_lock
from drafters.common.files import replace_text
from drafters.common.fingerprints import same_weights
from drafters.common.provenance import changes

WEIGHTS = "target_fingerprint"  # key of an identity
RUN_FILE = "run.json"  # in the folder of journals: the settings on which the texts depend
RETRIED = frozenset({"refused", "bad_reply"})  # reasons for a drop that the next start tries again
ONLY_REASONING = "only_reasoning"  # reason to end a dialogue: the answer was cut before its reasoning ended


@dataclass(frozen=True)
class Turn:
    """Outcome of one user turn: an answer, or the reason why there is none."""

    index: int  # of the dialogue
    turn: int  # of its user turns, from 0
    answer: str | None = None  # None with ``end`` or ``drop``
    tokens: int = 0  # generated
    truncated: bool = False  # the answer ran into the limit
    end: str | None = None  # reason to end the dialogue before this turn
    drop: str | None = None  # reason to drop the dialogue
    reasoning: str | None = None  # text before the answer, if the endpoint returns it separately


@dataclass(frozen=True)
class AnsweredBatch:
    """Turns that finished together: a line of the journal."""

    turns: list[Turn]
    committed: int = 0  # tokens committed after the prefill, over all rows
    forwards: int = 0  # of the target, for these tokens
    seconds: float = 0.0  # wall time since the line before, set by the journal


@dataclass
class Conversation:
    """A dialogue of the source whose answers are being replaced, turn by turn."""

    index: int
    dialogue: Dialogue
    answers: list[str] = field(default_factory=list)
    reasoning: list[str | None] = field(default_factory=list)  # of each answer, if returned separately
    truncated: int = 0
    ended: str | None = None
    dropped: str | None = None

    def __post_init__(self) -> None:
        if uses_tools(self.dialogue.messages):  # nothing runs the tool calls of new answers
            self.dropped = "tools"

    @property
    def questions(self) -> list[Message]:
        """The user turns of the source."""
        return [message for message in self.dialogue.messages if message["role"] == "user"]

    @property
    def done(self) -> bool:
        """Whether no turn is left to answer."""
        return self.dropped is not None or self.ended is not None or len(self.answers) == len(self.questions)

    def history(self) -> list[Message]:
        """The system message, the answered turns with their new answers, and the next question."""
        messages = [message for message in self.dialogue.messages if message["role"] == "system"]
        for question, answer, reasoning in zip(self.questions, self.answers, self.reasoning, strict=False):
            beside = {"reasoning_content": reasoning} if reasoning else {}
            messages += [question, {"role": "assistant", "content": answer, **beside}]
        return messages if self.done else [*messages, self.questions[len(self.answers)]]

    def take(self, turn: Turn) -> None:
        """Record the outcome of the next turn; ignore any other turn (two processes did the same work)."""
        if self.done or turn.turn != len(self.answers):
            return
        self.dropped = turn.drop
        if turn.end is not None:  # before the first answer, nothing of the dialogue is left
            self.ended, self.dropped = (turn.end, None) if self.answers else (None, turn.end)
        if turn.answer is not None:
            self.answers.append(turn.answer)
            self.reasoning.append(turn.reasoning)
            self.truncated += turn.truncated

    def result(self) -> Dialogue | None:
        """The new dialogue; None if it was dropped."""
        assert self.done
        return None if self.dropped else dataclasses.replace(self.dialogue, messages=tuple(self.history()))


def replay(conversations: list[Conversation], batches: list[AnsweredBatch], retry: bool) -> None:
    """Bring all conversations of the source to the state in the journals; ``retry``: forget drops in ``RETRIED``."""
    turns = [turn for batch in batches for turn in batch.turns if turn.index < len(conversations)]
    turns = [turn for turn in turns if not (retry and turn.drop in RETRIED)]
    # Several files may have parts of one dialogue, and an answer takes precedence over a refusal.
    for turn in sorted(turns, key=lambda turn: (turn.turn, turn.drop in RETRIED)):
        conversations[turn.index].take(turn)


class AnswerJournal:
    """One process's journal, as a context manager that holds its lock; ``seconds``: time spent on its batches.

    Args:
        folder: ``<out>.unfinished``; it is made if missing.
        identity: settings on which the answers depend.

    Raises (on entering):
        ValueError: the folder has another identity, or another process has this rank or another number of ranks.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], rank: Rank) -> None:
        self.folder, self.identity, self.rank = folder, identity, rank
        self.path = folder / f"rank-{rank.index}-of-{rank.count}.jsonl"
        self._open = contextlib.ExitStack()
        self._file: IO[bytes]
        self._last = self.seconds = 0.0

    def __enter__(self) -> "AnswerJournal":
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.folder), contextlib.ExitStack() as opened:
            lock = RankLock(self.folder, self.rank)
            opened.callback(lock.release)
            run = self.folder / RUN_FILE
            begun = lock.others or any(path.stat().st_size for path in self.folder.glob("rank-*.jsonl"))
            if run.is_file() and begun:
                check_identity(self.folder, json.loads(run.read_text()), self.identity)
            else:  # nothing is written yet: use the new settings
                replace_text(run, json.dumps(self.identity, indent=1) + "\n")
            self._file = opened.enter_context(self.path.open("ab+"))
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)  # remove a last line that a kill left incomplete
            self.seconds = sum(batch.seconds for batch in _read(self.path))
            self._open = opened.pop_all()
        self._last = time.perf_counter()
        return self

    def start_clock(self) -> None:
        """Measure the first batch from now on, so that loading the target does not count."""
        self._last = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def write(self, batch: AnsweredBatch) -> None:
        """Append a batch and flush it to the disk; raises OSError if the disk is full, and earlier batches stay."""
        now = time.perf_counter()
        line = dataclasses.asdict(dataclasses.replace(batch, seconds=now - self._last))
        self._last, self.seconds = now, self.seconds + now - self._last
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(error, self.path, "what was answered before is kept") from error


def read_journals(folder: Path, names: str = "rank-*.jsonl") -> list[AnsweredBatch]:
    """The batches of all journals that match ``names``, without damaged lines: their work is done again."""
    return [batch for path in sorted(folder.glob(names)) for batch in _read(path)]


def _read(journal: Path) -> Iterator[AnsweredBatch]:
    for line in journal.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            values = json.loads(line)
            yield AnsweredBatch([Turn(**turn) for turn in values.pop("turns")], **values)


def check_identity(place: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError, naming every difference, if ``place`` was made with another identity than ``now``."""
    if now.get("dtype") == "auto" and "dtype" in before:  # the dtype of another machine's auto is accepted
        before = {**before, "dtype": "auto"}
    if WEIGHTS in before and WEIGHTS in now and same_weights(before[WEIGHTS], now[WEIGHTS], str(place)):
        before = {**before, WEIGHTS: now[WEIGHTS]}
    if changed := changes(before, now):
        raise ValueError(
            f"{place} was made with other settings: {'; '.join(changed)}; undo that, give another `out`, or delete it"
        )


def derived_seed(seed: int, asked: list[tuple[int, int]]) -> int:
    """The seed of a batch of (dialogue, turn), which does not depend on earlier batches."""
    digest = hashlib.sha256(f"{seed} {asked}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # 31 bits, which servers accept as well

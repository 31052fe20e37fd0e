"""The state of a regeneration: dialogues in the making, and the journal that a kill leaves readable.

While a run lasts, ``<out>.unfinished/`` holds ``run.json`` (what the answers depend on) and a journal for each process,
``rank-0-of-2.jsonl``: a line for each finished batch, flushed to the disk. Dialogues are known by their place among the
usable ones of the source; the journals of all processes together say where each stands.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from data_prep.answers.ownership import RUN_FILE
from data_prep.common.disk import write_error
from data_prep.common.ranks import Rank
from data_prep.dialogues.messages import Message, uses_tools
from data_prep.dialogues.reader import Dialogue
from data_prep.store.lock import RankLock, folder_lock
from drafters.common.files import replace_text
from drafters.common.provenance import changes

# Reasons for dropping a dialogue that may be gone at the next start, which therefore tries it again.
RETRIED = frozenset({"refused", "bad_reply"})
ONLY_REASONING = "only_reasoning"  # reason to end a dialogue: the answer was cut before its reasoning ended


@dataclass(frozen=True)
class Turn:
    """What became of one user turn: an answer, or why there is none.

    Attributes:
        index: the dialogue's place among the usable ones of the source. turn: counts its user turns from 0.
        answer: the assistant's text; None where ``end`` or ``drop`` says why. reasoning: the text that it
            wrote before the answer; None if the endpoint returns no reasoning in a field of its own.
        tokens: that were generated for it. truncated: it was cut at the limit, no end-of-turn token followed.
        end: reason to end the dialogue before this turn. drop: reason to drop the dialogue.
    """

    index: int
    turn: int
    answer: str | None = None
    tokens: int = 0
    truncated: bool = False
    end: str | None = None
    drop: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class AnsweredBatch:
    """Turns that were finished together, a line of the journal.

    Attributes:
        committed, forwards: tokens committed after the prefill and the target forwards that it took, all rows together.
        seconds: wall time since the line before; the journal fills it in.
    """

    turns: list[Turn]
    committed: int = 0
    forwards: int = 0
    seconds: float = 0.0


@dataclass
class Conversation:
    """A dialogue of the source whose answers are being replaced, one turn after the other.

    A dialogue with tools is dropped, because nothing runs the tool calls of the new answers.
    """

    index: int
    dialogue: Dialogue
    answers: list[str] = field(default_factory=list)
    reasoning: list[str | None] = field(default_factory=list)  # of each answer, if it came in a field of its own
    truncated: int = 0
    tokens: int = 0
    ended: str | None = None
    dropped: str | None = None

    def __post_init__(self) -> None:
        if uses_tools(self.dialogue.messages):
            self.dropped = "tools"

    @property
    def questions(self) -> list[Message]:
        """The user turns of the source."""
        return [message for message in self.dialogue.messages if message["role"] == "user"]

    @property
    def done(self) -> bool:
        """Whether nothing is left to answer."""
        return self.dropped is not None or self.ended is not None or len(self.answers) == len(self.questions)

    def history(self) -> list[Message]:
        """The system message if there is one, the answered turns with their new answers, and the next question."""
        messages = [message for message in self.dialogue.messages if message["role"] == "system"]
        for question, answer, reasoning in zip(self.questions, self.answers, self.reasoning, strict=False):
            beside = {"reasoning_content": reasoning} if reasoning else {}
            messages += [question, {"role": "assistant", "content": answer, **beside}]
        return messages if self.done else [*messages, self.questions[len(self.answers)]]

    def take(self, turn: Turn) -> None:
        """Take in what became of the next turn; of any other one it is ignored (two processes did the same work)."""
        if self.done or turn.turn != len(self.answers):
            return
        self.dropped = turn.drop
        if turn.end is not None:  # without an answer before it there is no dialogue
            self.ended, self.dropped = (turn.end, None) if self.answers else (None, turn.end)
        if turn.answer is not None:
            self.answers.append(turn.answer)
            self.reasoning.append(turn.reasoning)
            self.truncated += turn.truncated
            self.tokens += turn.tokens

    def result(self) -> Dialogue | None:
        """The new dialogue; None if it was dropped."""
        assert self.done
        return None if self.dropped else dataclasses.replace(self.dialogue, messages=tuple(self.history()))


def replay(conversations: list[Conversation], batches: list[AnsweredBatch], retry: bool) -> None:
    """Bring conversations to where the journals' batches left them.

    Args:
        conversations: all of the source, in its order.
        retry: forget the drops that may be gone by now (``RETRIED``).
    """
    turns = [turn for batch in batches for turn in batch.turns if turn.index < len(conversations)]
    turns = [turn for turn in turns if not (retry and turn.drop in RETRIED)]
    # Several files may hold parts of one dialogue; and an answer counts for more than an earlier refusal.
    for turn in sorted(turns, key=lambda turn: (turn.turn, turn.drop in RETRIED)):
        conversations[turn.index].take(turn)


class AnswerJournal:
    """One process's journal, as a context manager that holds its lock.

    Args:
        folder: ``<out>.unfinished``; it is made if missing.
        identity: what the answers depend on; journals of another one are never continued.
        rank: this process among those that share the work.

    Attributes:
        seconds: spent on the batches that this file holds.

    Raises (on entering):
        ValueError: the folder was made with another identity; or another process has this rank; or processes of another
            number of ranks are at work there.
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
            else:  # nothing is written yet: with the settings of now
                replace_text(run, json.dumps(self.identity, indent=1) + "\n")
            self._file = opened.enter_context(self.path.open("ab+"))
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)  # without what a kill left of its last line
            self.seconds = sum(batch.seconds for batch in _read(self.path))
            self._open = opened.pop_all()
        self._last = time.perf_counter()
        return self

    def start_clock(self) -> None:
        """What came before is no time of answers: a target that was loaded."""
        self._last = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def write(self, batch: AnsweredBatch) -> None:
        """Append a finished batch; when this returns it is on the disk.

        Raises:
            OSError: the disk is full or the file cannot be written; all batches before stay.
        """
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
    """The batches of all processes, or of those whose journals match ``names``.

    A line that is being written, or damaged, is left out: its work is done again.
    """
    return [batch for path in sorted(folder.glob(names)) for batch in _read(path)]


def _read(journal: Path) -> Iterator[AnsweredBatch]:
    for line in journal.read_bytes().splitlines():
        try:
            values = json.loads(line)
            turns = [Turn(**turn) for turn in values.pop("turns")]
            batch = AnsweredBatch(turns, **values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        yield batch


def check_identity(place: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError, naming every difference, if ``place`` was made with another identity than ``now``."""
    if now.get("dtype") == "auto" and "dtype" in before:  # answers of another machine's auto are as good
        before = {**before, "dtype": "auto"}
    if changed := changes(before, now):
        raise ValueError(
            f"{place} was made with other settings: {'; '.join(changed)}; undo that, give another `out`, or delete it"
        )

"""Make prompts of a wanted length: put dialogues before the question, as earlier turns of one conversation."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from data_prep.dialogues.messages import Message, uses_tools
from data_prep.dialogues.reader import ReadCounts, read_dialogues
from eval.prompts.files import detect_format

MISFITS = 100  # stop filling after this many dialogues that do not fit the remaining length
NEAR = 0.8  # accepted share of the wanted length

Render = Callable[[list[Message]], list[int]]


def check_context_files(files: list[Path]) -> None:
    """Raise ValueError if a file has no dialogues."""
    for file in files:
        if (format_ := detect_format(file)) != "sharegpt":
            raise ValueError(
                f"{file} has {format_}'s format, without dialogues to put before a question; give ShareGPT dialogues "
                "as context_file, or remove context_tokens"
            )


class Earlier:
    """Dialogues to put before questions; a dialogue is reused only after all others were used.

    Args:
        files: ShareGPT dialogues. asked: questions whose own dialogues are excluded.
        render: messages to token ids, up to the answer. wanted: tokens of a prompt. seed: of the order.
    """

    def __init__(self, files: list[Path], asked: set[str], render: Render, wanted: int, seed: int) -> None:
        self._shown = ", ".join(map(str, files))
        self._render, self._wanted = render, wanted
        found = []
        for file in files:
            read = (dialogue.messages for dialogue in read_dialogues(file, ReadCounts()))
            found += [_turns(messages) for messages in read if not uses_tools(messages)]
        left = [turns for turns in found if not any(turn["content"] in asked for turn in turns[::2])]
        random.Random(seed).shuffle(left)
        self._waiting = deque(left)

    def before(self, question: list[Message]) -> list[int]:
        """Return the prompt's ids, at most the wanted length and nearly that.

        Args:
            question: messages; the last is the user's.
        """
        own = len(self._render(question))
        room = self._wanted - own
        chosen: list[list[Message]] = []
        passed: list[list[Message]] = []
        while self._waiting and len(passed) < MISFITS:
            turns = self._waiting.popleft()
            length = len(self._render(_placed([turns], question))) - own
            if length <= room:
                chosen.append(turns)
                room -= length
            else:
                passed.append(turns)
        self._waiting.extendleft(reversed(passed))
        self._waiting.extend(chosen)
        ids = self._render(_placed(chosen, question))
        while chosen and len(ids) > self._wanted:  # a template may add more between two dialogues than around one
            chosen.pop()
            ids = self._render(_placed(chosen, question))
        if len(ids) < NEAR * self._wanted:
            raise ValueError(
                f"context_tokens is {self._wanted:,}, but the dialogues of {self._shown} fill only {len(ids):,}; give "
                "a context_file with more or shorter dialogues, or smaller context_tokens"
            )
        return ids


def _turns(messages: Sequence[Message]) -> list[Message]:
    """Return the turns without the system message: a conversation has one, which the question may contain."""
    return [message for message in messages if message["role"] != "system"]


def _placed(dialogues: list[list[Message]], question: list[Message]) -> list[Message]:
    """Put the dialogues before the user's question and after its system message."""
    return [*question[:-1], *chain(*dialogues), question[-1]]

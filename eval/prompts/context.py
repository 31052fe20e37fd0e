"""Prompts of a wanted length: dialogues stand before the question, as earlier turns of the same conversation."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from data_prep.dialogues.messages import Message, uses_tools
from data_prep.dialogues.reader import ReadCounts, read_dialogues
from eval.prompts.files import detect_format

MISFITS = 100  # dialogues in a row that are too long for what is left, after which it is left
NEAR = 0.8  # of the wanted length is enough

Render = Callable[[list[Message]], list[int]]


def check_context_files(files: list[Path]) -> None:
    """Raise ValueError for a file whose questions have no answers."""
    for file in files:
        if (format_ := detect_format(file)) != "sharegpt":
            raise ValueError(
                f"{file} is in {format_}'s format, without dialogues to put before a question; give ShareGPT ones as "
                "context_file, or leave context_tokens out"
            )


class Earlier:
    """Dialogues that come before questions; none twice in a prompt, and in no second prompt before all were in one.

    Args:
        files: of dialogues in ShareGPT form. asked: questions whose own dialogues are left out, with their answers.
        render: messages to token ids, ending where the answer begins. wanted: tokens of a prompt. seed: of the order.
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
        """The prompt, of at most the wanted length and nearly that.

        Args:
            question: messages, the last of them the user's.

        Raises:
            ValueError: there are too few dialogues, or too few that are short enough.
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
                f"context_tokens is {self._wanted:,}, but of the dialogues of {self._shown} no more than {len(ids):,} "
                "could be put together; give a context_file with more or shorter ones, or fewer context_tokens"
            )
        return ids


def _turns(messages: Sequence[Message]) -> list[Message]:
    """The user's and the assistant's: a conversation has one system message, which the question may bring."""
    return [message for message in messages if message["role"] != "system"]


def _placed(dialogues: list[list[Message]], question: list[Message]) -> list[Message]:
    """Before the user's question, after the system message if it has one."""
    return [*question[:-1], *chain(*dialogues), question[-1]]

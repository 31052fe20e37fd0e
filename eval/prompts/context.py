"""Make prompts of a wanted length: put dialogues before the question, as earlier turns of one conversation."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from data_prep.dialogues.messages import Message, uses_tools
from data_prep.dialogues.reader import ReadCounts, read_dialogues
from eval.prompts.prompt_files import detect_format

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


def with_earlier_turns(
    questions: list[list[Message]], files: list[Path], render: Render, wanted: int, seed: int
) -> list[list[int]]:
    """Return the prompts' ids with dialogues before the questions, each at most ``wanted`` tokens and nearly that.

    A dialogue is reused only after all others were used.

    Args:
        questions: messages; the last is the user's. Dialogues that contain it are left out.
        files: ShareGPT dialogues. render: messages to token ids, up to the answer. seed: seed of the order.
    """
    asked = {question[-1]["content"] for question in questions}
    read = (dialogue.messages for file in files for dialogue in read_dialogues(file, ReadCounts()))
    dialogues = [_turns(messages) for messages in read if not uses_tools(messages)]
    left = [turns for turns in dialogues if not any(turn["content"] in asked for turn in turns[::2])]
    random.Random(seed).shuffle(left)
    waiting = deque(left)
    prompts = [_filled(question, waiting, render, wanted) for question in questions]
    if (shortest := min(map(len, prompts))) < NEAR * wanted:
        raise ValueError(
            f"context_tokens is {wanted:,}, but the dialogues of {', '.join(map(str, files))} fill only {shortest:,}; "
            "give a context_file with more or shorter dialogues, or smaller context_tokens"
        )
    return prompts


def _filled(question: list[Message], waiting: deque[list[Message]], render: Render, wanted: int) -> list[int]:
    """Return the ids of a question after dialogues from ``waiting``, which go to its end."""
    question_tokens = len(render(question))
    room = wanted - question_tokens
    chosen: list[list[Message]] = []
    passed: list[list[Message]] = []
    while waiting and len(passed) < MISFITS:
        turns = waiting.popleft()
        length = len(render(_placed([turns], question))) - question_tokens
        if length <= room:
            chosen.append(turns)
            room -= length
        else:
            passed.append(turns)
    waiting.extendleft(reversed(passed))
    waiting.extend(chosen)
    ids = render(_placed(chosen, question))
    while chosen and len(ids) > wanted:  # a template may add more between two dialogues than around one
        chosen.pop()
        ids = render(_placed(chosen, question))
    return ids


def _turns(messages: Sequence[Message]) -> list[Message]:
    """Return the turns without the system message: a conversation has one, which the question may contain."""
    return [message for message in messages if message["role"] != "system"]


def _placed(dialogues: list[list[Message]], question: list[Message]) -> list[Message]:
    """Put the dialogues before the user's question and after its system message."""
    return [*question[:-1], *chain(*dialogues), question[-1]]

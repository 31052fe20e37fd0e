"""Answers written by a target in this process, through the one decoding loop, several dialogues at a time."""

import itertools
import random
from collections.abc import Iterator

import torch

from drafters import Drafter, TargetModel, generate
from drafters.decoding.loop import eos_ids

from ..dialogues.loss_mask import ChatTokenizer
from ..dialogues.reader import DroppedError
from .journal import AnsweredBatch, Conversation, Turn
from .writing import Writing, derived_seed

REPLACEMENT = "\ufffd"  # what a decoder prints for half a character


class TargetAnswers:
    """Answers conversations in groups that stay together from the first turn to the last.

    The groups, and the seed of every batch, follow from the conversations given and the configuration alone: a run that
    was killed and started again writes what it would have written anyway. Greedy answers do not depend on the groups
    (in float32; in 16 bits batches round differently), sampled ones do.

    Args:
        batch: dialogues in a group; less where the drafter decodes fewer rows.

    Raises:
        ValueError: the drafter was made for shorter contexts than ``writing`` allows.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, chat: ChatTokenizer, writing: Writing, batch: int
    ) -> None:
        self.max_context = writing.max_context or target.max_context
        if drafter.max_context < self.max_context:
            raise ValueError(
                f"max_context is {self.max_context}, but drafter {drafter.name!r} was made for "
                f"{drafter.max_context} tokens; set max_context={drafter.max_context}, or use another drafter"
            )
        self.target, self.drafter, self.chat, self.writing = target, drafter, chat, writing
        self.batch = min(batch, drafter.max_batch or batch)
        # The end-of-turn token of a chat template is often missing among the generation config's.
        own = chat.tokenizer.eos_token_id
        self.eos = eos_ids(target, None) | (frozenset() if own is None else {own})

    def batches(self, conversations: list[Conversation]) -> Iterator[AnsweredBatch]:
        """Answer all that is open; between two batches the caller takes the turns of the last one in."""
        for group in self.groups(conversations):
            while rows := [conversation for conversation in group if not conversation.done]:
                yield self.answer(rows)

    def groups(self, conversations: list[Conversation]) -> list[list[Conversation]]:
        """Conversations with the same number of turns and of similar length, in an order that gives a fair rate."""
        ordered = sorted(conversations, key=lambda one: (len(one.questions), _length(one), one.index))
        groups = [ordered[start : start + self.batch] for start in range(0, len(ordered), self.batch)]
        random.Random(self.writing.seed).shuffle(groups)
        return groups

    def answer(self, rows: list[Conversation]) -> AnsweredBatch:
        """The next turn of each conversation, in one batch.

        Raises:
            ValueError: the memory does not suffice.
        """
        turns, asked, prompts, leads = [], [], [], []
        # Prompts: a conversation whose next turn cannot be asked ends here, and the others go on without it.
        for row in rows:
            turn = len(row.answers)
            try:
                ids, lead = self.chat.prompt(row.history())
            except DroppedError as error:
                turns.append(Turn(row.index, turn, drop=error.reason))
                continue
            if len(ids) + self.writing.max_new_tokens > self.max_context:
                turns.append(Turn(row.index, turn, end="no_room"))
                continue
            asked.append((row.index, turn))
            prompts.append(ids)
            leads.append(lead)
        if not prompts:
            return AnsweredBatch(turns)
        # One decoding for all. The seed is that of these very turns, so that a resumed run draws the same answers.
        try:
            result = generate(
                self.target,
                self.drafter,
                prompts,
                max_new_tokens=self.writing.max_new_tokens,
                temperature=self.writing.temperature,
                top_k=self.writing.top_k,
                top_p=self.writing.top_p,
                eos_token_id=sorted(self.eos),
                seed=derived_seed(self.writing.seed, asked),
            )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"out of memory while {len(prompts)} dialogues were answered; lower batch (now {self.batch}) and run "
                "again: what was answered before is kept"
            ) from error
        # Answers, without the padding behind a row that ended before the longest.
        answers = [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]
        for (index, turn), ids, lead in zip(asked, answers, leads, strict=True):
            turns.append(self._turn(index, turn, ids, lead))
        return AnsweredBatch(turns, result.trace.decoded_tokens, sum(step.forwards for step in result.trace.steps))

    def _turn(self, index: int, turn: int, ids: list[int], lead: str) -> Turn:
        ended = ids[-1] in self.eos
        if not ended and self.writing.truncated == "drop":
            return Turn(index, turn, end="truncated")
        text = self.chat.tokenizer.decode(
            ids[:-1] if ended else ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        text = text.removeprefix(lead) if ended else text.removeprefix(lead).rstrip(REPLACEMENT)
        if not text.strip():
            return Turn(index, turn, drop="empty_answer")
        try:
            self.chat.check_text([{"role": "assistant", "content": text}])
        except DroppedError as error:
            return Turn(index, turn, drop=error.reason)
        return Turn(index, turn, text, len(ids), not ended)


def _length(conversation: Conversation) -> int:
    """Characters of the first prompt: of all that stands before the first answer."""
    opening = itertools.takewhile(lambda message: message["role"] != "assistant", conversation.dialogue.messages)
    return sum(len(message["content"]) for message in opening)

"""Answers written by a target in this process, through the one decoding loop, several dialogues at a time."""

import contextlib
import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from data_prep.answers.journal import ONLY_REASONING, AnsweredBatch, Conversation, Turn
from data_prep.answers.writing import Writing, derived_seed
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.messages import DroppedError
from data_prep.dialogues.template import only_reasoning
from drafters import Drafter, TargetModel, generate, generate_many
from drafters.common.threads import fit_threads
from drafters.loop.call import eos_ids
from drafters.loop.refill import Continued

SHORTEST = 256  # prompts up to so many tokens are one class
CHARACTERS = 3  # a token has at least so many in most texts; where it has less, the prompt is put off
PROMPT_END = 16  # tokens at a prompt's end that show whether it opens reasoning: <think> has at most 7, one per byte
REPLACEMENT = "\ufffd"  # what a decoder prints for half a character


class TargetAnswers:
    """Answers conversations turn by turn; a run that was killed and started again writes what it would have written.

    Greedy answers do not depend on what else is in a batch (in float32; in 16 bits batches round differently): a row
    whose answer has ended is given to another conversation at once. Sampled ones do: for them conversations are
    answered in groups that stay together from the first turn to the last, and the groups, and the seed of every batch,
    follow from the conversations given and the configuration alone.

    Args:
        batch: dialogues at once; less where the drafter decodes fewer rows.

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
        self.eos = turn_ends(target, chat)

    def batches(self, conversations: list[Conversation]) -> Iterator[AnsweredBatch]:
        """Answer all that is open; between two batches the caller takes the turns of the last one in."""
        if self.writing.temperature == 0 and self.batch > 1:
            yield from self._refilled(conversations)
            return
        for group in self.groups(conversations):
            while rows := [conversation for conversation in group if not conversation.done]:
                yield self.answer(rows)

    def groups(self, conversations: list[Conversation]) -> list[list[Conversation]]:
        """Conversations with the same number of turns and of similar length, in an order that gives a fair rate."""
        ordered = sorted(conversations, key=lambda one: (len(one.questions), _length(one), one.index))
        groups = [ordered[start : start + self.batch] for start in range(0, len(ordered), self.batch)]
        random.Random(self.writing.seed).shuffle(groups)
        return groups

    def _refilled(self, conversations: list[Conversation]) -> Iterator[AnsweredBatch]:
        """Greedy answers, in batches of those that ended at about the same time."""
        waiting = Waiting(self, [conversation for conversation in conversations if not conversation.done])
        while waiting.prompts or waiting.turns:
            longest = waiting.longest()
            with enough_memory(self.batch, "dialogues were answered"):
                made = generate_many(
                    self.target,
                    self.drafter,
                    partial(waiting.next_prompt, longest),
                    batch=self.batch,
                    longest=longest,
                    max_new_tokens=self.writing.max_new_tokens,
                    eos_token_id=sorted(self.eos),
                )
                for one in made:
                    fit_threads()
                    waiting.take(one)
                    if len(waiting.turns) >= max(1, self.batch // 8) or not waiting.prompts:
                        yield waiting.batch()
                        waiting.ask_on()
            if waiting.turns:  # the last ones, and those that could not be asked
                yield waiting.batch()
                waiting.ask_on()

    def ask(self, conversation: Conversation) -> tuple[list[int], str] | Turn:
        """The prompt of a conversation's next turn and the text that leads its answer; or how it ends without one."""
        turn = len(conversation.answers)
        try:
            ids, lead = self.chat.prompt(conversation.history())
        except DroppedError as error:
            return Turn(conversation.index, turn, drop=error.reason)
        if len(ids) + self.writing.max_new_tokens > self.max_context:
            return Turn(conversation.index, turn, end="no_room")
        return ids, lead

    def answer(self, rows: list[Conversation]) -> AnsweredBatch:
        """The next turn of each conversation, in one batch.

        Raises:
            ValueError: the memory does not suffice.
        """
        turns, asked, prompts, leads = [], [], [], []
        # Prompts: a conversation whose next turn cannot be asked ends here, and the others go on without it.
        for row in rows:
            found = self.ask(row)
            if isinstance(found, Turn):
                turns.append(found)
                continue
            asked.append((row.index, len(row.answers)))
            prompts.append(found[0])
            leads.append(found[1])
        if not prompts:
            return AnsweredBatch(turns)
        # One decoding for all. The seed is that of these very turns, so that a resumed run draws the same answers.
        fit_threads()
        with enough_memory(self.batch, f"{len(prompts)} dialogues were answered"):
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
        # Answers, without the padding behind a row that ended before the longest.
        answers = [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]
        for (index, turn), ids, lead, prompt in zip(asked, answers, leads, prompts, strict=True):
            turns.append(self.turn(index, turn, ids, lead, prompt))
        return AnsweredBatch(turns, result.trace.decoded_tokens, sum(step.forwards for step in result.trace.steps))

    def turn(self, index: int, turn: int, ids: list[int], lead: str, prompt: Sequence[int] = ()) -> Turn:
        """What becomes of the answer with token ids ``ids``, which the target gave to the ids ``prompt``."""
        ended = ids[-1] in self.eos
        if not ended and self.writing.truncated == "drop":
            return Turn(index, turn, end="truncated")
        text = self._decode(ids[:-1] if ended else ids)
        # Before the lead is removed, which closes empty thoughts where the prompt opens them.
        if not ended and only_reasoning(text, self._decode(prompt[-PROMPT_END:])):
            return Turn(index, turn, end=ONLY_REASONING)
        text = text.removeprefix(lead) if ended else text.removeprefix(lead).rstrip(REPLACEMENT)
        if not text.strip():
            return Turn(index, turn, drop="empty_answer")
        try:
            self.chat.check_text([{"role": "assistant", "content": text}])
        except DroppedError as error:
            return Turn(index, turn, drop=error.reason)
        return Turn(index, turn, text, len(ids), not ended)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.chat.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@contextlib.contextmanager
def enough_memory(batch: int, what: str) -> Iterator[None]:
    """Raises ValueError, saying what helps, where the memory ends while ``what`` is done, ``batch`` at once."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"out of memory while {what}; lower batch (now {batch}) and run again: what was written before is kept"
        ) from error


def turn_ends(target: TargetModel, chat: ChatTokenizer) -> frozenset[int]:
    """Return the ids of the tokens that end an answer: ``text_ends`` and the template's end-of-turn token.

    The end-of-turn token is often no EOS token: ``<|im_end|>`` beside the EOS ``</s>``, for example.
    """
    return text_ends(target, chat) | end_of_turn(target, chat)


def end_of_turn(target: TargetModel, chat: ChatTokenizer) -> frozenset[int]:
    """Return the id of the template's end-of-turn token, if it has one that the target can write."""
    own = chat.end_of_turn()
    return frozenset() if own is None or own >= target.vocab_size else frozenset({own})


def text_ends(target: TargetModel, chat: ChatTokenizer) -> frozenset[int]:
    """The EOS tokens of the generation config and of the tokenizer."""
    own = chat.tokenizer.eos_token_id
    return eos_ids(target, None) | (frozenset() if own is None else {own})


class Waiting:
    """Conversations that wait to be asked, those that are being answered, and turns not handed on yet.

    Conversations wait in classes of length, powers of two, so that a batch's cache is at most twice what its rows need.
    Their text says about how long a prompt will be; it becomes ids once a row is free, for all prompts' ids together
    would fill the memory.
    """

    def __init__(self, answers: TargetAnswers, conversations: list[Conversation]) -> None:
        self.answers = answers
        self.order = random.Random(answers.writing.seed)  # long and short answers mixed, for a fair rate
        self.prompts: list[tuple[int, float, int]] = []  # a heap of (length class, place, conversation)
        self.open = {one.index: one for one in conversations}
        self.asked: dict[int, tuple[list[int], str]] = {}  # by conversation that is being answered: see ``ask``
        self.turns: list[Turn] = []
        self.committed = self.forwards = 0
        for one in conversations:
            self._ask(one)

    def longest(self) -> int:
        """Tokens of the longest prompt in the lowest class that waits."""
        return self.prompts[0][0] if self.prompts else 1

    def next_prompt(self, longest: int) -> tuple[int, list[int]] | None:
        """A conversation's index and the prompt of its next turn, of at most ``longest`` tokens."""
        while self.prompts and self.prompts[0][0] <= longest:
            index = heapq.heappop(self.prompts)[2]
            found = self.answers.ask(self.open[index])
            if isinstance(found, Turn):
                self.turns.append(found)
            elif len(found[0]) > longest:  # longer than its text let expect
                self._wait(index, len(found[0]))
            else:
                self.asked[index] = found
                return index, found[0]
        return None

    def take(self, one: Continued) -> None:
        """An answer has ended."""
        index = int(str(one.key))
        turn, (prompt, lead) = len(self.open[index].answers), self.asked.pop(index)
        self.turns.append(self.answers.turn(index, turn, one.tokens, lead, prompt))
        self.committed += sum(step.committed for step in one.steps)
        self.forwards += sum(step.forwards for step in one.steps)

    def batch(self) -> AnsweredBatch:
        """All turns that were not handed on."""
        return AnsweredBatch(self.turns, self.committed, self.forwards)

    def ask_on(self) -> None:
        """The turns were handed on and taken in: their conversations' next ones wait."""
        known, self.turns, self.committed, self.forwards = self.turns, [], 0, 0
        for turn in known:
            if not self.open[turn.index].done:
                self._ask(self.open[turn.index])

    def _ask(self, conversation: Conversation) -> None:
        text = sum(len(message["content"]) for message in conversation.history())
        self._wait(conversation.index, text // CHARACTERS)

    def _wait(self, index: int, tokens: int) -> None:
        most = self.answers.max_context - self.answers.writing.max_new_tokens  # what is longer is not asked at all
        length = min(most, max(SHORTEST, 1 << (tokens - 1).bit_length()))
        heapq.heappush(self.prompts, (length, self.order.random(), index))


def _length(conversation: Conversation) -> int:
    """Characters of the first prompt: of all that stands before the first answer."""
    opening = itertools.takewhile(lambda message: message["role"] != "assistant", conversation.dialogue.messages)
    return sum(len(message["content"]) for message in opening)

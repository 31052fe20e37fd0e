"""Answers that a target in this process writes, several dialogues at a time."""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial

from data_prep.answers.journal import ONLY_REASONING, AnsweredBatch, Conversation, Turn, derived_seed
from data_prep.common.target import enough_memory
from data_prep.configs import Writing
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.messages import DroppedError
from data_prep.dialogues.template import only_reasoning
from drafters import Drafter, TargetModel, generate, generate_many
from drafters.common.threads import fit_threads
from drafters.loop.call import eos_ids
from drafters.loop.refill import Continued

SHORTEST = 256  # tokens: shorter prompts are in one length class
CHARACTERS = 3  # per token, fewer than in most texts; a prompt with more tokens than estimated waits once more
PROMPT_END = 16  # tokens at a prompt's end that show an open <think>, which has at most 7 (one per byte)
REPLACEMENT = "\ufffd"  # decoded from an incomplete character


class TargetAnswers:
    """Answers conversations turn by turn, at most ``batch`` at once; a resumed run writes the same answers.

    Greedy answers do not depend on the rest of the batch (in float32; in 16 bits batches round differently), so a
    sequence whose answer has ended is replaced by another conversation at once. Sampled answers do: conversations are
    answered in groups that stay together, and groups and seeds depend only on the conversations and the configuration.

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
        self.fix = f"lower batch (now {self.batch}; of data_prep.features, batch_tokens)"  # for too little memory

    def batches(self, conversations: list[Conversation]) -> Iterator[AnsweredBatch]:
        """Answer everything; the caller records the turns of a batch before it asks for the next one."""
        if self.writing.temperature == 0 and self.batch > 1:
            yield from self._refilled(conversations)
            return
        for group in self.groups(conversations):
            while rows := [conversation for conversation in group if not conversation.done]:
                yield self.answer(rows)

    def groups(self, conversations: list[Conversation]) -> list[list[Conversation]]:
        """Groups with the same number of turns and similar lengths, shuffled so that the measured rate is steady."""
        ordered = sorted(conversations, key=lambda one: (len(one.questions), _length(one), one.index))
        groups = [ordered[start : start + self.batch] for start in range(0, len(ordered), self.batch)]
        random.Random(self.writing.seed).shuffle(groups)
        return groups

    def _refilled(self, conversations: list[Conversation]) -> Iterator[AnsweredBatch]:
        """Greedy answers, in batches of those that ended at about the same time."""
        waiting = Waiting(self, [conversation for conversation in conversations if not conversation.done])
        while waiting.prompts or waiting.turns:
            longest = waiting.prompts[0][0] if waiting.prompts else 1  # of the lowest length class
            with enough_memory("while dialogues were answered", self.fix):
                outputs = generate_many(
                    self.target,
                    self.drafter,
                    partial(waiting.next_prompt, longest),
                    batch=self.batch,
                    longest=longest,
                    max_new_tokens=self.writing.max_new_tokens,
                    eos_token_id=sorted(self.eos),
                )
                for one in outputs:
                    fit_threads()
                    waiting.take(one)
                    if len(waiting.turns) >= max(1, self.batch // 8) or not waiting.prompts:
                        yield from waiting.hand_on()
            if waiting.turns:  # the last ones, and those that have no prompt
                yield from waiting.hand_on()

    def ask(self, conversation: Conversation) -> tuple[list[int], str] | Turn:
        """Prompt of the next turn and the text that leads its answer; or the conversation's end without an answer."""
        turn = len(conversation.answers)
        try:
            ids, lead = self.chat.prompt(conversation.history())
        except DroppedError as error:
            return Turn(conversation.index, turn, drop=error.reason)
        if len(ids) + self.writing.max_new_tokens > self.max_context:
            return Turn(conversation.index, turn, end="no_room")
        return ids, lead

    def answer(self, rows: list[Conversation]) -> AnsweredBatch:
        """The next turn of each conversation, in one batch; raises ValueError if the memory does not suffice."""
        asks = [(row, self.ask(row)) for row in rows]
        turns = [ask for _, ask in asks if isinstance(ask, Turn)]
        asked = [(row.index, len(row.answers), *ask) for row, ask in asks if not isinstance(ask, Turn)]
        if not asked:
            return AnsweredBatch(turns)
        fit_threads()
        with enough_memory("while dialogues were answered", self.fix):
            result = generate(
                self.target,
                self.drafter,
                [prompt for *_, prompt, _ in asked],
                max_new_tokens=self.writing.max_new_tokens,
                temperature=self.writing.temperature,
                top_k=self.writing.top_k,
                top_p=self.writing.top_p,
                eos_token_id=sorted(self.eos),
                # The seed depends only on these turns, so that a resumed run draws the same answers.
                seed=derived_seed(self.writing.seed, [(index, turn) for index, turn, *_ in asked]),
            )
        answers = zip(asked, result.tokens.tolist(), result.lengths, strict=True)  # rows are padded to the longest
        turns += [self.turn(index, turn, ids[:n], lead, prompt) for (index, turn, prompt, lead), ids, n in answers]
        return AnsweredBatch(turns, result.trace.decoded_tokens, sum(step.forwards for step in result.trace.steps))

    def turn(self, index: int, turn: int, ids: list[int], lead: str, prompt: Sequence[int] = ()) -> Turn:
        """The outcome of a turn with the generated ``ids`` after the token ids ``prompt``."""
        ended = ids[-1] in self.eos
        if not ended and self.writing.truncated == "drop":
            return Turn(index, turn, end="truncated")
        text = self._decode(ids[:-1] if ended else ids)
        # Before the lead is removed, which closes empty thoughts if the prompt opens them.
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


def text_ends(target: TargetModel, chat: ChatTokenizer) -> frozenset[int]:
    """The EOS tokens of the generation config and of the tokenizer."""
    eos = chat.tokenizer.eos_token_id
    return eos_ids(target, None) | (frozenset() if eos is None else {eos})


def end_of_turn(target: TargetModel, chat: ChatTokenizer) -> frozenset[int]:
    """Id of the template's end-of-turn token; empty without such a token in the target's vocabulary."""
    token = chat.end_of_turn()
    return frozenset() if token is None or token >= target.vocab_size else frozenset({token})


def turn_ends(target: TargetModel, chat: ChatTokenizer) -> frozenset[int]:
    """The tokens that end an answer. The end of turn is often no EOS: ``<|im_end|>`` with EOS ``</s>``, for example."""
    return text_ends(target, chat) | end_of_turn(target, chat)


class Waiting:
    """Conversations that wait for their next turn or are being answered, and turns that were not handed on yet.

    They wait in length classes, powers of two, so that a batch's cache is at most twice what its sequences need. The
    class is estimated from the text; a prompt is tokenized when a place in the batch is free, since the ids of all
    would fill the memory.
    """

    def __init__(self, answers: TargetAnswers, conversations: list[Conversation]) -> None:
        self.answers = answers
        self.order = random.Random(answers.writing.seed)  # mix long and short answers, so that the rate is steady
        self.prompts: list[tuple[int, float, int]] = []  # a heap of (length class, random place, conversation)
        self.open = {one.index: one for one in conversations}
        self.asked: dict[int, tuple[list[int], str]] = {}  # result of ``ask`` by conversation that is being answered
        self.turns: list[Turn] = []
        self.committed = self.forwards = 0
        for one in conversations:
            self._ask(one)

    def next_prompt(self, longest: int) -> tuple[int, list[int]] | None:
        """A conversation's index and its next prompt of at most ``longest`` tokens; None if no such one waits."""
        while self.prompts and self.prompts[0][0] <= longest:
            index = heapq.heappop(self.prompts)[2]
            ask = self.answers.ask(self.open[index])
            if isinstance(ask, Turn):
                self.turns.append(ask)
            elif len(ask[0]) > longest:  # longer than estimated
                self._wait(index, len(ask[0]))
            else:
                self.asked[index] = ask
                return index, ask[0]
        return None

    def take(self, one: Continued) -> None:
        """Record an answer that has ended."""
        index = int(str(one.key))
        turn, (prompt, lead) = len(self.open[index].answers), self.asked.pop(index)
        self.turns.append(self.answers.turn(index, turn, one.tokens, lead, prompt))
        self.committed += sum(step.committed for step in one.steps)
        self.forwards += sum(step.forwards for step in one.steps)

    def hand_on(self) -> Iterator[AnsweredBatch]:
        """Hand on the turns. When the caller has recorded them, the next turns of their conversations wait."""
        turns, batch = self.turns, AnsweredBatch(self.turns, self.committed, self.forwards)
        self.turns, self.committed, self.forwards = [], 0, 0
        yield batch
        for turn in turns:
            if not self.open[turn.index].done:
                self._ask(self.open[turn.index])

    def _ask(self, conversation: Conversation) -> None:
        text = sum(len(message["content"]) for message in conversation.history())
        self._wait(conversation.index, text // CHARACTERS)

    def _wait(self, index: int, tokens: int) -> None:
        most = self.answers.max_context - self.answers.writing.max_new_tokens  # longer prompts are not answered
        length = min(most, max(SHORTEST, 1 << (tokens - 1).bit_length()))
        heapq.heappush(self.prompts, (length, self.order.random(), index))


def _length(conversation: Conversation) -> int:
    """Characters before the first answer."""
    opening = itertools.takewhile(lambda message: message["role"] != "assistant", conversation.dialogue.messages)
    return sum(len(message["content"]) for message in opening)

"""Token ids and an exact mask of the assistant's tokens for a dialogue, with any chat template.

Most templates have no `{% generation %}` tags, and tags often leave out the end-of-turn token, which a drafter must
learn. So the mask comes from the rendered text. For each answer the dialogue is rendered twice more: up to the
generation prompt, which ends where the target starts to write, and with a placeholder instead of the answer, whose
remainder must also end the full text. This works for templates that strip text, merge the system message into the first
user turn, or print earlier turns differently. If a template breaks it, the dialogue is dropped: no mask is guessed.

The mask covers all that the target generates: everything after the generation prompt up to and including the
end-of-turn token, with reasoning and tool calls if the template prints them.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np

from data_prep.dialogues.messages import DroppedError, Message
from data_prep.dialogues.template import PLACEHOLDER, ChatTemplate

NO_ANSWER = "no_answer_printed"  # reason for dropping a dialogue


@dataclass(frozen=True)
class RenderedDialogue:
    """The template's text, and the ``[start, end)`` character spans of its answers, in order."""

    text: str
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class MaskedTokens:
    """``input_ids`` [T] int64 and ``loss_mask`` [T] bool: True where the assistant wrote the token."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    def cut(self, max_length: int) -> "MaskedTokens":
        """The first ``max_length`` tokens."""
        return MaskedTokens(self.input_ids[:max_length], self.loss_mask[:max_length])


class ChatTokenizer:
    """A tokenizer with its chat template.

    Text that spells one of the tokenizer's special tokens is refused (``special_token_in_text``). Encoded, it would be
    the real token: a text about ``</s>`` would end a turn in its middle.

    Args:
        date: YYYY-MM-DD, used if the template prints a date; default: today.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, name: str = "the tokenizer", date: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.name = name
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{name} has no chat template; write the one that the target was tuned with into its folder as "
                "chat_template.jinja, or set chat_template to a file with it"
            )
        self.printer = ChatTemplate(tokenizer, name, date)
        self.template, self.date = self.printer.text, self.printer.date
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = (str(token) for token in added if getattr(token, "special", False))
        self.special_tokens = {*tokenizer.all_special_tokens, *special} - {""}
        escaped = "|".join(re.escape(token) for token in sorted(self.special_tokens, key=len, reverse=True))
        self._special = re.compile(escaped or r"(?!)")
        self._special_next = re.compile(rf"\s*(?P<token>{escaped})" if escaped else r"(?!)(?P<token>)")

    def tokenize(self, rendered: list[RenderedDialogue]) -> list[MaskedTokens]:
        """Token ids and mask of each dialogue, in one batch."""
        if not rendered:
            return []
        if getattr(self.tokenizer, "is_fast", False):
            texts = [dialogue.text for dialogue in rendered]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            masks = [
                mask_from_offsets(dialogue, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
                for dialogue, offsets in zip(rendered, encoded["offset_mapping"], strict=True)
            ]
            every_ids = encoded["input_ids"]
        else:
            every_ids = [self._ids(dialogue.text) for dialogue in rendered]
            masks = [self._mask_from_prefixes(d, ids) for d, ids in zip(rendered, every_ids, strict=True)]
        return [MaskedTokens(np.asarray(ids, dtype=np.int64), mask) for ids, mask in zip(every_ids, masks, strict=True)]

    def render(self, messages: Sequence[Message]) -> RenderedDialogue:
        """The template's text with the answers' character spans.

        Raises:
            DroppedError: ``special_token_in_text``, ``template_refused`` (the template raised an error),
                ``template_not_incremental`` (an answer cannot be located with certainty), or ``no_answer_printed``.
        """
        self.check_text(messages)
        text = self.printer.print(messages)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        pieces = {turn: self._around_turn(text, messages, turn) for turn in turns}
        if not any(pieces.values()):
            raise self._no_answer(text)
        # Locate each answer between the texts before and after a placeholder.
        last = pieces[turns[-1]]
        spans: list[tuple[int, int]] = []
        floor = 0
        for turn, piece in pieces.items():
            if piece is None:  # the template does not print this turn
                continue
            before, after = piece
            start = self._answer_start(text, messages[:turn], before)
            end = len(text) - len(after)
            # Both must agree with the full text.
            if start is None or not text.endswith(after) or not floor <= start < end:
                raise DroppedError(
                    "template_not_incremental",
                    f"the chat template of {self.name} prints other turns differently depending on the text of answer "
                    f"{turn}, so the answer cannot be located; use a template without such rules",
                )
            floor = end + self._end_of_turn(after, last[1] if last else "")
            if messages[turn].get("weight") != 0:
                spans.append((start, floor))
        return RenderedDialogue(text, spans)

    def prompt(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        """The prompt for an answer to ``messages``, which end with a user turn.

        Returns:
            the prompt's token ids, and the text that the template prints between prompt and answer (Vicuna's space,
            Qwen3's empty thoughts). If the target writes that text, it is not part of the answer.

        Raises:
            DroppedError: ``special_token_in_text``, ``template_refused``, or ``no_answer_printed``.
        """
        self.check_text(messages)
        text = self.printer.print(messages, prompt=True)
        piece = self._around_answer([*messages, {"role": "assistant", "content": PLACEHOLDER}], len(messages))
        if piece is None:
            raise self._no_answer(text)
        lead = piece[0].removeprefix(text) if piece[0].startswith(text) else ""
        if lead.strip() and "add_generation_prompt" not in self.template:  # the assistant's header is not generated
            text, lead = text + lead, ""
        return self._ids(text), lead

    def question_prompt(self, system: str | None = None) -> tuple[list[int], str]:
        """The prompt with which the target writes a user's first question.

        Returns:
            the token ids of everything before the question, and the mark that the template prints right after it
            (ChatML's ``<|im_end|>``, Llama-2's ``[/INST]``; "" if none).

        Raises:
            DroppedError: ``template_refused``, ``special_token_in_text`` (in ``system``), or ``no_question_printed``.
        """
        head = [] if system is None else [{"role": "system", "content": system}]
        self.check_text(head)
        text = self.printer.print([*head, {"role": "user", "content": PLACEHOLDER}], prompt=True)
        before, question, after = text.partition(PLACEHOLDER)
        if not question:
            raise DroppedError("no_question_printed", f"the chat template of {self.name} prints no user turn")
        ids = self._ids(before.rstrip(" "))  # a space before the question belongs to its first token
        if not ids:
            raise DroppedError(
                "no_question_printed", f"the chat template of {self.name} prints nothing before a question"
            )
        special = self._special_next.match(after)
        mark = special["token"] if special else next(iter(after.strip().splitlines()), "")
        return ids, mark

    def end_of_turn(self) -> int | None:
        """Id of the special token that ends the template's answers; None if they end without one."""
        question = {"role": "user", "content": "?"}
        with contextlib.suppress(DroppedError):
            piece = self._around_answer([question, {"role": "assistant", "content": PLACEHOLDER}], 1)
            mark = self._special_next.match(piece[1]) if piece is not None else None
            return self.tokenizer.convert_tokens_to_ids(mark["token"]) if mark else None
        return None

    def check_text(self, messages: Sequence[Message]) -> None:
        """Raise DroppedError (``special_token_in_text``) if a message spells a special token."""
        for message in messages:
            texts = [message["content"], message.get("reasoning_content", "")]
            texts += [json.dumps(message[key], ensure_ascii=False) for key in ("tools", "tool_calls") if key in message]
            if match := next(filter(None, map(self._special.search, texts)), None):
                raise DroppedError("special_token_in_text", f"the text contains the special token {match[0]!r}")

    def _around_turn(self, text: str, messages: Sequence[Message], turn: int) -> tuple[str, str] | None:
        """The text before and after an answer; None if the template does not print it.

        Some templates refuse a dialogue without the answer's tool calls. Then the answer is the text after its prompt,
        if ``text`` shows this turn as the template prints a last turn.
        """
        if "tool_calls" not in messages[turn]:
            return self._around_answer(messages, turn)
        with contextlib.suppress(DroppedError):
            if (piece := self._around_answer(messages, turn)) is not None:
                return piece
        before = self.printer.print(messages[:turn], prompt=True)
        whole = self.printer.print(messages[: turn + 1]).rstrip()
        return (before, text[len(whole) :]) if text.startswith(whole) and whole.startswith(before) else None

    def _around_answer(self, messages: Sequence[Message], turn: int) -> tuple[str, str] | None:
        """The text before and after the answer's content; None if the template does not print it."""
        marked = [*messages[:turn], {"role": "assistant", "content": PLACEHOLDER}, *messages[turn + 1 :]]
        parts = self.printer.print(marked).split(PLACEHOLDER)
        if len(parts) > 2:
            raise DroppedError("template_not_incremental", f"the chat template of {self.name} prints an answer twice")
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def _answer_start(self, text: str, earlier: Sequence[Message], before: str) -> int | None:
        """Where the target starts to write: after the generation prompt, else right before the answer's content."""
        prompt = self.printer.print(earlier, prompt=True)
        if text.startswith(prompt):
            lead = before[len(prompt) :] if before.startswith(prompt) else ""
            # Without a generation prompt, the assistant's header follows, which the target does not generate.
            if "add_generation_prompt" in self.template or not lead.strip():
                return len(prompt)
        return len(before) if text.startswith(before) else None

    def _end_of_turn(self, after: str, after_last: str) -> int:
        """Length of the end-of-turn mark at the start of ``after``.

        It is the first special token there if the same one follows the dialogue's last answer; otherwise that token
        opens the next user turn (Llama-2's ``<s>``). Without special tokens it is a text such as ``### End``.
        """
        special, special_last = self._special_next.match(after), self._special_next.match(after_last)
        if special and special_last and special["token"] == special_last["token"]:
            return special.end()
        mark = after_last.rstrip()
        return len(mark) if not special_last and commonprefix([after, mark]) == mark else 0

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _mask_from_prefixes(self, dialogue: RenderedDialogue, ids: list[int]) -> np.ndarray:
        """For tokenizers without offsets: tokenize the text up to each boundary and compare with all tokens."""
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in dialogue.answers:
            first = len(commonprefix([self._ids(dialogue.text[:start]), ids]))
            upto = self._ids(dialogue.text[:end])
            shared = len(commonprefix([upto, ids]))
            straddles = shared < len(upto)  # a token that runs over the answer's end counts as part of it
            mask[first : shared + straddles] = True
        return mask

    def _no_answer(self, text: str) -> DroppedError:
        return DroppedError(
            NO_ANSWER,
            f"the loss mask is all zero: the chat template of {self.name} prints no assistant answer (end of the "
            f"template: {self.template[-160:]!r}; end of its text: {text[-80:]!r}). Give the template that the target "
            "was tuned with; it must print messages with role 'assistant'",
        )


def mask_from_offsets(dialogue: RenderedDialogue, offsets: np.ndarray) -> np.ndarray:
    """Mask ``[T]`` from the tokens' character ``offsets`` ``[T, 2]``.

    A token counts if it overlaps an answer and holds nothing but white space from before it (`` answer`` counts,
    ``>answer`` does not).
    """
    count = len(offsets)
    ends = offsets[:, 1]
    previous = np.concatenate([np.zeros(1, dtype=np.int64), np.maximum.accumulate(ends)[:-1]]) if count else ends
    starts = np.minimum(offsets[:, 0], previous)  # some tokenizers trim whitespace from their offsets
    mask = np.zeros(count, dtype=bool)
    for start, end in dialogue.answers:
        inside = (starts < end) & (ends > start)
        for index in np.flatnonzero(inside & (starts < start)):
            inside[index] = not dialogue.text[starts[index] : start].strip()
        mask |= inside
    return mask

"""Print dialogues, with reasoning and tool calls, through a tokenizer's chat template.

Reasoning goes to the template under the keys that templates read. A template without these keys but with ``</think>``
gets the reasoning within the text. What the template does not print is left out and counted. A template that prints
today's date prints one fixed date instead.
"""

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from data_prep.dialogues.messages import DroppedError, Message, uses_tools

PLACEHOLDER = "\ue0f0\ue0f1the answer\ue0f2\ue0f3"  # private-use characters: no template strips or splits on them
THOUGHT = "\ue0f4\ue0f5the thought\ue0f6\ue0f7"
THINK, END_THINK = "<think>", "</think>"
KEPT_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id")
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Errors of a template that cannot print the messages: raised by the template, or by Python if it has no check.
REFUSALS = (TemplateError, TypeError, KeyError, IndexError, AttributeError)


class ChatTemplate:
    """The chat template ``text`` of a tokenizer; ``date``: YYYY-MM-DD, default today; None if it prints no date."""

    def __init__(self, tokenizer: Any, name: str, date: str | None = None) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.text: str = tokenizer.get_chat_template()
        self.date = (date or str(datetime.date.today())) if NOW.search(self.text) else None
        self._options: dict[str, Any] = {}
        if self.date is not None:
            day = datetime.date.fromisoformat(self.date)
            self._options["chat_template"] = NOW.sub(lambda call: json.dumps(day.strftime(call[2])), self.text)

    def print(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text of the messages, with ``prompt`` also the generation prompt; raises ``template_refused``."""
        return self._print([for_template(message, self._form) for message in messages], messages, prompt)

    def settle(self, messages: Sequence[Message]) -> tuple[list[list[Message]], list[str]]:
        """Return the training records of a dialogue, and the names of what was changed.

        Most templates print earlier answers without their reasoning. A dialogue with reasoning then becomes one record
        per turn, which ends with that turn's answer. Each answer is trained on in one record and has ``weight`` 0 in
        the others.

        Raises:
            DroppedError: ``template_refused``, ``tools_not_printed`` (calls or results of tools), or
                ``no_trained_turn`` (all answers have ``weight`` 0).
        """
        dialogue, changes = list(messages), list[str]()
        if uses_tools(messages):
            self._check_tools(messages)
            bare = [_without(message, "tools") for message in messages]
            if "tools" in messages[0] and self.print(bare) == self.print(messages):
                dialogue, changes = bare, ["tools_left_out"]
        answers = [index for index, message in enumerate(dialogue) if message["role"] == "assistant"]
        left = [index for index in answers if dialogue[index].get("weight") != 0]
        if not left:
            raise DroppedError("no_trained_turn", "all answers have weight 0")
        thoughts = {index for index in left if has_thought(dialogue[index])}
        forgotten = {index for index in thoughts if not self._shows(dialogue[: index + 1], index)}
        if forgotten:
            changes.append("reasoning_left_out")
        views: list[list[Message]] = []
        as_written = {index: self.print(dialogue[: index + 1]).rstrip() for index in left if thoughts - forgotten}
        while left:
            view = dialogue[: left[-1] + 1]
            text = as_written.get(left[-1], "")
            here = [index for index in left if text.startswith(as_written.get(index, ""))]
            views.append([_trained(message, n in here) for n, message in enumerate(view)])
            left = [index for index in left if index not in here]
        if len(views) > 1:
            changes.append("one_record_per_turn")
        return views[::-1], changes

    def _check_tools(self, messages: Sequence[Message]) -> None:
        """Raise DroppedError if tool calls or results are not printed, or are printed as answers."""
        text, calls = self.print(messages), any("tool_calls" in message for message in messages)
        missing = calls and self._try([_without(message, "tool_calls") for message in messages]) == text
        results = [n for n, message in enumerate(messages) if message["role"] == "tool"]
        if results and not missing:
            marked = [m | {"content": PLACEHOLDER} if n in results else m for n, m in enumerate(messages)]
            as_answers = [m | {"role": "assistant"} if n in results else m for n, m in enumerate(messages)]
            printed = self._try(marked) or ""
            missing = printed.count(PLACEHOLDER) < len(results) or self._try(as_answers) == text
        if missing:
            raise DroppedError(
                "tools_not_printed", f"the chat template of {self.name} does not print calls or results of tools"
            )

    def _try(self, messages: Sequence[Message]) -> str | None:
        """The text; None if the template refuses the messages."""
        with contextlib.suppress(DroppedError):
            return self.print(messages)
        return None

    def _shows(self, messages: Sequence[Message], turn: int) -> bool:
        """Whether the template prints the reasoning of an answer."""
        message = messages[turn]
        if "reasoning_content" in message:
            message = message | {"reasoning_content": THOUGHT}
        else:
            message = message | {"content": f"{THINK}{THOUGHT}{END_THINK}{message['content'].rpartition(END_THINK)[2]}"}
        return THOUGHT in self.print([*messages[:turn], message, *messages[turn + 1 :]])

    @functools.cached_property
    def _form(self) -> str:
        """How the template reads an answer's reasoning: under its "keys", within the "text", or "" for not at all."""
        probe = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PLACEHOLDER, "reasoning_content": THOUGHT},
        ]
        with contextlib.suppress(DroppedError):
            for form in ("keys", "text") if END_THINK in self.text else ("keys",):
                if THOUGHT in self._print([for_template(message, form) for message in probe], probe):
                    return form
        return ""

    def _print(self, prepared: list[Message], messages: Sequence[Message], prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                prepared,
                tools=messages[0].get("tools") if messages else None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._options,
            )
        except REFUSALS as error:
            raise DroppedError("template_refused", f"the chat template of {self.name} refused: {error}") from error


def for_template(message: Message, form: str = "") -> Message:
    """A message with the keys that templates read; ``form``: see ``ChatTemplate._form``."""
    prepared = {key: message[key] for key in KEPT_KEYS if key in message}
    reasoning = message.get("reasoning_content", "")
    if form == "text" and reasoning:
        prepared["content"] = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{message['content']}"
    elif form == "keys" and has_thought(message):
        if not reasoning:
            before, _, text = message["content"].rpartition(END_THINK)
            reasoning, prepared["content"] = before.replace(THINK, "").strip("\n"), text.lstrip("\n")
        prepared |= {"reasoning_content": reasoning, "thinking": reasoning}  # gpt-oss reads the latter
    return prepared


def has_thought(message: Message) -> bool:
    """Whether an answer has reasoning, in its own key or within its text."""
    before, mark, _ = message["content"].rpartition(END_THINK)
    thought = message["role"] == "assistant" and mark and before.replace(THINK, "").strip()
    return "reasoning_content" in message or bool(thought)


def only_reasoning(cut: str, prompt: str = "") -> bool:
    """Whether the answer ``cut``, which ran into the limit, is all reasoning: an open ``<think>`` is never closed.

    ``prompt``: the rendered prompt or its end, which may open ``<think>``.
    """
    return END_THINK not in cut and (cut.lstrip().startswith(THINK) or prompt.rstrip().endswith(THINK))


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _trained(message: Message, wanted: bool) -> Message:
    return message if wanted or message["role"] != "assistant" else message | {"weight": 0}

"""Convert a record's turns, in ShareGPT's or OpenAI's keys, to messages for chat templates.

A null counts as an absent key, because `datasets` adds nulls to records that lack a key of other records.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

TOOL_CALLS = ("function_call", "tool_call")  # ShareGPT's roles for an assistant's call, written as JSON
ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", *TOOL_CALLS), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response"), "tool"),
    "system": "system",
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
FOLLOWING = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}

# {"role": "system" | "user" | "assistant" | "tool", "content": text}. An assistant's may have "reasoning_content",
# "tool_calls", and "weight" 0 where it is not trained on; a tool's "name" and "tool_call_id". The first message of a
# dialogue has the definitions of its "tools".
Message = dict[str, Any]


class DroppedError(ValueError):
    """A record that cannot be used; ``reason`` is what it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def first_value(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the first value of ``keys`` that is not null or empty; else the first that is not null; else None."""
    values = [record[key] for key in keys if record.get(key) is not None]
    return next((value for value in values if value not in ("", [], {})), values[0] if values else None)


def without_nulls(value: Any) -> Any:
    """``value`` without the keys of its objects, at any depth, that have a null."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a dialogue has definitions, calls or results of tools."""
    return any(message["role"] == "tool" or message.keys() & {"tools", "tool_calls"} for message in messages)


def parse_messages(turns: list[Any]) -> list[Message]:
    """The messages of a record's turns. A call without a text that follows an answer becomes part of that answer.

    A call with reasoning, or with another ``weight`` than the answer, stays a message, because one message cannot hold
    both. The reader then drops the record as ``wrong_role_order``.

    Raises:
        DroppedError: see ``reader.parse_record``.
    """
    messages: list[Message] = []
    for message in map(_message, turns):
        is_call = message["role"] == "assistant" and not message["content"].strip()
        if is_call and messages and _takes_call(messages[-1], message):
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def parse_tools(tools: Any) -> list[dict[str, Any]]:
    """A record's definitions of tools, which may be JSON text.

    Raises:
        DroppedError: ``broken_tools``, or ``invalid_text``.
    """
    found = _objects(tools, "broken_tools")
    _check_text(found)
    return found


def _takes_call(answer: Message, call: Message) -> bool:
    """Whether ``call`` can become part of ``answer``, the message before it, with nothing lost."""
    same_weight = answer.get("weight") == call.get("weight")
    return answer["role"] == "assistant" and same_weight and "reasoning_content" not in call


def _check_text(value: Any) -> None:
    """Raise DroppedError where a text in ``value`` has a lone surrogate: legal in JSON, fatal in a tokenizer."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DroppedError("invalid_text") from None


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise DroppedError("broken_turn")
    role, text = first_value(turn, ("from", "role")), first_value(turn, ("value", "content"))
    if role is None:
        raise DroppedError("broken_turn")
    word = role.lower().strip() if isinstance(role, str) else ""
    if word not in ROLES:
        raise DroppedError("unknown_role")
    message: Message = {"role": ROLES[word], "content": text}
    if message["role"] == "assistant":
        message |= _of_assistant(turn, word, text)
    elif message["role"] == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if not isinstance(message["content"], str):
        raise DroppedError("non_string_value")
    _check_text(message)
    if not message["content"].strip() and message["role"] != "tool" and "tool_calls" not in message:
        raise DroppedError("empty_turn")
    return message


def _of_assistant(turn: dict[str, Any], word: str, text: Any) -> Message:
    """What an assistant's turn has beside its role and text; a turn that is a call has no text."""
    found: Message = {}
    calls = _objects(text if word in TOOL_CALLS else turn.get("tool_calls"), "broken_tool_call")
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
        if text is None or word in TOOL_CALLS:
            found["content"] = ""
    reasoning = first_value(turn, REASONING_KEYS)
    if isinstance(reasoning, str) and reasoning.strip():
        found["reasoning_content"] = reasoning
    if turn.get("weight") == 0:
        found["weight"] = 0
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call as templates take it: the function under ``function``, its arguments an object and not JSON text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DroppedError("broken_tool_call")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise DroppedError("broken_tool_call") from None
    rest = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _objects(value: Any, reason: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects, from a list, one object or the JSON text of either; [] for nothing.

    Raises:
        DroppedError: anything else, with this ``reason``.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DroppedError(reason) from None
    else:
        value = without_nulls(value)
    several = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(each, dict) for each in several):
        raise DroppedError(reason)
    return several

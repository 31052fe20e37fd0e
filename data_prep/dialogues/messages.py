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
    **dict.fromkeys(("system", "developer"), "system"),
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
FOLLOWING = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}

# {"role": "system" | "user" | "assistant" | "tool", "content": text}. An answer may have "reasoning_content",
# "tool_calls", and "weight" 0 if it is not trained on; a tool's result "name" and "tool_call_id". The definitions of
# "tools" are in the first message of a dialogue.
Message = dict[str, Any]


class DroppedError(ValueError):
    """A record cannot be used; ``reason`` is the name under which it is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def first_value(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first value of ``keys`` that is not null or empty, else the first that is not null, else None."""
    values = [record[key] for key in keys if record.get(key) is not None]
    return next((value for value in values if value not in ("", [], {})), values[0] if values else None)


def without_nulls(value: Any) -> Any:
    """``value`` without keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether a dialogue has definitions, calls or results of tools."""
    return any(message["role"] == "tool" or message.keys() & {"tools", "tool_calls"} for message in messages)


def parse_messages(turns: list[Any]) -> list[Message]:
    """The messages of a record's turns; raises DroppedError as ``reader.parse_record``.

    A call without text that follows an answer becomes part of that answer. If it has reasoning or another ``weight``,
    one message cannot hold both: it stays a message, and the reader drops the record as ``wrong_role_order``.
    """
    messages: list[Message] = []
    for message in map(_message, turns):
        is_call = message["role"] == "assistant" and not message["content"].strip()
        before = messages[-1] if messages else {}
        same_weight = before.get("weight") == message.get("weight")
        if is_call and before.get("role") == "assistant" and same_weight and "reasoning_content" not in message:
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def parse_tools(tools: Any) -> list[dict[str, Any]]:
    """A record's definitions of tools, maybe as JSON text; raises DroppedError: ``broken_tools``, ``invalid_text``."""
    definitions = _objects(tools, "broken_tools")
    check_text(definitions)
    return definitions


def check_text(value: Any) -> None:
    """Raise DroppedError if a text in ``value`` has a lone surrogate, which JSON allows and tokenizers do not."""
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
    check_text(message)
    if not message["content"].strip() and message["role"] != "tool" and "tool_calls" not in message:
        raise DroppedError("empty_turn")
    return message


def _of_assistant(turn: dict[str, Any], word: str, text: Any) -> Message:
    """Tool calls, reasoning and weight of an assistant's turn; a turn that is a call has no text."""
    message: Message = {}
    calls = _objects(text if word in TOOL_CALLS else turn.get("tool_calls"), "broken_tool_call")
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
        if text is None or word in TOOL_CALLS:
            message["content"] = ""
    reasoning = first_value(turn, REASONING_KEYS)
    if isinstance(reasoning, str) and reasoning.strip():
        message["reasoning_content"] = reasoning
    if turn.get("weight") == 0:
        message["weight"] = 0
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call in the form of chat templates: under ``function``, with arguments as an object and not as JSON text."""
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
    """A list of JSON objects, from a list, one object or JSON text; else raise DroppedError with ``reason``."""
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

"""Records of served requests: our dialogues, and logs of OpenAI-compatible servers such as vLLM.

A log's record holds a request with its response, ``{"request": {"messages": [...]}, "response": {"choices": [...]}}``,
or the keys of both at its top. A batch job's ``body`` around either is opened. The answer of the first choice becomes
the dialogue's last message, with its reasoning and tool calls as served; the request's ``tools`` are kept. Request and
response may be JSON texts.
"""

import contextlib
import datetime
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from data_prep.dialogues.json_records import Unreadable
from data_prep.dialogues.messages import DroppedError, check_text, first_value
from data_prep.dialogues.reader import TURN_KEYS, Dialogue, first_question, parse_record, same_question

CONVERSATION_KEYS = ("conversation_id", "session_id", "thread_id", "chat_id")
TIME_KEYS = ("time", "timestamp", "created", "created_at", "start_time", "startTime", "date")
REQUEST, RESPONSE = {*TURN_KEYS, "prompt", "body"}, {"choices", "body"}  # each has one of its keys, or more
KEYS = {"request": REQUEST, "body": REQUEST, "response": RESPONSE}
MILLISECONDS = 1e11  # a larger number of seconds would be after the year 5000


@dataclass(frozen=True)
class Served:
    """A request and its answer, which is the dialogue's last message.

    Attributes:
        answers: the messages that the target wrote: of a request the last one, of our own records all answers.
        conversation: the log's name of the conversation; else its system message and first question.
        time: seconds since 1970; None if the log has none.
        prompt_tokens: tokens of the prompt as the server counted them, or None.
    """

    dialogue: Dialogue
    answers: frozenset[int]
    conversation: str
    time: float | None
    prompt_tokens: int | None

    @property
    def questions(self) -> list[str]:
        """All questions, without differences in case and white space."""
        return [same_question(one["content"]) for one in self.dialogue.messages if one["role"] == "user"]


def parse_served(record: Any, place: str, changed: Counter[str] | None = None, own_template: bool = False) -> Served:
    """Read one record of a log.

    Args:
        place: id of a record without one.
        own_template: the user has given the template that the server used, so that its options may be ignored.

    Raises:
        DroppedError: as ``parse_record``, or ``failed_request``, ``no_request`` (a response without its request),
            ``no_answer``, ``streamed_chunks`` (of an answer), ``text_completion`` (a prompt without messages),
            ``content_filter``, ``broken_time``, or ``template_options`` (a request with chat_template_kwargs).
    """
    if isinstance(record, Unreadable):
        raise DroppedError(record.reason)
    if not isinstance(record, dict):
        raise DroppedError("not_an_object")
    record = {key: _opened(value, KEYS[key]) if key in KEYS else value for key, value in record.items()}
    request, response = _part(record, "request", "body"), _part(record, "response")
    choices = response.get("choices") if response else record.get("choices")
    own, logged = record, choices is not None or "response" in record
    if logged:
        _check_status(record, request or record, choices)
        if not own_template and (request or record).get("chat_template_kwargs"):
            raise DroppedError("template_options")
        own = _with_answer(request or record, choices, record.get("response"))
    dialogue = parse_record(_as_text(own), place, changed)
    numbered = enumerate(dialogue.messages)
    answers = [n for n, message in numbered if message["role"] == "assistant" and message.get("weight") != 0]
    if not answers or answers[-1] < len(dialogue.messages) - 1:
        raise DroppedError("no_trained_turn")
    places = [record, *(part for part in (request, response) if part), *_metadata(record, request)]
    name = next(
        (each[key] for each in places for key in CONVERSATION_KEYS if isinstance(each.get(key), str | int)), None
    )
    head = dialogue.messages[0]["content"] if dialogue.messages[0]["role"] == "system" else ""
    conversation = f"{head}\n{first_question(dialogue)}" if name is None else str(name)
    check_text(conversation)
    written = frozenset(answers[-1:] if logged else answers)
    return Served(dialogue, written, conversation, _time(places), _prompt_tokens(response or record))


def _part(record: dict[str, Any], *names: str) -> dict[str, Any]:
    """The request or the response, without a batch job's ``body`` around it; {} if it is missing."""
    part: dict[str, Any] = next((record[name] for name in names if isinstance(record.get(name), dict)), {})
    body: Any = _opened(part.get("body"), REQUEST | RESPONSE)
    return body if isinstance(body, dict) else part


def _opened(value: Any, keys: set[str]) -> Any:
    """Open JSON text that is a request or a response: an object with one of ``keys``, a message, or an error.

    All else stays, because an answer may be JSON, too.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            opened: dict[str, Any] = json.loads(value)
            message = {"role", "content"} <= opened.keys()
            return opened if message or opened.keys() & keys or isinstance(opened.get("error"), dict) else value
    return value


def _metadata(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [part["metadata"] for part in parts if isinstance(part.get("metadata"), dict)]


def _check_status(record: dict[str, Any], request: dict[str, Any], choices: Any) -> None:
    """Raise DroppedError for a failed request, a response without its request, and forms that are not read."""
    response = record.get("response")
    status = response.get("status_code", 200) if isinstance(response, dict) else 200
    if record.get("error") or status != 200 or (isinstance(response, dict) and response.get("error")):
        raise DroppedError("failed_request")
    chunks = isinstance(choices, list) and any(isinstance(choice, dict) and "delta" in choice for choice in choices)
    if chunks or isinstance(response, list) or (isinstance(response, str) and response.startswith("data:")):
        raise DroppedError("streamed_chunks")
    if first_value(request, TURN_KEYS) is None:
        raise DroppedError("text_completion" if "prompt" in request else "no_request")


def _with_answer(request: dict[str, Any], choices: Any, response: Any) -> dict[str, Any]:
    """The request's dialogue with the answer at its end; ``response``: a text or a message, if there are no choices."""
    answer: Any = {"content": response} if isinstance(response, str) else response
    if choices is not None:
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise DroppedError("no_answer")
        if choices[0].get("finish_reason") == "content_filter":
            raise DroppedError("content_filter")
        answer = choices[0].get("message")
    turns = first_value(request, TURN_KEYS)
    if not isinstance(answer, dict) or not isinstance(turns, list):
        raise DroppedError("no_answer")
    message = {"role": "assistant", "content": None} | {key: value for key, value in answer.items() if key != "from"}
    if not (message["content"] or message.get("tool_calls")):
        raise DroppedError("no_answer")
    return {"messages": [*turns, message], "tools": request.get("tools")}


def _as_text(record: dict[str, Any]) -> dict[str, Any]:
    """The record with contents that are lists of text parts as texts."""
    turns = first_value(record, TURN_KEYS)
    if not isinstance(turns, list):
        return record
    joined = []
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            turn = turn | {"content": "".join(str(part["text"]) for part in content)}
        joined.append(turn)
    return {key: value for key, value in record.items() if key not in TURN_KEYS} | {"messages": joined}


def _time(places: list[dict[str, Any]]) -> float | None:
    """Seconds since 1970 of the first key that is a time; DroppedError for an integer beyond a float's range."""
    for value in (each[key] for each in places for key in TIME_KEYS if each.get(key) is not None):
        try:
            seconds = float(value)
        except OverflowError:
            raise DroppedError("broken_time") from None
        except (TypeError, ValueError):
            try:
                seconds = datetime.datetime.fromisoformat(value).timestamp()
            except (TypeError, ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return seconds / 1000 if seconds > MILLISECONDS else seconds
    return None


def _prompt_tokens(response: dict[str, Any]) -> int | None:
    """Number of tokens of the prompt: vLLM's ``prompt_token_ids``, or the usage."""
    ids, usage = response.get("prompt_token_ids"), response.get("usage")
    if isinstance(ids, list) and ids:
        return len(ids)
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None

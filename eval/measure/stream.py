"""One streamed chat request to an OpenAI-style server, timed by the client: for eval.load."""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eval.configs import LoadConfig

# refused: an HTTP status above 399, or an error in the stream. disconnected: no connection, or the stream ended early.
# unreadable: no chat completion, or one without a token count.
Outcome = Literal["answered", "refused", "disconnected", "timeout", "unreadable"]
FAILURES: tuple[Outcome, ...] = ("refused", "disconnected", "timeout", "unreadable")
SHOWN = 300  # characters of a server's message


@dataclass(frozen=True)
class Answer:
    """A request as the client saw it.

    Attributes:
        seconds: from sending to the end of the stream, or to the failure.
        first: seconds to the first text; None without text. tokens: the server's count. detail: reason of a failure.
    """

    outcome: Outcome
    seconds: float
    first: float | None = None
    tokens: int = 0
    detail: str = ""

    def stored(self) -> dict[str, Any]:
        """Return the fields for a JSON file, without those that have their default; times are rounded to 0.01 ms."""
        fields = {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return {key: value for key, value in fields.items() if value not in (None, "")}

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None with one token."""
        return (self.seconds - self.first) / (self.tokens - 1) if self.first is not None and self.tokens > 1 else None


class FailedError(Exception):
    """A request has failed; holds the outcome and the reason."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class Endpoint:
    """A server and what every request to it has in common; ValueError if it cannot be reached or lists no model.

    Attributes:
        base: address up to /v1. model: the server's name of the model.
    """

    def __init__(self, label: str, url: str, config: LoadConfig) -> None:
        self.label, self.base, self.timeout = label, url.rstrip("/").removesuffix("/chat/completions"), config.timeout
        self._key = os.environ.get(config.api_key_env, "").strip()
        self.model = config.model or self._first_model()
        self._body = {
            "model": self.model,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **config.extra,
        }

    def ask(self, messages: list[dict[str, Any]], stop: threading.Event) -> Answer:
        """Send one request and read its stream; failures are outcomes. ``stop`` ends it early, as a timeout."""
        began = time.perf_counter()
        try:
            data = json.dumps({**self._body, "messages": messages}).encode()
            with self._open("/chat/completions", data) as reply:
                first, tokens = read_stream(reply, began, began + self.timeout, stop)
            return Answer("answered", time.perf_counter() - began, first, tokens)
        except Exception as error:  # noqa: BLE001 - whatever happens to a request is counted
            outcome, detail = failure(error)
        detail = detail.replace(self._key, "[API key]") if self._key else detail
        return Answer(outcome, time.perf_counter() - began, detail=detail[:SHOWN])

    def page(self, address: str) -> str:
        """Return the text at ``address``, a path below the server's root; OSError without it."""
        with self._open(address, None, self.base.removesuffix("/v1")) as reply:
            text: str = reply.read().decode(errors="replace")
            return text

    def _first_model(self) -> str:
        try:
            with self._open("/models", None) as reply:
                return str(json.loads(reply.read())["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(
                f"{self.label}: {self.base}/models: {error}; start the server, or fix --endpoint"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self.label}: {self.base}/models lists no model; give --model NAME") from None

    def _open(self, path: str, data: bytes | None, base: str | None = None) -> Any:
        request = urllib.request.Request(f"{base or self.base}{path}", data)
        request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        return urllib.request.urlopen(request, timeout=self.timeout)


def read_stream(lines: Iterable[bytes], began: float, deadline: float, stop: threading.Event) -> tuple[float, int]:
    """Return the seconds from ``began`` to the first text, and the number of tokens; raises FailedError.

    Args:
        lines: server-sent events. deadline: time of ``perf_counter`` at which the request is given up.
    """
    first, tokens, ended = None, 0, False
    for line in lines:
        now = time.perf_counter()
        if now > deadline or stop.is_set():
            raise FailedError("timeout", f"not finished after {now - began:.1f} s")
        kind, _, data = line.strip().partition(b":")
        if kind != b"data":
            continue
        if ended := data.strip() == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise FailedError("refused", str(event["error"]))
        texts = [value for choice in event["choices"] for key, value in choice["delta"].items() if key != "role"]
        if first is None and any(texts):
            first = now - began
        tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
    if not ended:
        raise FailedError("disconnected", "the stream ended before [DONE]")
    if not tokens:
        raise FailedError("unreadable", "no completion_tokens: the server ignores stream_options.include_usage")
    return (time.perf_counter() - began if first is None else first), int(tokens)


def failure(error: Exception) -> tuple[Outcome, str]:
    """Return the outcome of a request that ended with ``error``, and the reason."""
    if isinstance(error, FailedError):
        return error.outcome, str(error)
    if isinstance(error, urllib.error.HTTPError):
        with error:
            said = " ".join(error.read(SHOWN).decode(errors="replace").split())
        return "refused", f"{error.code} {error.reason}: {said}"
    reason = getattr(error, "reason", error)  # of a URLError
    text = str(reason) or type(reason).__name__
    if isinstance(reason, TimeoutError):
        return "timeout", text
    return "disconnected" if isinstance(error, OSError | http.client.HTTPException) else "unreadable", text

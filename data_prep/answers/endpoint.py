"""Answers from a server with OpenAI's chat interface (vLLM, SGLang, llama.cpp, or a hosted model).

Requests run in threads. Temporary failures are tried again: a lost connection, 408, 429 and 5xx, a reply that is not a
completion. A refusal of one dialogue drops that dialogue; a refusal that concerns all dialogues ends the run. The API
key is read from the environment, sent only to that server, and removed from every message.
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from data_prep.answers.journal import ONLY_REASONING, RETRIED, AnsweredBatch, Conversation, Turn, derived_seed
from data_prep.configs import EndpointConfig, Writing
from data_prep.dialogues.messages import REASONING_KEYS, Message, first_value
from data_prep.dialogues.template import only_reasoning

FIRST_WAIT, LONGEST_WAIT = 1.0, 600.0  # seconds before another attempt; doubled each time
# Single dialogues may be refused. Above this number and share, the server or the settings are wrong.
MOST_LOST, SHARE_LOST = 20, 0.05
NO_THINKING = "endpoint.extra={chat_template_kwargs: {enable_thinking: false}}"  # for vLLM and SGLang
# Servers word differently that a prompt is too long; all of them use one of these words.
TOO_LONG = re.compile(r"context[ _-]?(length|size|window)", re.IGNORECASE)


class RefusedError(ValueError):
    """The server refuses a request; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BadReplyError(ValueError):
    """The server answered 200, but not with a chat completion."""


class EndpointAnswers:
    """Answers conversations through an endpoint, ``concurrency`` at a time; ValueError if the API key is invalid."""

    def __init__(self, config: EndpointConfig, writing: Writing) -> None:
        self.config, self.writing = config, writing
        self._key = (os.environ.get(config.api_key_env, "") if config.api_key_env else "").strip()
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(f"the environment variable {config.api_key_env} holds no valid API key; set it again")
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._stop = threading.Event()
        self._answered, self._lost = 0, 0

    def check(self) -> None:
        """Ask for one token, to find a wrong address, model or key at once; raises ValueError or OSError."""
        body = self._body([])
        if "max_tokens" in body:
            body["max_tokens"] = 1
        self._complete([{"role": "user", "content": "Hi"}], body)

    def batches(self, conversations: list[Conversation]) -> Iterator[AnsweredBatch]:
        """Answer everything; the caller records the turns of a batch before it asks for the next one.

        After a failure, the running requests are awaited and handed out before the error is raised.

        Raises:
            ValueError: a refusal that concerns all dialogues, or too many refusals.
            OSError: the server cannot be reached.
        """
        waiting = (conversation for conversation in conversations if not conversation.done)
        pending: dict[Future[tuple[Turn, str]], Conversation] = {}
        failure: BaseException | None = None
        pool = ThreadPoolExecutor(self.config.concurrency)
        try:
            while True:
                # Start new conversations while threads are free and nothing has failed.
                free = self.config.concurrency - len(pending) if failure is None else 0
                for conversation in itertools.islice(waiting, free):
                    pending[pool.submit(self._answer, conversation)] = conversation
                if not pending:
                    break
                # Hand out the results, and ask for the next turns of their conversations.
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    conversation = pending.pop(future)
                    failure = failure or future.exception()
                    if future.exception() is None:
                        turn, detail = future.result()
                        yield AnsweredBatch([turn])
                        failure = failure or self._too_many_lost(turn, detail)
                    if failure is not None:
                        self._stop.set()
                    elif not conversation.done:
                        pending[pool.submit(self._answer, conversation)] = conversation
        finally:
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def _answer(self, conversation: Conversation) -> tuple[Turn, str]:
        """The next turn of a conversation, and the server's reason if it is lost. Runs in a thread."""
        index, number = conversation.index, len(conversation.answers)
        # Without earlier reasoning: templates leave it out, and some servers refuse it.
        history = [{key: message[key] for key in ("role", "content")} for message in conversation.history()]
        try:
            choice, tokens = self._complete(history, self._body([(index, number)]))
        except BadReplyError as error:
            return Turn(index, number, drop="bad_reply"), str(error)
        except RefusedError as error:
            if error.status not in (400, 413, 422):
                raise
            if TOO_LONG.search(str(error)):
                return Turn(index, number, end="no_room"), str(error)
            return Turn(index, number, drop="refused"), str(error)
        return self._turn(index, number, choice, tokens), ""

    def _turn(self, index: int, number: int, choice: dict[str, Any], tokens: int) -> Turn:
        text, reason = choice["message"].get("content"), choice.get("finish_reason")
        if reason == "content_filter":
            return Turn(index, number, drop="content_filter")
        if reason == "length" and self.writing.truncated == "drop":
            return Turn(index, number, end="truncated")
        reasoning = first_value(choice["message"], REASONING_KEYS)
        reasoning = reasoning if isinstance(reasoning, str) and reasoning.strip() else None
        if not isinstance(text, str) or not text.strip():
            return Turn(index, number, end=ONLY_REASONING) if reasoning else Turn(index, number, drop="empty_answer")
        if reason == "length" and only_reasoning(text):  # from a server without a reasoning parser
            return Turn(index, number, end=ONLY_REASONING)
        try:
            (text + (reasoning or "")).encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON allows and tokenizers do not
            return Turn(index, number, drop="invalid_text")
        return Turn(index, number, text, tokens, reason == "length", reasoning=reasoning)

    def _too_many_lost(self, turn: Turn, detail: str) -> ValueError | None:
        self._answered += 1
        self._lost += turn.drop in RETRIED
        if self._lost < MOST_LOST or self._lost <= SHARE_LOST * self._answered:
            return None
        return ValueError(
            f"{self._lost} of {self._answered} requests were refused or had unusable replies; the last: {detail}. Fix "
            "that and run the same command again: those dialogues will be tried again"
        )

    def _body(self, asked: list[tuple[int, int]]) -> dict[str, Any]:
        writing = self.writing
        body: dict[str, Any] = {"max_tokens": writing.max_new_tokens, "temperature": writing.temperature}
        if writing.temperature > 0:
            body["seed"] = derived_seed(writing.seed, asked)
            body |= {"top_p": writing.top_p} if writing.top_p < 1 else {}
            body |= {"top_k": writing.top_k} if writing.top_k else {}  # a key of vLLM and SGLang, not of OpenAI
        body = {"model": self.config.model, **body, **self.config.extra}
        return {key: value for key, value in body.items() if value is not None}

    def _complete(self, messages: list[Message], body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The first choice of a chat completion and its number of tokens (0 if the server does not say)."""
        data = json.dumps({**body, "messages": messages}).encode()
        attempt = 0
        while True:
            pause = FIRST_WAIT * 2**attempt * random.uniform(0.75, 1.25)
            try:
                return self._parse(self._post(data))
            except BadReplyError as error:
                failure: Exception = error
            except urllib.error.HTTPError as error:
                failure, pause = self._read_error(error, pause)
            except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
                reason = str(getattr(error, "reason", error)) or type(error).__name__
                failure = OSError(self._hide(f"{self.config.base} cannot be reached: {reason}"))
            attempt += 1
            if attempt > self.config.retries or self._stop.wait(min(pause, LONGEST_WAIT)):
                raise failure

    def _post(self, data: bytes) -> bytes:
        request = urllib.request.Request(f"{self.config.base}/chat/completions", data, method="POST")
        request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        with self._opener.open(request, timeout=self.config.timeout) as reply:
            return reply.read()

    def _read_error(self, error: urllib.error.HTTPError, pause: float) -> tuple[Exception, float]:
        """The error and the seconds to wait before another attempt; raises at once if another attempt is useless."""
        said = ""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            said = " ".join(error.read(500).decode(errors="replace").split())
        text = self._hide(f"{self.config.base} answered {error.code} {error.reason}: {said or 'no explanation'}")
        if error.code in (408, 429) or error.code >= 500:
            return OSError(text), max(pause, _retry_after(error.headers.get("Retry-After")))
        if error.code < 400:
            place = self._hide(str(error.headers.get("Location")))
            raise RefusedError(error.code, f"{self.config.base} redirects to {place}; put that into endpoint.url")
        if error.code in (401, 403):
            sent = f"the API key in {self.config.api_key_env} was sent" if self._key else "no API key was sent"
            text = f"{text} ({sent}; endpoint.api_key_env names the environment variable that holds it)"
        raise RefusedError(error.code, text)

    def _parse(self, data: bytes) -> tuple[dict[str, Any], int]:
        try:
            reply = json.loads(data)
            choice = reply["choices"][0]
            choice["message"].get("content")
            tokens = (reply.get("usage") or {}).get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            shown = self._hide(data[:200].decode(errors="replace"))
            raise BadReplyError(f"{self.config.base} did not send a chat completion: {shown!r}") from None
        return choice, tokens if isinstance(tokens, int) else 0

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "[API key]") if self._key else text


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would become a GET, maybe to another host."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def _retry_after(value: str | None) -> float:
    """Seconds in a Retry-After header; 0 for anything else, such as a date."""
    with contextlib.suppress(ValueError):
        return max(float(value or 0), 0.0)
    return 0.0

"""A chat server on loopback with the part of OpenAI's interface that regeneration uses, and with failures."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from loopback import LoopbackServer

Reply = tuple[int, bytes, dict[str, str]]


def completion(content: str | None, finish_reason: str = "stop", tokens: int = 5) -> Reply:
    """A reply as vLLM sends it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return ok({"choices": [choice], "usage": {"completion_tokens": tokens}})


def ok(value: Any) -> Reply:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def error(status: int, message: str, code: str | None = None) -> Reply:
    """An error in OpenAI's form."""
    return status, json.dumps({"error": {"message": message, "code": code}}).encode(), {}


def shout(messages: list[dict[str, str]]) -> str:
    """The server's answer, which depends on the whole history."""
    return " | ".join(message["content"].upper() for message in messages)[-200:]


class ChatServer(LoopbackServer):
    """``with ChatServer() as server``: answers at ``server.url``; ``server.bodies`` and ``server.keys`` are its log.

    Attributes:
        misbehave: given a request's body and its number from 0, what to reply instead; None: answer; b"": hang up.
    """

    def __init__(self, misbehave: Callable[[dict[str, Any], int], Reply | bytes | None] | None = None) -> None:
        self.misbehave = misbehave or (lambda body, number: None)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = self.busiest = 0
        self.delay = 0.0
        self.lock = threading.Lock()
        super().__init__(_Handler, server_=self)
        self._http.handle_error = lambda *arguments: None  # clients that hang up are part of the tests
        self.url = f"{self.address}/v1"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The bodies without those of the check at the start."""
        return [body for body in self.bodies if body["max_tokens"] != 1]


class _Handler(BaseHTTPRequestHandler):
    server_: ChatServer

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output clean."""

    def do_POST(self) -> None:
        server = self.server_
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        time.sleep(server.delay)
        reply = server.misbehave(body, number)
        if reply is None:
            known = self.path == "/v1/chat/completions"
            reply = completion(shout(body["messages"])) if known else error(404, f"no route {self.path}")
        with server.lock:
            server.busy -= 1
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            return
        status, data, headers = reply
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

"""A stub of a served engine on loopback: streams answers, fails when a prompt asks for it, and has counters."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from loopback import LoopbackServer

TOKENS = 6  # of an answer
# What a verification of the stub commits: 1 + 4/2 tokens, of drafts of 4.
GAINS = {"spec_decode_num_drafts": 2, "spec_decode_num_draft_tokens": 8, "spec_decode_num_accepted_tokens": 4}


class ServedEngine(LoopbackServer):
    """``with ServedEngine() as server``: answers at ``server.url``.

    A prompt with the word refuse, gone, hangup, slow, uncounted, wrong (an error event) or garbled fails in that way.
    The first ``cut_pages`` pages of counters break off.

    Attributes:
        questions: texts that were asked, in order. busiest: most requests at the same time.
    """

    def __init__(self, seconds: float = 0.002, counters: bool = True, fail: bool = True, cut_pages: int = 0) -> None:
        self.seconds, self.counters, self.fail, self.cut_pages = seconds, counters, fail, cut_pages
        self.questions: list[str] = []
        self.keys: list[str | None] = []
        self.busy = self.busiest = self.ended = 0
        self.lock = threading.Lock()
        super().__init__(_Handler, engine=self)
        self._http.handle_error = lambda *arguments: None  # clients that hang up are part of the tests
        self.url = f"{self.address}/v1"


class _Handler(BaseHTTPRequestHandler):
    engine: ServedEngine
    protocol_version = "HTTP/1.1"  # chunked, as vLLM streams

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output clean."""

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/metrics" and engine.cut_pages:
            engine.cut_pages -= 1
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", "99")
            self.end_headers()
            self.wfile.write(b"vllm:")
        elif self.path == "/metrics" and engine.counters:
            lines = [f'vllm:{name}_total{{engine="{rank}"}} {gain * engine.ended / 2}' for name, gain in GAINS.items()
                     for rank in (0, 1)]  # fmt: skip
            self.send("\n".join(["# TYPE vllm:num_requests_running gauge", *lines, "vllm:x_created 1.7e9", ""]))
        elif self.path == "/v1/models":
            self.send(json.dumps({"data": [{"id": "stub"}]}))
        else:
            self.send("there is no such page", 404)

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with engine.lock:
            engine.questions.append(text)
            engine.keys.append(self.headers.get("Authorization"))
            engine.busy += 1
            engine.busiest = max(engine.busiest, engine.busy)
        self.counted = False
        try:
            self.answer(text if engine.fail else "", body)
        finally:
            self.end()

    def end(self) -> None:
        """Count the request as ended, once: before its last chunk, after which the client asks again."""
        if not self.counted:
            self.counted = True
            with self.engine.lock:
                self.engine.busy -= 1
                self.engine.ended += 1

    def answer(self, text: str, body: dict[str, Any]) -> None:
        """Stream an answer, or fail as ``text`` says."""
        if "refuse" in text:
            self.send(f"too long for {self.headers.get('Authorization')}", 400)
            return
        if "gone" in text:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(TOKENS):
            time.sleep(0.4 if "slow" in text else self.engine.seconds)
            self.event({"choices": [{"delta": {"content": "word "}}]})
            if "hangup" in text:
                self.close_connection = True
                return
            if "wrong" in text:
                self.event({"error": {"message": "out of memory"}})
            if "garbled" in text:
                self.chunk(b"data: {\n\n")
        if body["stream_options"]["include_usage"] and "uncounted" not in text:
            self.event({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self.end()
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: dict[str, Any]) -> None:
        """Send a server-sent event."""
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        """Send a chunk of the stream."""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def send(self, text: str, status: int = 200) -> None:
        """Send a whole page."""
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

"""A server on loopback for the time of a `with` block."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class LoopbackServer:
    """Answers at ``address`` with ``handler``, whose attributes are ``attributes``."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], **attributes: Any) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes))
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

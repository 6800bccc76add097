"""Receivers of webhooks that behave, and that do not."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0p-secret-webhook"


class Receiver:
    """An HTTP server on this machine; the first part of the path says how it behaves: take, refuse or hang."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.startswith("/hang"):
                    receiver.released.wait(60)
                    return
                if self.path.startswith("/take"):
                    receiver.messages.append(document)
                self.send_response(200 if self.path.startswith("/take") else 500)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Nothing: the test's output is for failures."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def url(self, behaviour: str) -> str:
        """An Apprise URL of it, with secrets in its user and in its path."""
        return f"json://aerie:{SECRET}-1@127.0.0.1:{self.server.server_port}/{behaviour}/{SECRET}-2"


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that runs."""
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()

"""A stand-in for the Hugging Face hub, over HTTP, that serves one repository and fails where it is told to."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.parse import urlsplit

REPOSITORY = "acme/Verifier"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the hub has, how it fails, and what it was asked for."""

    files: dict[str, bytes]
    token: str | None = None
    cut_once: set[str] = field(default_factory=set)
    unavailable: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    go_on: Event = field(default_factory=Event)
    endpoint: str = ""
    downloads: list[tuple[str, str | None]] = field(default_factory=list)

    def downloaded(self) -> list[str]:
        """Names of the files that were asked for, from their beginning or later."""
        return sorted({name for name, _ in self.downloads})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_arguments: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = urlsplit(self.path).path
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(401, "GatedRepo", body)
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            self._tree(path.rpartition("/")[2], body)
        elif path.startswith(f"/{REPOSITORY}/resolve/{REVISION}/"):
            self._file(path.removeprefix(f"/{REPOSITORY}/resolve/{REVISION}/"), body)
        else:
            self._refuse(404, "RepoNotFound", body)

    def _tree(self, revision: str, body: bool) -> None:
        if revision != REVISION:
            self._refuse(404, "RevisionNotFound", body)
            return
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # noqa: S324
            for name, content in self.hub.files.items()
        ]
        self._send(200, json.dumps(entries).encode(), body, {"Content-Type": "application/json"})

    def _file(self, name: str, body: bool) -> None:
        content = self.hub.files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", body)
            return
        wanted = self.headers.get("Range")
        if body:
            self.hub.downloads.append((name, wanted))
        if body and name in self.hub.unavailable:
            self._refuse(503, "Unavailable", body)
            return
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": REVISION}  # noqa: S324
        if body and name in self.hub.cut_once:
            self.hub.cut_once.discard(name)
            self._send(200, content, False, headers)
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
        elif body and name in self.hub.stalled:
            self._send(200, content, False, headers)
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.hub.go_on.wait(60)
            self.close_connection = True
        elif wanted is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            span = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self._send(206, content[start:], body, headers | span)
        else:
            self._send(200, content, body, headers)

    def _refuse(self, status: int, code: str, body: bool) -> None:
        self._send(status, b"{}", body, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()

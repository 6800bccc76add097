"""Files of a server's folder that are cut, foreign or unreadable, and addresses that are no keeper's: one line each."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from aerie.artefacts.observations import observations_path, read_observations
from aerie.errors import BadInput
from aerie.serving import client
from aerie.serving.errors import KeeperUnreachable
from aerie.serving.lease import address_path, lease_path, read_address, read_lease

DAMAGED = [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"schema_version": 2}']


@pytest.mark.parametrize(
    ("path", "read"),
    [(lease_path, read_lease), (address_path, read_address), (observations_path, read_observations)],
)
@pytest.mark.parametrize("content", [*DAMAGED, None])
def test_a_damaged_file_is_named_in_one_line(
    tmp_path: Path, path: Callable[[Path], Path], read: Callable[[Path], Any], content: bytes | None
) -> None:
    damaged = path(tmp_path)
    if content is None:
        damaged.mkdir()
    elif content == b"" and read is read_observations:
        return  # no launches yet
    else:
        damaged.write_bytes(content)
    with pytest.raises(BadInput) as raised:
        read(tmp_path)
    assert str(raised.value).startswith(str(damaged))
    assert "\n" not in str(raised.value)


@pytest.fixture
def stranger() -> Iterator[Callable[[int, str], str]]:
    """An HTTP server that gives one answer to everything; returns its URL."""
    servers = []

    def answer(status: int, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                """Silence."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield answer
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, json.dumps({"detail": "Not Found"})), (500, "500 Internal Server Error"), (200, "<html>"), (200, "{}")],
)
def test_what_is_no_keeper_is_told_so(
    stranger: Callable[[int, str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, body: str
) -> None:
    monkeypatch.setenv("AERIE_KEEPER_URL", stranger(status, body))
    monkeypatch.setenv("AERIE_KEEPER_TOKEN", "a token")
    with pytest.raises(KeeperUnreachable, match="is it"):
        client.status(tmp_path)

"""A process that answers like SGLang, fast, and fails as it is told: for tests of how failures are handled.

``python fake_server.py --port N --info JSON --behaviour NAME [--served-model-name TOKEN]``
"""

# ruff: noqa: T201 - its output is its log
import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEALTHY = "healthy"
BEHAVIOURS = (
    HEALTHY,
    "never ready",
    "exits at start",
    "worker dies at start",
    "worker dies later",
    "ignores SIGTERM",
    "leaves an orphan",
    "constant answer",
    "short answer",
    "other dtype",
)


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints, as far as the probe uses them."""

    behaviour: str
    info: dict[str, Any]
    asked = 0

    def do_GET(self) -> None:
        if self.path == "/health_generate":
            self._reply(None, status=503 if self.behaviour == "never ready" else 200)
        elif self.path == "/server_info":
            self._reply(self.info | ({"dtype": "float16"} if self.behaviour == "other dtype" else {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = body["sampling_params"]["max_new_tokens"]
        output = [7] * number if self.behaviour == "constant answer" else list(range(number))
        if self.behaviour == "short answer":
            output = output[:-1]
        self._reply({"output_ids": output, "meta_info": {"completion_tokens": number}})

    def _reply(self, document: Any, status: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


def say_that_a_worker_died() -> None:
    print("Traceback (most recent call last):\nRuntimeError: the fake worker fell over", flush=True)
    print("Received sigquit from a child process. It usually means the child failed.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--info", type=json.loads)
    parser.add_argument("--behaviour", choices=BEHAVIOURS)
    parser.add_argument("--served-model-name")
    options = parser.parse_args()
    Handler.behaviour = options.behaviour
    Handler.info = {**options.info, "served_model_name": options.served_model_name}

    if options.behaviour == "exits at start":
        print(
            "Traceback (most recent call last):\nRuntimeError: CUDA out of memory. Tried to allocate 9 GiB", flush=True
        )
        sys.exit(1)
    if options.behaviour == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if options.behaviour not in ("ignores SIGTERM", "leaves an orphan"):
        signal.signal(signal.SIGTERM, lambda *_: (worker.kill(), sys.exit(0)))
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if options.behaviour == "worker dies at start":
        say_that_a_worker_died()
    if options.behaviour == "worker dies later":
        time.sleep(3)
        say_that_a_worker_died()
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()

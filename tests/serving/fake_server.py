"""A process that answers like SGLang, fast, and fails as it is told: for tests of how failures are handled.

``python fake_server.py --port N --info JSON --sizes JSON --behaviour NAME [--served-model-name TOKEN]``
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
from typing import Any, ClassVar

HEALTHY = "healthy"
BEHAVIOURS = (
    HEALTHY,
    "never ready",
    "exits at start",
    "finds its port taken",
    "worker dies at start",
    "worker dies later",
    "ignores SIGTERM",
    "leaves an orphan",
    "constant answer",
    "short answer",
    "other dtype",
    "another launch",
    "loops",
    "never closes its reasoning",
    "odd at first",
    "reasons to the cap",
    "loops to the cap",
    "less likely",
    "corrupted cache",
    "no logprobs",
    "not a number",
    "tells its start",
    "pool too large",
    "prefill too large",
    "prefill too large later",
    "decode too large later",
    "prefill always too large",
)

TOKEN_IDS = {
    "<|im_end|>": 900, "<|im_middle|>": 901, "<think>": 902, "</think>": 903, "<|tool_calls_section_begin|>": 904,
    "<|tool_calls_section_end|>": 905, "<|tool_call_begin|>": 906, "<|tool_call_argument_begin|>": 907,
    "<|tool_call_end|>": 908,
}  # fmt: skip
END, CLOSE = TOKEN_IDS["<|im_end|>"], TOKEN_IDS["</think>"]
REASONING = list(range(100, 130))
ANSWERS = {"loops": [*[7, 8, 9] * 40, END], "never closes its reasoning": [*REASONING, 51, END]}
LOGPROB = -2.5


class Handler(BaseHTTPRequestHandler):
    """SGLang's endpoints, as far as the probe uses them."""

    behaviour: str
    info: dict[str, Any]
    asked = 0
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/health_generate":
            self._reply(None, status=503 if self.behaviour == "never ready" else 200)
        elif self.path == "/server_info":
            self._reply(self.info | ({"dtype": "float16"} if self.behaviour == "other dtype" else {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked += 1
        self.bodies.append(body)
        sampling = body["sampling_params"]
        if body.get("return_logprob"):
            self._answer([5], "length", **self._logprobs(body["input_ids"], body["logprob_start_len"]))
        elif sampling.get("ignore_eos"):
            self._answer(self._forced(sampling["max_new_tokens"]), "length")
        else:
            self._answer(*self._to_question(sampling["max_new_tokens"]))

    def _forced(self, number: int) -> list[int]:
        output = [7] * number if self.behaviour == "constant answer" else list(range(number))
        return output[:-1] if self.behaviour == "short answer" else output

    def _to_question(self, cap: int) -> tuple[list[int], str]:
        if self.behaviour in ("reasons to the cap", "loops to the cap"):
            period = 800 if self.behaviour == "reasons to the cap" else 4
            return [i * i % 797 if period == 800 else i % period for i in range(cap)], "length"
        good = [*REASONING, CLOSE, 51, END]
        odd = self.behaviour == "odd at first" and self.asked < 4
        return (ANSWERS["loops"] if odd else ANSWERS.get(self.behaviour, good)), "stop"

    def _logprobs(self, ids: list[int], start: int) -> dict[str, Any]:
        if self.behaviour == "no logprobs":
            return {}
        value = LOGPROB - (0.1 if self.behaviour == "less likely" else 0.0)
        value -= 0.1 if self.behaviour == "corrupted cache" and start else 0.0
        values: list[float | None] = [None, *[value] * (len(ids) - start - 1)]
        if self.behaviour == "not a number":
            values[3] = None
        return {
            "input_token_logprobs": [[value, token, None] for value, token in zip(values, ids[start:], strict=True)],
            "cached_tokens": start,
        }

    def _answer(self, output: list[int], finish: str, **meta: Any) -> None:
        launch = "launch-0" if self.behaviour == "another launch" else self.info["served_model_name"]
        number = len(output) + (self.behaviour == "short answer")
        self._reply(
            {
                "output_ids": output,
                "meta_info": {
                    "completion_tokens": number, "finish_reason": {"type": finish}, "weight_version": launch, **meta,
                },
            }
        )  # fmt: skip

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


def tell_start(behaviour: str, too_large: str | None) -> None:
    """Log what comes before the server answers; a start on GPUs in parts."""
    import server_logs as logs

    if behaviour == "never ready":
        print("[2026-11-30 00:00:15 TP0] Load weight begin. avail mem=94.03 GB", flush=True)
    if behaviour == "tells its start":
        for whole, before in ((logs.LOADING, ""), (logs.SIZED, logs.LOADING), (logs.READY, logs.SIZED)):
            print(whole.removeprefix(before), flush=True)
            time.sleep(1)
    if too_large and not behaviour.endswith("later"):
        print(too_large, flush=True)
        time.sleep(600)


def tell_end(behaviour: str, too_large: str | None) -> None:
    """Log how a server that answers comes to its end."""
    if behaviour == "worker dies at start":
        say_that_a_worker_died()
    if behaviour == "worker dies later":
        time.sleep(3)
        say_that_a_worker_died()
    if too_large:
        time.sleep(3)
        print(too_large, flush=True)


def out_of_memory(behaviour: str, sizes: dict[str, Any]) -> str | None:
    """What a server of these sizes logs when its memory does not suffice."""
    import server_logs as logs

    prefill = logs.READY + logs.PREFILLS + logs.hit(logs.PREFILL, logs.OUT_OF_MEMORY)
    decode = logs.READY + logs.DECODES + logs.hit(logs.DECODE, logs.OUT_OF_MEMORY)
    pool = logs.LOADED + logs.hit(logs.POOLS, logs.OUT_OF_MEMORY)
    fits = {
        "pool too large": (pool, sizes.get("mem_fraction_static", 1) <= 0.85),
        "prefill too large": (prefill, (sizes.get("chunked_prefill_size") or 8192) <= 4096),
        "prefill too large later": (prefill, (sizes.get("chunked_prefill_size") or 8192) <= 4096),
        "decode too large later": (decode, (sizes.get("max_running_requests") or 2048) <= 36),
        "prefill always too large": (prefill, False),
    }
    log, enough = fits.get(behaviour, ("", True))
    return None if enough else log


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--info", type=json.loads)
    parser.add_argument("--sizes", type=json.loads, default={})
    parser.add_argument("--behaviour", choices=BEHAVIOURS)
    parser.add_argument("--served-model-name")
    parser.add_argument("--weight-version")
    options = parser.parse_args()
    Handler.behaviour = options.behaviour
    names = {"served_model_name": options.served_model_name, "weight_version": options.weight_version}
    Handler.info = {**options.info, **names}

    if options.behaviour == "exits at start":
        print(
            "Traceback (most recent call last):\nRuntimeError: CUDA out of memory. Tried to allocate 9 GiB", flush=True
        )
        sys.exit(1)
    if options.behaviour == "finds its port taken":
        # As SGLang, which then waits for its workers for ever.
        print("ERROR:    [Errno 98] error while attempting to bind on address: address already in use", flush=True)
        time.sleep(600)
    if options.behaviour == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if options.behaviour not in ("ignores SIGTERM", "leaves an orphan"):
        signal.signal(signal.SIGTERM, lambda *_: (worker.kill(), sys.exit(0)))
    too_large = out_of_memory(options.behaviour, options.sizes)
    tell_start(options.behaviour, too_large)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell_end(options.behaviour, too_large)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()

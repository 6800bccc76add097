"""A server that speaks as much of SGLang's native endpoint as a benchmark needs, to inject faults."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEPS_OF = {"without": None, "untrained": 1.0, "trained": 2.5, "production": 2.0}
"""Tokens that each verify step yields, by variant."""


def meta(tokens: int, tokens_a_step: float | None, **fields: Any) -> dict[str, Any]:
    """``meta_info`` as SGLang gives it."""
    told = {"finish_reason": {"type": "stop", "matched": 1}, "prompt_tokens": 3, "completion_tokens": tokens}
    if tokens_a_step is not None:
        steps = max(1, round(tokens / tokens_a_step))
        told |= {
            "spec_verify_ct": steps,
            "spec_num_correct_drafts": tokens - steps,
            "spec_num_proposed_drafts": 3 * steps,
            "spec_correct_drafts_histogram": [steps, 0, 0, 0] if tokens == steps else [0, 0, steps, 0],
        }
    return {**told, **fields}


class StandIn:
    """The server of one variant. ``change`` may alter each reply before it is sent."""

    def __init__(self, variant: str, info: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.asked_likely: list[list[int]] = []
        self.flushed = 0
        self.likely: list[tuple[float, int, str | None]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, document: dict[str, Any]) -> None:
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.answer(info)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if self.path == "/flush_cache":
                    owner.flushed += 1
                    return self.answer({})
                asked = json.loads(body)
                if asked.get("return_logprob"):
                    owner.asked_likely.append(asked["input_ids"])
                    return self.answer({"meta_info": {"output_top_logprobs": [owner.likely]}})
                owner.requests.append(asked)
                output_ids = [10 + asked["input_ids"][0] % 7] * 19 + [1]
                reply = {
                    "output_ids": output_ids,
                    "meta_info": meta(len(output_ids), STEPS_OF[variant], id=asked["rid"]),
                }
                change(reply)
                return self.answer(reply)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

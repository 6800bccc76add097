"""A server that speaks SGLang's native endpoint and can be told to fail.

It answers at once, deterministically by sample id, in the demo family's grammar. Nothing here generates text: it
injects faults that a real server shows once in a million requests.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN_IDS = {
    "<|im_end|>": 900, "<|im_middle|>": 901, "<think>": 902, "</think>": 903, "<|tool_calls_section_begin|>": 904,
    "<|tool_calls_section_end|>": 905, "<|tool_call_begin|>": 906, "<|tool_call_argument_begin|>": 907,
    "<|tool_call_end|>": 908,
}  # fmt: skip
VOCABULARY_SIZE = 1000
END = TOKEN_IDS["<|im_end|>"]
TOOL_CALL = [904, 906, 11, 907, 12, 908, 905]


def answer_ids(sample_id: str, *, tools: bool = False) -> list[int]:
    """A well-formed response of 20 to 120 tokens."""
    digest = hashlib.sha256(sample_id.encode()).digest()
    length = 20 + digest[0] % 100
    body = [1 + (digest[i % 32] * 31 + i * 7) % 800 for i in range(length)]
    return [*body[: length // 2], TOKEN_IDS["</think>"], *body[length // 2 :], *(TOOL_CALL if tools else []), END]


SAME_ID = "the request's"  # stands for the id of the request that is answered


def reply(ids: list[int], prompt_tokens: int, **meta: Any) -> dict[str, Any]:
    """A reply as SGLang gives it."""
    return {
        "text": "", "output_ids": ids,
        "meta_info": {
            "id": SAME_ID, "finish_reason": {"type": "stop", "matched": END}, "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids), "cached_tokens": 0, "e2e_latency": 0.1, **meta,
        },
    }  # fmt: skip


def sample_of(body: dict[str, Any]) -> str:
    """Sample id of a request: the last but one part of its rid."""
    return str(body["rid"]).split(":")[-2]


INFO = {
    "model_path": "", "revision": None, "dtype": "float32", "kv_cache_dtype": "auto", "reasoning_parser": None,
    "tool_call_parser": None, "speculative_algorithm": None, "max_total_num_tokens": 100_000, "version": "0.5.23",
}  # fmt: skip

LOAD = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.42, "gen_throughput": 930.4}

# Given the request's body and how often its sample was asked for before: a response, bytes, or None for a good answer.
Fault = Callable[[dict[str, Any], int], "web.StreamResponse | bytes | dict[str, Any] | Exception | None"]


@dataclass
class FakeServer:
    """Runs in a thread of its own. ``requests`` are the bodies received, ``seen`` counts them by sample."""

    model_path: str
    fault: Fault = lambda body, before: None
    delay_seconds: float = 0.0
    info_seconds: float = 0.0
    health_seconds: list[float] = field(default_factory=list)
    tools: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    loads: dict[str, Any] = field(default_factory=lambda: {"loads": [LOAD]})
    requests: list[dict[str, Any]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    computed: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "prefill_compute": 0.0})
    counts_tokens: bool = True
    stuck: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Reset every connection and refuse new ones, as a killed process does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._info),
                web.get("/v1/loads", self._loads),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if self.health_seconds:
            await asyncio.sleep(self.health_seconds.pop(0))
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.info_seconds)
        return web.json_response({"model_path": self.model_path})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({**INFO, "model_path": self.model_path, **self.info})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f'sglang:realtime_tokens_total{{mode="{mode}"}} {count}' for mode, count in self.computed.items()]
        lines = lines if self.counts_tokens else []
        return web.Response(text="\n".join(["# TYPE sglang:realtime_tokens_total counter", *lines, ""]))

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response(self.loads)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sample_id = sample_of(body)
        before = self.seen[sample_id]
        self.seen[sample_id] += 1
        self.requests.append(body)
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self.stuck:
            await asyncio.sleep(600)
        self.computed["decode"] += 1
        outcome = self.fault(body, before)
        if isinstance(outcome, web.StreamResponse):
            return outcome
        if isinstance(outcome, bytes):
            return web.Response(body=outcome, content_type="application/json")
        if isinstance(outcome, ConnectionResetError):
            request.transport.abort()
            raise outcome
        if outcome is None:
            outcome = reply(answer_ids(sample_id, tools=self.tools), len(body["input_ids"]))
        if outcome.get("meta_info", {}).get("id") == SAME_ID:
            outcome = {**outcome, "meta_info": {**outcome["meta_info"], "id": body["rid"]}}
        return web.json_response(outcome)

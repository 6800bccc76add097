"""How many responses a second the driver can take from a server that answers at once.

    PYTHONPATH=include:. OMP_NUM_THREADS=1 .aerie/envs/airflow/bin/python benchmarks/driver_ceiling.py [--quick]

Replies have 1,000 tokens and the text, as SGLang sends them. Aerie checks, judges, logs (synced to the disk) and
commits each to PostgreSQL. Beside it: a bare aiohttp loop that reads the bodies and keeps nothing, and a thread pool of
``requests`` in the style of the public scripts (parsed, appended to one file under a lock; no check, no sync). The
three take turns; ratios are medians over the turns. Then one long run of Aerie shows that memory stays flat.

The server is a process of its own. On two cores it shares them with the client and, for Aerie alone, with PostgreSQL.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests
from tests.generation.conftest import (
    DATASET,
    World,
    decode_without_tokenizer,
    ensure,
    make_settings,
    write_dataset,
    write_weights,
)
from tests.generation.fake_server import INFO

from aerie.artefacts.prompts import Prompt
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.generation import canary_show, stage
from aerie.local.postgres import Cluster, ensure_database
from aerie.ports import free_port
from aerie.settings.profile import load_profile
from aerie.stages import Events

VOCABULARY = 163_840
PROFILE = "kimi_k25"
TOKEN_IDS = load_profile(PROFILE).expected_ids
RESPONSE_TOKENS, PROMPT_TOKENS, SHORT_PROMPT_TOKENS = 1000, 400, 16
CONCURRENCY = 150
CANNED = 64  # different replies
LOADS = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0, "gen_throughput": 0.0}]}


# The server


def replies() -> list[tuple[bytes, bytes]]:
    """Bodies before and after the request's id and its prompt's token count."""
    dice = random.Random(0)  # noqa: S311
    made = []
    for _ in range(CANNED):
        ids = [dice.randrange(1, 160_000) for _ in range(RESPONSE_TOKENS)]
        ids[400], ids[-1] = TOKEN_IDS["</think>"], TOKEN_IDS["<|im_end|>"]
        text = "".join(dice.choice("abcdefghij klmnop qrstuv wxyz") for _ in range(4 * RESPONSE_TOKENS))
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]}, "completion_tokens": len(ids), "reasoning_tokens": 0,
            "cached_tokens": 0, "num_retractions": 0, "weight_version": "default", "e2e_latency": 0.123456,
        }  # fmt: skip
        head = f'{{"text":{json.dumps(text)},"output_ids":{json.dumps(ids, separators=(",", ":"))},"meta_info":{{"id":'
        made.append((head.encode(), ("," + json.dumps(meta)[1:-1] + "}}").encode()))
    return made


class AtOnce(asyncio.Protocol):
    """HTTP/1.1 with as little work as a reply can cost."""

    def __init__(self, canned: Sequence[tuple[bytes, bytes]], info: bytes) -> None:
        self._canned = canned
        self._info = info
        self._received = b""
        self._turn = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[: end + 4]
            at = head.lower().find(b"content-length:")
            size = int(head[at + 15 : head.index(b"\r\n", at)]) if at >= 0 else 0
            if len(self._received) < end + 4 + size:
                return
            body, self._received = self._received[end + 4 : end + 4 + size], self._received[end + 4 + size :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST"):
            rid = body[body.index(b'"rid"') + 5 :].split(b'"', 2)[1]
            ids = body[body.index(b'"input_ids"') :]
            prompt_tokens = ids[: ids.index(b"]")].count(b",") + 1
            before, after = self._canned[self._turn % CANNED]
            self._turn += 1
            body = b'%s"%s","prompt_tokens":%d%s' % (before, rid, prompt_tokens, after)
        else:
            body = json.dumps(LOADS).encode() if b"/v1/loads" in head else self._info
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )


async def serve(model_path: str) -> None:
    """Serve until killed; prints the port."""
    canned, info = replies(), json.dumps({**INFO, "model_path": model_path}).encode()
    server = await asyncio.get_running_loop().create_server(lambda: AtOnce(canned, info), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def served(model_path: Path) -> Iterator[str]:
    """URL of the server, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(model_path)], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


# The three clients


def make_prompts(count: int, tokens: int) -> list[Prompt]:
    """Prompts that open a reasoning block, as the profile's template does."""
    opening = [TOKEN_IDS["<|im_assistant|>"], TOKEN_IDS["<|im_middle|>"], TOKEN_IDS["<think>"]]
    return [
        Prompt(
            sample_id=f"sample-{number:08}", conversation_id=f"c{number}", turn=0, split="train",
            prompt_ids=[*range(1 + number % 500, 1 + number % 500 + tokens - len(opening)), *opening], tools=None,
            admission_rank=number, skip_reason=None,
        )
        for number in range(count)
    ]  # fmt: skip


def payloads(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """What the other two clients send: the same ids and the sampling parameters they know of."""
    sampling = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": 8192}
    return [
        {"rid": f"r:{prompt.sample_id}:1", "input_ids": prompt.prompt_ids, "sampling_params": sampling, "stream": False}
        for prompt in prompts
    ]


def run_bare(url: str, prompts: Sequence[Prompt]) -> float:
    """Responses a second of a bare aiohttp loop that reads each body and keeps nothing."""
    waiting = iter(payloads(prompts))

    async def worker(session: aiohttp.ClientSession) -> None:
        for payload in waiting:
            async with session.post(f"{url}/generate", json=payload) as response:
                await response.read()

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:
            await asyncio.gather(*(worker(session) for _ in range(CONCURRENCY)))

    began = time.perf_counter()
    asyncio.run(run())
    return len(prompts) / (time.perf_counter() - began)


def run_pool(url: str, prompts: Sequence[Prompt], output: Path) -> float:
    """Responses a second of a thread pool in the style of the public scripts."""
    lock = threading.Lock()
    with output.open("w") as file, ThreadPoolExecutor(CONCURRENCY) as pool:

        def ask(payload: dict[str, Any]) -> None:
            reply = requests.post(f"{url}/generate", json=payload, timeout=3600).json()
            with lock:
                file.write(json.dumps({"id": payload["rid"], "output_ids": reply["output_ids"]}) + "\n")
                file.flush()

        began = time.perf_counter()
        list(pool.map(ask, payloads(prompts)))
    return len(prompts) / (time.perf_counter() - began)


class Aerie:
    """The stage ``generate``, as it is, on data sets made for the occasion."""

    def __init__(self, root: Path, url: str, cluster: Cluster) -> None:
        self._root = root
        self._cluster = cluster
        self._runs = 0
        stage._ensure_server = ensure(url)
        canary_show.decode = decode_without_tokenizer

    def run(self, prompts: Sequence[Prompt]) -> float:
        """Responses a second of a run over these prompts, from the first request to the last commit."""
        self._runs += 1
        root = self._root / f"run-{self._runs}"
        os.environ["AERIE_DATABASE_URL"] = self._cluster.url(f"run_{self._runs}")
        ensure_database(os.environ["AERIE_DATABASE_URL"])
        world = World(root, os.environ["AERIE_DATABASE_URL"], None)
        write_weights(self._root / "verifier", b"weights")
        dataset = {"concurrency": CONCURRENCY, "max_new_tokens": 8192}
        settings = make_settings(self._root, dataset, {"progress_seconds": 10})
        verifier = settings.verifier.model_copy(update={"profile": PROFILE})
        serving = settings.serving.model_copy(update={"context_length": 16384})
        request = world.request().model_copy(
            update={"settings": settings.model_copy(update={"verifier": verifier, "serving": serving})}
        )
        files = request.files.dataset(DATASET)
        write_dataset(files, list(prompts))
        write_verifier_tokens(
            files.verifier_tokens,
            VerifierTokens(
                token_ids=TOKEN_IDS, vocabulary_size=VOCABULARY, eos_ids=(TOKEN_IDS["<|im_end|>"],),
                tokenizer_sha256="t", model_type="kimi_k25",
            ),
        )  # fmt: skip
        manifest = stage.generate(request, Events(root / "events.jsonl")).manifest
        assert manifest is not None and manifest.counts["kept"] == len(prompts), manifest
        shutil.rmtree(root)
        return len(prompts) / float(manifest.counts["seconds"])


@contextmanager
def sampled_memory(seconds: float) -> Iterator[list[float]]:
    """Resident memory of this process (MiB), sampled regularly."""
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(seconds):
            samples.append(psutil.Process().memory_info().rss / 2**20)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="MODEL_PATH", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=6000, help="of each client in each round")
    parser.add_argument("--memory-samples", type=int, default=200_000)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return
    samples = 1500 if arguments.quick else arguments.samples
    memory_samples = 10_000 if arguments.quick else arguments.memory_samples
    with tempfile.TemporaryDirectory(prefix="aerie-ceiling-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        cluster = Cluster(folder=root / "postgres", port=free_port(), password="for a benchmark")  # noqa: S106
        cluster.start()
        try:
            with served(root / "verifier") as url:
                print(json.dumps(measure(root, url, cluster, samples, memory_samples, arguments.rounds)))
        finally:
            cluster.stop()


def measure(root: Path, url: str, cluster: Cluster, samples: int, memory_samples: int, rounds: int) -> dict[str, Any]:
    """All figures: rates in responses a second, memory in MiB."""
    prompts, aerie = make_prompts(samples, PROMPT_TOKENS), Aerie(root, url, cluster)
    aerie.run(prompts[:500])
    clients: dict[str, Callable[[], float]] = {
        "aerie": lambda: aerie.run(prompts),
        "bare_aiohttp": lambda: run_bare(url, prompts),
        "thread_pool": lambda: run_pool(url, prompts[: samples // 4], root / "pool.jsonl"),
    }
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, run in clients.items():
            rates[name].append(run())
    pairs = {name: [a / b for a, b in zip(rates["aerie"], rates[name], strict=True)] for name in rates}
    figures: dict[str, Any] = {
        "benchmark": "driver_ceiling", "response_tokens": RESPONSE_TOKENS, "in_flight": CONCURRENCY,
        "samples": samples, "rounds": rounds, "cores": os.cpu_count(),
        "responses_per_second": {name: round(statistics.median(found)) for name, found in rates.items()},
        "of_bare_aiohttp": round(statistics.median(pairs["bare_aiohttp"]), 3),
        "times_thread_pool": round(statistics.median(pairs["thread_pool"]), 2),
    }  # fmt: skip
    if memory_samples:
        prompts = make_prompts(memory_samples, SHORT_PROMPT_TOKENS)
        with sampled_memory(max(1.0, memory_samples / 20_000)) as resident:
            aerie.run(prompts)
        figures["memory"] = {"samples": memory_samples, "resident_mib": [round(mib) for mib in resident]}
    return figures


if __name__ == "__main__":
    main()

"""Tokens a second of a whole capture, checked and written, over those of the bare forward pass; the goal is 0.9.

    AERIE_HOME=... PYTHONPATH=include OMP_NUM_THREADS=1 python benchmarks/capture_overhead.py [--backend transformers]

Runs in the model environment, with real servers of the serve environment for ``--backend sglang``, on a CPU. The
verifier is a Llama with random weights, of ``--hidden-size`` and 8 layers: the smaller it is, the more bytes of states
there are for each operation, and the harder the goal (at width 512 about 80 bytes per million operations; Kimi-K2.5 has
0.9). Bare is the same server without hooks, asked for the same rows by as many clients, or the same passes without
hooks. The start of a server, or of the model, is in neither. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import aiohttp
import numpy as np
import pyarrow as pa
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aerie.artefacts.corpus import CORPUS_SCHEMA, DATASET_FOLDER, CorpusRow, CorpusWriter, iterate_rows
from aerie.artefacts.files import atomic_folder, write_json
from aerie.hidden_states import backend_sglang
from aerie.hidden_states.backend_transformers import CHECKED_PASSES, Passes, equal_length_batches
from aerie.hidden_states.capturing import capture_rows
from aerie.hidden_states.decoder import load_decoder
from aerie.hidden_states.layers import resolve_layers
from aerie.serving import client, configured
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest

VOCABULARY_SIZE, DEPTH, CONTEXT = 1024, 8, 1024
SERVER_ARGUMENTS = ("--skip-tokenizer-init", "--enable-mixed-chunk")


def verifier(folder: Path, hidden_size: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=DEPTH,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def request_of(folder: Path, backend: str, hidden_size: int) -> StageRequest:
    document = {
        "name": "benchmark",
        "verifier": {"path": verifier(folder / "verifier", hidden_size), "profile": "demo", "dtype": "float32"},
        "serving": {
            "device": "cpu",
            "context_length": CONTEXT,
            "mem_fraction_static": 0.2,
            "max_total_tokens": 16_384,
            "start_timeout_seconds": 900,
            "extra_arguments": SERVER_ARGUMENTS,
        },
        "datasets": {"B1_glaive": {"source": {"reader": "any", "path": "x", "licence": "mit"}}},
        "corpus": {"maximum_length": 512},
        "vocabulary": {"size": 24},
        "hidden_states": {"backend": backend, "free_share": 0.0, "concurrency": 8},
        "training": {"epochs": 1, "sequence_length": 512},
        "publish": {"folder": folder / "published"},
    }
    return StageRequest(
        settings=PipelineSettings.model_validate(document),
        data_root=folder / "data",
        server_folder=folder / "server",
        edition="main",
        run_id="benchmark",
    )


def merge(request: StageRequest, rows: int) -> None:
    """A corpus of rows of 128 to 384 tokens, of five lengths."""
    random = np.random.default_rng(0)
    ids = [random.integers(2, VOCABULARY_SIZE, 128 + 64 * (row % 5), dtype=np.int32) for row in range(rows)]
    table = {
        "input_ids": ids,
        "loss_mask": [np.ones(len(row), np.int8) for row in ids],
        "seq_len": [len(row) for row in ids],
        "sample_id": [f"B1/{row}" for row in range(rows)],
        **{name: ["x"] * rows for name in ("conversation_id", "dataset", "source_revision", "edition", "licence")},
        "split": ["train"] * rows,
    }
    with atomic_folder(request.files.corpus / DATASET_FOLDER) as folder:
        writer = CorpusWriter(folder)
        writer.write_shard(pa.table(table, schema=CORPUS_SCHEMA))
        writer.close(fingerprint="f" * 64)


def corpus(request: StageRequest) -> Iterator[CorpusRow]:
    return iterate_rows(request.files.corpus / DATASET_FOLDER)


def captured(request: StageRequest, events: Events) -> float:
    """Tokens a second of capturing, with the back end already started, until every row is checked."""
    layers = resolve_layers(request.settings)
    total = sum(len(row.input_ids) for row in corpus(request))
    started = time.perf_counter()
    capture_rows(request, layers, events, lambda: corpus(request), count=sum(1 for _ in corpus(request)))
    return total / (time.perf_counter() - started)


def with_transformers(request: StageRequest, events: Events) -> tuple[float, float]:
    settings, layers = request.settings, resolve_layers(request.settings)
    decoder = load_decoder(settings, dtype=torch.float32, device="cpu")
    batches = list(equal_length_batches(list(corpus(request)), limit=settings.hidden_states.concurrency))

    def bare() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                decoder(torch.from_numpy(np.stack([row.input_ids for row in batch]).astype(np.int64)), use_cache=False)
        return sum(len(row.input_ids) for batch in batches for row in batch) / (time.perf_counter() - started)

    # The model is loaded once, before either is timed; the passes that are computed twice are of a capture's first
    # seconds, and left out of a rate.
    passes = Passes(settings, layers, events.progress)
    for batch in (batches * CHECKED_PASSES)[:CHECKED_PASSES]:
        passes.states(torch.from_numpy(np.stack([row.input_ids for row in batch]).astype(np.int64)))
    from aerie.hidden_states import backend_transformers

    backend_transformers.Passes = lambda *_: passes  # type: ignore[assignment, misc]
    before, whole, after = bare(), captured(request, events), bare()
    return (before + after) / 2, whole


def with_sglang(request: StageRequest, events: Events) -> tuple[float, float]:
    # Random weights without a tokenizer answer no question: the servers are not asked any.
    configured.probing_of = lambda *_: None  # type: ignore[assignment]
    settings, clients = request.settings, request.settings.hidden_states.concurrency
    rows = list(corpus(request))
    # Other tokens than those that are timed: a generating server keeps prefixes.
    warming = [replace(row, input_ids=row.input_ids[::-1]) for row in rows[:16]]
    try:
        handle = configured.ensure_configured(
            settings,
            configured.plan_configured(settings, "generate"),
            folder=request.server_folder,
            owner=request.run_id,
            events=events,
        )
        asyncio.run(ask(handle.url, warming, clients))
        bare = asyncio.run(ask(handle.url, rows, clients))
        client.stop(request.server_folder)
        write_json(request.files.manifest("forecast"), forecast_manifest(resolve_layers(settings).auxiliary))
        handle = backend_sglang.ensure_capture_server(request, events)
        asyncio.run(ask(handle.url, warming, clients))
        return bare, captured(request, events)
    finally:
        client.stop(request.server_folder)


def forecast_manifest(layers: tuple[int, ...]) -> dict[str, object]:
    """What a capture's launch reads of its forecast."""
    return {
        "schema": 1, "stage": "forecast", "edition": "main", "dataset": None, "fingerprint": "f", "inputs": [],
        "outputs": [], "counts": {"layers": list(layers)}, "finished_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip


async def ask(url: str, rows: list[CorpusRow], clients: int) -> float:
    """Tokens a second of prefilling rows, with so many requests in flight."""
    waiting, numbers = iter(rows), count()

    async def work(session: aiohttp.ClientSession) -> None:
        for row in waiting:
            body = {
                "input_ids": row.input_ids.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "rid": f"bare-{next(numbers)}-{time.time_ns()}",
            }
            async with session.post(f"{url}/generate", json=body) as answer:
                answer.raise_for_status()
                await answer.read()

    started = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work(session))
    return sum(len(row.input_ids) for row in rows) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["transformers", "sglang"], default="transformers")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--hidden-size", type=int, default=512)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        request = request_of(Path(folder), asked.backend, asked.hidden_size)
        merge(request, asked.rows)
        request.files.states.mkdir(parents=True)
        events = Events(Path(folder) / "events.jsonl")
        measure = with_transformers if asked.backend == "transformers" else with_sglang
        bare, whole = measure(request, events)
    print(
        json.dumps(
            {
                "backend": asked.backend,
                "hidden_size": asked.hidden_size,
                "rows": asked.rows,
                "bare_tokens_per_second": round(bare),
                "capture_tokens_per_second": round(whole),
                "share": round(whole / bare, 3),
            }
        )
    )


if __name__ == "__main__":
    main()

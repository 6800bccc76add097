"""Seconds from the start of ``generate`` to its first request, where earlier runs left 100,000 responses.

    PYTHONPATH=include .aerie/envs/airflow/bin/python benchmarks/resume.py [--rows 100000] [--folder /tmp/resume]

A data set of prompts of a few hundred ids and a response log of about 1,400 ids a row (heavy-tailed, as the reference
deployment measured) are made once, with the log's own writer; a throwaway PostgreSQL holds the ledger. The first start
finds that ledger empty and judges every row again. Then each start is a process of its own; the median counts. The
server's start does not count: the first request is where the clock stops, and nothing is sent. The files are in the
page cache, as they are on the host that has just written them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.manifest import write_manifest
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.response_log import Response, ResponseLog, log_files, prompt_sha256
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.errors import AerieError, Retryable
from aerie.generation import stage
from aerie.generation.client import GenerateClient
from aerie.generation.server import Server
from aerie.local.postgres import Cluster
from aerie.ports import free_port
from aerie.settings.pipeline import PipelineSettings
from aerie.settings.profile import load_profile
from aerie.stages import Events, StageRequest
from aerie.store.connection import connected
from aerie.store.queries.ledger import count_ledger

DATASET = "B1_glaive"
STARTS = 5
PENDING = 1_000
ROWS_A_SYNC = 256
MEAN_TOKENS, MEDIAN_TOKENS, CAP = 1_416, 646, 16_384
PROFILE = load_profile("kimi_k25")
IDS = PROFILE.expected_ids


class Seconds(NamedTuple):
    """How long a start took; ``cpu`` is of its main thread, which other load on the machine disturbs less."""

    wall: float
    cpu: float


def make_prompts(count: int) -> Iterator[Prompt]:
    """Prompts of 50 to 650 ids."""
    numbers = np.random.default_rng(1)
    for number in range(count):
        ids = text(numbers, 50 + int(numbers.integers(600)))
        yield Prompt(
            sample_id=f"glaive-{number:08d}-{number * 2654435761 % 2**32:08x}",
            conversation_id=f"c{number}",
            turn=0,
            split="train",
            prompt_ids=[IDS["<|im_user|>"], *ids, IDS["<|im_middle|>"], IDS["<think>"]],
            tools=None,
            admission_rank=number,
            skip_reason=None,
        )


def text(numbers: np.random.Generator, count: int) -> list[int]:
    """Ids with as many digits as those of real text have."""
    ids: list[int] = (numbers.lognormal(8.0, 2.2, count).astype(np.int64) % 160_000).tolist()
    return ids


def make_response(prompt: Prompt, numbers: np.random.Generator) -> Response:
    """A well-formed response of a heavy-tailed length."""
    sigma = float(np.sqrt(2 * np.log(MEAN_TOKENS / MEDIAN_TOKENS)))
    length = min(CAP, 8 + int(MEDIAN_TOKENS * numbers.lognormal(0.0, sigma)))
    ids = text(numbers, length)
    ids[length // 2], ids[-1] = IDS["</think>"], IDS["<|im_end|>"]
    finish = {"type": "stop", "matched": IDS["<|im_end|>"]}
    return Response(
        sample_id=prompt.sample_id,
        attempt=1,
        prompt_sha256=prompt_sha256(prompt.prompt_ids),
        prompt_tokens=len(prompt.prompt_ids),
        completion_tokens=length,
        max_new_tokens=CAP,
        finish_reason=finish,
        launch_token="0123456789abcdef",  # noqa: S106
        meta_info={
            "id": f"main/{DATASET}:run:{prompt.sample_id}:1",
            "finish_reason": finish,
            "prompt_tokens": len(prompt.prompt_ids),
            "completion_tokens": length,
            "weight_version": "default",
            "total_retractions": 0,
            "cached_tokens": 3,
            "e2e_latency": 38.1,
            "response_sent_to_client_ts": 1764450000.5,
        },
        output_ids=tuple(ids),
    )


def make_request(folder: Path) -> StageRequest:
    """The request of every start; it asks for all prompts."""
    settings = PipelineSettings.model_validate(
        {
            "name": "benchmark",
            "verifier": {"path": folder / "verifier", "profile": PROFILE.name},
            "serving": {"context_length": 32_768},
            "datasets": {
                DATASET: {
                    "source": {"reader": "glaive", "path": folder / "source.jsonl", "licence": "apache-2.0"},
                    "budget_tokens": 0,
                    "max_new_tokens": CAP,
                }
            },
            "corpus": {"maximum_length": 32_768},
            "vocabulary": {"size": 32_000},
            "training": {"epochs": 1, "sequence_length": 32_768},
            "publish": {"folder": folder / "published"},
        }
    )
    return StageRequest(
        settings=settings,
        data_root=folder,
        server_folder=folder / "server",
        edition="main",
        dataset=DATASET,
        run_id="benchmark",
    )


def make_dataset(files: DatasetFiles, folder: Path, rows: int) -> None:
    """Everything that earlier stages and runs leave, but for the ledger."""
    verifier = folder / "verifier"
    verifier.mkdir(parents=True)
    (verifier / "model.safetensors").write_bytes(b"weights")
    write_verifier_tokens(
        files.verifier_tokens,
        VerifierTokens(
            token_ids=IDS,
            vocabulary_size=PROFILE.vocabulary_size,
            eos_ids=(IDS["<|im_end|>"],),
            tokenizer_sha256="t",
            model_type="kimi_k25",
        ),
    )
    prompts = list(make_prompts(rows + PENDING))
    write_prompts(files.prompts, prompts)
    write_manifest(
        files.manifest("prepare"),
        stage="prepare",
        edition="main",
        dataset=DATASET,
        fingerprint="p",
        inputs=(),
        outputs=(),
        counts={},
    )
    numbers = np.random.default_rng(2)
    with ResponseLog(files.responses) as log:
        for number, chosen in enumerate(numbers.permutation(rows)):  # the worst order
            log.append(make_response(prompts[chosen], numbers))
            if number % ROWS_A_SYNC == 0:
                log.sync()


def bind_log(request: StageRequest, files: DatasetFiles) -> None:
    """What the first run of the edition would have written beside the log."""
    job = stage.Job.of(request, Events(files.folder / "events.jsonl"))
    (files.folder / "generation.json").write_text(job.generation.model_dump_json())
    files.canary_previews.touch()


def start_once(folder: Path) -> Seconds:
    """Calls ``generate`` up to its first request, which is not sent."""
    sent: list[Seconds] = []

    async def send(*_: object) -> None:
        sent.append(Seconds(time.perf_counter() - started, time.thread_time() - started_cpu))
        raise Retryable("the benchmark ends here")

    async def accept(*_: object) -> None:
        return

    stage._ensure_server = lambda *_: Server("http://127.0.0.1:9", "launch", lambda: None)  # type: ignore[assignment]
    stage._check_server = accept  # type: ignore[assignment]
    GenerateClient.generate = send  # type: ignore[assignment,method-assign]
    request = make_request(folder)
    started, started_cpu = time.perf_counter(), time.thread_time()
    try:
        stage.generate(request, Events(folder / "events.jsonl"))
    except AerieError as error:
        if not sent:
            raise SystemExit(f"generate did not come to its first request: {error}") from error
    return sent[0]


def start_process(folder: Path, url: str) -> Seconds:
    """``start_once`` in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--start-once"]
    done = subprocess.run(
        command, env={**os.environ, "AERIE_DATABASE_URL": url}, stdout=subprocess.PIPE, text=True, check=True
    )
    return Seconds(*json.loads(done.stdout))


def measure(folder: Path, rows: int) -> dict[str, object]:
    """Make what is not there yet, and start again and again."""
    request = make_request(folder)
    files = request.files.dataset(DATASET)
    if not files.prompts.exists():
        make_dataset(files, folder, rows)
        bind_log(request, files)
    with tempfile.TemporaryDirectory(prefix="aerie-benchmark-") as temporary:
        cluster = Cluster(folder=Path(temporary), port=free_port(), password="benchmark")  # noqa: S106
        cluster.start()
        try:
            url = cluster.url("postgres")
            rebuilt = start_process(folder, url)
            times = [start_process(folder, url) for _ in range(STARTS)]
            for index in files.folder.glob("*.index.json.gz"):
                index.unlink()
            unindexed = start_process(folder, url)
            with connected(url) as connection:
                counts = count_ledger(connection, edition="main", dataset=DATASET)
        finally:
            cluster.stop()
    paths = log_files(files.responses)
    return {
        "benchmark": "resume",
        "rows": counts.kept + counts.quarantined,
        "response_tokens": counts.judged_tokens,
        "log_files": len(paths),
        "log_bytes": sum(path.stat().st_size for path in paths),
        "live_file_bytes": files.responses.stat().st_size,
        "seconds": round(statistics.median(one.wall for one in times), 2),
        "cpu_seconds": round(statistics.median(one.cpu for one in times), 2),
        "seconds_each": [round(one.wall, 2) for one in times],
        "seconds_without_index": round(unindexed.wall, 2),
        "seconds_with_lost_ledger": round(rebuilt.wall, 2),
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="keep the data set here and use it again")
    parser.add_argument("--start-once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start_once:
        print(json.dumps(start_once(arguments.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="aerie-benchmark-") as temporary:
        print(json.dumps(measure(arguments.folder or Path(temporary), arguments.rows)))


if __name__ == "__main__":
    main()

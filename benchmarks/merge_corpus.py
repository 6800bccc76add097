"""Tokens per second of stage ``merge``, beside Hugging Face's shuffle of the same rows, and the memory of both.

    PYTHONPATH=include OMP_NUM_THREADS=1 python -m benchmarks.merge_corpus [--millions 10 100]   (model environment)

Four data sets of rows of about 1,000 tokens each (log-normal, at most 8,192), a fifth of them prompt, ids as rare as
those of text in a vocabulary of 163,840. Ours is the whole stage: hashes of its inputs, checks, deduplication, shuffle,
frequencies, statistics, report, hashes of its outputs and manifest, all synced to the disk. Theirs is
``concatenate_datasets(...).shuffle(seed).flatten_indices().save_to_disk(...)`` with two lists of int64 a row, which is
what ``speculators prepare-data`` saves, synced as well. Each runs in a process of its own, for several rounds in turn;
the fastest round counts. Memory is the most that the process held: ``peak`` with the pages of mapped files, which the
kernel takes back when it needs them, ``peak_anonymous`` without. ``disk`` is how fast a file is written one block after
the other and synced. Prints one JSON line a size.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from aerie.artefacts.manifest import describe_output, write_manifest
from aerie.artefacts.parquet import ROWS_PER_GROUP
from aerie.artefacts.samples import SAMPLE_SCHEMA
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PipelineSettings, load_settings
from aerie.stages import Events, StageRequest

DATASETS = ("B1_glaive", "B2_opencodeinstruct", "B3_magicoder", "B4_mixturethoughts")
VOCABULARY, MEAN_TOKENS, LONGEST, SEED = 163_840, 1000, 8192, 7
DISK_BYTES, BLOCK_BYTES = 2 << 30, 8 << 20
THEIR_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())]
    + [(name, pa.string()) for name in ("sample_id", "conversation_id", "dataset", "split")]
)


def settings() -> PipelineSettings:
    """The demo's settings, with our data sets."""
    demo = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    one = next(dataset for dataset in demo.datasets.values() if dataset.kind == "generated")
    corpus = demo.corpus.model_copy(update={"maximum_length": LONGEST})
    return demo.model_copy(update={"datasets": dict.fromkeys(DATASETS, one), "corpus": corpus})


def request(folder: Path) -> StageRequest:
    return StageRequest(
        settings=settings(), data_root=folder, server_folder=folder, edition="main", run_id="benchmark", force=True
    )


def batches(dataset: str, tokens: int) -> Iterator[pa.RecordBatch]:
    """Samples of one data set, of about ``tokens`` tokens in all."""
    random = np.random.default_rng(DATASETS.index(dataset))
    ids = random.permutation(VOCABULARY).astype(np.int32)
    first = 0
    while tokens > 0:
        lengths = np.clip(random.lognormal(np.log(MEAN_TOKENS) - 0.245, 0.7, ROWS_PER_GROUP), 16, LONGEST).astype(int)
        prompts = lengths // 5
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = len(lengths)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        mask = (places >= np.repeat(prompts, lengths)).astype(np.int8)
        values = ids[np.exp(random.random(offsets[-1]) * np.log(VOCABULARY)).astype(np.int32)]  # Zipf's law
        names = [f"{dataset}-{first + row:09d}" for row in range(rows)]
        columns: dict[str, Any] = {
            "sample_id": names,
            "conversation_id": names,
            "dataset": [dataset] * rows,
            "split": ["validation" if row % 20 == 0 else "train" for row in range(rows)],
            "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "loss_mask": pa.ListArray.from_arrays(pa.array(offsets), pa.array(mask)),
            "prompt_tokens": prompts,
            "response_tokens": lengths - prompts,
            "reasoning_tokens": prompts * 2,
            "flags": [[] for _ in range(rows)],
            "source_revision": ["r1"] * rows,
            "edition": ["main"] * rows,
            "licence": ["apache-2.0"] * rows,
        }
        yield pa.RecordBatch.from_arrays(
            [pa.array(columns[field.name], field.type) for field in SAMPLE_SCHEMA], schema=SAMPLE_SCHEMA
        )
        first, tokens = first + rows, tokens - int(offsets[-1])


def make(folder: Path, tokens: int) -> int:
    """Write the data sets as ``validate`` leaves them, and as Hugging Face maps them; return their tokens."""
    made = 0
    for dataset in DATASETS:
        files = request(folder).files.dataset(dataset)
        files.folder.mkdir(parents=True)
        with (
            pq.ParquetWriter(files.samples, SAMPLE_SCHEMA, compression="zstd") as ours,
            pa.ipc.new_stream(str(folder / f"{dataset}.arrow"), THEIR_SCHEMA) as theirs,
        ):
            for batch in batches(dataset, tokens // len(DATASETS)):
                ours.write_batch(batch)
                lengths = batch.column("input_ids").value_lengths()
                arrays = [lengths if field.name == "seq_len" else batch.column(field.name) for field in THEIR_SCHEMA]
                cast = [array.cast(field.type) for array, field in zip(arrays, THEIR_SCHEMA, strict=True)]
                theirs.write_batch(pa.RecordBatch.from_arrays(cast, schema=THEIR_SCHEMA))
                made += len(batch.column("input_ids").values)
        verifier = VerifierTokens(
            token_ids={}, vocabulary_size=VOCABULARY, eos_ids=(0,), tokenizer_sha256="0" * 64, model_type="llama"
        )
        write_verifier_tokens(files.verifier_tokens, verifier)
        write_manifest(
            files.manifest("validate"), stage="validate", edition="main", dataset=dataset, fingerprint="f", inputs=[],
            outputs=[describe_output(files.samples)], counts={},
        )  # fmt: skip
    os.sync()
    return made


def ours(folder: Path) -> None:
    from aerie.corpus.stage import merge

    merge(request(folder), Events(folder / "events.jsonl"))


def theirs(folder: Path) -> None:
    from datasets import Dataset, concatenate_datasets, disable_caching, disable_progress_bars

    disable_progress_bars()
    disable_caching()  # what an earlier round flattened would be taken as it is
    parts = [Dataset.from_file(str(folder / f"{dataset}.arrow")) for dataset in DATASETS]
    target = folder / "theirs"
    concatenate_datasets(parts).shuffle(seed=SEED).flatten_indices().save_to_disk(str(target))
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def timed(name: str, folder: Path) -> None:
    """Run one side, imports not counted, and print its seconds and memory."""
    import datasets  # noqa: F401 - both sides need it, and its import takes seconds
    import torch  # noqa: F401

    import aerie.corpus.stage  # noqa: F401

    began = time.monotonic()
    cpu = time.process_time()
    {"ours": ours, "theirs": theirs}[name](folder)
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "cpu_seconds": time.process_time() - cpu,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )


def in_its_own_process(name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.merge_corpus", "--side", name, "--folder", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT_ROOT)
    anonymous = 0
    while process.poll() is None:
        try:
            memory = psutil.Process(process.pid).memory_info()
            anonymous = max(anonymous, memory.rss - memory.shared)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{name} failed: {output}")
    return {**json.loads(output.splitlines()[-1]), "peak_anonymous_mib": anonymous >> 20}


def disk_bytes_per_second(folder: Path) -> float:
    """How fast a file is written one block after the other, with its sync."""
    block, path = os.urandom(BLOCK_BYTES), folder / "block"
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(DISK_BYTES // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return DISK_BYTES / seconds


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.arrow"))


def compare(millions: int, rounds: int, parent: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        tokens = make(folder, millions * 1_000_000)
        results: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        for _ in range(rounds):
            for side, measured in results.items():
                measured.append(in_its_own_process(side, folder))
                os.sync()
        disk = disk_bytes_per_second(folder)
        written = {"ours": size_of(request(folder).files.corpus), "theirs": size_of(folder / "theirs")}
    report: dict[str, Any] = {"benchmark": "merge_corpus", "tokens": tokens, "disk_mb_per_second": round(disk / 1e6)}
    for side, measured in results.items():
        best = min(measured, key=lambda one: one["seconds"])
        report[side] = {
            "tokens_per_second": round(tokens / best["seconds"]),
            "seconds": [round(one["seconds"], 2) for one in measured],
            "cpu_seconds": round(best["cpu_seconds"], 2),
            "peak_mib": max(one["peak_mib"] for one in measured),
            "peak_anonymous_mib": max(one["peak_anonymous_mib"] for one in measured),
            "written_mb": round(written[side] / 1e6),
            "written_mb_per_second": round(written[side] / best["seconds"] / 1e6),
        }
    report["times_faster"] = round(report["ours"]["tokens_per_second"] / report["theirs"]["tokens_per_second"], 2)
    report["share_of_disk_speed"] = round(written["ours"] / disk / min(results["ours"], key=_seconds)["seconds"], 2)
    return report


def _seconds(measured: dict[str, Any]) -> float:
    return float(measured["seconds"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON line a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 100], help="tokens, in millions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the data goes")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.side:
        timed(asked.side, asked.folder)
        return
    for millions in asked.millions:
        print(json.dumps(compare(millions, asked.rounds, asked.folder)), flush=True)


if __name__ == "__main__":
    main()

"""Tokens per second of the judge on one core, by itself and over files, and its memory over a file of any size.

    PYTHONPATH=include OMP_NUM_THREADS=1 python benchmarks/boundary_judge.py [--megabytes 1024]

Rows of 2,000 tokens, loop detection on, no text rules; the goal is 5 million tokens/s. Tokens are those of the
responses: the 500 of each prompt are read too, and not counted. Times are of this process's CPU, the best of several
rounds, so that other load does not count. Prints one JSON line; memory is the most that a process of its own held after
the first tenth of a file and at its end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from aerie.boundary import judge
from aerie.boundary.files import FileJudge, FileVerdict
from aerie.boundary.grammar import grammar_of_profile
from aerie.boundary.judge import TokenIds
from aerie.settings.profile import load_profile

PROFILE = "kimi_k25"
ROWS, ROUNDS, GOAL = 500, 7, 5_000_000
OPEN, CLOSE, END = 163_606, 163_607, 163_586
TOOLS = (163_595, 163_597, 31, 163_598, 32, 163_599, 163_596)
PROMPT = np.array([163_587, *range(500), 163_601, OPEN])


def rows() -> list[np.ndarray]:
    """Responses with reasoning, an answer, a tool call and an end; token frequencies fall as those of text do."""
    random = np.random.default_rng(0)
    ids = random.permutation(163_000)  # the most frequent tokens of a vocabulary are not its first
    made = []
    for _ in range(ROWS):
        text = ids[np.minimum(random.zipf(1.3, 1990), ids.size) - 1]
        made.append(np.concatenate([text[:1500], [CLOSE], text[1500:], TOOLS, [END]]).astype(np.int64))
    return made


def documents(made: list[np.ndarray]) -> Iterator[dict[str, object]]:
    for number, row in enumerate(made):
        yield {
            "id": f"row {number}", "prompt_ids": PROMPT.tolist(), "output_ids": row.tolist(),
            "finish_reason": {"type": "stop", "matched": END}, "completion_tokens": len(row), "max_new_tokens": 8192,
        }  # fmt: skip


def best_rate(tokens: int, work: Callable[[], None]) -> float:
    """Tokens per second of CPU, the best of several rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        best = max(best, tokens / (time.process_time() - started))
    return round(best)


def judge_all(outputs: list[TokenIds]) -> None:
    grammar = grammar_of_profile(load_profile(PROFILE))
    for output in outputs:
        verdict = judge(
            PROMPT, output, grammar=grammar, finish_reason="stop", completion_tokens=len(output), max_new_tokens=8192
        )
        if not verdict.kept:
            raise SystemExit(f"a row of the benchmark is not well formed: {verdict.reasons}")


def judge_files(path: Path) -> None:
    for verdict in FileJudge.of(PROFILE).judge(path):
        if not (isinstance(verdict, FileVerdict) and verdict.kept):
            raise SystemExit(f"a row of the benchmark is not well formed: {verdict}")


def write_jsonl(path: Path, made: list[np.ndarray], *, least_bytes: int = 0) -> int:
    """Write the rows, over and over up to a size; returns how many."""
    lines = [json.dumps(row).encode() + b"\n" for row in documents(made)]
    written = size = 0
    with path.open("wb") as file:
        while not written or size < least_bytes:
            for line in lines:
                size += file.write(line)
            written += len(lines)
    return written


def write_parquet(path: Path, made: list[np.ndarray], *, times: int = 1) -> None:
    table = pa.Table.from_pylist(list(documents(made)))
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(times):
            writer.write_table(table)


def memory_over(path: Path, rows_in_all: int) -> tuple[int, int]:
    """Run in a process of its own: resident bytes after a tenth of the rows, and the most at the end."""
    process = psutil.Process()
    early = latest = 0
    for number, _ in enumerate(FileJudge.of(PROFILE).judge(path)):
        if number == rows_in_all // 10:
            early = process.memory_info().rss
        elif number % 1000 == 0:
            latest = max(latest, process.memory_info().rss)
    return early, max(latest, process.memory_info().rss)


def measure_memory(path: Path, rows_in_all: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory-over", str(path), str(rows_in_all)]
    started = time.perf_counter()
    early, most = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {
        "file_mebibytes": path.stat().st_size >> 20, "rows": rows_in_all,
        "resident_mebibytes_at_a_tenth": early >> 20, "resident_mebibytes_at_most": most >> 20,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the file that memory is measured over")
    parser.add_argument("--memory-over", nargs=2)
    arguments = parser.parse_args()
    if arguments.memory_over:
        print(json.dumps(memory_over(Path(arguments.memory_over[0]), int(arguments.memory_over[1]))))
        return
    made = rows()
    tokens = sum(map(len, made))
    forms = {
        "judge_int64_arrays": made,
        "judge_int32_arrays": [row.astype(np.int32) for row in made],
        "judge_lists": [row.tolist() for row in made],
    }
    result: dict[str, object] = {"tokens_a_row": tokens // ROWS, "goal": GOAL}
    for name, outputs in forms.items():
        result[name] = best_rate(tokens, lambda outputs=outputs: judge_all(outputs))
    with tempfile.TemporaryDirectory() as folder:
        jsonl, parquet = Path(folder, "rows.jsonl"), Path(folder, "rows.parquet")
        write_jsonl(jsonl, made)
        write_parquet(parquet, made)
        result["file_jsonl"] = best_rate(tokens, lambda: judge_files(jsonl))
        result["file_parquet"] = best_rate(tokens, lambda: judge_files(parquet))
        if arguments.megabytes:
            written = write_jsonl(jsonl, made, least_bytes=arguments.megabytes << 20)
            result["memory_jsonl"] = measure_memory(jsonl, written)
            jsonl.unlink()
            write_parquet(parquet, made, times=written // ROWS)
            result["memory_parquet"] = measure_memory(parquet, written)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

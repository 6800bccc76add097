"""Prompts per second of stage ``prepare``, beside plain ``apply_chat_template`` in a loop on the same conversations.

    PYTHONPATH=include python benchmarks/prepare_prompts.py [--prompts 100000] [--workers 2]   (model environment)

Conversations have one to five turns of the user and about 600 characters each; the tokenizer and template are the demo
verifier's. CPU seconds count, of all processes, because they do not depend on what else the machine does; wall time is
stated beside them. ``prepare`` reads, chooses, deduplicates, renders, checks and writes; the loop renders
the same prompts from memory and keeps only their number, so that it has the easier part.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aerie.prompts import stage as prepare_stage
from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.preparing import candidates_of
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PipelineSettings, load_settings
from aerie.sources.readers import reader_of
from aerie.sources.rows import iterate_source
from aerie.stages import Events, StageRequest

KEY = "B6_ultrachat"
TEXT = """
the sum of two numbers is what you get when they are added so please explain each step of your work and then write a
short function in python that does it for a list of any length with tests for the empty list
"""


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Rows in UltraChat's shape, each another."""
    drawn, words = random.Random(0), TEXT.split()  # noqa: S311
    for number in range(count):
        turns = 2 * drawn.randint(1, 5)
        messages = [
            {
                "role": ("user", "assistant")[turn % 2],
                "content": f"{number}.{turn} " + " ".join(drawn.choices(words, k=drawn.randint(10, 40))),
            }
            for turn in range(turns)
        ]
        yield {"prompt_id": f"p{number}", "messages": messages}


def settings_for(path: Path) -> PipelineSettings:
    """The demo's settings, with one data set: ours."""
    demo = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    source = demo.datasets[KEY].source.model_copy(update={"path": path})
    return demo.model_copy(update={"datasets": {KEY: demo.datasets[KEY].model_copy(update={"source": source})}})


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def prepare(settings: PipelineSettings, folder: Path, workers: int) -> tuple[float, float]:
    """Wall and CPU seconds that the whole stage takes."""
    prepare_stage.processors = lambda: workers
    request = StageRequest(
        settings=settings,
        data_root=folder / f"data-{workers}",
        server_folder=folder,
        edition="main",
        dataset=KEY,
        run_id="benchmark",
    )
    started, cpu = time.monotonic(), cpu_seconds()
    prepare_stage.prepare(request, Events(folder / "events.jsonl"))
    return time.monotonic() - started, cpu_seconds() - cpu


def plain_loop(settings: PipelineSettings, count: int) -> float:
    """CPU seconds that rendering ``count`` of the same prompts takes in a loop."""
    source = settings.datasets[KEY].source
    verifier, reader = load_verifier(settings.verifier), reader_of(source)
    rows = [row for row, _ in zip(iterate_source(source), range(count), strict=False)]
    histories = [
        list(candidate.history)
        for row in rows
        for candidate in candidates_of(reader(row.value), row.where, turns="one", seed=settings.seed)
    ]
    cpu = cpu_seconds()
    for history in histories:
        verifier.tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=True, **verifier.switches)
    return cpu_seconds() - cpu


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=prepare_stage.processors())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rows.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in conversations(arguments.prompts))
        settings = settings_for(path)
        sample = min(arguments.prompts, 5000)
        loop = plain_loop(settings, sample)
        seconds, cpu = prepare(settings, folder, arguments.workers)
    used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        json.dumps(
            {
                "benchmark": "prepare_prompts",
                "prompts": arguments.prompts,
                "workers": arguments.workers,
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu, 1),
                "prompts_per_cpu_second": round(arguments.prompts / cpu),
                "plain_loop_prompts_per_cpu_second": round(sample / loop),
                "peak_mib_of_one_process": round(max(used) / 1024),
            }
        )
    )


if __name__ == "__main__":
    main()

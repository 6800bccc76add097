"""Tokens a second through Aerie's driver over those of SGLang's own serving benchmark, on one real server.

    PYTHONPATH=include:. OMP_NUM_THREADS=1 .aerie/envs/airflow/bin/python benchmarks/driver_efficiency.py [--quick]

Both ask the same SGLang (on the CPU, with the demo's verifier) for the same prompt ids, in the same order, with the
same sampling parameters (greedy, so that both get the same tokens), non-streaming, with the prefix cache flushed
before each run. Aerie runs its whole stage: checks, verdicts, a synced log, PostgreSQL, progress. The other side is
``python -m sglang.benchmark.serving --backend sglang --disable-stream`` itself; only its data set is replaced, since
none of those it reads holds token ids. The two take turns; each ratio is the median over the turns.

Server, client and PostgreSQL share the machine's cores: a client that computes more leaves the server less, so that on
two cores the ratio is a lower bound of what a machine with a GPU shows.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from tests.generation.real import RealWorld

from aerie.artefacts.prompts import Prompt, read_prompts
from aerie.generation.stage import generate
from aerie.local.postgres import Cluster, ensure_database
from aerie.ports import free_port
from aerie.serving import client as serving
from aerie.serving.lease import read_lease
from aerie.serving.sampling import sampling_parameters
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.settings.pipeline import CanarySettings
from aerie.settings.profile import Sampling
from aerie.stages import Events

MAX_NEW_TOKENS = 200
REQUESTS = {1: 12, 16: 96, 64: 140}
"""Requests of one turn, by how many are in flight."""

GREEDY = Sampling(temperature=0.0, top_p=1.0)

# Runs in the server's environment.
SERVING_BENCHMARK = """
import json, sys, types
import sgl_kernel_cpu.launch_server  # its operators let torchvision be imported beside a torch for CPUs
try:
    import datasets
except ImportError:  # only readers of data sets that are not read here need it
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None
from sglang.benchmark import serving
from sglang.benchmark.datasets.common import DatasetRow
rows = [DatasetRow(prompt=r["input_ids"], prompt_len=len(r["input_ids"]), output_len=r["max_new_tokens"],
                   extra_request_body={"sampling_params": r["sampling_params"]})
        for r in json.load(open(sys.argv.pop(1)))]
serving.get_dataset = lambda args, tokenizer, model_id=None: rows
serving.cli_main()
"""


class Turns:
    """Runs either side on the same server."""

    def __init__(self, world: RealWorld, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._turn = 0
        self.tokens: dict[str, list[int]] = {"aerie": [], "sglang": []}

    def aerie(self, in_flight: int, prompts: int) -> float:
        """Tokens a second of the stage ``generate`` over so many prompts after the first; the canary is the first."""
        self._turn += 1
        os.environ["AERIE_DATABASE_URL"] = self._cluster.url(f"turn_{self._turn}")
        ensure_database(os.environ["AERIE_DATABASE_URL"])
        root = self._world.root / f"turn-{self._turn}"
        shutil.copytree(self._world.root / "editions", root / "editions")
        canary = self._generate(root, max_prompts=1, concurrency=in_flight)
        self._flush()
        whole = self._generate(root, max_prompts=1 + prompts, concurrency=in_flight)
        tokens = int(whole["generated_tokens"] - canary["generated_tokens"])
        self.tokens["aerie"].append(tokens)
        return tokens / float(whole["seconds"])

    def _generate(self, root: Path, **changes: Any) -> Mapping[str, Any]:
        """Counts of the stage over a data set of which nothing is asked but that it be generated."""
        canary = CanarySettings(prompts=1, maximum_corrupt_share=1.0)
        request = self._world.request(max_new_tokens=MAX_NEW_TOKENS, canary=canary, **changes)
        settings = request.settings.model_copy(update={"sampling": GREEDY})
        asked = request.model_copy(update={"settings": settings, "data_root": root})
        manifest = generate(asked, Events(root / "events.jsonl")).manifest
        assert manifest is not None
        return manifest.counts

    def sglang(self, in_flight: int, prompts: Sequence[Prompt], sampling: dict[str, Any]) -> float:
        """Tokens a second that SGLang's serving benchmark reports for the same requests."""
        folder = self._world.root
        given, output = folder / "requests.json", folder / "serving.jsonl"
        asked = {"sampling_params": {**sampling, "max_new_tokens": MAX_NEW_TOKENS}, "max_new_tokens": MAX_NEW_TOKENS}
        given.write_text(json.dumps([{"input_ids": list(prompt.prompt_ids), **asked} for prompt in prompts]))
        output.unlink(missing_ok=True)
        self._flush()
        done = subprocess.run(
            [
                str(python_of("serve")), "-c", SERVING_BENCHMARK, str(given), "--backend", "sglang", "--disable-stream",
                "--model", str(self._world.request().settings.verifier.path), "--base-url", self._url(),
                "--max-concurrency", str(in_flight), "--num-prompts", str(len(prompts)),
                "--dataset-name", "random-ids", "--disable-tqdm", "--warmup-requests", "0", "--output-file",
                str(output), "--flush-cache",
            ],
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT_ROOT / "include")
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        report = json.loads(output.read_text().splitlines()[-1])
        assert report["completed"] == len(prompts), report
        self.tokens["sglang"].append(int(report["total_output_tokens"]))
        return float(report["output_throughput"])

    def _url(self) -> str:
        lease = read_lease(self._world.root / "server")
        assert lease is not None
        return lease.url

    def _flush(self) -> None:
        if read_lease(self._world.root / "server") is not None:
            requests.post(f"{self._url()}/flush_cache", timeout=60).raise_for_status()


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn, fewer requests")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aerie-efficiency-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        cluster = Cluster(folder=root / "postgres", port=free_port(), password="for a benchmark")  # noqa: S106
        cluster.start()
        world = RealWorld(root, "")
        try:
            world.finish(world.start("prepare"))
            figures = measure(Turns(world, cluster), world, 1 if arguments.quick else arguments.rounds, arguments.quick)
        finally:
            serving.stop(root / "server")
            cluster.stop()
    sys.stdout.write(json.dumps(figures) + "\n")


def measure(turns: Turns, world: RealWorld, rounds: int, quick: bool) -> dict[str, Any]:
    """All figures: rates in response tokens a second."""
    eligible = [prompt for prompt in read_prompts(world.files.prompts) if prompt.split != "benchmark"]
    eligible = sorted((p for p in eligible if p.skip_reason is None), key=lambda prompt: prompt.admission_rank)
    verifier = world.request().settings.verifier.load_profile()
    tokens = json.loads(world.files.verifier_tokens.read_text())["token_ids"]
    sampling = sampling_parameters(GREEDY, stop_token_ids=[tokens[name] for name in verifier.end_of_turn])
    turns.aerie(16, 16)  # starts the server, and warms it up
    found: dict[str, Any] = {}
    for in_flight, asked in REQUESTS.items():
        count = min(asked // 4 if quick else asked, len(eligible) - 1)
        rates: dict[str, list[float]] = {"aerie": [], "sglang": []}
        for _ in range(rounds):
            rates["aerie"].append(turns.aerie(in_flight, count))
            rates["sglang"].append(turns.sglang(in_flight, eligible[1 : 1 + count], sampling))
        ratios = [a / b for a, b in zip(rates["aerie"], rates["sglang"], strict=True)]
        found[str(in_flight)] = {
            "requests": count, "tokens": {side: turns.tokens[side][-1] for side in rates},
            "tokens_per_second": {side: round(statistics.median(rate), 1) for side, rate in rates.items()},
            "ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
        }  # fmt: skip
    return {"benchmark": "driver_efficiency", "rounds": rounds, "cores": os.cpu_count(), "in_flight": found}


if __name__ == "__main__":
    main()

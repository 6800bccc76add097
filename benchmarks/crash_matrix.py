"""Fifty kills of the generator, kills of the server and its scheduler, and a database that is away for 20 seconds.

    PYTHONPATH=include:. OMP_NUM_THREADS=1 .aerie/envs/airflow/bin/python benchmarks/crash_matrix.py [--kills 50]

Real processes on one long-lived SGLang (on the CPU, with the demo's verifier) and one PostgreSQL. A data set that is
complete is begun again from nothing, so that every kill falls under load. After each kill what the ledger counts is
in the log; after each data set every prompt is in one state, log and ledger have the same tokens, and no sample was
generated twice. The first violation ends it with a traceback; else it prints one JSON line.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.generation.real import RealWorld

from aerie.artefacts.prompts import iterate_prompts
from aerie.artefacts.response_log import iterate_responses
from aerie.local.postgres import Cluster, ensure_database
from aerie.ports import free_port
from aerie.serving import client as serving

DATABASE_AWAY_SECONDS = 20.0
FEWEST_LEFT = 12  # prompts: with fewer, a kill would not fall under load


class Matrix:
    """One server, one database server, and a data set that is begun anew whenever it is nearly complete."""

    def __init__(self, root: Path, cluster: Cluster, seed: int) -> None:
        self._root = root
        self._cluster = cluster
        self._dice = random.Random(seed)  # noqa: S311
        self._begun = 0
        self.figures: dict[str, Any] = {"kills": 0, "sigterms": 0, "datasets": 0, "noticed_seconds": {}}

    def begin(self) -> None:
        """A data set with prompts and nothing else, in a new database."""
        self._begun += 1
        url = self._cluster.url(f"run_{self._begun}")
        ensure_database(url)
        os.environ["AERIE_DATABASE_URL"] = url
        self.world = RealWorld(self._root, url)
        prepared = self._root / "prepared"
        if not prepared.exists():
            self.world.finish(self.world.start("prepare"))
            (self._root / "editions").rename(prepared)
        shutil.rmtree(self._root / "editions", ignore_errors=True)
        shutil.copytree(prepared, self._root / "editions")
        self._durable: set[str] = set()

    def kill(self, number: int) -> None:
        """Signal a generator at a random moment; nothing that was durable may be lost."""
        if self._begun == 0 or len(self._durable) > self._prompts() - FEWEST_LEFT:
            self.complete()
        self.advance(self.world.strike(number, self._dice))
        self.figures["sigterms" if number == signal.SIGTERM else "kills"] += 1

    def _prompts(self) -> int:
        prompts = iterate_prompts(self.world.files.prompts)
        return sum(1 for prompt in prompts if prompt.split != "benchmark" and prompt.skip_reason is None)

    def advance(self, durable: set[str]) -> None:
        """Take note of what is durable now."""
        assert self._durable < durable, "a durable row was lost, or nothing went on"
        self._durable = durable

    def complete(self) -> None:
        """Run the data set to its end, hold the invariants, and begin another."""
        if self._begun:
            self.world.finish(self.world.start())
            self.world.check()
            logged = Counter(response.sample_id for response in iterate_responses(self.world.files.responses))
            assert self._durable <= set(logged) and max(logged.values()) == 1, "a durable row was generated again"
            self.figures["datasets"] += 1
        self.begin()

    def lose_server(self, victim: str) -> None:
        """SIGKILL the server or its scheduler; the next generator has it started again."""
        self.complete()
        self.figures["noticed_seconds"][victim] = round(self.world.kill_in_server(victim), 1)
        self.advance(self.world.durable())

    def lose_database(self) -> None:
        """Stop PostgreSQL under load for 20 seconds; the same generator goes on."""
        self.complete()
        process = self.world.start()
        self.world.wait_for_rows(5, process)
        self._cluster.stop()
        time.sleep(DATABASE_AWAY_SECONDS)
        self._cluster.start()
        self.world.finish(process)
        self.figures["database_away_seconds"] = DATABASE_AWAY_SECONDS


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aerie-crashes-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        cluster = Cluster(folder=root / "postgres", port=free_port(), password="for a benchmark")  # noqa: S106
        cluster.start()
        try:
            matrix = Matrix(root, cluster, arguments.seed)
            for number in range(arguments.kills):
                matrix.kill(signal.SIGTERM if number % 10 == 9 else signal.SIGKILL)
            matrix.lose_database()
            for victim in ("scheduler", "server"):
                matrix.lose_server(victim)
            matrix.complete()
        finally:
            serving.stop(root / "server")
            cluster.stop()
    figures = {"benchmark": "crash_matrix", **matrix.figures, "seconds": round(time.monotonic() - began)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()

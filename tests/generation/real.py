"""Real processes for the crash matrix: stages as their tasks run them, against real SGLang with the demo's verifier."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aerie.artefacts.layout import DatasetFiles
from aerie.errors import Retryable
from aerie.serving.evidence import Evidence
from aerie.serving.lease import read_lease
from aerie.serving.stopping import family_of
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.settings.pipeline import CanarySettings, load_settings
from aerie.stages import STAGES, StageRequest

from .invariants import check_durable_before_counted, check_invariants

DATASET = "B1_glaive"
STALL_SECONDS = 12


@dataclass(frozen=True)
class RealWorld:
    """One data set of the demo under ``root``, and one server for all that is done to it.

    Nothing is asked of the responses: how good the small verifier's are is not what is looked at here.
    """

    root: Path
    database_url: str

    def request(self, *, run_id: str = "real", **changes: Any) -> StageRequest:
        """A request to generate every prompt; ``changes`` are of the data set's settings."""
        settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
        canary = CanarySettings(prompts=8, maximum_corrupt_share=1.0)
        wanted = {"budget_tokens": 0, "concurrency": 24, "about_tools": False, "canary": canary, **changes}
        dataset = settings.datasets[DATASET].model_copy(update=wanted)
        generation = settings.generation.model_copy(update={"maximum_quarantine_share": 1.0})
        serving = settings.serving.model_copy(update={"stall_seconds": STALL_SECONDS})
        return StageRequest(
            settings=settings.model_copy(
                update={
                    "datasets": {**settings.datasets, DATASET: dataset}, "generation": generation, "serving": serving,
                }
            ),
            data_root=self.root, server_folder=self.root / "server", edition="main", dataset=DATASET, run_id=run_id,
        )  # fmt: skip

    @property
    def files(self) -> DatasetFiles:
        """Where the data set lies."""
        return self.request().files.dataset(DATASET)

    def start(self, stage: str = "generate") -> subprocess.Popen[bytes]:
        """Start a stage as its task does."""
        request = self.root / "request.json"
        request.write_text(self.request().model_dump_json())
        python = sys.executable if STAGES[stage].environment == "airflow" else str(python_of(STAGES[stage].environment))
        return subprocess.Popen(
            [
                python, "-m", "aerie", "stage", stage, "--request", request, "--result", self.root / f"{stage}.json",
                "--events", self.root / "events.jsonl",
            ],
            env={
                **os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include"), "AERIE_DATABASE_URL": self.database_url,
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[bytes], *, status: int = 0, seconds: float = 600.0) -> str:
        """Wait for a stage's end, hold its exit status against the expected, and return what it wrote."""
        _, error = process.communicate(timeout=seconds)
        assert process.returncode == status, error.decode()
        return error.decode()

    def rows(self) -> int:
        """Complete rows that the log has now (it is small: one file)."""
        return self.files.responses.read_bytes().count(b"\n") if self.files.responses.exists() else 0

    def wait_for_rows(self, more: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the log has grown by so many rows."""
        wanted = self.rows() + more
        while self.rows() < wanted:
            assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
            time.sleep(0.02)

    def strike(self, signal_number: int, dice: random.Random, *, most_rows: int = 6) -> set[str]:
        """Start a generator, signal it at a random moment under load, and return what is durable then."""
        process = self.start()
        self.wait_for_rows(dice.randint(1, most_rows), process)
        time.sleep(dice.random() * 0.3)  # the moment is random, not awaited
        process.send_signal(signal_number)
        self.finish(process, status=Retryable.exit_code if signal_number == 15 else -signal_number)
        return self.durable()

    def durable(self) -> set[str]:
        """Samples in the log, after a check that the ledger counts nothing else."""
        return check_durable_before_counted(self.files.responses, self.database_url, edition="main", dataset=DATASET)

    def server(self) -> psutil.Process:
        """The server's main process."""
        lease = read_lease(self.root / "server")
        assert lease is not None
        return psutil.Process(lease.server.pid)

    def scheduler(self) -> psutil.Process:
        """The server's child that runs the model: the one with the most memory."""
        lease = read_lease(self.root / "server")
        assert lease is not None
        children = [
            process for process in family_of(lease.server, lease.launch_token) if process.pid != lease.server.pid
        ]
        return max(children, key=lambda process: process.memory_info().rss)

    def kill_in_server(self, victim: str) -> float:
        """SIGKILL ``server`` or ``scheduler`` under load; returns the seconds until the generator had ended."""
        process = self.start()
        self.wait_for_rows(2, process)
        (self.server() if victim == "server" else self.scheduler()).kill()
        struck = time.monotonic()
        self.finish(process, status=Retryable.exit_code, seconds=60)
        return time.monotonic() - struck

    def stop_scheduler(self) -> Evidence:
        """Stop the scheduler under load, as a hang does, and see the generator finish all the same."""
        process = self.start()
        self.wait_for_rows(2, process)
        self.scheduler().send_signal(signal.SIGSTOP)
        self.finish(process)
        (found,) = (self.root / "server" / "evidence").glob("*.json")
        return Evidence.model_validate_json(found.read_bytes())

    def check(self) -> None:
        """The invariants of a data set."""
        check_invariants(self.files, self.database_url, edition="main", dataset=DATASET)

"""A real Airflow API server with the dashboard in it, on a database of its own, and a store that a run has filled.

A folder of tests takes the fixtures by importing them in its ``conftest.py``.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aerie.settings.machine import PROJECT_ROOT

from .dashboard_samples import SCRIPT, fill_samples

if TYPE_CHECKING:
    import httpx

    from aerie.local.postgres import Cluster

PASSWORD = "for tests only"
ROLES = ("viewer", "user", "op", "admin")
START_SECONDS = 240
EDITION = "main"
RUN = "manual__2026-11-29T17:45:12+00:00"
LIVE_RUN = "backfill__live/of a long name that a table has no room for, 2026-11-30T09:00:00+00:00"
GENERATED = ("B1_glaive", "B3_magicoder", "B8_sweagent")
LAUNCH = "launch-0a1b2c3d4e5f6071"


@dataclass
class Dashboard:
    """Where the dashboard is, its store, and who its users are."""

    url: str
    store_url: str
    home: Path
    _tokens: dict[str, str] = field(default_factory=dict)

    def token(self, role: str) -> str:
        """A session of the user with a role."""
        import httpx

        if role not in self._tokens:
            answer = httpx.post(f"{self.url}/auth/token", json={"username": role, "password": PASSWORD}, timeout=60)
            self._tokens[role] = answer.raise_for_status().json()["access_token"]
        return self._tokens[role]

    def client(self, role: str | None) -> "httpx.Client":
        """What a browser sends: the session's cookie, nothing for a stranger."""
        import httpx

        cookies = {"_token": self.token(role)} if role else {}
        return httpx.Client(base_url=self.url, cookies=cookies, headers={"Accept": "text/html"}, timeout=60)


@pytest.fixture(scope="session")
def dashboard(postgres: "Cluster", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """The dashboard in Airflow's API server, with a store that a full run and a running one have filled."""
    from aerie.ports import free_port
    from aerie.store.connection import connected
    from aerie.store.migrate import migrate

    home = tmp_path_factory.mktemp("dashboard")
    port = free_port()
    # Each folder of tests that takes this fixture has its own.
    names = [f"{name}_{uuid.uuid4().hex[:12]}" for name in ("store", "airflow")]
    with connected(postgres.url("postgres")) as connection:
        connection.autocommit = True
        for name in names:
            connection.cursor().execute(f"CREATE DATABASE {name}")
    store_url, airflow_url = map(postgres.url, names)
    migrate(store_url)
    with connected(store_url) as connection:
        fill(connection, home)
        fill_samples(connection, home)
    (home / "passwords.json").write_text(json.dumps(dict.fromkeys(ROLES, PASSWORD)))
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.dashboard", str(port)],
            cwd=PROJECT_ROOT, env=_variables(home, port, store_url, airflow_url), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait(server, f"http://127.0.0.1:{port}/api/v2/version", home / "server.log")
        yield Dashboard(f"http://127.0.0.1:{port}", store_url, home)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _variables(home: Path, port: int, store_url: str, airflow_url: str) -> dict[str, str]:
    options = {
        "CORE__PLUGINS_FOLDER": PROJECT_ROOT / "plugins",
        "CORE__DAGS_FOLDER": home / "dags",
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{role}:{role}" for role in ROLES),
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": home / "passwords.json",
        "DATABASE__SQL_ALCHEMY_CONN": airflow_url.replace("postgresql://", "postgresql+psycopg2://", 1),
        "API__BASE_URL": f"http://127.0.0.1:{port}",
        "API_AUTH__JWT_SECRET": "a secret of the tests, as long as it has to be for HS512 to be content with it!!",
        "USAGE_DATA_COLLECTION__ENABLED": "False",
    }
    return {
        **os.environ,
        **{f"AIRFLOW__{name}": str(value) for name, value in options.items()},
        "AIRFLOW_HOME": str(home / "airflow"),
        "AERIE_HOME": str(home),
        "AERIE_DATABASE_URL": store_url,
        "PYTHONPATH": os.pathsep.join(map(str, (PROJECT_ROOT, PROJECT_ROOT / "include", PROJECT_ROOT / "plugins"))),
    }


def _wait(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            httpx.get(url, timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError(f"the API server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def serve(port: int) -> None:
    """Airflow's own API server with our plugin, on empty tables: what the child process runs."""
    import uvicorn
    from airflow.api_fastapi.app import create_app
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from airflow.settings import engine

    import_all_models()
    Base.metadata.create_all(engine)
    uvicorn.run(create_app(apps="core"), host="127.0.0.1", port=port, log_level="warning")


def figures(dataset: str, tokens: int, **changes: Any) -> dict[str, Any]:
    """One row of the time series of ``generate``, as its reporter writes it."""
    return {
        "dataset": dataset, "done": 40, "prompts": 150, "kept": 38, "quarantined": 2, "failed": 0, "in_flight": 24,
        "response_tokens": tokens, "generated_tokens": tokens + 400, "budget_tokens": 1_000_000,
        "mean_completion_tokens": 812.5, "requests_per_second": 1.5, "tokens_per_second": 1834.2,
        "quarantine_share": 0.05, "elapsed_seconds": 1200.0, "eta_seconds": 3000.0, "eta_low_seconds": 2700.0,
        "eta_high_seconds": 3900.0, "server_running": 24.0, "server_queued": 3.0, "server_token_usage": 0.71,
        "server_tokens_per_second": 1900.0, "gpu_utilisation": None, **changes,
    }  # fmt: skip


def plan_document() -> dict[str, Any]:
    """A plan of the reference deployment, as the stage ``plan`` stores it."""
    shared = {
        "verdict": "fits", "reasons": [], "gpu_memory_gib": 95.59, "weights_gib": 69.1, "drafter_gib": 0.0,
        "bytes_per_token": 70272, "expected_token_usage": 0.7, "hicache_gb_per_rank": 60, "hicache_gb_total": 480.0,
        "hicache_safe_gb_per_rank": 62, "host_available_gb": 720.0, "host_loading_gb": 40.0, "command": None,
        "sums": [], "concurrent_requests": 46,
    }  # fmt: skip
    sizes = {"kv_pool_gib": 14.9, "graphs_gib": 3.1, "headroom_gib": 8.5, "max_total_num_tokens": 227_000}
    phases = {name: {**shared, **sizes, "phase": name} for name in ("generate", "capture", "benchmark")}
    phases["benchmark"]["drafter_gib"] = 4.2
    return {
        **phases["generate"], "model": "Kimi-K2.5", "gpus": 8, "timeline": None, "estimated": [], "notes": [],
        "phases": phases,
    }  # fmt: skip


def observation(launch: str, number: int) -> dict[str, Any]:
    """What a launch turned out to hold."""
    return {
        "launch_token": launch, "plan_fingerprint": "plan", "observed_at": 1_795_973_000.0 + 3600 * number,
        "model_identity": "kimi", "drafter_identity": None, "hostname": "gpu-1", "gpu_name": "RTX PRO 6000",
        "sglang_version": "0.5.23", "device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "auto",
        "tensor_parallel_size": 8, "data_parallel_size": 1, "attention_data_parallel_size": 1,
        "pipeline_parallel_size": 1, "expert_parallel_size": 1, "mem_fraction_static": 0.88, "max_total_tokens": None,
        "page_size": 1, "bytes_per_token": 70_272, "max_total_num_tokens": 159_277 + 900 * number,
        "memory_before_launch_bytes": 100_000_000_000, "taken_by_others_bytes": 0,
        "memory_left_bytes": 6_000_000_000, "predicted_max_total_num_tokens": 159_000,
    }  # fmt: skip


def lease(log: Path, *, owner: str) -> dict[str, Any]:
    """A lease as its keeper writes it, as far as pages read it."""
    now = datetime.now(UTC).timestamp()
    plan = {
        "phase": "generate", "model_path": "/models/kimi", "device": "cuda", "tensor_parallel_size": 8,
        "mem_fraction_static": 0.88, "context_length": 32768, "hicache_size_gb_per_rank": 60,
    }  # fmt: skip
    return {
        "schema_version": 2, "host": "gpu-1", "state": "ready", "error": None, "url": "http://gpu-1:30000",
        "launch_token": LAUNCH, "plan": plan, "log_path": str(log), "max_total_num_tokens": 160_177,
        "holders": [{"owner": owner, "since": now, "renewed_at": now, "expires_at": now + 3600}],
        "observation": observation(LAUNCH, 1), "gpu_utilisation": 0.93, "reduction": None, "started_at": now - 900,
        "renewed_at": now, "expires_at": now + 3600,
    }  # fmt: skip


def fill(connection: Any, home: Path) -> None:
    """What a full run and one that is running leave in the store, through the store's own functions."""
    from aerie.artefacts.manifest import Manifest
    from aerie.artefacts.observations import Observation
    from aerie.store.queries import alerts, leases, ledger, manifests, metrics, observations, plans, runs

    now = datetime.now(UTC)
    config = {"configuration": "demo", "datasets": [*GENERATED, "A1"], "budget_tokens": None, "from": "prepare"}
    for run_id in (RUN, LIVE_RUN):
        runs.record_run(connection, run_id=run_id, dag_id="eagle3_pipeline", edition=EDITION, config=config)
    for number, key in enumerate((*GENERATED, "A1")):
        rows = [
            ledger.LedgerRow(
                f"{key}-{index:04}", "quarantined" if index % 19 == 3 else "kept" if index < 120 else "pending",
                reasons=("runs_on",) if index % 19 == 3 else (), prompt_tokens=200, completion_tokens=5_000,
                reasoning_tokens=3_000, admission_rank=index, split="train",
            )
            for index in range(150)
        ]  # fmt: skip
        ledger.write_rows(connection, edition=EDITION, dataset=key, rows=rows)
        counts = {"kept": 114, "rows": 120, "reasoning_share": 0.985, "reasons": {}, "flags": {}}
        manifest = Manifest(
            stage="validate", edition=EDITION, dataset=key, fingerprint=f"f{number}", inputs=(), outputs=(),
            counts=counts, finished_at=now,
        )  # fmt: skip
        manifests.record_manifest(connection, manifest, RUN)
    for key in GENERATED:
        settings = {"model": "kimi", "note": SCRIPT}
        runs.record_edition(
            connection, edition=EDITION, dataset=key, generation_fingerprint="g", generation_settings=settings,
            rules_fingerprint="r", rules_settings={},
        )  # fmt: skip
        series = [
            metrics.MetricRow(
                now + timedelta(seconds=10 * step), LIVE_RUN, EDITION, key, "generate",
                figures(key, 500_000 + 20_000 * step, tokens_per_second=1500.0 + 40 * step),
            )
            for step in range(12)
        ]  # fmt: skip
        metrics.record_metrics(connection, series)
    runs.record_stop(connection, edition=EDITION, dataset="B1_glaive", stopped_by="budget", message="kept 1,000,400")
    runs.record_stop(connection, edition=EDITION, dataset="B8_sweagent", stopped_by="canary", message=SCRIPT)
    benchmark = {"acceptance_length": 2.687}
    row = {"response_tokens": 627_000, "budget": 1_000_000, "stopped_by": "budget", "reasoning_share": 0.985}
    summary = {"datasets": dict.fromkeys(GENERATED, row), "benchmark": benchmark}
    runs.finish_run(connection, run_id=RUN, state="success", summary=summary)
    log = home / "server" / "logs" / "server-1.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"first line\nPrefill batch {SCRIPT}\nGET http://user:hush-hush@hub/?token=hush-hush\nlast line\n")
    leases.record_lease(connection, lease(log, owner=LIVE_RUN))
    leases.record_lease(connection, {**lease(Path("/etc/hostname.log"), owner=RUN), "launch_token": "launch-elsewhere"})
    for number in range(5):
        document = Observation.model_validate(observation(f"launch-{number}", number))
        observations.record_observation(connection, document)
    for run_id in (RUN, LIVE_RUN):
        plans.record_plan(connection, run_id=run_id, edition=EDITION, document=plan_document())
    alerts.record_alert(
        connection, reason="quarantine_rate", message=f"B8_sweagent: 12.0% quarantined {SCRIPT}", run_id=LIVE_RUN,
        edition=EDITION, dataset="B8_sweagent", stage="generate",
        log_url=f"/dags/eagle3_pipeline/runs/{RUN}/tasks/B8_sweagent.generate",
    )  # fmt: skip


if __name__ == "__main__":
    serve(int(sys.argv[1]))

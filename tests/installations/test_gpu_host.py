"""A GPU host over the network: a real Edge worker with its own user, host name and home, and without any database.

Both hosts share the data root alone. The kernel's namespaces make the second one: its host's name is another, and the
control side's home cannot be seen from it.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from aerie.artefacts.layout import EditionFiles
from aerie.local.airflow_api import AirflowApi
from aerie.processes import wait_until_gone
from aerie.serving.lease import KeeperAddress, Lease, address_path, lease_path, read_address, read_lease
from aerie.settings.machine import PROJECT_ROOT, aerie_home, run_folder_name

from ..end_to_end.conftest import Run, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

PLACE = aerie_home() / "test-gpu-host"
CONTROL, HOST, SHARED = PLACE / "control", PLACE / "host", PLACE / "shared"
HOST_NAME, ADDRESS, QUEUE = "gpu-host", "127.0.0.2", "gpu-7"
NOBODY = 65534
DEAD = "//nobody:nothing@127.0.0.1:9/nowhere"
REMOTE = ("plan", "serve_start", "serve_stop", "capture", "train", "export")
DATASET = "B1_glaive"
GENERATE = f"{DATASET}.generate"
ENDING_SECONDS = 60

BECOME_THE_HOST = """
hostname "$1"
mount -t tmpfs -o mode=755 tmpfs "$2"
shift 2
exec setpriv --reuid 65534 --regid 65534 --clear-groups \
    --inh-caps +dac_read_search --ambient-caps +dac_read_search -- "$@"
"""
"""The interpreter and the checkout may lie where only root reads: the host's user may read, and not write."""


def as_host(*command: str) -> list[str]:
    return ["unshare", "--mount", "--uts", "sh", "-ec", BECOME_THE_HOST, "sh", HOST_NAME, str(CONTROL), *command]


def shared_variables(home: Path) -> dict[str, str]:
    """What both hosts are told of what they share; each has its copy of the keeper's token."""
    return {
        "AERIE_HOME": str(home),
        "AERIE_CONFIG": str(SHARED / "config.yaml"),
        "AERIE_DATA_ROOT": str(SHARED),
        "AERIE_SERVER_FOLDER": str(SHARED / "server"),
        "AERIE_KEEPER_TOKEN_FILE": str(home / "given.token"),
    }


def control(*arguments: str) -> None:
    """A command of the control side's local stack, which must succeed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AERIE_", "AIRFLOW"))}
    done = subprocess.run(
        [str(PROJECT_ROOT / "aerie"), *arguments], env={**own, **shared_variables(CONTROL)}, umask=0o002,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def configuration() -> str:
    small = PROJECT_ROOT / "tests" / "end_to_end" / "config.yaml"
    document = yaml.safe_load(small.read_text().replace("../../", f"{PROJECT_ROOT}/"))
    document["datasets"] = {DATASET: document["datasets"][DATASET]}
    document["serving"]["host"] = ADDRESS
    document["training"]["epochs"] = 1
    here = {"executor": "EdgeExecutor", "queue": QUEUE, "remote": True}
    return yaml.safe_dump({**document, "placement": dict.fromkeys(REMOTE, here)})


def airflow_url(made: Mapping[str, object]) -> str:
    return f"http://127.0.0.1:{made['airflow_port']}"


def host_variables(made: Mapping[str, object]) -> dict[str, str]:
    """The whole environment of the host's worker, as docs/scale-out.md says it, with both databases' URLs dead."""
    airflow = airflow_url(made)
    return {
        **shared_variables(HOST),
        "AERIE_DATABASE_URL": f"postgresql:{DEAD}",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2:{DEAD}",
        "AIRFLOW_HOME": str(HOST / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT_ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT_ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor,airflow.providers.edge3.executors.EdgeExecutor",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{airflow}/execution/",
        "AIRFLOW__EDGE__API_URL": f"{airflow}/edge_worker/v1/rpcapi",
        "AIRFLOW__EDGE__JOB_POLL_INTERVAL": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET_CMD": f"cat {HOST / 'jwt_secret'}",
        "AIRFLOW__API_AUTH__JWT_LEEWAY": "60",
        "PYTHONPATH": f"{PROJECT_ROOT / 'include'}:{PROJECT_ROOT / 'plugins'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": os.environ["PATH"],
        "HOME": str(HOST),
        "TMPDIR": str(HOST / "tmp"),
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class TwoHosts(Stack):
    """The control side's stack, and the worker of the host."""

    worker: subprocess.Popen[bytes]

    @property
    def server_folder(self) -> Path:
        return SHARED / "server"

    def require_worker(self) -> None:
        assert self.worker.poll() is None, (PLACE / "worker.log").read_text()

    def of_host(self) -> list[str]:
        """Processes of the host, its worker's own excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.worker.pid and process.environ().get("AERIE_HOME") == str(HOST):
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def give(path: Path, text: str) -> None:
    """A secret of the host's user."""
    path.write_text(text)
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[TwoHosts]:
    if os.geteuid() != 0:
        pytest.skip("A GPU HOST OVER THE NETWORK IS NOT TESTED: another user and another host's name take root")
    if PLACE.exists():
        clear()
    for folder in (CONTROL, HOST, HOST / "tmp", SHARED):
        folder.mkdir(parents=True)
    possible = subprocess.run(as_host("true"), capture_output=True, text=True, check=False)
    if possible.returncode != 0:
        pytest.skip(f"A GPU HOST OVER THE NETWORK IS NOT TESTED: root may not make namespaces: {possible.stderr}")
    os.chown(SHARED, 0, NOBODY)
    SHARED.chmod(0o2775)
    (SHARED / "config.yaml").write_text(configuration())
    token = secrets.token_urlsafe(24)
    for home in (CONTROL, HOST):
        (home / "envs").symlink_to(aerie_home() / "envs")
        (home / "given.token").write_text(token)
    try:
        control("up")
        made = json.loads((CONTROL / "stack.json").read_text())
        give(HOST / "given.token", token)
        give(HOST / "jwt_secret", made["jwt_secret"])
        for folder in (HOST, HOST / "tmp"):
            os.chown(folder, NOBODY, NOBODY)
        with worker_of_host(made) as worker:
            url, password = airflow_url(made), made["airflow_password"]
            database_url = f"postgresql://aerie:{made['postgres_password']}@127.0.0.1:{made['postgres_port']}/aerie"
            yield TwoHosts(AirflowApi(url, password), database_url, url, password, worker)
    finally:
        clear()


@contextmanager
def worker_of_host(made: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    python = HOST / "envs" / "airflow" / "bin" / "python"
    command = (str(python), "-m", "airflow", "edge", "worker", "--queues", QUEUE, "--edge-hostname", HOST_NAME)
    with (PLACE / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            as_host(*command, "--concurrency", "1"), env=host_variables(made), umask=0o002, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=HOST,
        )  # fmt: skip
    try:
        yield worker
        worker.terminate()
        assert worker.wait(ENDING_SECONDS) == 0, (PLACE / "worker.log").read_text()
    finally:
        worker.kill()
        worker.wait()


def clear() -> None:
    if (CONTROL / "stack.json").exists():
        control("down", "--purge")
    shutil.rmtree(PLACE)


@dataclass(frozen=True)
class Story:
    """A run whose server was killed while it generated: the leases before and after, and the keeper of both."""

    two_hosts: TwoHosts
    run: Run
    killed: Lease
    again: Lease
    keepers: tuple[KeeperAddress | None, KeeperAddress | None]


@pytest.fixture(scope="module")
def story(two_hosts: TwoHosts) -> Story:
    folder = two_hosts.server_folder
    run = two_hosts.trigger(datasets=[DATASET], edition="far", budget_tokens=5000, to="train")

    def kept() -> int:
        two_hosts.require_worker()
        return run.kept()

    run.until(lambda: kept() >= 10)
    killed, keeper = read_lease(folder), read_address(folder)
    assert killed is not None
    os.kill(killed.server.pid, signal.SIGKILL)
    assert wait_until_gone(killed.server, ENDING_SECONDS)
    before = kept()
    run.until(lambda: kept() > before and is_another(killed, read_lease(folder)))
    again = read_lease(folder)
    assert again is not None
    story = Story(two_hosts, run, killed, again, (keeper, read_address(folder)))
    run.must_end_as("success")
    return story


def is_another(killed: Lease, lease: Lease | None) -> bool:
    return lease is not None and lease.launch_token != killed.launch_token


def test_a_server_that_dies_is_started_again_on_its_host_by_its_keeper_when_the_control_side_asks(story):
    assert story.killed.url.startswith(f"http://{ADDRESS}:")
    assert {lease.host for lease in (story.killed, story.again)} == {HOST_NAME}
    before, after = story.keepers
    assert before is not None
    assert before == after
    assert story.run.task(GENERATE)["hostname"] != HOST_NAME
    assert "starting generate server" in log_of(story.run, GENERATE)


def test_the_hosts_stages_ran_there_as_its_user_and_told_airflow_how_they_went(story):
    tasks = {name: task for name, task in story.run.tasks().items() if task["state"] == "success"}
    servers = [f"{step}_server_{phase}" for step in ("start", "stop") for phase in ("generate", "capture")]
    there = {"plan", *servers, "capture", "train"}
    assert {name for name, task in tasks.items() if task["hostname"] == HOST_NAME} == there
    left = SHARED / "runs" / run_folder_name(story.run.run_id)
    for name in there:
        result = left / name / f"try-{tasks[name]['try_number']}" / "result.json"
        assert result.stat().st_uid == NOBODY, name
    edition = EditionFiles(SHARED, story.run.edition)
    assert {edition.manifest(stage).stat().st_uid for stage in ("capture", "train")} == {NOBODY}
    assert {edition.manifest(stage).stat().st_uid for stage in ("merge", "forecast")} == {0}
    assert "settings:" in log_of(story.run, "train")


def test_the_store_has_what_a_host_without_it_did(story):
    query, run_id = story.run.stack.query, story.run.run_id
    stages = {stage for (stage,) in query("SELECT DISTINCT stage FROM manifests WHERE run_id = %s", run_id)}
    assert stages >= {"generate", "capture", "train"}
    counted = "SELECT count(*) FROM interval_metrics WHERE run_id = %s AND stage = 'train'"
    assert query(counted, run_id)[0][0] > 0
    statement = "SELECT document->>'host', document->'plan'->>'phase', end_reason FROM leases"
    leases = query(f"{statement} ORDER BY (document->>'started_at')::float")
    assert {host for host, _, _ in leases} == {HOST_NAME}
    assert [phase for _, phase, _ in leases] == ["generate", "generate", "capture"]
    assert [reason for _, _, reason in leases] == [
        f"followed by {story.again.launch_token}", "stopped by its run", "stopped by its run",
    ]  # fmt: skip
    recorded = query("SELECT task_id, has_result FROM recorded_tries WHERE run_id = %s", run_id)
    assert dict(recorded)["train"]


def test_no_server_is_left(story):
    folder = story.two_hosts.server_folder
    assert not lease_path(folder).exists()
    assert not address_path(folder).exists()
    assert story.two_hosts.served() == []
    assert story.two_hosts.of_host() == []
    story.two_hosts.require_worker()


def log_of(run: Run, task_id: str) -> str:
    """Log of all tries of a task."""
    return "\n".join(run.log(task_id, attempt) for attempt in range(1, run.task(task_id)["try_number"] + 1))

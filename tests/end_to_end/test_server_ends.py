"""Whatever ends a run, and however: afterwards no server, no keeper and no lease is left. Real runs, real servers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from aerie.local.supervisor import SupervisorState
from aerie.processes import ProcessIdentity, wait_until_gone
from aerie.serving.configured import plan_configured
from aerie.serving.lease import KeeperAddress, Lease, address_path, lease_path, read_lease, token_path, write
from aerie.serving.stopping import family_of
from aerie.settings.machine import run_folder
from aerie.settings.pipeline import load_settings

from .conftest import HOME, Run, Stack, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
START, GENERATE, STOP = "start_server_generate", "B1_glaive.generate", "stop_server_generate"
ENDING_SECONDS = 60


@dataclass(frozen=True)
class Seen:
    """A server that generated: its lease, its keeper's, its own and its children's processes."""

    lease: Lease
    processes: tuple[ProcessIdentity, ...]

    @classmethod
    def now(cls, stack: Stack) -> "Seen":
        lease = read_lease(stack.server_folder)
        assert lease is not None
        family = [ProcessIdentity.of(process.pid) for process in family_of(lease.server)]
        assert len(family) > 1, "SGLang has at least a scheduler beside its HTTP process"
        return cls(lease, (lease.keeper, *family))

    @property
    def left(self) -> list[int]:
        return [process.pid for process in self.processes if process.find()]


def generating(stack: Stack, edition: str) -> Run:
    """A run that generates all prompts of a new edition, and is in the middle of it."""
    run = stack.trigger(datasets=["B1_glaive"], edition=edition, budget_tokens=0, to="validate")
    run.until(lambda: run.kept() >= 10)
    return run


def folder_of(run: Run, attempt: int) -> Path:
    """Where a try of the generating task keeps its request and its events."""
    return HOME / "runs" / run_folder(run.run_id).name / GENERATE / f"try-{attempt}"


def stage_of(run: Run, attempt: int) -> ProcessIdentity:
    """The process of the generating task's stage."""
    request = str(folder_of(run, attempt) / "request.json")
    commands = {process.pid: process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])}
    (found,) = [pid for pid, command in commands.items() if request in command]
    return ProcessIdentity.of(found)


def wait_until_it_generates_again(run: Run, attempt: int) -> None:
    """Wait until a later try of the generating task has its server, and responses from it."""
    events = folder_of(run, attempt) / "events.jsonl"
    run.until(lambda: events.exists() and ": SGLang " in events.read_text())
    kept = run.kept()
    run.until(lambda: run.kept() > kept)
    assert run.task(GENERATE)["try_number"] == attempt


def alerts(run: Run) -> dict[str, str]:
    return dict(run.stack.query("SELECT reason, message FROM alerts WHERE run_id = %s", run.run_id))


def run_failure(run: Run) -> str:
    """The alert of a failed run: the DAG's callback records it, in the DAG processor, soon after the run's end."""
    until(lambda: "run_failed" in alerts(run))
    return alerts(run)["run_failed"]


def check_nothing_is_left(stack: Stack, *servers: Seen) -> None:
    assert [server.left for server in servers] == [[] for _ in servers]
    assert not lease_path(stack.server_folder).exists()
    assert not address_path(stack.server_folder).exists()
    assert stack.served() == []


def test_a_killed_workers_task_comes_back_to_its_server_and_a_task_marked_failed_ends_it(stack):
    run = generating(stack, "worker_killed")
    server, stage = Seen.now(stack), stage_of(run, 1)
    assert "AERIE_DATABASE_URL" not in psutil.Process(server.lease.server.pid).environ()
    task = ProcessIdentity.of(run.task(GENERATE)["pid"])
    psutil.Process(task.pid).parent().kill()
    assert wait_until_gone(stage, ENDING_SECONDS), "the stage outlived its worker"
    assert wait_until_gone(task, ENDING_SECONDS), "the task outlived its worker"
    assert server.lease.server.find(), "the server ended with a worker"
    wait_until_it_generates_again(run, 2)
    assert Seen.now(stack).lease.launch_token == server.lease.launch_token

    stage = stage_of(run, 2)
    run.fail_task(GENERATE)
    run.must_end_as("failed")
    assert "Task killed" in run.log(GENERATE, 2)
    assert stage.find() is None
    assert (run.task_state(GENERATE), run.task_state(STOP)) == ("failed", "success")
    assert GENERATE in run_failure(run)
    check_nothing_is_left(stack, server)


def test_a_run_that_loses_its_keeper_and_its_scheduler_still_succeeds(stack):
    run = generating(stack, "keeper_killed")
    first = Seen.now(stack)
    os.kill(first.lease.keeper.pid, signal.SIGKILL)
    until(lambda: not first.left)
    wait_until_it_generates_again(run, 2)
    second = Seen.now(stack)
    assert second.lease.launch_token != first.lease.launch_token

    scheduler = component("scheduler")
    kill_in_its_critical_section(stack, scheduler)
    run.until(lambda: component("scheduler") != scheduler)
    run.must_end_as("success")
    run.check_log_equals_ledger("B1_glaive")
    logs = {first.lease.log_path, second.lease.log_path}
    assert {path for path in logs_of(stack) if path.stat().st_mtime > first.lease.started_at} == logs
    check_nothing_is_left(stack, first, second)


def component(name: str) -> ProcessIdentity | None:
    state = SupervisorState.model_validate_json((HOME / "run" / "supervisor.json").read_bytes())
    return state.components.get(name)


def kill_in_its_critical_section(stack: Stack, scheduler: ProcessIdentity) -> None:
    """Kill it while it holds the lock without which no scheduler queues a task; its workers keep its connections."""
    statement = """
        SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND client_port = ANY(%s)
    """
    process = psutil.Process(scheduler.pid)
    while True:  # bounded by the test's own limit
        process.suspend()
        ports = [connection.laddr.port for connection in process.net_connections()]
        if stack.query(statement, ports) != [(0,)]:
            process.kill()
            return
        process.resume()
        time.sleep(0.01)


def logs_of(stack: Stack) -> set[Path]:
    return set((stack.server_folder / "logs").glob("server-*.log"))


@pytest.fixture
def innocent() -> Iterator[ProcessIdentity]:
    """A process that has nothing to do with servers."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True) as process:
        yield ProcessIdentity.of(process.pid)
        process.kill()


def leave_stale_lease(stack: Stack, innocent: ProcessIdentity) -> None:
    """What a host that crashed leaves: the pids of its keeper and server are of other processes by now, or of none."""
    plan = plan_configured(load_settings(Path(__file__).parent / "config.yaml"), "generate")
    earlier = innocent.model_copy(update={"created": innocent.created - 3600})
    now = time.time()
    lease = Lease(
        host=socket.gethostname(), boot_id="an earlier boot", keeper=earlier.model_copy(update={"pid": 2**22 - 1}),
        server=earlier, state="ready", url="http://127.0.0.1:9", port=9, launch_token="launch-of-an-earlier-boot",
        plan_fingerprint=plan.fingerprint(), plan=plan, log_path=stack.server_folder / "logs" / "gone.log",
        holders=(), max_total_num_tokens=65536, started_at=now - 3500, renewed_at=now, expires_at=now + 3600,
    )  # fmt: skip
    address = KeeperAddress(host=socket.gethostname(), keeper=earlier, url="http://127.0.0.1:9")
    stack.server_folder.mkdir(parents=True, exist_ok=True)
    write(lease, lease_path(stack.server_folder))
    write(address, address_path(stack.server_folder))


def test_what_a_crashed_host_left_harms_nobody_and_a_server_that_cannot_be_stopped_ends_by_itself(stack, innocent):
    leave_stale_lease(stack, innocent)
    run = generating(stack, "run_failed")
    server, stage = Seen.now(stack), stage_of(run, 1)
    assert innocent.find(), "the process that has the pid of an earlier server was ended"

    token_path(stack.server_folder).write_text("another token")  # from now on, nobody can renew or stop the server
    run.fail()
    run.must_end_as("failed")
    assert stage.find() is None
    assert (run.task_state(GENERATE), run.task_state(STOP)) == ("failed", "failed")
    stop = run.task(STOP)
    assert "was replaced" in stack.api.error("eagle3_pipeline", run.run_id, STOP, stop["try_number"])
    assert STOP in run_failure(run)
    assert server.lease.server.find(), "the server ended before its lease was over: nothing was tested"
    until(lambda: not server.left)
    check_nothing_is_left(stack, server)
    assert innocent.find()

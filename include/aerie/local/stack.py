"""The local stack as a whole: up, down, status."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
from tenacity import RetryError, retry, retry_if_result, stop_after_delay, wait_fixed

from aerie.artefacts.files import write_text
from aerie.errors import BadInput, Failed
from aerie.local.airflow_api import AirflowApi
from aerie.local.configuration import (
    STACK_ID_VARIABLE,
    StackConfiguration,
    claim_airflow_port,
    configuration_path,
    private_folder,
    temporary_folder,
)
from aerie.local.pipeline_settings import (
    choose_settings,
    describe_settings,
    missing_verifier,
    remember_settings,
    require_same_settings,
)
from aerie.local.postgres import ensure_database
from aerie.local.supervisor import COMPONENTS, STOP_GRACE_SECONDS, SupervisorState, read_state, state_path
from aerie.placement import pools_to_write
from aerie.processes import ProcessIdentity, stop_trees
from aerie.serving import client
from aerie.serving.lease import read_lease
from aerie.settings.machine import aerie_home, models_root, python_of, server_folder, stack_settings_path
from aerie.settings.pipeline import PipelineSettings, load_settings
from aerie.store.migrate import migrate
from aerie.store.roles import grant_rights

HEALTH_SECONDS = 240
Report = Callable[[str], None]


@contextmanager
def exclusive() -> Iterator[None]:
    """One ``up`` or ``down`` at a time."""
    path = aerie_home() / "run" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def up(report: Report, *, preset: str | None = None) -> StackConfiguration:
    """Bring the stack up, re-using what runs, and return its configuration.

    Args:
        report: told what happens.
        preset: the pipeline's configuration, by name; None takes ``AERIE_CONFIG``, else the one of the last time.

    Raises:
        BadInput: the pipeline's configuration is wrong, or another than that of the stack that runs.
        AerieError: a part of it does not start; the message names its log.
    """
    with exclusive(), ExitStack() as until_healthy:
        chosen = agreed_settings(preset)
        configuration = StackConfiguration.load_or_make()
        state = read_state()
        if not _runs(state):
            _sweep(configuration, state)
            remember_settings(chosen)
            configuration = _start(configuration, until_healthy, report)
        report(f"configuration {describe_settings(chosen)}")
        for line in missing_verifier(load_settings(chosen).verifier):
            report(line)
        api = AirflowApi(configuration.airflow_url, configuration.airflow_password)
        _wait_until_healthy(api)
        ensure_pools(api, load_settings(chosen))
        return configuration


def ensure_pools(api: AirflowApi, settings: PipelineSettings) -> None:
    """Make the pools that the DAGs expect of Airflow, and widen those that are too small for a task."""
    existing = api.pool_slots()
    for pool in pools_to_write(settings, existing):
        if pool.name in existing:
            api.resize_pool(pool.name, pool.slots)
        else:
            api.make_pool(pool.name, pool.slots, pool.description)


def agreed_settings(preset: str | None) -> Path:
    """The pipeline's configuration that is asked for, where it can be read and no other one runs.

    Raises:
        BadInput: it is wrong, or the stack runs another one.
    """
    chosen = choose_settings(preset)
    load_settings(chosen)
    if _runs(read_state()):
        require_same_settings(chosen)
    return chosen


def _runs(state: SupervisorState | None) -> bool:
    return state is not None and state.supervisor.find() is not None


def _start(configuration: StackConfiguration, until_healthy: ExitStack, report: Report) -> StackConfiguration:
    (aerie_home() / "logs").mkdir(parents=True, exist_ok=True)
    temporary_folder().mkdir(parents=True, exist_ok=True)
    private_folder().chmod(0o711)  # PostgreSQL's own user passes through
    running_port = configuration.cluster.running_port()
    if running_port is None:
        # Another stack that starts at the same time would find the port free until ours listens on it.
        claim = until_healthy.enter_context(closing(claim_airflow_port(configuration.airflow_port)))
        configuration = configuration.with_free_ports(airflow_port=claim.port)
        configuration.save()
    if not os.environ.get("AERIE_DATABASE_URL"):
        report("starting PostgreSQL")
        configuration.cluster.start()
    for url in (configuration.owner_database_url, configuration.airflow_database_url):
        ensure_database(url)
    report("bringing the databases up to date")
    _migrate_airflow(configuration)
    migrate(configuration.owner_database_url)
    grant_rights(
        configuration.owner_database_url,
        pipeline_url=configuration.database_url,
        dashboard_url=configuration.dashboard_database_url,
    )
    configuration.write_passwords()
    report(f"starting Airflow on {configuration.airflow_url}")
    with (aerie_home() / "logs" / "supervisor.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "aerie.local.supervisor"], env=configuration.environment(), stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return configuration


def _migrate_airflow(configuration: StackConfiguration) -> None:
    """Migrate Airflow's metadata database, unless this version of Airflow already did."""
    environment_mark = (aerie_home() / "envs" / "airflow" / ".complete").read_text()
    mark = aerie_home() / "run" / "airflow-migrated"
    wanted = f"{environment_mark} {configuration.airflow_database_url.rpartition('@')[2].rpartition('/')[2]}"
    if mark.exists() and mark.read_text() == wanted:
        return
    log = aerie_home() / "logs" / "airflow-migrate.log"
    with log.open("ab") as output:
        command = ["airflow", "db", "migrate"]
        if subprocess.run(
            command, env=configuration.environment(), stdout=output, stderr=output, check=False
        ).returncode:
            raise Failed(f"airflow db migrate failed; its output is in {log}")
    write_text(mark, wanted)


def _wait_until_healthy(api: AirflowApi) -> None:
    wait = retry(
        retry=retry_if_result(lambda healthy: not healthy), stop=stop_after_delay(HEALTH_SECONDS), wait=wait_fixed(1)
    )
    try:
        wait(api.is_healthy)()
    except RetryError:
        last = "; ".join(f"{name}: {_last_line(aerie_home() / 'logs' / f'{name}.log')}" for name in COMPONENTS)
        raise Failed(f"Airflow is not healthy after {HEALTH_SECONDS} s ({last}); see {aerie_home() / 'logs'}") from None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")[:200]


def airflow_command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """An ``airflow`` command as the stack's own processes would run it: the command and its environment variables.

    Raises:
        BadInput: there is no stack here.
    """
    if not configuration_path().exists():
        raise BadInput(f"no stack in {aerie_home()}: ./aerie up makes one")
    configuration = StackConfiguration.load_or_make()
    return [str(python_of("airflow")), "-m", "airflow", *arguments], configuration.environment()


def down(report: Report, *, purge: bool) -> None:
    """Stop everything that the stack started, by pid, and nothing else; ``purge`` also removes what it wrote.

    Raises:
        Failed: a process is still there.
        AerieError: the inference server cannot be ended (``aerie.serving.client.stop``); the rest is stopped then.
    """
    with exclusive():
        if configuration_path().exists():
            configuration = StackConfiguration.load_or_make()
            report("stopping Airflow")
            _sweep(configuration, read_state())
            report("stopping PostgreSQL")
            configuration.cluster.stop()
            shutil.rmtree(temporary_folder(), ignore_errors=True)
        # Last, because it may fail where the rest did not: one that was started by hand, or whose keeper was killed.
        if client.remote_keeper() is None and client.stop(server_folder()):
            report("stopped the inference server")
        if purge:
            report(f"removing {private_folder()} and {aerie_home()}")
            shutil.rmtree(private_folder(), ignore_errors=True)
            for path in aerie_home().iterdir():
                # Downloaded checkpoints take hours to come again, and nothing else depends on them.
                if path == models_root():
                    report(f"the checkpoints in {path} stay: remove them yourself")
                elif path.name not in ("envs", "run"):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.rmtree(aerie_home() / "envs", ignore_errors=True)
            shutil.rmtree(aerie_home() / "run", ignore_errors=True)


def _sweep(configuration: StackConfiguration, state: SupervisorState | None) -> None:
    """Stop the supervisor, its components, and every process that carries the stack's id."""
    if state is not None:
        stop_trees([state.supervisor], grace_seconds=STOP_GRACE_SECONDS + 10)
        stop_trees(list(state.components.values()), grace_seconds=STOP_GRACE_SECONDS)
    left = stop_trees(_carriers(configuration.stack_id), grace_seconds=STOP_GRACE_SECONDS)
    if left:
        raise Failed(f"processes {left} do not end, even by SIGKILL: look at them with ps")
    state_path().unlink(missing_ok=True)


def _carriers(stack_id: str) -> list[ProcessIdentity]:
    """Every process whose environment carries the stack's id, PostgreSQL's excepted (it stops last)."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(STACK_ID_VARIABLE) == stack_id:
                found.append(ProcessIdentity(pid=process.pid, created=process.create_time()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def status() -> dict[str, str]:
    """What runs: one line of text per part."""
    if not configuration_path().exists():
        return {"stack": "not set up here; ./aerie up starts it"}
    configuration = StackConfiguration.load_or_make()
    state = read_state()
    parts = {"configuration": describe_settings(stack_settings_path())}
    parts["PostgreSQL"] = _describe(configuration.cluster.identity(), f"127.0.0.1:{configuration.postgres_port}")
    if os.environ.get("AERIE_DATABASE_URL"):
        parts["PostgreSQL"] = "external (AERIE_DATABASE_URL)"
    for name in COMPONENTS:
        identity = state.components.get(name) if state else None
        parts[f"Airflow {name}"] = _describe(identity, configuration.airflow_url if name == "api-server" else "")
    lease = read_lease(server_folder())
    parts["inference server"] = (
        _describe(lease.server, f"{lease.url} ({lease.plan.phase}, {lease.state}, held by {lease.held_by})")
        if lease
        else "stopped"
    )
    return parts


def _describe(identity: ProcessIdentity | None, where: str) -> str:
    if identity is None or identity.find() is None:
        return "stopped"
    hours = (time.time() - identity.created) / 3600
    return f"running, pid {identity.pid}, {hours:.1f} h {where}".rstrip()

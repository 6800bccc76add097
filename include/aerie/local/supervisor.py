"""Keeps Airflow's four components running: ``python -m aerie.local.supervisor``, in the stack's environment.

It runs in a session of its own, restarts a component that dies, writes who runs to ``supervisor.json``, and on SIGTERM
stops each by pid. (``airflow standalone`` leaves its scheduler and triggerer behind.)
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import typer
from pydantic import BaseModel, ConfigDict

from aerie.artefacts.files import write_text
from aerie.processes import ProcessIdentity, die_with_parent, session_of, stop_trees
from aerie.settings.machine import aerie_home

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")
POLL_SECONDS = 0.5
RESTART_DELAYS_SECONDS = (1, 2, 5, 10, 30)
STOP_GRACE_SECONDS = 15
CONNECTING = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS": "aerie_airflow.database.CONNECT_ARGS"}
"""For components alone: Airflow's migrations wait in transactions for as long as they take."""


class SupervisorState(BaseModel):
    """Who runs: the supervisor and its components."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    supervisor: ProcessIdentity
    components: Mapping[str, ProcessIdentity]


def state_path() -> Path:
    """Where the supervisor writes who runs."""
    return aerie_home() / "run" / "supervisor.json"


def read_state() -> SupervisorState | None:
    """What the last supervisor wrote, or None."""
    path = state_path()
    return SupervisorState.model_validate_json(path.read_bytes()) if path.exists() else None


class Supervisor:
    """Starts, watches, restarts and stops the components."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._identities: dict[str, ProcessIdentity] = {}
        self._orphans: list[ProcessIdentity] = []  # a scheduler that is killed leaves its workers; tasks may be in them
        self._restarts = dict.fromkeys(COMPONENTS, 0)
        self._not_before = dict.fromkeys(COMPONENTS, 0.0)
        self._stopping = False

    def run(self) -> None:
        """Keep the components running until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        try:
            while not self._stopping:
                self._start_missing()
                time.sleep(POLL_SECONDS)
        finally:
            stop_trees([*self._identities.values(), *self._orphans], grace_seconds=STOP_GRACE_SECONDS)
            state_path().unlink(missing_ok=True)

    def _ask_to_stop(self, _number: int, _frame: object) -> None:
        self._stopping = True

    def _start_missing(self) -> None:
        changed = False
        for name in COMPONENTS:
            child = self._children.get(name)
            if child is not None and child.poll() is None:
                continue
            if child is not None:
                del self._children[name]
                self._orphans += [ProcessIdentity.of(one.pid) for one in session_of(self._identities.pop(name))]
                delay = RESTART_DELAYS_SECONDS[min(self._restarts[name], len(RESTART_DELAYS_SECONDS) - 1)]
                self._restarts[name] += 1
                self._not_before[name] = time.monotonic() + delay
                typer.echo(f"{name} ended with status {child.returncode}; starting it again in {delay} s")
                changed = True
            if time.monotonic() >= self._not_before[name]:
                self._children[name] = self._start(name)
                self._identities[name] = ProcessIdentity.of(self._children[name].pid)
                changed = True
        if changed:
            self._write_state()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        log = aerie_home() / "logs" / f"{name}.log"
        with log.open("ab") as output:
            return subprocess.Popen(
                ["airflow", name], env=self._variables_of(name), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    def _variables_of(self, name: str) -> dict[str, str]:
        """Variables of a component: the web server is a dashboard's and has the database user that only reads."""
        variables = {**self._environment, **CONNECTING}
        dashboard_url = variables.pop("AERIE_DATABASE_DASHBOARD_URL", None)
        if name == "api-server" and dashboard_url:
            variables["AERIE_DATABASE_URL"] = dashboard_url
        return variables

    def _write_state(self) -> None:
        state = SupervisorState(
            supervisor=ProcessIdentity.of(os.getpid()),
            components=self._identities,
        )
        write_text(state_path(), state.model_dump_json(indent=2) + "\n")


if __name__ == "__main__":
    Supervisor(os.environ).run()

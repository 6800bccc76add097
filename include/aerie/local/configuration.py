"""Ports, secrets and environment variables of the local stack, chosen once and kept in ``stack.json``."""

import hashlib
import hmac
import json
import os
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from platformdirs import user_state_path
from pydantic import BaseModel, ConfigDict

from aerie.artefacts.files import write_text
from aerie.errors import BadInput
from aerie.local.postgres import Cluster
from aerie.placement import DEFAULT_EXECUTOR, EDGE_EXECUTOR, executors
from aerie.ports import PortClaim, claim_port, free_port, port_is_free
from aerie.settings.machine import (
    PROJECT_ROOT,
    aerie_home,
    dashboard_database_url,
    database_url,
    owner_database_url,
    settings_path,
)
from aerie.settings.pipeline import load_settings

DEFAULT_AIRFLOW_PORT = 8080
DEFAULT_USERS = "admin:admin"
EDGE_LEEWAY_SECONDS = 60
"""How old a request of a worker may be, and how far its clock off: a worker that is refused ends."""
OWNER_VARIABLE = "AERIE_DATABASE_OWNER_URL"
STACK_ID_VARIABLE = "AERIE_STACK_ID"
"""Every process of a stack carries its id, so that ``down`` finds what outlived its parent."""


def private_folder() -> Path:
    """The one folder outside the clone: where PostgreSQL's own user can reach it, and with a path short for sockets."""
    name = f"aerie-{hashlib.sha256(str(aerie_home().resolve()).encode()).hexdigest()[:12]}"
    if os.geteuid() == 0:
        return Path("/var/lib") / name
    return Path(user_state_path()) / name


class StackConfiguration(BaseModel):
    """What the stack's processes share. Secrets are made once, at random, and stay on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stack_id: str
    airflow_port: int
    postgres_port: int
    scheduler_log_port: int
    triggerer_log_port: int
    postgres_password: str
    airflow_password: str
    jwt_secret: str
    api_secret: str
    fernet_key: str

    @classmethod
    def make(cls) -> Self:
        """Choose ports and fresh secrets; a start takes other ports for those that are not free then."""
        return cls(
            stack_id=secrets.token_hex(8),
            airflow_port=DEFAULT_AIRFLOW_PORT,
            postgres_port=free_port(),
            scheduler_log_port=free_port(),
            triggerer_log_port=free_port(),
            postgres_password=secrets.token_urlsafe(24),
            airflow_password=secrets.token_urlsafe(9),
            jwt_secret=secrets.token_urlsafe(48),
            api_secret=secrets.token_urlsafe(24),
            fernet_key=urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        )

    @classmethod
    def load_or_make(cls) -> Self:
        """Read ``stack.json``; the first time, write it."""
        path = configuration_path()
        if path.exists():
            return cls.model_validate_json(path.read_bytes())
        made = cls.make()
        made.save()
        return made

    def save(self) -> None:
        """Write ``stack.json``, readable by this user only."""
        path = configuration_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        write_text(path, self.model_dump_json(indent=2) + "\n")
        path.chmod(0o600)

    def with_free_ports(self, *, airflow_port: int) -> Self:
        """The same configuration with this port of Airflow's, and a new one for each that something else took."""
        taken = {
            name: free_port()
            for name in ("postgres_port", "scheduler_log_port", "triggerer_log_port")
            if not port_is_free(getattr(self, name))
        }
        return self.model_copy(update={**taken, "airflow_port": airflow_port})

    @property
    def airflow_url(self) -> str:
        """URL of Airflow's UI and REST API."""
        return f"http://127.0.0.1:{self.airflow_port}"

    @property
    def edge_url(self) -> str:
        """URL that workers of the EdgeExecutor ask for tasks."""
        return f"{self.airflow_url}/edge_worker/v1/rpcapi"

    @property
    def cluster(self) -> Cluster:
        """The embedded PostgreSQL."""
        return Cluster(private_folder() / "postgres", self.postgres_port, self.postgres_password)

    def _user_password(self, user: str) -> str:
        """Password of a user of the embedded PostgreSQL; it does not tell the owner's."""
        return hmac.new(self.postgres_password.encode(), user.encode(), hashlib.sha256).hexdigest()

    def _embedded_url(self, user: str) -> str:
        return self.cluster.url("aerie", user=user, password=self._user_password(user))

    @property
    def database_url(self) -> str:
        """URL of Aerie's own database for the pipeline: ``AERIE_DATABASE_URL``, else the embedded PostgreSQL's."""
        return os.environ.get("AERIE_DATABASE_URL") or self._embedded_url("aerie_pipeline")

    @property
    def dashboard_database_url(self) -> str:
        """The same for the dashboard: ``AERIE_DATABASE_DASHBOARD_URL``, where the database is the user's own."""
        if os.environ.get("AERIE_DATABASE_URL"):
            return dashboard_database_url()
        return self._embedded_url("aerie_dashboard")

    @property
    def owner_database_url(self) -> str:
        """The same for who makes the tables: ``AERIE_DATABASE_OWNER_URL``, where the database is the user's own."""
        return owner_database_url() if os.environ.get("AERIE_DATABASE_URL") else self.cluster.url("aerie")

    @property
    def airflow_database_url(self) -> str:
        """URL of Airflow's metadata database, on the same PostgreSQL and of the same owner."""
        if not os.environ.get("AERIE_DATABASE_URL"):
            return self.cluster.url("airflow")
        parts = urlsplit(self.owner_database_url)
        return urlunsplit(parts._replace(path=f"{parts.path}_airflow"))

    def environment(self) -> dict[str, str]:
        """Environment variables of every process of the stack."""
        home = aerie_home()
        airflow_home = home / "airflow"
        sqlalchemy_url = self.airflow_database_url.replace("postgresql://", "postgresql+psycopg2://", 1)
        others = executors(load_settings(settings_path()))
        with_edge: Mapping[str, Mapping[str, object]] = {
            "api_auth": {"jwt_secret": self.jwt_secret, "jwt_leeway": EDGE_LEEWAY_SECONDS},
            "edge": {"api_enabled": True, "api_url": self.edge_url},
        }
        settings: Mapping[str, Mapping[str, object]] = {
            "core": {
                "executor": ",".join((DEFAULT_EXECUTOR, *others)),
                # Tasks wait for servers and start-ups half of their time.
                "parallelism": (os.cpu_count() or 2) + 2,
                "dags_folder": PROJECT_ROOT / "dags",
                "plugins_folder": PROJECT_ROOT / "plugins",
                "load_examples": False,
                "dags_are_paused_at_creation": False,
                "execution_api_server_url": f"{self.airflow_url}/execution/",
                "fernet_key": self.fernet_key,
                "simple_auth_manager_users": os.environ.get("AERIE_USERS") or DEFAULT_USERS,
                "simple_auth_manager_passwords_file": airflow_home / "passwords.json",
            },
            "database": {"sql_alchemy_conn": sqlalchemy_url},
            "api": {
                "host": "127.0.0.1",
                "port": self.airflow_port,
                "base_url": self.airflow_url,
                "workers": 1,
                "secret_key": self.api_secret,
            },
            "api_auth": {"jwt_secret": self.jwt_secret},
            "logging": {
                "base_log_folder": airflow_home / "logs",
                "worker_log_server_port": self.scheduler_log_port,
                "trigger_log_server_port": self.triggerer_log_port,
            },
            # A task whose worker was killed is tried again before its server's lease (serving.lease_seconds) is over.
            "scheduler": {"scheduler_heartbeat_sec": 2, "task_instance_heartbeat_timeout": 60},
            "dag_processor": {"refresh_interval": 30, "min_file_process_interval": 30},
            "usage_data_collection": {"enabled": False},
            **(with_edge if EDGE_EXECUTOR in others else {}),
        }
        variables = {
            f"AIRFLOW__{section.upper()}__{name.upper()}": str(value)
            for section, values in settings.items()
            for name, value in values.items()
        }
        return {
            **{name: value for name, value in os.environ.items() if _is_for_the_stack(name)},
            **variables,
            "AIRFLOW_HOME": str(airflow_home),
            "AERIE_HOME": str(home),
            "AERIE_CONFIG": str(settings_path().absolute()),
            "AERIE_DATABASE_URL": self.database_url,
            "AERIE_DATABASE_DASHBOARD_URL": self.dashboard_database_url,
            "PYTHONPATH": f"{PROJECT_ROOT / 'include'}{os.pathsep}{PROJECT_ROOT / 'plugins'}",
            "PATH": f"{home / 'envs' / 'airflow' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            # Libraries would leave their files all over the machine.
            "TMPDIR": str(temporary_folder()),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HOME": str(home / "cache" / "huggingface"),
            "SGLANG_CACHE_DIR": str(home / "cache" / "sglang"),
            STACK_ID_VARIABLE: self.stack_id,
        }

    def write_passwords(self) -> None:
        """Give Airflow's user ``admin`` the stack's password; others keep theirs, and Airflow makes those it misses."""
        path = aerie_home() / "airflow" / "passwords.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        known = json.loads(path.read_text(encoding="utf-8") or "{}")
        write_text(path, json.dumps({**known, "admin": self.airflow_password}))
        path.chmod(0o600)


def temporary_folder() -> Path:
    """Temporary files and sockets of the stack's processes; emptied when it stops."""
    return private_folder() / "tmp"


def configuration_path() -> Path:
    """Where the stack's configuration is kept."""
    return aerie_home() / "stack.json"


def claim_airflow_port(last: int) -> PortClaim:
    """Claim ``AERIE_PORT``, else the port of the last time, else the first free one from 8080 on.

    Raises:
        BadInput: ``AERIE_PORT`` is not a port, or is taken.
    """
    asked = os.environ.get("AERIE_PORT")
    if asked is not None and (not asked.isdigit() or not 0 < int(asked) < 65536):
        raise BadInput(f"AERIE_PORT={asked} is not a port: expected a number from 1 to 65535")
    claim = claim_port((last, *range(DEFAULT_AIRFLOW_PORT, 65536)) if asked is None else (int(asked),))
    if claim is None:
        raise BadInput(f"port {asked} (AERIE_PORT) is in use: stop what listens there, or choose another")
    return claim


def _is_for_the_stack(variable: str) -> bool:
    """Whether a variable of the person's shell reaches Airflow: connections do, settings of another Airflow do not."""
    return variable.startswith("AIRFLOW_CONN_") or not variable.startswith(("AIRFLOW_", OWNER_VARIABLE))


def store_url() -> str:
    """URL of the store, for a command: as set, else that of the stack on this machine.

    Raises:
        BadInput: there is neither.
    """
    if not os.environ.get("AERIE_DATABASE_URL") and configuration_path().exists():
        return StackConfiguration.load_or_make().database_url
    return database_url()

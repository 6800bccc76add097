"""Fixtures for every area. Imports are lazy: a test directory runs in one of three environments."""

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aerie.local.postgres import Cluster

TEMPLATE = "aerie_template"

# Whatever a stack on this machine was last started with.
os.environ.setdefault("AERIE_CONFIG", str(Path(__file__).parents[1] / "demo" / "config.yaml"))
# Airflow serialises the DAGs only with the timetable that Aerie's plugin registers.
os.environ.setdefault("AIRFLOW__CORE__PLUGINS_FOLDER", str(Path(__file__).parents[1] / "plugins"))
# A shell has whatever it starts in the background ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator["Cluster"]:
    """A throwaway PostgreSQL server, with one migrated database to copy."""
    from aerie.local.postgres import Cluster
    from aerie.ports import free_port
    from aerie.store.migrate import migrate
    from aerie.store.roles import grant_rights

    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="aerie-test-postgres-", dir=memory if memory.is_dir() else None))
    cluster = Cluster(folder=folder, port=free_port(), password="for tests")
    try:
        cluster.start()
        _relax(cluster)
        _create(cluster, TEMPLATE)
        migrate(cluster.url(TEMPLATE))
        pipeline, dashboard = (_url(cluster, TEMPLATE, purpose) for purpose in ("pipeline", "dashboard"))
        grant_rights(cluster.url(TEMPLATE), pipeline_url=pipeline, dashboard_url=dashboard)
        yield cluster
    finally:
        _kill(cluster)
        shutil.rmtree(folder)


@pytest.fixture
def empty_database_url(postgres: "Cluster") -> str:
    """URL of a new database without tables."""
    name = f"empty_{uuid.uuid4().hex[:12]}"
    _create(postgres, name)
    return postgres.url(name)


@pytest.fixture
def database_name(postgres: "Cluster") -> str:
    """Name of a new database with Aerie's tables."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    _create(postgres, name, template=TEMPLATE)
    return name


@pytest.fixture
def database_url(postgres: "Cluster", database_name: str) -> str:
    """URL of that database for the pipeline, which can change rows and no tables."""
    return _url(postgres, database_name, "pipeline")


@pytest.fixture
def dashboard_database_url(postgres: "Cluster", database_name: str) -> str:
    """URL of that database for the dashboard, which can only read."""
    return _url(postgres, database_name, "dashboard")


@pytest.fixture
def owner_database_url(postgres: "Cluster", database_name: str) -> str:
    """URL of that database for who made the tables."""
    return postgres.url(database_name)


def _url(cluster: "Cluster", database: str, purpose: str) -> str:
    return cluster.url(database, user=f"aerie_{purpose}", password=f"for the {purpose}")


def _kill(cluster: "Cluster") -> None:
    """Stop without writing anything more to the disk: nobody reads it again."""
    from aerie.processes import wait_until_gone

    identity = cluster.identity()
    process = identity.find() if identity else None
    if identity and process:
        process.send_signal(signal.SIGQUIT)
        assert wait_until_gone(identity, 30)


def _relax(cluster: "Cluster") -> None:
    """Nothing here outlives the machine."""
    from aerie.store.connection import connected

    with connected(cluster.url("postgres")) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("ALTER SYSTEM SET fsync = off")
            cursor.execute("SELECT pg_reload_conf()")


def _create(cluster: "Cluster", name: str, *, template: str = "template1") -> None:
    from psycopg2 import sql

    from aerie.store.connection import connected

    with connected(cluster.url("postgres")) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            )

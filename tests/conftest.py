"""Fixtures for every area. Imports are lazy: a test directory runs in one of three environments."""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aerie.local.postgres import Cluster

# Whatever a stack on this machine was last started with.
os.environ.setdefault("AERIE_CONFIG", str(Path(__file__).parents[1] / "demo" / "config.yaml"))
# Airflow serialises the DAGs only with the timetable that Aerie's plugin registers.
os.environ.setdefault("AIRFLOW__CORE__PLUGINS_FOLDER", str(Path(__file__).parents[1] / "plugins"))
# A shell has whatever it starts in the background ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator["Cluster"]:
    """A throwaway PostgreSQL server, with one migrated database to copy."""
    from tests.throwaway_postgres import throwaway_postgres

    with throwaway_postgres() as cluster:
        yield cluster


@pytest.fixture
def empty_database_url(postgres: "Cluster") -> str:
    """URL of a new database without tables."""
    from tests.throwaway_postgres import create

    name = f"empty_{uuid.uuid4().hex[:12]}"
    create(postgres, name)
    return postgres.url(name)


@pytest.fixture
def database_name(postgres: "Cluster") -> str:
    """Name of a new database with Aerie's tables."""
    from tests.throwaway_postgres import TEMPLATE, create

    name = f"test_{uuid.uuid4().hex[:12]}"
    create(postgres, name, template=TEMPLATE)
    return name


@pytest.fixture
def database_url(postgres: "Cluster", database_name: str) -> str:
    """URL of that database for the pipeline, which can change rows and no tables."""
    from tests.throwaway_postgres import url_for

    return url_for(postgres, database_name, "pipeline")


@pytest.fixture
def dashboard_database_url(postgres: "Cluster", database_name: str) -> str:
    """URL of that database for the dashboard, which can only read."""
    from tests.throwaway_postgres import url_for

    return url_for(postgres, database_name, "dashboard")


@pytest.fixture
def owner_database_url(postgres: "Cluster", database_name: str) -> str:
    """URL of that database for who made the tables."""
    return postgres.url(database_name)

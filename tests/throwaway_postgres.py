"""A throwaway PostgreSQL server with Aerie's tables. Imports what only the airflow environment has.

As a program, for tests of other environments: prints the URL of a database, and ends with its input.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg2 import sql

from aerie.local.postgres import Cluster
from aerie.ports import free_port
from aerie.processes import wait_until_gone
from aerie.store.connection import connected
from aerie.store.migrate import migrate
from aerie.store.roles import grant_rights

TEMPLATE = "aerie_template"


@contextmanager
def throwaway_postgres() -> Iterator[Cluster]:
    """A server with one migrated database to copy."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="aerie-test-postgres-", dir=memory if memory.is_dir() else None))
    cluster = Cluster(folder=folder, port=free_port(), password="for tests")
    try:
        cluster.start()
        _relax(cluster)
        create(cluster, TEMPLATE)
        migrate(cluster.url(TEMPLATE))
        pipeline, dashboard = (url_for(cluster, TEMPLATE, purpose) for purpose in ("pipeline", "dashboard"))
        grant_rights(cluster.url(TEMPLATE), pipeline_url=pipeline, dashboard_url=dashboard)
        yield cluster
    finally:
        _kill(cluster)
        shutil.rmtree(folder)


def create(cluster: Cluster, name: str, *, template: str = "template1") -> None:
    """Make a database."""
    with connected(cluster.url("postgres")) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            )


def url_for(cluster: Cluster, database: str, purpose: str) -> str:
    """URL of a database for the ``pipeline`` or the ``dashboard``."""
    return cluster.url(database, user=f"aerie_{purpose}", password=f"for the {purpose}")


def _kill(cluster: Cluster) -> None:
    """Stop without writing anything more to the disk: nobody reads it again."""
    identity = cluster.identity()
    process = identity.find() if identity else None
    if identity and process:
        process.send_signal(signal.SIGQUIT)
        assert wait_until_gone(identity, 30)


def _relax(cluster: Cluster) -> None:
    """Nothing here outlives the machine."""
    with connected(cluster.url("postgres")) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("ALTER SYSTEM SET fsync = off")
            cursor.execute("SELECT pg_reload_conf()")


if __name__ == "__main__":
    with throwaway_postgres() as started:
        sys.stdout.write(url_for(started, TEMPLATE, "pipeline") + "\n")
        sys.stdout.flush()
        sys.stdin.read()

import shutil
import tempfile
from pathlib import Path

import psycopg2
import pytest

from aerie.errors import Failed
from aerie.local.postgres import Cluster, ensure_database
from aerie.ports import free_port, port_is_free


@pytest.fixture
def cluster():
    """A cluster in a folder that PostgreSQL's own user can reach when the tests run as root."""
    base = Path(tempfile.mkdtemp(prefix="aerie-test-"))
    base.chmod(0o755)
    made = Cluster(base / "postgres", free_port(), "pass'word")
    yield made
    made.stop()
    shutil.rmtree(base)


def test_what_was_written_is_there_after_a_stop_and_a_start(cluster):
    cluster.start()
    ensure_database(cluster.url("prompts"))
    ensure_database(cluster.url("prompts"))
    with psycopg2.connect(cluster.url("prompts")) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kept (id int); INSERT INTO kept VALUES (7)")
    connection.close()
    cluster.stop()
    assert cluster.identity() is None and port_is_free(cluster.port)
    cluster.start()
    cluster.start()
    assert cluster.running_port() == cluster.port
    with psycopg2.connect(cluster.url("prompts")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM kept")
        assert cursor.fetchall() == [(7,)]
    connection.close()


def test_nobody_gets_in_without_the_password_and_nothing_listens_beyond_localhost(cluster):
    cluster.start()
    with pytest.raises(psycopg2.OperationalError):
        psycopg2.connect(host="127.0.0.1", port=cluster.port, user="aerie", password="wrong", dbname="postgres")
    with psycopg2.connect(cluster.url("postgres")) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW listen_addresses")
        assert cursor.fetchone() == ("127.0.0.1",)
    connection.close()


def test_a_port_that_is_taken_is_reported_with_the_servers_own_words(cluster):
    cluster.start()
    second = Cluster(cluster.folder.parent / "second", cluster.port, "x")
    with pytest.raises(Failed, match="Address already in use"):
        second.start()


def test_a_cut_off_initdb_is_done_again(cluster):
    (cluster.folder / "data.partial").mkdir(parents=True)
    (cluster.folder / "data.partial" / "PG_VERSION").write_text("18")
    cluster.start()
    assert cluster.identity() is not None

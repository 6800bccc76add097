"""The rights of the database's users, on a real PostgreSQL. Every other test runs as the pipeline's user."""

import uuid
from collections.abc import Sequence

import pytest
from psycopg2 import errors, sql

from aerie.errors import BadInput, Retryable
from aerie.local.postgres import Cluster, ensure_database
from aerie.store.connection import connect, connected
from aerie.store.migrate import migrate
from aerie.store.queries.alerts import acknowledge_alert, list_alerts, record_alert
from aerie.store.roles import grant_rights

CHANGES_OF_TABLES = (
    "CREATE TABLE mine (id int)",
    "CREATE TEMPORARY TABLE mine (id int)",
    "CREATE SCHEMA mine",
    "ALTER TABLE samples ADD COLUMN mine int",
    "CREATE INDEX mine ON samples (state)",
    "TRUNCATE samples",
    "DROP TABLE samples",
    "UPDATE aerie_version SET version_num = 'mine'",
    "CREATE ROLE mine",
    "COPY samples TO PROGRAM 'true'",
    "SELECT pg_read_file('postgresql.conf')",
)
CHANGES_OF_ROWS = (
    "INSERT INTO runs (run_id, dag_id, edition, config, state) VALUES ('r', 'd', 'e', '{}', 'running')",
    "UPDATE samples SET state = 'kept'",
    "DELETE FROM manifests",
    "DELETE FROM alerts",
    "UPDATE alerts SET message = ''",
)


def run(url: str, statement: str) -> None:
    with connected(url) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)


def other_user(url: str, user: str, password: str) -> str:
    """The same database as another user."""
    return f"postgresql://{user}:{password}@{url.rpartition('@')[2]}"


@pytest.fixture(autouse=True)
def granted(owner_database_url: str, database_url: str, dashboard_database_url: str) -> None:
    """A copy of a database has the rights on its tables, and not those on the database itself."""
    grant_rights(owner_database_url, pipeline_url=database_url, dashboard_url=dashboard_database_url)


@pytest.fixture
def user() -> str:
    return f"user_{uuid.uuid4().hex[:12]}"


def allowed(url: str, statements: Sequence[str]) -> list[str]:
    """Which of the statements are not refused for lack of rights; nothing of them stays."""
    done = []
    with connected(url) as connection, connection.cursor() as cursor:
        for statement in statements:
            try:
                cursor.execute(statement)
                done.append(statement)
            except errors.InsufficientPrivilege:
                pass
            connection.rollback()
    return done


def test_the_pipeline_changes_rows_and_no_tables(owner_database_url: str, database_url: str) -> None:
    assert allowed(owner_database_url, CHANGES_OF_TABLES) == list(CHANGES_OF_TABLES)
    assert allowed(database_url, (*CHANGES_OF_TABLES, *CHANGES_OF_ROWS)) == list(CHANGES_OF_ROWS)


def test_the_dashboard_changes_nothing(dashboard_database_url: str) -> None:
    assert allowed(dashboard_database_url, (*CHANGES_OF_TABLES, *CHANGES_OF_ROWS)) == []


def test_the_dashboard_sees_alerts_and_acknowledges_them(database_url: str, dashboard_database_url: str) -> None:
    with connected(database_url) as pipeline, connected(dashboard_database_url) as dashboard:
        record_alert(pipeline, reason="budget", message="reached")
        (alert,) = list_alerts(dashboard)
        assert acknowledge_alert(dashboard, alert_id=alert["id"], user="operator")
        assert [(one["message"], one["acknowledged_by"]) for one in list_alerts(dashboard)] == [("reached", "operator")]


def test_a_table_of_a_later_migration_is_open_to_both_at_once(
    owner_database_url: str, database_url: str, dashboard_database_url: str
) -> None:
    run(owner_database_url, "CREATE TABLE later (id bigint GENERATED ALWAYS AS IDENTITY, what text)")
    run(database_url, "INSERT INTO later (what) VALUES ('row')")
    run(dashboard_database_url, "SELECT * FROM later")
    with pytest.raises(errors.InsufficientPrivilege):
        run(dashboard_database_url, "DELETE FROM later")


def test_neither_user_reaches_airflows_database_on_the_same_server(
    postgres: Cluster, database_url: str, dashboard_database_url: str, user: str
) -> None:
    airflow = f"{user}_airflow"
    ensure_database(postgres.url(airflow))
    for url in (database_url, dashboard_database_url):
        with pytest.raises(Retryable, match="permission denied for database"):
            connect(f"{url.rpartition('/')[0]}/{airflow}")


def test_rights_that_somebody_added_are_taken_again(
    owner_database_url: str, database_url: str, dashboard_database_url: str
) -> None:
    run(
        owner_database_url,
        "GRANT DELETE ON samples TO aerie_dashboard; GRANT CREATE ON SCHEMA public TO aerie_pipeline",
    )
    grant_rights(owner_database_url, pipeline_url=database_url, dashboard_url=dashboard_database_url)
    with pytest.raises(errors.InsufficientPrivilege):
        run(dashboard_database_url, "DELETE FROM samples")
    with pytest.raises(errors.InsufficientPrivilege):
        run(database_url, "CREATE TABLE mine (id int)")


def test_a_new_password_in_the_url_is_the_users_from_then_on(owner_database_url: str, user: str) -> None:
    old, new = (other_user(owner_database_url, user, password) for password in ("the%20old", "the%20new"))
    grant_rights(owner_database_url, pipeline_url=old, dashboard_url=old)
    connect(old).close()
    grant_rights(owner_database_url, pipeline_url=new, dashboard_url=new)
    connect(new).close()
    with pytest.raises(Retryable, match="password authentication failed"):
        connect(old)


def test_one_user_for_all_keeps_what_it_has(empty_database_url: str) -> None:
    migrate(empty_database_url)
    grant_rights(empty_database_url, pipeline_url=empty_database_url, dashboard_url=empty_database_url)
    run(empty_database_url, "CREATE TABLE mine (id int)")


def test_one_user_for_pipeline_and_dashboard_writes_rows(owner_database_url: str, user: str) -> None:
    url = other_user(owner_database_url, user, "password")
    grant_rights(owner_database_url, pipeline_url=url, dashboard_url=url)
    run(url, CHANGES_OF_ROWS[0])


def test_an_owner_that_makes_no_users_takes_those_that_are_there_and_says_which_are_not(
    empty_database_url: str, user: str
) -> None:
    """As where somebody else runs the database."""
    owner = other_user(empty_database_url, f"{user}_owner", "password")
    with connected(empty_database_url) as administrator, administrator, administrator.cursor() as cursor:
        for name in (user, f"{user}_owner"):
            cursor.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'password'").format(sql.Identifier(name)))
        names = {"database": sql.Identifier(administrator.info.dbname), "owner": sql.Identifier(f"{user}_owner")}
        cursor.execute(sql.SQL("ALTER DATABASE {database} OWNER TO {owner}").format(**names))
    migrate(owner)
    url = other_user(empty_database_url, user, "password")
    grant_rights(owner, pipeline_url=url, dashboard_url=url)
    run(url, CHANGES_OF_ROWS[0])
    wrong = other_user(empty_database_url, user, "hunter2")
    with pytest.raises(BadInput, match=f"user {user} cannot log in") as refusal:
        grant_rights(owner, pipeline_url=wrong, dashboard_url=wrong)
    assert "hunter2" not in str(refusal.value)


def test_no_password_is_in_the_servers_log_even_where_it_logs_every_statement(
    postgres: Cluster, owner_database_url: str, database_name: str, user: str
) -> None:
    run(owner_database_url, f"ALTER DATABASE {database_name} SET log_statement = 'all'")
    url = other_user(owner_database_url, user, "hunter2")
    grant_rights(owner_database_url, pipeline_url=url, dashboard_url=url)
    log = postgres.log.read_text(encoding="utf-8")
    assert f'CREATE ROLE "{user}"' in log
    assert "hunter2" not in log

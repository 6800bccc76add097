"""The database's users and their rights: only the owner changes tables.

The pipeline reads and writes rows; the dashboard reads them, and acknowledges alerts. Neither can create, alter or drop
anything.
"""

from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote, urlsplit

from psycopg2 import errors, sql
from psycopg2.extensions import encrypt_password

from aerie.errors import BadInput, Retryable
from aerie.store.connection import Connection, Cursor, connect, connected, place_of, transaction
from aerie.store.migrate import VERSION_TABLE

Purpose = Literal["pipeline", "dashboard"]

CREATE_USER = sql.SQL("CREATE ROLE {user} LOGIN PASSWORD {password}")
CHANGE_PASSWORD = sql.SQL("ALTER ROLE {user} LOGIN PASSWORD {password}")
# Rights of later tables are granted too: what migrates next may know nothing of these users.
GRANT: Mapping[Purpose, sql.SQL] = {
    "pipeline": sql.SQL(
        """
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user};
        ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {user};
        REVOKE INSERT, UPDATE, DELETE ON {version_table} FROM {user}
        """
    ),
    "dashboard": sql.SQL(
        """
        GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user};
        GRANT UPDATE (acknowledged_at, acknowledged_by) ON alerts TO {user};
        ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO {user}
        """
    ),
}
WITHOUT_RIGHTS = sql.SQL(
    """
    REVOKE CREATE ON SCHEMA public FROM PUBLIC, {user};
    REVOKE CREATE, TEMPORARY ON DATABASE {database} FROM PUBLIC, {user};
    REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {user};
    ALTER DEFAULT PRIVILEGES IN SCHEMA public REVOKE ALL ON TABLES FROM {user};
    GRANT CONNECT ON DATABASE {database} TO {user};
    GRANT USAGE ON SCHEMA public TO {user}
    """
)


def grant_rights(owner_url: str, *, pipeline_url: str, dashboard_url: str) -> None:
    """Give the users of these URLs the rights that their purpose needs, and take every other one in this database.

    A user that is missing is created, and each gets the password of its URL. The owner keeps what it has, and one user
    for both purposes gets the pipeline's rights.

    Raises:
        BadInput: a user cannot log in with its URL, and the owner may not change that; or a URL names no user.
        Retryable: the database cannot be reached.
    """
    purposes: dict[str, tuple[Purpose, str]] = {
        _user_of(dashboard_url): ("dashboard", dashboard_url),
        _user_of(pipeline_url): ("pipeline", pipeline_url),
    }
    purposes.pop(_user_of(owner_url), None)
    with connected(owner_url, application="aerie users") as connection:
        for user, (purpose, url) in purposes.items():
            _ensure_login(connection, user, url)
            with transaction(connection) as cursor:
                _grant(cursor, purpose, user)


def _user_of(url: str) -> str:
    user = urlsplit(url).username
    if not user:
        raise BadInput(f"the URL of database {place_of(url)} names no user: expected postgresql://USER:PASSWORD@...")
    return unquote(user)


def _ensure_login(connection: Connection, user: str, url: str) -> None:
    password = unquote(urlsplit(url).password or "")
    try:
        with transaction(connection) as cursor:
            cursor.execute("SELECT FROM pg_roles WHERE rolname = %s", (user,))
            statement = CHANGE_PASSWORD if cursor.rowcount else CREATE_USER
            # Encrypted here, because the server logs a statement that fails.
            verifier = encrypt_password(password, user, scope=connection, algorithm="scram-sha-256")
            cursor.execute(statement.format(user=sql.Identifier(user), password=sql.Literal(verifier)))
    except errors.InsufficientPrivilege as refusal:
        try:
            connect(url).close()
        except Retryable:
            raise BadInput(
                f"database {place_of(url)}: its user {user} cannot log in, and the owner may not create it or set its "
                f"password: let an administrator create it with the password of its URL (CREATE ROLE ... LOGIN)"
            ) from refusal


def _grant(cursor: Cursor, purpose: Purpose, user: str) -> None:
    names = {
        "user": sql.Identifier(user),
        "database": sql.Identifier(cursor.connection.info.dbname),
        "version_table": sql.Identifier(VERSION_TABLE),
    }
    cursor.execute(WITHOUT_RIGHTS.format(**names))
    cursor.execute(GRANT[purpose].format(**names))

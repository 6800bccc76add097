"""Connections to Aerie's own database."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812 - psycopg2 names its class in lower case
from psycopg2.extensions import cursor as Cursor  # noqa: N812

from aerie.errors import Retryable
from aerie.store.text import storable

CONNECT_TIMEOUT_SECONDS = 10

__all__ = ["Connection", "Cursor", "connect", "connected", "transaction"]


class StoringCursor(Cursor):
    """Sends values as the database can hold them: what people wrote, and servers answered, may be any text."""

    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002 - psycopg2's name
        """As psycopg2's, with storable values."""
        super().execute(query, storable(vars))

    def mogrify(self, query: Any, vars: Any = None) -> bytes:  # noqa: A002
        """As psycopg2's, with storable values; ``execute_values`` makes its rows with it."""
        return super().mogrify(query, storable(vars))


def place_of(url: str) -> str:
    """Host, port and database of a URL, without its password."""
    parsed = urlparse(url)
    return f"{parsed.hostname}:{parsed.port or 5432}{parsed.path}"


def connect(url: str, *, application: str = "aerie") -> Connection:
    """Open a connection. ``application`` is the name that PostgreSQL shows for it.

    Raises:
        Retryable: the database cannot be reached, or refuses us.
    """
    options: dict[str, Any] = {"application_name": application, "connect_timeout": CONNECT_TIMEOUT_SECONDS}
    try:
        connection: Connection = psycopg2.connect(url, cursor_factory=StoringCursor, **options)
    except psycopg2.OperationalError as error:
        raise Retryable(
            f"database {place_of(url)} cannot be used: {_one_line(error)}; check that PostgreSQL runs and that "
            "AERIE_DATABASE_URL is right (./aerie up starts the local one)"
        ) from error
    return connection


@contextmanager
def connected(url: str, *, application: str = "aerie") -> Iterator[Connection]:
    """A connection that is closed at the end."""
    connection = connect(url, application=application)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def transaction(connection: Connection) -> Iterator[Cursor]:
    """A cursor inside one transaction: committed at the end, rolled back on an error.

    Raises:
        Retryable: the connection broke.
    """
    try:
        with connection, connection.cursor() as cursor:
            yield cursor
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        raise Retryable(f"the connection to the database broke: {_one_line(error)}") from error


def _one_line(error: psycopg2.Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__

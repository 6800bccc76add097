"""The store, for the time of one request."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends

from aerie.settings.machine import database_url
from aerie.store.connection import Connection, connected


def open_store() -> Iterator[Connection]:
    """A connection to Aerie's database.

    Raises:
        Retryable: it cannot be reached.
        BadInput: nobody said where it is.
    """
    with connected(database_url(), application="aerie dashboard") as connection:
        yield connection


Store = Annotated[Connection, Depends(open_store)]

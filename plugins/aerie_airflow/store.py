"""The store, for what runs under Airflow: its log never shows the store's password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from airflow.sdk.log import mask_secret

from aerie.settings.machine import database_url

if TYPE_CHECKING:
    from aerie.store.connection import Connection


@contextmanager
def open_store(application: str) -> Iterator[Connection]:
    """A connection to the store that is closed at the end; ``application`` is the name that PostgreSQL shows for it.

    Raises:
        BadInput: no store is set.
        Retryable: it cannot be reached.
    """
    from aerie.store.connection import connected

    url = database_url()
    password = urlsplit(url).password
    if password:
        mask_secret(password)
        mask_secret(unquote(password))
    with connected(url, application=application) as connection:
        yield connection

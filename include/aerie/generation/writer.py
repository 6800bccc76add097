"""The right to write one data set, and the ledger written under it across a restart of the database.

Two locks: a lock file for the response log and an advisory lock for the ledger. The advisory lock goes with the
connection, so a database that is restarted forgets it; the lock file stays, and keeps every other writer out until the
connection is back. What proves it is the table ``writers``, which names whoever took the lock last.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from aerie.artefacts.locks import lock_file
from aerie.errors import Retryable
from aerie.store.connection import Connection, connect
from aerie.store.queries.ledger import LedgerRow, only_writer, still_only_writer, write_rows

RECONNECT_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 3.0


class WriterReplaced(Retryable):
    """Another process wrote the data set while the database was away."""


class DatasetWriter:
    """The only writer of a data set, from entering to leaving.

    ``connection`` is the database's, a new one after the database was away: do not keep it.

    Raises:
        Busy: another process writes the data set; the message names it.
        Retryable: the database cannot be reached.
    """

    def __init__(self, url: str, *, edition: str, dataset: str, run_id: str, lock_path: Path) -> None:
        self._url = url
        self._key = {"edition": edition, "dataset": dataset}
        self._run_id = run_id
        self._lock_path = lock_path
        self._held = ExitStack()
        self._lost: Retryable | None = None

    def __enter__(self) -> Self:
        with ExitStack() as held:
            what = f"{self._key['edition']}/{self._key['dataset']}"
            held.enter_context(lock_file(self._lock_path, what=what, holder=f"run {self._run_id}"))
            self.connection = self._connect()
            held.callback(lambda: self.connection.close())
            held.enter_context(only_writer(self.connection, **self._key, run_id=self._run_id))
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    def _connect(self) -> Connection:
        return connect(self._url, application=f"aerie generate {self._key['edition']}/{self._key['dataset']}")

    def write(self, rows: Sequence[LedgerRow]) -> None:
        """Commit rows, all of them or none; where the database is away, wait for it to come back.

        Raises:
            Retryable: it did not come back within ``RECONNECT_SECONDS``; every later call raises the same at once.
            WriterReplaced: another process took the data set meanwhile.
        """
        if self._lost is not None:
            raise self._lost
        try:
            self._write(rows)
        except Retryable:
            self._write_when_back(rows)

    def _write(self, rows: Sequence[LedgerRow]) -> None:
        write_rows(self.connection, **self._key, rows=rows)

    def _write_when_back(self, rows: Sequence[LedgerRow]) -> None:
        try:
            for attempt in Retrying(
                stop=stop_after_delay(RECONNECT_SECONDS),
                wait=wait_random_exponential(FIRST_PAUSE_SECONDS, max=LONGEST_PAUSE_SECONDS),
                retry=retry_if_exception(lambda e: isinstance(e, Retryable) and not isinstance(e, WriterReplaced)),
                reraise=True,
            ):
                with attempt:
                    self._reconnect()
                    self._write(rows)
        except Retryable as error:
            self._lost = error
            raise

    def _reconnect(self) -> None:
        self.connection.close()
        self.connection = self._connect()
        if not still_only_writer(self.connection, **self._key, run_id=self._run_id):
            raise WriterReplaced(
                f"{self._key['edition']}/{self._key['dataset']}: another process wrote it while the connection to the "
                "database was down; run generate again to go on from what both left"
            )

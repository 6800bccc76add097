"""Bringing the database's tables to the version that this code needs."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from aerie.store.connection import connect

MIGRATIONS = Path(__file__).parent / "migrations"
# Of no meaning but being ours: two processes that migrate at once take turns.
MIGRATION_LOCK = 7_310_574_001
VERSION_TABLE = "aerie_version"


def migrate(url: str) -> None:
    """Create or upgrade the tables; nothing to do where they are up to date.

    Raises:
        Retryable: the database cannot be reached.
    """
    connect(url).close()
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg2"), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

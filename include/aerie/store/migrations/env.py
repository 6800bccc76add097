"""What alembic runs; the connection comes from ``aerie.store.migrate``, inside its transaction."""

from alembic import context

from aerie.store.migrate import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()

"""What alembic runs; the connection comes from ``aerie.store.migrate``, inside its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="aerie_version")
context.run_migrations()

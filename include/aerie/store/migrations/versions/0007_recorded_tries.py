"""How far the tries of tasks on hosts without this database were recorded.

Revision ID: 0007
"""

from alembic import op

revision = "0007"
down_revision = "0006"

TABLE = """
CREATE TABLE recorded_tries (
    run_id text NOT NULL,
    task_id text NOT NULL,
    try_number integer NOT NULL,
    events integer NOT NULL DEFAULT 0,
    has_result boolean NOT NULL DEFAULT false,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_id, task_id, try_number)
);
"""


def upgrade() -> None:
    """Add the table."""
    op.execute(TABLE)

"""The plan of each run, for the dashboard: plan beside observed.

Revision ID: 0006
"""

from alembic import op

revision = "0006"
down_revision = "0005"

TABLE = """
CREATE TABLE plans (
    run_id text PRIMARY KEY,
    edition text NOT NULL,
    document jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX plans_by_time ON plans (recorded_at);
"""


def upgrade() -> None:
    """Create the table."""
    op.execute(TABLE)

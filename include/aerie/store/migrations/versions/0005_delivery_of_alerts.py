"""Whose alert it is, and whether it reached anybody.

Revision ID: 0005
"""

from alembic import op

revision = "0005"
down_revision = "0004"

COLUMNS = """
ALTER TABLE alerts
    ADD COLUMN task_id text,
    ADD COLUMN try_number integer,
    ADD COLUMN log_url text,
    ADD COLUMN delivered_at timestamptz,
    ADD COLUMN delivery_error text;
CREATE INDEX alerts_by_run ON alerts (run_id, task_id);
"""


def upgrade() -> None:
    """Add what an alert's delivery tells."""
    op.execute(COLUMNS)

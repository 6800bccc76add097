"""What the dashboard looks up in tables of a year: the latest launches, and the leases that a run held.

Revision ID: 0010
"""

from alembic import op

revision = "0010"
down_revision = "0009"

INDEXES = """
CREATE INDEX observations_by_time ON observations (observed_at);
-- Documents of an earlier version have one owner, and no holders.
CREATE INDEX leases_by_holder ON leases USING gin ((document -> 'holders') jsonb_path_ops);
CREATE INDEX leases_by_owner ON leases ((document ->> 'owner'));
"""


def upgrade() -> None:
    """Add the indexes."""
    op.execute(INDEXES)

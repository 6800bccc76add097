"""Observations of launches, one row a launch.

Nothing wrote into the general table of 0001: it is replaced by one that says what an observation is of.

Revision ID: 0002
"""

from alembic import op

revision = "0002"
down_revision = "0001"

TABLE = """
DROP TABLE observations;

-- What a launch turned out to hold. Plans look for the same model, host and version.
CREATE TABLE observations (
    launch_token text PRIMARY KEY,
    model_identity text NOT NULL,
    hostname text NOT NULL,
    sglang_version text NOT NULL,
    observed_at timestamptz NOT NULL,
    document jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX observations_by_server ON observations (model_identity, hostname, sglang_version, observed_at);
"""


def upgrade() -> None:
    """Replace the table of observations."""
    op.execute(TABLE)

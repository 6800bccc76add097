"""What the dashboard's pages ask for: samples by state and finding, where a preview comes from, alerts that were seen.

Revision ID: 0004
"""

from alembic import op

revision = "0004"
down_revision = "0003"

CHANGES = """
-- The browser walks one state of a data set page by page, in the order of ids.
DROP INDEX samples_by_state;
CREATE INDEX samples_by_state ON samples (edition, dataset, state, sample_id);
CREATE INDEX samples_with_findings ON samples (edition, dataset, sample_id) WHERE reasons <> '{}' OR flags <> '{}';

ALTER TABLE previews
    ADD COLUMN source text NOT NULL DEFAULT 'validate' CHECK (source IN ('canary', 'validate')),
    ADD COLUMN loaded_at timestamptz NOT NULL DEFAULT now();

ALTER TABLE alerts ADD COLUMN acknowledged_at timestamptz, ADD COLUMN acknowledged_by text;

CREATE INDEX runs_by_time ON runs (started_at);
"""


def upgrade() -> None:
    """Add indexes and columns."""
    op.execute(CHANGES)

"""When each drafter was published last: the one in production is not the one that was touched last.

Revision ID: 0009
"""

from alembic import op

revision = "0009"
down_revision = "0008"

# Until now any stage that was run again moved updated_at; publish's own manifests say when it was, where they are kept.
COLUMN = """
ALTER TABLE drafters ADD COLUMN published_at timestamptz;

UPDATE drafters SET published_at = coalesce(
    (
        SELECT max(finished_at) FROM manifests
        WHERE stage = 'publish' AND manifests.edition = drafters.edition
            AND manifests.edition || '-' || left(document->'counts'->>'drafter_fingerprint', 12) = drafter_id
    ),
    updated_at
)
WHERE state = 'published';
"""


def upgrade() -> None:
    """Add the time, and tell it of those that are published."""
    op.execute(COLUMN)

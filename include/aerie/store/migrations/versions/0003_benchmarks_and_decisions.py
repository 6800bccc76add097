"""Every measurement of a drafter, and what people decided about a run.

A drafter's own row had room for its latest benchmark only. Those that were recorded are taken over from the manifests.

Revision ID: 0003
"""

from alembic import op

revision = "0003"
down_revision = "0002"

TABLES = """
-- One row a measurement and concurrency; drafter_id is null where the drafter is none of the registry.
CREATE TABLE benchmarks (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    measured_at timestamptz NOT NULL,
    run_id text,
    edition text NOT NULL,
    drafter_id text,
    fingerprint text NOT NULL,
    concurrency integer NOT NULL,
    document jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX benchmarks_once ON benchmarks (fingerprint, concurrency, measured_at);
CREATE INDEX benchmarks_by_drafter ON benchmarks (drafter_id, measured_at);

INSERT INTO benchmarks (measured_at, run_id, edition, drafter_id, fingerprint, concurrency, document)
SELECT finished_at, run_id, edition, edition || '-' || left(document->'counts'->>'drafter_fingerprint', 12),
       fingerprint, (document->'counts'->'settings'->>'concurrency')::integer, document->'counts'
FROM manifests WHERE stage = 'benchmark' AND document->'counts'->'settings'->>'concurrency' IS NOT NULL;

-- Who approved or rejected what; asked again after a clear, a task has several.
CREATE TABLE decisions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text NOT NULL,
    edition text NOT NULL,
    task_id text NOT NULL,
    subject text NOT NULL,
    body text NOT NULL,
    approved boolean NOT NULL,
    decided_by text NOT NULL,
    decided_at timestamptz NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX decisions_once ON decisions (run_id, task_id, decided_at);
"""


def upgrade() -> None:
    """Create both tables."""
    op.execute(TABLES)

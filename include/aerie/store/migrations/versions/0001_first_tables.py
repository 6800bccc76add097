"""First tables.

Revision ID: 0001
"""

from alembic import op

revision = "0001"
down_revision = None

TABLES = """
CREATE TABLE runs (
    run_id text PRIMARY KEY,
    dag_id text NOT NULL,
    edition text NOT NULL,
    config jsonb NOT NULL,
    state text NOT NULL,
    summary jsonb NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz
);
CREATE INDEX runs_by_edition ON runs (edition, started_at);

-- One row per population of data. The settings stand beside their fingerprints, so that a refusal can show them.
CREATE TABLE editions (
    edition text NOT NULL,
    dataset text NOT NULL,
    generation_fingerprint text NOT NULL,
    generation_settings jsonb NOT NULL,
    rules_fingerprint text NOT NULL,
    rules_settings jsonb NOT NULL,
    stopped_by text,
    stop_message text,
    stopped_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (edition, dataset)
);

CREATE TABLE manifests (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text,
    edition text NOT NULL,
    dataset text,
    stage text NOT NULL,
    fingerprint text NOT NULL,
    document jsonb NOT NULL,
    finished_at timestamptz NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX manifests_once ON manifests (edition, coalesce(dataset, ''), stage, finished_at);

-- The ledger.
CREATE TABLE samples (
    edition text NOT NULL,
    dataset text NOT NULL,
    sample_id text NOT NULL,
    state text NOT NULL CHECK (state IN ('pending', 'in_flight', 'kept', 'quarantined', 'skipped', 'failed')),
    attempts integer NOT NULL DEFAULT 0,
    reasons text[] NOT NULL DEFAULT '{}',
    flags text[] NOT NULL DEFAULT '{}',
    detail text,
    prompt_tokens integer,
    completion_tokens integer,
    reasoning_tokens integer,
    tool_calls integer,
    generated_tokens bigint NOT NULL DEFAULT 0,
    finish_reason text,
    judged_by text,
    response_crc32 bigint,
    admission_rank bigint,
    split text,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (edition, dataset, sample_id)
);
CREATE INDEX samples_by_state ON samples (edition, dataset, state);

-- Who writes a data set now; the advisory lock decides, this names the holder.
CREATE TABLE writers (
    edition text NOT NULL,
    dataset text NOT NULL,
    run_id text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (edition, dataset)
);

CREATE TABLE interval_metrics (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL,
    run_id text NOT NULL,
    edition text NOT NULL,
    dataset text,
    stage text NOT NULL,
    figures jsonb NOT NULL
);
CREATE INDEX interval_metrics_by_time ON interval_metrics (edition, stage, dataset, at);

CREATE TABLE leases (
    launch_token text PRIMARY KEY,
    document jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    end_reason text
);

-- What was measured of servers and machines, for plans that calibrate themselves.
CREATE TABLE observations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    kind text NOT NULL,
    subject text NOT NULL,
    document jsonb NOT NULL
);
CREATE INDEX observations_by_subject ON observations (kind, subject, at);

CREATE TABLE alerts (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    run_id text,
    edition text,
    dataset text,
    stage text,
    reason text NOT NULL,
    message text NOT NULL
);
CREATE INDEX alerts_by_time ON alerts (at);

CREATE TABLE drafters (
    drafter_id text PRIMARY KEY,
    edition text NOT NULL,
    uri text NOT NULL,
    state text NOT NULL,
    training jsonb NOT NULL DEFAULT '{}',
    benchmark jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE previews (
    edition text NOT NULL,
    dataset text NOT NULL,
    sample_id text NOT NULL,
    document jsonb NOT NULL,
    PRIMARY KEY (edition, dataset, sample_id)
);
"""


def upgrade() -> None:
    """Create every table."""
    op.execute(TABLES)

"""Totals of the ledger, kept up to date by the database itself: pages and progress add up a few rows, not 100,000.

Revision ID: 0008
"""

from alembic import op

revision = "0008"
down_revision = "0007"

TABLES = """
CREATE TABLE sample_totals (
    edition text NOT NULL,
    dataset text NOT NULL,
    state text NOT NULL,
    reasons text[] NOT NULL,
    flags text[] NOT NULL,
    samples bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    generated_tokens bigint NOT NULL,
    PRIMARY KEY (edition, dataset, state, reasons, flags)
);

-- How many judged responses have exactly so many tokens of reasoning, or of all the others ("answer").
CREATE TABLE sample_lengths (
    edition text NOT NULL,
    dataset text NOT NULL,
    length text NOT NULL,
    state text NOT NULL,
    tokens integer NOT NULL,
    samples bigint NOT NULL,
    PRIMARY KEY (edition, dataset, length, state, tokens)
);
"""

# Rows are added up in the order of their keys, so that two writers never wait for each other in a circle.
ADD_UP = """
INSERT INTO sample_totals AS known
SELECT edition, dataset, state, reasons, flags, sum(sign), sum(sign * coalesce(prompt_tokens, 0)),
       sum(sign * coalesce(completion_tokens, 0)), sum(sign * generated_tokens)
FROM ({changes}) AS changed GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
ON CONFLICT (edition, dataset, state, reasons, flags) DO UPDATE SET
    samples = known.samples + EXCLUDED.samples,
    prompt_tokens = known.prompt_tokens + EXCLUDED.prompt_tokens,
    completion_tokens = known.completion_tokens + EXCLUDED.completion_tokens,
    generated_tokens = known.generated_tokens + EXCLUDED.generated_tokens;

INSERT INTO sample_lengths AS known
SELECT edition, dataset, measured.length, state, measured.tokens, sum(sign)
FROM ({changes}) AS changed, LATERAL (
    VALUES ('reasoning', reasoning_tokens), ('answer', completion_tokens - reasoning_tokens)
) AS measured (length, tokens)
WHERE state IN ('kept', 'quarantined') AND measured.tokens IS NOT NULL
GROUP BY 1, 2, 3, 4, 5 HAVING sum(sign) <> 0 ORDER BY 1, 2, 3, 4, 5
ON CONFLICT (edition, dataset, length, state, tokens) DO UPDATE SET samples = known.samples + EXCLUDED.samples;
"""

ADDED, REMOVED = "SELECT 1 AS sign, * FROM added", "SELECT -1 AS sign, * FROM removed"
EVENTS = (
    ("insert", ADDED, "NEW TABLE AS added"),
    ("update", f"{ADDED} UNION ALL {REMOVED}", "NEW TABLE AS added OLD TABLE AS removed"),
    ("delete", REMOVED, "OLD TABLE AS removed"),
)

TRIGGER = """
CREATE FUNCTION add_up_samples_on_{event}() RETURNS trigger LANGUAGE plpgsql AS $function$
BEGIN
    {add_up}
    RETURN NULL;
END
$function$;
CREATE TRIGGER add_up_on_{event} AFTER {event} ON samples REFERENCING {tables}
    FOR EACH STATEMENT EXECUTE FUNCTION add_up_samples_on_{event}();
"""

# What looked at part of the rows, whose heap it had to visit one by one.
INDEXES = """
DROP INDEX samples_with_findings;
CREATE INDEX samples_with_findings ON samples (edition, dataset, sample_id) INCLUDE (state, reasons, flags)
    WHERE reasons <> '{}' OR flags <> '{}';
CREATE INDEX samples_by_prefix ON samples (edition, dataset, sample_id text_pattern_ops);
"""


def upgrade() -> None:
    """Add up what is there, and everything from now on."""
    op.execute(TABLES)
    op.execute(ADD_UP.format(changes="SELECT 1 AS sign, * FROM samples"))
    for event, changes, tables in EVENTS:
        op.execute(TRIGGER.format(event=event, add_up=ADD_UP.format(changes=changes), tables=tables))
    op.execute(INDEXES)

"""How long each query of the dashboard takes in a store with 100,000 samples in one data set and as many elsewhere.

    PYTHONPATH=include .aerie/envs/airflow/bin/python benchmarks/dashboard_queries.py [--samples 100000] [--plans]

A throwaway PostgreSQL is filled: one data set of that many samples, and the same number again over other data sets and
editions; a point every few seconds of generation; previews; manifests; runs; alerts. Each query runs ``REPEATS`` times
on warm caches, the slowest counts, and none may take more than ``LIMIT_MILLISECONDS``: the exit status is 1 otherwise.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aerie.local.postgres import Cluster
from aerie.ports import free_port
from aerie.store.connection import Connection, connected, transaction
from aerie.store.migrate import migrate
from aerie.store.queries import (
    alerts,
    benchmarks,
    drafters,
    leases,
    ledger,
    manifests,
    metrics,
    previews,
    runs,
    samples,
)
from aerie.store.queries.samples import SampleFilter

LIMIT_MILLISECONDS = 100.0
REPEATS = 5
KEY = {"edition": "main", "dataset": "B1_glaive"}

# Lengths are heavy-tailed; 3 in 100 are quarantined, 15 in 100 held out, 10 in 100 flagged, as runs have shown.
FILL = """
INSERT INTO samples (edition, dataset, sample_id, state, attempts, reasons, flags, prompt_tokens, completion_tokens,
                     reasoning_tokens, tool_calls, generated_tokens, judged_by, admission_rank, split)
SELECT edition, dataset, dataset || '-' || substr(md5(number::text), 1, 20), state,
       CASE WHEN state = 'skipped' THEN 0 ELSE 1 END,
       CASE state WHEN 'quarantined' THEN ARRAY[(ARRAY['loop', 'no_close', 'empty_answer', 'tool_unbalanced'])
           [1 + mod(number, 4)]] WHEN 'skipped' THEN ARRAY['held_out'] ELSE '{}' END,
       CASE WHEN state = 'kept' AND mod(number, 10) = 0 THEN ARRAY['truncated_in_answer'] ELSE '{}' END,
       50 + mod(number, 600), length, CASE WHEN length IS NOT NULL THEN length * 2 / 3 END, mod(number, 3),
       coalesce(length, 0), 'validate', number, 'train'
FROM (
    SELECT *, CASE WHEN state IN ('kept', 'quarantined') THEN
               least(16384, 8 + (646 * exp(1.25 * sqrt(-2 * ln(1 - random())) * cos(2 * pi() * random()))))::integer
           END AS length
    FROM (
        SELECT %(edition)s AS edition, %(dataset)s AS dataset, number, CASE
               WHEN mod(number, 100) < 3 THEN 'quarantined' WHEN mod(number, 100) < 18 THEN 'skipped'
               WHEN mod(number, 100) < 25 THEN 'pending' ELSE 'kept' END AS state
        FROM generate_series(1, %(count)s) AS number
    ) AS numbered
) AS sized;
"""
OTHERS = """
INSERT INTO previews (edition, dataset, sample_id, document)
SELECT edition, dataset, sample_id, jsonb_build_object('sample_id', sample_id, 'spans', jsonb_build_array(
    jsonb_build_array('prompt', repeat(md5(sample_id), 60)),
    jsonb_build_array('reasoning', repeat(md5(sample_id), 200))))
FROM samples WHERE edition = 'main' AND dataset = 'B1_glaive' AND state IN ('kept', 'quarantined')
ORDER BY md5(sample_id) LIMIT 400;

INSERT INTO interval_metrics (at, run_id, edition, dataset, stage, figures)
SELECT now() - make_interval(secs => 5 * number), 'run', 'main', dataset, stage, jsonb_build_object(
    'step', number, 'loss', 1.5, 'tokens_per_second', 900 + mod(number, 100), 'budget_tokens', 1000000, 'kept', number,
    'prompts', 100000, 'in_flight', 100, 'generated_tokens', number, 'elapsed_seconds', 5.0 * number)
FROM generate_series(1, %(count)s) AS number,
    (VALUES ('B1_glaive', 'generate'), (NULL, 'train')) AS of (dataset, stage);

INSERT INTO manifests (run_id, edition, dataset, stage, fingerprint, document, finished_at)
SELECT 'run', 'main', 'B' || mod(number, 8), (ARRAY['prepare', 'generate', 'validate'])[1 + mod(number, 3)],
       md5(number::text),
       jsonb_build_object('counts', jsonb_build_object('rows', number), 'outputs', jsonb_build_array(
           jsonb_build_object('uri', repeat('file:///', 20), 'sha256', repeat(md5(number::text), 2)))),
       now() - make_interval(mins => number)
FROM generate_series(1, 1000) AS number;

INSERT INTO runs (run_id, dag_id, edition, config, state)
SELECT 'run ' || number, 'eagle3_pipeline', 'main', '{}', 'success' FROM generate_series(1, 5000) AS number;
INSERT INTO alerts (reason, message, edition, run_id, at)
SELECT 'run_failed', repeat('what failed ', 20), 'main', 'run ' || number, now() - make_interval(mins => number)
FROM generate_series(1, 20000) AS number;
"""


def fill(connection: Connection, count: int) -> None:
    """Put everything there, as if runs had."""
    places = [("main", "B1_glaive", count)]
    places += [(edition, f"B{number}_other", count // 10) for edition in ("main", "second") for number in range(2, 7)]
    with transaction(connection) as cursor:
        for edition, dataset, rows in places:
            cursor.execute(FILL, {"edition": edition, "dataset": dataset, "count": rows})
        cursor.execute(OTHERS, {"count": count})
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    connection.autocommit = False


def queries(connection: Connection) -> dict[str, Callable[[], object]]:
    """Every query that a page makes, by what it is for."""
    middle = f"{KEY['dataset']}-8"  # ids end in a hash

    decoded = previews.list_previews(connection, **KEY, limit=1)[0]["sample_id"]

    def page(after: str | None = None, before: str | None = None, **wanted: object) -> Callable[[], object]:
        chosen = SampleFilter(**wanted)  # type: ignore[arg-type]
        return lambda: samples.page_of_samples(connection, **KEY, wanted=chosen, after=after, before=before)

    return {
        "counts of a data set": lambda: ledger.count_ledger(connection, **KEY),
        "counts of every edition": lambda: ledger.count_editions(connection),
        "reasons and flags": lambda: ledger.count_reasons(connection, **KEY),
        "percentiles of reasoning": lambda: samples.measure_lengths(connection, **KEY, length="reasoning"),
        "percentiles of answers": lambda: samples.measure_lengths(connection, **KEY, length="answer"),
        "histogram of reasoning": lambda: samples.count_lengths(
            connection, **KEY, length="reasoning", width=500, bars=24
        ),
        "histogram of answers": lambda: samples.count_lengths(connection, **KEY, length="answer", width=500, bars=24),
        "browser, first page": page(),
        "browser, a page in the middle": page(after=middle),
        "browser, a page back": page(before=middle),
        "browser, quarantined": page(state="quarantined"),
        "browser, a reason": page(finding="loop"),
        "browser, a reason, back": page(finding="loop", before=middle),
        "browser, a reason that nothing has": page(finding="nothing"),
        "browser, kept with a flag": page(state="kept", finding="truncated_in_answer"),
        "browser, a whole id": page(prefix=decoded),
        "browser, the beginning of ids": page(prefix=middle),
        "browser, the beginning of all ids": page(prefix=KEY["dataset"]),
        "browser, a beginning that no id has": page(prefix="no such id"),
        "browser, with text": page(decoded=True),
        "one sample": lambda: samples.read_sample(connection, **KEY, sample_id=decoded),
        "previews": lambda: previews.list_previews(connection, **KEY),
        "rate over time": lambda: metrics.sample_metrics(connection, stage="generate", **KEY),
        "training over time": lambda: metrics.sample_metrics(connection, stage="train", edition="main", points=400),
        "latest manifests": lambda: manifests.latest_manifests(connection, edition="main"),
        "every manifest": lambda: manifests.list_manifests(connection, edition="main"),
        "settings and stop": lambda: runs.read_edition(connection, **KEY),
        "editions": lambda: runs.list_editions(connection),
        "runs": lambda: runs.list_runs(connection, limit=25),
        "alerts": lambda: alerts.list_alerts(connection, limit=8),
        "alerts of a run": lambda: alerts.list_alerts(connection, run_id="run 1", limit=200),
        "number of alerts of a run": lambda: alerts.count_alerts(connection, run_id="run 1"),
        "alerts of an edition": lambda: alerts.list_alerts(connection, edition="main"),
        "writers": lambda: ledger.list_writers(connection),
        "leases": lambda: leases.list_leases(connection),
        "leases of a run": lambda: leases.list_leases(connection, held_by="run 1", limit=100),
        "drafters": lambda: drafters.list_drafters(connection),
        "benchmarks": lambda: benchmarks.list_benchmarks(connection, drafter_id="main-1"),
    }


@contextmanager
def logged_plans(connection: Connection) -> Iterator[list[str]]:
    """The plans of what runs meanwhile, as PostgreSQL's ``auto_explain`` tells them."""
    with transaction(connection) as cursor:
        cursor.execute("LOAD 'auto_explain'")
        cursor.execute("SET auto_explain.log_min_duration = 0")
        cursor.execute("SET auto_explain.log_analyze = on")
        cursor.execute("SET client_min_messages = log")
    plans: list[str] = []
    connection.notices = plans
    yield plans
    with transaction(connection) as cursor:
        cursor.execute("SET auto_explain.log_min_duration = -1")


def measure(connection: Connection, *, plans: bool) -> dict[str, float]:
    """Milliseconds of each query, the slowest of its repeats."""
    slowest = {}
    for name, query in queries(connection).items():
        query()
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            query()
            times.append(1000 * (time.perf_counter() - started))
        slowest[name] = round(max(times), 1)
        print(f"{slowest[name]:8.1f} ms  {name}", file=sys.stderr)
        if plans:
            with logged_plans(connection) as told:
                query()
            print("".join(told), file=sys.stderr)
    return slowest


def main() -> None:
    """Print one JSON line; the exit status says whether every query kept to the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--plans", action="store_true", help="print how PostgreSQL ran each query, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aerie-benchmark-") as temporary:
        cluster = Cluster(folder=Path(temporary), port=free_port(), password="benchmark")  # noqa: S106
        cluster.start()
        try:
            url = cluster.url("postgres")
            migrate(url)
            with connected(url) as connection:
                fill(connection, arguments.samples)
                times = measure(connection, plans=arguments.plans)
        finally:
            cluster.stop()
    slow = {name: milliseconds for name, milliseconds in times.items() if milliseconds > LIMIT_MILLISECONDS}
    report = {"benchmark": "dashboard_queries", "samples": arguments.samples, "milliseconds": times, "too_slow": slow}
    print(json.dumps(report))
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()

"""How long each query of the dashboard takes in the store of a year, with 100,000 samples in one data set.

    PYTHONPATH=include:plugins .aerie/envs/airflow/bin/python benchmarks/dashboard_queries.py [--samples 100000]
        [--plans]

A throwaway PostgreSQL is filled: one data set of that many samples, and the same number again over other data sets and
editions; a point every few seconds of generation; previews; manifests; 2,000 runs with their plans, leases, alerts and
tasks; 200,000 observed launches; 500 drafters; 5,000 benchmarks. Documents are as large as real ones. Each query runs
``REPEATS`` times on warm caches, the slowest counts, and none may take more than ``LIMIT_MILLISECONDS``: the exit
status is 1 otherwise. ``tests/project/test_benchmarks.py`` names a query that a page makes and that is not timed here.
"""

import argparse
import ast
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from aerie.local.postgres import Cluster, ensure_database
from aerie.ports import free_port
from aerie.settings.machine import PROJECT_ROOT
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
    observations,
    plans,
    previews,
    runs,
    samples,
)
from aerie.store.queries.samples import SampleFilter

LIMIT_MILLISECONDS = 100.0
REPEATS = 5
KEY = {"edition": "main", "dataset": "B1_glaive"}
RUN, DRAFTER, LAUNCH = "run 1000", "main-100", "launch 3000"
PAGES = PROJECT_ROOT / "plugins" / "aerie_dashboard"
QUERIES = "aerie.store.queries"

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

INSERT INTO alerts (reason, message, edition, run_id, at)
SELECT 'run_failed', repeat('what failed ', 20), 'main', 'run ' || 1 + mod(number, 2000),
       now() - make_interval(mins => number)
FROM generate_series(1, 20000) AS number;
"""

# Hashes do not compress, so that a document costs what one of numbers and words does.
YEAR = """
CREATE FUNCTION pg_temp.document(seed text, kilobytes integer) RETURNS jsonb LANGUAGE sql AS $$
    SELECT jsonb_object_agg('figure ' || number, md5(seed || number)) FROM generate_series(1, 21 * kilobytes) AS number
$$;

INSERT INTO runs (run_id, dag_id, edition, config, state, summary, started_at)
SELECT 'run ' || number, 'eagle3_pipeline', 'main', pg_temp.document('c' || number, 1), 'success',
       pg_temp.document('s' || number, 8), now() - make_interval(hours => 4 * number)
FROM generate_series(1, 2000) AS number;
INSERT INTO plans (run_id, edition, document, recorded_at)
SELECT run_id, edition, pg_temp.document(run_id, 20), started_at FROM runs;
INSERT INTO leases (launch_token, document, recorded_at, ended_at)
SELECT 'launch ' || number,
       pg_temp.document('l' || number, 6) || jsonb_build_object(
           'holders', jsonb_build_array(jsonb_build_object('owner', 'run ' || 1 + mod(number, 2000)))),
       now() - make_interval(mins => 80 * number), now()
FROM generate_series(1, 6000) AS number;
INSERT INTO observations (launch_token, model_identity, hostname, sglang_version, observed_at, document)
SELECT 'launch ' || number, 'model ' || mod(number, 5), 'host ' || mod(number, 20), '0.5.23',
       now() - make_interval(mins => mod(number * 7919, 200000)), pg_temp.document('o' || number, 1)
FROM generate_series(1, 200000) AS number;
INSERT INTO drafters (drafter_id, edition, uri, state, training, benchmark, created_at)
SELECT 'main-' || number, 'main', 'file:///drafters/' || number, 'published', pg_temp.document('t' || number, 2),
       pg_temp.document('b' || number, 8), now() - make_interval(hours => 16 * number)
FROM generate_series(1, 500) AS number;
INSERT INTO benchmarks (measured_at, run_id, edition, drafter_id, fingerprint, concurrency, document)
SELECT now() - make_interval(hours => number), 'run ' || 1 + mod(number, 2000), 'main', 'main-' || 1 + mod(number, 500),
       md5(number::text), 8, pg_temp.document('m' || number, 8)
FROM generate_series(1, 5000) AS number;
INSERT INTO editions (edition, dataset, generation_fingerprint, generation_settings, rules_fingerprint, rules_settings)
SELECT 'edition ' || number, dataset, md5(dataset), pg_temp.document(dataset, 1), md5(dataset),
       pg_temp.document(dataset, 1)
FROM generate_series(1, 50) AS number, (SELECT 'B' || one AS dataset FROM generate_series(1, 10) AS one) AS datasets;
INSERT INTO editions
SELECT 'main', 'B1_glaive', md5(''), pg_temp.document('', 1), md5(''), pg_temp.document('', 1);
"""
# Of Airflow's own database; what a task instance refers to is not there.
TASKS = """
SET session_replication_role = replica;
INSERT INTO task_instance (id, dag_id, run_id, task_id, state, start_date, end_date, pool, pool_slots, try_number)
SELECT gen_random_uuid(), 'eagle3_pipeline', 'run ' || run, 'task ' || task, 'success', now(), now(), 'default_pool', 1,
       1
FROM generate_series(1, 2000) AS run, generate_series(1, 60) AS task;
ANALYZE task_instance;
"""


def fill(connection: Connection, count: int) -> None:
    """Put everything there, as if runs had."""
    places = [("main", "B1_glaive", count)]
    places += [(edition, f"B{number}_other", count // 10) for edition in ("main", "second") for number in range(2, 7)]
    with transaction(connection) as cursor:
        for edition, dataset, rows in places:
            cursor.execute(FILL, {"edition": edition, "dataset": dataset, "count": rows})
        cursor.execute(OTHERS, {"count": count})
        cursor.execute(YEAR)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    connection.autocommit = False


@contextmanager
def airflow_session(url: str) -> Iterator[Any]:
    """A session on Airflow's own database, with the tables of its models and the tasks of every run."""
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session

    import_all_models()
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg2://", 1))
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text(TASKS))
    with Session(engine) as session:
        yield session
    engine.dispose()


def queries(connection: Connection, session: Any, *, decoded: str) -> Mapping[str, partial[object]]:
    """Every query that a page makes, by what it is for; ``decoded`` is the id of a sample with a preview."""
    from aerie_dashboard.airflow_tasks import tasks_of

    middle = f"{KEY['dataset']}-8"  # ids end in a hash
    now = datetime.now(UTC)
    hour = {"since": now - timedelta(hours=8), "until": now - timedelta(hours=7)}

    def ask(query: Callable[..., object], **arguments: object) -> partial[object]:
        return partial(query, connection, **arguments)

    def page(after: str | None = None, before: str | None = None, **wanted: Any) -> partial[object]:
        return ask(samples.page_of_samples, **KEY, wanted=SampleFilter(**wanted), after=after, before=before)

    def bars(length: str) -> partial[object]:
        return ask(samples.count_lengths, **KEY, length=length, width=500, bars=24)

    return {
        "counts of a data set": ask(ledger.count_ledger, **KEY),
        "counts of an edition": ask(ledger.count_editions, edition="main"),
        "counts of every edition": ask(ledger.count_editions),
        "reasons and flags": ask(ledger.count_reasons, **KEY),
        "percentiles of reasoning": ask(samples.measure_lengths, **KEY, length="reasoning"),
        "percentiles of answers": ask(samples.measure_lengths, **KEY, length="answer"),
        "histogram of reasoning": bars("reasoning"),
        "histogram of answers": bars("answer"),
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
        "one sample": ask(samples.read_sample, **KEY, sample_id=decoded),
        "previews": ask(previews.list_previews, **KEY),
        "rate over time": ask(metrics.sample_metrics, stage="generate", **KEY),
        "rate of a run": ask(metrics.sample_metrics, stage="generate", **KEY, points=60, since=hour["since"]),
        "training over time": ask(metrics.sample_metrics, stage="train", edition="main", points=400),
        "training of a drafter": ask(metrics.sample_metrics, stage="train", edition="main", points=400, **hour),
        "training before a drafter": ask(
            metrics.sample_metrics, stage="train", edition="main", points=400, until=hour["until"]
        ),
        "latest manifests": ask(manifests.latest_manifests, edition="main"),
        "every manifest": ask(manifests.list_manifests, edition="main"),
        "settings and stop": ask(runs.read_edition, **KEY),
        "editions": ask(runs.list_editions),
        "runs": ask(runs.list_runs, limit=25),
        "one run": ask(runs.read_run, run_id=RUN),
        "tasks of a run": partial(tasks_of, session, RUN),
        "plan of a run": ask(plans.read_plan, run_id=RUN),
        "latest plan": ask(plans.latest_plan),
        "alerts": ask(alerts.list_alerts, limit=8),
        "alerts of an edition": ask(alerts.list_alerts, edition="main", limit=200),
        "alerts of a run": ask(alerts.list_alerts, run_id=RUN, limit=200),
        "number of alerts of a run": ask(alerts.count_alerts, run_id=RUN),
        "an alert that somebody has seen": ask(alerts.acknowledge_alert, alert_id=1, user="somebody"),
        "writers": ask(ledger.list_writers),
        "leases": ask(leases.list_leases, limit=100),
        "leases of a run": ask(leases.list_leases, held_by=RUN, limit=100),
        "one lease": ask(leases.read_lease, launch_token=LAUNCH),
        "latest launches": ask(observations.latest_observations, limit=30),
        "drafters, first page": ask(drafters.page_of_drafters, number=1),
        "drafters, last page": ask(drafters.page_of_drafters, number=10),
        "one drafter": ask(drafters.read_drafter, drafter_id=DRAFTER),
        "benchmarks of a drafter": ask(benchmarks.list_benchmarks, drafter_id=DRAFTER),
        "benchmark of a run": ask(benchmarks.list_benchmarks, run_id=RUN, limit=1),
    }


def queries_of_pages() -> set[Callable[..., object]]:
    """The queries that the dashboard's modules import.

    Raises:
        SystemExit: a module imports a module of queries whole, which does not tell what it asks.
    """
    found = set()
    for path in sorted(PAGES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(QUERIES):
                taken = [getattr(import_module(str(node.module)), one.name) for one in node.names]
                if any(map(inspect.ismodule, taken)):
                    raise SystemExit(f"{path}:{node.lineno}: import queries from their modules, by name")
                found |= set(filter(inspect.isfunction, taken))
    return found


def not_timed(timed: Mapping[str, partial[object]]) -> list[str]:
    """Names of the queries that a page makes and that are not among ``timed``."""
    return sorted(one.__name__ for one in queries_of_pages() - {query.func for query in timed.values()})


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


def measure(connection: Connection, timed: Mapping[str, partial[object]], *, plans: bool) -> dict[str, float]:
    """Milliseconds of each query, the slowest of its repeats."""
    slowest = {}
    for name, query in timed.items():
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
            ensure_database(cluster.url("airflow"))
            os.environ |= {"AIRFLOW_HOME": temporary, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
            with connected(url) as connection, airflow_session(cluster.url("airflow")) as session:
                fill(connection, arguments.samples)
                decoded = previews.list_previews(connection, **KEY, limit=1)[0]["sample_id"]
                times = measure(connection, queries(connection, session, decoded=decoded), plans=arguments.plans)
        finally:
            cluster.stop()
    slow = {name: milliseconds for name, milliseconds in times.items() if milliseconds > LIMIT_MILLISECONDS}
    report = {"benchmark": "dashboard_queries", "samples": arguments.samples, "milliseconds": times, "too_slow": slow}
    print(json.dumps(report))
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()

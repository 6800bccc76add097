"""The pipeline: prompts flow in at one end, a measured drafter comes out at the other."""

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, Param, TaskGroup
from airflow.task.trigger_rule import TriggerRule

from aerie.pipeline import DEFAULT_EDITION, EDITION_PATTERN, STEPS
from aerie.placement import placement_arguments
from aerie.settings.machine import settings_path
from aerie.settings.pipeline import is_tokenised, load_settings
from aerie_airflow.approvals import GateOperator
from aerie_airflow.assets import CORPUS, DRAFTER, validated
from aerie_airflow.notifications import RunFailureNotifier, TaskFailureNotifier
from aerie_airflow.operators import FAIL_FOR_GOOD, CloseRunOperator, OpenRunOperator, StageOperator
from aerie_airflow.timetable import OnDemandTimetable

# The data sets are those of the configuration; one that is wrong is an import error that says so.
SETTINGS = load_settings(settings_path())
DATASETS = list(SETTINGS.datasets)

params = {
    "datasets": Param(
        DATASETS,
        type="array",
        items={"type": "string", "enum": DATASETS},
        examples=DATASETS,
        minItems=1,
        title="Data sets",
        description="Data sets of this run. Those of the edition that were validated before stay in the corpus.",
    ),
    "budget_tokens": Param(
        None,
        type=["null", "integer"],
        minimum=0,
        title="Token budget",
        description="Kept response tokens per generated data set; empty: as configured, 0: all prompts.",
    ),
    "edition": Param(
        DEFAULT_EDITION,
        type="string",
        pattern=EDITION_PATTERN,
        title="Edition",
        description="Label of one population of data. The same edition continues, a new one starts afresh.",
    ),
    "pilot": Param(
        False,
        type="boolean",
        title="Pilot",
        description="A small share of the budgets, up to the acceptance gate; the same edition without it goes on.",
    ),
    "from": Param("prepare", type="string", enum=list(STEPS), title="From", description="First step to run."),
    "to": Param("publish", type="string", enum=list(STEPS), title="To", description="Last step to run."),
    "force": Param(False, type="boolean", title="Force", description="Run steps again that already have an answer."),
    "approvals": Param(
        False,
        type="boolean",
        title="Approvals",
        description="Ask a person before what is costly, and before a drafter is published.",
    ),
}

with DAG(
    dag_id="eagle3_pipeline",
    description="From prompts to a measured EAGLE-3 drafter",
    doc_md=__doc__,
    schedule=OnDemandTimetable(),
    catchup=False,
    max_active_runs=1,
    params=params,
    render_template_as_native_obj=True,
    tags=["aerie", "eagle-3"],
    default_args={
        "retries": 2,
        "retry_delay": timedelta(seconds=10),
        "retry_policy": FAIL_FOR_GOOD,
        "on_failure_callback": TaskFailureNotifier(),
    },
    on_failure_callback=RunFailureNotifier(),
):
    open_run = OpenRunOperator(task_id="open_run")

    def task(stage: str, task_id: str | None = None, **arguments: Any) -> StageOperator:
        """The task of a stage, where the configuration places it."""
        return StageOperator(task_id=task_id or stage, stage=stage, **placement_arguments(SETTINGS, stage), **arguments)

    def server(phase: str) -> tuple[StageOperator, StageOperator]:
        """The server's start and stop around a phase; what is skipped before the start does not hold it up."""
        start = task("serve_start", f"start_server_{phase}", phase=phase, trigger_rule=TriggerRule.NONE_FAILED)
        stop = task("serve_stop", f"stop_server_{phase}", phase=phase)
        return start.as_setup(), stop.as_teardown(setups=start)

    def step(stage: str, *outlets: Asset) -> StageOperator:
        """A step on the whole edition; data sets that were skipped do not hold it up."""
        return task(stage, trigger_rule=TriggerRule.NONE_FAILED, outlets=outlets)

    plan = task("plan")
    approve_capture, approve_publish = (
        GateOperator(task_id=f"approve_{step}", gate=step, trigger_rule=TriggerRule.NONE_FAILED)
        for step in ("capture", "publish")
    )
    start_generate, stop_generate = server("generate")
    start_capture, stop_capture = server("capture")
    start_benchmark, stop_benchmark = server("benchmark")
    merge, publish = step("merge", CORPUS), step("publish", DRAFTER)
    vocabulary, forecast, train, export = map(step, ("vocabulary", "forecast", "train", "export"))
    capture, benchmark = map(task, ("capture", "benchmark"))
    close_run = CloseRunOperator(task_id="close_run").as_teardown(setups=open_run, on_failure_fail_dagrun=True)

    for key in DATASETS:
        with TaskGroup(group_id=key):
            validate = task("validate", dataset=key, outlets=[validated(key)])
            if is_tokenised(key):
                plan >> task("import", dataset=key) >> validate
            else:
                prepare, generate = (task(stage, dataset=key) for stage in ("prepare", "generate"))
                plan >> prepare >> generate >> validate
                start_generate >> generate >> stop_generate
        validate >> merge

    open_run >> plan >> start_generate
    merge >> vocabulary >> forecast >> approve_capture >> start_capture >> capture >> train >> export >> benchmark
    benchmark >> approve_publish >> publish >> close_run
    # The trainer takes the GPUs that the server had.
    stop_generate >> start_capture
    capture >> stop_capture >> [train, start_benchmark]
    train >> start_benchmark >> benchmark >> stop_benchmark
    # Where a person fails the run, all in between is skipped at once: what ends the servers is still waited for.
    [stop_generate, stop_capture, stop_benchmark] >> close_run

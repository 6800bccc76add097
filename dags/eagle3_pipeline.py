"""The pipeline: prompts flow in at one end, a measured drafter comes out at the other."""

from typing import Any

from airflow.sdk import DAG, Asset, TaskGroup
from airflow.task.trigger_rule import TriggerRule

from aerie.placement import is_remote, placement_arguments
from aerie.settings.machine import settings_path
from aerie.settings.pipeline import is_tokenised, load_settings
from aerie_airflow.approvals import GateOperator
from aerie_airflow.assets import CORPUS, DRAFTER, validated
from aerie_airflow.form import form
from aerie_airflow.notifications import RunFailureNotifier, run_deadline
from aerie_airflow.operators import CloseRunOperator, OpenRunOperator, RecordOperator, StageOperator
from aerie_airflow.task_defaults import ASKED_AGAIN_TIMES, TASK_DEFAULTS
from aerie_airflow.task_docs import APPROVAL_DOC, CLOSE_RUN_DOC, DAG_DOC, OPEN_RUN_DOC, RECORD_DOC, STAGE_DOCS
from aerie_airflow.timetable import OnDemandTimetable

# The data sets are those of the configuration; one that is wrong is an import error that says so.
SETTINGS = load_settings(settings_path())
DATASETS = list(SETTINGS.datasets)

with DAG(
    dag_id="eagle3_pipeline",
    description="From prompts to a measured EAGLE-3 drafter",
    doc_md=DAG_DOC,
    schedule=OnDemandTimetable(),
    catchup=False,
    max_active_runs=1,
    params=form(DATASETS),
    tags=["aerie", "eagle-3"],
    default_args={**TASK_DEFAULTS},
    on_failure_callback=RunFailureNotifier(),
    deadline=run_deadline(SETTINGS.alerts),
) as dag:
    open_run = OpenRunOperator(task_id="open_run", doc_md=OPEN_RUN_DOC)

    def task(stage: str, task_id: str | None = None, **arguments: Any) -> StageOperator:
        """The task of a stage, where the configuration places it."""
        arguments |= placement_arguments(SETTINGS, stage)
        return StageOperator(task_id=task_id or stage, stage=stage, doc_md=STAGE_DOCS[stage], **arguments)

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
        GateOperator(
            task_id=f"approve_{step}",
            gate=step,
            doc_md=APPROVAL_DOC,
            trigger_rule=TriggerRule.NONE_FAILED,
            retries=ASKED_AGAIN_TIMES,
        )
        for step in ("capture", "publish")
    )
    start_generate, stop_generate = server("generate")
    start_capture, stop_capture = server("capture")
    start_benchmark, stop_benchmark = server("benchmark")
    merge, publish = step("merge", CORPUS), step("publish", DRAFTER)
    vocabulary, forecast, train, export = map(step, ("vocabulary", "forecast", "train", "export"))
    capture, benchmark = map(task, ("capture", "benchmark"))
    close_run = CloseRunOperator(task_id="close_run", doc_md=CLOSE_RUN_DOC)
    close_run.as_teardown(setups=open_run, on_failure_fail_dagrun=True)

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

    # A host without the database leaves what it did beside the data: the control side records it, before it is used.
    for done in [one for one in dag.tasks if isinstance(one, StageOperator) and is_remote(SETTINGS, one.stage)]:
        record = RecordOperator(
            task_id=f"record_{done.task_id}",
            recorded=done.task_id,
            stage=done.stage,
            phase=done.phase,
            doc_md=RECORD_DOC,
        )
        if not done.is_setup:
            record >> [later for later in done.downstream_list if not later.is_teardown]
        done >> record >> close_run

"""Operators: each turns its arguments into one stage call and reports what came back.

What is heavy to import (the store, Arrow) is imported where a task executes: this file is read with every DAG.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowSkipException
from airflow.utils.types import DagRunType

from aerie.alerting import Alert
from aerie.errors import AerieError, Busy
from aerie.pipeline import RunParameters, place_of, run_parameters, setting_lines, stage_request
from aerie.placement import has_remote, is_remote
from aerie.settings.machine import run_folder, settings_path
from aerie.settings.pipeline import load_settings
from aerie.stages import StageResult
from aerie_airflow.assets import announce
from aerie_airflow.links import DatasetLink, ResponseLogLink, RunLink, SamplesLink, ServerLogLink
from aerie_airflow.log_groups import GroupedLog
from aerie_airflow.notifications import (
    RunEnding,
    RunFailed,
    TaskAlerts,
    page_of,
    record_failure,
    send_alert,
    stage_alert,
)
from aerie_airflow.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import BaseOperatorLink, Context
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from aerie.stage_process import StageProcess
    from aerie.stages import StageRequest
    from aerie.store.connection import Connection

USERS_OF_SERVER = ("serve_start", "serve_stop", "generate", "capture", "benchmark", "benchmark_drafter")
BUSY_WAIT = timedelta(seconds=30)


class StageOperator(BaseOperator):
    """Runs one stage of the pipeline in its environment.

    The run's parameters (edition, data sets, budget, from, to, force) come from the DAG run; a task outside them is
    skipped. Its events go to the task's log and to the store, its manifest to the store and, in short, to XCom.
    """

    template_fields: Sequence[str] = ("stage", "dataset", "phase")
    operator_extra_links: Collection[BaseOperatorLink] = (
        RunLink(),
        DatasetLink(),
        SamplesLink(),
        ResponseLogLink(),
        ServerLogLink(),
    )
    ui_color = "#e8f1f5"

    def __init__(self, *, stage: str, dataset: str | None = None, phase: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stage = stage
        self.dataset = dataset
        self.phase = phase
        self._process: StageProcess | None = None
        self._launch_token: str | None = None
        self._began = False

    @cached_property
    def _lines(self) -> GroupedLog:
        return GroupedLog(self.log)

    @property
    def request(self) -> StageRequest | None:
        """What the stage was asked; None where it was not."""
        return self._process.request if self._process else None

    @property
    def launch_token(self) -> str | None:
        """Launch of the server that the stage used last, or that was tried; None where it uses none."""
        if self.request is None or self.stage not in USERS_OF_SERVER:
            return None
        if self.request.target is not None and self.request.target.server_url is not None:
            return None  # someone else's server was measured
        from aerie.serving.lease import read_lease

        lease = read_lease(self.request.server_folder)
        return self._launch_token or (lease.launch_token if lease else None)

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the stage and return its counts.

        Raises:
            AirflowSkipException: the run's parameters leave this task out.
            AirflowRescheduleException: another run has what the stage works on.
            BadInput, Failed, Retryable: what the stage raised.
        """
        parameters = parameters_of(context)
        place = place_of(parameters, stage=self.stage, dataset=self.dataset, phase=self.phase)
        if place == "outside":
            raise AirflowSkipException(f"not part of this run: {parameters.describe()}")
        if place == "before":
            self.log.info("left as it is: this run begins at %s", parameters.first)
            self.outlets = []  # nobody looked whether there is an answer: no asset event
            return StageResult(stage=self.stage, reused=True).brief
        request = stage_request(
            load_settings(settings_path()),
            parameters,
            run_id=str(context["ti"].run_id),
            dataset=self.dataset,
            stage=self.stage,
            phase=self.phase,
        )
        return self._answer(context, request)

    def _answer(self, context: Context, request: StageRequest) -> dict[str, Any]:
        from aerie.asset_facts import asset_facts
        from aerie.recording import record_result
        from aerie.stage_process import StageProcess

        instance = context["ti"]
        if is_remote(request.settings, self.stage):
            return self._answer_remotely(request, f"{instance.task_id}/try-{instance.try_number}")
        folder = run_folder(str(instance.run_id)) / str(instance.task_id) / f"try-{instance.try_number}"
        with open_store(f"aerie {instance.task_id}") as connection:
            alerts = TaskAlerts(connection, request, stage=self.stage, context=context)
            self._process = StageProcess(
                self.stage, request, folder, lambda event: self._report(connection, alerts, request, event)
            )
            result = self._run(self._process)
            self._launch_token = result.data.get("launch_token")
            record_result(connection, request, result)
        if self.outlets:
            announce(context, self.outlets, asset_facts(request, result))
        return self._told(result)

    def _answer_remotely(self, request: StageRequest, place_of_try: str) -> dict[str, Any]:
        """Run the stage on a host without the database; what it leaves beside the data is recorded elsewhere."""
        from aerie.remote import require_mark, shared_run_folder
        from aerie.stage_process import StageProcess

        require_mark(load_settings(settings_path()), request.run_id)
        folder = shared_run_folder(request.run_id) / place_of_try
        self._process = StageProcess(self.stage, request, folder, lambda event: self._tell(request, event))
        return self._told(self._run(self._process))

    def _told(self, result: StageResult) -> dict[str, Any]:
        """What a stage did, in short, for the log and for XCom."""
        brief = result.brief
        said = brief["counts"] or brief["data"]
        self.log.info("%s: %s", "nothing to do, answered earlier" if result.reused else "done", said)
        return brief

    def _run(self, process: StageProcess) -> StageResult:
        """Run the stage; where another run has what it works on, give slot and pool back and ask again later.

        The message is logged before it is raised: a person needs it before the traceback that Airflow prints.
        """
        try:
            with closing(self._lines):
                return process.run()
        except Busy as busy:
            self.log.info("waiting: %s; asked again in %.0f s", busy, BUSY_WAIT.total_seconds())
            again = datetime.now(UTC) + BUSY_WAIT
            raise AirflowRescheduleException(again) from busy  # type: ignore[no-untyped-call]
        except AerieError as error:
            self.log.error(str(error))
            raise

    def _report(
        self, connection: Connection, alerts: TaskAlerts, request: StageRequest, event: Mapping[str, Any]
    ) -> None:
        from aerie.recording import record_event

        self._tell(request, event)
        if event["type"] == "progress":
            alerts.watch(event)
        elif event["type"] == "alert":
            alerts.send(event["reason"], event["message"])
        record_event(connection, self.stage, request, event)

    def _tell(self, request: StageRequest, event: Mapping[str, Any]) -> None:
        """Write an event into the task's log."""
        if not self._began:  # a task that waits says so in one line
            self._began = True
            self._lines.block("Settings", setting_lines(request))
        if event["type"] == "progress":
            self._lines.line(event["message"], group=event.get("group"))
        elif event["type"] == "alert":
            self._lines.close()
            self.log.warning("ALERT %s: %s", event["reason"], event["message"])

    def on_kill(self) -> None:
        """End the stage's process when the task is ended; a start's hold of the server too.

        No teardown follows a setup that failed. The hold of any other task is its run's, which goes on without it.
        """
        if self._process is None:
            return
        self._process.stop()
        if self.stage == "serve_start":
            from aerie.serving.client import release

            request = self._process.request
            if request.settings.serving.backend == "local":
                release(request.server_folder, request.run_id)


def record_remote(
    connection: Connection, stage: str, task_id: str, instance: RuntimeTaskInstanceProtocol, *, finished: bool
) -> StageResult | None:
    """Record what a task on a host without the database left, and send its alerts.

    Raises:
        Retryable, Failed: as ``aerie.remote.record_task`` raises.
    """
    from aerie.remote import record_task

    run_id = str(instance.run_id)

    def tell(request: StageRequest, event: Mapping[str, Any], try_number: int) -> None:
        if event["type"] == "alert":
            page = page_of(str(instance.dag_id), run_id, task_id)
            alert = stage_alert(
                request,
                reason=event["reason"],
                message=event["message"],
                stage=stage,
                task_id=task_id,
                try_number=try_number,
                log_url=page,
            )
            send_alert(connection, alert)

    return record_task(
        connection,
        stage,
        run_id,
        task_id,
        finished=finished,
        on_event=tell,
        on_failure=partial(record_failure, connection),
    )


class RecordOperator(BaseOperator):
    """Records in the store what a task on a host without the database left beside the data."""

    template_fields: Sequence[str] = ("stage", "recorded")
    ui_color = "#e8f1f5"

    def __init__(self, *, stage: str, recorded: str, phase: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stage = stage
        self.recorded = recorded
        self.phase = phase

    def execute(self, context: Context) -> dict[str, Any]:
        """Record the task's events and its result; a second time changes nothing.

        Raises:
            AirflowSkipException: the run's parameters leave the recorded task out.
            Retryable: what it left cannot be seen from here.
            Failed: a file is damaged.
        """
        parameters = parameters_of(context)
        place = place_of(parameters, stage=self.stage, dataset=None, phase=self.phase)
        if place == "outside":
            raise AirflowSkipException(f"not part of this run: {parameters.describe()}")
        if place == "before":
            return {"recorded": False}
        instance = context["ti"]
        with open_store(f"aerie {instance.task_id}") as connection:
            record_remote(connection, self.stage, self.recorded, instance, finished=True)
        self.log.info("recorded what %s left beside the data", self.recorded)
        return {"recorded": True}


class OpenRunOperator(BaseOperator):
    """Checks the run's parameters against the configuration and records the run in the store."""

    operator_extra_links = (RunLink(),)

    def execute(self, context: Context) -> dict[str, Any]:
        """Record the run.

        Raises:
            BadInput: a data set or a task that the configuration does not have.
        """
        from aerie.store.queries.runs import record_run

        settings = load_settings(settings_path())
        parameters = parameters_of(context)
        for key in parameters.datasets:
            settings.dataset(key)
        instance = context["ti"]
        with open_store("aerie open_run") as connection:
            record_run(
                connection,
                run_id=str(instance.run_id),
                dag_id=str(instance.dag_id),
                edition=parameters.edition,
                config={"configuration": settings.name, **parameters.model_dump(by_alias=True)},
            )
        if has_remote(settings):
            from aerie.remote import leave_mark

            leave_mark(settings, str(instance.run_id))
        self.log.info("edition %s: %s", parameters.edition, parameters.describe())
        return parameters.model_dump(by_alias=True)


class CloseRunOperator(BaseOperator):
    """Writes the run's summary, tells of a failure, and fails where a task failed, so that the run ends as it went."""

    operator_extra_links = (RunLink(),)

    def execute(self, context: Context) -> dict[str, Any]:
        """Record how the run ended.

        Raises:
            RunFailed: a task of the run failed; names them, and how many were not run.
        """
        from aerie.store.queries.runs import finish_run
        from aerie.summary import build_summary, rejections

        instance = context["ti"]
        run_id = str(instance.run_id)
        states: Mapping[str, Any] = instance.get_task_states(dag_id=instance.dag_id, run_ids=[run_id])[run_id]
        failed = sorted(task for task, state in states.items() if state == "failed")
        not_run = sum(1 for state in states.values() if state == "upstream_failed")
        parameters = parameters_of(context)
        settings = load_settings(settings_path())
        clean = not failed and not not_run
        with open_store("aerie close_run") as connection:
            for task in context["dag"].tasks if has_remote(settings) else ():
                if isinstance(task, StageOperator) and is_remote(settings, task.stage):  # tries that failed, too
                    record_remote(connection, task.stage, task.task_id, instance, finished=False)
            summary = build_summary(connection, stage_request(settings, parameters, run_id=run_id))
            finish_run(connection, run_id=run_id, state="success" if clean else "failed", summary=summary)
            for rejection in rejections(summary):
                message = f"run {run_id} ended by a decision: {rejection}; what came after was skipped"
                self.log.warning(message)
                send_alert(
                    connection, Alert(reason="rejected", message=message, run_id=run_id, edition=parameters.edition)
                )
            if not clean:
                RunEnding.of(context, states, reason="tasks were not run").tell(connection)
        if not clean:
            names = ", ".join(failed)
            raise RunFailed(f"the run did not finish cleanly: {names} failed, {not_run:,} tasks were not run")
        return summary


def parameters_of(context: Context) -> RunParameters:
    """The run's parameters, from the DAG run's form. A backfill ends with ``validate`` where it does not say ``to``.

    Raises:
        BadInput: a parameter has a value that the pipeline does not know.
    """
    backfill = context["dag_run"].run_type == DagRunType.BACKFILL_JOB.value
    return run_parameters(context["params"], backfill=backfill)

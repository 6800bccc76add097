"""Who is told of what: alerts go to the store, and through Apprise to the receivers of an Airflow connection.

A receiver that fails, hangs or refuses never fails a task, and is never hidden: what it said is in the alert's row and
in the log. What is heavy to import is imported where an alert is sent: this file is read with every DAG.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseHook, BaseNotifier
from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret

from aerie.alerting import (
    DEADLINE_AT_RISK,
    DEADLINE_MISSED,
    RUN_FAILED,
    TASK_FAILED,
    WITHOUT_A_WORD,
    Alert,
    FailedTask,
    first_useful_line,
    run_failure,
)
from aerie.deadline import moment, past_deadline
from aerie.errors import AerieError, BadInput, Failed
from aerie.placement import is_remote
from aerie.settings.machine import settings_path
from aerie.settings.pipeline import AlertSettings, load_settings
from aerie_airflow.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import DAG, Context

    from aerie.remote import LeftFailure
    from aerie.stages import StageRequest
    from aerie.store.connection import Connection

log = logging.getLogger(__name__)

CLOSING_TASK = "close_run"


class RunFailed(Failed):
    """Raised by the closing task alone, to end its run as it went; it has told of it already."""


@dataclass(frozen=True)
class Delivery:
    """What became of a message: whether a receiver took it, and what those said that did not."""

    delivered: bool
    error: str | None


def send_alert(connection: Connection, alert: Alert) -> None:
    """Record an alert and tell of it; what its task told of before is recorded only.

    Raises:
        Retryable: the store is gone. A delivery that fails raises nothing.
    """
    from aerie.store.queries.alerts import has_told, record_alert, record_delivery

    told = (
        alert.run_id is not None
        and alert.task_id is not None
        and has_told(
            connection,
            run_id=alert.run_id,
            task_id=alert.task_id,
            try_number=alert.try_number,
            reason=alert.reason,
            message=alert.message,
            within_try=alert.reason == TASK_FAILED,
        )
    )
    alert_id = record_alert(connection, **alert.model_dump())
    if told:
        log.info("alert %s is recorded, not sent: this task told of it before", alert.reason)
        return
    delivery = deliver_alert(alert)
    if delivery is not None:
        record_delivery(connection, alert_id=alert_id, delivered=delivery.delivered, error=delivery.error)


def record_failure(connection: Connection, failure: LeftFailure) -> None:
    """Record the alert of a try that failed on a host without the store; send it where that host could not.

    Raises:
        Retryable: the store is gone.
    """
    from aerie.store.queries.alerts import record_alert, record_delivery

    if failure.delivered:
        alert_id = record_alert(connection, **failure.alert.model_dump())
        record_delivery(connection, alert_id=alert_id, delivered=True, error=None)
    else:
        send_alert(connection, failure.alert)


def deliver_alert(alert: Alert) -> Delivery | None:
    """Send an alert to the receivers of the configured connection; None where there is no such connection."""
    from aerie.delivery import deliver

    try:
        connection_id = alert_settings().connection_id
        try:
            connection = BaseHook.get_connection(connection_id)
        except AirflowNotFoundException:
            _say_that_nobody_is_told(connection_id)
            return None
        outcomes = deliver(receivers_of(connection), title=alert.title, body=alert.body, kind=alert.kind)
    except Exception as error:  # noqa: BLE001 - a notifier never fails its task: the row and the log say what it was
        delivery = Delivery(False, first_useful_line(error))
    else:
        failures = "; ".join(f"{one.receiver}: {one.error}" for one in outcomes if one.error is not None)
        delivery = Delivery(any(one.error is None for one in outcomes), failures or None)
    if delivery.error is not None:
        log.error("alert %s was not delivered everywhere: %s", alert.reason, delivery.error)
    return delivery


def receivers_of(connection: Any) -> list[str]:
    """Apprise URLs of an Airflow connection. From now on the log masks what is secret in them.

    Raises:
        BadInput: the connection has no URLs.
    """
    from airflow.providers.apprise.hooks.apprise import AppriseHook

    from aerie.delivery import private_parts
    from aerie.masking import secrets_of_url

    name = connection.conn_id
    expected = f'connection {name}: expected extra {{"config": [{{"path": "an Apprise URL"}}, ...]}}'
    if "config" not in connection.extra_dejson:
        raise BadInput(f"{expected}, and there is no config")
    config = AppriseHook(name).get_config_from_conn(connection)
    entries = config if isinstance(config, list) else [config]
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries):
        raise BadInput(f"{expected}, and an entry has no path")
    urls = [str(entry["path"]) for entry in entries]
    # What can be told of a URL by itself first: Apprise logs one that it cannot read.
    for secrets_of in (secrets_of_url, private_parts):
        for url in urls:
            for secret in secrets_of(url):
                mask_secret(secret)
    return urls


def alert_settings() -> AlertSettings:
    """Settings of alerts; where the configuration is what is wrong, an alert that says so is still sent."""
    try:
        return load_settings(settings_path()).alerts
    except BadInput as error:
        defaults = AlertSettings()
        log.warning("alerts go to connection %s, because the configuration is wrong: %s", defaults.connection_id, error)
        return defaults


@cache
def _say_that_nobody_is_told(connection_id: str) -> None:
    log.info("alerts are in the store only: there is no Airflow connection %s (docs/airflow.md)", connection_id)


def stage_alert(
    request: StageRequest,
    *,
    reason: str,
    message: str,
    stage: str,
    task_id: str,
    try_number: int,
    log_url: str | None,
) -> Alert:
    """The alert that a stage raised in a try of its task."""
    return Alert(
        reason=reason,
        message=message,
        run_id=request.run_id,
        edition=request.edition,
        dataset=request.dataset,
        stage=stage,
        task_id=task_id,
        try_number=try_number,
        log_url=log_url,
    )


class TaskAlerts:
    """What one task tells of while it runs. Its log has been told already."""

    def __init__(self, connection: Connection, request: StageRequest, *, stage: str, context: Context) -> None:
        self._connection = connection
        self._request = request
        self._stage = stage
        self._instance = context["ti"]
        self._deadline = _deadline(request, context)

    def send(self, reason: str, message: str) -> None:
        """Record an alert of the stage, and tell of it.

        Raises:
            Retryable: the store is gone.
        """
        alert = stage_alert(
            self._request,
            reason=reason,
            message=message,
            stage=self._stage,
            task_id=self._instance.task_id,
            try_number=self._instance.try_number,
            log_url=self._instance.log_url,
        )
        send_alert(self._connection, alert)

    def watch(self, figures: Mapping[str, Any]) -> None:
        """Tell, once, of an end that is expected after the run's deadline. ``figures`` are a progress line's."""
        if self._deadline is None:
            return
        late = past_deadline(figures, now=datetime.now(UTC), deadline=self._deadline)
        if late is not None:
            self._deadline = None
            log.warning("ALERT %s: %s", DEADLINE_AT_RISK, late)
            self.send(DEADLINE_AT_RISK, late)


def _deadline(request: StageRequest, context: Context) -> datetime | None:
    """When the run should have ended, counted from its start; None without a deadline."""
    hours, started = request.settings.alerts.deadline_hours, context["dag_run"].start_date
    return None if hours is None or started is None else started + timedelta(hours=hours)


def run_deadline(settings: AlertSettings) -> DeadlineAlert | None:
    """The deadline of every run, for its DAG. Airflow fixes it as a run is queued: no plan of the run can move it."""
    if settings.deadline_hours is None:
        return None
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(hours=settings.deadline_hours),
        callback=AsyncCallback(DeadlineNotifier),
    )


class _AlertNotifier(BaseNotifier):
    """A notifier that runs wherever Airflow calls it: in a task, in the DAG processor, or in the triggerer."""

    async def async_notify(self, context: Context) -> None:
        """As ``notify``, beside the triggerer's event loop: a receiver that hangs holds up no trigger."""
        await asyncio.to_thread(self.notify, context)


class TaskFailureNotifier(_AlertNotifier):
    """Tells of a task that failed for good: what its error says first, and where its log is."""

    def notify(self, context: Context) -> None:
        """Send the alert, where the task does not only end its run as it went."""
        error = context.get("exception")
        if isinstance(error, RunFailed):
            return
        alert = _task_failure(context, error)
        if _is_remote(alert.stage):
            _tell_from_afar(alert)
        else:
            _with_store(lambda connection: _tell(connection, alert))


class RunFailureNotifier(_AlertNotifier):
    """Ends a failed run in the store and tells of it, where its closing task did not get to.

    Somebody marked it failed, or it never opened.
    It runs in the DAG processor, where what Airflow knows is far: the first question for the states of tasks loads a
    whole API there, which may take longer than the processor lets a callback live. The store knows enough.
    """

    def notify(self, context: Context) -> None:
        """Record the run's end and the alert, and send that, unless the run was closed."""
        instance = context.get("ti")
        states = {} if instance is None else {str(instance.task_id): "failed"}

        def tell(connection: Connection | None) -> None:
            ending = RunEnding.of(context, states, reason=str(context["reason"]))
            if connection is None:
                ending.tell(None)
            elif not ending.is_closed(connection):
                ending.close(connection)  # first: where the store goes away here, nobody was told yet
                ending.tell(connection)

        _with_store(tell)


class DeadlineNotifier(_AlertNotifier):
    """Tells of a run that has not ended by its deadline. It runs in the triggerer, whose context is a document."""

    def notify(self, context: Context) -> None:
        """Send the alert."""
        missed: Mapping[str, Any] = context
        run, at = missed["dag_run"], moment(missed["deadline"]["deadline_time"])

        def tell(connection: Connection | None) -> None:
            alert = Alert(
                reason=DEADLINE_MISSED,
                message=f"the run is {run['state']} at its deadline, {at} (alerts.deadline_hours after it was queued)",
                run_id=run["dag_run_id"],
                edition=_told_of_run(connection, run["dag_run_id"], since=None)[0],
                log_url=page_of(run["dag_id"], run["dag_run_id"], None),
            )
            _tell(connection, alert)

        _with_store(tell)


def _is_remote(stage: str | None) -> bool:
    """Whether a stage runs on a host without the store; not known where the configuration is what is wrong."""
    try:
        return stage is not None and is_remote(load_settings(settings_path()), stage)
    except BadInput as error:
        log.warning("taken for a task of the control side: %s", error)
        return False


def _tell_from_afar(alert: Alert) -> None:
    """Send an alert from a host without the store, and leave it beside the data, where the control side records it."""
    from aerie.remote import LeftFailure, leave_failure

    log.warning("ALERT %s: %s", alert.reason, alert.message)
    delivery = deliver_alert(alert)
    try:
        leave_failure(LeftFailure(alert=alert, delivered=delivery is not None and delivery.delivered))
    except BadInput as error:
        log.error("the store will not have this alert: it cannot be left beside the data: %s", error)


def _task_failure(context: Context, error: Any) -> Alert:
    instance, task = context["ti"], context["task"]
    return Alert(
        reason=TASK_FAILED,
        message=first_useful_line(error) if error else WITHOUT_A_WORD,
        run_id=instance.run_id,
        edition=context["params"].get("edition"),
        dataset=getattr(task, "dataset", None),
        stage=getattr(task, "stage", None),
        task_id=instance.task_id,
        try_number=instance.try_number,
        log_url=instance.log_url,
    )


@dataclass(frozen=True)
class RunEnding:
    """A run that failed. ``states`` are those of its tasks, ``reason`` is Airflow's where none of them failed."""

    dag: DAG
    run_id: str
    since: datetime | None
    states: Mapping[str, Any]
    reason: str

    @classmethod
    def of(cls, context: Context, states: Mapping[str, Any], *, reason: str) -> RunEnding:
        """The ending of a callback's or of a task's run; a run that is cleared begins anew."""
        since = getattr(context.get("dag_run"), "start_date", None)
        return cls(context["dag"], str(context["run_id"]), since, states, reason)

    def is_closed(self, connection: Connection) -> bool:
        """Whether the closing task has recorded this ending, and told of it."""
        from aerie.store.queries.runs import read_run

        run = read_run(connection, run_id=self.run_id)
        ended = run["finished_at"] if run else None
        return ended is not None and (self.since is None or ended >= self.since)

    def close(self, connection: Connection) -> None:
        """Record that the run failed, without the summary that only its closing task writes."""
        from aerie.store.queries.runs import finish_run

        finish_run(connection, run_id=self.run_id, state="failed", summary={})

    def tell(self, connection: Connection | None) -> None:
        """Record the alert, and send it where a task failed that told nothing itself."""
        failed = [task.task_id for task in self.dag.tasks if self.states.get(task.task_id) == "failed"]
        failed = [task_id for task_id in failed if task_id != CLOSING_TASK] or failed
        edition, told = _told_of_run(connection, self.run_id, since=self.since)
        # First causes first: Airflow does not say when a task failed, the alerts do.
        tasks = [FailedTask(task_id, message) for task_id, message in told.items() if task_id in failed]
        untold = [task_id for task_id in failed if task_id not in told]
        tasks += [FailedTask(task_id) for task_id in untold]
        first = self.dag.get_task(tasks[0].task_id) if tasks else None
        not_run = sum(1 for state in self.states.values() if state == "upstream_failed")
        alert = Alert(
            reason=RUN_FAILED,
            message=run_failure(tasks, not_run=not_run, reason=self.reason),
            run_id=self.run_id,
            edition=edition,
            dataset=getattr(first, "dataset", None),
            stage=getattr(first, "stage", None),
            log_url=page_of(self.dag.dag_id, self.run_id, first.task_id if first else None),
        )
        _tell(connection, alert, news=bool(untold) or not failed)


def _told_of_run(
    connection: Connection | None, run_id: str, *, since: datetime | None
) -> tuple[str | None, dict[str, str]]:
    """A run's edition, and what its tasks told of their failures since it began, first things first."""
    from aerie.store.queries.alerts import list_alerts
    from aerie.store.queries.runs import read_run

    if connection is None:
        return None, {}
    run = read_run(connection, run_id=run_id)
    rows = reversed(list_alerts(connection, run_id=run_id))
    failures = [row for row in rows if row["reason"] == TASK_FAILED and (since is None or row["at"] >= since)]
    return run["edition"] if run else None, {row["task_id"]: row["message"] for row in failures}


def page_of(dag_id: str, run_id: str, task_id: str | None) -> str:
    """Airflow's page of a task in a run, with its log; of the run, where no task is to blame."""
    from airflow.sdk.configuration import conf

    base = str(conf.get("api", "base_url", fallback="http://localhost:8080")).rstrip("/")
    return f"{base}/dags/{dag_id}/runs/{quote(run_id)}" + (f"/tasks/{task_id}" if task_id else "")


def _tell(connection: Connection | None, alert: Alert, *, news: bool = True) -> None:
    """Record an alert where there is a store, and send it where it is news."""
    from aerie.store.queries.alerts import record_alert

    log.warning("ALERT %s: %s", alert.reason, alert.message)
    if connection is None:
        if news:
            deliver_alert(alert)
    elif news:
        send_alert(connection, alert)
    else:
        record_alert(connection, **alert.model_dump())


def _with_store(tell: Callable[[Connection | None], None]) -> None:
    """Tell with the store at hand; where it is gone, once more without it: somebody must still hear of it."""
    try:
        with open_store("aerie alerts") as connection:
            tell(connection)
    except AerieError as error:
        log.error("an alert is not recorded in the store: %s", error)
        tell(None)

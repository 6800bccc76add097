"""Where a run waits for a person, by Airflow's own human in the loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException

from aerie.errors import Failed
from aerie.pipeline import place_of
from aerie.settings.machine import settings_path
from aerie.settings.pipeline import load_settings
from aerie_airflow.operators import parameters_of
from aerie_airflow.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import Context

    from aerie.approvals import Gate

QUESTION = "question"
"""The XCom that keeps what was asked: the answer is received by another process."""


class GateOperator(ApprovalOperator):
    """Asks a person before a step, where the run's parameters say so; it is skipped where they do not.

    It waits without a slot of a pool or an executor. A rejection skips every step after it, and the run ends well:
    nothing failed. Nobody's answer within ``approvals.timeout_hours`` of the configuration fails the run.

    :param gate: the step that waits.
    """

    template_fields: Collection[str] = ()
    ui_color = "#fbf0d3"

    def __init__(self, *, gate: Gate, **kwargs: Any) -> None:
        super().__init__(subject=f"Go on with {gate}?", ignore_downstream_trigger_rules=True, **kwargs)
        self.gate = gate

    def execute(self, context: Context) -> None:
        """Ask.

        Raises:
            AirflowSkipException: nobody is to be asked, or the step is no part of the run.
            BadInput: the edition lacks what the question is about.
            TaskAwaitingInput: always, where it asks: Airflow goes on with ``execute_complete``.
        """
        from aerie.approvals import question
        from aerie.summary import read_manifests

        parameters = parameters_of(context)
        if not parameters.approvals:
            raise AirflowSkipException("nobody is asked: approvals are off in this run")
        if parameters.pilot:
            raise AirflowSkipException("nobody is asked in a pilot: it is small; the whole run asks")
        if place_of(parameters, stage=self.gate, dataset=None, phase=None) != "inside":
            raise AirflowSkipException(f"nobody is asked: {self.gate} is not part of this run")
        settings = load_settings(settings_path())
        with open_store(f"aerie {self.task_id}") as connection:
            asked = question(self.gate, settings, parameters, read_manifests(connection, edition=parameters.edition))
        self.subject, self.body = asked.subject, asked.body
        if settings.approvals.timeout_hours is not None:
            self.response_timeout = timedelta(hours=settings.approvals.timeout_hours)
        context["ti"].xcom_push(QUESTION, {"subject": asked.subject, "body": asked.body})
        self.log.info("%s\n%s", asked.subject, asked.body)
        super().execute(context)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Record the answer, and skip what comes after it where it is a rejection.

        Raises:
            Failed: nobody answered in time.
        """
        if "error" not in event:
            self._record(context, event)
        return super().execute_complete(context, dict(event))

    def process_trigger_event_error(self, event: dict[str, Any]) -> None:
        """Say that nobody answered.

        Raises:
            Failed: always.
        """
        waited = load_settings(settings_path()).approvals.timeout_hours
        limit = "" if waited is None else f" within {waited:g} h (approvals.timeout_hours)"
        raise Failed(
            f"nobody approved or rejected {self.gate}{limit}: {event['error']} Clear this task to be asked again"
        )

    def _record(self, context: Context, event: Mapping[str, Any]) -> None:
        from aerie.store.queries.decisions import record_decision

        instance = context["ti"]
        asked = instance.xcom_pull(task_ids=self.task_id, key=QUESTION)
        approved = event["chosen_options"] == [self.APPROVE]
        by, at = event["responded_by_user"]["name"], event["responded_at"]
        with open_store(f"aerie {self.task_id}") as connection:
            record_decision(
                connection,
                run_id=str(instance.run_id),
                edition=parameters_of(context).edition,
                task_id=self.task_id,
                subject=asked["subject"],
                body=asked["body"],
                approved=approved,
                decided_by=by,
                decided_at=at,
            )
        self.log.info("%s %s %r", by, "approved" if approved else "rejected", asked["subject"])

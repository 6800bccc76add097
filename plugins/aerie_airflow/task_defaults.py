"""What every task of Aerie's DAGs has in common: when it is tried again, and who is told when it fails."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule

from aerie_airflow.notifications import TaskFailureNotifier

# A stage says by its exit code whether trying again can help; what is for good fails at once.
FAIL_FOR_GOOD = ExceptionRetryPolicy(
    rules=[
        RetryRule(
            exception="aerie.errors.BadInput", action=RetryAction.FAIL, reason="a person has to change something"
        ),
        RetryRule(exception="aerie.errors.Failed", action=RetryAction.FAIL, reason="it would fail the same way again"),
    ]
)

ASKED_AGAIN_TIMES = 10
"""Airflow 3.3 can lose an answer that comes within a second or so of the question, as a program's does, when it still
takes the waiting task for a running one; it calls that a failure and asks again."""

TASK_DEFAULTS: Mapping[str, Any] = {
    "retries": 2,
    "retry_delay": timedelta(seconds=10),
    "retry_policy": FAIL_FOR_GOOD,
    "on_failure_callback": TaskFailureNotifier(),
}

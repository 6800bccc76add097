"""``python -m aerie_airflow.try_alerts``: a test message to every receiver, as a person is told of it at a terminal."""

from __future__ import annotations

import sys

from airflow.models.connection import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from aerie.alerting import TEST, Alert
from aerie.delivery import Outcome, deliver
from aerie.errors import AerieError, BadInput, Failed
from aerie_airflow.notifications import alert_settings, receivers_of


def try_alerts() -> list[Outcome]:
    """Send the message; returns what became of it at each receiver.

    Raises:
        BadInput: there is no connection, or it has no receivers.
    """
    connection_id = alert_settings().connection_id
    try:
        connection = Connection.get_connection_from_secrets(connection_id)
    except AirflowNotFoundException as error:
        raise BadInput(
            f"there is no Airflow connection {connection_id}: make it (docs/airflow.md), of type Apprise"
        ) from error
    alert = Alert(reason=TEST, message="This is a test of Aerie's alerts: nothing happened.")
    return deliver(receivers_of(connection), title=alert.title, body=alert.body, kind=alert.kind)


def main() -> int:
    """Say what became of the message; the exit code is that of ``aerie.errors``."""
    try:
        outcomes = try_alerts()
        for outcome in outcomes:
            sys.stdout.write(f"{outcome.receiver}: {outcome.error or 'delivered'}\n")
        failed = sum(1 for outcome in outcomes if outcome.error is not None)
        if failed:
            raise Failed(f"{failed} of {len(outcomes)} receivers did not take the message")
    except AerieError as error:
        sys.stderr.write(f"aerie: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

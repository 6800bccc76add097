"""A benchmark of any drafter, outside the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from aerie.errors import BadInput
from aerie.settings.machine import settings_path
from aerie.settings.pipeline import load_settings
from aerie_airflow.assets import DRAFTER
from aerie_airflow.links import ServerLogLink
from aerie_airflow.operators import StageOperator
from aerie_airflow.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import Context

    from aerie.stages import StageRequest


class BenchmarkOperator(StageOperator):
    """Runs a stage of a benchmark whose parameters name any drafter, or a server.

    Without either it takes the drafter whose asset started the run.
    """

    operator_extra_links = (ServerLogLink(),)

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the stage and return its counts.

        Raises:
            AirflowSkipException: there is no server of ours to stop: it is someone else's, or none was started.
            BadInput, Failed, Retryable: the parameters make no benchmark, or what the stage raised.
        """
        from aerie.drafter_benchmarks import benchmark_request, parse_parameters
        from aerie.store.queries.drafters import list_drafters

        if self.stage == "serve_stop":
            return self._answer(context, _request_to_stop(context))
        settings, run_id = load_settings(settings_path()), str(context["ti"].run_id)
        parameters = parse_parameters(context["params"])
        events = context["triggering_asset_events"].get(DRAFTER, ())
        parameters = parameters.with_published(event.extra for event in events)
        with open_store(f"aerie {self.task_id}") as connection:
            drafters = list_drafters(connection)
        return self._answer(context, benchmark_request(settings, parameters, drafters, run_id=run_id))


def _request_to_stop(context: Context) -> StageRequest:
    """The request that ends the run's hold of our server.

    Raises:
        AirflowSkipException: there is none to end.
    """
    from aerie.drafter_benchmarks import parse_parameters, plain_request

    settings = load_settings(settings_path())
    try:
        parameters = parse_parameters(context["params"])
        request = plain_request(settings, parameters, run_id=str(context["ti"].run_id))
    except BadInput as error:
        # It is the measurement that fails of it, before it asks for a server: one cause, one message.
        raise AirflowSkipException(f"no server was started: {error}") from error
    if parameters.server_url is not None:
        raise AirflowSkipException(f"{parameters.server_url} is someone else's server: it is left running")
    return request

"""Links above a task's log, to Aerie's own pages: Airflow works them out when the task has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from urllib.parse import quote, urlsplit

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

    from aerie_airflow.operators import StageOperator

NO_LINK = ""
"""Airflow shows a link without an address as not there."""


def page(*parts: str) -> str:
    """Address of a page of Aerie's below Airflow's own, each part quoted."""
    root = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
    return "/".join((root, "aerie", *(quote(part, safe="") for part in parts)))


def dataset_page(operator: BaseOperator, *parts: str) -> str:
    """A page of the data set that the task worked on; none where it works on the whole edition, or did nothing."""
    request = cast("StageOperator", operator).request
    if request is None or request.dataset is None:
        return NO_LINK
    return page("editions", request.edition, "datasets", request.dataset, *parts)


class RunLink(BaseOperatorLink):
    """The run in the dashboard."""

    name = "Run in Aerie"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Address of the run's page."""
        return page("runs", ti_key.run_id)


class DatasetLink(BaseOperatorLink):
    """The data set in the dashboard."""

    name = "Data set in Aerie"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Address of the data set's page."""
        return dataset_page(operator)


class SamplesLink(BaseOperatorLink):
    """The data set's samples as text; each leads to its row of the response log."""

    name = "Decoded samples"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Address of the sample browser."""
        return dataset_page(operator, "samples")


class ResponseLogLink(BaseOperatorLink):
    """The files of the data set's response log."""

    name = "Response log"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Address of the response log's page."""
        return dataset_page(operator, "responses")


class ServerLogLink(BaseOperatorLink):
    """The log of the server that the task used last."""

    name = "Server log"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Address of the log of the launch; none where no server of ours was used."""
        token = cast("StageOperator", operator).launch_token
        return page("servers", token, "log") if token else NO_LINK

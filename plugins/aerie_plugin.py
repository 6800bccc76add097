"""What Airflow loads of Aerie: in its API server, and in every other component and task."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from aerie_airflow.timetable import OnDemandTimetable
from aerie_dashboard import PREFIX

Message = MutableMapping[str, Any]

# Airflow may be served below a path; its page looks for plugins from the root of the host.
BASE = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/") + PREFIX
ICON = f"{BASE}/static/aerie.svg"


async def dashboard(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """The dashboard's app; imported by the first who asks for a page, because tasks and the scheduler never do."""
    from aerie_dashboard.app import app

    await app(scope, receive, send)


class AeriePlugin(AirflowPlugin):
    """Aerie's entry in Airflow's list of plugins: a timetable, the dashboard, and its places in Airflow's pages."""

    name = "aerie"
    timetables = [OnDemandTimetable]
    fastapi_apps = [{"app": dashboard, "url_prefix": PREFIX, "name": "Aerie"}]
    external_views = [
        {"name": "Aerie", "href": f"{BASE}/", "destination": "nav", "url_route": "aerie", "icon": ICON},
        {
            "name": "Aerie",
            "href": f"{BASE}/runs/{{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "aerie_run",
            "icon": ICON,
        },
        {
            "name": "Aerie",
            "href": f"{BASE}/tasks/{{RUN_ID}}/{{TASK_ID}}",
            "destination": "task_instance",
            "url_route": "aerie_task",
            "icon": ICON,
        },
    ]
    react_apps = [
        {
            "name": "Aerie",
            "bundle_url": f"{BASE}/static/card.js",
            "destination": "dashboard",
            "url_route": "aerie_card",
        },
    ]

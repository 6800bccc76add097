"""Nobody sees a page without Airflow's session, and viewers change nothing."""

import re

import pytest
from fastapi.routing import APIRoute

from aerie_dashboard.app import create_app

from ...dashboard import EDITION, LAUNCH, RUN

EXAMPLES = {
    "run_id": RUN, "edition": EDITION, "dataset": "B1_glaive", "sample_id": "B1_glaive-0001",
    "launch_token": LAUNCH, "drafter_id": "main-1", "alert_id": "1", "name": "dashboard.css",
    "task_id": "B1_glaive.generate",
}  # fmt: skip
ROUTES = [
    (method, route.path) for route in create_app().routes if isinstance(route, APIRoute) for method in route.methods
]


def address(path: str) -> str:
    return "/aerie" + re.sub(r"\{(\w+)[^}]*\}", lambda name: EXAMPLES[name[1]].replace("/", "%2F"), path)


def test_the_app_has_no_pages_about_itself():
    assert {route.path for route in create_app().routes} & {"/docs", "/redoc", "/openapi.json"} == set()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_stranger_gets_401_everywhere(dashboard, method, path):
    with dashboard.client(None) as client:
        assert client.request(method, address(path)).status_code == 401


@pytest.mark.parametrize("role", ["viewer", "user", "op"])
@pytest.mark.parametrize(
    "path", ["/", f"/runs/{RUN}", "/servers", f"/servers/{LAUNCH}/log", "/card", "/static/card.js"]
)
def test_every_role_sees(dashboard, role, path):
    with dashboard.client(role) as client:
        assert client.get(f"/aerie{path}").status_code == 200


@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("user", 303), ("op", 303)])
def test_viewers_change_nothing_and_others_may(dashboard, role, status):
    with dashboard.client(role) as client:
        answer = client.post("/aerie/alerts/1/acknowledge", headers={"Origin": dashboard.url})
    assert answer.status_code == status


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://elsewhere.example"}, {"Origin": "null"}])
def test_a_change_that_another_page_sends_is_refused(dashboard, headers):
    with dashboard.client("op") as client:
        assert client.post("/aerie/alerts/1/acknowledge", headers=headers).status_code == 403


def test_pages_run_no_script_but_their_own(dashboard):
    with dashboard.client("viewer") as client:
        policy = client.get("/aerie/").headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe-inline" not in policy

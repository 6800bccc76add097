"""Nobody sees a page without Airflow's session, and viewers change nothing."""

import re
from urllib.parse import quote

import pytest
from fastapi import Request
from fastapi.routing import APIRoute

from aerie.store.connection import connected, transaction
from aerie.store.queries.alerts import record_alert
from aerie_dashboard.app import create_app
from aerie_dashboard.security import is_own

from ...dashboard import EDITION, LAUNCH, RUN
from ...dashboard_samples import DATASET, DRAFTER, JUDGED, KEPT

EXAMPLES = {
    "run_id": RUN, "edition": JUDGED, "dataset": DATASET, "sample_id": KEPT, "launch_token": LAUNCH,
    "drafter_id": DRAFTER, "alert_id": "1", "name": "dashboard.css", "task_id": "B1_glaive.generate",
}  # fmt: skip
ROUTES = [
    (method, route.path) for route in create_app().routes if isinstance(route, APIRoute) for method in route.methods
]
READ = [path for method, path in ROUTES if method == "GET"]
CHANGED = [(method, path) for method, path in ROUTES if method not in ("GET", "HEAD")]


def address(path: str) -> str:
    return "/aerie" + re.sub(r"\{(\w+)[^}]*\}", lambda name: EXAMPLES[name[1]].replace("/", "%2F"), path)


def test_the_app_has_no_pages_about_itself():
    assert {route.path for route in create_app().routes} & {"/docs", "/redoc", "/openapi.json"} == set()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_stranger_gets_401_everywhere(dashboard, method, path):
    with dashboard.client(None) as client:
        assert client.request(method, address(path)).status_code == 401


def test_every_route_is_one_that_the_walk_can_take(dashboard):
    # A mount would be served without the app's dependencies, and be no route of this walk.
    others = [route for route in create_app().routes if not isinstance(route, APIRoute)]
    assert others == [] and len(READ) > 12 and CHANGED == [("POST", "/alerts/{alert_id}/acknowledge")]


@pytest.mark.parametrize("role", ["viewer", "user", "op"])
@pytest.mark.parametrize("path", READ)
def test_every_role_sees_every_page(dashboard, role, path):
    with dashboard.client(role) as client:
        assert client.get(address(path)).status_code in (200, 307)


@pytest.mark.parametrize("role", ["viewer", "user", "op"])
def test_only_who_may_acknowledge_an_alert_is_shown_the_button(dashboard, role):
    with connected(dashboard.store_url) as connection:
        number = record_alert(connection, reason="run_failed", message="for the button", run_id=RUN, edition=EDITION)
    may = role != "viewer"
    with dashboard.client(role) as client:
        for path in ("/aerie/", f"/aerie/runs/{quote(RUN)}"):
            assert (f"/alerts/{number}/acknowledge" in client.get(path).text) == may
        answer = client.post(f"/aerie/alerts/{number}/acknowledge", headers={"Origin": dashboard.url})
        assert answer.status_code == (303 if may else 403)
        assert (f"seen by {role}" in client.get("/aerie/").text) == may
    with connected(dashboard.store_url) as connection, transaction(connection) as cursor:
        cursor.execute("DELETE FROM alerts WHERE id = %s", (number,))


@pytest.mark.parametrize("role", ["viewer", "op"])
def test_no_role_reads_an_alert_that_is_not_there_as_seen(dashboard, role):
    with dashboard.client(role) as client:
        answer = client.post("/aerie/alerts/999999/acknowledge", headers={"Origin": dashboard.url})
    assert answer.status_code == (404 if role == "op" else 403)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1.elsewhere.example"},
        {"Referer": "http://elsewhere.example/"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
)
@pytest.mark.parametrize(("method", "path"), CHANGED)
def test_a_change_that_another_page_sends_is_refused(dashboard, method, path, headers):
    with dashboard.client("op") as client:
        assert client.request(method, address(path), headers=headers).status_code == 403


def test_behind_a_proxy_that_renames_the_host_a_change_comes_from_the_address_that_people_type(dashboard):
    with connected(dashboard.store_url) as connection:
        number = record_alert(connection, reason="run_failed", message="seen through a proxy", run_id=RUN)
    path, host = f"/aerie/alerts/{number}/acknowledge", "airflow-api-server:8080"
    with dashboard.client("op") as client:
        for other in ("http://elsewhere.example", dashboard.url.replace("http:", "https:"), f"{dashboard.url}0", "//["):
            answer = client.post(path, headers={"Host": host, "Origin": other})
            assert answer.status_code == 403 and "base_url" in answer.text
        page = f"{dashboard.url}/aerie/runs/{quote(RUN)}"
        answer = client.post(path, headers={"Host": host, "Origin": dashboard.url, "Referer": page})
    assert (answer.status_code, answer.headers["Location"]) == (303, f"/aerie/runs/{quote(RUN)}")
    with connected(dashboard.store_url) as connection, transaction(connection) as cursor:
        cursor.execute("DELETE FROM alerts WHERE id = %s", (number,))


def test_a_link_cannot_change_anything(dashboard):
    with dashboard.client("op") as client:
        assert client.get("/aerie/alerts/1/acknowledge").status_code == 405


def test_pages_run_no_script_but_their_own(dashboard):
    with dashboard.client("viewer") as client:
        policy = client.get("/aerie/").headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe-inline" not in policy


@pytest.mark.parametrize(
    ("public", "address", "own"),
    [
        ("https://Aerie.example.org:443/airflow/", "https://aerie.example.org", True),
        ("https://aerie.example.org", "http://aerie.example.org", False),
        ("https://aerie.example.org", "https://aerie.example.org.elsewhere", False),
        ("aerie.example.org", "null", False),
        ("", "null", False),
        ("", "", False),
    ],
)
def test_an_address_is_this_servers_by_scheme_host_and_port_alone(monkeypatch, public, address, own):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", public)
    request = Request({"type": "http", "headers": [(b"host", b"airflow-api-server:8080")]})
    assert is_own(request, address) is own

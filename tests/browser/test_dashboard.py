"""The dashboard in a real browser: its theme, its refresh, its scripts, and how it looks."""

from datetime import UTC, datetime
from urllib.parse import quote

import pytest

from aerie.store.connection import connected
from aerie.store.queries.metrics import MetricRow, record_metrics

from ..chromium import take_screenshots
from ..dashboard import EDITION, LIVE_RUN, RUN, figures

PAGES = {
    "overview": "/",
    "run": f"/runs/{quote(RUN, safe='')}",
    "run-live": f"/runs/{quote(LIVE_RUN, safe='')}",
    "servers": "/servers",
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [768, 1280])
def test_a_page_loads_without_complaints_and_fits_its_window(signed_in, dashboard, name, width):
    complaints = []
    signed_in.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    signed_in.set_viewport_size({"width": width, "height": 900})
    signed_in.goto(f"{dashboard.url}/aerie{PAGES[name]}")
    assert complaints == []
    assert signed_in.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    take_screenshots(signed_in, f"{name}-{width}")


def test_the_theme_is_the_one_chosen_in_airflow(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/aerie/")
    background = "getComputedStyle(document.body).backgroundColor"
    light = signed_in.evaluate(background)
    signed_in.evaluate("localStorage.setItem('theme', 'dark')")
    signed_in.reload()
    assert signed_in.evaluate("document.documentElement.dataset.theme") == "dark"
    assert signed_in.evaluate(background) != light


def test_charts_are_drawn_and_drawn_again_in_the_other_theme(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/aerie/servers")
    canvas = signed_in.locator("canvas[data-chart]").first
    before = canvas.evaluate("one => one.toDataURL()")
    signed_in.emulate_media(color_scheme="dark")
    signed_in.wait_for_function(
        "before => document.querySelector('canvas[data-chart]').toDataURL() !== before", arg=before
    )


def test_a_running_run_refreshes_itself_in_place(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/aerie{PAGES['run-live']}")
    signed_in.evaluate("window.kept = true")
    with connected(dashboard.store_url) as connection:
        row = figures("B3_magicoder", 900_000, tokens_per_second=4321.0)
        record_metrics(
            connection,
            [MetricRow(datetime(2099, 1, 1, tzinfo=UTC), LIVE_RUN, EDITION, "B3_magicoder", "generate", row)],
        )
    signed_in.get_by_text("4,321 tok/s").first.wait_for()
    assert signed_in.evaluate("window.kept")


def test_the_page_stands_in_airflows_own_and_links_lead_out_of_the_frame(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/plugin/aerie")
    frame = signed_in.frame_locator("iframe[title=Aerie]")
    frame.get_by_role("link", name=RUN).first.click()
    # Airflow takes the frame's page into its own address once it is loaded, which would undo a click before that.
    signed_in.wait_for_url("**/plugin/aerie/aerie/runs/**")
    frame.get_by_role("link", name="Run in Airflow").click()
    signed_in.wait_for_url(f"**/dags/eagle3_pipeline/runs/{quote(RUN, safe='')}**")

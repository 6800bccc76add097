"""Data sets, samples and drafters in a real browser: they run nothing of what is stored, and fit their window."""

from urllib.parse import quote

import pytest

from ..chromium import take_screenshots
from ..dashboard_samples import (
    DATASET,
    DRAFTER,
    FAILED,
    HERE,
    JUDGED,
    KEPT,
    LOOPING,
    ODD,
    ODD_ID,
    REJECTED,
    UNDECODED,
    UNMEASURED,
)

PAGES = {
    "dataset": HERE,
    "dataset-odd": ODD,
    "samples": f"{HERE}/samples",
    "samples-none": f"{HERE}/samples?state=kept&finding=loop",
    "sample": f"{HERE}/samples/{KEPT}",
    "sample-quarantined": f"{HERE}/samples/{LOOPING}",
    "sample-failed": f"{HERE}/samples/{FAILED}",
    "sample-undecoded": f"{HERE}/samples/{UNDECODED}",
    "sample-odd": f"{HERE}/samples/{quote(ODD_ID, safe='')}",
    "responses": f"{HERE}/responses",
    "drafters": "/drafters",
    "drafter": f"/drafters/{DRAFTER}",
    "drafter-rejected": f"/drafters/{REJECTED}",
    "drafter-unmeasured": f"/drafters/{UNMEASURED}",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_without_complaints_runs_no_stored_script_and_fits_its_window(signed_in, dashboard, name):
    complaints = []
    signed_in.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    for width in (1280, 768):
        signed_in.set_viewport_size({"width": width, "height": 900})
        signed_in.goto(f"{dashboard.url}/aerie{PAGES[name]}")
        assert signed_in.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        take_screenshots(signed_in, f"{name}-{width}")
    assert complaints == [] and "taken over" not in signed_in.title()


@pytest.mark.parametrize("framed", [False, True], ids=["alone", "in Airflow's frame"])
def test_the_report_of_a_corpus_opens_with_its_styles_and_runs_nothing(signed_in, dashboard, framed):
    page = f"/drafters/{DRAFTER}"
    signed_in.goto(f"{dashboard.url}/plugin/aerie/aerie{page}" if framed else f"{dashboard.url}/aerie{page}")
    shown = signed_in.frame_locator("iframe[title=Aerie]") if framed else signed_in
    with signed_in.expect_popup() as opened:
        shown.get_by_role("link", name="Corpus report").click()
    report = opened.value
    colour = report.get_by_text("94 rows").evaluate("one => getComputedStyle(one).color")
    assert colour == "rgb(4, 5, 6)"
    assert report.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(1, 2, 3)"
    assert report.title() == f"Corpus of {JUDGED}"


def test_a_name_that_is_nowhere_is_a_page_in_the_dashboards_own_look(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/aerie{HERE}/samples/none")
    signed_in.get_by_text(f"{JUDGED}/{DATASET} has no sample none").wait_for()
    take_screenshots(signed_in, "not-found")


def test_a_person_comes_from_a_reason_to_a_sample_and_its_text(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/aerie{HERE}")
    signed_in.get_by_role("link", name="loop", exact=True).click()
    assert signed_in.get_by_label("State").input_value() == "quarantined"
    assert signed_in.get_by_label("Reason or flag").input_value() == "loop"
    signed_in.get_by_label("with text").check()
    signed_in.get_by_role("button", name="Show").click()
    signed_in.get_by_role("link", name=LOOPING).click()
    signed_in.get_by_role("group", name="Boundary").first.wait_for()
    fold = signed_in.get_by_text("The other").first
    fold.click()
    assert signed_in.get_by_text("So I say the mean.").last.is_visible()


def test_samples_are_found_by_how_their_ids_begin_and_walked_page_by_page(signed_in, dashboard):
    signed_in.goto(f"{dashboard.url}/aerie{HERE}/samples")
    signed_in.get_by_role("link", name="Next").click()
    signed_in.get_by_role("link", name="glaive-050", exact=True).wait_for()
    signed_in.get_by_role("link", name="Previous").click()
    signed_in.get_by_role("link", name=KEPT, exact=True).wait_for()
    signed_in.get_by_label("Sample id, or how it begins").fill("shard 1/100%")
    signed_in.get_by_role("button", name="Show").click()
    signed_in.get_by_role("link", name=ODD_ID).click()
    signed_in.get_by_role("heading", name=ODD_ID).wait_for()

"""Takes the pictures of README and docs from the running UI.

After ``./aerie up`` and a run that went to its end:

    .aerie/envs/airflow/bin/python docs/take_pictures.py RUN_ID EDITION

Needs a Chromium (``AERIE_CHROMIUM``, default /usr/bin/chromium).
"""

import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("AERIE_HOME", ROOT / ".aerie"))
PICTURES = ROOT / "docs" / "pictures"
DAG_ID = "eagle3_pipeline"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

AROUND_THE_GRAPH = """() => {
  const boxes = [...document.querySelectorAll('.react-flow__node')].map(node => node.getBoundingClientRect());
  const x = Math.min(...boxes.map(box => box.left)) - 12, y = Math.min(...boxes.map(box => box.top)) - 12;
  const right = Math.max(...boxes.map(box => box.right)) + 12, bottom = Math.max(...boxes.map(box => box.bottom)) + 12;
  return {x, y, width: right - x, height: bottom - y};
}"""


def log_in(page: Page, url: str, password: str) -> None:
    """Sign in as ``admin``."""
    page.goto(f"{url}/auth/login")
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password", exact=True).fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_load_state("networkidle")


def take(page: Page, url: str, name: str, *, height: int = 900) -> None:
    """Write a picture of a page of the dashboard in its frame, once it has settled; without this machine's paths."""
    page.set_viewport_size({"width": 1400, "height": height})
    page.goto(url)
    page.wait_for_load_state("networkidle")
    shown = page.frame_locator("iframe[title=Aerie]")
    shown.locator("#content h1").first.wait_for()
    shown.locator("#content").evaluate("content => content.querySelectorAll('.place').forEach(one => one.remove())")
    page.wait_for_timeout(6000)
    page.screenshot(path=PICTURES / f"{name}.png")


def take_graph(page: Page, url: str) -> None:
    """The DAG as it is now, not as it was for some run."""
    page.set_viewport_size({"width": 1600, "height": 900})
    page.goto(f"{url}/dags/{DAG_ID}")
    page.get_by_label("Show Graph (Press g)").click()
    page.get_by_label("Collapse Details Panel").click()
    page.wait_for_timeout(5000)
    page.locator(".react-flow__controls-fitview").click()
    page.wait_for_timeout(2000)
    page.screenshot(path=PICTURES / "graph.png", clip=page.evaluate(AROUND_THE_GRAPH))
    page.get_by_label("Show Grid (Press g)").click()
    page.wait_for_timeout(1000)


def take_form(page: Page, url: str) -> None:
    """The form of a run, from its first field on."""
    page.set_viewport_size({"width": 1400, "height": 1000})
    page.goto(f"{url}/dags/{DAG_ID}")
    page.get_by_role("button", name="Trigger").first.click()
    page.wait_for_timeout(4000)
    page.screenshot(path=PICTURES / "form.png")


def take_dashboard(page: Page, url: str, run_id: str, edition: str) -> None:
    """The dashboard inside Airflow: a run, a data set, a sample, and the drafter."""
    dashboard = f"{url}/plugin/aerie/aerie"
    dataset = f"/editions/{edition}/datasets/B1_glaive"
    take(page, f"{dashboard}/runs/{quote(run_id, safe='')}", "dashboard_run", height=1100)
    take(page, f"{dashboard}{dataset}", "dashboard_dataset", height=1100)
    page.goto(f"{url}/aerie{dataset}/samples?state=kept&decoded=true")
    sample = page.locator("table.samples td.id a").first.get_attribute("href")
    take(page, f"{url}/plugin/aerie{sample}", "dashboard_sample")
    page.goto(f"{url}/aerie/drafters")
    drafter = page.locator("td.wide a").first.get_attribute("href")
    take(page, f"{url}/plugin/aerie{drafter}", "dashboard_drafter", height=1250)


def take_tab(page: Page, run: str) -> None:
    """The tab of a task, in the dark."""
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(f"{run}/tasks/B1_glaive.generate")
    page.get_by_role("link", name="Aerie").last.click()
    page.frame_locator("iframe[title=Aerie]").locator("#content h1").first.wait_for()
    page.wait_for_timeout(6000)
    page.screenshot(path=PICTURES / "dashboard_tab.png")


def main(run_id: str, edition: str) -> None:
    """Take the pictures of one run."""
    stack = json.loads((HOME / "stack.json").read_text())
    url = f"http://127.0.0.1:{stack['airflow_port']}"
    with sync_playwright() as playwright:
        chromium = os.environ.get("AERIE_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        fine = browser.new_page(device_scale_factor=2)  # its letters are small
        log_in(fine, url, stack["airflow_password"])
        take_graph(fine, url)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        log_in(page, url, stack["airflow_password"])
        take_form(page, url)
        run = f"{url}/dags/{DAG_ID}/runs/{run_id}"
        take_dashboard(page, url, run_id, edition)
        take_tab(page, run)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])

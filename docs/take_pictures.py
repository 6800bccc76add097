"""Takes the README's pictures from the running UI: ``python docs/take_pictures.py RUN_ID`` while ``./aerie up`` holds.

Needs playwright and a Chromium (``AERIE_CHROMIUM``, default /usr/bin/chromium), which no environment of Aerie carries.
"""

import json
import os
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
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


def take(page: Page, url: str, name: str) -> None:
    """Write a picture of a page once it has settled."""
    page.goto(url)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(4000)
    page.screenshot(path=PICTURES / f"{name}.png")


def main(run_id: str) -> None:
    """Take the pictures of one run."""
    stack = json.loads((ROOT / ".aerie" / "stack.json").read_text())
    url = f"http://127.0.0.1:{stack['airflow_port']}"
    with sync_playwright() as playwright:
        chromium = os.environ.get("AERIE_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 900}, device_scale_factor=2)
        log_in(page, url, stack["airflow_password"])
        page.goto(f"{url}/dags/{DAG_ID}")  # the DAG as it is now, not as it was for some run
        page.get_by_label("Show Graph (Press g)").click()
        page.get_by_label("Collapse Details Panel").click()
        page.wait_for_timeout(5000)
        page.locator(".react-flow__controls-fitview").click()
        page.wait_for_timeout(2000)
        page.screenshot(path=PICTURES / "graph.png", clip=page.evaluate(AROUND_THE_GRAPH))
        page.get_by_label("Show Grid (Press g)").click()
        page.wait_for_timeout(1000)
        run = f"{url}/dags/{DAG_ID}/runs/{run_id}"
        take(page, run, "run")
        take(page, f"{run}/tasks/B1_glaive.generate", "task_log")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])

"""The system's Chromium, driven by Playwright: a page for each test, and screenshots that people look at.

A folder of tests takes the fixtures by importing them in its ``conftest.py``.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aerie.settings.machine import aerie_home

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
THEMES = ("light", "dark")
WIDTH, HEIGHT = 1360, 900
PATIENCE_MILLISECONDS = 120_000
"""How long a page waits for what should be there: a busy machine answers late."""


def screenshots_folder() -> Path:
    """Where screenshots of the pages are kept, in ``AERIE_TEST_ARTEFACTS``."""
    artefacts = os.environ.get("AERIE_TEST_ARTEFACTS")
    folder = (Path(artefacts) if artefacts else aerie_home() / "test-artefacts") / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def take_screenshots(page: "Page", name: str) -> dict[str, Path]:
    """Keep the whole page as ``<name>-light.png`` and ``<name>-dark.png``; return the files by theme."""
    files = {theme: screenshots_folder() / f"{name}-{theme}.png" for theme in THEMES}
    for theme, file in files.items():
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        page.screenshot(path=file, full_page=True, animations="disabled")
    return files


@contextmanager
def open_page(browser: "Browser") -> Iterator["Page"]:
    """A page of its own: no cookies, no local storage of another test."""
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT}, locale="en-GB", timezone_id="UTC", color_scheme="light"
    )
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    try:
        yield context.new_page()
    finally:
        context.close()


# Not for the session: while Playwright is open, nothing else in this process can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """The system's Chromium, without a window."""
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    if executable is None:
        pytest.skip(f"NO BROWSER on PATH ({', '.join(EXECUTABLES)}): pages are not tested; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield started
        started.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A page whose scripts must not fail."""
    errors: list[str] = []
    with open_page(browser) as opened:
        opened.on("pageerror", lambda error: errors.append(f"{opened.url}: {error}"))
        yield opened
    assert errors == [], "a script of the page failed"

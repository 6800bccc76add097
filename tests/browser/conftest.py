"""Pages as people see them. ``take_screenshots`` of ``tests/chromium.py`` keeps them as files, in both themes."""

import pytest

from ..chromium import browser, page
from ..dashboard import dashboard

__all__ = ["browser", "dashboard", "page"]


@pytest.fixture
def signed_in(page, dashboard):
    """A page of somebody who may see, and change nothing."""
    page.context.add_cookies([{"name": "_token", "value": dashboard.token("viewer"), "url": dashboard.url}])
    return page

"""Pages as people see them. ``take_screenshots`` of ``tests/chromium.py`` keeps them as files, in both themes."""

from ..chromium import browser, page
from ..dashboard import dashboard

__all__ = ["browser", "dashboard", "page"]

"""The dashboard's pages, as its users get them from a real API server."""

from ...dashboard import dashboard

__all__ = ["dashboard"]

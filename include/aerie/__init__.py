"""Aerie: from prompts to a measured EAGLE-3 drafter."""

__version__ = "0.1.0"

"""Typed, frozen configuration, and the data (profiles, presets) that it is read from."""

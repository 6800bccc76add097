"""Configurations that ship with Aerie (``presets/*.yaml``), by name."""

from pathlib import Path

from aerie.errors import BadInput

PRESETS_FOLDER = Path(__file__).parent / "presets"
DEFAULT_PRESET = "demo"


def preset_names() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """File of a preset; a link leads to where the configuration and what it names lie.

    Raises:
        BadInput: there is no such preset; the message lists those that there are.
    """
    if name not in preset_names():
        raise BadInput(f"no preset named {name!r}: expected one of {', '.join(preset_names())}")
    return (PRESETS_FOLDER / f"{name}.yaml").resolve()


def preset_of(path: Path) -> str | None:
    """Name of the preset whose file this is, or None."""
    return next((name for name in preset_names() if preset_path(name) == path.resolve()), None)

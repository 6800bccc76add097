"""Copies of published ``config.json`` files, to plan with where no checkpoint is on disk (``models/README.md``)."""

import json
from pathlib import Path
from typing import Any

from aerie.errors import BadInput
from aerie.settings.profile import load_profile, profile_names

MODELS_FOLDER = Path(__file__).parent / "models"


def bundled_names() -> list[str]:
    """Names of the models whose configuration ships with Aerie."""
    return sorted(path.stem for path in MODELS_FOLDER.glob("*.json"))


def bundled_config(name: str) -> dict[str, Any]:
    """The configuration that ships under a model's name, or that a profile names as its own.

    A checkpoint's own ``config.json`` has the last word wherever there is one.

    Raises:
        BadInput: there is none; the message lists those that there are.
    """
    names = bundled_names()
    model = load_profile(name).model if name in profile_names() and name not in names else name
    if model not in names:
        found = f"profile {name} names none" if model is None else f"there is none for {name!r}"
        raise BadInput(
            f"no bundled config.json: {found}; give the checkpoint's folder, a profile that names one, or one of "
            f"{', '.join(names)}"
        )
    document: dict[str, Any] = json.loads((MODELS_FOLDER / f"{model}.json").read_text(encoding="utf-8"))
    return document

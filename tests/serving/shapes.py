"""Published configurations that ship, for tests of the planner."""

from copy import deepcopy
from typing import Any

from aerie.serving.model_config import ModelConfig
from aerie.settings.bundled import bundled_config


def published(name: str, **changes: Any) -> ModelConfig:
    """A bundled configuration, with fields of its language model changed; ``...`` leaves one out."""
    document = deepcopy(bundled_config(name))
    inner = document.get("text_config", document)
    inner.update(changes)
    for field in [field for field, value in changes.items() if value is ...]:
        del inner[field]
    return ModelConfig.of(document)

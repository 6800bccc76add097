"""Magicoder's two data sets: Evol-Instruct (``instruction``) and OSS-Instruct (``problem``)."""

from collections.abc import Mapping
from typing import Any

from aerie.sources.conversation import Conversation, text_field


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row of either data set; neither has an id that survives a re-ordering.

    Raises:
        Unusable: there is no request.
    """
    request = text_field(row, "problem" if "problem" in row else "instruction")
    return Conversation(None, None, ({"role": "user", "content": request},))

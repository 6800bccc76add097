"""OpenCodeInstruct: ``id``, ``input`` and more, all text; only the request is taken."""

from collections.abc import Mapping
from typing import Any

from aerie.sources.conversation import Conversation, own_id, text_field


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row of the source.

    Raises:
        Unusable: there is no request.
    """
    return Conversation(own_id(row, "id"), None, ({"role": "user", "content": text_field(row, "input")},))

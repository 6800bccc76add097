"""UltraChat 200k: ``messages``, whose first turn ``prompt`` repeats."""

from collections.abc import Mapping
from typing import Any

from aerie.sources.chat import messages_of
from aerie.sources.conversation import Conversation, list_field, own_id, well_formed


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row.

    Raises:
        Unusable: a field is missing, a role is unknown, or nothing is left.
    """
    kept, notes = well_formed(messages_of(list_field(row, "messages")))
    return Conversation(own_id(row, "prompt_id"), None, kept, notes=notes)

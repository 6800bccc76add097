"""ShareGPT as collected from shared pages: ``conversations``, with the repairs that such pages need."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aerie.sources.chat import shared_messages
from aerie.sources.conversation import Conversation, Message, list_field, own_id, well_formed
from aerie.sources.html import text_of_page, unwrapped_answer, unwrapped_question

_PART = re.compile(r"_\d+\Z")
_ABOUT_MARKUP = re.compile(r"\b(?:html5?|css|xml|svg|jsx?|javascript|php|markup|web ?pages?|websites?|tags?)\b", re.I)


def read(row: Mapping[str, Any]) -> Conversation:
    """Read one row. Long conversations were split into parts ``<id>_0``, ``<id>_1``: they share ``<id>``.

    Raises:
        Unusable: a field is missing, a role is unknown, or nothing is left.
    """
    messages = shared_messages(list_field(row, "conversations"))
    plain = _without_page(messages)
    notes = ["converted:html"] if plain != messages else []
    kept, repairs = well_formed(plain)
    source_id = own_id(row, "id")
    return Conversation(source_id, source_id and _PART.sub("", source_id), kept, notes=(*notes, *repairs))


def _without_page(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages without the tags that are left over from the shared page; what is said about markup keeps its own."""
    about_markup = any(
        message["role"] == "user" and _ABOUT_MARKUP.search(text_of_page(message["content"])) for message in messages
    )
    question, answer = (unwrapped_question, unwrapped_answer) if about_markup else (text_of_page, text_of_page)
    return [
        {**message, "content": (answer if message["role"] == "assistant" else question)(message["content"])}
        for message in messages
    ]

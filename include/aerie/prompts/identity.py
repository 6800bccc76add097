"""Identity, order and split of prompts: pure functions of content and seed, never of a row's position."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from aerie.artefacts.prompts import Split
from aerie.settings.pipeline import SplitSettings

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ID_DIGITS = 20


def content_hash(content: Any) -> str:
    """SHA-256, in hex, of JSON-like ``content`` after normalisation: NFC, runs of white space one space, ends stripped.

    Two prompts with one hash are one prompt.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    canonical = json.dumps(_normalised(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _normalised(content: Any) -> Any:
    if isinstance(content, str):
        text = content if content.isascii() else unicodedata.normalize("NFC", content)
        return " ".join(text.split())
    if isinstance(content, dict):
        return {key: _normalised(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_normalised(value) for value in content]
    return content


def draw(*parts: object) -> int:
    """A number in ``[0, 2**63)`` that looks random and is the same for the same ``parts``; it fits an int64."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def split_of(conversation_id: str, splits: SplitSettings) -> Split:
    """Split of every turn of a conversation. It depends on the id alone, so that no seed moves what is held out."""
    place = draw("split", conversation_id) / 2**63
    if place < splits.benchmark:
        return "benchmark"
    return "validation" if place < splits.benchmark + splits.validation else "train"


def chosen(positions: Sequence[int], *, seed: int, conversation_id: str) -> int:
    """One of ``positions``, each as likely as any other, decided by conversation and seed."""
    return positions[draw("turn", seed, conversation_id) % len(positions)]


def sample_id(dataset: str, source_id: str | None, turn: int, content: str) -> str:
    """Id of a prompt, safe as a file name: from ``source_id`` (None unless unique) and turn, else from ``content``.

    ``content`` is the prompt's ``content_hash``.
    """
    if source_id is None:
        return f"{dataset}-{content[:ID_DIGITS]}"
    if not _SAFE_ID.fullmatch(source_id):
        source_id = hashlib.sha256(source_id.encode()).hexdigest()[:ID_DIGITS]
    return f"{dataset}-{source_id}-t{turn}"

"""Secrets in text that people read: what looks like one, wherever it came from, is replaced.

What a process knows to be a secret (its database's password, a connection) it names itself: Airflow masks that.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

MASK = "***"

_NAMES = r"token|password|passwd|pwd|secret|signature|credential|api[_-]?key|access[_-]?key|auth"
# Each goes through a text once, whatever is in it: no match begins inside of what another attempt has searched.
_PATTERNS = (
    # scheme://user:password@host and scheme://token@host
    (re.compile(r"(?<=[a-z0-9+.-])(://)[^\s/?#'\"<>]+@", re.IGNORECASE), rf"\1{MASK}@"),
    # ?token=... and &X-Amz-Signature=... in a URL
    (
        re.compile(rf"([?&](?=[^\s=&?#]*(?:{_NAMES}|sig|key))[^\s=&?#]*+=)[^\s&#'\"<>]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    # password=..., DB_PASSWORD: ..., "api_key": "..." in a message
    (
        re.compile(
            r"((?<![^\W_])(?:password|passwd|secret|api[_-]?key|access[_-]?token|auth[_-]?token)\b['\"]?\s*+[=:]\s*+)"
            r"(?:\"[^\"]*\"|'[^']*'|[^\s,;'\")}\]]+)",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{MASK}"),
    # Hugging Face, GitHub, Slack, OpenAI
    (re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|xox[abprs]-|sk-)[A-Za-z0-9_-]{12,}"), MASK),
)
SHORTEST_PART = 8


def masked(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without what looks like a password, a token or a key, and without ``secrets``."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def secrets_of_url(url: str) -> frozenset[str]:
    """What must not be told of a URL whose path is a secret, as a webhook's is: the URL, its user, its longer parts.

    What stands in the place of a host is left: a message needs it where it is one (``aerie.delivery.private_parts``).
    """
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    pieces = re.split(r"[/?&=#:]", f"{parts.path}?{parts.query}?{parts.fragment}?{user}")
    long = {piece for piece in pieces if len(piece) >= SHORTEST_PART}
    password = {parts.password} if parts.password else set()
    return frozenset({url, *long, *map(unquote, long), *password})

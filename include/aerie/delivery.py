"""Delivery of a message through Apprise, to every receiver of a connection."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from aerie.masking import masked, secrets_of_url

DELIVERY_SECONDS = 10
"""For all receivers together: Airflow ends a task's process twenty seconds after the task itself."""

SHORTEST_PRIVATE = 5
"""Characters; Airflow's log masks nothing shorter either."""

Kind = Literal["info", "warning", "failure"]


@dataclass(frozen=True)
class Outcome:
    """What became of a message at one receiver; ``error`` None where it was taken. Neither text holds a secret."""

    receiver: str
    error: str | None


def private_parts(url: str) -> frozenset[str]:
    """What Apprise keeps to itself of a URL's path and of its place of a host, which in some services' is a token.

    None of a web address: its host is one. What is shorter than ``SHORTEST_PRIVATE`` would mask half of every text.
    """
    from apprise import Apprise

    parts = urlsplit(url)
    service = None if parts.scheme in ("http", "https") else Apprise.instantiate(url)
    if service is None:
        return frozenset()
    shown = urlsplit(str(service.url(privacy=True)))  # type: ignore[no-untyped-call]
    told = _pieces(shown.netloc, shown.path)
    return frozenset(
        piece for piece in _pieces(parts.netloc, parts.path) - told if len(unquote(piece)) >= SHORTEST_PRIVATE
    )


def _pieces(netloc: str, path: str) -> set[str]:
    """The place of a host whole, and every part of it and of a path, as they are written and as they are meant."""
    _, _, host = netloc.rpartition("@")
    pieces = {host, *re.split(r"[/:@]", f"{netloc}/{path}")}
    return pieces | set(map(unquote, pieces))


def deliver(urls: Sequence[str], *, title: str, body: str, kind: Kind = "warning") -> list[Outcome]:
    """Send one message to every Apprise URL, and say what became of it at each.

    Returns the outcomes in the order of ``urls`` where each URL is of a service that Apprise knows.
    """
    from apprise import Apprise, NotifyType

    service, unknown = Apprise(), []
    for position, url in enumerate(urls, start=1):
        if not service.add(url):
            receiver = f"receiver {position} of {len(urls)}"
            unknown.append(Outcome(receiver, f"{urlsplit(url).scheme or 'its URL'}: not a URL that Apprise can use"))
    if not len(service):
        return unknown
    secrets = frozenset().union(*map(secrets_of_url, urls), *map(private_parts, urls))
    result = service.notify(body=body, title=title, notify_type=NotifyType(kind), timeout=DELIVERY_SECONDS)
    outcomes = []
    for one in result.results:
        said = [entry.message for entry in one.logs() if entry.level in ("WARNING", "ERROR")]
        host = urlsplit(one.url).netloc.rpartition("@")[2]
        error = None if one else masked("; ".join(said) or f"{one.status.name.lower()}, without a reason", secrets)
        outcomes.append(Outcome(f"{one.name} ({masked(host, secrets)})", error))
    return [*unknown, *outcomes]

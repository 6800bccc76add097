"""The drafter in production: the one that was published last for this verifier."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.artefacts.manifest import path_of
from aerie.settings.machine import database_url
from aerie.store.connection import connected
from aerie.store.queries.drafters import list_published
from aerie.store.queries.rows import Row


@dataclass(frozen=True)
class Production:
    """How well the drafter in production drafts these prompts; without one, ``said`` tells why.

    ``folder`` is where it was published, to measure it here: None where its acceptance length is known, or cannot be.
    With a ``drafter_id`` and no acceptance length it is there, and what it drafts cannot be told: ``said`` tells why.
    """

    said: str
    drafter_id: str | None = None
    acceptance_length: float | None = None
    folder: Path | None = None


def drafter_in_production(
    drafters: Iterable[Mapping[str, Any]], *, verifier: str, drafter_fingerprint: str, measured_as: str, published: Path
) -> Production:
    """Which drafter is in production, and its acceptance length if it was measured as this one is.

    Args:
        drafters: published ones of the registry, published last first.
        verifier: identity of the verifier that it must be for.
        drafter_fingerprint: of the export that is being measured.
        measured_as: what its benchmark must have depended on for its figure to count here: prompts, settings, server.
        published: folder of published drafters, for one that is not where the registry says: a disk may be mounted
            elsewhere here.
    """
    for row in drafters:
        if (row["benchmark"] or {}).get("verifier") != verifier:
            continue
        if row["benchmark"]["drafter_fingerprint"] == drafter_fingerprint:
            return Production("it is the one in production")
        found = str(row["drafter_id"])
        if row["benchmark"]["measured_as"] == measured_as:
            length = float(row["benchmark"]["acceptance_length"])
            return Production("as measured before it was published", found, length)
        places = dict.fromkeys((path_of(row["uri"]), published / found))
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None:
            looked = " or ".join(map(str, places))
            return Production(f"it is no longer at {looked}, to be measured on these prompts", found)
        return Production("measured now", found, folder=folder)
    return Production("no drafter was published for this verifier")


def published_drafters() -> list[Row]:
    """Published drafters of the registry, published last first.

    Raises:
        BadInput: the stage runs without a database.
        Retryable: it cannot be reached.
    """
    with connected(database_url(), application="aerie benchmark") as connection:
        return list_published(connection)

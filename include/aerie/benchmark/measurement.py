"""What one server is measured at, each load kept in a file so that a retry measures only what is missing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.artefacts.files import write_text
from aerie.benchmark.measures import DatasetRun
from aerie.benchmark.requests import Held, Load, measure
from aerie.benchmark.server import ServerFacts, flush_cache, read_server_facts
from aerie.stages import Events


class Measurement(BaseModel):
    """What one server was measured at; ``key`` says what it answers, so that a retry does not measure it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    runs: Mapping[str, DatasetRun]
    server: ServerFacts


@dataclass(frozen=True)
class Wanted:
    """One measurement: which prompts under which load, what it answers (``key``), and the file that keeps it."""

    path: Path
    key: str
    held: Sequence[Held]
    load: Load
    label: str


@dataclass(frozen=True)
class MeasuredServer:
    """A server that can be had, and what must hold of it before it is measured.

    The cache of a server of ours (``own``) is emptied before each load: prompts cost what they cost the first time.
    """

    open: Callable[[], AbstractContextManager[str]]
    require: Callable[[str, ServerFacts], None]
    own: bool


def measure_missing(
    server: MeasuredServer, wanted: Sequence[Wanted], events: Events, *, force: bool
) -> list[Measurement]:
    """Measure what no earlier try did, on one server, and return all in the order wanted.

    Raises:
        Failed: a request failed for good, a reply lacks what is measured, or ``require`` says so.
        Retryable: the server went away.
    """
    known = {one.path: None if force else read_measurement(one.path, key=one.key) for one in wanted}
    for one in wanted:
        if known[one.path] is not None:
            events.progress(f"{one.label}: measured by an earlier try")
    missing = [one for one in wanted if known[one.path] is None]
    if missing:
        with server.open() as url:
            facts = read_server_facts(url)
            server.require(url, facts)
            for one in missing:
                if server.own:
                    flush_cache(url)
                runs = measure(url, one.held, one.load, events, label=one.label)
                measurement = Measurement(key=one.key, runs=runs, server=facts)
                write_text(one.path, measurement.model_dump_json(by_alias=True))
                known[one.path] = measurement
    return [found for one in wanted if (found := known[one.path]) is not None]


def read_measurement(path: Path, *, key: str) -> Measurement | None:
    """What an earlier try measured, None when there is nothing of this form or it answers something else."""
    if not path.is_file():
        return None
    try:
        found = Measurement.model_validate_json(path.read_bytes())
    except ValidationError:
        return None
    return found if found.key == key else None

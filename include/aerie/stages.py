"""The stage protocol: ``python -m aerie stage NAME --request FILE --result FILE --events FILE``.

A stage is a function from a request to a result that runs in one of the three environments. Request and
result are JSON documents; events are JSON lines that the caller forwards to log, store and notifiers.
Exit codes: 0 done, 1 failed for good, 2 bad input, 75 worth retrying, 76 to wait for another run (``aerie.errors``).
"""

import errno
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.artefacts.files import write_text
from aerie.artefacts.layout import DatasetName, EditionFiles, EditionName
from aerie.artefacts.locks import dataset_lock, edition_lock, rank_lock
from aerie.artefacts.manifest import Manifest
from aerie.errors import AerieError, BadInput, Retryable
from aerie.masking import masked
from aerie.settings.benchmark_target import BenchmarkTarget
from aerie.settings.pipeline import DatasetSettings, PipelineSettings

Environment = Literal["airflow", "serve", "model"]
KeeperPlace = Literal["here", "for_others", "elsewhere"]


class StageRequest(BaseModel):
    """What a stage is asked to do; whole, so that a stage on another host needs no configuration file.

    ``server_folder`` is where the server's keeper writes its lease and log. ``selected`` are the data sets of this run;
    an edition may hold more. ``phase`` is what a server is started or stopped for. ``force`` ignores a manifest that
    already answers the request. ``target`` is what ``benchmark_drafter`` measures. ``keeper`` says where the server's
    keeper is: started here where there is none, started here ``for_others`` too, who cannot start it and for whom it
    stays, or ``elsewhere``, and only asked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: PipelineSettings
    data_root: Path
    server_folder: Path
    keeper: KeeperPlace = "here"
    edition: EditionName
    dataset: DatasetName | None = None
    selected: tuple[str, ...] = ()
    phase: Literal["generate", "capture", "benchmark"] | None = None
    run_id: str
    force: bool = False
    target: BenchmarkTarget | None = None

    @property
    def files(self) -> EditionFiles:
        """Files of the request's edition."""
        return EditionFiles(self.data_root, self.edition)

    @property
    def dataset_settings(self) -> DatasetSettings:
        """Settings of the request's data set.

        Raises:
            BadInput: the request names no data set, or one that the settings do not have.
        """
        if self.dataset is None:
            raise BadInput("this stage works on one data set: the request must name it in 'dataset'")
        return self.settings.dataset(self.dataset)


class StageResult(BaseModel):
    """What a stage did. ``reused`` says that an earlier manifest already answered the request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    reused: bool
    manifest: Manifest | None = None
    data: Mapping[str, Any] = {}

    @property
    def brief(self) -> dict[str, Any]:
        """What fits beside a task: the manifest's identity, and single values of its counts and of ``data``."""
        manifest = self.manifest
        return {
            "reused": self.reused,
            "fingerprint": manifest.fingerprint if manifest else None,
            "finished_at": manifest.finished_at.isoformat() if manifest else None,
            "counts": _single_values(manifest.counts) if manifest else {},
            "data": _single_values(self.data),
        }


def _single_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | None)}


class Cadence:
    """Asked at every step, it is due once in so many seconds: at first when they have passed, or ``at_once``."""

    def __init__(self, seconds: float, *, at_once: bool = False) -> None:
        self._seconds = seconds
        self._last = float("-inf") if at_once else time.monotonic()

    def is_due(self) -> bool:
        """Whether so many seconds have passed since it was due."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class Events:
    """Writer of a stage's events, one JSON object a line, flushed at once.

    ``progress`` is for people (a log line and figures), ``metric`` a row of the time series, ``alert`` something
    that a person should be told of, ``lease`` who holds a server, ``observation`` what a launched one turned out to
    hold, ``judged`` that verdicts and previews are there though the stage fails, ``rejected`` what was measured of a
    drafter that fails its gates. What looks like a secret in a message is masked before it is written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"type": kind, "time": time.time(), **fields}, ensure_ascii=False) + "\n")

    def progress(self, message: str, **figures: Any) -> None:
        """Report where the stage is; ``message`` is one complete line."""
        self._write("progress", {"message": masked(message), **figures})

    def block(self, title: str, lines: Iterable[str]) -> None:
        """Report lines that belong together and that only some people read: a log folds them under ``title``."""
        for line in lines:
            self._write("progress", {"message": masked(line), "group": title})

    def metric(self, **figures: float | int | str | None) -> None:
        """Report one row of the time series."""
        self._write("metric", {"figures": figures})

    def alert(self, reason: str, message: str) -> None:
        """Report something that a person should be told of."""
        self._write("alert", {"reason": reason, "message": masked(message)})

    def lease(self, document: Mapping[str, Any]) -> None:
        """Hand on the lease of the server that the stage uses (``aerie.serving.lease``)."""
        self._write("lease", {"document": document})

    def observation(self, document: Mapping[str, Any]) -> None:
        """Hand on what a launch turned out to hold (``aerie.artefacts.observations``)."""
        self._write("observation", {"document": document})

    def judged(self) -> None:
        """Report that a data set's verdicts and previews are written, before its failure is told."""
        self._write("judged", {})

    def rejected(self, fingerprint: str, counts: Mapping[str, Any]) -> None:
        """Hand on what a benchmark (``fingerprint``) counted of a drafter, before the failure of its gates is told."""
        self._write("rejected", {"fingerprint": fingerprint, "counts": counts})

    def error(self, message: str) -> None:
        """Report why the stage cannot go on; the caller raises it as its own."""
        self._write("error", {"message": masked(message)})


WorksOn = Literal["nothing", "dataset", "edition", "edition and data sets"]
StageFunction = Callable[[StageRequest, Events], StageResult]


@dataclass(frozen=True)
class Stage:
    """A stage's name, the environment it runs in, where its function is (``module:function``), and what it works on.

    No two stages write one data set at once, nor what an edition has beside them; ``merge`` also keeps others from the
    data sets that it reads, and the ranks of a capture share the edition. A stage that works on ``nothing`` writes none
    of it.
    """

    name: str
    environment: Environment
    function: str
    works_on: WorksOn = "edition"

    def alone(self, request: StageRequest) -> AbstractContextManager[None]:
        """Hold what the stage works on; entering raises ``Busy`` where another run, or an earlier try, does."""
        holder = f"run {request.run_id}, stage {self.name}"
        if self.works_on == "dataset" and request.dataset is not None:
            return dataset_lock(request.files, request.dataset, holder=holder)
        hidden_states = request.settings.hidden_states
        if self.name == "capture" and hidden_states.rank is not None:
            return rank_lock(request.files, rank=hidden_states.rank, world_size=hidden_states.world_size, holder=holder)
        if self.works_on == "edition":
            return edition_lock(request.files, holder=holder)
        if self.works_on == "edition and data sets":
            return edition_lock(request.files, holder=holder, reads=tuple(request.settings.datasets))
        return nullcontext()

    def load(self) -> StageFunction:
        """Import the stage's function; its module's imports need the stage's environment."""
        module, _, name = self.function.partition(":")
        function: StageFunction = getattr(import_module(module), name)
        return function


STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("prepare", "model", "aerie.prompts.stage:prepare", "dataset"),
        Stage("import", "model", "aerie.prompts.stage:import_tokenised", "dataset"),
        Stage("plan", "airflow", "aerie.servers:plan", "nothing"),
        Stage("serve_start", "airflow", "aerie.servers:start", "nothing"),
        Stage("serve_stop", "airflow", "aerie.servers:stop", "nothing"),
        Stage("generate", "airflow", "aerie.generation.stage:generate", "dataset"),
        Stage("validate", "model", "aerie.boundary.stage:validate", "dataset"),
        Stage("merge", "model", "aerie.corpus.stage:merge", "edition and data sets"),
        Stage("vocabulary", "model", "aerie.corpus.stage:vocabulary"),
        Stage("forecast", "model", "aerie.hidden_states.stage:forecast"),
        Stage("capture", "model", "aerie.hidden_states.stage:capture"),
        Stage("train", "model", "aerie.training.stage:train"),
        Stage("export", "model", "aerie.training.stage:export"),
        Stage("benchmark", "airflow", "aerie.benchmark.stage:benchmark"),
        Stage("benchmark_drafter", "airflow", "aerie.benchmark.any_drafter:benchmark_drafter"),
        Stage("publish", "model", "aerie.training.publishing:publish"),
    )
}


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_stage(name: str, *, request: Path, result: Path, events: Path) -> StageResult:
    """Run stage ``name`` on a request file, write its result file atomically, and return the result.

    Raises:
        BadInput: no such stage, or the request does not have the request's schema.
        Busy: another run, or an earlier try of this one, works on the same part of the edition.
        Retryable: the disk is full.
        AerieError: whatever the stage raises.
    """
    if name not in STAGES:
        raise BadInput(f"unknown stage {name!r}: expected one of {', '.join(STAGES)}")
    try:
        asked = StageRequest.model_validate_json(request.read_bytes())
    except (OSError, ValidationError) as error:
        raise BadInput(f"{request}: not a request for stage {name}: {error}") from error
    reports = Events(events)
    try:
        with STAGES[name].alone(asked):
            answer = STAGES[name].load()(asked, reports)
        write_text(result, answer.model_dump_json(indent=2, by_alias=True) + "\n")
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        full = f"{error.filename or asked.data_root}: {error.strerror}; make room and run stage {name} again"
        raise Retryable(full) from error
    except AerieError as error:
        with suppress(OSError):  # where the disk is full, the exit code and the process's output still tell
            reports.error(str(error))
        raise
    return answer

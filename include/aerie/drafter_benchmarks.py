"""A benchmark outside the pipeline, from a person's form or a drafter's asset to the request of its stage."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlparse

from pydantic import ValidationError, model_validator

from aerie.artefacts.drafter_record import drafter_id_of
from aerie.artefacts.layout import EditionFiles, EditionName
from aerie.artefacts.manifest import path_of, read_manifest
from aerie.errors import BadInput, one_line
from aerie.pipeline import DEFAULT_EDITION
from aerie.settings.benchmark_target import BenchmarkTarget
from aerie.settings.machine import data_root, models_root, server_folder
from aerie.settings.pipeline import (
    DATASET_KEYS,
    BenchmarkSettings,
    DraftSettings,
    PipelineSettings,
    PositiveInt,
    ServerUrl,
)
from aerie.settings.profile import Frozen
from aerie.stages import StageRequest

DRAFT_SETTINGS = tuple(DraftSettings.model_fields)


class BenchmarkParameters(Frozen):
    """What a person asks of one benchmark. What is None is the configuration's.

    ``drafter`` is an id of the registry, a folder or its ``file://`` URI; None, without a ``server_url``, is the one
    that was published last.
    """

    drafter: str | None = None
    server_url: ServerUrl | None = None
    verifier_url: ServerUrl | None = None
    edition: EditionName = DEFAULT_EDITION
    datasets: tuple[str, ...] = DATASET_KEYS
    prompts_file: Path | None = None
    prompts_per_dataset: PositiveInt | None = None
    concurrency: tuple[PositiveInt, ...] = ()
    num_steps: PositiveInt | None = None
    eagle_topk: PositiveInt | None = None
    num_draft_tokens: PositiveInt | None = None
    force: bool = False

    @model_validator(mode="after")
    def _the_servers_own(self) -> Self:
        given = [name for name in DRAFT_SETTINGS if getattr(self, name) is not None]
        if self.server_url is not None and given:
            raise ValueError(
                f"{', '.join(given)} with server_url: a server that runs is measured as it is; leave it out"
            )
        return self

    def with_published(self, events: Iterable[Mapping[str, Any]]) -> "BenchmarkParameters":
        """The same with the drafter of the newest asset event, where none is named; its edition's prompts too."""
        newest = max(events, key=lambda extra: str(extra["finished_at"]), default=None)
        if newest is None or self.drafter is not None or self.server_url is not None:
            return self
        return self.model_copy(update={"drafter": newest["drafter_id"], "edition": newest["edition"]})


def parse_parameters(params: Mapping[str, Any]) -> BenchmarkParameters:
    """The parameters of a form.

    Raises:
        BadInput: one has a value that makes no benchmark.
    """
    try:
        return BenchmarkParameters.model_validate(dict(params))
    except ValidationError as error:
        raise BadInput(f"parameters of the benchmark: {one_line(error)}") from error


def benchmark_request(
    settings: PipelineSettings,
    parameters: BenchmarkParameters,
    drafters: Iterable[Mapping[str, Any]],
    *,
    run_id: str,
) -> StageRequest:
    """The request of ``benchmark_drafter``.

    Args:
        settings: the configuration: verifier, how it is served, and what the form leaves to it.
        parameters: the form.
        drafters: rows of the registry.
        run_id: of the run.

    Raises:
        BadInput: no such drafter or file, one outside the folders that are for them, or neither drafter nor server.
    """
    request = plain_request(settings, parameters, run_id=run_id)
    drafter, drafter_id = None, None
    if parameters.drafter is not None:
        drafter, drafter_id = find_drafter(parameters.drafter, settings, drafters)
    names = {"prompts_per_dataset", *DRAFT_SETTINGS}
    given = {name: value for name in names if (value := getattr(parameters, name)) is not None}
    try:
        asked = BenchmarkSettings.model_validate(settings.benchmark.model_dump() | given)
        target = BenchmarkTarget(
            drafter=drafter,
            drafter_id=drafter_id,
            server_url=parameters.server_url,
            verifier_url=parameters.verifier_url,
            prompts_file=None if parameters.prompts_file is None else confined(parameters.prompts_file, settings),
            concurrency=parameters.concurrency or asked.concurrency,
        )
    except ValidationError as error:
        raise BadInput(f"parameters of the benchmark: {one_line(error)}") from error
    return request.model_copy(update={"settings": settings.model_copy(update={"benchmark": asked}), "target": target})


def plain_request(settings: PipelineSettings, parameters: BenchmarkParameters, *, run_id: str) -> StageRequest:
    """A request of the benchmark's run that measures nothing, such as to stop its server.

    Raises:
        BadInput: the configuration has no such data set.
    """
    for key in parameters.datasets:
        settings.dataset(key)
    return StageRequest(
        settings=settings,
        data_root=data_root(),
        server_folder=server_folder(),
        edition=parameters.edition,
        selected=parameters.datasets,
        phase="benchmark",
        run_id=run_id,
        force=parameters.force,
    )


def find_drafter(
    named: str, settings: PipelineSettings, drafters: Iterable[Mapping[str, Any]]
) -> tuple[Path, str | None]:
    """Folder of a drafter, and its id in the registry where it has one.

    The registry's folder of an edition is that of its latest export: an older drafter is kept if it was published.

    Raises:
        BadInput: there is none, another one was exported there since, or it lies where drafters may not.
    """
    registered = {str(row["drafter_id"]): row for row in drafters}
    if named in registered:
        return _registered(named, settings, registered[named]), named
    if "/" not in named:
        raise BadInput(f"drafter {named!r} is not in the registry; it has {', '.join(registered) or 'none yet'}")
    folder = confined(path_of(named) if urlparse(named).scheme else Path(named), settings)
    published = folder == (settings.publish.folder / folder.name).resolve()
    return folder, folder.name if published and folder.name in registered else None


def _registered(drafter_id: str, settings: PipelineSettings, row: Mapping[str, Any]) -> Path:
    published = settings.publish.folder / drafter_id
    if published.is_dir():
        return published.resolve()
    exported = read_manifest(EditionFiles(data_root(), row["edition"]).manifest("export"))
    current = drafter_id_of(row["edition"], exported.fingerprint)
    if current != drafter_id:
        raise BadInput(f"drafter {drafter_id} was not published, and {current} was exported in its place since")
    return confined(path_of(row["uri"]), settings)


def confined(path: Path, settings: PipelineSettings) -> Path:
    """An absolute path below the data root, the folder of checkpoints or that of published drafters.

    Raises:
        BadInput: it lies elsewhere, or is not absolute.
    """
    roots = [root.resolve() for root in (data_root(), models_root(), settings.publish.folder)]
    resolved = path.resolve()
    if not path.is_absolute() or not any(resolved.is_relative_to(root) for root in roots):
        raise BadInput(f"{path}: expected an absolute path below one of {', '.join(map(str, roots))}")
    return resolved

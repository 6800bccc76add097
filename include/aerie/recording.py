"""What the control side writes into the store on behalf of stages that have no database."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from aerie.artefacts.drafter_record import drafter_id_of
from aerie.artefacts.observations import Observation
from aerie.artefacts.previews import iterate_previews
from aerie.artefacts.samples import iterate_verdicts
from aerie.stages import StageRequest, StageResult
from aerie.store.connection import Connection
from aerie.store.queries.benchmarks import record_benchmark
from aerie.store.queries.drafters import record_drafter
from aerie.store.queries.leases import mark_leases_ended, mark_leases_followed, record_lease
from aerie.store.queries.ledger import load_verdicts
from aerie.store.queries.manifests import record_manifest
from aerie.store.queries.metrics import MetricRow, record_metrics
from aerie.store.queries.observations import record_observation
from aerie.store.queries.plans import record_plan
from aerie.store.queries.previews import load_previews


def record_event(connection: Connection, stage: str, request: StageRequest, event: Mapping[str, Any]) -> None:
    """Record a metric, a server's lease, what its launch turned out to hold, or what a stage found out before it fails.

    Progress is for the log, an alert for whoever sends it.
    """
    if event["type"] == "metric":
        at = datetime.fromtimestamp(event["time"], UTC)
        row = MetricRow(at, request.run_id, request.edition, request.dataset, stage, event["figures"])
        record_metrics(connection, [row])
    elif event["type"] == "lease":
        record_lease(connection, event["document"])
        mark_leases_followed(connection, request.server_folder)
    elif event["type"] == "observation":
        record_observation(connection, Observation.model_validate(event["document"]))
    elif event["type"] == "judged":
        _load_judged(connection, request)
    elif event["type"] == "rejected":
        _record_rejected(connection, request, event)


def record_result(connection: Connection, request: StageRequest, result: StageResult) -> None:
    """Record what a stage did: its manifest, and what it found out about samples, the server or the drafter."""
    if result.manifest is not None:
        record_manifest(connection, result.manifest, request.run_id)
    recorder = RECORDERS.get(result.stage)
    if recorder is not None:
        recorder(connection, request, result)


def _record_plan(connection: Connection, request: StageRequest, result: StageResult) -> None:
    if result.data["verdict"] is not None:  # someone else's server, or one that only its keeper can see
        record_plan(connection, run_id=request.run_id, edition=request.edition, document=result.data)


def _record_lease_end(connection: Connection, request: StageRequest, result: StageResult) -> None:
    if reason := result.data.get("ended"):
        mark_leases_ended(connection, request.server_folder, reason=reason)


def _record_verdicts(connection: Connection, request: StageRequest, _result: StageResult) -> None:
    _load_judged(connection, request)


def _load_judged(connection: Connection, request: StageRequest) -> None:
    dataset = request.dataset
    if dataset is None:
        return
    files = request.files.dataset(dataset)
    load_verdicts(connection, edition=request.edition, dataset=dataset, verdicts=iterate_verdicts(files.verdicts))
    previews = (preview.model_dump(mode="json") for preview in iterate_previews(files.previews))
    load_previews(connection, edition=request.edition, dataset=dataset, source="validate", previews=previews)


def _record_drafter(connection: Connection, request: StageRequest, result: StageResult) -> None:
    if result.manifest is None:
        return
    counts = dict(result.manifest.counts)
    record_drafter(
        connection,
        drafter_id=drafter_id_of(request.edition, drafter_fingerprint(result)),
        edition=request.edition,
        uri=result.data.get("uri") or request.files.drafter.as_uri(),
        state={"export": "exported", "benchmark": "accepted", "publish": "published"}[result.stage],
        training=counts if result.stage == "export" else None,
        benchmark=counts if result.stage == "benchmark" else None,
        published_at=result.manifest.finished_at if result.stage == "publish" else None,
    )


def _record_benchmark(connection: Connection, request: StageRequest, result: StageResult) -> None:
    _record_drafter(connection, request, result)
    if result.manifest is None:
        return
    _record_measurements(
        connection,
        request,
        drafter_id=drafter_id_of(request.edition, drafter_fingerprint(result)),
        fingerprint=result.manifest.fingerprint,
        measured_at=result.manifest.finished_at,
        counts=result.manifest.counts,
    )


def _record_rejected(connection: Connection, request: StageRequest, event: Mapping[str, Any]) -> None:
    """Keep what a drafter failed its gates with: there will be no result."""
    counts = event["counts"]
    drafter_id = drafter_id_of(request.edition, counts["drafter_fingerprint"])
    record_drafter(
        connection,
        drafter_id=drafter_id,
        edition=request.edition,
        uri=request.files.drafter.as_uri(),
        state="rejected",
        benchmark=counts,
    )
    _record_measurements(
        connection,
        request,
        drafter_id=drafter_id,
        fingerprint=event["fingerprint"],
        measured_at=datetime.fromtimestamp(event["time"], UTC),
        counts=counts,
    )


def _record_measurements(
    connection: Connection,
    request: StageRequest,
    *,
    drafter_id: str,
    fingerprint: str,
    measured_at: datetime,
    counts: Mapping[str, Any],
) -> None:
    """Record what the pipeline's own benchmark counted, once for each concurrency."""
    shared = {name: value for name, value in counts.items() if name != "by_concurrency"}
    for row in counts["by_concurrency"]:
        concurrency = row["concurrency"]
        record_benchmark(
            connection,
            measured_at=measured_at,
            run_id=request.run_id,
            edition=request.edition,
            drafter_id=drafter_id,
            fingerprint=fingerprint,
            concurrency=concurrency,
            document={**shared, **row, "settings": {**counts["settings"], "concurrency": concurrency}},
        )


def _record_drafter_benchmark(connection: Connection, request: StageRequest, result: StageResult) -> None:
    if result.manifest is None or request.target is None:
        return
    for measured in result.manifest.counts["measurements"]:
        record_benchmark(
            connection,
            measured_at=result.manifest.finished_at,
            run_id=request.run_id,
            edition=request.edition,
            drafter_id=request.target.drafter_id,
            fingerprint=result.manifest.fingerprint,
            concurrency=measured["settings"]["concurrency"],
            document=measured,
        )


def drafter_fingerprint(result: StageResult) -> str:
    """Fingerprint of the drafter that a result is about: the one of its export.

    Raises:
        KeyError: the stage did not say which drafter it worked on.
    """
    if result.manifest is not None and result.stage == "export":
        return result.manifest.fingerprint
    return str(result.data["drafter_fingerprint"])


RECORDERS: Mapping[str, Callable[[Connection, StageRequest, StageResult], None]] = {
    "plan": _record_plan,
    "serve_stop": _record_lease_end,
    "validate": _record_verdicts,
    "export": _record_drafter,
    "benchmark": _record_benchmark,
    "publish": _record_drafter,
    "benchmark_drafter": _record_drafter_benchmark,
}

"""What is told of an asset when its stage has an answer: enough to find the files, and to see whether they are new."""

from typing import Any

from aerie.artefacts.drafter_record import drafter_id_of
from aerie.stages import StageRequest, StageResult


def asset_facts(request: StageRequest, result: StageResult) -> dict[str, Any]:
    """Facts of a ``validate``, ``merge`` or ``publish`` as JSON data.

    ``fingerprint`` is the same as long as the content is; ``reused`` says that an earlier task made it.

    Raises:
        KeyError: the stage has no asset.
        ValueError: the result has no manifest: there is no answer to tell of.
    """
    if result.manifest is None:
        raise ValueError(f"stage {result.stage} has no manifest: it has no answer to tell of")
    return {
        "edition": request.edition,
        "run_id": request.run_id,
        "fingerprint": result.manifest.fingerprint,
        "finished_at": result.manifest.finished_at.isoformat(),
        "reused": result.reused,
        "counts": dict(result.manifest.counts),
        **_PLACES[result.stage](request, result),
    }


def _samples(request: StageRequest, _result: StageResult) -> dict[str, Any]:
    dataset = str(request.dataset)
    return {"dataset": dataset, "uri": request.files.dataset(dataset).samples.as_uri()}


def _corpus(request: StageRequest, _result: StageResult) -> dict[str, Any]:
    return {"uri": request.files.corpus.as_uri()}


def _drafter(request: StageRequest, result: StageResult) -> dict[str, Any]:
    return {"uri": result.data["uri"], "drafter_id": drafter_id_of(request.edition, result.data["drafter_fingerprint"])}


_PLACES = {"validate": _samples, "merge": _corpus, "publish": _drafter}

"""The stage ``publish``: the measured drafter, copied to its destination with its record and its model card."""

import shutil
from pathlib import Path

from aerie.artefacts.drafter_record import RECORD_FILE, DrafterRecord, drafter_id_of, write_record
from aerie.artefacts.files import atomic_folder, fingerprint_of, write_text
from aerie.artefacts.manifest import (
    InputFile,
    Manifest,
    answered_by,
    describe_input,
    describe_output,
    read_manifest,
    write_manifest,
)
from aerie.errors import Failed
from aerie.stages import Events, StageRequest, StageResult
from aerie.training.checkpoints import CHECKPOINT_FILES
from aerie.training.model_card import model_card
from aerie.training.record import record_of

CARD_FILE = "README.md"


def publish(request: StageRequest, events: Events) -> StageResult:
    """Copy the drafter that passed its benchmark to its destination, with its record and its model card.

    The exported folder gets both, too.

    Raises:
        BadInput: there is no export, or no benchmark that passed.
        Failed: the benchmark is of another drafter, or the drafter changed since it was measured.
    """
    files = request.files
    exported = read_manifest(files.manifest("export"))
    measured = read_manifest(files.manifest("benchmark"))
    inputs = [describe_input(files.drafter / name) for name in CHECKPOINT_FILES]
    require_measured(exported, measured, inputs)
    record = record_of(request.settings, files, fingerprint=exported.fingerprint, measured=measured)
    card = model_card(record, licence=request.settings.publish.licence)
    destination = request.settings.publish.folder / drafter_id_of(request.edition, exported.fingerprint)
    fingerprint = fingerprint_of(
        {"record": record.model_dump(mode="json"), "card": card, "destination": str(destination)}
    )
    manifest_path = files.manifest("publish")
    data = {"drafter_fingerprint": exported.fingerprint, "uri": destination.as_uri()}
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: {destination} holds this drafter")
        return StageResult(stage="publish", reused=True, manifest=answer, data=data)
    with atomic_folder(destination) as temporary:
        for name in CHECKPOINT_FILES:
            shutil.copyfile(files.drafter / name, temporary / name)
        describe_drafter(temporary, record, card)
    describe_drafter(files.drafter, record, card)
    manifest = write_manifest(
        manifest_path,
        stage="publish",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(destination / name) for name in (*CHECKPOINT_FILES, CARD_FILE, RECORD_FILE)],
        counts={**data, "acceptance_length": measured.counts["acceptance_length"]},
    )
    events.progress(f"published {destination}")
    return StageResult(stage="publish", reused=False, manifest=manifest, data=data)


def describe_drafter(folder: Path, record: DrafterRecord, card: str) -> None:
    """Write a drafter's record and card beside its weights."""
    write_record(folder, record)
    write_text(folder / CARD_FILE, card)


def require_measured(exported: Manifest, measured: Manifest, inputs: list[InputFile]) -> None:
    """Refuse to publish what was not measured.

    Raises:
        Failed: the benchmark is of another drafter, or the drafter's files are not those that were exported.
    """
    if measured.counts["drafter_fingerprint"] != exported.fingerprint:
        raise Failed(
            f"the benchmark measured drafter {measured.counts['drafter_fingerprint'][:12]}, the export is "
            f"{exported.fingerprint[:12]}; run benchmark again"
        )
    if not {(i.uri, i.sha256) for i in inputs} <= {(o.uri, o.sha256) for o in exported.outputs}:
        raise Failed("the drafter's files changed after they were exported; run export and benchmark again")

"""The stage ``publish``: the measured drafter, copied to its destination with its record and its model card."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from aerie.artefacts.drafter_record import RECORD_FILE, DrafterRecord, Layout, drafter_id_of, write_record
from aerie.artefacts.files import atomic_folder, fingerprint_of, write_text
from aerie.artefacts.manifest import (
    InputFile,
    Manifest,
    answered_by,
    describe_input,
    describe_output,
    path_of,
    read_manifest,
    write_manifest,
)
from aerie.errors import Failed
from aerie.stages import Events, StageRequest, StageResult
from aerie.training.checkpoints import CHECKPOINT_FILES
from aerie.training.model_card import model_card
from aerie.training.record import exported_layouts, record_of, relative

CARD_FILE = "README.md"
PUBLISHED_AS: Mapping[Layout, str] = {"sglang": ".", "vllm": "vllm"}
"""Folders of the layouts in a published drafter's: servers find SGLang's by the drafter's own."""


def publish(request: StageRequest, events: Events) -> StageResult:
    """Copy the drafter that passed its benchmark to its destination, with its record and its model card.

    Its folder there has SGLang's layout, and in ``vllm`` speculators' own where it was exported, all at once. The
    exported folder gets record and card, too.

    Raises:
        BadInput: there is no export, or no benchmark that passed.
        Failed: the benchmark is of another drafter, or the drafter changed since it was measured.
    """
    files = request.files
    exported = read_manifest(files.manifest("export"))
    measured = read_manifest(files.manifest("benchmark"))
    sources = exported_layouts(files, {path_of(one.uri).parent for one in exported.outputs})
    inputs = [describe_input(folder / name) for folder in sources.values() for name in CHECKPOINT_FILES]
    require_measured(exported, measured, inputs)
    destination = request.settings.publish.folder / drafter_id_of(request.edition, exported.fingerprint)
    layouts = {name: destination / PUBLISHED_AS[name] for name in sources}
    record = record_of(
        request.settings,
        files,
        fingerprint=exported.fingerprint,
        layouts=relative(layouts, destination),
        measured=measured,
    )
    licence = request.settings.publish.licence
    card = model_card(record, licence=licence)
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
        for layout, source in sources.items():
            folder = temporary / PUBLISHED_AS[layout]
            folder.mkdir(exist_ok=True)
            for name in CHECKPOINT_FILES:
                shutil.copyfile(source / name, folder / name)
        describe_drafter(temporary, record, card)
    here = record.model_copy(update={"layouts": relative(sources, files.drafter)})
    describe_drafter(files.drafter, here, model_card(here, licence=licence))
    manifest = write_manifest(
        manifest_path,
        stage="publish",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[
            *(describe_output(folder / name) for folder in layouts.values() for name in CHECKPOINT_FILES),
            *(describe_output(destination / name) for name in (CARD_FILE, RECORD_FILE)),
        ],
        counts={**data, "acceptance_length": measured.counts["acceptance_length"], "layouts": list(layouts)},
    )
    events.progress(f"published {destination}, for {' and '.join(layouts)}")
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

"""The record of a drafter, from the manifests that made it."""

import importlib.metadata
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from aerie import __version__
from aerie.artefacts.drafter_record import DrafterRecord, Layout, SourceRecord, StageRecord, VerifierRecord
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.manifest import Manifest, read_manifest
from aerie.errors import BadInput
from aerie.settings.pipeline import PipelineSettings

PACKAGES = ("speculators", "torch", "transformers")
MADE_BY = ("merge", "vocabulary", "capture", "train")


def versions() -> dict[str, str]:
    """Versions of what trains a drafter."""
    return {"aerie": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES}}


def record_of(
    settings: PipelineSettings,
    files: EditionFiles,
    *,
    fingerprint: str,
    layouts: Mapping[Layout, str],
    measured: Manifest | None = None,
) -> DrafterRecord:
    """The record of the drafter that an edition holds.

    Args:
        settings: the pipeline's configuration.
        files: those of the edition; ``train`` and what is before it have finished.
        fingerprint: of the export.
        layouts: the folders with its weights, from the record's own.
        measured: the manifest of its benchmark, where it was measured.

    Raises:
        BadInput: a stage has not finished, or was run by an older version.
    """
    manifests = {name: read_manifest(files.manifest(name)) for name in MADE_BY}
    trained, corpus = manifests["train"].counts, manifests["merge"].counts
    if "verifier_fingerprint" not in trained:
        raise BadInput(f"{files.manifest('train')}: it does not say which model it trained for; run train again")
    if measured is not None:
        manifests["benchmark"] = measured
    return DrafterRecord(
        edition=files.edition,
        fingerprint=fingerprint,
        verifier=_verifier(settings, trained["verifier_fingerprint"]),
        sources={key: _source(settings, files, key) for key in sorted(corpus["datasets"])},
        training=settings.training.model_dump(mode="json"),
        stages={name: StageRecord.of(manifest) for name, manifest in manifests.items()},
        versions=trained["versions"],
        layouts=layouts,
    )


def exported_layouts(files: EditionFiles, folders: Collection[Path]) -> dict[Layout, Path]:
    """The drafter's layouts among the folders that ``export`` wrote, by the server that loads them."""
    known: dict[Layout, Path] = {"sglang": files.drafter, "vllm": files.vllm_drafter}
    written = {folder.resolve() for folder in folders}
    return {name: folder for name, folder in known.items() if folder.resolve() in written}


def relative(layouts: Mapping[Layout, Path], folder: Path) -> dict[Layout, str]:
    """The same from ``folder``, where their record is."""
    return {name: os.path.relpath(place, folder) for name, place in layouts.items()}


def verifier_model_type(settings: PipelineSettings) -> str:
    """``model_type`` of the verifier as its checkpoint names it."""
    path = settings.verifier.path / "config.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])


def _verifier(settings: PipelineSettings, fingerprint: str) -> VerifierRecord:
    verifier = settings.verifier
    return VerifierRecord(
        name=verifier.path.name,
        huggingface=verifier.huggingface,
        revision=verifier.revision,
        profile=verifier.profile,
        model_type=verifier_model_type(settings),
        dtype=verifier.dtype,
        fingerprint=fingerprint,
    )


def _source(settings: PipelineSettings, files: EditionFiles, key: str) -> SourceRecord:
    source, validated = settings.dataset(key).source, files.dataset(key).manifest("validate")
    return SourceRecord(
        huggingface=source.huggingface,
        revision=source.revision,
        licence=source.licence,
        validated=read_manifest(validated).fingerprint if validated.exists() else None,
    )

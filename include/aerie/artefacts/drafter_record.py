"""What made a drafter: ``aerie.json`` beside its weights, the same document as in the registry.

Who serves the drafter, on whatever host, reads there which verifier it belongs to and how it was measured.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from aerie.artefacts.files import write_text
from aerie.artefacts.layout import EditionName
from aerie.artefacts.manifest import Manifest
from aerie.errors import BadInput, one_line
from aerie.settings.pipeline import DraftSettings
from aerie.settings.profile import Frozen

RECORD_FILE = "aerie.json"

Layout = Literal["sglang", "vllm"]
SGLANG_ALONE: Mapping[Layout, str] = {"sglang": "."}
"""Where the layouts of a drafter are that was recorded before there were two."""


class VerifierRecord(Frozen):
    """The model that a drafter drafts for. ``fingerprint`` is of configuration and weights, as they were captured."""

    name: str
    huggingface: str | None
    revision: str | None
    profile: str
    model_type: str
    dtype: str
    fingerprint: str


class SourceRecord(Frozen):
    """Where a data set of the corpus comes from, and what was judged of it; None: there is no such stage of it."""

    huggingface: str | None
    revision: str | None
    licence: str
    validated: str | None


class StageRecord(Frozen):
    """One stage on the way: fingerprint of its manifest, when it finished, what it counted."""

    fingerprint: str
    finished_at: datetime
    counts: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Manifest) -> "StageRecord":
        """The record of a manifest."""
        return cls(fingerprint=manifest.fingerprint, finished_at=manifest.finished_at, counts=manifest.counts)


class DrafterRecord(Frozen):
    """Everything that made a drafter.

    ``fingerprint`` is the one of its export. ``stages`` are ``merge``, ``vocabulary``, ``capture`` and ``train``, and
    ``benchmark`` once it was measured. ``training`` are the settings that it was trained with, ``versions`` those of
    the packages. ``layouts`` are the folders with its weights, from the record's own, by the server that loads them.
    """

    schema_version: Literal[1] = 1
    edition: EditionName
    fingerprint: str
    verifier: VerifierRecord
    sources: Mapping[str, SourceRecord]
    training: Mapping[str, Any]
    stages: Mapping[str, StageRecord]
    versions: Mapping[str, str]
    layouts: Mapping[Layout, str] = SGLANG_ALONE

    @property
    def drafter_id(self) -> str:
        """Name of the drafter in the registry."""
        return drafter_id_of(self.edition, self.fingerprint)

    @property
    def draft(self) -> DraftSettings | None:
        """The setting that its benchmark recommends; of an older benchmark, which recommends nothing, its own setting.

        None before it was measured, and where every setting that was tried changed the verifier's output.

        Raises:
            BadInput: the benchmark's record does not say.
        """
        if "benchmark" not in self.stages:
            return None
        counts = self.counts("benchmark")
        measured = counts.get("recommended", counts.get("settings", {}))
        if measured is None:
            return None
        try:
            return DraftSettings.model_validate({name: measured.get(name) for name in DraftSettings.model_fields})
        except ValidationError as error:
            raise BadInput(f"the benchmark of drafter {self.drafter_id}: {one_line(error)}") from error

    def counts(self, stage: str) -> Mapping[str, Any]:
        """What a stage counted.

        Raises:
            BadInput: the record does not have it.
        """
        if stage not in self.stages:
            raise BadInput(f"the record of drafter {self.drafter_id} has no stage {stage}: run it, then publish again")
        return self.stages[stage].counts


def drafter_id_of(edition: str, fingerprint: str) -> str:
    """Name of a drafter in the registry, from the fingerprint of its export."""
    return f"{edition}-{fingerprint[:12]}"


def write_record(folder: Path, record: DrafterRecord) -> Path:
    """Write a drafter's record into its folder, atomically, and return its path."""
    path = folder / RECORD_FILE
    write_text(path, record.model_dump_json(indent=2) + "\n")
    return path


def read_record(folder: Path) -> DrafterRecord | None:
    """The record in a drafter's folder, None where there is none: a drafter that was not made here.

    Raises:
        BadInput: it cannot be read.
    """
    path = folder / RECORD_FILE
    try:
        return DrafterRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(f"{path}: not the record of a drafter: {one_line(error)}; publish it again") from error

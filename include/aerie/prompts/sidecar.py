"""Provenance of an already tokenised file: the ``*.meta.yaml`` beside it."""

from pathlib import Path

from pydantic import Field

from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.errors import BadInput
from aerie.settings.pipeline import SourceSettings
from aerie.settings.profile import Frozen
from aerie.settings.yaml_files import read_mapping, validate


class Sidecar(Frozen):
    """Where tokenised rows come from. ``thinking`` tells whether the responses hold reasoning."""

    tokenizer_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    model: str
    thinking: bool
    licence: str
    source: str


def sidecar_path(source: SourceSettings) -> Path:
    """Path of the sidecar: as set, else the data file's name up to its first dot, with ``.meta.yaml``.

    Raises:
        BadInput: rows do not come from a local file, so that a sidecar must be named.
    """
    if source.sidecar is not None:
        return source.sidecar
    if source.path is None:
        raise BadInput(
            f"{source.huggingface}: set the source's 'sidecar': a file with tokenizer_sha256, model and so on"
        )
    return source.path.with_name(f"{source.path.name.split('.')[0]}.meta.yaml")


def read_sidecar(source: SourceSettings, verifier: VerifierTokens) -> Sidecar | None:
    """The sidecar, checked against the verifier and the settings; None where unknown provenance is allowed by name.

    Raises:
        BadInput: there is no sidecar and that is not allowed, a field is missing, the rows were made with another
            tokenizer, or the licence is not the one in the settings.
    """
    path = sidecar_path(source)
    if not path.is_file():
        if source.allow_unknown_provenance:
            return None
        raise BadInput(
            f"{path}: no sidecar, so nobody knows which tokenizer made these ids; write one with tokenizer_sha256, "
            "model, thinking, licence and source, or set allow_unknown_provenance: true"
        )
    sidecar = validate(Sidecar, read_mapping(path), where=path)
    if sidecar.tokenizer_sha256 != verifier.tokenizer_sha256:
        raise BadInput(
            f"{path}: tokenizer_sha256 {sidecar.tokenizer_sha256}, but the verifier's tokenizer is "
            f"{verifier.tokenizer_sha256}: the ids mean other text; tokenise the data again"
        )
    if sidecar.licence != source.licence:
        raise BadInput(f"{path}: licence {sidecar.licence!r}, but the configuration says {source.licence!r}")
    return sidecar

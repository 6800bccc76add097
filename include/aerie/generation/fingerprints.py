"""What a population of responses depends on, and the refusal to mix two.

The *generation* settings affect tokens; responses made under others belong to another edition. The *rules* settings
affect verdicts; when they change, the log is judged again. Budgets, concurrency, paths and memory are in neither.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from aerie.artefacts.files import fingerprint_of, write_json
from aerie.artefacts.manifest import Manifest
from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.boundary import RULES_VERSION
from aerie.errors import BadInput
from aerie.settings.pipeline import DatasetSettings, PipelineSettings
from aerie.settings.profile import GRAMMAR_FIELDS

ABSENT = "(absent)"

# Weights may be half a terabyte: of a large file, blocks spread over its length stand for the whole.
WHOLE_FILE_BYTES = 16 << 20
BLOCK_BYTES = 64 << 10
BLOCKS = 32


class Fingerprinted(BaseModel):
    """Settings and their fingerprint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Fingerprinted":
        """Settings with the fingerprint computed."""
        return cls(fingerprint=fingerprint_of(settings), settings=settings)


def generation_settings(
    settings: PipelineSettings, dataset: DatasetSettings, *, prepared: Manifest, tokens: VerifierTokens
) -> Fingerprinted:
    """What affects the tokens of a data set; ``prepared`` is the manifest of ``prepare``, which names the source."""
    verifier = settings.verifier
    profile = verifier.load_profile()
    return Fingerprinted.of(
        {
            "source": {
                **dataset.source.model_dump(
                    mode="json", include={"reader", "huggingface", "config", "split", "revision"}
                ),
                "sha256": sorted(source.sha256 for source in prepared.inputs),
            },
            "seed": settings.seed,
            "verifier": {
                **verifier.model_dump(mode="json", include={"revision", "profile", "dtype", "thinking"}),
                "weights_sha256": weights_sha256(verifier.path),
                "model_type": tokens.model_type,
                "tokenizer_sha256": tokens.tokenizer_sha256,
                "vocabulary_size": tokens.vocabulary_size,
            },
            "kv_cache_dtype": settings.serving.kv_cache_dtype,
            "quantisation": settings.serving.extra_argument("--quantization"),
            "template_switches": dict(profile.template_switches),
            "end_of_turn": list(profile.end_of_turn),
            "sampling": settings.load_sampling().model_dump(mode="json"),
            "max_new_tokens": dataset.max_new_tokens,
            "minimum_new_tokens": dataset.minimum_new_tokens,
            "context_length": settings.serving.context_length,
        }
    )


def weights_sha256(folder: Path) -> str:
    """SHA-256, in hex, of a checkpoint's weights, sampled where they are large; copies of a checkpoint have the same.

    Raises:
        BadInput: there are no weights.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise BadInput(f"{folder}: expected the verifier's checkpoint with its weights (*.safetensors)")
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for offset, length in _blocks(size):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def _blocks(size: int) -> list[tuple[int, int]]:
    if size <= WHOLE_FILE_BYTES:
        return [(0, size)]
    return [(number * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES) for number in range(BLOCKS)]


def rules_settings(settings: PipelineSettings, dataset: DatasetSettings, *, tokens: VerifierTokens) -> Fingerprinted:
    """What affects the verdicts of a data set."""
    profile = settings.verifier.load_profile()
    return Fingerprinted.of(
        {
            "rules_version": RULES_VERSION,
            "drop_flags": sorted(dataset.drop_flags),
            "profile": profile.model_dump(mode="json", include=set(GRAMMAR_FIELDS)),
            "token_ids": dict(sorted(tokens.token_ids.items())),
            "whitespace_ids": list(tokens.whitespace_ids),
            "text_ids": dict(sorted(tokens.text_ids.items())),
        }
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One line for each setting that differs, named by its dotted path."""
    for key in sorted({*before, *now}):
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {old!r} before, {new!r} now"


def hold_generation(path: Path, now: Fingerprinted, *, log_has_rows: bool, where: str) -> bool:
    """Bind the response log beside ``path`` to these settings; returns whether it was bound to them before.

    Args:
        path: ``generation.json`` beside the log; written where the log is empty.
        now: the settings of this run.
        log_has_rows: whether the log holds responses.
        where: edition and data set, for the message.

    Raises:
        BadInput: the log was made under other settings (the message shows the differences), or it does not say which.
    """
    before = _read(path)
    if before is not None and before.fingerprint == now.fingerprint:
        return True
    if log_has_rows:
        shown = "; ".join(differences(before.settings, now.settings)) if before else f"{path} is missing"
        raise BadInput(
            f"{where}: its responses were generated under other settings, and two populations are not mixed: {shown}. "
            "Restore the settings, or choose a new edition"
        )
    write_json(path, now.model_dump(mode="json"))
    return False


def _read(path: Path) -> Fingerprinted | None:
    try:
        return Fingerprinted.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BadInput(f"{path}: not the settings of a generation: {error}") from error

"""Where the files of an edition lie below the data root.

Names of editions and data sets come from forms, command lines and URLs, and become names of folders here: what could
lead anywhere else is refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from aerie.errors import BadInput

EDITION_PATTERN = r"^[a-z0-9_-]{1,64}$"
DATASET_PATTERN = r"[A-Za-z0-9_-]{1,64}"
CORPUS_REPORT = "report.html"


def edition_name(name: str) -> str:
    """The name, where an edition can have it.

    Raises:
        BadInput: it could name a folder elsewhere, or one that no file system takes.
    """
    if re.fullmatch(EDITION_PATTERN, name) is None:
        raise BadInput(f"edition {name!r}: expected at most 64 lower-case letters, digits, '_' and '-'")
    return name


def dataset_name(name: str) -> str:
    """The name, where a data set can have it.

    Raises:
        BadInput: it could name a folder elsewhere, or one that no file system takes.
    """
    if re.fullmatch(DATASET_PATTERN, name) is None:
        raise BadInput(f"data set {name!r}: expected at most 64 letters, digits, '_' and '-', such as B1_glaive")
    return name


EditionName = Annotated[str, AfterValidator(edition_name)]
DatasetName = Annotated[str, AfterValidator(dataset_name)]


@dataclass(frozen=True)
class DatasetFiles:
    """Files of one data set of one edition."""

    folder: Path

    @property
    def prompts(self) -> Path:
        """Prompt ids, written by ``prepare``."""
        return self.folder / "prompts.parquet"

    @property
    def prompt_hashes(self) -> Path:
        """What each prompt asks, as a hash, written by ``prepare``."""
        return self.folder / "prompt_hashes.parquet"

    @property
    def imported(self) -> Path:
        """Already tokenised rows, written by ``import``."""
        return self.folder / "imported.parquet"

    @property
    def verifier_tokens(self) -> Path:
        """Token ids of the verifier, written by ``prepare`` and ``import``."""
        return self.folder / "verifier.json"

    @property
    def responses(self) -> Path:
        """Response log, written by ``generate``."""
        return self.folder / "responses.jsonl"

    @property
    def writer_lock(self) -> Path:
        """Held by whoever writes the response log."""
        return self.folder / "generate.lock"

    @property
    def verdicts(self) -> Path:
        """One verdict a response, written by ``validate``."""
        return self.folder / "verdicts.parquet"

    @property
    def samples(self) -> Path:
        """Kept rows, written by ``validate``."""
        return self.folder / "samples.parquet"

    @property
    def previews(self) -> Path:
        """Decoded samples for people, written by ``validate``."""
        return self.folder / "previews.jsonl"

    @property
    def canary_previews(self) -> Path:
        """Decoded samples of the canary, written by ``generate``."""
        return self.folder / "canary_previews.jsonl"

    def manifest(self, stage: str) -> Path:
        """Manifest of ``stage`` for this data set."""
        return self.folder / f"{stage}.manifest.json"


@dataclass(frozen=True)
class EditionFiles:
    """Files of one edition.

    Raises:
        BadInput: the edition cannot have this name.
    """

    data_root: Path
    edition: str

    def __post_init__(self) -> None:
        edition_name(self.edition)

    @property
    def folder(self) -> Path:
        """Folder of the edition."""
        return self.data_root / "editions" / self.edition

    def dataset(self, key: str) -> DatasetFiles:
        """Files of data set ``key``.

        Raises:
            BadInput: no data set can have this name.
        """
        return DatasetFiles(self.folder / "datasets" / dataset_name(key))

    def lock(self, key: str | None = None) -> Path:
        """Held by whoever works on data set ``key``, or on what the edition has beside its data sets.

        Raises:
            BadInput: no data set can have this name.
        """
        return self.folder / "locks" / ("edition.lock" if key is None else f"{dataset_name(key)}.lock")

    def rank_lock(self, rank: int, world_size: int) -> Path:
        """Held by whoever captures a rank's rows."""
        return self.folder / "locks" / f"capture-{rank}-of-{world_size}.lock"

    @property
    def corpus(self) -> Path:
        """Merged training set, as Hugging Face ``Dataset.save_to_disk`` lays it out, with its token frequencies."""
        return self.folder / "corpus"

    @property
    def corpus_report(self) -> Path:
        """What the corpus holds, for people, written by ``merge``."""
        return self.corpus / CORPUS_REPORT

    @property
    def vocabulary(self) -> Path:
        """Draft vocabulary mappings."""
        return self.folder / "vocabulary"

    @property
    def hidden_states(self) -> Path:
        """Hidden states: the links by row that speculators reads, the index, and the folder of state files."""
        return self.folder / "hidden_states"

    @property
    def states(self) -> Path:
        """State files by sample, written by the hooks inside the server."""
        return self.hidden_states / "states"

    @property
    def training(self) -> Path:
        """Verifier stub, trainer configuration and checkpoints."""
        return self.folder / "training"

    @property
    def drafter(self) -> Path:
        """Exported drafter in SGLang's layout."""
        return self.folder / "drafter"

    @property
    def vllm_drafter(self) -> Path:
        """The same drafter in speculators' own layout, which vLLM serves as it is."""
        return self.folder / "drafter_vllm"

    @property
    def untrained_drafter(self) -> Path:
        """The same drafter before its first training step, which the benchmark compares with."""
        return self.folder / "drafter_untrained"

    @property
    def benchmark(self) -> Path:
        """Benchmark requests and results."""
        return self.folder / "benchmark"

    def drafter_benchmark(self, fingerprint: str) -> Path:
        """Measurements of any drafter on this edition's prompts, written by ``benchmark_drafter``."""
        return self.folder / "benchmarks" / fingerprint[:12]

    def manifest(self, stage: str) -> Path:
        """Manifest of ``stage`` for the whole edition."""
        return self.folder / f"{stage}.manifest.json"

"""The draft vocabulary on disk: speculators' two arrays, and what they were made from.

``d2t-<N>.npy`` is int64 [N]: token id of the verifier = draft id + d2t[draft id]. ``t2d-<N>.npy`` is bool [V]: which of
the verifier's tokens have a draft id. ``vocabulary.json`` binds both to the corpus.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aerie.artefacts.files import atomic_path, write_json
from aerie.errors import BadInput, Failed

ABOUT_FILE = "vocabulary.json"


@dataclass(frozen=True)
class DraftVocabulary:
    """The mapping: d2t int64 [N] and t2d bool [V], and the fingerprint of the corpus that chose the tokens."""

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    corpus_fingerprint: str

    @property
    def size(self) -> int:
        """Number of tokens that the drafter can propose."""
        return len(self.d2t)


def mapping_paths(folder: Path, size: int) -> tuple[Path, Path]:
    """Paths of ``d2t`` and ``t2d`` for a draft vocabulary of ``size``, as speculators names them."""
    return folder / f"d2t-{size}.npy", folder / f"t2d-{size}.npy"


def write_draft_vocabulary(folder: Path, vocabulary: DraftVocabulary, about: dict[str, Any]) -> list[Path]:
    """Write the mapping and ``about`` (JSON-like) beside it; return the paths written."""
    d2t_path, t2d_path = mapping_paths(folder, vocabulary.size)
    for path, array in ((d2t_path, vocabulary.d2t), (t2d_path, vocabulary.t2d)):
        with atomic_path(path) as temporary:
            np.save(temporary, array)
    about_path = folder / ABOUT_FILE
    write_json(about_path, {"corpus_fingerprint": vocabulary.corpus_fingerprint, "size": vocabulary.size, **about})
    return [d2t_path, t2d_path, about_path]


def read_draft_vocabulary(folder: Path, *, corpus_fingerprint: str) -> DraftVocabulary:
    """Read the mapping of the corpus with this fingerprint.

    Raises:
        BadInput: there is no mapping.
        Failed: it was made from another corpus, or its arrays do not fit together.
    """
    try:
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{folder}: no draft vocabulary here ({ABOUT_FILE} is missing); run vocabulary first") from None
    if about["corpus_fingerprint"] != corpus_fingerprint:
        raise Failed(
            f"{folder}: stale draft vocabulary: made from corpus {about['corpus_fingerprint'][:12]}, but the corpus is "
            f"{corpus_fingerprint[:12]}; run vocabulary again"
        )
    d2t, t2d = (np.load(path) for path in mapping_paths(folder, about["size"]))
    targets = np.arange(len(d2t)) + d2t
    if not np.array_equal(np.flatnonzero(t2d), targets):
        raise Failed(f"{folder}: d2t and t2d name different tokens; run vocabulary again with --force")
    return DraftVocabulary(d2t=d2t, t2d=t2d, corpus_fingerprint=corpus_fingerprint)

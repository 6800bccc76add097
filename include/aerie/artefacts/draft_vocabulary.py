"""The draft vocabulary on disk: speculators' two arrays, and what they were made from.

``d2t-<N>-<corpus>.npy`` is int64 [N]: token id of the verifier = draft id + d2t[draft id]. ``t2d-<N>-<corpus>.npy`` is
bool [V]: which of the verifier's tokens have a draft id. ``<corpus>`` begins the fingerprint of the corpus that chose
them; ``vocabulary.json`` has all of it, and the hashes of both files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aerie.artefacts.files import atomic_path, sha256_of, write_json
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


def mapping_paths(folder: Path, size: int, corpus_fingerprint: str) -> tuple[Path, Path]:
    """Paths of ``d2t`` and ``t2d`` for a draft vocabulary of ``size``, chosen by this corpus."""
    name = f"{size}-{corpus_fingerprint[:12]}.npy"
    return folder / f"d2t-{name}", folder / f"t2d-{name}"


def write_draft_vocabulary(folder: Path, vocabulary: DraftVocabulary, about: dict[str, Any]) -> list[Path]:
    """Write the mapping and ``about`` (JSON-like) beside it, in place of any other; return the paths written."""
    for stale in (*folder.glob("d2t-*.npy"), *folder.glob("t2d-*.npy")):
        stale.unlink()
    d2t_path, t2d_path = mapping_paths(folder, vocabulary.size, vocabulary.corpus_fingerprint)
    for path, array in ((d2t_path, vocabulary.d2t), (t2d_path, vocabulary.t2d)):
        with atomic_path(path) as temporary:
            np.save(temporary, array)
    about_path = folder / ABOUT_FILE
    identity = {
        "corpus_fingerprint": vocabulary.corpus_fingerprint,
        "size": vocabulary.size,
        "sha256": {path.name: sha256_of(path) for path in (d2t_path, t2d_path)},
    }
    write_json(about_path, {**identity, **about})
    return [d2t_path, t2d_path, about_path]


def read_draft_vocabulary(folder: Path, *, corpus_fingerprint: str) -> DraftVocabulary:
    """Read the mapping of the corpus with this fingerprint.

    Raises:
        BadInput: there is no mapping, or one in an older form.
        Failed: it was made from another corpus, one of its files is another's, or they do not fit together.
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
    paths = mapping_paths(folder, about["size"], corpus_fingerprint)
    if "sha256" not in about or not all(path.is_file() for path in paths):
        raise BadInput(f"{folder}: expected {' and '.join(path.name for path in paths)}; run vocabulary again")
    for path in paths:
        if sha256_of(path) != about["sha256"][path.name]:
            raise Failed(f"{path}: not the file that vocabulary wrote; run vocabulary again with --force")
    d2t, t2d = map(np.load, paths)
    targets = np.arange(len(d2t)) + d2t
    if not np.array_equal(np.flatnonzero(t2d), targets):
        raise Failed(f"{folder}: d2t and t2d name different tokens; run vocabulary again with --force")
    return DraftVocabulary(d2t=d2t, t2d=t2d, corpus_fingerprint=corpus_fingerprint)

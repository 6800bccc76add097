"""Whether corpus rows still stand at the boundary of prompt and response, before GPU hours are spent on them.

``validate`` judged every row, and hashes bind every file to what was judged. What breaks rows behind that (a mask
shifted while they were written, reasoning taken out by hand, another profile) breaks all of a data set: some of each,
judged once more from nothing but ids and mask, show it. Rows broken alike train well, validate well and serve badly.
``forecast`` asks before a capture is paid for, ``train`` before a training is.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, iterate_rows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.manifest import read_manifest
from aerie.artefacts.verifier_tokens import read_verifier_tokens
from aerie.boundary.grammar import Grammar, PromptEnd, grammar_of_verifier
from aerie.boundary.rules import RULES
from aerie.boundary.segments import judge_mask, trained_segments
from aerie.errors import Failed
from aerie.settings.pipeline import PipelineSettings

ROWS_PER_DATASET = 64
REASONING_CLOSED = "reasoning_closed"
WHY_CLOSED = (
    "Thinking is on, and the prompt closes reasoning before the response begins: it was stripped together with its "
    "boundary, or these are another model's rows."
)


@dataclass(frozen=True)
class Boundaries:
    """Of ``rows`` judged again: rows by the reason that they are broken by, and the first of them, in words."""

    rows: int
    broken: Mapping[str, int]
    first: str | None

    @property
    def counts(self) -> dict[str, Any]:
        """What a manifest says of them."""
        return {**asdict(self), "problem": self.problem}

    @property
    def problem(self) -> str | None:
        """What is wrong, and what the commonest reason means; None where nothing is."""
        if not self.broken:
            return None
        commonest = next(iter(self.broken))
        counted = ", ".join(f"{name} {rows}" for name, rows in self.broken.items())
        why = WHY_CLOSED if commonest == REASONING_CLOSED else RULES[commonest].rationale
        return (
            f"of {self.rows} rows judged again, some break the boundary of prompt and response: {counted}; first "
            f"{self.first}. {commonest}: {why}"
        )


def require_sound_rows(files: EditionFiles, settings: PipelineSettings) -> Boundaries:
    """Judge some rows of each data set of the corpus once more, and refuse it where they are broken.

    Raises:
        BadInput: a data set of the corpus is not of these settings, or a file of it is missing.
        Failed: rows break the boundary of prompt and response.
    """
    found = judge_corpus(files, settings)
    require_boundaries(found, files.corpus)
    return found


def judge_corpus(files: EditionFiles, settings: PipelineSettings) -> Boundaries:
    """Judge the first rows of each data set once more; the corpus is shuffled, so that they are a fair sample."""
    tallies: dict[str, Tally] = {}
    for row in iterate_rows(files.corpus / DATASET_FOLDER):
        if row.dataset not in tallies:
            tallies[row.dataset] = Tally(row_judge(files, settings, row.dataset))
        if tallies[row.dataset].rows < ROWS_PER_DATASET:
            tallies[row.dataset].add(row)
    broken, first = Counter[str](), None
    for tally in tallies.values():
        found, its_first = tally.broken()
        broken.update(found)
        first = first or its_first
    return Boundaries(
        rows=sum(tally.rows for tally in tallies.values()), broken=dict(broken.most_common()), first=first
    )


def require_boundaries(found: Boundaries, corpus: Path) -> None:
    """Refuse a corpus with broken rows.

    Raises:
        Failed: with the reasons, and what the commonest of them means.
    """
    if found.problem is not None:
        raise Failed(
            f"{corpus}: {found.problem} Expected what each row trains on to be a whole response, to the prompt that "
            "stands before it. Validate the data sets again, then merge with --force; what passes there and not here "
            "is broken by whatever writes the corpus"
        )


@dataclass(frozen=True)
class RowJudge:
    """Judges rows of one data set; ``generated`` ones may be cut by their cap, ``thinking`` ones should reason."""

    grammar: Grammar
    generated: bool
    thinking: bool

    def reasons(self, row: CorpusRow) -> tuple[str, ...]:
        """Why the row is not to be trained on."""
        return judge_mask(row.input_ids, row.loss_mask, self.grammar, may_be_cut=self.generated).reasons

    def closed(self, row: CorpusRow) -> bool:
        """Whether a prompt of the row closes reasoning, where it should be open."""
        ids = row.input_ids.astype(np.int64)
        return self.thinking and any(
            self.grammar.prompt_end(ids[:start], ids[start:stop]) is PromptEnd.CLOSED
            for start, stop in trained_segments(row.loss_mask)
        )


@dataclass
class Tally:
    """Rows of one data set by reason, with the first of each in words."""

    judge: RowJudge
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)

    def add(self, row: CorpusRow) -> None:
        """Judge one row."""
        self.rows += 1
        for reason in (*self.judge.reasons(row), *([REASONING_CLOSED] if self.judge.closed(row) else [])):
            self.reasons[reason] += 1
            self.firsts.setdefault(reason, f"row {row.row} (data set {row.dataset}, sample {row.sample_id})")

    def broken(self) -> tuple[Counter[str], str | None]:
        """Reasons that count, and the first row: a few closed prompts are someone's own, most rows' are a fault."""
        counted = self.reasons.copy()
        if counted[REASONING_CLOSED] <= self.rows / 2:
            del counted[REASONING_CLOSED]
        return counted, next((first for reason, first in self.firsts.items() if reason in counted), None)


def row_judge(files: EditionFiles, settings: PipelineSettings, dataset: str) -> RowJudge:
    """The judge of a data set's rows: its verifier's grammar, and whether its source says that they reason.

    Raises:
        BadInput: the data set is not of these settings, or a file of it is missing.
    """
    its, profile = files.dataset(dataset), settings.verifier.load_profile()
    generated = settings.dataset(dataset).kind == "generated"
    thinking = settings.verifier.thinking and profile.reasoning.opens_in != "never"
    if thinking and not generated:
        provenance = read_manifest(its.manifest("import")).counts["provenance"]
        thinking = isinstance(provenance, Mapping) and bool(provenance["thinking"])
    return RowJudge(
        grammar=grammar_of_verifier(profile, read_verifier_tokens(its.verifier_tokens)),
        generated=generated,
        thinking=thinking,
    )

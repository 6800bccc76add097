"""From tokenised rows to checked rows with ids and splits, in two passes: which ids tell rows apart, then the rows."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.imported import ImportedRow
from aerie.prompts.decontamination import NamedPrompts
from aerie.prompts.identity import ID_DIGITS, sample_id, split_of
from aerie.prompts.tally import Progress, Tally
from aerie.settings.pipeline import SourceSettings, SplitSettings
from aerie.sources import tokenised
from aerie.sources.conversation import Unusable
from aerie.sources.rows import SourceRow, iterate_source
from aerie.sources.tokenised import TokenisedRow


@dataclass
class Importer:
    """Checks the rows of a source and counts; a refused row is counted and never ends the job by itself."""

    source: SourceSettings
    dataset: str
    vocabulary_size: int
    splits: SplitSettings
    named: NamedPrompts
    decode: Callable[[list[int]], str]
    progress: Progress
    tally: Tally = field(default_factory=Tally)
    split_counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    trained_tokens: int = 0
    duplicates: int = 0

    def rows(self) -> Iterator[ImportedRow]:
        """Yield checked rows in the source's order, each once."""
        shared = self._shared_ids()
        seen: set[int] = set()
        for row in iterate_source(self.source):
            self.tally.rows += 1
            try:
                checked = self._read(row)
            except Unusable as problem:
                self.tally.skip(row.where, problem)
                continue
            content = content_of(checked)
            if (key := int(content[:16], 16)) in seen:
                self.duplicates += 1
                continue
            seen.add(key)
            yield self._imported(checked, content, shared)
            self.progress.tick(lambda: (f"checked {self.tally.rows} rows", self.figures))

    @property
    def figures(self) -> dict[str, Any]:
        """Figures so far."""
        return {"rows": self.split_counts.total(), "tokens": self.tokens, "refused": self.tally.skipped.total()}

    def _read(self, row: SourceRow) -> TokenisedRow:
        if row.problem is not None:
            raise row.problem
        read = tokenised.read(row.value, vocabulary_size=self.vocabulary_size)
        if self.named:
            for text in self._untrained(read):
                self.named.check_text(text)
        return read

    def _untrained(self, row: TokenisedRow) -> Iterator[str]:
        """Texts of the segments that are not trained on, which hold what is asked."""
        for trained, segment in groupby(zip(row.input_ids, row.loss_mask, strict=True), key=itemgetter(1)):
            if not trained:
                yield self.decode([token for token, _ in segment])

    def _shared_ids(self) -> set[str]:
        """Ids that rows of different content share: they identify none of them."""
        contents: dict[str, str] = {}
        shared = set()
        for row in iterate_source(self.source):
            try:
                checked = self._read(row)
            except Unusable:
                continue  # counted in the other pass
            if checked.source_id is not None:
                content = content_of(checked)[:ID_DIGITS]
                if contents.setdefault(checked.source_id, content) != content:
                    shared.add(checked.source_id)
            self.progress.tick(lambda: (f"compared the ids of {len(contents)} rows", {}))
        return shared

    def _imported(self, row: TokenisedRow, content: str, shared: set[str]) -> ImportedRow:
        source_id = None if row.source_id in shared else row.source_id
        identity = sample_id(self.dataset, source_id, 0, content)
        conversation_id = row.conversation_id or identity
        split = split_of(conversation_id, self.splits)
        self.split_counts[split] += 1
        self.tokens += len(row.input_ids)
        self.trained_tokens += sum(row.loss_mask)
        return ImportedRow(identity, conversation_id, split, row.input_ids, row.loss_mask)


def content_of(row: TokenisedRow) -> str:
    """Hash of what a row trains: its ids and mask."""
    return fingerprint_of([row.input_ids, row.loss_mask])

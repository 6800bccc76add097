"""Where in its source a sample comes from: the source is read again until a row makes this sample id."""

import sys

from aerie.prompts.identity import sample_id as identity_of
from aerie.prompts.importing import content_of
from aerie.prompts.preparing import candidates_of
from aerie.settings.pipeline import PipelineSettings, Turns
from aerie.sources import tokenised
from aerie.sources.conversation import Unusable
from aerie.sources.readers import Reader, reader_of
from aerie.sources.rows import SourceRow, iterate_source


def find_source_row(settings: PipelineSettings, dataset: str, sample_id: str) -> str | None:
    """Where the first row stands that makes ``sample_id``, as ``SourceRow.where`` says it; None where none does.

    Raises:
        BadInput: the configuration has no such data set, or its source is not there.
        Retryable: the hub could not be reached.
    """
    configured = settings.dataset(dataset)
    source = configured.source
    reader = None if configured.kind == "tokenised" else reader_of(source)
    without_turn = sample_id.rpartition("-t")[0]
    for row in iterate_source(source):
        try:
            made = _of_tokens(row) if reader is None else _of_text(row, reader, source.turns, settings.seed)
        except (Unusable, UnicodeEncodeError, RecursionError):
            continue  # prepare and import refuse such a row, and count it
        for source_id, content in made:
            # A prompt too long for the context is cut by whole turns: which turn it asks for is known when rendered.
            own = identity_of(dataset, source_id, 0, content).rpartition("-t")[0] if source_id else None
            if sample_id == identity_of(dataset, None, 0, content) or (own and own == without_turn):
                return row.where
    return None


def _of_text(row: SourceRow, reader: Reader, turns: Turns, seed: int) -> list[tuple[str | None, str]]:
    """Own id and content hash of each prompt of a row."""
    if row.problem is not None:
        raise row.problem
    candidates = candidates_of(reader(row.value), row.where, turns=turns, seed=seed)
    return [(candidate.source_id, candidate.content_hash) for candidate in candidates]


def _of_tokens(row: SourceRow) -> list[tuple[str | None, str]]:
    if row.problem is not None:
        raise row.problem
    read = tokenised.read(row.value, vocabulary_size=sys.maxsize)  # import has checked the ids
    return [(read.source_id, content_of(read))]

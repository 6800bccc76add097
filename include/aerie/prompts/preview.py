"""Rows of a source before and after, for people. Model environment.

Nothing of a row reaches the terminal as more than text: control and formatting characters are written out, and no
markup is read from it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from rich.text import Text

from aerie.boundary.showing import shown
from aerie.prompts.checkpoint import Verifier, load_verifier
from aerie.prompts.decontamination import NamedPrompts
from aerie.prompts.identity import split_of
from aerie.prompts.preparing import candidates_of
from aerie.prompts.rendering import Fit, Renderer
from aerie.settings.pipeline import DatasetSettings, PipelineSettings
from aerie.sources import tokenised
from aerie.sources.conversation import Unusable
from aerie.sources.readers import reader_of
from aerie.sources.rows import SourceRow, iterate_source

HEADING, NOTE, PROBLEM, SPECIAL, TRAINED = "bold", "dim", "bold red", "bold magenta", "green"
SHOWN_CHARACTERS = 3000
"""Of a longer value or prompt the middle is left out."""

Piece = tuple[str, str]


def preview(settings: PipelineSettings, key: str, rows: int) -> Iterator[Text]:
    """Lines for the first ``rows`` rows of data set ``key``: each as it stands in the source, then what comes of it.

    Raises:
        BadInput: the settings, the checkpoint or the source are wrong.
        Retryable: the hub could not be reached.
    """
    dataset = settings.dataset(key)
    verifier = load_verifier(settings.verifier)
    is_tokenised = dataset.kind == "tokenised"
    after = _tokenised_rows(verifier) if is_tokenised else _prompts(settings, dataset, verifier)
    for row in islice(iterate_source(dataset.source), rows):
        yield Text(f"\n=== {shown(row.where)}", style=HEADING)
        for name, value in row.value.items():
            yield Text.assemble((f"{shown(name)}: ", NOTE), _shortened(_as_text(value)))
        try:
            if row.problem is not None:
                raise row.problem
            yield from after(row)
        except Unusable as problem:
            yield Text(f"--- {'set aside' if problem.by_rule else 'skipped'}: {shown(str(problem))}", style=PROBLEM)
        except (UnicodeEncodeError, RecursionError) as error:
            yield Text(f"--- skipped: {shown(str(error))}", style=PROBLEM)


def _prompts(
    settings: PipelineSettings, dataset: DatasetSettings, verifier: Verifier
) -> Callable[[SourceRow], Iterator[Text]]:
    """What becomes of a row of a data set that is generated: its prompts, as ``prepare`` makes them."""
    source, seed = dataset.source, settings.seed
    reader, renderer = reader_of(source), Renderer(verifier, settings.verifier.prompt_date)
    named = NamedPrompts(settings.decontaminate)
    fit = Fit(settings.serving.context_length - dataset.minimum_new_tokens, source.turns, seed)

    def lines(row: SourceRow) -> Iterator[Text]:
        conversation = reader(row.value)
        if conversation.notes:
            yield Text(f"--- repaired: {', '.join(map(shown, conversation.notes))}", style=NOTE)
        for candidate in candidates_of(conversation, row.where, turns=source.turns, seed=seed):
            named.check(candidate.history)
            rendered = fit.render(
                renderer, candidate.history, candidate.tools, conversation_id=candidate.conversation_id
            )
            split = split_of(candidate.conversation_id, settings.splits)
            yield Text(
                f"--- prompt of {len(rendered.prompt_ids):,} tokens, turn {rendered.turn}, {split}, "
                f"{len(candidate.tools)} tools",
                style=NOTE,
            )
            yield _coloured(verifier, rendered.prompt_ids, [""] * len(rendered.prompt_ids))

    return lines


def _tokenised_rows(verifier: Verifier) -> Callable[[SourceRow], Iterator[Text]]:
    """What becomes of a row that arrives tokenised: its text, with what is trained in colour."""

    def lines(row: SourceRow) -> Iterator[Text]:
        read = tokenised.read(row.value, vocabulary_size=verifier.tokens.vocabulary_size)
        yield Text(f"--- row of {len(read.input_ids):,} tokens, {sum(read.loss_mask):,} trained", style=NOTE)
        yield _coloured(verifier, read.input_ids, [TRAINED if trained else "" for trained in read.loss_mask])

    return lines


def _coloured(verifier: Verifier, ids: Sequence[int], styles: Sequence[str]) -> Text:
    """Text of ids; special tokens stand out from text that reads like them."""
    special = frozenset(verifier.tokens.token_ids.values())
    pieces: list[Piece] = []
    pairs = zip(ids, styles, strict=True)
    for (style, is_special), group in groupby(pairs, key=lambda pair: (pair[1], pair[0] in special)):
        text = shown(verifier.tokenizer.decode([token for token, _ in group]))
        pieces.append((text, SPECIAL if is_special else style))
    return _middle_left_out(pieces)


def _middle_left_out(pieces: Sequence[Piece]) -> Text:
    whole = Text.assemble(*pieces)
    if len(whole) <= SHOWN_CHARACTERS:
        return whole
    half = SHOWN_CHARACTERS // 2
    return Text.assemble(
        whole[:half], (f" ... {len(whole) - SHOWN_CHARACTERS:,} characters left out ... ", NOTE), whole[-half:]
    )


def _shortened(text: str) -> Text:
    return _middle_left_out([(shown(text), "")])


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    nested = isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(i, Mapping) for i in value))
    return json.dumps(value, indent=2 if nested else None, ensure_ascii=False, default=str)

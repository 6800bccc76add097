"""One sample for people: prompt, reasoning, boundary, answer, tool calls, end, and what is trained. Model environment.

Nothing of a sample's text reaches the terminal as more than text: control and formatting characters are written out,
and no markup is read from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import pyarrow.parquet as pq
from rich.text import Text

from aerie.artefacts.imported import iterate_imported
from aerie.artefacts.layout import DatasetFiles, EditionFiles
from aerie.artefacts.prompts import iterate_prompts
from aerie.artefacts.response_log import read_latest
from aerie.artefacts.verifier_tokens import read_verifier_tokens
from aerie.boundary.grammar import Grammar, grammar_of_verifier
from aerie.boundary.rows import GeneratedRows, JudgedRow, TokenisedRows
from aerie.boundary.rules import check_drop_flags
from aerie.boundary.stage import load_decoder, under_policy
from aerie.boundary.text_rules import Decode
from aerie.errors import BadInput
from aerie.settings.pipeline import PipelineSettings

STYLES: Mapping[str, str] = {
    "prompt": "bright_black",
    "reasoning": "cyan",
    "boundary": "bold magenta",
    "answer": "green",
    "after_tools": "green",
    "tool": "bold yellow",
    "tool_section": "yellow",
    "tool_id": "yellow",
    "tool_arguments": "yellow",
    "end": "bold blue",
    "after_end": "red",
    "foreign": "bold white on red",
}
TRAINED = "underline"
SPECIAL = "bold"

_LINE_CHARACTERS = frozenset("\n\t")


@dataclass(frozen=True)
class FoundSample:
    """A sample of an edition, judged and ready to be decoded."""

    edition: str
    dataset: str
    row: JudgedRow
    decode: Decode
    special_ids: frozenset[int]


def find_sample(sample_id: str, *, files: EditionFiles, settings: PipelineSettings, dataset: str | None) -> FoundSample:
    """Find a sample of an edition and judge it under its data set's policy.

    Args:
        sample_id: the sample.
        files: files of the edition.
        settings: the pipeline's configuration.
        dataset: the data set to look in; None looks in all that the edition has.

    Raises:
        BadInput: there is no such sample, it has no response, or its data set was made with another tokenizer.
        Failed: the response log is damaged.
    """
    keys = [dataset] if dataset else [key for key in settings.datasets if files.dataset(key).verifier_tokens.exists()]
    for key in keys:
        kind = settings.dataset(key).kind
        if _holds(files.dataset(key), kind, sample_id):
            return _found(sample_id, key, files=files, settings=settings)
    looked = f"looked in {', '.join(keys)}" if keys else "none of its data sets is prepared"
    raise BadInput(f"edition {files.edition} ({files.folder}) has no sample {sample_id!r}: {looked}")


def _holds(files: DatasetFiles, kind: str, sample_id: str) -> bool:
    path = files.imported if kind == "tokenised" else files.prompts
    # Raises where the file is missing or damaged, in the words of its own module.
    next(iter(iterate_imported(path) if kind == "tokenised" else iterate_prompts(path)), None)
    ids = pq.read_table(path, columns=["sample_id"], filters=[("sample_id", "=", sample_id)])
    return bool(ids.num_rows)


def _found(sample_id: str, key: str, *, files: EditionFiles, settings: PipelineSettings) -> FoundSample:
    of_dataset, its_settings, verifier = files.dataset(key), settings.dataset(key), settings.verifier
    tokens = read_verifier_tokens(of_dataset.verifier_tokens)
    grammar = grammar_of_verifier(verifier.load_profile(), tokens)
    decode = load_decoder(verifier, tokens, of_dataset.verifier_tokens)
    if its_settings.kind == "tokenised":
        rows = TokenisedRows(of_dataset.imported, grammar, decode)
        row = next(row for row in rows if row.sample_id == sample_id)
    else:
        row = _generated(sample_id, of_dataset, grammar, decode)
    return FoundSample(
        edition=files.edition,
        dataset=key,
        row=under_policy(row, check_drop_flags(its_settings.drop_flags)),
        decode=decode,
        special_ids=frozenset(tokens.token_ids.values()),
    )


def _generated(sample_id: str, files: DatasetFiles, grammar: Grammar, decode: Decode) -> JudgedRow:
    response = read_latest(files.responses, [sample_id]).get(sample_id)
    if response is None:
        raise BadInput(f"sample {sample_id} has no response in {files.responses}: it was skipped, or not generated yet")
    rows = GeneratedRows(files.prompts, files.responses, grammar, decode, sample_ids={sample_id})
    return rows.judge(response)


def lines_of(found: FoundSample) -> Iterator[Text]:
    """What is printed: a heading, then each part of the sample with where it stands and whether it is trained."""
    row = found.row
    verdict = row.verdict
    tokens = f"{row.response_tokens:,}"
    yield _plain(f"sample {row.sample_id}: {found.edition}/{found.dataset}, {row.split}")
    yield _plain(
        f"{verdict.verdict}, {row.prompt_tokens:,} prompt tokens, {row.completion_tokens:,} of response "
        f"({verdict.reasoning_tokens:,} reasoning, {verdict.answer_tokens:,} answer, {verdict.tool_calls:,} tool "
        f"calls), {f'{tokens} trained' if verdict.kept else f'none trained ({tokens} if it were kept)'}"
    )
    for name in (*verdict.reasons, *verdict.flags):
        at = ", ".join(map(str, verdict.positions.get(name, ())))
        yield _plain(f"  {name}{f' at {at}' if at else ''}")
    if verdict.unchecked:
        yield _plain(f"  not checked: {', '.join(verdict.unchecked)}")
    for kind, start, stop, trained in _parts(row):
        yield Text(f"{kind}, tokens {start:,} to {stop - 1:,}{', trained' if trained else ''}", style="dim")
        style = f"{STYLES.get(kind, '')} {TRAINED if trained else ''}"
        yield Text.assemble(*_pieces(found, row.input_ids[start:stop].tolist(), style))


def _pieces(found: FoundSample, ids: Sequence[int], style: str) -> Iterator[tuple[str, str]]:
    """Text and style; special tokens stand out from text that reads like them."""
    for special, group in groupby(ids, key=found.special_ids.__contains__):
        text = shown(found.decode(list(group)))
        yield text, f"{style} {SPECIAL}" if special else style


def _parts(row: JudgedRow) -> Iterator[tuple[str, int, int, bool]]:
    """Spans, parted where training begins or ends."""
    for span in row.spans:
        mask = row.loss_mask[span.start : span.stop]
        edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), mask.size]
        for start, stop in pairwise(edges):
            yield span.kind, span.start + start, span.start + stop, bool(mask[start])


def _plain(line: str) -> Text:
    return Text(shown(line))


def shown(text: str) -> str:
    """``text`` with every character that a terminal would act on, or not show, written out."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in _LINE_CHARACTERS else _written_out(character)
        for character in text
    )


def _written_out(character: str) -> str:
    return f"<U+{ord(character):04X}>"

"""What did not come out well: which samples, what the server answered each time, and asking for them again."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from aerie.artefacts.layout import DatasetFiles, EditionFiles
from aerie.artefacts.locks import dataset_lock
from aerie.artefacts.previews import Preview
from aerie.artefacts.response_log import Damage, Response, read_responses, scan, while_written
from aerie.artefacts.samples import iterate_verdicts
from aerie.artefacts.superseded import Superseded, add_superseded, list_superseded
from aerie.errors import BadInput
from aerie.generation.decoding import decode, preview_lines
from aerie.generation.writer import DatasetWriter
from aerie.stages import StageRequest
from aerie.store.connection import Connection
from aerie.store.queries.ledger import LedgerRow, find_samples, write_rows

IDS_SHOWN = 12  # at either end of a response

Samples = Mapping[str, Sequence[LedgerRow]]


@dataclass(frozen=True)
class Selection:
    """Samples of an edition by data set, by a reason or flag, or by id; without either, what is quarantined."""

    edition: str
    dataset: str | None = None
    reason: str | None = None
    sample_ids: tuple[str, ...] = ()

    def find(self, connection: Connection) -> dict[str, list[LedgerRow]]:
        """The samples by data set, as the ledger has them."""
        return find_samples(
            connection, edition=self.edition, dataset=self.dataset, reason=self.reason, sample_ids=self.sample_ids
        )

    def find_in_verdicts(self, data_root: Path) -> dict[str, list[LedgerRow]]:
        """The samples by data set, as ``validate`` left them on disk: for when there is no store.

        Raises:
            BadInput: there are no verdicts.
        """
        edition = EditionFiles(data_root, self.edition)
        folder = edition.folder / "datasets"
        if self.dataset:
            datasets = {self.dataset: edition.dataset(self.dataset)}
        else:
            datasets = {path.name: DatasetFiles(path) for path in sorted(folder.glob("*"))}
        judged = {key: files for key, files in datasets.items() if files.verdicts.exists()}
        if not judged:
            raise BadInput(f"{folder}: no verdicts of {self.dataset or 'any data set'}: validate has not run there")
        found = {key: list(self._rows_of(files)) for key, files in judged.items()}
        return {key: rows for key, rows in found.items() if rows}

    def _rows_of(self, files: DatasetFiles) -> Iterator[LedgerRow]:
        for row in iterate_verdicts(files.verdicts):
            named = self.reason in (*row.reasons, *row.flags) if self.reason else row.verdict == "quarantined"
            if row.sample_id in self.sample_ids if self.sample_ids else named:
                yield LedgerRow(
                    row.sample_id, row.verdict, reasons=tuple(row.reasons), flags=tuple(row.flags),
                    prompt_tokens=row.prompt_tokens, completion_tokens=row.completion_tokens,
                    reasoning_tokens=row.reasoning_tokens, tool_calls=row.tool_calls,
                )  # fmt: skip


def counts_table(samples: Samples) -> Table:
    """How many samples of each data set have each reason; one with two reasons is counted under both."""
    table = Table(title=_total(samples), title_justify="left")
    for name in ("data set", "state", "reason"):
        table.add_column(name, overflow="fold")
    for name in ("samples", "response tokens"):
        table.add_column(name, justify="right")
    for key, rows in samples.items():
        counted, tokens = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for row in rows:
            for reason in row.reasons or row.flags:
                counted[row.state, reason] += 1
                tokens[row.state, reason] += row.completion_tokens or 0
        for (state, reason), times in counted.most_common():
            table.add_row(key, state, reason, f"{times:,}", f"{tokens[state, reason]:,}")
    return table


def rows_table(samples: Samples) -> Table:
    """One line a sample."""
    table = Table(title=_total(samples), title_justify="left")
    for name in ("data set", "sample", "state", "reasons and flags"):
        table.add_column(name, overflow="fold")
    for name in ("attempts", "response tokens", "of reasoning"):
        table.add_column(name, justify="right")
    for key, rows in samples.items():
        for row in rows:
            table.add_row(
                key, row.sample_id, row.state, ", ".join((*row.reasons, *row.flags)), str(row.attempts),
                f"{row.completion_tokens or 0:,}", f"{row.reasoning_tokens or 0:,}",
            )  # fmt: skip
    return table


def _total(samples: Samples) -> str:
    total = sum(len(rows) for rows in samples.values())
    return "1 sample" if total == 1 else f"{total:,} samples"


def regenerate(url: str, data_root: Path, selection: Selection, dataset: str) -> list[str]:
    """Have the selected samples of one data set generated again; returns their ids.

    What they are superseded by is on the disk first: after a crash in between, the next ``generate`` makes the ledger
    say the same.

    Raises:
        BadInput: the data set is not here, or was not generated.
        Busy: another run works on the data set; the message names it.
        Retryable: the database is gone.
    """
    edition, holder = EditionFiles(data_root, selection.edition), "quarantine regenerate"
    files = edition.dataset(dataset)
    if not files.prompts.exists():
        raise BadInput(
            f"{files.prompts}: not there: {dataset} of edition {selection.edition} was not generated under this data "
            "root (AERIE_DATA_ROOT)"
        )
    asked_at = datetime.now(UTC)
    with (
        dataset_lock(edition, dataset, holder=holder),
        DatasetWriter(
            url, edition=selection.edition, dataset=dataset, run_id=holder, lock_path=files.writer_lock
        ) as writer,
    ):
        rows = selection.find(writer.connection).get(dataset, [])
        add_superseded(
            files.responses,
            [
                Superseded(
                    sample_id=row.sample_id, attempt=row.attempts, reasons=(*row.reasons, *row.flags), asked_at=asked_at
                )
                for row in rows
            ],
        )  # fmt: skip
        write_rows(writer.connection, edition=selection.edition, dataset=dataset, rows=map(_pending, rows))
    return [row.sample_id for row in rows]


def _pending(row: LedgerRow) -> LedgerRow:
    return LedgerRow(
        row.sample_id, "pending", row.attempts, prompt_tokens=row.prompt_tokens, generated_tokens=row.generated_tokens,
        admission_rank=row.admission_rank, split=row.split,
    )  # fmt: skip


def versions_of(files: DatasetFiles, sample_id: str) -> list[Response]:
    """Everything that was answered for a sample, by attempt, from the log; damaged rows are left out.

    Raises:
        BadInput: the log has nothing of it.
    """

    def read() -> list[Response]:
        rows = [row for row in scan(files.responses) if not isinstance(row, Damage) and row.sample_id == sample_id]
        return [response for _, response in read_responses(rows)]

    found = while_written(files.responses, read)
    if not found:
        raise BadInput(f"{files.responses}: has no response of sample {sample_id}")
    return sorted(found, key=lambda response: response.attempt)


def show(request: StageRequest, sample_id: str, *, whole: bool) -> Iterator[str]:
    """Every version of a sample as lines, the oldest first; ``whole`` leaves nothing out of text and ids.

    Raises:
        BadInput: the log has nothing of it, or the model environment is not there.
        Failed: the responses cannot be decoded.
    """
    files = request.files.dataset(str(request.dataset))
    versions = versions_of(files, sample_id)
    asked = [entry for entry in list_superseded(files.responses) if entry.sample_id == sample_id]
    previews = asyncio.run(decode(request, versions))
    for number, (response, preview) in enumerate(zip(versions, previews, strict=True), start=1):
        again = next((entry for entry in asked if entry.attempt >= response.attempt), None)
        yield (
            f"{request.edition}/{request.dataset}, version {number} of {len(versions)} (attempt {response.attempt}, "
            f"{_standing(again, newest=number == len(versions))})"
        )
        yield from _version_lines(response, preview, whole=whole)


def _standing(again: Superseded | None, *, newest: bool) -> str:
    if again is not None:
        return f"superseded: asked for again on {again.asked_at:%Y-%m-%d %H:%M} UTC"
    return "the one that counts" if newest else "superseded by the next"


def _version_lines(response: Response, preview: Preview, *, whole: bool) -> Iterator[str]:
    first, *parts = preview_lines(preview, characters=None) if whole else preview_lines(preview)
    yield f"  {first}"
    yield (
        f"  finish reason {response.finish_reason['type']}, {response.completion_tokens:,} of at most "
        f"{response.max_new_tokens:,} tokens, answered by launch {response.launch_token}"
    )
    for name, positions in preview.positions.items():
        yield f"  {name} at {', '.join(map(str, positions)) or 'no token: something is missing'}"
    yield f"  response ids {_ids(response.output_ids, whole=whole)}"
    yield from parts


def _ids(ids: Sequence[int], *, whole: bool) -> str:
    if whole or len(ids) <= 2 * IDS_SHOWN:
        return " ".join(map(str, ids))
    first, last = (" ".join(map(str, part)) for part in (ids[:IDS_SHOWN], ids[-IDS_SHOWN:]))
    return f"{first} [... {len(ids) - 2 * IDS_SHOWN:,} ids ...] {last}"

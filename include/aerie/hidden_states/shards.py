"""A capture shared out over ranks, and their indexes taken together: every row once, of the corpus as it is."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from speculators.data_generation.offline import get_indices_to_process

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, iterate_rows
from aerie.artefacts.layout import EditionFiles
from aerie.artefacts.state_files import token_ids_sha256
from aerie.artefacts.state_index import MeasuredState, iterate_shard_index, shard_index
from aerie.errors import BadInput, Failed

NAMED_ROWS = 20


def rows_of_rank(rows: int, *, rank: int, world_size: int) -> range:
    """The corpus rows of a rank, as speculators' own extraction shares them out: neighbours, as even as can be."""
    own = get_indices_to_process(rows, None, [], world_size, rank)
    return range(own[0], own[-1] + 1) if own else range(0)


def iterate_own(files: EditionFiles, own: range) -> Iterator[CorpusRow]:
    """Yield the rows of the corpus that are in ``own``."""
    return islice(iterate_rows(files.corpus / DATASET_FOLDER), own.start, own.stop)


def merged(files: EditionFiles, *, world_size: int, rows: int) -> list[MeasuredState]:
    """The states that all ranks captured, in row order; each was checked by its rank, and is found here by its size.

    Raises:
        BadInput: a rank has not captured.
        Failed: a corpus row is in no index or in two, its file is not there, or was captured for other tokens.
    """
    paths = [shard_index(files.hidden_states, rank, world_size) for rank in range(world_size)]
    absent = [rank for rank, path in enumerate(paths) if not path.exists()]
    if absent:
        raise BadInput(
            f"{files.hidden_states}: ranks {', '.join(map(str, absent))} of {world_size} have not captured yet; run "
            "capture with each of these ranks first"
        )
    found: dict[int, MeasuredState] = {}
    problems: list[str] = []
    for path in paths:
        for state in iterate_shard_index(path):
            if state.row in found:
                problems.append(f"row {state.row} is in two indexes")
            found[state.row] = state
    problems += _problems(files, found, rows)
    if problems:
        named = "; ".join(problems[:NAMED_ROWS])
        more = f"; and {len(problems) - NAMED_ROWS} more" if len(problems) > NAMED_ROWS else ""
        raise Failed(
            f"{files.hidden_states}: what {world_size} ranks captured is not this corpus: {named}{more}; run capture "
            "with the ranks of these rows again"
        )
    return [found[row] for row in range(rows)]


def _problems(files: EditionFiles, found: dict[int, MeasuredState], rows: int) -> Iterator[str]:
    for row in iterate_rows(files.corpus / DATASET_FOLDER):
        state = found.get(row.row)
        if state is None:
            yield f"row {row.row} (sample {row.sample_id}) was captured by no rank"
        elif state.token_ids_sha256 != token_ids_sha256(row.input_ids) or state.sample_id != row.sample_id:
            yield f"row {row.row} (sample {row.sample_id}) was captured as sample {state.sample_id} of other tokens"
        elif not _is_there(files.hidden_states / state.file, state.bytes):
            yield f"row {row.row}: {state.file} is not there, or has another size than its rank wrote"
    yield from (f"row {row} is beyond the corpus' {rows} rows" for row in found if row >= rows)


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size

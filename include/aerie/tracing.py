"""The way of one sample through an edition, and where it ends, why.

Source, prompt, response, verdict, corpus row, hidden states: all from the files on disk, without a database. Of other
samples only the ids are read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from aerie.artefacts.corpus import DATASET_FOLDER, CorpusRow, find_corpus_row
from aerie.artefacts.dropped_rows import DROPPED_FILE, find_dropped_row
from aerie.artefacts.imported import find_imported
from aerie.artefacts.layout import DatasetFiles, EditionFiles
from aerie.artefacts.manifest import read_manifest
from aerie.artefacts.prompts import find_prompt
from aerie.artefacts.response_log import find_row as find_response
from aerie.artefacts.samples import find_sample, find_verdict
from aerie.artefacts.state_index import INDEX_FILE, find_state
from aerie.artefacts.state_names import state_name, state_path
from aerie.corpus.rows import order_keys
from aerie.errors import BadInput
from aerie.hidden_states.streaming import is_streamed

WHY_DROPPED = {
    "held_out": "held out for the benchmark: never trained on",
    "too_long": "longer than corpus.maximum_length",
    "prompt_of_generated": "it arrived tokenised, and a generated data set asks its prompt, in whatever split",
    "duplicate": "the same prompt or tokens as another row, which stays",
    "copy_of_held_out": "the same prompt or tokens as a row that another split holds out",
    "over_cap": "not drawn: its data set is over its cap (corpus.caps, or the budget of a tokenised data set)",
    "over_weight": "not drawn: its data set is over its share (corpus.weights)",
}


@dataclass(frozen=True)
class Step:
    """One place on the way: ``text`` says where the sample is there, or why it is not (``found`` False)."""

    name: str
    found: bool
    text: str


def trace(files: EditionFiles, sample_id: str, dataset: str | None = None) -> tuple[str, list[Step]]:
    """The data set of a sample and its way; it ends with the first place where the sample is not.

    Raises:
        BadInput: the edition has no such sample.
    """
    key = _dataset_of(files, sample_id, dataset)
    steps: list[Step] = []
    for step in _way(files, key, sample_id):
        steps.append(step)
        if not step.found:
            break
    return key, steps


def _dataset_of(files: EditionFiles, sample_id: str, dataset: str | None) -> str:
    folder = files.folder / "datasets"
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    keys = [dataset] if dataset else sorted(there, key=lambda key: not sample_id.startswith(f"{key}-"))
    for key in keys:
        of_dataset = files.dataset(key)
        if of_dataset.prompts.is_file() and find_prompt(of_dataset.prompts, sample_id):
            return key
        if of_dataset.imported.is_file() and find_imported(of_dataset.imported, sample_id):
            return key
    looked = f"looked in {', '.join(keys)}" if keys else "none of its data sets is prepared"
    raise BadInput(f"edition {files.edition} ({files.folder}) has no sample {sample_id!r}: {looked}")


def _way(files: EditionFiles, key: str, sample_id: str) -> Iterator[Step]:
    of_dataset = files.dataset(key)
    if of_dataset.imported.is_file():
        yield _source(of_dataset, "import")
        yield _imported(of_dataset, sample_id)
    else:
        yield _source(of_dataset, "prepare")
        yield from _generated(of_dataset, sample_id)
    yield _validated(of_dataset, sample_id)
    corpus, row = _in_corpus(files, sample_id)
    yield corpus
    if row is not None:
        yield _states(files, row)


def _source(files: DatasetFiles, stage: str) -> Step:
    path = files.manifest(stage)
    if not path.is_file():
        return Step("source", False, f"{path.name} is not there: {stage} has not finished")
    inputs = read_manifest(path).inputs
    return Step("source", True, ", ".join(f"{one.uri} (sha256 {one.sha256[:12]})" for one in inputs))


def _imported(files: DatasetFiles, sample_id: str) -> Step:
    found = find_imported(files.imported, sample_id)
    if found is None:
        return Step("import", False, f"not in {files.imported}")
    number, row = found
    tokens, trained = len(row.input_ids), sum(row.loss_mask)
    text = f"{files.imported}, row {number}: conversation {row.conversation_id}, {row.split}, {tokens} tokens"
    return Step("import", True, f"{text}, {trained} of them trained on")


def _generated(files: DatasetFiles, sample_id: str) -> Iterator[Step]:
    found = find_prompt(files.prompts, sample_id)
    if found is None:
        yield Step("prompt", False, f"not in {files.prompts}")
        return
    number, prompt = found
    text = (
        f"{files.prompts}, row {number}: conversation {prompt.conversation_id}, turn {prompt.turn}, {prompt.split}, "
        f"{len(prompt.prompt_ids)} tokens"
    )
    if prompt.skip_reason is not None:
        yield Step("prompt", False, f"{text}; skipped and never generated: {prompt.skip_reason}")
        return
    yield Step("prompt", True, text)
    line = find_response(files.responses, sample_id)
    if line is None:
        why = "held out for the benchmark: not generated" if prompt.split == "benchmark" else "not generated yet"
        yield Step("response", False, f"none in {files.responses.parent}/responses*: {why}")
        return
    response = json.loads(line)
    yield Step(
        "response",
        True,
        f"{files.responses.parent}/responses*, attempt {response['attempt']}: {response['completion_tokens']} tokens, "
        f"finished by {response['finish_reason']['type']}, server {response['launch_token']}",
    )


def _validated(files: DatasetFiles, sample_id: str) -> Step:
    if not files.manifest("validate").is_file():
        return Step("sample", False, "the data set is not validated yet")
    verdict = find_verdict(files.verdicts, sample_id)
    if verdict is None:
        return Step("sample", False, "no verdict: it came after the data set was last validated; validate it again")
    flags = f", flags {', '.join(verdict.flags)}" if verdict.flags else ""
    if verdict.verdict != "kept":
        return Step("sample", False, f"{files.verdicts}: quarantined: {', '.join(verdict.reasons)}{flags}")
    found = find_sample(files.samples, sample_id)
    if found is None:
        return Step("sample", False, f"kept, but not in {files.samples}: validate the data set again")
    number, sample = found
    return Step(
        "sample",
        True,
        f"{files.samples}, row {number}: kept{flags}; {sample.prompt_tokens} prompt and {sample.response_tokens} "
        f"response tokens, {sample.reasoning_tokens} of reasoning",
    )


def _in_corpus(files: EditionFiles, sample_id: str) -> tuple[Step, CorpusRow | None]:
    manifest_path = files.manifest("merge")
    if not manifest_path.is_file():
        return Step("corpus", False, "not merged yet"), None
    found = find_corpus_row(files.corpus / DATASET_FOLDER, lambda ids: _index(ids, sample_id))
    if found is not None:
        path, row = found
        tokens, trained = len(row.input_ids), int(row.loss_mask.sum())
        text = f"{path}, row {row.row} of the corpus: {row.split}, {tokens} tokens, {trained} of them trained on"
        return Step("corpus", True, text), row
    seed = read_manifest(manifest_path).counts["seed"]
    dropped = find_dropped_row(files.corpus / DROPPED_FILE, int(order_keys([sample_id], seed)[0]))
    if dropped is None:
        return Step("corpus", False, "it came after the last merge; run merge again"), None
    stays = _row_with_key(files, dropped.same_as, seed) if dropped.same_as else None
    text = f"dropped ({dropped.reason}): {WHY_DROPPED[dropped.reason]}"
    return Step("corpus", False, text + (f": sample {stays.sample_id}, row {stays.row}" if stays else "")), None


def _index(ids: pa.StringArray, sample_id: str) -> int:
    return int(pc.index(ids, sample_id).as_py())


def _row_with_key(files: EditionFiles, key: int, seed: int) -> CorpusRow | None:
    def place(ids: pa.StringArray) -> int:
        places = (order_keys(ids.to_pylist(), seed) == key).nonzero()[0]
        return int(places[0]) if len(places) else -1

    found = find_corpus_row(files.corpus / DATASET_FOLDER, place)
    return found[1] if found else None


def _states(files: EditionFiles, row: CorpusRow) -> Step:
    index = files.hidden_states / INDEX_FILE
    path = state_path(files.states, state_name(row.sample_id))
    if files.manifest("capture").is_file() and is_streamed(read_manifest(files.manifest("capture"))):
        return Step("hidden states", True, "streamed while training, and removed once read: no file is kept")
    if files.manifest("capture").is_file() and index.is_file():
        state = find_state(index, row.sample_id)
        if state is not None:
            return _state_file(files.hidden_states / state.file, state.row, row)
    if path.is_file():
        return Step("hidden states", True, f"{path}: written, but capture has not finished")
    return Step("hidden states", False, "not captured yet")


def _state_file(path: Path, index_row: int, row: CorpusRow) -> Step:
    if not path.is_file():
        return Step("hidden states", False, f"{path}: in the index, but not there (evicted, or removed); capture again")
    if index_row != row.row:
        return Step("hidden states", False, f"{path}: of row {index_row} of an earlier corpus; capture again")
    return Step("hidden states", True, f"{path}, for row {row.row}: {len(row.input_ids)} tokens")

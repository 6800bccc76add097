"""Responses made with other scripts, taken into an edition as if they had been generated.

A row is matched to a prompt of the data set, appended to the response log with provenance ``imported``, and from then
on like any other: the next run of ``generate`` judges it, counts it, and does not send its prompt again. What the rows
were made with has to be stated, and to be what the edition is made with; nothing is guessed of it.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie.artefacts.files import sha256_of
from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.locks import dataset_lock, lock_file
from aerie.artefacts.manifest import InputFile, read_manifest, write_manifest
from aerie.artefacts.response_log import Response, ResponseLog, prompt_sha256
from aerie.artefacts.superseded import read_superseded
from aerie.artefacts.verifier_tokens import VerifierTokens, read_verifier_tokens
from aerie.boundary.row_files import FileRow, count, iterate_file, plain, token_ids
from aerie.boundary.text_dumps import finish_of
from aerie.errors import BadInput
from aerie.generation.fingerprints import Fingerprinted, generation_settings, hold_generation
from aerie.generation.prompts import GenerationPrompt, load_prompts
from aerie.generation.provenance import hold_statement
from aerie.stages import StageRequest

STAGE = "import-responses"
PROVENANCE = "imported"
"""``launch_token`` of an imported row, and ``meta_info.provenance``: no server of ours made it."""

COLUMNS = (
    "sample_id", "id", "prompt_ids", "prompt_sha256", "output_ids", "finish_reason", "completion_tokens",
    "max_new_tokens", "meta_info", "launch_token",
)  # fmt: skip
ROWS_PER_SYNC = 256
EXAMPLES = 5
PROBLEMS_SAID = 20
LARGEST_ID = 2**31 - 1


class Refused(Exception):
    """A row that is not imported; the message is the reason's name."""


@dataclass
class ImportReport:
    """What became of the rows of a file; ``examples`` are the first rows of each reason for which some were refused."""

    rows: int = 0
    imported: int = 0
    tokens: int = 0
    already_answered: int = 0
    duplicates: int = 0
    unreadable: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[int]] = field(default_factory=dict)

    def refuse(self, reason: str, row: int) -> None:
        """Count a row that is not imported."""
        self.refused[reason] += 1
        rows = self.examples.setdefault(reason, [])
        if len(rows) < EXAMPLES:
            rows.append(row)

    @property
    def exit_code(self) -> int:
        """0 when every row is in the log, 1 when some are refused, 2 when some cannot be read."""
        return 2 if self.unreadable else 1 if self.refused else 0

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for the record."""
        return {**vars(self), "refused": dict(self.refused.most_common())}


# Matching a row


class Prompts:
    """Prompts of a data set by sample id and by the hash of their ids."""

    def __init__(self, prompts: Sequence[GenerationPrompt]) -> None:
        self._by_id = {prompt.sample_id: prompt for prompt in prompts}
        self._by_hash: dict[str, list[GenerationPrompt]] = defaultdict(list)
        self._matched: Counter[str] = Counter()
        for prompt in prompts:
            self._by_hash[prompt.prompt_sha256].append(prompt)

    def match(self, row: FileRow, *, allow_unknown: bool) -> GenerationPrompt:
        """The prompt that a row answers.

        Of several prompts with the same ids the first row takes the first, and so on, so that the same file read again
        finds the same prompts.

        Raises:
            Refused: there is none, it has other ids than the row says, or the row does not say.
            BadInput: the row's prompt ids are none.
        """
        stated = _stated_hash(row)
        for name in ("sample_id", "id"):
            sample_id = row.values.get(name)
            prompt = self._by_id.get(sample_id) if isinstance(sample_id, str) else None
            if prompt is None:
                continue
            if stated is None and not allow_unknown:
                raise Refused("prompt_not_stated")
            if stated is not None and stated != prompt.prompt_sha256:
                raise Refused("prompt_differs")
            return prompt
        candidates = self._by_hash.get(stated, []) if stated else []
        if not candidates:
            raise Refused("no_such_prompt")
        place = self._matched[candidates[0].prompt_sha256]
        self._matched[candidates[0].prompt_sha256] += 1
        return candidates[min(place, len(candidates) - 1)]


def _stated_hash(row: FileRow) -> str | None:
    """Hash of the prompt ids that a row states, by themselves or as a hash."""
    if row.values.get("prompt_ids") is not None:
        return prompt_sha256(_int32(row, "prompt_ids"))
    stated = row.values.get("prompt_sha256")
    if stated is not None and not isinstance(stated, str):
        raise BadInput(f"{row.where}: expected prompt_sha256 to be a string")
    return stated


def _int32(row: FileRow, name: str) -> list[int]:
    ids = token_ids(row, name)
    listed: list[int] = ids if isinstance(ids, list) else ids.tolist()
    if listed and not (min(listed) >= 0 and max(listed) <= LARGEST_ID):
        raise Refused(f"{name}_out_of_range")
    return listed


@dataclass(frozen=True)
class RowImporter:
    """Turns rows of a file into rows of the log. ``source`` says of each where it came from."""

    prompts: Prompts
    end_ids: frozenset[int]
    source: Mapping[str, Any]
    allow_unknown: bool

    def response(self, row: FileRow) -> Response:
        """The response that a row is.

        Raises:
            Refused: the row is not of this data set, or not of this population.
            BadInput: the row cannot be read.
        """
        if row.problem is not None:
            raise BadInput(f"{row.where}: {row.problem}")
        output = _int32(row, "output_ids")
        prompt = self.prompts.match(row, allow_unknown=self.allow_unknown)
        if prompt.skip_reason is not None:
            raise Refused(f"skipped:{prompt.skip_reason}")
        cap = count(row, "max_new_tokens", least=1)
        if cap is not None and cap != prompt.max_new_tokens:
            raise Refused("other_max_new_tokens")
        if len(output) > prompt.max_new_tokens:
            raise Refused("longer_than_max_new_tokens")
        finish = finish_of(row.values.get("finish_reason"), row.where)
        if finish == "abort":
            raise Refused("aborted")
        tokens = count(row, "completion_tokens", least=0)
        known = {"finish_reason": finish, "completion_tokens": tokens, "max_new_tokens": cap}
        return Response(
            sample_id=prompt.sample_id,
            attempt=1,
            prompt_sha256=prompt.prompt_sha256,
            prompt_tokens=len(prompt.prompt_ids),
            completion_tokens=len(output) if tokens is None else tokens,
            max_new_tokens=prompt.max_new_tokens,
            finish_reason=self._finish_reason(row, finish, output, prompt.max_new_tokens),
            launch_token=PROVENANCE,
            meta_info={
                **_meta_info(row),
                "provenance": PROVENANCE,
                "imported_from": {
                    **self.source,
                    "row": row.number,
                    "id": plain(row.values.get("id")),
                    "launch_token": plain(row.values.get("launch_token")),
                    "assumed": [name for name, value in known.items() if value is None],
                },
            },
            output_ids=tuple(output),
        )

    def _finish_reason(self, row: FileRow, finish: str | None, output: Sequence[int], cap: int) -> Mapping[str, Any]:
        """The row's own, else what its ids say: without an end below the cap it cannot have stopped well."""
        own = row.values.get("finish_reason")
        if finish is not None:
            return own if isinstance(own, Mapping) and own.get("type") == finish else {"type": finish}
        ended = bool(output) and output[-1] in self.end_ids
        return {"type": "length" if not ended and len(output) >= cap else "stop"}


def _meta_info(row: FileRow) -> Mapping[str, Any]:
    meta_info = row.values.get("meta_info")
    if meta_info is not None and not isinstance(meta_info, Mapping):
        raise BadInput(f"{row.where}: expected meta_info to be an object")
    return {str(name): plain(value) for name, value in (meta_info or {}).items()}


# The file


@dataclass(frozen=True)
class _Job:
    request: StageRequest
    files: DatasetFiles
    tokens: VerifierTokens
    generation: Fingerprinted

    @classmethod
    def of(cls, request: StageRequest) -> "_Job":
        dataset = str(request.dataset)
        if request.dataset_settings.kind != "generated":
            raise BadInput(f"{dataset} arrives already tokenised: it has no prompts that a response could answer")
        files = request.files.dataset(dataset)
        tokens = read_verifier_tokens(files.verifier_tokens)
        prepared = read_manifest(files.manifest("prepare"))
        generation = generation_settings(request.settings, request.dataset_settings, prepared=prepared, tokens=tokens)
        return cls(request, files, tokens, generation)

    @property
    def where(self) -> str:
        return f"{self.request.edition}/{self.request.dataset}"

    def importer(self, source: Mapping[str, Any], *, allow_unknown: bool) -> RowImporter:
        settings = self.request.settings
        prompts = load_prompts(
            self.files.prompts, self.request.dataset_settings, context_length=settings.serving.context_length
        )
        end_ids = frozenset(self.tokens.token_ids[token] for token in settings.verifier.load_profile().end_of_turn)
        return RowImporter(Prompts(prompts), end_ids, source, allow_unknown)


def import_responses(
    path: Path,
    request: StageRequest,
    *,
    stated: Mapping[str, Any],
    allow_unknown: bool,
    say: Callable[[str], None],
) -> ImportReport:
    """Append the responses in ``path`` to the log of the request's data set; doing it again adds nothing.

    Args:
        path: JSON lines (also compressed) or Parquet with ``output_ids``, and ``sample_id`` (or ``id``),
            ``prompt_ids`` or ``prompt_sha256`` to match a prompt by; rows of a response log among others.
        request: names edition and data set.
        stated: what the responses were made with, as ``read_statement`` gives it.
        allow_unknown: whether that may have gaps; they are recorded.
        say: is told of each row that cannot be read.

    Raises:
        BadInput: the data set is not prepared, or the responses are of another population; or the file cannot be read
            to its end (what came before is imported, and recorded).
        Busy: another run works on the data set; the message names it.
        Retryable: the disk does not take the rows.
    """
    job = _Job.of(request)
    unknown = hold_statement(stated, job.generation.settings, allow_unknown=allow_unknown, where=job.where)
    if not path.is_file():
        raise BadInput(f"{path}: expected a file of responses")
    report, sha256 = ImportReport(), sha256_of(path)
    with (
        dataset_lock(request.files, str(request.dataset), holder=STAGE),
        lock_file(job.files.writer_lock, what=job.where, holder=STAGE),
    ):
        record = _free_record(job.files.folder / "imports", sha256)

        def write_record() -> None:
            provenance = {"made_with": stated, "unknown_provenance": unknown}
            write_manifest(
                record,
                stage=STAGE,
                edition=request.edition,
                dataset=request.dataset,
                fingerprint=job.generation.fingerprint,
                inputs=[InputFile(uri=path.resolve().as_uri(), sha256=sha256)],
                outputs=(),
                counts={**report.counts, **provenance},
            )

        with ResponseLog(job.files.responses) as log:
            hold_generation(
                job.files.folder / "generation.json",
                job.generation,
                log_has_rows=log.row_counts.total() > 0,
                where=job.where,
            )
            # A manifest must not outlive the log that it describes.
            job.files.manifest("generate").unlink(missing_ok=True)
            # First, so that no row names a record that is not there.
            write_record()
            source = {"file": path.name, "sha256": sha256, "record": f"{record.parent.name}/{record.name}"}
            importer = job.importer(source, allow_unknown=allow_unknown)
            try:
                _append_rows(iterate_file(path, COLUMNS), importer, log, report, say=say)
            finally:
                write_record()
        if not report.imported:
            record.unlink()
    return report


def _free_record(folder: Path, sha256: str) -> Path:
    """Where to record this import: a file may be imported again, for what is new in the data set."""
    for number in itertools.count(1):
        path = folder / f"{sha256[:12]}.{number}.manifest.json"
        if not path.exists():
            return path
    raise AssertionError("unreachable")


def _append_rows(
    rows: Iterable[FileRow],
    importer: RowImporter,
    log: ResponseLog,
    report: ImportReport,
    *,
    say: Callable[[str], None],
) -> None:
    attempts, before = _logged(log)
    added: set[str] = set()
    for row in rows:
        report.rows += 1
        try:
            response = importer.response(row)
        except BadInput as error:
            report.unreadable += 1
            if report.unreadable <= PROBLEMS_SAID:
                say(str(error))
            continue
        except Refused as reason:
            report.refuse(str(reason), row.number)
            continue
        if response.sample_id in before:
            report.already_answered += 1
        elif response.sample_id in added:
            report.duplicates += 1
        else:
            added.add(response.sample_id)
            log.append(response.model_copy(update={"attempt": attempts.get(response.sample_id, 0) + 1}))
            report.imported += 1
            report.tokens += len(response.output_ids)
        if log.waiting >= ROWS_PER_SYNC:
            log.sync()


def _logged(log: ResponseLog) -> tuple[dict[str, int], set[str]]:
    """The last attempt of each sample that was ever asked for, and the samples that have an answer which counts."""
    superseded = read_superseded(log.path)
    attempts, answered = dict(superseded), set[str]()
    for row in log.take_rows():
        attempts[row.sample_id] = max(row.attempt, attempts.get(row.sample_id, 0))
        if row.attempt > superseded.get(row.sample_id, 0):
            answered.add(row.sample_id)
    return attempts, answered


def lines_of(report: ImportReport, path: Path) -> Iterator[str]:
    """What a person is told of an import."""
    yield (
        f"{path.name}: {report.rows:,} rows, {report.imported:,} imported ({report.tokens:,} tokens), "
        f"{report.already_answered:,} answered already, {report.duplicates:,} duplicates, "
        f"{report.refused.total():,} refused, {report.unreadable:,} unreadable"
    )
    for reason, rows in report.refused.most_common():
        examples = ", ".join(map(str, report.examples[reason]))
        yield f"  {reason}: {rows:,} (rows {examples}{', ...' if rows > EXAMPLES else ''})"
    if report.imported:
        yield "  generate and validate judge them and count them in their next run"

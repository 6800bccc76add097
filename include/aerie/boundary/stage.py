"""Stage ``validate``: judge every row of a data set, and write what is kept, every verdict, and previews for people."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from aerie.artefacts.files import fingerprint_of
from aerie.artefacts.layout import DatasetFiles
from aerie.artefacts.manifest import answered_by, describe_input, describe_output, write_manifest
from aerie.artefacts.previews import Preview, write_previews
from aerie.artefacts.response_log import log_files
from aerie.artefacts.samples import Sample, VerdictRow, sample_writer, verdict_writer
from aerie.artefacts.superseded import superseded_file
from aerie.artefacts.verifier_tokens import VerifierTokens, read_verifier_tokens
from aerie.boundary.grammar import grammar_of_verifier
from aerie.boundary.judge import apply_policy
from aerie.boundary.rows import GeneratedRows, JudgedRow, TokenisedRows, decoder
from aerie.boundary.rules import RULES_VERSION, check_drop_flags
from aerie.boundary.text_rules import Decode
from aerie.errors import BadInput, Failed
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import GRAMMAR_FIELDS
from aerie.stages import Cadence, Events, StageRequest, StageResult

STAGE = "validate"
PROGRESS_SECONDS = 10.0
PREVIEWS_PER_CATEGORY = 20
REASONS_NAMED = 5


@dataclass
class Tally:
    """Counts of the rows judged; tokens are those of kept rows."""

    rows: int = 0
    kept: int = 0
    quarantined: int = 0
    flagged: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    response_tokens: int = 0
    reasoning_rows: int = 0
    reasoning_tokens: int = 0
    tool_call_rows: int = 0

    def add(self, row: JudgedRow) -> None:
        """Count one row."""
        verdict = row.verdict
        self.rows += 1
        self.flagged += bool(verdict.flags)
        self.reasons.update(verdict.reasons)
        self.flags.update(verdict.flags)
        if not verdict.kept:
            self.quarantined += 1
            return
        self.kept += 1
        self.splits[row.split] += 1
        self.prompt_tokens += row.prompt_tokens
        self.response_tokens += row.response_tokens
        self.reasoning_rows += verdict.reasoning_tokens > 0
        self.reasoning_tokens += verdict.reasoning_tokens
        self.tool_call_rows += verdict.tool_calls > 0

    @property
    def counts(self) -> dict[str, Any]:
        """Counts for the manifest; ``reasoning_share`` is of kept rows."""
        return {
            **vars(self),
            "reasons": dict(self.reasons.most_common()),
            "flags": dict(self.flags.most_common()),
            "splits": dict(self.splits.most_common()),
            "reasoning_share": self.reasoning_rows / self.kept if self.kept else 0.0,
        }


class PreviewChooser:
    """Keeps a few rows of each category: ``kept``, and every reason. Which ones depends on sample ids alone."""

    def __init__(self, per_category: int = PREVIEWS_PER_CATEGORY) -> None:
        self._per_category = per_category
        self._chosen: dict[str, list[tuple[int, int, JudgedRow]]] = {}
        self._serial = count()

    def offer(self, row: JudgedRow) -> None:
        """Consider one row."""
        # A hash, not the log's order: short answers finish first and would fill the list.
        rank = -int.from_bytes(sha256(row.sample_id.encode()).digest()[:8], "big")
        for category in row.verdict.reasons or ("kept",):
            heap = self._chosen.setdefault(category, [])
            entry = (rank, next(self._serial), row)
            if len(heap) < self._per_category:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)

    def chosen(self) -> Iterator[JudgedRow]:
        """Yield the rows chosen, each once, kept ones first."""
        seen: set[str] = set()
        for category in sorted(self._chosen, key=lambda name: (name != "kept", name)):
            for _, _, row in sorted(self._chosen[category], key=lambda entry: entry[:2], reverse=True):
                if row.sample_id not in seen:
                    seen.add(row.sample_id)
                    yield row


def validate(request: StageRequest, events: Events) -> StageResult:
    """Judge a data set: write ``samples.parquet``, ``verdicts.parquet``, ``previews.jsonl`` and the manifest.

    Raises:
        BadInput: an input is missing or is of another verifier, or a policy names an unknown flag.
        Failed: there is no row, the log is damaged, or more rows than ``generation.maximum_quarantine_share`` are
            quarantined; verdicts and previews are then there to be read, and no manifest is.
    """
    settings = request.dataset_settings
    files = request.files.dataset(str(request.dataset))
    manifest_path = files.manifest(STAGE)
    inputs = [describe_input(path) for path in _input_paths(files, settings.kind)]
    fingerprint = rules_fingerprint(request)
    answered = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answered is not None:
        _refuse_quarantine_share(request, answered.counts, files, events)
        events.progress(f"nothing to do: {request.dataset} is validated, {_summary(answered.counts)}")
        return StageResult(stage=STAGE, reused=True, manifest=answered)
    # A manifest must not outlive the files that it describes.
    manifest_path.unlink(missing_ok=True)
    counts = _judge_all(request, files, events)
    events.progress(f"{request.dataset}: {_summary(counts)}", **_figures(counts))
    _refuse_quarantine_share(request, counts, files, events)
    manifest = write_manifest(
        manifest_path,
        stage=STAGE,
        edition=request.edition,
        dataset=request.dataset,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[
            describe_output(files.samples, counts["kept"]),
            describe_output(files.verdicts, counts["rows"]),
            describe_output(files.previews, counts["previews"]),
        ],
        counts=counts,
    )
    return StageResult(stage=STAGE, reused=False, manifest=manifest)


def rules_fingerprint(request: StageRequest) -> str:
    """What a data set's verdicts depend on besides its rows: version of the rules, profile, policy, and lineage."""
    settings = request.dataset_settings
    return fingerprint_of(
        {
            "rules_version": RULES_VERSION,
            "profile": request.settings.verifier.load_profile().model_dump(
                mode="json",
                include=set(GRAMMAR_FIELDS),
            ),
            "drop_flags": sorted(check_drop_flags(settings.drop_flags)),
            "kind": settings.kind,
            "source_revision": settings.source.revision,
            "licence": settings.source.licence,
        }
    )


def load_decoder(settings: VerifierSettings, expected: VerifierTokens, path: Path) -> Decode:
    """The verifier's own decoder.

    Raises:
        BadInput: the checkpoint's tokenizer cannot be loaded, or it is not the one that ``expected``, read from
            ``path``, describes.
    """
    # Costs seconds, and a stage that has nothing to do does not need it.
    from aerie.prompts.checkpoint import load_verifier

    verifier = load_verifier(settings)
    if verifier.tokens != expected:
        raise BadInput(
            f"{path}: describes another tokenizer (sha256 {expected.tokenizer_sha256}) than that of {settings.path} "
            f"(sha256 {verifier.tokens.tokenizer_sha256}); prepare or import the data set again, in a new edition"
        )
    return decoder(verifier.tokenizer, expected.vocabulary_size)


def _input_paths(files: DatasetFiles, kind: str) -> list[Path]:
    if kind == "tokenised":
        return [files.imported, files.verifier_tokens]
    asked_again = [path for path in (superseded_file(files.responses),) if path.exists()]
    return [files.prompts, *asked_again, *log_files(files.responses), files.verifier_tokens]


def _judge_all(request: StageRequest, files: DatasetFiles, events: Events) -> dict[str, Any]:
    settings, verifier = request.dataset_settings, request.settings.verifier
    drop_flags = check_drop_flags(settings.drop_flags)
    tokens = read_verifier_tokens(files.verifier_tokens)
    grammar = grammar_of_verifier(verifier.load_profile(), tokens)
    decode = load_decoder(verifier, tokens, files.verifier_tokens)
    rows: Iterable[JudgedRow] = (
        TokenisedRows(files.imported, grammar, decode)
        if settings.kind == "tokenised"
        else GeneratedRows(files.prompts, files.responses, grammar, decode)
    )
    tally, previews = Tally(), PreviewChooser()
    cadence = Cadence(PROGRESS_SECONDS)
    with ExitStack() as stack:
        samples = stack.enter_context(sample_writer(files.samples))
        verdicts = stack.enter_context(verdict_writer(files.verdicts))
        for judged in rows:
            row = under_policy(judged, drop_flags)
            tally.add(row)
            previews.offer(row)
            verdicts.write(_verdict_row(row))
            if row.verdict.kept:
                samples.write(_sample(row, request))
            if cadence.is_due():
                events.progress(f"{request.dataset}: judging, {_summary(tally.counts)}", **_figures(tally.counts))
    if not tally.rows:
        raise Failed(f"{_input_paths(files, settings.kind)[-2]}: holds no row: there is nothing to judge")
    written = write_previews(files.previews, (preview_of(row, decode) for row in previews.chosen()))
    return {**tally.counts, "previews": written}


def under_policy(row: JudgedRow, drop_flags: frozenset[str]) -> JudgedRow:
    """The row with its verdict under a data set's policy."""
    verdict = apply_policy(row.verdict, drop_flags)
    return row if verdict is row.verdict else JudgedRow(**{**vars(row), "verdict": verdict})


def _verdict_row(row: JudgedRow) -> VerdictRow:
    verdict = row.verdict
    return VerdictRow(
        sample_id=row.sample_id,
        verdict=verdict.verdict,
        reasons=verdict.reasons,
        flags=verdict.flags,
        positions=verdict.positions,
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        reasoning_tokens=verdict.reasoning_tokens,
        answer_tokens=verdict.answer_tokens,
        tool_calls=verdict.tool_calls,
    )


def _sample(row: JudgedRow, request: StageRequest) -> Sample:
    source = request.dataset_settings.source
    return Sample(
        sample_id=row.sample_id,
        conversation_id=row.conversation_id,
        dataset=str(request.dataset),
        split=row.split,
        input_ids=row.input_ids.astype(np.int32),
        loss_mask=row.loss_mask,
        prompt_tokens=row.prompt_tokens,
        response_tokens=row.response_tokens,
        reasoning_tokens=row.verdict.reasoning_tokens,
        flags=row.verdict.flags,
        source_revision=source.revision,
        edition=request.edition,
        licence=source.licence,
    )


def preview_of(row: JudgedRow, decode: Decode) -> Preview:
    """The row, decoded for people."""
    ids = row.input_ids.tolist()
    return Preview(
        sample_id=row.sample_id,
        conversation_id=row.conversation_id,
        split=row.split,
        verdict=row.verdict.verdict,
        reasons=row.verdict.reasons,
        flags=row.verdict.flags,
        positions=row.verdict.positions,
        prompt_tokens=row.prompt_tokens,
        response_tokens=row.response_tokens,
        reasoning_tokens=row.verdict.reasoning_tokens,
        spans=tuple((span.kind, decode(ids[span.start : span.stop])) for span in row.spans),
    )


def _summary(counts: Mapping[str, Any]) -> str:
    named = list(counts["reasons"].items())[:REASONS_NAMED]
    reasons = f" ({', '.join(f'{name} {number}' for name, number in named)})" if named else ""
    return (
        f"{counts['kept']:,} of {counts['rows']:,} rows kept, {counts['quarantined']:,} quarantined{reasons}, "
        f"{counts['flagged']:,} flagged; {counts['response_tokens']:,} response tokens kept, "
        f"{counts['reasoning_share']:.1%} of kept rows with reasoning"
    )


def _figures(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in counts.items() if isinstance(value, int | float)}


def _refuse_quarantine_share(
    request: StageRequest, counts: Mapping[str, Any], files: DatasetFiles, events: Events
) -> None:
    share, limit = counts["quarantined"] / counts["rows"], request.settings.generation.maximum_quarantine_share
    if share <= limit:
        return
    reasons = ", ".join(f"{name} {number}" for name, number in list(counts["reasons"].items())[:REASONS_NAMED])
    message = (
        f"{request.dataset}: {counts['quarantined']} of {counts['rows']} rows are quarantined ({share:.1%}), more than "
        f"generation.maximum_quarantine_share {limit:.1%}: {reasons}; read {files.previews} and {files.verdicts}, "
        "mend the cause (server, template, policy) and generate those samples again"
    )
    events.judged()  # whoever reads the alert finds the samples
    events.alert("quarantine_rate", message)
    raise Failed(message)

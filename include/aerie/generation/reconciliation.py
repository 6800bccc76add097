"""The ledger that a response log implies. The log is the truth after any crash: nothing lost, nothing twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from aerie.artefacts.response_log import Response, ResponseHead, Row, read_responses
from aerie.boundary import Verdict
from aerie.errors import BadInput
from aerie.generation.prompts import GenerationPrompt
from aerie.store.queries.ledger import LedgerRow

JUDGED = ("kept", "quarantined")
_COUNTS = ("attempts", "prompt_tokens", "completion_tokens", "generated_tokens", "admission_rank", "split")
_counts_of = attrgetter(*_COUNTS)

Judge = Callable[[GenerationPrompt, Response], Verdict]


def judged_row(
    prompt: GenerationPrompt, head: ResponseHead, verdict: Verdict, *, crc32: int, generated_tokens: int
) -> LedgerRow:
    """The ledger's row for a judged response; ``generated_tokens`` is what the sample has cost in all."""
    return LedgerRow(
        sample_id=prompt.sample_id,
        state=verdict.verdict,
        attempts=head.attempt,
        reasons=verdict.reasons,
        flags=verdict.flags,
        prompt_tokens=head.prompt_tokens,
        completion_tokens=head.completion_tokens,
        reasoning_tokens=verdict.reasoning_tokens,
        tool_calls=verdict.tool_calls,
        generated_tokens=generated_tokens,
        finish_reason=str(head.finish_reason["type"]),
        judged_by="generate",
        response_crc32=crc32,
        admission_rank=prompt.admission_rank,
        split=prompt.split,
    )


def reconcile(
    prompts: Iterable[GenerationPrompt],
    known: Mapping[str, LedgerRow],
    rows: Iterable[Row],
    *,
    judge: Judge,
    where: str,
    superseded: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, LedgerRow]:
    """The ledger that the response log implies, by sample id, in the order of ``prompts``.

    Args:
        prompts: every prompt of the data set.
        known: the ledger as it stands, with verdicts that still hold; one that was reached on the log's very row
            (by checksum) is kept, whoever reached it.
        rows: the log, in its order.
        judge: called on responses without such a verdict.
        where: edition and data set, for messages.
        superseded: the last attempt that counts no more, by sample id: the sample is to be generated again. What it
            has cost counts.

    Raises:
        BadInput: the log answers prompts that the data set does not have, or has with other tokens.
        Failed: the log was damaged since ``rows`` were read.
    """
    by_id = {prompt.sample_id: prompt for prompt in prompts}
    latest: dict[str, Row] = {}
    costs: dict[tuple[str, int], int] = {}
    for row in rows:
        prompt = by_id.get(row.sample_id)
        if prompt is None or prompt.prompt_sha256 != row.prompt_sha256:
            raise _foreign(row, prompt, where)
        costs[row.sample_id, row.attempt] = row.completion_tokens
        if row.attempt <= superseded.get(row.sample_id, 0):
            continue
        before = latest.get(row.sample_id)
        if before is None or row.attempt >= before.attempt:
            latest[row.sample_id] = row
    spent: Counter[str] = Counter()
    for (sample_id, _), tokens in costs.items():
        spent[sample_id] += tokens
    judged = dict(_judged(by_id, known, latest.values(), judge))
    return {
        sample_id: _implied(
            prompt,
            _standing(known.get(sample_id), superseded.get(sample_id, 0)),
            latest.get(sample_id),
            judged.get(sample_id),
            spent=spent[sample_id],
            superseded=superseded.get(sample_id, 0),
        )
        for sample_id, prompt in by_id.items()
    }


def differing(before: Mapping[str, LedgerRow], now: Mapping[str, LedgerRow]) -> list[LedgerRow]:
    """The rows of ``now`` that ``before`` does not have, or has otherwise."""
    return [row for name, row in now.items() if (old := before.get(name)) is not row and old != row]


def _foreign(row: Row, prompt: GenerationPrompt | None, where: str) -> BadInput:
    what = "is not among the prompts" if prompt is None else "was generated for other prompt tokens"
    return BadInput(
        f"{where}: the response log has sample {row.sample_id}, which {what}: prompts and responses are of different "
        "populations; restore the prompts, or choose a new edition"
    )


def _judged(
    prompts: Mapping[str, GenerationPrompt], known: Mapping[str, LedgerRow], rows: Iterable[Row], judge: Judge
) -> Iterator[tuple[str, LedgerRow]]:
    """Read, in the order of the log, and judge what has no verdict yet."""
    unjudged = (
        row
        for row in rows
        if prompts[row.sample_id].skip_reason is None and not _has_verdict(known.get(row.sample_id), row)
    )
    for row, response in read_responses(unjudged):
        prompt = prompts[row.sample_id]
        verdict = judge(prompt, response)
        yield row.sample_id, judged_row(prompt, response, verdict, crc32=row.crc32, generated_tokens=0)


def _has_verdict(known: LedgerRow | None, row: Row) -> bool:
    return known is not None and known.state in JUDGED and known.response_crc32 == row.crc32


def _standing(known: LedgerRow | None, superseded: int) -> LedgerRow | None:
    """What the ledger says of a sample, unless it says so of an attempt that counts no more."""
    return None if known is None or 0 < superseded >= known.attempts else known


def _implied(
    prompt: GenerationPrompt,
    known: LedgerRow | None,
    row: Row | None,
    judged: LedgerRow | None,
    *,
    spent: int,
    superseded: int,
) -> LedgerRow:
    """One row of the ledger: ``known`` itself where nothing of it changes. The counts are those of log and prompt."""
    outcome = _outcome(prompt, known, row, judged)
    counts: tuple[Any, ...] = (
        max(known.attempts if known else 0, row.attempt if row else 0, superseded),
        len(prompt.prompt_ids),
        row.completion_tokens if row is not None and prompt.skip_reason is None else None,
        spent,
        prompt.admission_rank,
        prompt.split,
    )
    return outcome if _counts_of(outcome) == counts else replace(outcome, **dict(zip(_COUNTS, counts, strict=True)))


def _outcome(prompt: GenerationPrompt, known: LedgerRow | None, row: Row | None, judged: LedgerRow | None) -> LedgerRow:
    """State, reasons and verdict; the counts are still those of whatever it comes from."""
    if prompt.skip_reason is not None:
        return LedgerRow(prompt.sample_id, "skipped", reasons=(prompt.skip_reason,))
    if judged is not None:
        return judged
    if known is not None and row is not None:
        return known
    if known is not None and known.state == "failed":
        return LedgerRow(prompt.sample_id, "failed", reasons=known.reasons, detail=known.detail)
    return LedgerRow(prompt.sample_id, "pending")

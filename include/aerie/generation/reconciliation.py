"""The ledger that a response log implies. The log is the truth after any crash: nothing lost, nothing twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from aerie.artefacts.response_log import DamagedRow, Response, ResponseHead, Row
from aerie.boundary import Verdict
from aerie.errors import BadInput
from aerie.generation.prompts import GenerationPrompt
from aerie.store.queries.ledger import LedgerRow

JUDGED = ("kept", "quarantined")

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
    rows: Iterable[Row | DamagedRow],
    *,
    judge: Callable[[GenerationPrompt, Row], Verdict],
    where: str,
) -> dict[str, LedgerRow]:
    """The ledger that the response log implies, by sample id, in the order of ``prompts``.

    Args:
        prompts: every prompt of the data set.
        known: the ledger as it stands, with verdicts that still hold; one that was reached on the log's very row
            (by checksum) is kept, whoever reached it.
        rows: the log, in file order.
        judge: reads and judges one row of the log.
        where: edition and data set, for messages.

    Raises:
        BadInput: the log answers prompts that the data set does not have, or has with other tokens.
    """
    by_id = {prompt.sample_id: prompt for prompt in prompts}
    latest: dict[str, Row] = {}
    costs: dict[tuple[str, int], int] = {}
    for row in rows:
        if isinstance(row, DamagedRow):
            raise BadInput(f"{row}: expected a repaired log")
        _check_belongs(row.head, by_id.get(row.head.sample_id), where)
        costs[row.head.sample_id, row.head.attempt] = row.head.completion_tokens
        before = latest.get(row.head.sample_id)
        if before is None or row.head.attempt >= before.head.attempt:
            latest[row.head.sample_id] = row
    spent: Counter[str] = Counter()
    for (sample_id, _), tokens in costs.items():
        spent[sample_id] += tokens
    return {
        sample_id: _implied(prompt, known.get(sample_id), latest.get(sample_id), spent[sample_id], judge)
        for sample_id, prompt in by_id.items()
    }


def _check_belongs(head: ResponseHead, prompt: GenerationPrompt | None, where: str) -> None:
    if prompt is not None and prompt.prompt_sha256 == head.prompt_sha256:
        return
    what = "is not among the prompts" if prompt is None else "was generated for other prompt tokens"
    raise BadInput(
        f"{where}: the response log has sample {head.sample_id}, which {what}: prompts and responses are of different "
        "populations; restore the prompts, or choose a new edition"
    )


def _implied(
    prompt: GenerationPrompt,
    known: LedgerRow | None,
    row: Row | None,
    spent: int,
    judge: Callable[[GenerationPrompt, Row], Verdict],
) -> LedgerRow:
    attempts = max(known.attempts if known else 0, row.head.attempt if row else 0)
    blank = LedgerRow(
        prompt.sample_id, "pending", attempts, prompt_tokens=len(prompt.prompt_ids), generated_tokens=spent,
        admission_rank=prompt.admission_rank, split=prompt.split,
    )  # fmt: skip
    if prompt.skip_reason is not None:
        return replace(blank, state="skipped", reasons=(prompt.skip_reason,))
    if row is None:
        failed = known is not None and known.state == "failed"
        return replace(blank, state="failed", reasons=known.reasons, detail=known.detail) if known and failed else blank
    if known is not None and known.state in JUDGED and known.response_crc32 == row.crc32:
        return replace(
            known, attempts=attempts, generated_tokens=spent, admission_rank=prompt.admission_rank, split=prompt.split
        )
    judged = judged_row(prompt, row.head, judge(prompt, row), crc32=row.crc32, generated_tokens=spent)
    return replace(judged, attempts=attempts)

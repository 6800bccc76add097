"""Whatever happened to the log: every prompt in one state, and the ledger says of it what the log says."""

import gzip
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.artefacts.response_log import (
    Response,
    ResponseLog,
    encode,
    iterate_responses,
    latest_responses,
    log_files,
    prompt_sha256,
)
from aerie.boundary import Verdict
from aerie.errors import BadInput
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.reconciliation import differing, reconcile
from aerie.store.queries.ledger import LedgerRow

PROMPTS = 8
SAMPLES = st.integers(0, PROMPTS - 1)


def prompt(number: int, skip_reason: str | None = None) -> GenerationPrompt:
    ids = array("i", range(number + 1))
    return GenerationPrompt(
        sample_id=f"s{number}", split="train", admission_rank=number, prompt_ids=ids, prompt_sha256=prompt_sha256(ids),
        max_new_tokens=64, skip_reason=skip_reason,
    )  # fmt: skip


def response(number: int, attempt: int = 1) -> Response:
    ids = tuple(range(number, number + 3 + attempt))
    return Response(
        sample_id=f"s{number}", attempt=attempt, prompt_sha256=prompt(number).prompt_sha256, prompt_tokens=number + 1,
        completion_tokens=len(ids), max_new_tokens=64, finish_reason={"type": "stop", "matched": ids[-1]},
        launch_token="t", meta_info={"id": "x" * 40}, output_ids=ids,
    )  # fmt: skip


def judge(prompt: GenerationPrompt, response: Response) -> Verdict:
    """Not the rules: a verdict that depends on the tokens."""
    good = sum(response.output_ids) % 3 > 0
    return Verdict("kept" if good else "quarantined", () if good else ("loop",), (), {}, (), 0, 0, 0)


def reconciled(
    path: Path, known: dict[str, LedgerRow], judge: Callable[[GenerationPrompt, Response], Verdict] = judge, **options
) -> dict[str, LedgerRow]:
    prompts = [prompt(number) for number in range(PROMPTS)]
    with ResponseLog(path, **options) as log:
        return reconcile(prompts, known, log.take_rows(), judge=judge, where="main/B1")


def check(path: Path, ledger: dict[str, LedgerRow]) -> None:
    """Each prompt in one state; what is judged is what the log has, with its counts."""
    assert list(ledger) == [f"s{number}" for number in range(PROMPTS)]
    latest = {row.sample_id: row for row in latest_responses(path)}
    assert {row.sample_id for row in ledger.values() if row.state in ("kept", "quarantined")} == set(latest)
    assert all(row.state == "pending" for row in ledger.values() if row.sample_id not in latest)
    for sample_id, logged in latest.items():
        row = ledger[sample_id]
        assert row.state == judge(prompt(int(sample_id[1:])), logged).verdict
        assert (row.completion_tokens, row.prompt_tokens) == (len(logged.output_ids), logged.prompt_tokens)
    sent: dict[tuple[str, int], int] = {}
    for row in iterate_responses(path):
        sent[row.sample_id, row.attempt] = row.completion_tokens
    assert sum(row.generated_tokens for row in ledger.values()) == sum(sent.values())


def flip_bit(data: bytes, at: int, bit: int) -> bytes:
    place = at % len(data)
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    at, bit = draw(st.integers(0, 10_000)), draw(st.integers(0, 7))
    junk = draw(
        st.sampled_from([b"\n", b"\n\n\n", b"\0" * 50, b'{"sample_id":"s1"}\n', b"\x1f\x8b\x08\0\0\0\0\0", b"]["])
    )

    def insert(data: bytes) -> bytes:
        return data[: at % (len(data) + 1)] + junk + data[at % (len(data) + 1) :]

    def cut(data: bytes) -> bytes:
        return data[: at % (len(data) + 1)]

    def lose(data: bytes) -> bytes:
        return data[: at % (len(data) + 1)] + data[at % (len(data) + 1) + 7 :]

    def shuffle(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        return b"".join(lines[at % (len(lines) + 1) :] + lines[: at % (len(lines) + 1)] * 2)

    return draw(
        st.sampled_from(
            [lambda data: flip_bit(data, at, bit) if data else b"", insert, cut, lose, shuffle, lambda _: junk]
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(SAMPLES, st.integers(1, 3)), max_size=20),
    segment_bytes=st.sampled_from([200, 1_000, 1 << 20]),
    hurts=st.lists(st.tuples(st.integers(0, 50), damages()), max_size=4),
    forgotten=st.sets(SAMPLES.map(lambda number: f"s{number}")),
    wrong=st.sets(SAMPLES.map(lambda number: f"s{number}")),
)
def test_after_any_damage_each_sample_is_in_one_state_and_log_and_ledger_are_equal(
    tmp_path_factory, rows, segment_bytes, hurts, forgotten, wrong
):
    path = tmp_path_factory.mktemp("log") / "responses.jsonl"
    with ResponseLog(path, segment_bytes=segment_bytes) as log:
        for number, attempt in rows:
            log.append(response(number, attempt))
            log.sync()
    ledger = reconciled(path, {})
    check(path, ledger)
    # A ledger restored from an older backup, whose counts somebody edited.
    stale = {name: row for name, row in ledger.items() if name not in forgotten}
    stale |= {
        name: replace(row, completion_tokens=1, generated_tokens=9) for name, row in stale.items() if name in wrong
    }
    for which, hurt in hurts:
        file = log_files(path)[which % len(log_files(path))]
        file.write_bytes(hurt(file.read_bytes()))
    written = {encode(response(*row)) for row in rows}
    unhurt = written.intersection(path.read_bytes().splitlines(keepends=True))
    mended = reconciled(path, stale, segment_bytes=segment_bytes)
    check(path, mended)
    assert unhurt <= set(map(encode, iterate_responses(path))), "a row that was not hurt is gone"
    with ResponseLog(path, segment_bytes=segment_bytes) as log:
        assert log.repaired.torn is None and not log.repaired.damaged, "the second start found something again"
        for row in mended.values():
            if row.state == "pending":
                log.append(response(int(row.sample_id[1:]), row.attempts + 1))
    whole = reconciled(path, mended)
    check(path, whole)
    assert Counter(row.state for row in whole.values()).total() == PROMPTS
    assert not any(row.state == "pending" for row in whole.values())


def test_rows_in_any_order_and_doubled_by_a_crash_imply_one_ledger(tmp_path):
    path, other = tmp_path / "responses.jsonl", tmp_path / "other.jsonl"
    lines = [encode(response(number, attempt)) for number in range(4) for attempt in (1, 2)]
    path.write_bytes(b"".join(lines))
    other.write_bytes(b"".join(reversed(lines * 2)))
    assert reconciled(path, {}) == reconciled(other, {})
    assert reconciled(path, {})["s1"].generated_tokens == 4 + 5, "a row that is there twice was paid for once"


def test_a_row_that_is_both_in_a_segment_and_in_the_live_file_counts_once(tmp_path):
    path = tmp_path / "responses.jsonl"
    with ResponseLog(path, segment_bytes=10) as log:
        log.append(response(1))
    path.write_bytes(gzip.decompress(log_files(path)[0].read_bytes()))
    ledger = reconciled(path, {})
    assert (ledger["s1"].state, ledger["s1"].generated_tokens) == ("kept", 4)


def test_a_resume_judges_nothing_again_and_finds_nothing_to_write(tmp_path):
    path = tmp_path / "responses.jsonl"
    with ResponseLog(path, segment_bytes=1_000) as log:
        for number in range(5):
            log.append(response(number))
            log.sync()
    ledger = reconciled(path, {})

    def refuse(prompt: GenerationPrompt, response: Response) -> Verdict:
        pytest.fail(f"{prompt.sample_id} was judged again")

    assert differing(ledger, reconciled(path, dict(ledger), refuse)) == []


def test_unjudged_rows_are_read_in_the_order_of_the_log_whatever_that_of_the_prompts(tmp_path):
    path = tmp_path / "responses.jsonl"
    with ResponseLog(path, segment_bytes=500) as log:
        for number in (5, 2, 7, 0, 3):
            log.append(response(number))
            log.sync()
    seen = []

    def note(prompt: GenerationPrompt, response: Response) -> Verdict:
        seen.append(prompt.sample_id)
        return judge(prompt, response)

    reconciled(path, {}, note)
    assert seen == ["s5", "s2", "s7", "s0", "s3"]


def test_failed_and_skipped_prompts_keep_their_state_and_a_failed_one_that_was_answered_is_judged():
    prompts = [prompt(0, skip_reason="held_out"), prompt(1), prompt(2)]
    failed = LedgerRow("s1", "failed", attempts=4, reasons=("request_timeout",), detail="too slow")
    known = {"s0": LedgerRow("s0", "kept", completion_tokens=5), "s1": failed, "s2": LedgerRow("s2", "in_flight", 2)}
    ledger = reconcile(prompts, known, [], judge=judge, where="main/B1")
    assert [(row.state, row.reasons, row.attempts) for row in ledger.values()] == [
        ("skipped", ("held_out",), 0),
        ("failed", ("request_timeout",), 4),
        ("pending", (), 2),
    ]
    assert ledger["s0"].completion_tokens is None


def test_responses_of_other_prompts_are_refused(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_bytes(encode(response(PROMPTS)))
    with pytest.raises(BadInput, match=f"main/B1: the response log has sample s{PROMPTS}, which is not among"):
        reconciled(path, {})
    path.write_bytes(encode(response(1).model_copy(update={"prompt_sha256": "0"})))
    with pytest.raises(BadInput, match="sample s1, which was generated for other prompt tokens"):
        reconciled(path, {})

"""The stage as a person meets it: what it keeps, why it stops, and how it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from aerie.artefacts.locks import lock_file
from aerie.errors import BadInput, Busy, Failed, Retryable
from aerie.generation import fingerprints, stage, writer
from aerie.generation.server import Server
from aerie.store.connection import connected
from aerie.store.queries.ledger import only_writer

from .conftest import DATASET, ensure, make_prompts, manifest_of, write_dataset, write_weights
from .fake_server import TOKEN_IDS, FakeServer, answer_ids, reply, sample_of


def test_every_prompt_ends_in_one_state_and_the_second_run_has_nothing_to_do(world):
    prompts = make_prompts(40)
    prompts[1] = replace(prompts[1], split="benchmark")
    prompts[2] = replace(prompts[2], split="validation")
    prompts[3] = replace(prompts[3], skip_reason="too_long")
    prompts[4] = replace(prompts[4], prompt_ids=[1] * 1010)
    write_dataset(world.files, prompts)
    result = world.run()
    counts = manifest_of(result).counts
    assert (counts["prompts"], counts["kept"], counts["skipped"], counts["pending"]) == (40, 37, 3, 0)
    assert counts["stopped_by"] == "prompts_exhausted"
    skipped = {row.sample_id: row.reasons for row in world.ledger().values() if row.state == "skipped"}
    assert skipped == {"s1": ("held_out",), "s3": ("too_long",), "s4": ("no_room_for_response",)}
    assert "s1" not in world.server.seen, "a held-out prompt was generated"
    world.check_log_equals_ledger()

    asked = len(world.server.requests)
    assert world.run().reused and len(world.server.requests) == asked


def test_every_sampling_parameter_is_sent_and_the_log_keeps_ids_hash_and_server(world):
    world.run()
    sent = world.server.requests[0]["sampling_params"]
    assert {
        "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "min_new_tokens", "n", "ignore_eos", "stop_token_ids",
    } <= set(sent)  # fmt: skip
    assert sent["stop_token_ids"] == [TOKEN_IDS["<|im_end|>"]]
    row = next(row for row in world.log() if row["sample_id"] == "s7")
    assert row["output_ids"] == answer_ids("s7")
    assert (row["launch_token"], row["attempt"], row["max_new_tokens"]) == ("launch-1", 1, 256)
    assert row["finish_reason"] == {"type": "stop", "matched": 900} and row["meta_info"]["cached_tokens"] == 0


def test_prompts_are_taken_in_admission_order_and_a_budget_stops_and_continues(world):
    first = manifest_of(world.run(budget_tokens=900, concurrency=4)).counts
    assert first["stopped_by"] == "budget" and first["response_tokens"] >= 900 and first["pending"] > 0
    done = {row["sample_id"] for row in world.log()}
    assert done == {f"s{number}" for number in range(len(done))}
    assert world.edition()["stopped_by"] == "budget"
    assert [alert["reason"] for alert in world.events("alert")] == ["budget_reached"]
    second = manifest_of(world.run(budget_tokens=1800, concurrency=4)).counts
    assert second["response_tokens"] >= 1800
    assert max(world.server.seen.values()) == 1, "raising the budget generated a sample again"
    world.check_log_equals_ledger()
    lowered = manifest_of(world.run(budget_tokens=500)).counts
    assert lowered["response_tokens"] == second["response_tokens"], "lowering the budget deleted rows"


def test_max_prompts_and_max_samples_bound_what_is_tried_and_raising_them_continues(world):
    assert manifest_of(world.run(max_prompts=10)).counts["kept"] == 10
    assert manifest_of(world.run(max_prompts=15)).counts["kept"] == 15
    assert manifest_of(world.run(max_samples=20)).counts["kept"] == 20
    assert sorted(world.server.seen) == sorted(f"s{number}" for number in range(20))


def test_another_generation_fingerprint_is_refused_with_the_difference(world):
    world.run(budget_tokens=500)
    with pytest.raises(BadInput, match=r"max_new_tokens: 256 before, 200 now"):
        world.run(budget_tokens=500, max_new_tokens=200)
    world.check_log_equals_ledger()


def test_weights_that_changed_under_the_same_path_are_another_population(world):
    world.run(budget_tokens=500)
    write_weights(world.root / "verifier", b"retrained")
    with pytest.raises(BadInput, match=r"verifier\.weights_sha256: .* before, .* now"):
        world.run(budget_tokens=900)


def test_responses_to_other_prompt_tokens_are_refused(world):
    world.run(budget_tokens=500)
    prompts = [replace(prompt, prompt_ids=[9, *prompt.prompt_ids]) for prompt in make_prompts(40)]
    write_dataset(world.files, prompts)
    with pytest.raises(BadInput, match="other prompt tokens"):
        world.run(budget_tokens=500)


def test_rules_that_changed_judge_the_log_again_without_a_server(world, monkeypatch):
    cut = reply(list(range(1, 257)), 5, finish_reason={"type": "length", "length": 256})
    world.server.fault = lambda body, before: cut if sample_of(body) == "s6" else None
    assert manifest_of(world.run()).counts["flagged"] == 1
    world.server.die()
    counts = manifest_of(world.run(drop_flags=["truncated_in_reasoning"])).counts
    assert (counts["kept"], counts["quarantined"]) == (39, 1)
    assert world.ledger()["s6"].reasons == ("policy:truncated_in_reasoning",)
    monkeypatch.setattr(fingerprints, "RULES_VERSION", 999)
    assert not world.run(drop_flags=["truncated_in_reasoning"]).reused
    world.check_log_equals_ledger()


def test_a_lost_ledger_is_rebuilt_from_the_log(world):
    world.run(budget_tokens=900)
    before = world.ledger()
    with connected(world.database_url) as connection, connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM samples; DELETE FROM editions")
    asked = len(world.server.requests)
    world.run(budget_tokens=900, force=True)
    assert world.ledger() == before and len(world.server.requests) == asked


def test_a_verdict_of_validate_stands_until_the_rules_change(world):
    world.run(budget_tokens=900)
    with connected(world.database_url) as connection, connection, connection.cursor() as cursor:
        cursor.execute(
            "UPDATE samples SET state='quarantined', reasons='{x}', judged_by='validate' WHERE sample_id='s5'"
        )
    world.run(budget_tokens=900, force=True)
    assert world.ledger()["s5"].state == "quarantined"
    world.check_log_equals_ledger()


def test_torn_tail_and_flipped_bit_are_reported_and_only_those_samples_generated_again(world):
    world.run(budget_tokens=900)
    lines = world.files.responses.read_bytes().splitlines(keepends=True)
    hurt = json.loads(lines[2])["sample_id"]
    torn = json.loads(lines[-1])["sample_id"]
    lines[2] = lines[2].replace(b'"output_ids":[', b'"output_ids":[9', 1)
    lines[-1] = lines[-1][:-30]
    world.files.responses.write_bytes(b"".join(lines))
    world.run(budget_tokens=900)
    (alert,) = world.warnings()
    assert f"responses.jsonl: the row at byte {len(lines[0]) + len(lines[1])}" in alert["message"]
    assert any("incomplete row" in event["message"] for event in world.events("progress"))
    again = {sample_id for sample_id, times in world.server.seen.items() if times > 1}
    assert again == {hurt, torn}
    world.check_log_equals_ledger()


def loop(body, before):
    ids = [7, 8, 9] * 40
    return reply([*ids, 903, 5, 900], len(body["input_ids"]))


def test_a_canary_of_corrupt_rows_stops_before_the_rest_is_generated(world):
    world.server.fault = loop
    with pytest.raises(Failed, match=r"canary: 4 of 4 responses are corrupt .* loop 4 times"):
        world.run()
    assert len(world.server.requests) == 4
    assert world.edition()["stopped_by"] == "canary" and world.warnings()[0]["reason"] == "canary"
    assert world.counts().quarantined == 4, "quarantined rows are kept as evidence"
    world.check_log_equals_ledger()
    with pytest.raises(Failed, match="canary"):
        world.run()
    assert len(world.server.requests) == 4, "a failed canary was generated again"


def test_a_data_set_about_tools_without_tool_calls_stops_at_its_canary(world):
    asked = {"about_tools": True, "canary": {"prompts": 4, "minimum_tool_share": 0.5}}
    with pytest.raises(Failed, match="0 of 4 responses hold a well-formed tool section"):
        world.run(**asked)
    assert len(world.server.requests) == 4


def test_a_data_set_about_tools_with_tool_calls_passes_its_canary(world):
    world.server.tools = True
    asked = {"about_tools": True, "canary": {"prompts": 4, "minimum_tool_share": 0.5}}
    assert manifest_of(world.run(**asked)).counts["kept"] == 40


def test_a_quarantine_rate_above_the_threshold_stops_the_run_at_once(world):
    world.server.fault = lambda body, before: loop(body, before) if int(sample_of(body)[1:]) >= 10 else None
    with pytest.raises(Failed, match=r"quarantine_rate: lately \d+ of 8 responses were quarantined"):
        world.run(generation={"quarantine_window": 8, "maximum_quarantine_share": 0.25}, concurrency=2)
    assert len(world.server.requests) < 30
    world.check_log_equals_ledger()


def test_errors_that_dominate_stop_the_run_name_the_commonest_and_burn_no_prompt(world):
    world.server.fault = lambda body, before: (
        {"text": "x", "meta_info": {"usage": {}}} if int(sample_of(body)[1:]) >= 4 else None
    )
    with pytest.raises(Failed, match=r"errors: .* request_schema, .* field output_ids: field required; keys received"):
        world.run()
    counts = world.counts()
    assert (counts.failed, counts.kept, counts.pending) == (0, 4, 36)
    world.server.fault = lambda body, before: None
    assert manifest_of(world.run()).counts["kept"] == 40
    world.check_log_equals_ledger()


def test_one_poisoned_prompt_fails_alone_and_is_not_sent_twice(world):
    world.server.fault = lambda body, before: (
        web.Response(status=400, text="bad ids") if sample_of(body) == "s9" else None
    )
    counts = manifest_of(world.run()).counts
    assert (counts["kept"], counts["failed"]) == (39, 1)
    row = world.ledger()["s9"]
    assert (row.state, row.reasons, row.attempts, row.detail) == (
        "failed",
        ("request_poisoned",),
        1,
        "HTTP 400: bad ids",
    )
    assert world.server.seen["s9"] == 1


def test_a_poisoned_prompt_that_is_the_last_one_left_does_not_block_the_data_set(world):
    assert manifest_of(world.run(max_prompts=39)).counts["kept"] == 39
    world.server.fault = lambda body, before: web.Response(status=400, text="bad ids")
    counts = manifest_of(world.run()).counts
    assert (counts["kept"], counts["failed"], counts["stopped_by"]) == (39, 1, "prompts_exhausted")


@pytest.mark.parametrize(("left", "stopped"), [(10, True), (7, False)])
def test_a_server_that_refuses_all_that_is_left_is_no_end_of_the_prompts(world, left, stopped):
    world.run(max_prompts=40 - left)
    world.server.fault = lambda body, before: web.Response(status=400, text="not today")
    if not stopped:
        assert manifest_of(world.run()).counts["failed"] == left
        return
    with pytest.raises(Failed, match=rf"errors: {left} of the last {left} .* request_poisoned, .* HTTP 400: not today"):
        world.run()
    assert (world.counts().failed, world.counts().pending) == (0, left)


def test_transient_faults_of_every_kind_are_sent_again_and_leave_no_trace_but_the_attempts(world, monkeypatch):
    monkeypatch.setattr(stage, "FIRST_BACKOFF_SECONDS", 0.01)
    aborted = reply([], 5, finish_reason={"type": "abort", "message": "shutting down", "status_code": 503})

    def fault(body, before):
        faults = [web.Response(status=503), b'{"output_ids": [1,', ConnectionResetError(), aborted]
        return None if before else faults[int(sample_of(body)[1:]) % 4]

    world.server.fault = fault
    assert manifest_of(world.run()).counts["kept"] == 40
    assert {row.attempts for row in world.ledger().values()} == {2}
    rids = [body["rid"] for body in world.server.requests]
    assert len(rids) == len(set(rids)), "two requests had one id"
    world.check_log_equals_ledger()


def test_a_server_that_dies_is_noticed_within_ten_seconds_and_the_next_try_goes_on(world, monkeypatch):
    world.server.delay_seconds = 0.3

    def die_soon(body, before):
        if len(world.server.requests) == 20:
            threading.Thread(target=world.server.die).start()
            deaths.append(time.monotonic())

    deaths = []
    world.server.fault = die_soon
    with pytest.raises(Retryable, match="is gone"):
        world.run()
    assert time.monotonic() - deaths[0] < 10
    counts = world.counts()
    assert counts.in_flight == 0 and counts.failed == 0 and 0 < counts.kept < 40
    world.check_log_equals_ledger()
    with FakeServer(world.server.model_path) as another:
        monkeypatch.setattr(stage, "_ensure_server", ensure(another.url))
        assert manifest_of(world.run()).counts["kept"] == 40
        assert len(another.requests) == 40 - counts.kept
    world.check_log_equals_ledger()


def test_a_lease_that_cannot_be_renewed_ends_the_run_worth_retrying(world, monkeypatch):
    def gone():
        raise Retryable("the keeper says the server is gone")

    world.server.delay_seconds = 30.0
    monkeypatch.setattr(stage, "_ensure_server", lambda request, events: Server(world.server.url, "x", gone))
    monkeypatch.setattr(stage, "LONGEST_RENEWAL_SECONDS", 0.1)
    with pytest.raises(Retryable, match="the keeper says"):
        world.run()
    assert world.counts().pending == 40


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"reasoning_parser": "kimi_k2"}, "reasoning parser kimi_k2"),
        ({"tool_call_parser": "kimi_k2"}, "tool-call parser kimi_k2"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ({"model_path": "/elsewhere"}, "serves /elsewhere"),
        ({"speculative_algorithm": "EAGLE3"}, "drafts with EAGLE3"),
        ({"dtype": "bfloat16"}, "computes in bfloat16"),
    ],
)
def test_a_server_that_would_produce_other_tokens_is_refused_before_any_request(world, info, message):
    world.server.info = info
    with pytest.raises(BadInput, match=message):
        world.run()
    assert not world.server.requests


def test_a_second_writer_is_refused_by_name(world):
    with (
        connected(world.database_url) as connection,
        only_writer(connection, edition="main", dataset=DATASET, run_id="the other run"),
        pytest.raises(Busy, match="being written by run the other run"),
    ):
        world.run()
    assert not world.server.requests


def test_progress_is_logged_in_the_form_people_know_and_closed_by_a_summary(world):
    world.server.delay_seconds = 0.15
    world.run(budget_tokens=1500)
    messages = [event["message"] for event in world.events("progress")]
    pattern = (
        r"Progress: \d+/40 \(0 errors\), \d+\.\d req/s, avg completion: (\d+|-) tokens, elapsed: \d+s, ETA: [\d.]+h, "
        r"tokens of budget: [\d,]+/1,500 \([\d.]+%\), \d+ tok/s, in flight: \d+, quarantined: [\d.]+%, "
        r"server: 3 running, 1 queued, token usage: 0\.42, 930 tok/s"
    )
    assert any(re.fullmatch(pattern, message) for message in messages), messages
    assert any(message.startswith(f"Generation of {DATASET}: ") for message in messages)
    assert messages[-1].startswith(f"{DATASET} stopped by budget: kept ")
    figures = world.events("metric")[-1]["figures"]
    assert figures["response_tokens"] == world.counts().kept_response_tokens


def test_a_server_that_hides_its_load_is_alerted_once_and_never_shown_as_idle(world):
    world.server.delay_seconds = 0.2
    world.server.loads = {"loads": [{"num_running_reqs": 3}]}
    world.run(budget_tokens=1500)
    (alert,) = world.warnings()
    assert alert["reason"] == "server_load_unknown" and "field loads.0.num_waiting_reqs" in alert["message"]
    lines = [event["message"] for event in world.events("progress") if event["message"].startswith("Progress")]
    assert lines and all(line.endswith("server: not known") for line in lines)


GENERATE = """
import sys
from pathlib import Path
from tests.generation import conftest
from aerie.generation import canary_show, stage
from aerie.stages import Events
stage._ensure_server = conftest.ensure(sys.argv[3])
canary_show.decode = conftest.decode_without_tokenizer
world = conftest.World(Path(sys.argv[1]), sys.argv[2], None)
stage.generate(world.request(), Events(world.root / "events.jsonl"))
"""


def start_generator(world, **options) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, world.root, world.database_url, world.server.url],
        env={**os.environ, "PYTHONPATH": f"include{os.pathsep}."}, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def wait_for_rows(path: Path, rows: int, process: subprocess.Popen[bytes]) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "rows"),
    [(signal.SIGTERM, 11), (signal.SIGKILL, 17), pytest.param(signal.SIGKILL, 5, marks=pytest.mark.slow)],
)
def test_a_generator_killed_under_load_loses_nothing_and_repeats_nothing(world, number, rows):
    world.server.delay_seconds = 0.05
    process = start_generator(world)
    try:
        wait_for_rows(world.files.responses, rows, process)
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
    if number == signal.SIGTERM:
        assert b"stopped by SIGTERM" in error
        assert world.counts().in_flight == 0
        world.check_log_equals_ledger()
    durable = {row["sample_id"] for row in world.log()}
    before = world.server.seen.copy()
    assert manifest_of(world.run()).counts["kept"] == 40
    world.check_log_equals_ledger()
    assert all(world.server.seen[sample_id] == before[sample_id] for sample_id in durable), "a durable row was repeated"


@pytest.mark.slow
def test_two_crashes_and_a_stale_database_leave_log_and_ledger_equal(world):
    world.server.delay_seconds = 0.05
    for rows in (6, 14):
        process = start_generator(world)
        try:
            wait_for_rows(world.files.responses, rows, process)
        finally:
            process.kill()
            process.communicate()
    # The ledger forgets its last commits, as after a restore of an older backup.
    with connected(world.database_url) as connection, connection, connection.cursor() as cursor:
        cursor.execute("UPDATE samples SET state = 'pending', response_crc32 = NULL WHERE admission_rank % 3 = 0")
    world.run()
    world.check_log_equals_ledger()


def cut_sessions(database_url):
    with connected(database_url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'aerie generate%'"
        )


def test_a_database_session_that_is_cut_is_opened_again_and_the_run_goes_on(world):
    world.server.delay_seconds = 0.05
    cuts = []

    def cut(body, before):
        if len(world.server.requests) >= (15, 30, 99)[len(cuts)]:
            cuts.append(body)
            cut_sessions(world.database_url)

    world.server.fault = cut
    assert manifest_of(world.run()).counts["kept"] == 40
    assert len(cuts) == 2 and max(world.server.seen.values()) == 1
    world.check_log_equals_ledger()


def test_whoever_wrote_while_the_session_was_cut_ends_the_run_before_the_ledger_has_two_writers(world):
    world.server.delay_seconds = 0.05
    cuts = []

    def cut(body, before):
        if len(world.server.requests) >= 15 and not cuts:
            cuts.append(body)
            cut_sessions(world.database_url)
            with (
                connected(world.database_url) as connection,
                only_writer(connection, edition="main", dataset=DATASET, run_id="another"),
            ):
                pass

    world.server.fault = cut
    with pytest.raises(Retryable, match="another process wrote it"):
        world.run()
    world.server.fault = lambda body, before: None
    durable = {row["sample_id"] for row in world.log()}
    before = world.server.seen.copy()
    assert manifest_of(world.run()).counts["kept"] == 40
    assert all(world.server.seen[sample_id] == before[sample_id] for sample_id in durable)
    world.check_log_equals_ledger()


def test_a_database_that_does_not_come_back_ends_the_run_worth_retrying(world, monkeypatch):
    monkeypatch.setattr(writer, "RECONNECT_SECONDS", 0.5)
    world.server.delay_seconds = 0.05

    def go_away(body, before):
        if len(world.server.requests) >= 15:
            monkeypatch.setattr(writer, "connect", refuse)
            cut_sessions(world.database_url)

    def refuse(url, **options):
        raise Retryable("database cannot be used: connection refused")

    world.server.fault = go_away
    with pytest.raises(Retryable, match="connection refused"):
        world.run()


def test_two_generators_on_one_machine_never_write_one_log_whatever_the_database_says(world, tmp_path):
    lock = world.files.folder / "generate.lock"
    with (
        lock_file(lock, what="the data set", holder="run the first"),
        pytest.raises(Busy, match=r"being worked on by run the first \(process \d+ on "),
    ):
        world.run()
    assert not world.server.requests


@pytest.mark.parametrize("held", ["lock file", "ledger"])
def test_an_earlier_try_of_this_run_that_is_still_ending_is_waited_for(world, held):
    run_id = world.request().run_id
    with ExitStack() as earlier_try:
        if held == "lock file":
            earlier_try.enter_context(lock_file(world.files.writer_lock, what="the log", holder=f"run {run_id}"))
        else:
            connection = earlier_try.enter_context(connected(world.database_url, application="test"))
            earlier_try.enter_context(only_writer(connection, edition="main", dataset=DATASET, run_id=run_id))
        with pytest.raises(Busy, match=f"by run {run_id}"):
            world.run()
    assert not world.server.requests

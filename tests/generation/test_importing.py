"""Responses made elsewhere: matched, logged with their provenance, judged and counted as if generated here."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from aerie.artefacts.locks import dataset_lock
from aerie.artefacts.manifest import read_manifest
from aerie.artefacts.response_log import prompt_sha256
from aerie.artefacts.superseded import Superseded, add_superseded
from aerie.errors import BadInput, Busy, Failed
from aerie.generation.importing import ImportReport, import_responses
from aerie.generation.provenance import read_statement

from .conftest import make_prompts, manifest_of, write_dataset
from .fake_server import END, answer_ids

CAP = 256
LENIENT = {
    "prompts": 4, "maximum_corrupt_share": 1.0, "maximum_truncated_share": 1.0, "maximum_short_answer_share": 1.0,
    "maximum_empty_reasoning_share": 1.0, "maximum_loop_share": 1.0,
}  # fmt: skip
ALL_WRONG = {"maximum_quarantine_share": 1.0}


def row_of(number: int, **fields: Any) -> dict[str, Any]:
    """A row of another script: its own id, the prompt's ids, and what the server said."""
    ids = answer_ids(f"s{number}")
    row = {
        "id": number, "prompt_ids": make_prompts(number + 1)[-1].prompt_ids, "output_ids": ids,
        "finish_reason": {"type": "stop", "matched": END}, "completion_tokens": len(ids), "max_new_tokens": CAP,
    }  # fmt: skip
    return {name: value for name, value in {**row, **fields}.items() if value is not None}


def settings_of(world: Any) -> Mapping[str, Any]:
    """What an edition is made with: bound by an import of nothing."""
    return json.loads((world.files.folder / "generation.json").read_text())["settings"]


def take(world: Any, *rows: Any, stated: Mapping[str, Any] | None = None, unknown: bool = True) -> ImportReport:
    path = world.root / "responses_of_mine.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return import_responses(path, world.request(), stated=stated or {}, allow_unknown=unknown, say=print)


def test_imported_rows_are_judged_counted_and_never_sent_again(world):
    broken = row_of(3, output_ids=[1, 2, END], completion_tokens=3)
    report = take(world, row_of(0), row_of(1), broken)
    assert (report.rows, report.imported, report.exit_code) == (3, 3, 0)
    tokens = len(answer_ids("s0")) + len(answer_ids("s1"))
    counts = manifest_of(world.run(budget_tokens=tokens + 1, concurrency=1, canary=LENIENT)).counts
    assert counts["kept"] > 2 and counts["response_tokens"] > tokens, "imported tokens did not count for the budget"
    assert not {"s0", "s1", "s3"} & world.server.seen.keys(), "an imported sample was sent to the server"
    ledger = world.ledger()
    assert (ledger["s0"].state, ledger["s3"].state) == ("kept", "quarantined")
    assert "no_close" in ledger["s3"].reasons
    world.check_log_equals_ledger()


def test_log_row_and_record_say_where_an_imported_row_came_from(world):
    stated = {"sampling": {"temperature": 1.0}, "kv_cache_dtype": "auto"}
    with pytest.raises(BadInput, match=r"sampling.temperature: 1.0 stated, 0.8 here"):
        take(world, row_of(0), stated=stated)
    take(world, row_of(0, meta_info={"cached_tokens": 3}, launch_token="theirs"), stated={"kv_cache_dtype": "auto"})
    (row,) = world.log()
    assert row["launch_token"] == "imported" and row["meta_info"]["provenance"] == "imported"
    source = row["meta_info"]["imported_from"]
    assert (source["file"], source["row"], source["id"], source["assumed"]) == ("responses_of_mine.jsonl", 0, 0, [])
    assert source["launch_token"] == "theirs" and row["meta_info"]["cached_tokens"] == 3
    record = read_manifest(world.files.folder / source["record"])
    assert record.inputs[0].sha256 == source["sha256"]
    assert record.counts["imported"] == 1 and record.counts["made_with"] == {"kv_cache_dtype": "auto"}
    assert "sampling.temperature" in record.counts["unknown_provenance"]
    assert "kv_cache_dtype" not in record.counts["unknown_provenance"]


def test_unknown_provenance_is_refused_unless_allowed(world):
    with pytest.raises(BadInput, match=r"not stated.*sampling\.temperature.*--allow-unknown-provenance"):
        take(world, row_of(0), unknown=False)
    assert not world.files.responses.exists(), "a refused import left something"


def test_rows_of_another_edition_bring_their_own_statement(world, tmp_path: Path):
    world.run(budget_tokens=300)
    log, settings = world.files.responses.read_text(), world.files.folder / "generation.json"
    statement = tmp_path / "made_with.json"
    statement.write_text(settings.read_text())
    for path in (world.files.responses, settings):
        path.unlink()
    report = take(world, *log.splitlines(), stated=read_statement(statement), unknown=False)
    assert report.imported == len(log.splitlines()) > 0
    (record,) = (world.files.folder / "imports").iterdir()
    assert read_manifest(record).counts["unknown_provenance"] == []


def test_a_misspelt_or_different_setting_is_refused(world):
    with pytest.raises(BadInput, match=r"samplin\.temperature: no such setting"):
        take(world, row_of(0), stated={"samplin": {"temperature": 0.8}})
    with pytest.raises(BadInput, match="max_new_tokens: 9 stated, 256 here"):
        take(world, row_of(0), stated={"max_new_tokens": 9})


def test_responses_under_other_settings_are_not_mixed_into_an_edition(world):
    take(world, row_of(0))
    with pytest.raises(BadInput, match="max_new_tokens: 256 before, 200 now"):
        import_responses(
            world.root / "responses_of_mine.jsonl", world.request(max_new_tokens=200), stated={}, allow_unknown=True,
            say=print,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (row_of(0, prompt_ids=[1, 2]), "no_such_prompt"),
        (row_of(0, prompt_ids=None), "no_such_prompt"),
        (row_of(0, sample_id="s1"), "prompt_differs"),
        (row_of(0, sample_id="s0", prompt_ids=None, prompt_sha256="0" * 64), "prompt_differs"),
        (row_of(1), "skipped:held_out"),
        (row_of(0, max_new_tokens=9), "other_max_new_tokens"),
        (row_of(0, output_ids=[7] * (CAP + 1)), "longer_than_max_new_tokens"),
        (row_of(0, finish_reason={"type": "abort"}), "aborted"),
        (row_of(0, output_ids=[2**40]), "output_ids_out_of_range"),
        (row_of(0, prompt_ids=[-1]), "prompt_ids_out_of_range"),
    ],
)
def test_row_of_another_population_is_refused_with_its_reason(world, row: dict[str, Any], reason: str):
    prompts = make_prompts(3)
    prompts[1] = replace(prompts[1], split="benchmark")
    write_dataset(world.files, prompts)
    report = take(world, row, row_of(2))
    assert (dict(report.refused), report.imported, report.exit_code) == ({reason: 1}, 1, 1)
    assert [row["sample_id"] for row in world.log()] == ["s2"]


def test_a_sample_id_without_its_prompt_is_taken_only_where_gaps_are_allowed(world):
    take(world)
    stated = settings_of(world)
    bare = row_of(0, sample_id="s0", prompt_ids=None)
    refused = take(world, bare, stated=stated, unknown=False)
    assert dict(refused.refused) == {"prompt_not_stated": 1}
    assert take(world, bare, stated=stated).imported == 1
    assert world.log()[0]["prompt_sha256"] == prompt_sha256(make_prompts(1)[0].prompt_ids)


def test_a_row_that_cannot_be_read_is_told_and_the_rest_is_imported(world, capsys):
    report = take(world, row_of(0), "nonsense", row_of(1, output_ids=["7"]), row_of(2))
    assert (report.imported, report.unreadable, report.exit_code) == (2, 2, 2)
    assert "row 1 (line 2)" in capsys.readouterr().out


def test_duplicates_count_once_and_a_second_import_adds_nothing(world):
    first = take(world, row_of(0), row_of(0), row_of(1))
    assert (first.imported, first.duplicates) == (2, 1)
    again = take(world, row_of(0), row_of(0), row_of(1), row_of(2))
    assert (again.imported, again.already_answered) == (1, 3)
    records = [*(world.files.folder / "imports").iterdir()]
    assert take(world, row_of(0), row_of(2)).imported == 0
    assert [*(world.files.folder / "imports").iterdir()] == records, "an import of nothing left a record"
    assert [row["sample_id"] for row in world.log()] == ["s0", "s1", "s2"]


def test_prompts_with_the_same_ids_take_one_row_each_and_the_same_row_again(world):
    prompts = make_prompts(2)
    write_dataset(world.files, [prompts[0], replace(prompts[1], prompt_ids=prompts[0].prompt_ids)])
    for _ in range(2):
        take(world, row_of(0))
        assert [row["sample_id"] for row in world.log()] == ["s0"]
    take(world, row_of(0), row_of(0))
    assert [row["sample_id"] for row in world.log()] == ["s0", "s1"]


@pytest.mark.parametrize(
    ("output", "finish", "state"),
    [
        (answer_ids("s0"), "stop", "kept"),
        ([1 + number for number in range(CAP)], "length", "kept"),
        ([1, 2, 3], "stop", "quarantined"),
    ],
)
def test_without_metadata_the_ids_say_how_a_row_ended_and_a_stripped_end_is_no_pass(world, output, finish, state):
    bare = {"prompt_ids": make_prompts(1)[0].prompt_ids, "output_ids": output}
    assert take(world, bare).imported == 1
    (row,) = world.log()
    assert row["finish_reason"] == {"type": finish}
    assert row["meta_info"]["imported_from"]["assumed"] == ["finish_reason", "completion_tokens", "max_new_tokens"]
    world.run(max_prompts=1, canary=LENIENT, generation=ALL_WRONG)
    assert world.ledger()["s0"].state == state


def test_a_count_that_is_not_the_ids_is_kept_and_judged(world):
    take(world, row_of(0, completion_tokens=3))
    world.run(max_prompts=2, canary=LENIENT, generation=ALL_WRONG)
    assert "count_mismatch" in world.ledger()["s0"].reasons


def test_what_was_asked_for_again_can_be_imported(world):
    take(world, row_of(0, completion_tokens=3))
    again = Superseded(sample_id="s0", attempt=1, reasons=(), asked_at=datetime.now(UTC))
    add_superseded(world.files.responses, [again])
    assert take(world, row_of(0)).imported == 1
    world.run(max_prompts=2)
    assert (world.ledger()["s0"].state, world.ledger()["s0"].attempts) == ("kept", 2)
    assert "s0" not in world.server.seen


def test_imported_rows_that_are_bad_stop_the_run_at_its_canary(world):
    take(world, *(row_of(number, output_ids=[1, 2, END], completion_tokens=3) for number in range(4)))
    with pytest.raises(Failed, match="canary"):
        world.run()


def test_a_data_set_that_is_being_written_is_left_alone(world):
    request = world.request()
    with dataset_lock(request.files, request.dataset, holder="run-7"), pytest.raises(Busy, match="run-7"):
        take(world, row_of(0))


def test_a_finished_generation_goes_on_after_an_import(world):
    world.run(max_prompts=1)
    take(world, row_of(5))
    result = world.run(max_prompts=1)
    assert not result.reused and world.ledger()["s5"].state == "kept"

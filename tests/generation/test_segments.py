"""The stage over a log of several segments: manifest, resume, damage."""

import json
from functools import partial
from pathlib import Path

from aerie.artefacts.manifest import path_of
from aerie.artefacts.response_log import SEGMENT_BYTES, ResponseLog, iterate_responses, log_files
from aerie.generation import stage

from .conftest import manifest_of


def segmented(world, monkeypatch) -> list[Path]:
    """Generate with a small limit, so that the log has several segments; returns its files."""
    monkeypatch.setattr(stage, "ResponseLog", partial(ResponseLog, segment_bytes=1_500))
    world.run(budget_tokens=900, concurrency=2)
    files = log_files(world.files.responses)
    assert len(files) > 2
    return files


def generated_again(world) -> set[str]:
    return {sample_id for sample_id, times in world.server.seen.items() if times > 1}


def test_the_manifest_lists_every_file_of_the_log_with_its_rows(world, monkeypatch):
    files = segmented(world, monkeypatch)
    manifest = json.loads(world.files.manifest("generate").read_text())
    assert [path_of(output["uri"]) for output in manifest["outputs"]] == files
    rows = [output["rows"] for output in manifest["outputs"]]
    assert sum(rows) == manifest["counts"]["log_rows"] == len(list(iterate_responses(world.files.responses)))
    assert all(rows[:-1])
    assert world.run(budget_tokens=900, concurrency=2).reused


def test_raising_the_budget_of_a_segmented_log_repeats_nothing(world, monkeypatch):
    segmented(world, monkeypatch)
    counts = manifest_of(world.run()).counts
    assert (counts["kept"], counts["log_rows"]) == (40, 40) and not generated_again(world)


def test_a_bit_flipped_in_a_sealed_segment_is_alerted_and_only_what_it_hit_is_generated_again(world, monkeypatch):
    segment, *_ = segmented(world, monkeypatch)
    before = {row.sample_id: row for row in iterate_responses(world.files.responses)}
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    segment.write_bytes(data)
    assert not world.run(budget_tokens=900).reused, "a damaged log counted as done"
    (alert,) = world.warnings()
    assert f"{segment.name}: the row at byte " in alert["message"] and "compressed bytes 0 to " in alert["message"]
    after = {row.sample_id: row for row in iterate_responses(world.files.responses)}
    assert generated_again(world) == {name for name, row in before.items() if after.get(name) != row} & set(after)
    ledger = world.ledger()
    assert {name for name, row in ledger.items() if row.state == "kept"} == set(after)
    assert world.counts().kept_response_tokens == sum(row.completion_tokens for row in after.values()) >= 900


def test_a_log_written_before_there_were_segments_goes_on(world, monkeypatch):
    world.run(budget_tokens=900)
    assert len(log_files(world.files.responses)) == 1 and world.files.responses.stat().st_size < SEGMENT_BYTES
    monkeypatch.setattr(stage, "ResponseLog", partial(ResponseLog, segment_bytes=4_000))
    assert manifest_of(world.run()).counts["kept"] == 40 and not generated_again(world)

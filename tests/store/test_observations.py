"""Observations of launches in a real PostgreSQL, and on their way from a stage into it."""

import json
from pathlib import Path

import pytest

from aerie.artefacts.observations import Observation, append_observation, observations_path, read_observations
from aerie.errors import BadInput
from aerie.pipeline import RunParameters, stage_request
from aerie.recording import record_event
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.stages import Events
from aerie.store.connection import connected, transaction
from aerie.store.queries.observations import latest_observations, observations_of, record_observation


def observation(launch: str = "launch-1", **changes: object) -> Observation:
    fields = {
        "launch_token": launch, "plan_fingerprint": "plan", "observed_at": 1_000.0, "model_identity": "kimi",
        "drafter_identity": None, "hostname": "gpu-1", "gpu_name": "RTX PRO 6000", "sglang_version": "0.5.23",
        "device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "auto", "tensor_parallel_size": 8,
        "data_parallel_size": 1, "attention_data_parallel_size": 1, "pipeline_parallel_size": 1,
        "expert_parallel_size": 1, "mem_fraction_static": 0.88, "max_total_tokens": None, "page_size": 1,
        "bytes_per_token": 70_272, "max_total_num_tokens": 159_277, "memory_before_launch_bytes": 100_000_000_000,
        "taken_by_others_bytes": 0, "memory_left_bytes": 6_000_000_000, "predicted_max_total_num_tokens": 159_000,
    }  # fmt: skip
    return Observation.model_validate(fields | changes)


@pytest.fixture
def connection(database_url):
    with connected(database_url) as opened:
        yield opened


def test_a_launch_is_recorded_once_however_many_stages_hand_it_on(connection):
    for _ in range(2):
        record_observation(connection, observation())
    assert observations_of(connection, model_identity="kimi") == (observation(),)


def test_launches_are_found_by_model_host_and_version_oldest_first(connection):
    wanted = [observation("launch-b", observed_at=1.0), observation("launch-a", observed_at=2.0)]
    others = [
        observation("launch-c", model_identity="qwen"),
        observation("launch-d", hostname="gpu-2"),
        observation("launch-e", sglang_version="0.6.0"),
    ]
    for one in (*reversed(wanted), *others):
        record_observation(connection, one)
    key = {"model_identity": "kimi", "hostname": "gpu-1", "sglang_version": "0.5.23"}
    assert observations_of(connection, **key) == tuple(wanted)
    assert len(observations_of(connection, model_identity="kimi")) == 4


def test_the_latest_launches_are_found_without_a_look_at_all_of_them(connection):
    with transaction(connection) as cursor:
        cursor.execute(
            "INSERT INTO observations (launch_token, model_identity, hostname, sglang_version, observed_at, document) "
            "SELECT 'launch ' || number, '', '', '', to_timestamp(mod(number * 7919, 5000)), '{}' "
            "FROM generate_series(1, 5000) AS number; ANALYZE observations"
        )
        cursor.execute("EXPLAIN SELECT * FROM observations ORDER BY observed_at DESC LIMIT 30")
        plan = "\n".join(line for (line,) in cursor)
    assert "observations_by_time" in plan
    latest = latest_observations(connection, limit=3)
    assert [row["observed_at"].timestamp() for row in latest] == [4997.0, 4998.0, 4999.0]


def test_an_observation_that_a_stage_reports_reaches_the_store(connection, tmp_path: Path):
    Events(tmp_path / "events.jsonl").observation(observation().model_dump(mode="json"))
    event = json.loads((tmp_path / "events.jsonl").read_text())
    request = stage_request(load_settings(PROJECT_ROOT / "demo" / "config.yaml"), RunParameters(), run_id="test")
    record_event(connection, "benchmark", request, event)
    assert observations_of(connection, model_identity="kimi") == (observation(),)


def test_the_file_beside_the_lease_tells_of_earlier_launches(tmp_path: Path):
    assert read_observations(tmp_path) == ()
    for token in ("launch-1", "launch-2"):
        append_observation(tmp_path, observation(token))
    assert read_observations(tmp_path) == (observation("launch-1"), observation("launch-2"))


def test_a_line_that_is_no_observation_is_named(tmp_path: Path):
    append_observation(tmp_path, observation())
    with observations_path(tmp_path).open("a") as file:
        file.write('{"launch_token": "launch-2"}\n')
    with pytest.raises(BadInput, match=r"observations\.jsonl, line 2: not an observation"):
        read_observations(tmp_path)

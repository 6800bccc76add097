"""Where stages run under Airflow, from the configuration."""

import pytest

from aerie.errors import BadInput
from aerie.placement import executors, keeper_of, placement_arguments, pools, pools_to_write
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PlacementSettings, load_settings

SETTINGS = load_settings(PROJECT_ROOT / "demo" / "config.yaml")


def placed(**placement):
    documents = {stage: PlacementSettings.model_validate(document) for stage, document in placement.items()}
    return SETTINGS.model_copy(update={"placement": documents})


def test_without_a_placement_only_the_pools_are_set_that_keep_the_users_of_server_and_gpus_apart():
    pool_of = {stage: placement_arguments(SETTINGS, stage).get("pool") for stage in ("generate", "train", "merge")}
    assert pool_of == {"generate": "aerie_server", "train": "aerie_gpus", "merge": None}
    assert [(pool.name, pool.slots) for pool in pools(SETTINGS)] == [("aerie_server", 1), ("aerie_gpus", 1)]


def test_a_stage_goes_where_it_is_placed_and_the_others_to_the_default():
    settings = placed(default={"executor": "CeleryExecutor", "pool": "aerie_all"}, train={"queue": "gpu-1"})
    assert placement_arguments(settings, "merge") == {"executor": "CeleryExecutor", "pool": "aerie_all"}
    assert placement_arguments(settings, "train") == {
        "executor": "CeleryExecutor", "queue": "gpu-1", "pool": "aerie_gpus", "pool_slots": 1,
    }  # fmt: skip


def test_a_pool_that_the_configuration_names_is_made_as_large_as_it_needs():
    settings = placed(train={"pool": "big_host", "pool_slots": 8}, serve_start={"pool": "big_host", "pool_slots": 4})
    assert placement_arguments(settings, "train") == {"pool": "big_host", "pool_slots": 8}
    assert ("big_host", 8) in [(pool.name, pool.slots) for pool in pools(settings)]


@pytest.mark.parametrize(
    "placement",
    [
        {"train": {"pool_slots": 2}},
        {"train": {"pool": "aerie_gpus", "pool_slots": 2}},
        {"default": {"pool": "aerie_gpus", "pool_slots": 2}},
    ],
)
def test_aeries_own_pool_has_room_for_a_task_that_takes_more_than_one_slot(placement):
    settings = placed(**placement)
    taken = max(placement_arguments(settings, stage).get("pool_slots", 1) for stage in ("train", "merge"))
    assert {pool.name: pool.slots for pool in pools(settings)}["aerie_gpus"] == taken == 2


def test_a_pool_is_as_large_as_the_slots_that_a_stage_takes_of_the_default_one():
    settings = placed(default={"pool": "shared"}, merge={"pool_slots": 3})
    assert placement_arguments(settings, "merge") == {"pool": "shared", "pool_slots": 3}
    assert {pool.name: pool.slots for pool in pools(settings)}["shared"] == 3


def test_a_pool_is_made_where_missing_and_widened_where_too_small_and_never_narrowed():
    settings = placed(train={"pool": "big_host", "pool_slots": 2})
    for existing, written in [
        ({}, {"aerie_server": 1, "aerie_gpus": 1, "big_host": 2}),
        ({"aerie_server": 4, "aerie_gpus": 1, "big_host": 1, "other": 1}, {"big_host": 2}),
        ({"aerie_server": 1, "aerie_gpus": 8, "big_host": 2}, {}),
        ({"aerie_server": 1, "aerie_gpus": 1, "big_host": -1}, {}),
    ]:
        assert {pool.name: pool.slots for pool in pools_to_write(settings, existing)} == written


def test_a_stage_that_there_is_not_cannot_be_placed():
    with pytest.raises(BadInput, match=r"placement .* 'training': expected stages \(prepare, .*train"):
        placement_arguments(placed(training={"queue": "gpu-1"}), "train")


REMOTE = {"queue": "gpu-1", "remote": True}
SERVER_ELSEWHERE = {"serve_start": REMOTE, "serve_stop": REMOTE}


def test_the_servers_keeper_is_where_its_start_is_placed():
    assert keeper_of(SETTINGS, "generate") == "here"
    settings = placed(**SERVER_ELSEWHERE, capture=REMOTE)
    stages = ("serve_start", "capture", "generate", "benchmark", None)
    assert [keeper_of(settings, stage) for stage in stages] == [
        "for_others", "for_others", "elsewhere", "elsewhere", "elsewhere",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"generate": REMOTE}, "generate cannot be remote: expected plan, serve_start"),
        ({"default": REMOTE}, "default cannot be remote"),
        ({"train": {"remote": True}}, "train is remote without a queue"),
        ({"serve_start": REMOTE}, "serve_start and serve_stop are remote together"),
        ({"capture": REMOTE}, "and capture only with them"),
    ],
)
def test_a_placement_on_a_host_without_the_database_that_cannot_work_is_refused(placement, message):
    with pytest.raises(BadInput, match=message):
        placement_arguments(placed(**placement), "train")


def test_airflow_is_given_the_executors_that_the_placement_names():
    assert executors(SETTINGS) == ()
    settings = placed(train={"executor": "EdgeExecutor"}, merge={"executor": "CeleryExecutor"})
    assert executors(settings) == ("CeleryExecutor", "airflow.providers.edge3.executors.EdgeExecutor")


def test_a_capture_without_a_server_takes_its_turn_for_the_gpus():
    settings = placed()
    assert placement_arguments(settings, "capture")["pool"] == "aerie_server"
    hidden_states = settings.hidden_states.model_copy(update={"backend": "transformers"})
    elsewhere = settings.model_copy(update={"hidden_states": hidden_states})
    assert placement_arguments(elsewhere, "capture")["pool"] == "aerie_gpus"

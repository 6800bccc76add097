"""Pools of a running Airflow, as the start of either installation leaves them."""

import json

from airflow.api_fastapi.core_api.datamodels.pools import PoolBody, PoolPatchBody
from typer.testing import CliRunner

from aerie.cli import app
from aerie.local.airflow_api import AirflowApi
from aerie.local.stack import ensure_pools
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import PlacementSettings, load_settings

DEMO = PROJECT_ROOT / "demo" / "config.yaml"


class AirflowWithPools(AirflowApi):
    """An Airflow that has pools and nothing else; it reads requests by Airflow's own models."""

    def __init__(self, **pools):
        super().__init__("http://airflow.invalid", "secret")
        self.pools = pools

    def call(self, method, path, *, body=None, query=None):
        match method, path.split("/"):
            case "GET", ["", "pools"]:
                return {"pools": [{"name": name, "slots": slots} for name, slots in self.pools.items()]}
            case "POST", ["", "pools"]:
                made = PoolBody.model_validate(body)
                assert made.pool not in self.pools
                self.pools[made.pool] = made.slots
            case "PATCH", ["", "pools", name]:
                assert PoolPatchBody.model_validate(body).model_fields_set == {"slots"}
                assert query == {"update_mask": "slots"}, "Airflow refuses other fields of its default pool"
                assert name in self.pools
                self.pools[name] = body["slots"]
            case unknown:
                raise AssertionError(unknown)
        return None


def test_a_task_that_takes_more_slots_than_before_does_not_wait_for_good_after_the_next_start():
    settings = load_settings(DEMO)
    api = AirflowWithPools(default_pool=128, aerie_server=5)
    for slots in (1, 2, 1):
        placement = {"train": PlacementSettings(pool="gpus_of_gpu_2", pool_slots=slots)}
        ensure_pools(api, settings.model_copy(update={"placement": placement}))
    assert api.pools == {"default_pool": 128, "aerie_server": 5, "aerie_gpus": 1, "gpus_of_gpu_2": 2}


def test_containers_keep_what_a_person_set_of_a_pool_that_they_widen(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(DEMO.read_text() + "\nplacement:\n  train: {pool_slots: 2}\n")
    monkeypatch.setenv("AERIE_CONFIG", str(config))
    existing = tmp_path / "existing.json"
    existing.write_text(
        json.dumps(
            {
                "aerie_server": {"slots": 5, "description": "ours", "include_deferred": False},
                "aerie_gpus": {"slots": 1, "description": "ours", "include_deferred": True},
            }
        )
    )
    said = CliRunner().invoke(app, ["pools", "--existing", str(existing)])
    assert said.exit_code == 0, said.output
    assert json.loads(said.output) == {"aerie_gpus": {"slots": 2, "description": "ours", "include_deferred": True}}

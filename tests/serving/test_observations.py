"""Observations on their way from the keeper to the next plan and to the events of a stage; the server is a fake."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie.artefacts.observations import read_observations
from aerie.serving import client
from aerie.serving.client import ServerHandle
from aerie.serving.configured import hand_on_observation
from aerie.serving.plan import ServerPlan
from aerie.stages import Events

POOL = 4096
"""Tokens of the fake server's KV pool, whatever it was asked for."""


@pytest.fixture
def ensure(folder: Path, fake_python: Path) -> Callable[[ServerPlan], ServerHandle]:
    def ask(plan: ServerPlan) -> ServerHandle:
        return client.ensure_server(plan, folder=folder, owner="a test", python=fake_python, lease_seconds=60.0)

    return ask


def handed_on(handle: ServerHandle, path: Path) -> list[dict[str, Any]]:
    """Events of a stage that uses the server."""
    path.unlink(missing_ok=True)
    hand_on_observation(handle, Events(path))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_launch_is_observed_once_and_every_stage_hands_it_on(
    ensure: Callable[[ServerPlan], ServerHandle], folder: Path, tmp_path: Path, fake_plan: Callable[..., ServerPlan]
) -> None:
    plan = fake_plan(max_total_tokens=POOL)
    first = ensure(plan)
    second = ensure(plan)
    assert not first.reused and second.reused
    (observation,) = read_observations(folder)
    assert observation == first.observation == second.observation
    assert (observation.launch_token, observation.plan_fingerprint) == (first.launch_token, plan.fingerprint())
    assert observation.max_total_num_tokens == observation.predicted_max_total_num_tokens == POOL
    for handle in (first, second):
        documents = [event["document"] for event in handed_on(handle, tmp_path / "e") if event["type"] == "observation"]
        assert documents == [observation.model_dump(mode="json")]

    lease = client.status(folder)
    assert lease is not None and lease.observation == observation
    other = ensure(fake_plan(max_total_tokens=POOL, context_length=2048))
    assert [one.launch_token for one in read_observations(folder)] == [first.launch_token, other.launch_token]


def test_a_person_is_told_once_of_a_pool_that_is_not_as_planned(
    ensure: Callable[[ServerPlan], ServerHandle], tmp_path: Path, fake_plan: Callable[..., ServerPlan]
) -> None:
    plan = fake_plan(max_total_tokens=2 * POOL)
    alerts = [event for event in handed_on(ensure(plan), tmp_path / "e") if event["type"] == "alert"]
    assert [alert["reason"] for alert in alerts] == ["kv_pool_off_plan"]
    assert "planned 8,192 KV tokens, the server says 4,096, off by +100.0%" in alerts[0]["message"]
    assert [event["type"] for event in handed_on(ensure(plan), tmp_path / "e")] == ["observation"]


def test_a_checkpoint_that_the_planner_does_not_know_is_refused_before_the_launch(
    ensure: Callable[[ServerPlan], ServerHandle], folder: Path, tmp_path: Path, fake_plan: Callable[..., ServerPlan]
) -> None:
    strange = Path(shutil.copytree(fake_plan().model_path, tmp_path / "strange"))
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "strange"}))
    with pytest.raises(client.errors.PlanRefused, match="model_type 'strange' has an attention"):
        ensure(fake_plan(model_path=strange))
    assert read_observations(folder) == () and client.status(folder) is None

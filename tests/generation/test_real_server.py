"""The crash matrix against one real SGLang with the demo's verifier: nothing lost, nothing twice."""

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aerie.artefacts.previews import iterate_previews
from aerie.artefacts.response_log import iterate_responses
from aerie.serving import client as serving

from .real import RealWorld

KILLS = 10
SOON_SECONDS = 10.0


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealWorld]:
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    made = RealWorld(tmp_path, database_url)
    made.finish(made.start("prepare"))
    try:
        yield made
    finally:
        serving.stop(tmp_path / "server")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_generator_and_server_killed_under_load_lose_nothing_and_repeat_nothing(world):
    dice = random.Random(KILLS)
    durable: set[str] = set()
    for number in [signal.SIGKILL] * KILLS + [signal.SIGTERM]:
        now = world.strike(number, dice)
        assert durable < now, "a durable row was lost, or nothing went on"
        durable = now
    for victim in ("scheduler", "server"):
        assert world.kill_in_server(victim) < SOON_SECONDS, f"the death of the {victim} was noticed late"
        now = world.durable()
        assert durable < now
        durable = now
    evidence = world.stop_scheduler()
    assert any(f": {psutil.STATUS_STOPPED}, " in process for process in evidence.processes)
    assert evidence.last_probe is not None and evidence.last_probe.replicas[0].score is not None
    world.check()
    logged = Counter(response.sample_id for response in iterate_responses(world.files.responses))
    assert durable < set(logged) and max(logged.values()) == 1, "a durable row was generated again"
    shown = list(iterate_previews(world.files.canary_previews))
    assert len(shown) == 3 and all(
        ("boundary", "</think>") in preview.spans for preview in shown if not preview.reasons
    )
    messages = [json.loads(line).get("message", "") for line in (world.root / "events.jsonl").read_text().splitlines()]
    (stuck,) = (message for message in messages if "computed no token" in message)
    assert "it is started again, once" in stuck
    assert {"Sample 1 of 3", "Sample 2 of 3", "Sample 3 of 3"} <= {message.split(":")[0] for message in messages}

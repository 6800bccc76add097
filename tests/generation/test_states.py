"""States of what is kept are asked for while generating; nothing of it can cost a sample."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from aerie.errors import BadInput, Failed
from aerie.generation import states
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.states import most_kept_tokens
from aerie.hidden_states.identity import read_identity
from aerie.settings.pipeline import DatasetSettings

from .conftest import World
from .fake_server import END, reply


@pytest.fixture
def capturing(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose verifier has layers, and whose server's hook writes what it is asked for."""
    document = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 16}
    (world.root / "verifier" / "config.json").write_text(json.dumps(document))
    monkeypatch.setattr(states, "FILE_SECONDS", 5.0)
    world.server.fault = lambda body, before: write(world, body)
    return world


def asked(body: dict[str, Any]) -> bool:
    return bool(body["rid"].startswith("finish-"))


def state_file(world: World, body: dict[str, Any], suffix: str = ".safetensors") -> Path:
    name = body["rid"].partition("generate-")[2].partition(":")[0]
    return world.request().files.states / f"{name}{suffix}"


def write(world: World, body: dict[str, Any]) -> dict[str, Any] | None:
    """Stands in for the hook inside the server."""
    if not asked(body):
        return None
    state_file(world, body).write_text(body["rid"])
    return reply([5], len(body["input_ids"]))


def run(world: World, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """Generate with capture; returns the manifest's counts."""
    use(world, monkeypatch, **settings)
    manifest = world.run().manifest
    assert manifest is not None
    return dict(manifest.counts)


def use(world: World, monkeypatch: pytest.MonkeyPatch, *, maximum_length: int = 1024, **settings: Any) -> None:
    """Have the world's requests capture while generating."""
    make: Callable[..., Any] = World.request

    def request(self: World, **changes: Any) -> Any:
        plain = make(self, **changes)
        document = plain.settings.model_dump(mode="json") | {
            "hidden_states": {"capture": "generate", "free_share": 0.0, **settings},
            "corpus": {"maximum_length": maximum_length},
        }
        return plain.model_copy(update={"settings": type(plain.settings).model_validate(document)})

    monkeypatch.setattr(World, "request", request)


def test_every_kept_sample_is_asked_for_with_its_response_and_quarantined_ones_never(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"s13", "s27"}

    def fault(body: dict[str, Any], before: int) -> dict[str, Any] | None:
        sample = body["rid"].split(":")[-2]
        if sample in broken and not asked(body):
            return reply([1, 2, END], len(body["input_ids"]))  # no end of its reasoning
        return write(capturing, body)

    capturing.server.fault = fault
    counts = run(capturing, monkeypatch)
    rows = {row["sample_id"]: row for row in capturing.log()}
    sent = {body["rid"]: body for body in capturing.server.requests}
    finishes = {rid: body for rid, body in sent.items() if asked(body)}
    assert (counts["kept"], counts["quarantined"], len(finishes)) == (38, 2, 38)
    for rid, body in finishes.items():
        _, tokens, key = rid.split("-", 2)
        row, generating = rows[unquote(key.split(":")[0].removeprefix("generate-"))], sent[key]
        assert row["sample_id"] not in broken
        assert body["input_ids"] == [*generating["input_ids"], *row["output_ids"]]
        assert len(body["input_ids"]) == int(tokens)
        # One cache for the two of them, and for nobody else.
        assert body["extra_key"] == generating["extra_key"] == key
        assert (body["sampling_params"]["max_new_tokens"], body["priority"]) == (1, 1)
    assert len({body["extra_key"] for body in sent.values() if not asked(body)}) == 40
    assert len(list(capturing.request().files.states.glob("*.safetensors"))) == 38
    (told,) = [e["message"] for e in capturing.events("progress") if "captured while generating" in e["message"]]
    assert "of 38 samples were captured while generating, 0 are left" in told
    identity = read_identity(capturing.request().files.hidden_states)
    assert identity is not None and identity["layers"] == [2, 4, 5]


def test_a_sample_is_asked_for_only_when_it_is_durable(capturing: World, monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[str] = []

    def fault(body: dict[str, Any], before: int) -> dict[str, Any] | None:
        if asked(body):
            sample = body["rid"].split(":")[-2]
            row = capturing.ledger().get(sample)
            if row is None or row.state != "kept" or sample not in {row["sample_id"] for row in capturing.log()}:
                early.append(sample)
        return write(capturing, body)

    capturing.server.fault = fault
    assert run(capturing, monkeypatch)["kept"] == 40
    assert early == []


def test_separate_capture_shares_the_cache_and_asks_for_nothing(world: World) -> None:
    world.run()
    assert not any("extra_key" in body or asked(body) for body in world.server.requests)


def test_states_that_cannot_be_had_cost_no_sample_and_are_told_once(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(body: dict[str, Any], before: int) -> Any:
        if not asked(body):
            return None
        state_file(capturing, body, ".failed.json").write_text(json.dumps({"reason": "3 of its 9 rows are there"}))
        return reply([5], len(body["input_ids"]))

    capturing.server.fault = fault
    counts = run(capturing, monkeypatch)
    assert (counts["kept"], counts["stopped_by"]) == (40, "prompts_exhausted")
    (alert,) = capturing.warnings()
    assert alert["reason"] == "states_not_captured"
    assert "3 of its 9 rows are there" in alert["message"]
    told = [event["message"] for event in capturing.events("progress")]
    assert any("of 0 samples were captured while generating, 40 are left" in message for message in told)


def test_a_server_that_refuses_to_finish_a_sample_costs_no_sample(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing.server.fault = lambda body, before: b"not JSON" if asked(body) else None
    assert run(capturing, monkeypatch)["kept"] == 40
    assert "in a body of 8 bytes" in capturing.warnings()[0]["message"]


def test_a_file_of_an_earlier_response_is_gone_before_the_new_one_is_asked_for(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = capturing.request().files.states
    folder.mkdir(parents=True)
    (folder / "s1.safetensors").write_text("of an earlier response")
    there: list[bool] = []

    def fault(body: dict[str, Any], before: int) -> dict[str, Any] | None:
        if asked(body) and body["rid"].split(":")[-2] == "s1":
            there.append(state_file(capturing, body).exists())
        return write(capturing, body)

    capturing.server.fault = fault
    run(capturing, monkeypatch)
    assert there == [False]
    assert (folder / "s1.safetensors").read_text().startswith("finish-")


def test_states_that_will_not_fit_are_refused_with_the_sum_before_anything_is_generated(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(capturing, monkeypatch, free_share=1.0)
    with pytest.raises(Failed, match=r"do not fit: .* tokens x 128 bytes"):
        capturing.run()
    assert capturing.server.requests == []


def test_a_disk_that_fills_meanwhile_keeps_its_spare_room_and_every_sample(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "require_fit", lambda forecast: None)
    assert run(capturing, monkeypatch, free_share=1.0)["kept"] == 40
    assert not any(map(asked, capturing.server.requests))
    assert "hidden_states.free_share is spared" in capturing.warnings()[0]["message"]


def test_states_of_other_layers_are_not_mixed(capturing: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = capturing.request().files.hidden_states
    folder.mkdir(parents=True)
    (folder / "capture.json").write_text(json.dumps({"layers": [1, 2, 3]}))
    use(capturing, monkeypatch)
    with pytest.raises(Failed, match=r"layers \[1, 2, 3\] -> \[2, 4, 5\]"):
        capturing.run()


def test_capture_while_generating_and_streaming_are_not_asked_for_together(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(capturing, monkeypatch, disk_limit_gib=1)
    with pytest.raises(ValueError, match="expected one of the two"):
        capturing.run()


def prompts(count: int, tokens: int, cap: int) -> list[GenerationPrompt]:
    return [GenerationPrompt(f"s{i}", "train", i, [1] * tokens, "", cap, None) for i in range(count)]


@pytest.mark.parametrize(
    ("changes", "measured", "tokens"),
    [
        ({}, None, 10 * 150),
        ({"max_total_tokens": 700}, None, 700),
        ({"budget_tokens": 400}, None, 10 * 150),  # how many prompts it takes is not known
        ({"budget_tokens": 400}, 40.0, 400 + 10 * 50),
        ({"budget_tokens": 200, "expected": {"mean_response_tokens": 40.0}}, None, 200 + 5 * 50),
        ({"budget_tokens": 200, "expected": {"mean_response_tokens": 40.0}}, 20.0, 200 + 10 * 50),
    ],
)
def test_the_forecast_counts_prompts_and_follows_the_limits(
    changes: dict[str, Any], measured: float | None, tokens: int
) -> None:
    source = {"reader": "any", "path": "x", "licence": "mit"}
    dataset = DatasetSettings.model_validate({"source": source, "budget_tokens": 0, **changes})
    assert most_kept_tokens(dataset, prompts(10, 50, 100), maximum_tokens=1000, mean_response_tokens=measured) == tokens
    cut = most_kept_tokens(dataset, prompts(10, 50, 100), maximum_tokens=60, mean_response_tokens=None)
    assert cut <= 600


def test_the_verifier_that_has_no_such_layers_is_refused_before_a_server_is_started(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(capturing, monkeypatch, layers=[2, 4, 9])
    with pytest.raises(BadInput, match="from 1 to 7"):
        capturing.run()


def test_a_response_longer_than_the_corpus_takes_is_not_asked_for(
    capturing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(capturing, monkeypatch, maximum_length=80)
    capturing.run()
    lengths = {row["sample_id"]: row["prompt_tokens"] + row["completion_tokens"] for row in capturing.log()}
    sent = {body["rid"].split(":")[-2] for body in capturing.server.requests if asked(body)}
    assert sent == {sample for sample, tokens in lengths.items() if tokens <= 80}
    assert 0 < len(sent) < 40
    assert "corpus.maximum_length is 80" in capturing.warnings()[0]["message"]

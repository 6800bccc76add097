"""``./aerie quarantine``: finding what went wrong, and having it generated again without losing what was there."""

import json
from collections.abc import Callable

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from aerie import quarantine
from aerie.artefacts.response_log import latest_responses
from aerie.artefacts.samples import VerdictRow, verdict_writer
from aerie.artefacts.superseded import superseded_file
from aerie.cli import app
from aerie.errors import Busy, Failed
from aerie.store.connection import connected
from aerie.store.queries.ledger import only_writer

from .conftest import DATASET, decode_without_tokenizer, manifest_of
from .fake_server import answer_ids, reply, sample_of

Run = Callable[..., str]


@pytest.fixture
def run(world, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``./aerie quarantine ...`` on the world's edition, without a terminal; returns what it prints."""
    monkeypatch.setenv("AERIE_DATA_ROOT", str(world.root))
    monkeypatch.setenv("AERIE_CONFIG", str(world.root / "config.yaml"))
    monkeypatch.setattr(quarantine, "decode", decode_without_tokenizer)
    settings = json.loads(world.request().settings.model_dump_json())
    (world.root / "config.yaml").write_text(yaml.safe_dump(settings))

    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["quarantine", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return invoke


def loops(*numbers: int):
    """A server that answers these samples with loops, the first time."""

    def fault(body, before):
        if int(sample_of(body)[1:]) in numbers and not before:
            return reply([*[7, 8, 9] * 40, 903, *range(20, 40), 900], len(body["input_ids"]))
        return None

    return fault


def looped(world, **changes) -> None:
    """Forty samples, two of them quarantined."""
    world.server.fault = loops(11, 22)
    assert manifest_of(world.run(**changes)).counts["quarantined"] == 2


def test_quarantined_samples_are_counted_by_reason_and_listed(world, run):
    looped(world)
    counts = run("list")
    assert "2 samples" in counts and "loop" in counts and DATASET in counts
    rows = run("list", "--rows", "--dataset", DATASET, "--reason", "loop")
    assert "s11" in rows and "s22" in rows and "s12" not in rows
    assert run("list", "--reason", "no_close").strip() == "no such samples"
    with pytest.raises(quarantine.BadInput, match="--reason lop: expected"):
        run("list", "--reason", "lop")


def test_regenerated_samples_are_sent_anew_whatever_the_budget_has_and_both_versions_stay(world, run):
    looped(world, budget_tokens=2000)
    assert world.run(budget_tokens=2000).reused
    assert "pending again: 2" in run("regenerate", "--reason", "loop", "--yes")
    assert {name for name, row in world.ledger().items() if row.state == "quarantined"} == set()
    asked = world.server.seen.copy()
    counts = manifest_of(world.run(budget_tokens=2000)).counts
    assert world.server.seen - asked == {"s11": 1, "s22": 1}, "others were sent too, or these were not"
    assert (counts["quarantined"], counts["stopped_by"]) == (0, "budget")
    versions = {row["attempt"]: row for row in world.log() if row["sample_id"] == "s11"}
    assert sorted(versions) == [1, 2] and versions[2]["output_ids"] == answer_ids("s11")
    row = world.ledger()["s11"]
    assert (row.state, row.attempts) == ("kept", 2)
    assert row.generated_tokens == sum(version["completion_tokens"] for version in versions.values())
    assert counts["generated_tokens"] == sum(row["completion_tokens"] for row in world.log())
    assert world.run(budget_tokens=2000).reused


@pytest.mark.parametrize(
    "lost", ["DELETE FROM samples; DELETE FROM editions", "UPDATE samples SET state = 'quarantined'"]
)
def test_what_was_asked_for_again_is_not_forgotten_with_the_ledger(world, run, lost):
    looped(world)
    run("regenerate", "--dataset", DATASET, "--yes")
    with connected(world.database_url) as connection, connection, connection.cursor() as cursor:
        cursor.execute(f"{lost} WHERE sample_id = 's11'" if "UPDATE" in lost else lost)
    assert manifest_of(world.run()).counts["kept"] == 40
    assert sorted(row["attempt"] for row in world.log() if row["sample_id"] == "s11") == [1, 2]
    assert world.ledger()["s11"].attempts == 2


def test_a_superseded_response_is_no_ones_newest_until_there_is_another(world, run):
    looped(world)
    run("regenerate", "s11", "--yes")
    newest = {response.sample_id for response in latest_responses(world.files.responses)}
    assert len(newest) == 39 and "s11" not in newest
    world.run()
    newest = {response.sample_id: response.attempt for response in latest_responses(world.files.responses)}
    assert newest["s11"] == 2 and newest["s22"] == 1


def test_a_sample_can_be_asked_for_again_and_again(world, run):
    looped(world)
    for attempt in (2, 3):
        run("regenerate", "s22", "--yes")
        world.run()
        assert (world.ledger()["s22"].state, world.ledger()["s22"].attempts) == ("kept", attempt)


def test_without_a_terminal_and_without_yes_nothing_is_changed(world, run):
    looped(world)
    output = run("regenerate", "--reason", "loop")
    assert "2 samples" in output and "nothing was changed" in output
    assert not superseded_file(world.files.responses).exists() and world.counts().quarantined == 2
    with pytest.raises(quarantine.BadInput, match="say which samples"):
        run("regenerate", "--yes")


def test_regeneration_is_refused_while_the_data_set_is_written(world, run):
    looped(world)
    with (
        connected(world.database_url) as connection,
        only_writer(connection, edition="main", dataset=DATASET, run_id="the other run"),
        pytest.raises(Busy, match="being written by run the other run"),
    ):
        run("regenerate", "--reason", "loop", "--yes")
    assert not superseded_file(world.files.responses).exists() and world.counts().quarantined == 2


def test_kept_samples_are_found_by_flag_and_failed_ones_by_their_reason(world, run):
    cut = reply(list(range(1, 257)), 5, finish_reason={"type": "length", "length": 256})
    poisoned = web.Response(status=400, text="bad ids")
    world.server.fault = lambda body, before: {("s9", 0): poisoned, ("s12", 0): cut}.get((sample_of(body), before))
    world.run()
    assert run("list").strip() == "no such samples"
    assert "s12" in run("list", "--rows", "--reason", "truncated_in_reasoning")
    for reason in ("truncated_in_reasoning", "request_poisoned"):
        run("regenerate", "--reason", reason, "--yes")
    counts = manifest_of(world.run()).counts
    assert (counts["kept"], counts["failed"], counts["flagged"]) == (40, 0, 0)


def test_a_canary_that_failed_by_the_servers_fault_passes_when_it_is_generated_again(world, run):
    world.server.fault = loops(0, 1, 2, 3)
    with pytest.raises(Failed, match="stopped by canary"):
        world.run()
    run("regenerate", "--dataset", DATASET, "--yes")
    assert manifest_of(world.run()).counts["kept"] == 40


def test_what_is_asked_for_again_still_heeds_the_cost_ceiling(world, run):
    looped(world, budget_tokens=2000)
    run("regenerate", "--reason", "loop", "--yes")
    asked = world.server.seen.copy()
    world.run(budget_tokens=2000, max_generated_tokens=world.counts().generated_tokens)
    assert world.server.seen == asked


def test_show_lists_every_version_with_its_standing_positions_and_ids(world, run):
    looped(world)
    run("regenerate", "s11", "--yes")
    world.run()
    lines = run("show", "s11").splitlines()
    heads = [line for line in lines if line.startswith("main/")]
    assert [head.split("(")[1].split(":")[0] for head in heads] == [
        "attempt 1, superseded",
        "attempt 2, the one that counts)",
    ]
    assert "7 8 9" in lines[3] and "ids ..." in lines[3] and lines[3].endswith("900")
    whole = run("show", "s11", "--whole").splitlines()
    assert whole[3].split()[2:] == [str(i) for i in [*[7, 8, 9] * 40, 903, *range(20, 40), 900]]
    with pytest.raises(quarantine.BadInput, match="sample s99 of edition main is not among"):
        run("show", "s99")


def test_without_a_store_the_list_is_what_validate_left_on_disk(world, run, monkeypatch):
    monkeypatch.setenv("AERIE_DATABASE_URL", "postgresql://aerie@127.0.0.1:1/aerie")
    with pytest.raises(quarantine.BadInput, match="no verdicts of any data set"):
        run("list")
    with verdict_writer(world.files.verdicts) as verdicts:
        for name, reasons in (("s1", []), ("s2", ["loop"])):
            verdict = "quarantined" if reasons else "kept"
            verdicts.write(VerdictRow(name, verdict, reasons, [], {name: [] for name in reasons}, 5, 99, 50, 40, 0))
    output = run("list", "--rows")
    assert "s2" in output and "s1 " not in output and "from the verdicts of validate" in output

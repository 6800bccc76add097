"""Each stage as a command. Stand-ins take the place of stages' interpreters: what a stage does is tested elsewhere."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from aerie.cli import app
from aerie.errors import BadInput, Busy, Failed, Retryable
from aerie.processes import ProcessIdentity, wait_until_gone
from aerie.settings.machine import PROJECT_ROOT
from aerie.stage_commands import COMMANDS
from aerie.stage_display import shown
from aerie.stages import STAGES
from aerie.store.connection import connected, transaction
from aerie.store.queries.alerts import list_alerts
from aerie.store.queries.manifests import latest_manifests

MANIFEST = {
    "schema": 1, "stage": "merge", "edition": "main", "dataset": None, "fingerprint": "f" * 64, "inputs": [],
    "outputs": [], "counts": {"rows": 12345}, "finished_at": "2026-01-01T00:00:00Z",
}  # fmt: skip
METRIC = {"type": "metric", "time": 1.0, "figures": {"loss": 0.5}}
PROGRESS = {"type": "progress", "time": 1.0, "message": "row 3 of 4 [sic]", "rows": 3, "of_rows": 4}
ALERT = {"type": "alert", "time": 1.0, "reason": "loss", "message": "it rises"}
Answers = Callable[..., Callable[[], list[tuple[str, dict[str, Any]]]]]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Lets every stage's interpreter answer like this; returns what tells the stages that ran, with their requests."""
    monkeypatch.setenv("AERIE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("AERIE_DATABASE_URL", raising=False)

    def prepare(*, status: int = 0, events: tuple[dict[str, Any], ...] = (), seconds: int = 0) -> Any:
        ran = tmp_path / "ran"
        ran.mkdir()
        script = f"""#!{sys.executable}
import json, os, sys, time
from pathlib import Path
stage, paths = sys.argv[4], dict(zip(sys.argv[5::2], sys.argv[6::2]))
request = json.loads(Path(paths["--request"]).read_text())
number = len(os.listdir({str(ran)!r}))
Path({str(ran)!r}, f"{{number}}.json.new").write_text(json.dumps([stage, request, os.getpid()]))
os.rename(f"{ran}/{{number}}.json.new", f"{ran}/{{number}}.json")
if stage != "serve_stop":
    with open(paths["--events"], "a") as events:
        for event in {list(events)!r}:
            print(json.dumps(event), file=events)
    time.sleep({seconds})
    if {status}:
        sys.exit({status})
manifest = {MANIFEST!r} | {{"stage": stage, "edition": request["edition"], "dataset": request["dataset"]}}
answer = {{"stage": stage, "reused": False, "manifest": None if stage == "serve_stop" else manifest}}
Path(paths["--result"]).write_text(json.dumps(answer))
"""
        python = tmp_path / "python"
        python.write_text(script)
        python.chmod(0o755)
        for environment in ("AIRFLOW", "MODEL", "SERVE"):
            monkeypatch.setenv(f"AERIE_{environment}_PYTHON", str(python))
        return lambda: [json.loads(path.read_text())[:2] for path in sorted(ran.glob("*.json"))]

    return prepare


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_every_stage_of_the_pipeline_has_a_command_of_its_own():
    around = {"plan", "serve_start", "serve_stop", "benchmark_drafter"}
    assert {command.stage for command in COMMANDS} == set(STAGES) - around


@pytest.mark.parametrize("command", ["merge", "vocabulary", "forecast", "train", "export"])
def test_a_command_asks_its_stage_what_was_typed_and_prints_what_it_did(command, answers):
    asked = answers()
    done = run(command, "--edition", "mine", "--force", "--preset", "demo")
    assert done.exit_code == 0, done.output
    ((stage, request),) = asked()
    assert (stage, request["edition"], request["force"]) == (command, "mine", True)
    assert request["settings"]["name"] == "demo"
    assert f"{command}: done: rows 12,345" in done.stdout
    assert "nothing is recorded" in done.stderr


def test_an_option_changes_its_field_and_nothing_else(answers):
    asked = answers()
    assert run("train", "--epochs", "7").exit_code == 0
    assert run("vocabulary", "--size", "384", "--coverage", "0.99").exit_code == 0
    (_, train), (_, vocabulary) = asked()
    assert (train["settings"]["training"]["epochs"], vocabulary["settings"]["vocabulary"]["size"]) == (7, 384)
    train["settings"]["training"]["epochs"] = vocabulary["settings"]["training"]["epochs"]
    assert vocabulary["settings"]["vocabulary"]["coverage"] == 0.99
    vocabulary["settings"]["vocabulary"] = train["settings"]["vocabulary"]
    assert train["settings"] == vocabulary["settings"]


def test_a_benchmark_takes_several_loads_and_prompts_of_ones_own(answers, tmp_path, monkeypatch):
    asked = answers()
    monkeypatch.chdir(tmp_path)
    assert run("benchmark", "--concurrency", "1,8,32", "--prompts", "mine.jsonl").exit_code == 0
    settings = asked()[0][1]["settings"]["benchmark"]
    assert (settings["concurrency"], settings["prompts_files"]) == ([1, 8, 32], [str(tmp_path / "mine.jsonl")])


def test_a_capture_is_told_its_back_end_and_its_rank(answers):
    asked = answers()
    assert run("capture", "--backend", "transformers", "--world-size", "4", "--rank", "2").exit_code == 0
    settings = asked()[0][1]["settings"]["hidden_states"]
    assert (settings["backend"], settings["world_size"], settings["rank"]) == ("transformers", 4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("capture", "--rank", "2"), "--rank 2: rank is 2 of world_size 1"),
        (("capture", "--backend", "gguf"), "--backend gguf: backend"),
        (("benchmark", "--concurrency", "1,many"), "--concurrency 1,many: concurrency.1"),
        (("train", "--epochs", "0"), "--epochs 0: epochs: Input should be greater than 0"),
        (("merge", "--preset", "demo", "--config", "x.yaml"), "give one"),
        (("merge", "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("merge", "--edition", "../../etc"), "edition"),
        (("prepare", "--dataset", "A1"), "--dataset A1 is tokenised: ./aerie prepare is for generated"),
    ],
)
def test_what_cannot_be_is_refused_before_a_stage_runs(arguments, message, answers):
    asked = answers()
    refused = run(*arguments).exception
    assert isinstance(refused, BadInput)
    assert message in str(refused)
    assert not asked()


@pytest.mark.parametrize(("status", "kind"), [(1, Failed), (2, BadInput), (75, Retryable), (76, Busy)])
def test_a_stages_exit_code_is_the_commands(status, kind, answers):
    answers(status=status, events=({"type": "error", "time": 1.0, "message": "what a person needs"},))
    failed = run("forecast").exception
    assert type(failed) is kind
    assert str(failed) == "what a person needs"


def test_a_command_for_data_sets_goes_through_them_one_by_one(answers):
    asked = answers()
    assert run("import").exit_code == 0
    assert run("judge", "--dataset", "B1_glaive").exit_code == 0
    assert [(stage, request["dataset"]) for stage, request in asked()] == [
        ("import", "A1"), ("import", "A2"), ("validate", "B1_glaive"),
    ]  # fmt: skip


@pytest.mark.parametrize("status", [0, 1])
def test_the_server_of_a_command_is_let_go_however_it_ends(status, answers):
    asked = answers(status=status)
    assert (run("capture").exit_code == 0) == (status == 0)
    (first, capture), (last, stop) = asked()
    assert (first, last) == ("capture", "serve_stop")
    assert capture["run_id"] == stop["run_id"]  # the name of who holds it


def test_what_a_command_did_is_in_the_store_as_after_its_task(answers, database_url, monkeypatch):
    answers(events=(METRIC, ALERT))
    monkeypatch.setenv("AERIE_DATABASE_URL", database_url)
    done = run("train", "--edition", "mine")
    assert done.exit_code == 0, done.output
    assert "nothing is recorded" not in done.output
    with connected(database_url) as connection:
        (manifest,) = latest_manifests(connection, edition="mine")
        assert (manifest["stage"], manifest["document"]["counts"]) == ("train", {"rows": 12345})
        with transaction(connection) as cursor:
            cursor.execute("SELECT stage, figures FROM interval_metrics")
            assert list(cursor) == [("train", {"loss": 0.5})]
        (alert,) = list_alerts(connection)
        assert (alert["reason"], alert["stage"], alert["edition"]) == ("loss", "train", "mine")


def test_a_store_that_is_set_and_does_not_answer_fails_the_command_before_it_works(answers, monkeypatch):
    asked = answers()
    monkeypatch.setenv("AERIE_DATABASE_URL", "postgresql://aerie@127.0.0.1:1/aerie")
    assert isinstance(run("merge").exception, Retryable)
    assert not asked()


def test_the_result_can_be_had_as_a_document(answers):
    answers(events=(PROGRESS,))
    assert json.loads(run("merge", "--json").stdout)["manifest"]["counts"] == {"rows": 12345}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_ends_its_stage_and_lets_its_server_go(number, code, answers, tmp_path):
    asked = answers(seconds=600)
    command = [sys.executable, "-m", "aerie", "capture"]
    environment = {**os.environ, "AERIE_CONFIG": str(PROJECT_ROOT / "demo" / "config.yaml")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while not asked():  # bounded by the test's own limit
            assert process.poll() is None
        stage = ProcessIdentity.of(json.loads((tmp_path / "ran" / "0.json").read_text())[2])
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == code, said
    assert wait_until_gone(stage, 20)
    assert [name for name, _ in asked()] == ["capture", "serve_stop"]
    if number == signal.SIGINT:
        assert "the same command goes on" in said


def test_a_log_gets_lines_with_their_time_and_a_terminal_a_bar():
    lines, screen = io.StringIO(), io.StringIO()
    for file, terminal in ((lines, False), (screen, True)):
        console = Console(file=file, force_terminal=terminal, width=120, color_system=None, _environ={})
        with shown("train", console) as show:
            for event in (PROGRESS, METRIC, ALERT):
                show(event)
    first, second = lines.getvalue().splitlines()
    assert first.endswith(" train: row 3 of 4 [sic]")
    assert second.endswith(" train: ALERT loss: it rises")
    assert "75%" in screen.getvalue()
    assert "row 3 of 4 [sic]" in screen.getvalue()
    assert "ALERT loss: it rises" in screen.getvalue()

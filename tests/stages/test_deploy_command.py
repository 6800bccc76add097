"""``./aerie deploy``: which drafter is meant, whose it is, and how it is served."""

import json
import os
import shlex
import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aerie.artefacts.drafter_record import write_record
from aerie.cli import app
from aerie.errors import BadInput
from aerie.hidden_states.checkpoint import checkpoint_fingerprint
from aerie.serving import client, configured
from aerie.serving.lease import Lease, read_lease
from aerie.settings.machine import PROJECT_ROOT, python_of, server_folder
from tests.drafters import MEASURED, record

VERIFIER = PROJECT_ROOT / "demo" / "tiny_verifier"
FAKE_KEEPER = PROJECT_ROOT / "tests" / "serving" / "fake_keeper.py"
MODEL = json.loads((VERIFIER / "config.json").read_text())
SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"],
    **{name: MODEL[name] for name in (
        "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    )},
}  # fmt: skip
SERVE = python_of("serve")
CONFIG = (PROJECT_ROOT / "demo" / "config.yaml").read_text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with the demo's configuration and a place for published drafters."""
    (tmp_path / "config.yaml").write_text(
        CONFIG.replace("../.aerie/published", "published").replace("tiny_verifier", str(VERIFIER))
    )
    monkeypatch.setenv("AERIE_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    monkeypatch.setenv("AERIE_SERVE_PYTHON", str(SERVE))
    return tmp_path


def drafter_in(folder: Path, **fields: Any) -> Path:
    """A drafter's folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 1}))
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")  # no tensors
    made = record(**{"verifier": checkpoint_fingerprint(VERIFIER), **fields})
    write_record(folder, made)
    return folder


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["deploy", *arguments])


def served(done: Any) -> dict[str, str]:
    """Flags of the printed command."""
    assert done.exit_code == 0, done.output + str(done.exception)
    words = shlex.split(done.stdout)
    return {flag: value for flag, value in pairwise(words) if flag.startswith("--")}


def test_a_drafter_is_found_by_id_fingerprint_edition_and_folder_the_published_one_first(home):
    first = drafter_in(home / "published" / "main-ffffffffffff")
    other = drafter_in(home / "published" / "other-eeeeeeeeeeee", fingerprint="e" * 64, edition="other")
    exported = drafter_in(home / "data" / "editions" / "new" / "drafter", fingerprint="d" * 64, edition="new")
    drafter_in(home / "data" / "editions" / "main" / "drafter")  # the same drafter, where it was exported
    os.utime(other / "aerie.json", (1, 1))
    for named, folder in (
        ("main-ffffffffffff", first), ("fff", first), ("main", first), ("other", other), ("new", exported),
        (str(exported), exported),
    ):  # fmt: skip
        assert served(run(named, "--print"))["--speculative-draft-model-path"] == str(folder), named


def test_an_edition_is_not_taken_for_a_folder_of_its_name_in_the_working_directory(home, monkeypatch):
    drafter = drafter_in(home / "published" / "demo-ffffffffffff", edition="demo")
    (home / "demo").mkdir()
    mine = drafter_in(home / "mine", fingerprint="9" * 64, edition="other")
    monkeypatch.chdir(home)
    assert served(run("demo", "--print"))["--speculative-draft-model-path"] == str(drafter)
    assert served(run("./mine", "--print"))["--speculative-draft-model-path"] == str(mine)
    for named, said in (("mine", "named by ./mine"), ("published", "its folder, with a slash"), ("./demo", "expected")):
        refused = run(named, "--print").exception
        assert isinstance(refused, BadInput) and said in str(refused)
    monkeypatch.chdir(mine)
    assert served(run(".", "--print"))["--speculative-draft-model-path"] == str(mine)


def test_what_is_no_drafter_or_may_be_two_is_refused_with_those_that_there_are(home):
    drafter_in(home / "published" / "main-ffffffffffff")
    drafter_in(home / "published" / "main-ffff00000000", fingerprint="ffff" + "0" * 60)
    for named, message in (("ffff", "may be"), ("nothing", "main-ffff00000000"), (str(home), "folder of a drafter")):
        refused = run(named, "--print").exception
        assert isinstance(refused, BadInput)
        assert message in str(refused)


def test_a_drafter_of_another_model_is_refused(home):
    drafter_in(home / "published" / "main-ffffffffffff", verifier="b" * 64)
    refused = run("main", "--print").exception
    assert isinstance(refused, BadInput)
    assert "is for Kimi-K2.5 (fingerprint bbbbbbbbbbbb)" in str(refused)


def test_a_drafter_that_was_not_made_here_is_told_by_its_shapes(home):
    folder = drafter_in(home / "elsewhere")
    (folder / "aerie.json").unlink()
    done = run(str(folder), "--print")
    assert "cannot be told but by its shapes" in done.stderr
    assert served(done)["--speculative-num-steps"] == "3"  # the configuration's
    (folder / "config.json").write_text(json.dumps({**SHAPE, "hidden_size": 64}))
    assert "is another model's drafter" in str(run(str(folder), "--print").exception)


def test_a_drafter_published_for_two_servers_is_deployed_from_its_own_folder_and_not_from_vllms(home):
    folder = drafter_in(home / "published" / "main-ffffffffffff")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    assert served(run("main", "--print"))["--speculative-draft-model-path"] == str(folder)
    refused = run(str(folder / "vllm"), "--print").exception
    assert isinstance(refused, BadInput)
    assert "this is speculators' layout, which vLLM serves" in str(refused)


def test_it_is_served_by_eagle3_as_its_benchmark_recommends_unless_another_setting_is_typed(home):
    recommended = {"num_steps": 5, "eagle_topk": 1, "num_draft_tokens": 6}
    drafter_in(home / "published" / "main-ffffffffffff", benchmark={**MEASURED, "recommended": recommended})
    flags = served(run("main", "--print", "--port", "31000"))
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("5", "6")
    assert (flags["--model-path"], flags["--port"]) == (str(VERIFIER), "31000")
    flags = served(run("main", "--print", "--steps", "2"))
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("2", "3")
    assert "a chain" in str(run("main", "--print", "--draft-tokens", "9").exception)


def test_a_drafter_of_which_no_setting_is_recommended_is_served_only_at_one_that_is_typed(home):
    drafter_in(home / "published" / "main-ffffffffffff", benchmark={**MEASURED, "recommended": None})
    for typed in ((), ("--steps", "2"), ("--steps", "2", "--topk", "4")):
        refused = run("main", "--print", *typed).exception
        assert isinstance(refused, BadInput)
        assert "recommends no draft setting" in str(refused) and "--topk" in str(refused)
    flags = served(run("main", "--print", "--steps", "2", "--topk", "1"))
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("2", "3")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["Ctrl-C", "server stop"])
def test_the_server_lives_as_long_as_the_command_or_until_it_is_stopped(end, home, monkeypatch):
    drafter_in(home / "published" / "main-ffffffffffff")
    script = home / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{SERVE}" "{FAKE_KEEPER}" "$@"\n')
    script.chmod(0o755)

    def ensure(settings, plan, *, folder, owner, events):
        fake = plan.model_copy(update={"extra_arguments": ("healthy",)})
        handle = client.ensure_server(fake, folder=folder, owner=owner, python=script, lease_seconds=60.0)
        seen.append(read_lease(folder))
        ready.set()
        return handle

    def end_it() -> None:
        ready.wait()
        if end == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            client.stop(server_folder())

    seen: list[Lease | None] = []
    ready = threading.Event()
    monkeypatch.setattr(configured, "ensure_configured", ensure)
    threading.Thread(target=end_it, daemon=True).start()
    done = run("main")
    assert done.exit_code == (130 if end == "Ctrl-C" else 0), done.output
    assert seen[0] is not None
    assert seen[0].plan.phase == "deploy"
    assert done.stdout.strip() in ("", seen[0].url)  # interrupted just before it is printed
    assert read_lease(server_folder()) is None

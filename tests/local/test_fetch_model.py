"""``./aerie fetch-model`` against a stand-in for the hub: what comes, what goes on, and what is refused."""

import fcntl
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from aerie.errors import BadInput
from aerie.model_commands import fetch_model
from aerie.settings.machine import PROJECT_ROOT, python_of
from tests.local.hub import REPOSITORY, REVISION, Hub, serving

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(tensor: str, size: int = 1024) -> bytes:
    """A safetensors file of one tensor of ``size`` bytes."""
    header = json.dumps({tensor: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "config.json": b'{"model_type": "llama"}',
        INDEX: json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}).encode(),
        FIRST: shard("a"),
        SECOND: shard("b"),
        "original/consolidated.00.pth": b"the same weights again",
    }
    with serving(Hub(files)) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Variables under which the command meets the stand-in, and nothing of this machine's user."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "AERIE_MODELS": str(tmp_path / "models"),
        "PYTHONPATH": str(PROJECT_ROOT / "include"),
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def fetch(environment: dict[str, str]):
    """Run the command in the model environment; returns what it answers."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command(), *arguments], env=environment | variables, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip

    return run


def command() -> list[str]:
    """The command, in the environment that it moves to."""
    return [str(python_of("model")), "-m", "aerie", "fetch-model"]


NAMED = ("--model", REPOSITORY, "--revision", REVISION)


def test_a_checkpoint_comes_whole_without_its_copies_in_other_forms(hub: Hub, fetch, tmp_path: Path) -> None:
    done = fetch(*NAMED)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models" / "Verifier"
    wanted = {name: content for name, content in hub.files.items() if not name.startswith("original/")}
    assert {name: (folder / name).read_bytes() for name in wanted} == wanted
    assert not (folder / "original").exists()
    assert "4 files, 0.0 GB" in done.stderr and "whole" in done.stderr

    hub.downloads.clear()
    again = fetch(*NAMED)
    assert again.returncode == 0, again.stderr
    assert hub.downloads == []


@pytest.mark.slow
def test_a_connection_that_is_cut_goes_on_where_it_stopped(hub: Hub, fetch, tmp_path: Path) -> None:
    hub.files[SECOND] = shard("b", 24 << 20)  # the client writes pieces of 10 MiB
    hub.cut_once.add(SECOND)
    done = fetch(*NAMED)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "Verifier" / SECOND).read_bytes() == hub.files[SECOND]
    ranges = [wanted for name, wanted in hub.downloads if name == SECOND]
    assert ranges == [None, f"bytes={10 << 20}-"]


@pytest.mark.slow
def test_a_download_that_failed_goes_on_with_what_is_missing(hub: Hub, fetch, tmp_path: Path) -> None:
    hub.unavailable.add(SECOND)
    failed = fetch(*NAMED)
    assert failed.returncode == 75, failed.stderr
    assert "503" in failed.stderr and "run the same command again" in failed.stderr

    folder = tmp_path / "models" / "Verifier"
    (folder / INDEX).write_bytes(hub.files[INDEX][:9])  # what a full disk leaves
    hub.unavailable.clear()
    hub.downloads.clear()
    done = fetch(*NAMED)
    assert done.returncode == 0, done.stderr
    assert {SECOND, INDEX} <= set(hub.downloaded())
    assert FIRST not in hub.downloaded()
    assert (folder / INDEX).read_bytes() == hub.files[INDEX]


@pytest.mark.slow
def test_a_download_that_was_killed_goes_on_and_leaves_no_pieces(
    hub: Hub, environment: dict[str, str], fetch, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "Verifier"
    hub.files[SECOND] = shard("b", 24 << 20)
    hub.stalled.add(SECOND)
    with subprocess.Popen([*command(), *NAMED], env=environment, stderr=subprocess.DEVNULL) as killed:
        wait_until(lambda: (folder / FIRST).is_file() and any(piece.stat().st_size for piece in pieces(folder)))
        killed.kill()
    assert pieces(folder)

    hub.stalled.clear()
    hub.downloads.clear()
    done = fetch(*NAMED)
    assert done.returncode == 0, done.stderr
    assert hub.downloaded() == [SECOND]
    assert (folder / SECOND).read_bytes() == hub.files[SECOND]
    assert pieces(folder) == []


def pieces(folder: Path) -> list[Path]:
    """What the hub's client has begun and not finished."""
    return list((folder / ".cache").rglob("*.incomplete"))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def test_a_repository_that_lacks_a_shard_of_its_index_is_not_whole(hub: Hub, fetch) -> None:
    del hub.files[SECOND]
    failed = fetch(*NAMED)
    assert failed.returncode == 1, failed.stderr
    assert f"{SECOND}: missing, with 1 tensors of the index" in failed.stderr


def test_a_gated_repository_says_what_to_do_and_comes_with_a_token(hub: Hub, fetch) -> None:
    hub.token = "hf_allowed"
    refused = fetch(*NAMED)
    assert refused.returncode == 2, refused.stderr
    assert f"{REPOSITORY} is gated: accept its terms at https://huggingface.co/{REPOSITORY}" in refused.stderr
    assert "Traceback" not in refused.stderr

    done = fetch(*NAMED, HF_TOKEN="hf_allowed")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_downloads_into_one_folder_do_not_meet(fetch, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "Verifier"
    folder.mkdir(parents=True)
    with (folder / ".aerie-fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = fetch(*NAMED)
    assert refused.returncode == 2, refused.stderr
    assert f"{folder}: another fetch-model is at work here" in refused.stderr


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (("--model", REPOSITORY, "--revision", "f" * 40), f"{REPOSITORY} has no revision {'f' * 40}"),
        (("--model", "acme/Nothing", "--revision", REVISION), "acme/Nothing: the hub knows no such repository"),
    ],
    ids=["revision", "repository"],
)
@pytest.mark.slow
def test_what_the_hub_has_not_is_said_in_one_line(fetch, named: tuple[str, ...], message: str) -> None:
    refused = fetch(*named)
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"model": REPOSITORY, "revision": "main"}, "'main': expected a commit, 40 hexadecimal digits"),
        ({"model": "Verifier", "revision": REVISION}, "'Verifier' is not a repository: expected owner/name"),
        ({"model": REPOSITORY}, "--model needs --revision"),
        ({"model": REPOSITORY, "revision": REVISION, "preset": "demo"}, "goes without --preset"),
        ({"revision": REVISION}, "--revision and --to are of a --model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(named: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fetch_model(**named)


def test_a_configuration_fetches_its_verifier_at_its_revision(fetch, tmp_path: Path) -> None:
    document = yaml.safe_load((PROJECT_ROOT / "demo" / "config.yaml").read_text())
    document["verifier"].update(huggingface=REPOSITORY, revision=REVISION, path="${AERIE_MODELS}/mine")
    configuration = tmp_path / "config.yaml"
    configuration.write_text(yaml.safe_dump(document))
    done = fetch(AERIE_CONFIG=str(configuration))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "mine" / SECOND).is_file()


def test_the_demo_brings_its_verifier_along_and_the_control_side_hands_over_to_the_model_environment() -> None:
    variables = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include")}
    here = [sys.executable, "-m", "aerie", "fetch-model", "--preset", "demo"]
    done = subprocess.run(here, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "nothing to fetch" in done.stderr

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from aerie.serving.checkpoint_files import INDEX_FILE, verify_checkpoint
from aerie.settings.machine import PROJECT_ROOT

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards with two tensors each, their index and a configuration."""
    weight_map = {}
    for shard in SHARDS:
        tensors = {f"{shard[6:11]}.{name}": np.ones((4, 8), np.float32) for name in "ab"}
        save_file(tensors, tmp_path / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def cut(path: Path, to: int) -> None:
    path.write_bytes(path.read_bytes()[:to])


def test_a_whole_checkpoint_has_no_problem(checkpoint: Path) -> None:
    assert verify_checkpoint(checkpoint) == []
    assert verify_checkpoint(PROJECT_ROOT / "demo" / "tiny_verifier") == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.unlink(), "missing, with 2 tensors of the index"),
        (lambda path: cut(path, -1), "bytes, its header says .*: cut"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "bytes, its header says .*: damaged"),
        (lambda path: cut(path, 30), "30 bytes, cut in its header"),
        (lambda path: cut(path, 5), "5 bytes, cut in its header"),
        (lambda path: cut(path, 0), "0 bytes, cut in its header"),
        (lambda path: path.write_bytes(b"\xff" * 64), "64 bytes, cut in its header, or not a safetensors"),
        (lambda path: path.write_bytes(b"\2\0\0\0\0\0\0\0[]"), "its header cannot be read"),
        (lambda path: path.write_bytes(b"\2\0\0\0\0\0\0\0{]"), "its header cannot be read"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
            "a Git LFS pointer of .* bytes, not the weights",
        ),
        (
            lambda path: save_file({"00002.a": np.ones(2, np.float32)}, path),
            "lacks 1 of 2 tensors that the index puts here, as 00002.b",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"[0,128]", b"[8,128]")),
            "its header leaves a gap, or tensors overlap, at byte 8 ",
        ),
    ],
)
def test_a_shard_that_is_not_whole_is_named(checkpoint: Path, damage, problem: str) -> None:
    path = checkpoint / SHARDS[1]
    damage(path)
    (found,) = verify_checkpoint(checkpoint)
    assert found.startswith(f"{path}: ")
    assert re.search(problem, found), found


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", None, "missing"),
        ("config.json", '{"model_type": ', "not JSON"),
        ("config.json", "[]", "expected a JSON object"),
        (INDEX_FILE, '{"weight_map"', "not JSON"),
        (INDEX_FILE, "{}", "expected 'weight_map'"),
        (INDEX_FILE, '{"weight_map": {}}', "expected 'weight_map'"),
        (INDEX_FILE, '{"weight_map": {"a": "../other.safetensors"}}', "weight_map.a is .*beside the index"),
        (INDEX_FILE, '{"weight_map": {"a": 5}}', "weight_map.a is 5"),
    ],
)
def test_a_description_that_cannot_be_read_is_named(checkpoint: Path, name: str, content: str | None, problem) -> None:
    if content is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_text(content)
    (found,) = verify_checkpoint(checkpoint)
    assert found.startswith(f"{checkpoint / name}: ")
    assert re.search(problem, found), found


def test_shards_without_an_index_may_be_less_than_the_model(checkpoint: Path) -> None:
    (checkpoint / INDEX_FILE).unlink()
    (found,) = verify_checkpoint(checkpoint)
    assert "2 weight files and no model.safetensors.index.json" in found


def test_a_folder_without_weights_and_one_that_is_not_there_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert verify_checkpoint(tmp_path) == [f"{tmp_path}: no weights (*.safetensors)"]
    assert verify_checkpoint(tmp_path / "none") == [f"{tmp_path / 'none'}: there is no such folder"]


def test_a_shard_that_cannot_be_read_is_a_problem_and_no_traceback(checkpoint: Path, monkeypatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    assert verify_checkpoint(checkpoint)[0].endswith(": cannot be read: Permission denied")


def test_every_missing_shard_is_told(checkpoint: Path) -> None:
    for shard in SHARDS:
        (checkpoint / shard).unlink()
    assert [Path(line.partition(": ")[0]).name for line in verify_checkpoint(checkpoint)] == list(SHARDS)

"""The probe's texts: made once in the model environment, kept, and made again where anything they depend on changes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.errors import BadInput
from aerie.serving.probing import LONGEST_PASSAGE_TOKENS, probing_of
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.settings.pipeline import PipelineSettings, load_settings

Settings = Callable[..., PipelineSettings]
OPEN, CLOSE, END = "<think>", "</think>", "<|im_end|>"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo's verifier, to change at will."""
    return Path(shutil.copytree(PROJECT_ROOT / "demo" / "tiny_verifier", tmp_path / "verifier"))


@pytest.fixture
def settings(checkpoint: Path) -> Settings:
    """The demo's configuration for that copy."""

    def make(**verifier: object) -> PipelineSettings:
        demo = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
        changed = demo.verifier.model_copy(update={"path": checkpoint, **verifier})
        return demo.model_copy(update={"verifier": changed})

    return make


@pytest.fixture
def making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the model environment was asked."""
    script, calls = tmp_path / "python", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho >> "{calls}"\nexec "{python_of("model")}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("AERIE_MODEL_PYTHON", str(script))
    return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "probe_texts").iterdir())


def test_texts_are_made_once_in_the_verifiers_own_tokens(
    settings: Settings, tmp_path: Path, making: Callable[[], int]
) -> None:
    folder = tmp_path / "server"
    probing = probing_of(settings(), folder)
    assert probing_of(settings(), folder) == probing
    assert making() == 1
    tokens = probing.texts.tokens
    assert probing.texts.question_ids[-1] == tokens.token_ids[OPEN]
    assert tokens.token_ids[CLOSE] not in probing.texts.question_ids
    assert len(probing.texts.passage_ids) == LONGEST_PASSAGE_TOKENS
    assert probing.sampling["stop_token_ids"] == [tokens.token_ids[END]]
    assert probing.sampling["temperature"] == settings().load_sampling().temperature
    assert [path.suffix for path in kept(folder)] == [".json"]


def test_another_template_tokenizer_or_switch_has_texts_of_its_own(
    settings: Settings, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "server"
    thinking = probing_of(settings(), folder)
    off = probing_of(settings(thinking=False), folder)
    assert off.texts.question_ids[-1] == off.texts.tokens.token_ids[CLOSE]
    template = checkpoint / "chat_template.jinja"
    template.write_text("<|im_user|>" + template.read_text())
    assert probing_of(settings(), folder).texts.question_ids != thinking.texts.question_ids
    assert len(kept(folder)) == 3


def test_what_was_cut_off_half_way_is_made_again(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    probing = probing_of(settings(), folder)
    (path,) = kept(folder)
    whole = path.read_bytes()
    path.unlink()
    (path.parent / f".{path.stem}.123.partial.json").write_bytes(whole[:100])  # as a killed process leaves it
    assert probing_of(settings(), folder) == probing
    for damaged in (whole[:100], whole.replace(b'"passage_ids":[', b'"passage_ids":[-1,')):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=rf"{path}: not the texts of a probe.*remove it"):
            probing_of(settings(), folder)


def test_a_tokenizer_that_needs_code_says_how_to_allow_it(settings: Settings, checkpoint: Path, tmp_path: Path) -> None:
    configuration = checkpoint / "tokenizer_config.json"
    document = json.loads(configuration.read_text())
    auto = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    configuration.write_text(json.dumps(document | auto))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "vocab_size": 163840}))
    with pytest.raises(BadInput, match=r"the tokenizer cannot be loaded"):
        probing_of(settings(profile="kimi_k2"), tmp_path / "server")
    with pytest.raises(BadInput, match="at a pinned revision"):
        probing_of(settings(profile="kimi_k2", trust_remote_code=True), tmp_path / "server")


def test_a_checkpoint_of_another_family_is_refused_before_anything_starts(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"profile qwen3 is for model_type qwen3.*found 'llama'"):
        probing_of(settings(profile="qwen3"), tmp_path / "server")


def test_without_a_model_environment_it_is_said_what_it_is_for(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AERIE_MODEL_PYTHON", os.fspath(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match=r"nowhere: the model environment is not there.*which the server's probe needs"):
        probing_of(settings(), tmp_path / "server")

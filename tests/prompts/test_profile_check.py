import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.errors import BadInput
from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.profile_check import ProfileReport, candidate_profiles, check_profile
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import load_profile, profile_names

from ..checkpoints import SHIPPED, make_checkpoint, special_tokens

INCLUDE = Path(__file__).parents[2] / "include"


def settings(path: Path, name: str, **fields: object) -> VerifierSettings:
    return VerifierSettings.model_validate({"path": path, "profile": name, **fields})


def differing(report: ProfileReport) -> set[str]:
    return {finding.subject for finding in report.findings if finding.outcome == "differs"}


def test_every_profile_that_ships_has_a_checkpoint_here() -> None:
    assert {*SHIPPED, "demo"} == set(profile_names())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_checkpoint_fits_its_own_profile_and_loads(tmp_path: Path, name: str) -> None:
    checkpoint = make_checkpoint(tmp_path, name)
    report = check_profile(settings(checkpoint, name))
    assert [finding for finding in report.findings if finding.outcome == "differs"] == []
    assert report.fits
    tokens = load_verifier(settings(checkpoint, name)).tokens
    assert special_tokens(name).items() <= dict(tokens.token_ids).items()
    assert name in candidate_profiles(checkpoint)


@pytest.mark.parametrize("name", [name for name in SHIPPED if load_profile(name).expected_ids])
def test_a_token_at_another_id_is_refused_with_token_expected_and_found(tmp_path: Path, name: str) -> None:
    token, expected = list(load_profile(name).expected_ids.items())[-1]
    checkpoint = make_checkpoint(tmp_path, name, move={token: 120_000})
    with pytest.raises(BadInput) as error:
        load_verifier(settings(checkpoint, name))
    assert f"{token!r}: expected id {expected}, found 120000" in str(error.value)
    assert "token ids" in differing(check_profile(settings(checkpoint, name)))


@pytest.mark.parametrize(
    ("made", "checked", "subject"),
    [
        # K2-Thinking opens reasoning in the response, K2-Instruct has no think tags at all.
        ("kimi_k2", "kimi_k2_thinking", "token ids"),
        # The prompt of R1 ends with <think> and a line break, that of V3.1 with <think>.
        ("deepseek_r1", "deepseek_v31", "prompt's end"),
        ("deepseek_v31", "deepseek_r1", "prompt's end"),
        # V3-0324 spells its tags with ordinary tokens.
        ("deepseek_v31", "deepseek_v3_0324", "token ids"),
        ("qwen3", "kimi_k25", "model_type"),
        # What else differs is told too.
        ("qwen3", "kimi_k25", "token ids"),
    ],
)
def test_the_profile_of_another_model_is_told_apart(tmp_path: Path, made: str, checked: str, subject: str) -> None:
    report = check_profile(settings(make_checkpoint(tmp_path, made), checked))
    assert not report.fits
    assert subject in differing(report)


def rewrite_template(checkpoint: Path, change: Callable[[str], str]) -> None:
    (checkpoint / "chat_template.jinja").write_text(change((checkpoint / "chat_template.jinja").read_text()))


def test_a_switch_that_the_template_does_not_read_is_told(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "kimi_k25")
    rewrite_template(checkpoint, lambda template: template.replace("thinking", "enable_thinking"))
    report = check_profile(settings(checkpoint, "kimi_k25"))
    assert differing(report) == {"template switch", "prompt's end, thinking off"}


def test_a_server_that_stops_at_other_tokens_is_told(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3", config={"eos_token_id": 151643})
    assert differing(check_profile(settings(checkpoint, "qwen3"))) == {"end of turn"}
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    report = check_profile(settings(checkpoint, "qwen3"))
    assert report.fits
    assert any(f.outcome == "note" and "151643" in f.detail for f in report.findings)


def test_a_vocabulary_of_another_size_is_told(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3", config={"vocab_size": 152064})
    assert differing(check_profile(settings(checkpoint, "qwen3"))) == {"vocabulary size"}


def aerie(*arguments: str) -> tuple[int, str, str]:
    run = subprocess.run(
        [sys.executable, "-m", "aerie", *arguments],
        env={**os.environ, "PYTHONPATH": str(INCLUDE)},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


def test_the_command_says_which_profile_fits_and_exits_accordingly(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "deepseek_v31")
    code, output, _ = aerie("profile", "check", "--model", str(checkpoint), "--json")
    told = json.loads(output)
    assert (code, told["fits"]) == (0, True)
    assert {p["profile"]: p["fits"] for p in told["profiles"]} == {
        "deepseek_r1": False, "deepseek_v31": True, "deepseek_v3_0324": False,
    }  # fmt: skip
    code, output, _ = aerie("profile", "check", "--model", str(checkpoint), "--profile", "deepseek_r1")
    assert code == 1
    assert "differs  prompt's end" in output
    code, _, error = aerie("profile", "check", "--model", str(tmp_path / "nothing"))
    assert code == 2
    assert "nothing" in error

import re

import pytest
import yaml

from aerie.errors import BadInput
from aerie.settings import profile as profile_module
from aerie.settings.profile import (
    PROFILES_FOLDER,
    Profile,
    checkpoint_code_allowed,
    load_profile,
    profile_names,
    server_arguments_of,
)

WANTED = {
    "demo", "kimi_k2", "kimi_k2_thinking", "kimi_k25", "qwen3", "deepseek_r1", "deepseek_v31", "deepseek_v3_0324",
    "gpt_oss", "glm_45", "minimax_m2", "llama_3", "smollm2",
}  # fmt: skip


def test_every_family_ships() -> None:
    assert set(profile_names()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_profile_is_named_after_its_file_and_forces_its_own_tokens_into_the_vocabulary(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    tags = {tag for tag in (profile.reasoning.open, profile.reasoning.close) if isinstance(tag, str)}
    assert {*profile.end_of_turn, *tags} <= set(profile.forced_vocabulary)


@pytest.mark.parametrize("name", sorted(WANTED))
def test_no_id_is_given_to_two_tokens(name: str) -> None:
    profile = load_profile(name)
    ids = [*profile.expected_ids.values(), *profile.optional_ids.values()]
    assert len(ids) == len(set(ids))
    assert all(0 <= token_id < (profile.vocabulary_size or 0) for token_id in ids)


@pytest.mark.parametrize("name", sorted(WANTED))
def test_thinking_is_turned_off_by_a_switch_and_a_closed_block_or_not_at_all(name: str) -> None:
    profile = load_profile(name)
    assert (profile.thinking_switch is None) == (not profile.reasoning.closed_block)
    if profile.thinking_switch is not None:
        assert profile.template_switches[profile.thinking_switch] is True


def test_the_end_of_a_message_of_gpt_oss_does_not_stop_the_server() -> None:
    """Requests name every end of turn as a stop: the analysis would be all that is generated."""
    assert load_profile("gpt_oss").end_of_turn == ("<|return|>", "<|call|>")


def test_an_unknown_profile_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(BadInput, match=r"'qwen4'.*kimi_k25.*qwen3"):
        load_profile("qwen4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning": {"opens_in": "prompt"}}, "expected both, since the family reasons"),
        ({"reasoning": {"opens_in": "never", "open": "<think>"}}, "expected both or neither"),
        ({"tools": {"call_begin": "a", "call_end": "b", "section_begin": "c"}}, "section_begin and tools.section_end"),
        ({"tools": {"call_begin": "a", "call_end": "b", "form": "pairs"}}, "tools.pairs"),
        ({"end_of_turn": []}, "end_of_turn"),
        ({"opens": "prompt"}, "opens"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(tmp_path, monkeypatch, fields, message) -> None:  # type: ignore[no-untyped-def]
    document = yaml.safe_load((PROFILES_FOLDER / "smollm2.yaml").read_text())
    (tmp_path / "smollm2.yaml").write_text(yaml.safe_dump(document | fields))
    monkeypatch.setattr(profile_module, "PROFILES_FOLDER", tmp_path)
    with pytest.raises(BadInput, match=re.escape(message)):
        load_profile("smollm2")


def test_code_of_a_checkpoint_needs_profile_user_and_commit() -> None:
    kimi, qwen = load_profile("kimi_k25"), load_profile("qwen3")
    assert checkpoint_code_allowed(kimi, allowed=True, revision="4f5c1d2e")
    assert not checkpoint_code_allowed(kimi, allowed=False, revision="4f5c1d2e")
    for revision in (None, "main"):
        with pytest.raises(BadInput, match="pinned revision"):
            checkpoint_code_allowed(kimi, allowed=True, revision=revision)
    with pytest.raises(BadInput, match="qwen3"):
        checkpoint_code_allowed(qwen, allowed=True, revision="4f5c1d2e")


def test_a_server_gets_what_its_family_needs_and_nothing_that_it_forbids() -> None:
    shipped = load_profile("qwen3")
    profile: Profile = shipped.model_copy(update={"server_arguments": ("--needed",)})
    assert server_arguments_of(profile, ["--other"]) == ("--other", "--needed")
    for argument in ("--reasoning-parser=qwen3", "--reasoning-parser", "--reasoning"):
        with pytest.raises(BadInput, match="qwen3 forbids --reasoning-parser"):
            server_arguments_of(profile, [argument])

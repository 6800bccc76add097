import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aerie.artefacts.files import sha256_of
from aerie.errors import BadInput
from aerie.prompts.checkpoint import load_verifier
from aerie.prompts.rendering import Renderer
from aerie.settings.pipeline import VerifierSettings


def settings(checkpoint: Path, **fields: object) -> VerifierSettings:
    return VerifierSettings.model_validate({"path": checkpoint, "profile": "demo", **fields})


def test_the_token_file_holds_what_stages_without_a_tokenizer_need(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [1008, 1010]}')

    verifier = load_verifier(settings(checkpoint))

    tokens = verifier.tokens
    ids = verifier.tokenizer.convert_tokens_to_ids
    assert tokens.token_ids["</think>"] == ids("</think>")
    assert set(verifier.tokenizer.get_added_vocab()) <= set(tokens.token_ids)
    assert (tokens.vocabulary_size, tokens.model_type) == (1024, "llama")
    assert set(tokens.eos_ids) >= {1008, 1010}
    assert tokens.tokenizer_sha256 == sha256_of(checkpoint / "tokenizer.json")
    assert tokens.whitespace_ids
    assert all(verifier.tokenizer.decode([i]).isspace() for i in tokens.whitespace_ids)


def test_the_control_texts_are_in_the_same_order_in_every_process(checkpoint: Path) -> None:
    script = (
        "import sys; from aerie.prompts.checkpoint import load_verifier; "
        "from aerie.settings.pipeline import VerifierSettings; "
        "print(load_verifier(VerifierSettings(path=sys.argv[1], profile='demo')).control_texts.pattern)"
    )
    command = [sys.executable, "-c", script, str(checkpoint)]
    patterns = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(patterns) == 1, "prompts would be prepared again in every run"


def test_a_checkpoint_of_another_family_is_refused_though_its_ids_fit(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "kimi_k3", "vocab_size": 1024}')

    with pytest.raises(BadInput, match=r"llama.*kimi_k3"):
        load_verifier(settings(checkpoint))


def test_an_id_that_differs_from_the_profile_is_named_with_both_ids(
    checkpoint: Path, use_profile: Callable[..., None]
) -> None:
    use_profile(expected_ids={"</think>": 163607})

    with pytest.raises(BadInput, match=r"'</think>': expected id 163607, found \d+"):
        load_verifier(settings(checkpoint))


def test_a_boundary_of_several_tokens_is_refused(checkpoint: Path, use_profile: Callable[..., None]) -> None:
    use_profile(reasoning={"opens_in": "prompt", "open": "<think>", "close": "</thought>"})

    with pytest.raises(BadInput, match=r"'</thought>': expected one token"):
        load_verifier(settings(checkpoint))


def test_a_switch_that_the_template_ignores_is_an_error(checkpoint: Path, use_profile: Callable[..., None]) -> None:
    use_profile(template_switches={"enable_thinking": True})

    with pytest.raises(BadInput, match=r"does not read enable_thinking.*thinking"):
        load_verifier(settings(checkpoint))


def test_a_prompt_that_does_not_end_as_the_profile_says_is_an_error_before_any_row(
    checkpoint: Path, use_profile: Callable[..., None]
) -> None:
    """K2-Thinking opens reasoning in the response, K2.5 in the prompt: the wrong profile must not pass."""
    use_profile(generation_prompt_tail=["<|im_assistant|>", "<|im_middle|>"])

    with pytest.raises(BadInput, match="generation_prompt_tail"):
        Renderer(load_verifier(settings(checkpoint)))


def test_thinking_off_ends_the_prompt_with_a_closed_block(checkpoint: Path) -> None:
    verifier = load_verifier(settings(checkpoint, thinking=False))

    ids = Renderer(verifier).render([{"role": "user", "content": "Hi"}], ())

    assert verifier.tokenizer.convert_ids_to_tokens(ids[-2:]) == ["<think>", "</think>"]


def test_thinking_off_is_refused_for_a_family_without_a_switch(
    checkpoint: Path, use_profile: Callable[..., None]
) -> None:
    use_profile(thinking_switch=None)

    with pytest.raises(BadInput, match="thinking_switch"):
        load_verifier(settings(checkpoint, thinking=False))


COMMIT = "4f5c1d2e"


@pytest.mark.parametrize("revision", [COMMIT, None, "main"])
@pytest.mark.parametrize("by_profile", [True, False])
@pytest.mark.parametrize("by_settings", [True, False])
def test_code_of_the_checkpoint_runs_only_if_profile_and_user_allow_it_at_a_commit(
    checkpoint: Path,
    use_profile: Callable[..., None],
    by_profile: bool,
    by_settings: bool,
    revision: str | None,
) -> None:
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Remote", "auto_map": {"AutoTokenizer": ["remote.Remote", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "remote.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(checkpoint / 'ran')!r}).touch()\n"
        "class Remote(PreTrainedTokenizerFast): pass\n"
    )
    use_profile(trust_remote_code=by_profile)

    try:
        load_verifier(settings(checkpoint, trust_remote_code=by_settings, revision=revision))
    except BadInput as error:
        assert "tokenizer" in str(error)

    assert (checkpoint / "ran").exists() == (by_profile and by_settings and revision == COMMIT)


def test_refusal_of_a_checkpoint_that_needs_code_says_what_would_allow_it(
    checkpoint: Path, use_profile: Callable[..., None]
) -> None:
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Remote", "auto_map": {"AutoTokenizer": ["remote.Remote", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tiktoken.model").touch()
    use_profile(trust_remote_code=True)

    with pytest.raises(BadInput, match=r"trust_remote_code: true.*verifier\.revision"):
        load_verifier(settings(checkpoint))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_folder_that_is_no_checkpoint_is_named(checkpoint: Path, missing: str) -> None:
    (checkpoint / missing).unlink()

    with pytest.raises(BadInput, match=str(checkpoint)):
        load_verifier(settings(checkpoint))

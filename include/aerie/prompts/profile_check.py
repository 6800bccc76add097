"""Everything in which a checkpoint fits a profile, or does not: ``aerie profile check``.

Loading a verifier stops at what is wrong; this goes on and tells all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aerie.errors import BadInput
from aerie.prompts.checkpoint import (
    eos_ids_of,
    load_tokenizer,
    prompt_tail,
    read_json,
    resolve_names,
    variables_read,
    vocabulary_size_of,
)
from aerie.prompts.rendering import TEMPLATE_ERRORS
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import Profile, load_profile, profile_names

Outcome = Literal["fits", "differs", "note"]
SHOWN_IDS = 8
QUESTION = ({"role": "user", "content": "Hello."},)


@dataclass(frozen=True)
class Finding:
    """One thing that was compared; a ``note`` is worth knowing and no fault."""

    subject: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class ProfileReport:
    """What was found for one profile."""

    profile: str
    findings: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return all(finding.outcome != "differs" for finding in self.findings)


def check_profile(settings: VerifierSettings) -> ProfileReport:
    """Compare the checkpoint in ``settings.path`` with ``settings.profile``.

    Raises:
        BadInput: there is no such profile, the folder is no checkpoint, or its tokenizer cannot be loaded.
    """
    profile = settings.load_profile()
    config = read_json(settings.path / "config.json")
    findings = [_model_type(profile, config)]
    try:
        findings += _of_tokenizer(settings, profile, config)
    except BadInput as error:
        if findings[0].outcome == "fits":
            raise
        # Another family's tokenizer need not even load here.
        findings.append(Finding("tokenizer", "differs", str(error)))
    return ProfileReport(profile.name, tuple(findings))


def candidate_profiles(checkpoint: Path) -> list[str]:
    """Names of the profiles whose ``model_types`` hold the checkpoint's.

    Raises:
        BadInput: the folder is no checkpoint.
    """
    model_type = read_json(checkpoint / "config.json").get("model_type")
    return [name for name in profile_names() if model_type in load_profile(name).model_types]


def _model_type(profile: Profile, config: dict[str, Any]) -> Finding:
    found = config.get("model_type")
    expected = " or ".join(profile.model_types)
    if found in profile.model_types:
        return Finding("model_type", "fits", str(found))
    return Finding("model_type", "differs", f"expected {expected}, found {found!r}: ids may mean other tokens there")


def _of_tokenizer(settings: VerifierSettings, profile: Profile, config: dict[str, Any]) -> Iterator[Finding]:
    tokenizer = load_tokenizer(settings, profile)
    token_ids, text_ids, wrong = resolve_names(tokenizer, profile)
    yield from (Finding("token ids", "differs", line) for line in wrong)
    if not wrong:
        yield Finding("token ids", "fits", f"{len(set(profile.special_tokens()))} special tokens")
    yield from _texts(tokenizer, profile, text_ids)
    yield _vocabulary_size(settings.path, profile, config, token_ids)
    yield from _end_of_turn(tokenizer, settings.path, profile, config, token_ids)
    yield from _template(tokenizer, profile, token_ids, text_ids)


def _texts(tokenizer: Any, profile: Profile, text_ids: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    for text, expected in profile.text_ids.items():
        found = text_ids.get(text, ())
        outcome: Outcome = "fits" if found == expected else "differs"
        yield Finding("text ids", outcome, f"{text!r}: expected {list(expected)}, found {list(found)}")
    for token_id in profile.whitespace_ids:
        text = tokenizer.decode([token_id])
        yield Finding("white space", "fits" if text.isspace() else "differs", f"id {token_id} is {text!r}")


def _vocabulary_size(path: Path, profile: Profile, config: dict[str, Any], token_ids: dict[str, int]) -> Finding:
    found = vocabulary_size_of(config, path)
    outside = {token: i for token, i in token_ids.items() if i >= found}
    if outside:
        return Finding("vocabulary size", "differs", f"{found}, but the tokenizer has {outside}")
    if profile.vocabulary_size not in (None, found):
        return Finding("vocabulary size", "differs", f"expected {profile.vocabulary_size}, found {found}")
    return Finding("vocabulary size", "fits", str(found))


def _end_of_turn(
    tokenizer: Any, path: Path, profile: Profile, config: dict[str, Any], token_ids: dict[str, int]
) -> Iterator[Finding]:
    """The profile's ends beside those at which a server stops by itself."""
    stops = set(eos_ids_of(tokenizer, config, path))
    ends = {token_ids[token]: token for token in profile.end_of_turn if token in token_ids}
    if not stops & set(ends):
        found = ", ".join(map(str, sorted(stops))) or "none"
        yield Finding("end of turn", "differs", f"none of {', '.join(profile.end_of_turn)} is an eos id ({found})")
        return
    yield Finding("end of turn", "fits", ", ".join(f"{ends[i]} {i}" for i in sorted(stops & set(ends))))
    for token_id in sorted(set(ends) - stops):
        yield Finding("end of turn", "note", f"{ends[token_id]} {token_id} is no eos id; requests name it as a stop")
    for token_id in sorted(stops - set(ends)):
        token = tokenizer.convert_ids_to_tokens(token_id)
        yield Finding("end of turn", "note", f"the server also stops at {token} {token_id}: such rows are quarantined")


def _template(
    tokenizer: Any, profile: Profile, token_ids: dict[str, int], text_ids: dict[str, tuple[int, ...]]
) -> Iterator[Finding]:
    read = variables_read(tokenizer.get_chat_template())
    switches = dict.fromkeys((*profile.template_switches, *filter(None, [profile.thinking_switch])))
    for switch in switches:
        detail = switch if switch in read else f"{switch} is not read; the template reads {', '.join(sorted(read))}"
        yield Finding("template switch", "fits" if switch in read else "differs", detail)
    yield _prompt_end(tokenizer, profile, token_ids, text_ids, thinking=True)
    if profile.thinking_switch is not None:
        yield _prompt_end(tokenizer, profile, token_ids, text_ids, thinking=False)


def _prompt_end(
    tokenizer: Any,
    profile: Profile,
    token_ids: dict[str, int],
    text_ids: dict[str, tuple[int, ...]],
    *,
    thinking: bool,
) -> Finding:
    subject = "prompt's end" if thinking else "prompt's end, thinking off"
    switches = dict(profile.template_switches)
    if not thinking:
        switches[str(profile.thinking_switch)] = False
    try:
        tail = prompt_tail(profile, token_ids, text_ids, thinking=thinking)
        prompt = tokenizer.apply_chat_template(list(QUESTION), add_generation_prompt=True, tokenize=False, **switches)
    except KeyError as token:
        return Finding(subject, "differs", f"the tokenizer has no {token}")
    except TEMPLATE_ERRORS as error:
        return Finding(subject, "differs", f"the template rejects a question: {type(error).__name__}: {error}")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    found = tokenizer.convert_ids_to_tokens(ids[-max(len(tail), 1) :])
    if tuple(ids[len(ids) - len(tail) :]) == tail:
        return Finding(subject, "fits", f"{found}" if tail else f"{found}, and the profile expects nothing")
    wanted = f"{list(tail)} ({tokenizer.convert_ids_to_tokens(list(tail))})"
    return Finding(subject, "differs", f"expected {wanted}, found {ids[-SHOWN_IDS:]} ({found})")

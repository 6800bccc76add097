"""The verifier's tokenizer and template, checked against the profile before anything is rendered with them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aerie.artefacts.files import sha256_of
from aerie.artefacts.verifier_tokens import VerifierTokens
from aerie.errors import BadInput
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.profile import Profile, Spelled, checkpoint_code_allowed

VOCABULARY_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Tags that transformers adds to Jinja; what stands between them is an ordinary part of the template.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True)
class Verifier:
    """The verifier as the prompts stage uses it.

    ``switches`` are the template variables passed with every prompt. ``tail`` are the ids that every prompt must end
    with, empty where the profile expects nothing. ``control_texts`` are the texts that the tokenizer would turn into
    control tokens: no message may hold one. ``template`` is the chat template's source.
    """

    tokenizer: Any
    profile: Profile
    switches: Mapping[str, Any]
    tail: tuple[int, ...]
    control_texts: re.Pattern[str]
    tokens: VerifierTokens
    template: str


def load_verifier(settings: VerifierSettings) -> Verifier:
    """Load the checkpoint's tokenizer and check it against the profile.

    Remote code runs only where both the profile and the settings allow it.

    Raises:
        BadInput: the checkpoint is of another family, a token is missing, is several tokens or has another id than the
            profile expects, or the template does not read one of the profile's switches.
    """
    profile = settings.load_profile()
    config = read_json(settings.path / "config.json")
    model_type = config.get("model_type")
    if model_type not in profile.model_types:
        raise BadInput(
            f"{settings.path}: profile {profile.name} is for model_type {' or '.join(profile.model_types)}, found "
            f"{model_type!r}: its token ids may mean other tokens there; choose the family's own profile"
        )
    tokenizer = load_tokenizer(settings, profile)
    token_ids, text_ids, wrong = resolve_names(tokenizer, profile)
    if wrong:
        raise BadInput(f"{settings.path}: its tokenizer does not fit profile {profile.name}: {'; '.join(wrong)}")
    vocabulary_size = vocabulary_size_of(config, settings.path)
    outside = {token: i for token, i in token_ids.items() if i >= vocabulary_size}
    if outside:
        raise BadInput(f"{settings.path}: vocabulary of {vocabulary_size}, but the tokenizer has {outside}")
    template = tokenizer.get_chat_template()
    return Verifier(
        tokenizer=tokenizer,
        profile=profile,
        switches=_switches(settings, profile, template),
        tail=prompt_tail(profile, token_ids, text_ids, thinking=settings.thinking),
        control_texts=_control_texts(tokenizer, profile),
        tokens=VerifierTokens(
            token_ids=token_ids,
            vocabulary_size=vocabulary_size,
            eos_ids=eos_ids_of(tokenizer, config, settings.path),
            tokenizer_sha256=tokenizer_sha256(settings.path),
            model_type=model_type,
            whitespace_ids=_whitespace_ids(tokenizer),
            text_ids=text_ids,
        ),
        template=template,
    )


def tokenizer_sha256(checkpoint: Path) -> str:
    """SHA-256 of the checkpoint's vocabulary file, as ``sha256sum`` prints it.

    Raises:
        BadInput: the checkpoint has none.
    """
    for name in VOCABULARY_FILES:
        if (checkpoint / name).is_file():
            return sha256_of(checkpoint / name)
    raise BadInput(f"{checkpoint}: expected one of {', '.join(VOCABULARY_FILES)}, found none: not a checkpoint folder")


def read_json(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON file."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror} (the verifier's 'path' is a checkpoint)") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadInput(f"{path}: expected an object, found {type(document).__name__}")
    return document


def load_tokenizer(settings: VerifierSettings, profile: Profile) -> Any:
    """The checkpoint's tokenizer, its chat template included.

    Its own code runs only where profile and settings allow it.

    Raises:
        BadInput: it cannot be loaded without that, or has no chat template.
    """
    trusted = checkpoint_code_allowed(profile, allowed=settings.trust_remote_code, revision=settings.revision)
    try:
        tokenizer = _read_tokenizer(settings.path, trusted=trusted)
    except (OSError, ValueError, ImportError) as error:
        hint = ""
        if profile.trust_remote_code and not trusted:
            hint = (
                f"; the family {profile.name} needs verifier.trust_remote_code: true, which runs code of the "
                "checkpoint, and verifier.revision, the commit of that code"
            )
        raise BadInput(f"{settings.path}: the tokenizer cannot be loaded: {error}{hint}") from error
    if not tokenizer.chat_template:
        raise BadInput(f"{settings.path}: the tokenizer has no chat template: prompts cannot be rendered")
    return tokenizer


def _read_tokenizer(path: Path, *, trusted: bool) -> Any:
    """The tokenizer, of the class that its configuration names.

    ``AutoTokenizer`` would choose that class too, but importing it costs three seconds more.
    """
    configuration = path / "tokenizer_config.json"
    named = read_json(configuration) if configuration.is_file() else {}
    if named.get("tokenizer_class") in GENERIC_TOKENIZERS and "auto_map" not in named:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trusted, local_files_only=True)


def resolve_names(tokenizer: Any, profile: Profile) -> tuple[dict[str, int], dict[str, tuple[int, ...]], list[str]]:
    """What the tokenizer says of the profile's names.

    Returns:
        Ids of all added tokens and of the special tokens that the profile names; ids of the texts that it names; and a
        line for each name that does not fit: token, expected and found.
    """
    added = tokenizer.get_added_vocab()
    token_ids, text_ids, wrong = dict(added), dict[str, tuple[int, ...]](), list[str]()
    expected_ids = {**profile.expected_ids, **profile.optional_ids}
    optional = [t for t in (*profile.optional_ids, *profile.response_tokens_forbidden) if _is_token(tokenizer, t)]
    for token in dict.fromkeys((*profile.special_tokens(), *optional)):
        ids = tokenizer.encode(token, add_special_tokens=False)
        expected = expected_ids.get(token)
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            wrong.append(f"{token!r}: expected one token, found {ids} ({tokenizer.convert_ids_to_tokens(ids)})")
        elif expected is not None and ids[0] != expected:
            wrong.append(f"{token!r}: expected id {expected}, found {ids[0]}")
        else:
            token_ids[token] = ids[0]
    for text in dict.fromkeys(profile.pieces()):
        if text not in added:
            text_ids[text] = tuple(tokenizer.encode(text, add_special_tokens=False))
    for tag in (profile.reasoning.open, profile.reasoning.close):
        for text in tag.texts if isinstance(tag, Spelled) else ():
            if text in added:
                wrong.append(f"{text!r}: expected a text of ordinary tokens, found the special token {added[text]}")
    return token_ids, text_ids, wrong


def _is_token(tokenizer: Any, token: str) -> bool:
    token_id = tokenizer.convert_tokens_to_ids(token)
    return token_id is not None and token_id != tokenizer.unk_token_id


def prompt_tail(
    profile: Profile, token_ids: Mapping[str, int], text_ids: Mapping[str, tuple[int, ...]], *, thinking: bool
) -> tuple[int, ...]:
    """Ids that a rendered prompt must end with; none where the profile expects nothing."""
    pieces = profile.generation_prompt_tail if thinking else profile.reasoning.closed_block
    return tuple(i for piece in pieces for i in ((token_ids[piece],) if piece in token_ids else text_ids[piece]))


def vocabulary_size_of(config: Mapping[str, Any], path: Path) -> int:
    """Rows of the model's embedding."""
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise BadInput(f"{path / 'config.json'}: expected vocab_size (there or in text_config), found {size!r}")
    return size


def eos_ids_of(tokenizer: Any, config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Every id at which a server ends a response: those of both configurations and the tokenizer's."""
    generation = path / "generation_config.json"
    found = [config.get("eos_token_id"), config.get("text_config", {}).get("eos_token_id"), tokenizer.eos_token_id]
    if generation.exists():
        found.append(read_json(generation).get("eos_token_id"))
    ids = {i for value in found for i in (value if isinstance(value, list) else [value]) if i is not None}
    return tuple(sorted(ids))


def _whitespace_ids(tokenizer: Any) -> tuple[int, ...]:
    # By the vocabulary, not by its length: some have gaps.
    return tuple(i for i in sorted(tokenizer.get_vocab().values()) if tokenizer.decode([i]).isspace())


def _switches(settings: VerifierSettings, profile: Profile, template: str) -> Mapping[str, Any]:
    switches = dict(profile.template_switches)
    if not settings.thinking and profile.reasoning.opens_in != "never":
        if profile.thinking_switch is None:
            raise BadInput(f"verifier.thinking is false, but profile {profile.name} has no thinking_switch")
        switches[profile.thinking_switch] = False
    # Jinja takes any variable and says nothing: `enable_thinking` given to Kimi does nothing at all.
    read = variables_read(template)
    unread = sorted(set(switches) - read)
    if unread:
        raise BadInput(
            f"{settings.path}: the chat template does not read {', '.join(unread)} (template_switches of profile "
            f"{profile.name}), so that it would have no effect; the template reads {', '.join(sorted(read))}"
        )
    return switches


def variables_read(template: str) -> set[str]:
    """Variables that a chat template reads and does not set itself."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))


def _control_texts(tokenizer: Any, profile: Profile) -> re.Pattern[str]:
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    # A response may be allowed an ordinary token: only added tokens are control.
    named = {*profile.special_tokens(), *profile.pieces()} & set(tokenizer.get_added_vocab())
    # Longest first, and the same in every process: the pattern is a part of the prompts' fingerprint.
    return re.compile("|".join(map(re.escape, sorted(special | named, key=lambda text: (-len(text), text)))))

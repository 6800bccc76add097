"""What we know of a model family: tokens, template switches, where reasoning opens, how tool calls look.

Profiles are data (``profiles/*.yaml``). Token ids are resolved from the checkpoint's own tokenizer at run time
and compared with ``expected_ids``: a difference is an error that names both.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aerie.errors import BadInput
from aerie.settings.yaml_files import read_mapping, validate

COMMIT = re.compile(r"[0-9a-f]{7,64}")
PROFILES_FOLDER = Path(__file__).parent / "profiles"


class Frozen(BaseModel):
    """Base of every settings model: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Spelled(Frozen):
    """A tag that is no token of its own: the texts by which it is written, each a sequence of ordinary tokens.

    Several, where what follows grows together with the tag's last token (DeepSeek-V3-0324: ``>`` and a line break are
    one token). Their ids come from the verifier's tokenizer, or from the profile's ``text_ids``.
    """

    texts: tuple[str, ...] = Field(min_length=1)


class Reasoning(Frozen):
    """Where reasoning opens and closes.

    ``opens_in`` is ``prompt`` where the generation prompt ends with the open tag (Kimi-K2.5), ``response`` where the
    model writes it (Qwen3), ``never`` for a model that does not reason by itself; with tags, such a model reasons only
    when the prompt or the response opens it. ``open`` and ``close`` are one special token each, or ``Spelled``;
    both None for a family with ``channels``. ``closed_by_tools`` marks a family that may go straight from its reasoning
    to its tool calls without the close tag (Kimi). ``closed_block`` is what a prompt ends with when thinking is off,
    in pieces as ``generation_prompt_tail``; empty where thinking cannot be turned off. ``white_space_before_open``
    allows white space before a tag that the model writes (GLM).
    """

    opens_in: Literal["prompt", "response", "never"]
    open: str | Spelled | None = None
    close: str | Spelled | None = None
    closed_by_tools: bool = False
    closed_block: tuple[str, ...] = ()
    white_space_before_open: bool = False


class ArgumentPairs(Frozen):
    """Tokens around the name and the value of one argument (GLM)."""

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str


class ToolGrammar(Frozen):
    """Special tokens of tool calls, and how the text between them reads.

    With a section: ``section_begin (call_begin ID argument_begin ARGUMENTS call_end)+ section_end``. Without: each call
    stands for itself, among the answer's text. Without ``argument_begin`` a call is one body, or a name with ``pairs``.

    ``form`` says how a call is read: ``json``, an id that matches ``id_pattern``, and arguments as JSON (Kimi,
    DeepSeek-V3.1); ``fenced_json``, the arguments are a name and a fenced block of JSON (DeepSeek-R1 and V3);
    ``named_json``, the body is ``{"name": ..., "arguments": {...}}`` (Qwen3); ``pairs`` (GLM); ``invoke``, one or more
    ``<invoke name="...">`` elements as text (MiniMax). ``id_pattern`` has a group ``name`` where the id holds it.
    """

    section_begin: str | None = None
    section_end: str | None = None
    call_begin: str
    argument_begin: str | None = None
    call_end: str
    pairs: ArgumentPairs | None = None
    form: Literal["json", "fenced_json", "named_json", "pairs", "invoke"] = "json"
    id_pattern: str = r"functions\.(?P<name>[\w.-]+):(?P<index>\d+)"


class Channels(Frozen):
    """A response as messages with channels (gpt-oss, OpenAI's harmony format).

    Each is ``[start ROLE] channel NAME [to=RECIPIENT] [constrain TYPE] message TEXT`` and an end: ``message_end``
    after reasoning, preambles and history, ``call`` after a message with a recipient, ``answer_end`` after the answer.
    Tokens are one special token each; ``role`` and the names of the channels are ordinary text.
    """

    start: str
    channel: str
    message: str
    constrain: str
    message_end: str
    call: str
    answer_end: str
    role: str
    reasoning: str
    preamble: str
    answer: str
    id_pattern: str


class Sampling(Frozen):
    """Sampling parameters; every one is sent with every request."""

    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


class Profile(Frozen):
    """A model family.

    Pieces (``generation_prompt_tail``, ``closed_block``) are each one special token or a text of ordinary tokens.

    ``model_types`` guards against a checkpoint of another family whose ids happen to fit. ``expected_ids`` are special
    tokens that the checkpoint's tokenizer must have at these ids, ``optional_ids`` those that some of the family's
    revisions lack. ``vocabulary_size``, ``text_ids`` (of texts that the profile names) and ``whitespace_ids`` are for
    files of responses that are judged where no checkpoint is at hand; the checkpoint's tokenizer has the last word.
    ``end_of_turn`` are the tokens at which a response ends, each of which stops the server. ``response_tokens_allowed``
    are special tokens that a response may hold, ``response_tokens_forbidden`` others that it may not, where the
    tokenizer has them; every special token without a role is forbidden unless allowed. ``generation_prompt_tail`` is
    what a rendered prompt must end with when thinking is on. ``template_switches`` are passed to the template with
    every prompt; ``thinking_switch`` is the one that turns thinking off, None for a family that cannot.
    ``forced_vocabulary`` are tokens that the draft vocabulary must hold however rare they are. ``module_prefix`` is how
    the checkpoint's decoder is called inside the server (``model`` or ``language_model.model``). ``capture_layers`` are
    residual streams entering those layers; None takes speculators' default. ``server_arguments`` and
    ``server_arguments_forbidden`` are flags that the family's server needs, and must not have. ``trust_remote_code``
    says that the tokenizer is code of the checkpoint, which runs only where the user allows it too. ``model`` is the
    bundled configuration (``models/``) to plan with where no checkpoint is at hand.
    """

    name: str
    model: str | None = None
    model_types: tuple[str, ...] = Field(min_length=1)
    expected_ids: Mapping[str, int] = {}
    optional_ids: Mapping[str, int] = {}
    text_ids: Mapping[str, tuple[int, ...]] = {}
    vocabulary_size: int | None = Field(default=None, gt=0)
    whitespace_ids: tuple[int, ...] = ()
    end_of_turn: tuple[str, ...] = Field(min_length=1)
    reasoning: Reasoning
    tools: ToolGrammar | None = None
    channels: Channels | None = None
    response_tokens_allowed: tuple[str, ...] = ()
    response_tokens_forbidden: tuple[str, ...] = ()
    template_switches: Mapping[str, Any] = {}
    thinking_switch: str | None = None
    generation_prompt_tail: tuple[str, ...] = ()
    sampling: Sampling
    forced_vocabulary: tuple[str, ...] = ()
    module_prefix: str = "model"
    capture_layers: tuple[int, ...] | None = None
    server_arguments: tuple[str, ...] = ()
    server_arguments_forbidden: tuple[str, ...] = ()
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _whole(self) -> "Profile":
        """A family that reasons has its tags, and a tool grammar its pairs of tokens."""
        reasoning, tools = self.reasoning, self.tools
        if self.channels is None and reasoning.opens_in != "never" and not (reasoning.open and reasoning.close):
            raise ValueError("reasoning.open and reasoning.close: expected both, since the family reasons")
        if (reasoning.open is None) != (reasoning.close is None):
            raise ValueError("reasoning.open and reasoning.close: expected both or neither")
        if tools and (tools.section_begin is None) != (tools.section_end is None):
            raise ValueError("tools.section_begin and tools.section_end: expected both or neither")
        if tools and (tools.form == "pairs") != (tools.pairs is not None):
            raise ValueError("tools.pairs: expected where tools.form is pairs, and nowhere else")
        if self.channels and (tools or reasoning.open):
            raise ValueError("channels: they take the place of tools and of reasoning's tags")
        return self

    def special_tokens(self) -> Iterator[str]:
        """Names of the tokens that must each be one id, some of them more than once."""
        yield from self.expected_ids
        yield from self.end_of_turn
        yield from (tag for tag in (self.reasoning.open, self.reasoning.close) if isinstance(tag, str))
        if self.tools is not None:
            yield from _tokens_of(self.tools)
            yield from _tokens_of(self.tools.pairs)
        if self.channels is not None:
            channels = self.channels
            yield from (channels.start, channels.channel, channels.message, channels.constrain)
            yield from (channels.message_end, channels.call, channels.answer_end)
        yield from self.response_tokens_allowed
        yield from self.forced_vocabulary

    def pieces(self) -> Iterator[str]:
        """Names of what is one special token or a text of ordinary ones, some of them more than once."""
        yield from self.text_ids
        yield from self.generation_prompt_tail
        yield from self.reasoning.closed_block
        for tag in (self.reasoning.open, self.reasoning.close):
            if isinstance(tag, Spelled):
                yield from tag.texts
        if self.channels is not None:
            yield from (self.channels.role, self.channels.reasoning, self.channels.preamble, self.channels.answer)


GRAMMAR_FIELDS = frozenset(
    {
        "name", "expected_ids", "optional_ids", "text_ids", "whitespace_ids", "end_of_turn", "reasoning",
        "tools", "channels", "response_tokens_allowed", "response_tokens_forbidden", "generation_prompt_tail",
    }
)  # fmt: skip
"""Fields of a profile on which verdicts depend."""


def _tokens_of(group: ToolGrammar | ArgumentPairs | None) -> Iterator[str]:
    values = group.model_dump(exclude={"form", "id_pattern", "pairs"}).values() if group else ()
    return (token for token in values if token is not None)


def checkpoint_code_allowed(profile: Profile, *, allowed: bool, revision: str | None) -> bool:
    """Whether code that comes with a checkpoint may run: the profile asks for it, and the user allows it.

    Args:
        profile: the checkpoint's family.
        allowed: the user's word (``verifier.trust_remote_code``).
        revision: the checkpoint's revision; code is allowed at a commit, never at whatever a branch points to.

    Raises:
        BadInput: the user allows what the profile does not ask for, or without a commit.
    """
    if not allowed:
        return False
    if not profile.trust_remote_code:
        raise BadInput(
            f"verifier.trust_remote_code is true, but the tokenizer of {profile.name}'s family needs no code of the "
            "checkpoint: leave it out"
        )
    if revision is None or not COMMIT.fullmatch(revision):
        raise BadInput(
            f"verifier.trust_remote_code is true with revision {revision!r}: code of a checkpoint runs only at a "
            "pinned revision; set verifier.revision to the commit (hexadecimal) whose tokenizer code you have read"
        )
    return True


def server_arguments_of(profile: Profile, extra: Sequence[str]) -> tuple[str, ...]:
    """The server's further arguments: those of the user, and those that the family needs.

    Raises:
        BadInput: the user gives one that the family must not have.
    """
    for argument in extra:
        flag = argument.partition("=")[0]
        # The server's parser takes prefixes of a flag too.
        banned = [
            name for name in profile.server_arguments_forbidden if flag.startswith("--") and name.startswith(flag)
        ]
        if banned:
            raise BadInput(f"serving.extra_arguments has {argument!r}: profile {profile.name} forbids {banned[0]}")
    return (*extra, *(argument for argument in profile.server_arguments if argument not in extra))


def profile_names() -> list[str]:
    """Names of the profiles that ship with Aerie."""
    return sorted(path.stem for path in PROFILES_FOLDER.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Load a profile that ships with Aerie.

    Raises:
        BadInput: no such profile, or its file is wrong.
    """
    path = PROFILES_FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise BadInput(f"no profile named {name!r}: expected one of {', '.join(profile_names())}")
    return validate(Profile, read_mapping(path), where=path)

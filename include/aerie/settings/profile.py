"""What we know of a model family: tokens, template switches, where reasoning opens, how tool calls look.

Profiles are data (``profiles/*.yaml``). Token ids are resolved from the checkpoint's own tokenizer at run time
and compared with ``expected_ids``: a difference is an error that names both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from aerie.errors import BadInput
from aerie.settings.yaml_files import read_mapping, validate

PROFILES_FOLDER = Path(__file__).parent / "profiles"


class Frozen(BaseModel):
    """Base of every settings model: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Reasoning(Frozen):
    """Where reasoning opens and closes.

    ``opens_in`` is ``prompt`` where the generation prompt ends with the open tag (Kimi-K2.5), ``response`` where the
    model emits it (Qwen3), ``never`` for a model that does not reason. ``closed_by_tools`` marks a family that may go
    straight from its reasoning to the tool section without the close tag (Kimi).
    """

    opens_in: Literal["prompt", "response", "never"]
    open: str | None = None
    close: str | None = None
    closed_by_tools: bool = False


class ToolGrammar(Frozen):
    """Tokens of a tool-call section and the form of a call's id."""

    section_begin: str
    section_end: str
    call_begin: str
    argument_begin: str
    call_end: str
    id_pattern: str = r"functions\.(?P<name>[\w.-]+):(?P<index>\d+)"


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

    ``model_types`` guards against a checkpoint of another family whose ids happen to fit. ``vocabulary_size`` is what
    files of responses are judged against where no checkpoint is at hand. ``generation_prompt_tail`` is
    what a rendered prompt must end with when thinking is on. ``thinking_switch`` is the template variable that turns
    thinking off, None for a family that cannot. ``forced_vocabulary`` are tokens that the draft vocabulary
    must hold however rare they are. ``module_prefix`` is how the checkpoint's decoder is called inside the server
    (``model`` or ``language_model.model``). ``capture_layers`` are residual streams entering those layers; None takes
    speculators' default.
    """

    name: str
    model_types: tuple[str, ...]
    expected_ids: Mapping[str, int] = {}
    vocabulary_size: int | None = Field(default=None, gt=0)
    end_of_turn: tuple[str, ...]
    reasoning: Reasoning
    tools: ToolGrammar | None = None
    response_tokens_allowed: tuple[str, ...] = ()
    template_switches: Mapping[str, Any] = {}
    thinking_switch: str | None = None
    generation_prompt_tail: tuple[str, ...] = ()
    sampling: Sampling
    forced_vocabulary: tuple[str, ...] = ()
    module_prefix: str = "model"
    capture_layers: tuple[int, ...] | None = None
    server_arguments: tuple[str, ...] = ()
    trust_remote_code: bool = False


def load_profile(name: str) -> Profile:
    """Load a profile that ships with Aerie.

    Raises:
        BadInput: no such profile, or its file is wrong.
    """
    path = PROFILES_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES_FOLDER.glob("*.yaml")))
        raise BadInput(f"no profile named {name!r}: expected one of {known}")
    return validate(Profile, read_mapping(path), where=path)

"""The configuration of the whole pipeline, as one frozen document read from YAML."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from aerie.errors import BadInput
from aerie.settings.machine import aerie_home, models_root
from aerie.settings.profile import Frozen, Profile, Sampling, load_profile
from aerie.settings.yaml_files import read_mapping, validate

GENERATED_KEYS = (
    "B1_glaive",
    "B2_opencodeinstruct",
    "B3_magicoder",
    "B4_mixturethoughts",
    "B5_openthoughts",
    "B6_ultrachat",
    "B7_sharegpt",
    "B8_sweagent",
)
TOKENISED_KEYS = ("A1", "A2")
DATASET_KEYS = GENERATED_KEYS + TOKENISED_KEYS
"""Data sets that Aerie knows; a configuration may have others, with keys such as ``C1_mine``."""

_KEY = re.compile(r"[A-Z][0-9]+(?:_[A-Za-z0-9_]+)?")
_KNOWN_NUMBERS = {key.partition("_")[0]: key for key in DATASET_KEYS}


def is_tokenised(key: str) -> bool:
    """Whether data set ``key`` arrives tokenised: the A-series does, every other is generated."""
    return key.startswith("A")


def keys_in_order(keys: Iterable[str]) -> tuple[str, ...]:
    """Keys in the pipeline's order: those that Aerie knows, then the others by name, wherever they stand in a file."""
    present = set(keys)
    return (*(key for key in DATASET_KEYS if key in present), *sorted(present - set(DATASET_KEYS)))


def _wrong_key(key: str) -> str | None:
    """What is wrong with a data set's key, or None."""
    if _KEY.fullmatch(key) is None:
        return "a key is a capital letter, a number and a name, such as C1_mine"
    known = _KNOWN_NUMBERS.get(key.partition("_")[0], key)
    return None if known == key else f"that number is {known}; give yours another, such as C1_mine"


DEFAULT_BUDGET_TOKENS = 10_000_000
COST_CEILING_RATIO = 1.25

LONG_RESPONSES: Mapping[str, Mapping[str, int]] = {"B8_sweagent": {"concurrency": 32, "max_new_tokens": 16_384}}
"""Defaults of data sets whose prompts and responses are long; the reference deployment ran them so."""


def _defaults_of(key: str) -> Mapping[str, int]:
    """Defaults of a data set that are not everybody's."""
    return {"budget_tokens": 0} if is_tokenised(key) else LONG_RESPONSES.get(key, {})


_VARIABLE = re.compile(r"\$\{(\w+)\}")
_FOLDERS: Mapping[str, Callable[[], Path]] = {"AERIE_HOME": aerie_home, "AERIE_MODELS": models_root}


def _value_of(variable: re.Match[str]) -> str:
    name = variable[1]
    if name in _FOLDERS:
        return str(_FOLDERS[name]().absolute())
    if name not in os.environ:
        raise ValueError(f"${{{name}}} is not set in the environment: export it, or write the path itself")
    return os.environ[name]


def _beside_file(path: Path, info: ValidationInfo) -> Path:
    path = Path(_VARIABLE.sub(_value_of, str(path)))
    folder = (info.context or {}).get("folder")
    return path if path.is_absolute() or folder is None else (Path(folder) / path).resolve()


FilePath = Annotated[Path, AfterValidator(_beside_file)]
"""A path; in a YAML file, relative ones are relative to that file, and ``${VARIABLE}`` is an environment variable's
value (``AERIE_HOME`` and ``AERIE_MODELS`` have defaults: ``settings.machine``)."""

Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Scalar = str | bool | int | float

REPOSITORY_PATTERN = r"^[\w.-]+/[\w.-]+$"
"""Owner and name of a repository on the hub."""

HUB_COMMIT_PATTERN = r"^[0-9a-f]{40}$"
"""A commit of one; branches and tags move."""


class VerifierSettings(Frozen):
    """The large model: a local checkpoint folder, at a revision, with the profile of its family.

    ``huggingface`` is the repository that ``./aerie fetch-model`` downloads it from, at ``revision``, a commit.
    ``prompt_date`` is the day that a chat template which writes today's date into prompts takes for today.
    """

    path: FilePath
    huggingface: Annotated[str, Field(pattern=REPOSITORY_PATTERN)] | None = None
    revision: str | None = None
    profile: str
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    thinking: bool = True
    trust_remote_code: bool = False
    prompt_date: date | None = None

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.huggingface is not None and not re.fullmatch(HUB_COMMIT_PATTERN, self.revision or ""):
            raise ValueError(
                f"huggingface is {self.huggingface}, but revision is {self.revision!r}: expected a commit, 40 "
                "hexadecimal digits, because a branch moves"
            )
        return self

    @property
    def where_from(self) -> str:
        """What to do where the checkpoint is not there."""
        if self.huggingface is None:
            return "set verifier.path of the configuration to its folder"
        return f"get {self.huggingface} with ./aerie fetch-model"

    def load_profile(self) -> Profile:
        """Profile of the verifier's family."""
        return load_profile(self.profile)


def _server_url(url: str) -> str:
    """A server's address without a path, such as ``http://10.0.0.5:8000``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL ({error}): expected one such as http://10.0.0.5:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{url!r}: expected http:// or https://, a host and a port, such as http://10.0.0.5:8000")
    if parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: expected a host and a port alone, such as http://10.0.0.5:8000")
    return url.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_server_url)]
"""Address of a server that someone runs: a host and a port alone."""

_OBSERVED = re.compile(r"0\.[0-9]*[1-9][0-9]*(?::[a-z0-9_]+)?")

AROUND_THE_SERVER = frozenset(
    {
        "backend", "external_url", "start_timeout_seconds", "lease_seconds", "host_ram_gb", "host_loading_gb",
        "observed", "logprob_tolerance_nats", "stall_seconds", "reap_leftovers",
    }
)  # fmt: skip
"""Fields of ``ServingSettings`` that say how a server is kept, checked and planned for, not what it is."""


class ServingSettings(Frozen):
    """What the server is, and how it is launched and kept.

    With ``backend`` ``external`` someone else runs the server, at ``external_url``: the other fields say what it must
    be, which is checked before it is used; it is never started or stopped. ``kv_cache_dtype`` other than ``auto`` and
    ``bf16`` needs a recorded reason in ``allow_quantised_kv``.

    ``host_ram_gb`` is the memory of the server's host that is there for it, and ``host_loading_gb`` what of that
    loading the weights takes, both in GB of 10^9 bytes; None: measured, or estimated from the weights. ``observed``
    are KV pools that servers of this model reported on such GPUs, for the planner: ``max_total_num_tokens`` by
    memory fraction, with the KV type after a colon where it is not bf16 (``0.90:fp8_e4m3``).

    ``logprob_tolerance_nats``: how far the mean log-probability of the probe's passage may be from that of the
    model's first launch. ``stall_seconds``: so long without a token, with requests running, a server counts as stuck.
    ``reap_leftovers`` lets a start end processes that an earlier server of the same folder left on the GPUs; those of
    others are never touched.
    """

    backend: Literal["local", "external"] = "local"
    external_url: ServerUrl | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    host: str = "127.0.0.1"
    port: int | None = None
    tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    attention_data_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.88
    max_total_tokens: PositiveInt | None = None
    page_size: PositiveInt | None = None
    cuda_graph_max_batch_size: PositiveInt | None = None
    kv_cache_dtype: str = "auto"
    allow_quantised_kv: str | None = None
    hicache_size_gb_per_rank: PositiveInt | None = None
    chunked_prefill_size: PositiveInt | None = None
    max_running_requests: PositiveInt | None = None
    context_length: PositiveInt
    extra_arguments: tuple[str, ...] = ()
    start_timeout_seconds: PositiveInt = 3600
    lease_seconds: PositiveInt = 300
    host_ram_gb: PositiveFloat | None = None
    host_loading_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    observed: Mapping[str, PositiveInt] = {}
    logprob_tolerance_nats: PositiveFloat = 0.02
    stall_seconds: PositiveInt = 300
    reap_leftovers: bool = False

    @field_validator("allow_quantised_kv")
    @classmethod
    def _a_reason_says_something(cls, reason: str | None) -> str | None:
        if reason is not None and not reason.strip():
            raise ValueError("allow_quantised_kv is blank: expected the reason, which is recorded")
        return reason

    @field_validator("observed", mode="before")
    @classmethod
    def _fractions(cls, observed: Any) -> Any:
        """YAML reads ``0.85`` as a number, with or without a type after it elsewhere in the mapping."""
        return {str(key): tokens for key, tokens in observed.items()} if isinstance(observed, Mapping) else observed

    @model_validator(mode="after")
    def _observations_can_be_read(self) -> Self:
        for key in self.observed:
            if _OBSERVED.fullmatch(key) is None:
                raise ValueError(
                    f"observed has {key!r}: expected a memory fraction such as 0.85, or with a KV type 0.90:fp8_e4m3"
                )
        return self

    @model_validator(mode="after")
    def _loading_leaves_something(self) -> Self:
        if self.host_ram_gb is not None and (self.host_loading_gb or 0) >= self.host_ram_gb:
            raise ValueError(
                f"host_loading_gb {self.host_loading_gb:g} of host_ram_gb {self.host_ram_gb:g}: expected less than all"
            )
        return self

    @model_validator(mode="after")
    def _one_owner(self) -> Self:
        """An external server listens where its URL says, and no lease of ours ends it."""
        if self.backend == "local":
            if self.external_url is not None:
                raise ValueError("external_url is set, but backend is local: expected backend external, or no URL")
            return self
        if self.external_url is None:
            raise ValueError("backend is external: expected external_url, the server's address")
        for name in ("host", "port", "lease_seconds"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for backend local: an external server's owner decides it; leave it out")
        return self

    def extra_argument(self, name: str) -> str | None:
        """Value of one of ``extra_arguments`` in either form, ``--name value`` or ``--name=value``."""
        for index, argument in enumerate(self.extra_arguments):
            if argument == name:
                return next(iter(self.extra_arguments[index + 1 :]), None)
            if argument.startswith(f"{name}="):
                return argument.partition("=")[2]
        return None


class CanarySettings(Frozen):
    """A few prompts of a data set, across lengths, that must pass before the rest is generated.

    The shares are of the responses that were judged. ``maximum_corrupt_share`` counts every row that a boundary rule
    refuses: a thinking model at the reference deployment lost none. Loops and missing reasoning are among them and have
    limits of their own, for a data set whose other rows are rightly odd. ``maximum_truncated_share``: with more than
    half of the responses cut, ``max_new_tokens`` is too small for the data. A short answer holds at most
    ``short_answer_tokens`` besides its reasoning, closing tag and end token among them, and no tool call: a verifier
    that reasons answers even a sum in a few words.
    ``minimum_tool_share`` is the least share with a well-formed tool section, where the data set is about tools; many
    of their prompts are rightly answered without one.
    """

    prompts: PositiveInt = 32
    maximum_corrupt_share: Share = 0.1
    maximum_truncated_share: Share = 0.5
    maximum_empty_reasoning_share: Share = 0.1
    maximum_loop_share: Share = 0.1
    short_answer_tokens: PositiveInt = 4
    maximum_short_answer_share: Share = 0.25
    minimum_tool_share: Share = 0.1


class ColumnSettings(Frozen):
    """Which columns of a data set hold what, for the reader ``generic``.

    Either ``messages`` (a list of turns) or ``prompt`` (text; several columns are joined by a blank line), else the
    first that a row has of ``messages``, ``conversations``, ``prompt`` and ``instruction`` (with ``input``). ``role``
    and ``content`` are fields of a turn, by default ``role`` or ``from`` and ``content`` or ``value``; ``roles``
    translates names of roles. ``tools`` and ``id`` default to columns of these names. A column ``system`` is taken
    only where it is named, because such columns often force the format of another model.
    """

    messages: str | None = None
    prompt: str | tuple[str, ...] | None = None
    role: str | None = None
    content: str | None = None
    roles: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {}
    system: str | None = None
    tools: str | None = None
    id: str | None = None
    conversation_id: str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.messages is not None and self.prompt is not None:
            raise ValueError("expected either 'messages' or 'prompt', not both")
        return self


Turns = Literal["one", "first", "last", "every"]

GENERIC = "generic"
"""The reader of data sets that Aerie does not know."""


class SourceSettings(Frozen):
    """Where a data set's rows come from: local files, or a Hugging Face data set at a pinned revision.

    ``path`` is a file, a folder or a pattern such as ``shards/*.jsonl.zst``. ``data_files`` are the files of a hub
    repository that are meant, where not all are. ``where`` keeps the rows whose column has the value, or one of them.
    ``turns`` says which answers of a conversation become prompts: ``one`` drawn by the seed, so that long conversations
    do not multiply, the ``first``, the ``last``, or ``every``.
    """

    reader: str
    path: FilePath | None = None
    huggingface: str | None = None
    config: str | None = None
    split: str = "train"
    data_files: tuple[str, ...] = ()
    revision: str | None = None
    columns: ColumnSettings = ColumnSettings()
    where: Mapping[str, Scalar | tuple[Scalar, ...]] = {}
    turns: Turns = "one"
    sidecar: FilePath | None = None
    allow_unknown_provenance: bool = False
    licence: str
    max_skipped_share: Share = 0.5

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.huggingface is None):
            raise ValueError("expected either 'path' or 'huggingface', not both and not neither")
        if self.huggingface is not None and self.revision is None:
            raise ValueError("a Hugging Face source needs a pinned 'revision'")
        if self.data_files and self.huggingface is None:
            raise ValueError("'data_files' is for Hugging Face sources: name local files in 'path'")
        if self.columns != ColumnSettings() and self.reader != GENERIC:
            raise ValueError(f"'columns' is for the reader {GENERIC!r}: reader {self.reader!r} knows its own")
        return self


class ExpectedSettings(Frozen):
    """What is known of a data set before it runs, for the timeline. None: not known, and not guessed."""

    prompts: PositiveInt | None = None
    completions_per_minute: PositiveFloat | None = None
    mean_prompt_tokens: PositiveFloat | None = None
    mean_response_tokens: PositiveFloat | None = None


class ExpectedRates(Frozen):
    """What is known of the host's speed before it is measured, for the timeline. None: not known, and not guessed.

    ``tokens_per_second_low`` and ``high`` are response tokens over all requests, from long sequences to short ones;
    ``completions_per_minute`` holds for data sets that name no other.
    """

    tokens_per_second_low: PositiveFloat | None = None
    tokens_per_second_high: PositiveFloat | None = None
    completions_per_minute: PositiveFloat | None = None
    merge_tokens_per_second: PositiveFloat | None = None
    capture_tokens_per_second: PositiveFloat | None = None
    training_tokens_per_second: PositiveFloat | None = None
    benchmark_hours: PositiveFloat | None = None

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        low, high = self.tokens_per_second_low, self.tokens_per_second_high
        if (low is None) != (high is None):
            raise ValueError("tokens_per_second_low and tokens_per_second_high: expected both or neither")
        if low is not None and high is not None and low > high:
            raise ValueError(f"tokens_per_second_low {low:g} is above tokens_per_second_high {high:g}")
        return self


class DatasetSettings(Frozen):
    """One data set. Budgets count tokens; 0 means all prompts. ``LONG_RESPONSES`` has other defaults for some.

    A tokenised data set has no budget unless one is set; ``merge`` takes that many of its response tokens, at random.
    """

    kind: Literal["generated", "tokenised"] = "generated"
    source: SourceSettings
    about_tools: bool = False
    budget_tokens: Annotated[int, Field(ge=0)] = DEFAULT_BUDGET_TOKENS
    max_generated_tokens: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    max_samples: PositiveInt | None = None
    max_prompts: PositiveInt | None = None
    concurrency: PositiveInt = 150
    max_new_tokens: PositiveInt = 8192
    minimum_new_tokens: PositiveInt = 16
    drop_flags: tuple[str, ...] = ()
    canary: CanarySettings = CanarySettings()
    expected: ExpectedSettings | None = None

    @property
    def cost_ceiling_tokens(self) -> int | None:
        """Most tokens that may be generated, kept or not: as set, else 1.25 x budget, None without a budget."""
        if self.max_generated_tokens is not None:
            return self.max_generated_tokens
        return int(self.budget_tokens * COST_CEILING_RATIO) if self.budget_tokens else None


class GenerationSettings(Frozen):
    """What holds for the generation of every data set.

    Over the latest ``quarantine_window`` responses a larger share of quarantined ones than ``maximum_quarantine_share``
    stops a run; a larger share cut by the cap than ``alert_truncated_share`` raises an alert, and so do the canary's
    other criteria.
    """

    maximum_quarantine_share: Share = 0.25
    alert_truncated_share: Share = 0.2
    quarantine_window: PositiveInt = 200
    maximum_attempts: PositiveInt = 4
    request_timeout_seconds: PositiveInt = 3600
    progress_seconds: Annotated[float, Field(gt=0, le=30)] = 10.0


class SplitSettings(Frozen):
    """Shares of conversations held out, by hash of the conversation id."""

    validation: Share = 0.05
    benchmark: Share = 0.05


class CapSettings(Frozen):
    """The most that one data set gives to the corpus, training and validation rows together; the first that binds."""

    response_tokens: PositiveInt | None = None
    rows: PositiveInt | None = None

    @model_validator(mode="after")
    def _caps_something(self) -> Self:
        if self.response_tokens is None and self.rows is None:
            raise ValueError("expected 'response_tokens', 'rows' or both")
        return self


class CorpusSettings(Frozen):
    """Merge and shuffle. ``require`` says whether every data set of the edition must have been validated.

    Rows longer than ``maximum_length`` tokens are dropped. ``caps`` bound data sets by themselves. ``weights`` then say
    how the response tokens of the data sets that they name are to each other: nothing is repeated, so the one that is
    scarcest for its weight is taken whole and the others are thinned out. What stays is drawn by the seed.
    """

    require: Literal["all", "some"] = "all"
    maximum_length: PositiveInt
    caps: Mapping[str, CapSettings] = {}
    weights: Mapping[str, PositiveFloat] = {}


class VocabularySettings(Frozen):
    """Draft vocabulary: a ``size``, or a ``coverage`` of response tokens, which asks for the smallest size that has it.

    With both, ``size`` is the most. Less than ``minimum_coverage`` fails.
    """

    size: PositiveInt | None = None
    coverage: Annotated[float, Field(gt=0, le=1)] | None = None
    minimum_coverage: Share = 0.9

    @model_validator(mode="after")
    def _something_to_go_by(self) -> Self:
        if self.size is None and self.coverage is None:
            raise ValueError("expected 'size', or 'coverage' that asks for one")
        if self.coverage is not None and self.coverage < self.minimum_coverage:
            raise ValueError(
                f"coverage {self.coverage:g} is below minimum_coverage {self.minimum_coverage:g}: lower that too"
            )
        return self


class VllmSettings(Frozen):
    """The ``vllm serve`` that the back end ``vllm`` captures through.

    ``url`` is one that someone runs, launched with the command that Aerie shows; without it the stage starts one with
    ``python``, the interpreter of an environment that has vLLM, and ends it. ``arguments`` are further ones of
    ``vllm serve``.
    """

    url: ServerUrl | None = None
    python: FilePath | None = None
    arguments: tuple[str, ...] = ()


class HiddenStateSettings(Frozen):
    """Capture. ``layers`` None takes the profile's, else speculators' default; ``free_share`` of the disk is spared.

    ``backend`` says what computes the states: ``sglang``, hooks inside the server; ``transformers``, in the stage's own
    process, for any architecture that it loads; ``vllm``, speculators' own extraction from a ``vllm serve``.
    ``concurrency`` is requests in flight, or rows of one length in a forward pass of transformers.
    ``storage`` ``fp8`` halves the files by one float8 scale a token, at an error that the capture measures.

    ``world_size`` captures, each told its ``rank``, share the corpus' rows; one without a rank then takes their files
    together, and captures none itself.

    ``disk_limit_gib`` is what the states may take of the disk: a corpus that needs more is not captured whole but
    streamed, each state captured when the trainer comes to it, and removed once it is read. None: all are kept.

    ``capture`` ``generate`` takes a sample's states while it is generated, so that the stage ``capture`` only fills
    what is missing; ``capture_memory_gib`` bounds what the server holds of samples that are not finished.
    """

    backend: Literal["sglang", "transformers", "vllm"] = "sglang"
    layers: tuple[int, ...] | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    storage: Literal["plain", "fp8"] = "plain"
    concurrency: PositiveInt = 32
    free_share: Share = 0.1
    disk_limit_gib: PositiveFloat | None = None
    parity_rows: Annotated[int, Field(ge=0)] = 4
    world_size: PositiveInt = 1
    rank: Annotated[int, Field(ge=0)] | None = None
    capture: Literal["separate", "generate"] = "separate"
    capture_memory_gib: PositiveFloat = 16.0
    vllm: VllmSettings = VllmSettings()

    @property
    def captures_in_server(self) -> bool:
        """Whether a server of ours captures, so that a run has one for it; ranks have their own."""
        return self.backend == "sglang" and (self.world_size == 1 or self.rank is not None)

    @model_validator(mode="after")
    def _streams_come_from_a_server(self) -> Self:
        if self.disk_limit_gib is not None and self.backend != "sglang":
            raise ValueError(f"disk_limit_gib is set, and backend is {self.backend}: only sglang streams states")
        return self

    @model_validator(mode="after")
    def _a_rank_of_the_world(self) -> Self:
        if self.rank is not None and self.rank >= self.world_size:
            raise ValueError(
                f"rank is {self.rank} of world_size {self.world_size}: expected 0 to {self.world_size - 1}"
            )
        if self.world_size > 1 and self.disk_limit_gib is not None:
            raise ValueError(
                "world_size is above 1, and disk_limit_gib is set: states that are streamed are not shared out"
            )
        return self

    @model_validator(mode="after")
    def _fp8_is_of_kept_bfloat16(self) -> Self:
        if self.storage == "fp8" and self.dtype != "bfloat16":
            raise ValueError(f"storage is fp8 and dtype {self.dtype}: expected bfloat16, which the trainer is handed")
        if self.storage == "fp8" and self.disk_limit_gib is not None:
            raise ValueError("storage is fp8, and disk_limit_gib is set: states that are streamed are stored plain")
        return self

    @model_validator(mode="after")
    def _vllm_can_be_reached(self) -> Self:
        if self.backend == "vllm" and (self.vllm.url is None) == (self.vllm.python is None):
            raise ValueError(
                "backend is vllm: expected either vllm.url, of a vllm serve that someone runs, or vllm.python, the "
                "interpreter that has vLLM"
            )
        if self.backend != "vllm" and self.vllm != VllmSettings():
            raise ValueError(f"vllm is for backend vllm: backend is {self.backend}; leave it out")
        return self

    @model_validator(mode="after")
    def _captured_or_streamed(self) -> Self:
        if self.capture == "generate" and self.backend != "sglang":
            raise ValueError(f"capture is generate, by the server that generates, and backend is {self.backend}")
        if self.capture == "generate" and self.disk_limit_gib is not None:
            raise ValueError(
                "capture is generate, which keeps the states of every kept sample, and disk_limit_gib is set, which "
                "streams them: expected one of the two"
            )
        return self

    @property
    def generated_bytes(self) -> int | None:
        """Memory of the server for the states of unfinished samples; None where generation captures none."""
        return int(self.capture_memory_gib * (1 << 30)) if self.capture == "generate" else None


class TrainingSettings(Frozen):
    """``speculators train``, configured from ours.

    ``learning_rate`` is the peak of either optimizer. With several ``processes``, one a GPU, it runs under torchrun;
    ``fsdp`` then shards the drafter among them instead of replicating it. ``tensorboard`` is a folder for TensorBoard's
    files; None: none are written. ``stall_minutes``: so long without a step or a validation, a trainer counts as hung
    and is ended. ``extra_arguments`` are flags of ``speculators train``; those that would break serving or the contract
    between stages are refused.
    """

    epochs: PositiveInt
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    sequence_length: PositiveInt
    processes: PositiveInt = 1
    seed: int = 0
    fsdp: bool = False
    draft_intermediate_size: PositiveInt | None = None
    tensorboard: FilePath | None = None
    stall_minutes: PositiveFloat = 30.0
    extra_arguments: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _shards_need_processes(self) -> Self:
        if self.fsdp and self.processes == 1:
            raise ValueError("fsdp shards the drafter among processes, but processes is 1: expected more, or no fsdp")
        return self


class DraftSettings(Frozen):
    """How deep and how wide the server drafts: steps, branches a step, and draft tokens given to one verify step."""

    num_steps: PositiveInt = 3
    eagle_topk: PositiveInt = 1
    num_draft_tokens: PositiveInt = 4

    @model_validator(mode="after")
    def _chain_length(self) -> Self:
        if self.eagle_topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but a chain (eagle_topk 1) of {self.num_steps} steps "
                f"has {self.num_steps + 1}: the drafts and the bonus token"
            )
        return self

    @property
    def words(self) -> str:
        """In words."""
        return f"{self.num_steps} steps, top-k {self.eagle_topk}, {self.num_draft_tokens} draft tokens"


def _several(number: Any) -> Any:
    return (number,) if isinstance(number, int) else number


class BenchmarkSettings(DraftSettings):
    """Acceptance length on held-out prompts. Definition: completion tokens / verify steps, pooled over requests.

    ``concurrency`` is one number of requests at once, or several: gates and recommendation are of the first, the one
    that the drafter will be served at. ``prompts_files`` are prompts of your own, JSON lines of token ids, each file
    a data set named after it. ``sweep`` are other draft settings to try on ``sweep_prompts_per_dataset`` prompts, a
    server start each; the fastest of them and the configured one is recommended.

    ``sampled`` also measures acceptance at the sampling that data is generated with. None: on GPUs. It is refused on a
    CPU, where SGLang verifies drafts greedily whatever the temperature.

    ``minimum_share_of_production`` is of the acceptance length of the drafter that was published last for this
    verifier, on the same prompts: 1.0 refuses a worse one, 0 compares with none.
    """

    prompts_per_dataset: PositiveInt = 32
    prompts_files: tuple[FilePath, ...] = ()
    max_new_tokens: PositiveInt = 512
    concurrency: Annotated[tuple[PositiveInt, ...], Field(min_length=1), BeforeValidator(_several)] = (8, 1, 32)
    sweep: tuple[DraftSettings, ...] = ()
    sweep_prompts_per_dataset: PositiveInt = 8
    sampled: bool | None = None
    minimum_acceptance_length: Annotated[float, Field(gt=1.01)] = 2.0
    minimum_share_of_production: Share = 1.0
    compare_untrained: bool = True

    @field_validator("concurrency", "sweep")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise ValueError(f"{', '.join(map(str, values))}: expected each once")
        return values

    @field_validator("prompts_files")
    @classmethod
    def _names_differ(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        names = [path.stem for path in paths]
        if len(set(names)) != len(names):
            raise ValueError(f"{', '.join(map(str, paths))}: expected files of different names, which name data sets")
        return paths

    @property
    def drafting(self) -> DraftSettings:
        """The configured draft setting alone."""
        return DraftSettings(**self.model_dump(include=set(DraftSettings.model_fields)))


class PublishSettings(Frozen):
    """Where the accepted drafter goes, and its ``licence`` on its card, as the hub names licences; None: not said."""

    folder: FilePath
    licence: str | None = None


class PilotSettings(Frozen):
    """A first, small run of the whole pipeline, which finds within an hour a drafter that will not work.

    ``share`` is of each budget, and of the default budget where a data set has none. What little data teaches is
    measured by ``minimum_acceptance_length``: broken data, layers or mappings give 1.0.
    """

    share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    minimum_acceptance_length: Annotated[float, Field(gt=1.01)] = 1.2


class ApprovalSettings(Frozen):
    """What a person is told where a run asks for approval, and how long it waits for the answer.

    ``cost_per_hour`` is of all hosts together, in ``currency``; None: not known, and not guessed. ``timeout_hours``
    None waits for as long as it takes.
    """

    cost_per_hour: PositiveFloat | None = None
    currency: str | None = None
    timeout_hours: PositiveFloat | None = None

    @model_validator(mode="after")
    def _money_has_a_currency(self) -> Self:
        if (self.cost_per_hour is None) != (self.currency is None):
            raise ValueError("cost_per_hour and currency: expected both or neither")
        return self


class PlacementSettings(Frozen):
    """Where Airflow runs a stage; what is not set is as ``default`` of the placement has it, else Airflow's default.

    ``remote``: on a host that has no database. The stage leaves its events and its result beside the data, and a task
    of the control side records them.
    """

    executor: str | None = None
    queue: str | None = None
    pool: str | None = None
    pool_slots: PositiveInt = 1
    remote: bool = False


class AlertSettings(Frozen):
    """Who is told of what, beside the store's table of alerts.

    ``connection_id`` is an Airflow connection of type Apprise; without it nobody is told. ``deadline_hours`` bounds a
    run: it is fixed when the run is created, and a run that misses it, or is expected to, raises an alert.
    """

    connection_id: str = "aerie_alerts"
    deadline_hours: PositiveFloat | None = None


class PipelineSettings(Frozen):
    """The whole configuration. ``decontaminate`` are files of prompts, such as benchmarks', that no data may hold."""

    name: str
    seed: int = 0
    verifier: VerifierSettings
    sampling: Sampling | None = None
    serving: ServingSettings
    splits: SplitSettings = SplitSettings()
    decontaminate: tuple[FilePath, ...] = ()
    datasets: Mapping[str, DatasetSettings]
    generation: GenerationSettings = GenerationSettings()
    corpus: CorpusSettings
    vocabulary: VocabularySettings
    hidden_states: HiddenStateSettings = HiddenStateSettings()
    training: TrainingSettings
    benchmark: BenchmarkSettings = BenchmarkSettings()
    publish: PublishSettings
    pilot: PilotSettings = PilotSettings()
    expected_rates: ExpectedRates = ExpectedRates()
    approvals: ApprovalSettings = ApprovalSettings()
    placement: Mapping[str, PlacementSettings] = {}
    alerts: AlertSettings = AlertSettings()

    @field_validator("datasets", mode="before")
    @classmethod
    def _defaults_by_key(cls, datasets: Any) -> Any:
        if not isinstance(datasets, Mapping):
            return datasets
        return {
            key: {**_defaults_of(key), **datasets[key]} if isinstance(datasets[key], Mapping) else datasets[key]
            for key in keys_in_order(map(str, datasets))
        }

    @model_validator(mode="after")
    def _known_datasets(self) -> Self:
        for key, dataset in self.datasets.items():
            if problem := _wrong_key(key):
                raise ValueError(f"unknown data set {key}: {problem}")
            if (dataset.kind == "tokenised") != is_tokenised(key):
                raise ValueError(f"data set {key} is {dataset.kind}: the A-series is tokenised, every other generated")
        for setting, names in (("caps", self.corpus.caps), ("weights", self.corpus.weights)):
            if unknown := sorted(set(names) - set(self.datasets)):
                raise ValueError(f"corpus.{setting} names {', '.join(unknown)}: no such data set in 'datasets'")
        return self

    def dataset(self, key: str) -> DatasetSettings:
        """Settings of data set ``key``.

        Raises:
            BadInput: the configuration has no such data set.
        """
        if key not in self.datasets:
            raise BadInput(
                f"configuration {self.name} has no data set {key!r}: expected one of {', '.join(self.datasets)}"
            )
        return self.datasets[key]

    def load_sampling(self) -> Sampling:
        """Sampling parameters: the configuration's own, else the profile's."""
        return self.sampling or self.verifier.load_profile().sampling

    def with_budget(self, budget_tokens: int) -> "PipelineSettings":
        """The same configuration with this budget for every generated data set."""
        return self._with_budgets(lambda _: budget_tokens)

    def as_pilot(self) -> "PipelineSettings":
        """The same configuration with the pilot's share of the budgets, and its gate."""
        smaller = self._with_budgets(
            lambda dataset: math.ceil((dataset.budget_tokens or DEFAULT_BUDGET_TOKENS) * self.pilot.share)
        )
        gate = {
            "minimum_acceptance_length": self.pilot.minimum_acceptance_length,
            "minimum_share_of_production": 0.0,  # which was trained on fifty times the data
            "sweep": (),
        }
        return smaller.model_copy(update={"benchmark": self.benchmark.model_copy(update=gate)})

    def _with_budgets(self, budget_of: Callable[[DatasetSettings], int]) -> "PipelineSettings":
        datasets = {
            key: dataset.model_copy(update={"budget_tokens": budget_of(dataset)})
            if dataset.kind == "generated"
            else dataset
            for key, dataset in self.datasets.items()
        }
        return self.model_copy(update={"datasets": datasets})


def load_settings(path: Path) -> PipelineSettings:
    """Read the pipeline's configuration.

    Raises:
        BadInput: the file cannot be read, or a field is missing, unknown or out of range.
    """
    document: dict[str, Any] = read_mapping(path)
    return validate(PipelineSettings, document, where=path, context={"folder": path.parent.resolve()})

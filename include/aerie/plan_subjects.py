"""What is planned: the verifier of a configuration, a checkpoint, or a configuration that ships."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aerie.errors import BadInput, one_line
from aerie.serving.headroom import GIB
from aerie.serving.model_config import ModelConfig, read_model_config
from aerie.serving.plan_inputs import DrafterInputs
from aerie.serving.weights import DTYPE_BYTES, weights_on_disk
from aerie.settings.bundled import bundled_config
from aerie.settings.pipeline import PipelineSettings, ServingSettings
from aerie.settings.profile import Profile, checkpoint_code_allowed, load_profile, profile_names

ASSUMED_CONTEXT_TOKENS = 32_768
"""Context length of a model whose configuration does not say ``max_position_embeddings``."""
ASSUMED_DTYPE = "bfloat16"
"""Number type of a model whose configuration does not say: gpt-oss and MiniMax-M2, which are served so."""

NO_DRAFTER = DrafterInputs()

DIVISION = ("tensor_parallel_size", "attention_data_parallel_size", "pipeline_parallel_size")
"""What an observation of a KV pool holds for, besides model and GPU."""


@dataclass(frozen=True)
class Subject:
    """A model, where it lies or will lie, and how it is served."""

    name: str
    config: ModelConfig
    path: Path
    dtype: str
    serving: ServingSettings
    profile: Profile | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    settings: PipelineSettings | None = None
    drafter: DrafterInputs = NO_DRAFTER
    drafter_path: Path = Path("/models/drafter")
    states: Path = Path("/data/hidden_states/states")
    weights_bytes: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def observed_enough(self) -> bool:
        """Whether pools at two fractions were observed, which tell a GPU's memory and what the weights take."""
        return len({key.partition(":")[0] for key in self.serving.observed}) > 1


def subject_of_settings(settings: PipelineSettings, *, edition_folder: Path) -> Subject:
    """The verifier of a configuration: its own ``config.json``, or the bundled copy where it is not on disk yet.

    Raises:
        BadInput: neither can be read.
    """
    verifier = settings.verifier
    profile = verifier.load_profile()
    config, notes = _configuration(verifier.path, verifier.profile)
    return Subject(
        name=settings.name,
        config=config,
        path=verifier.path.resolve(),
        dtype=verifier.dtype,
        serving=settings.serving,
        profile=profile,
        revision=verifier.revision,
        trust_remote_code=checkpoint_code_allowed(
            profile, allowed=verifier.trust_remote_code, revision=verifier.revision
        ),
        settings=settings,
        drafter=DrafterInputs(settings.vocabulary.size, settings.training.draft_intermediate_size),
        drafter_path=(edition_folder / "drafter").resolve(),
        states=(edition_folder / "hidden_states" / "states").resolve(),
        weights_bytes=weights_on_disk(verifier.path),
        notes=notes,
    )


def _configuration(path: Path, profile: str) -> tuple[ModelConfig, tuple[str, ...]]:
    if (path / "config.json").exists():
        return read_model_config(path), ()
    document = bundled_config(profile)
    note = f"{path} is not there: planned from the config.json that ships for profile {profile}"
    return ModelConfig.of(document, where=f"bundled config.json of {profile}"), (note,)


def subject_of_checkpoint(path: Path, profile_name: str | None) -> Subject:
    """A checkpoint's folder or its ``config.json``, with the profile that is named, or that alone can be meant.

    Raises:
        BadInput: it cannot be read, or there is no such profile.
    """
    config = read_model_config(path)
    folder = (path if path.is_dir() else path.parent).resolve()
    profile = load_profile(profile_name) if profile_name is not None else _profile_of(config)
    return replace(_bare(str(path), config, folder, profile), weights_bytes=weights_on_disk(folder))


def subject_of_family(name: str) -> Subject:
    """A model of which only the configuration that ships is known, by its name or its profile's.

    Raises:
        BadInput: there is none.
    """
    config = ModelConfig.of(bundled_config(name), where=f"bundled config.json of {name}")
    profile = load_profile(name) if name in profile_names() else _profile_of(config)
    folder = Path("/models") / name
    subject = _bare(name, config, folder, profile)
    note = f"planned from the config.json that ships; {folder} stands for where the checkpoint will be"
    return replace(subject, notes=(note, *subject.notes))


def _bare(name: str, config: ModelConfig, folder: Path, profile: Profile | None) -> Subject:
    notes = []
    context = config.count("max_position_embeddings", default=ASSUMED_CONTEXT_TOKENS)
    if not config.has("max_position_embeddings"):
        notes.append(f"{config.where} has no max_position_embeddings: {context:,} are taken")
    dtype = _dtype(config)
    if dtype is None:
        notes.append(f"{config.where} has no dtype: {ASSUMED_DTYPE} is taken")
    if profile is not None and profile.trust_remote_code:
        notes.append(
            "the tokenizer is code of the checkpoint: the server also needs --trust-remote-code, which a configuration "
            "allows at a pinned revision (verifier.trust_remote_code)"
        )
    return Subject(
        name=name,
        config=config,
        path=folder,
        dtype=dtype or ASSUMED_DTYPE,
        serving=ServingSettings(context_length=context),
        profile=profile,
        notes=tuple(notes),
    )


def _dtype(config: ModelConfig) -> str | None:
    """The number type of the weights: the language model's, else that of what wraps it; None where neither says."""
    named = (fields.get(name) for fields in (config.fields, config.outer) for name in ("dtype", "torch_dtype"))
    kind = next((one for one in named if one is not None), None)
    if kind is not None and (not isinstance(kind, str) or kind not in DTYPE_BYTES):
        raise BadInput(f"{config.where}: dtype (or torch_dtype) is {kind!r}: expected one of {', '.join(DTYPE_BYTES)}")
    return kind


def _profile_of(config: ModelConfig) -> Profile | None:
    """The profile for a model type, where all that are for it make the same server."""
    kind = config.outer.get("model_type")
    fitting = [profile for profile in map(load_profile, profile_names()) if kind in profile.model_types]
    servers = {(one.module_prefix, one.capture_layers, one.server_arguments) for one in fitting}
    return fitting[0] if len(servers) == 1 else None


def with_changes(
    subject: Subject, serving: Mapping[str, Any], *, gpu_memory_gib: float | None, weights_gib: float | None
) -> Subject:
    """The same with other serving settings, those that are not None.

    Observations of the configuration hold for its GPUs and its division only, and are left out where these are given
    anew; observations that are given themselves are believed before any other figure.

    Raises:
        BadInput: the settings cannot work together.
    """
    given = {name: value for name, value in serving.items() if value is not None}
    changed = [name for name in DIVISION if name in given and given[name] != getattr(subject.serving, name)]
    figures = [name for name, value in (("gpu_memory_gib", gpu_memory_gib), ("weights_gib", weights_gib)) if value]
    notes = list(subject.notes)
    if subject.serving.observed and "observed" not in given and (changed or figures):
        given["observed"] = {}
        notes.append(f"what the configuration observed is left out: {', '.join(changed + figures)} given anew")
    elif given.get("observed") and figures:
        notes.append(f"the observations are believed before {' and '.join(figures)}")
    try:
        settings = ServingSettings.model_validate({**subject.serving.model_dump(), **given})
    except ValidationError as error:
        raise BadInput(f"{subject.name}: {one_line(error)}") from error
    weights = subject.weights_bytes if weights_gib is None else weights_gib * GIB
    return replace(subject, serving=settings, weights_bytes=weights, notes=tuple(notes))


def with_drafter(subject: Subject, folder: Path) -> Subject:
    """The same with a drafter that is there.

    Raises:
        BadInput: its configuration cannot be read.
    """
    return replace(subject, drafter=DrafterInputs(config=read_model_config(folder)), drafter_path=folder.resolve())

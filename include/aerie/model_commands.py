"""``./aerie fetch-model``: the verifier's checkpoint, from the hub to this machine."""

import re
from pathlib import Path
from typing import Annotated

import typer

from aerie.errors import BadInput, Failed
from aerie.judging_commands import move_to_model_environment, say
from aerie.serving.checkpoint_files import verify_checkpoint
from aerie.settings.machine import models_root, settings_path
from aerie.settings.pipeline import HUB_COMMIT_PATTERN, REPOSITORY_PATTERN, load_settings
from aerie.settings.presets import preset_path


def fetch_model(
    preset: Annotated[
        str | None, typer.Option(help="Preset whose verifier is meant (default: the configuration in use).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another repository, as owner/name; needs --revision.")] = None,
    revision: Annotated[str | None, typer.Option(help="Its commit, 40 hexadecimal digits.")] = None,
    to: Annotated[Path | None, typer.Option(help="Folder (default: its name in AERIE_MODELS).")] = None,
) -> None:
    """Download the verifier at its pinned revision and check that it is whole; run again, it goes on."""
    if model is None:
        if revision is not None or to is not None:
            raise BadInput("--revision and --to are of a --model; a configuration names its own")
        move_to_model_environment()
        _fetch_configured(preset)
        return
    if preset is not None or revision is None:
        raise BadInput("--model needs --revision, and goes without --preset")
    if not re.fullmatch(REPOSITORY_PATTERN, model):
        raise BadInput(f"--model {model!r} is not a repository: expected owner/name")
    if not re.fullmatch(HUB_COMMIT_PATTERN, revision):
        raise BadInput(f"--revision {revision!r}: expected a commit, 40 hexadecimal digits; a branch or a tag moves")
    move_to_model_environment()
    from aerie.serving.checkpoint_download import fetch_checkpoint

    fetch_checkpoint(model, revision, to or models_root() / model.rpartition("/")[2], say)


def _fetch_configured(preset: str | None) -> None:
    """Have the verifier of a configuration; one that names no repository is checked where it is."""
    from aerie.serving.checkpoint_download import fetch_checkpoint

    settings = load_settings(preset_path(preset) if preset is not None else settings_path())
    verifier = settings.verifier
    if verifier.huggingface is not None and verifier.revision is not None:
        fetch_checkpoint(verifier.huggingface, verifier.revision, verifier.path, say)
        return
    if problems := verify_checkpoint(verifier.path):
        raise Failed(
            f"configuration {settings.name} names no repository to fetch from (verifier.huggingface), and its "
            f"checkpoint is not whole: {'; '.join(problems)}"
        )
    say(f"{verifier.path}: whole; configuration {settings.name} brings its verifier along, nothing to fetch")

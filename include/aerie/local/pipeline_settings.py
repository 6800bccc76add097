"""Which of the pipeline's configurations the local stack runs: asked for, remembered, and held to while it runs."""

import os
from collections.abc import Iterator
from pathlib import Path

from aerie.errors import BadInput
from aerie.serving.checkpoint_files import verify_checkpoint
from aerie.settings.machine import chosen_settings, settings_path, stack_settings_path
from aerie.settings.pipeline import VerifierSettings
from aerie.settings.presets import preset_of, preset_path


def choose_settings(preset: str | None) -> Path:
    """The configuration that is asked for: a preset, else ``AERIE_CONFIG``, else the one of the last time.

    Raises:
        BadInput: there is no such preset, or both are given; or a file stands where the choice is remembered.
    """
    link = chosen_settings()
    if link.exists() and not link.is_symlink():
        raise BadInput(
            f"{link}: is a file, and the stack keeps a link of that name there: move it to another folder, and set "
            "AERIE_CONFIG to where it is"
        )
    if preset is None:
        return settings_path().absolute()
    if given := os.environ.get("AERIE_CONFIG"):
        raise BadInput(f"--preset {preset} and AERIE_CONFIG={given}: expected one of them; unset the variable")
    return preset_path(preset)


def remember_settings(path: Path) -> None:
    """Make this the configuration of the stack, and of every command without ``AERIE_CONFIG``."""
    link = chosen_settings()
    beside = link.with_name(f"{link.name}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(path)
    beside.replace(link)


def require_same_settings(path: Path) -> None:
    """Refuse another configuration than the running stack's: its runs would go on with other settings.

    Raises:
        BadInput: it is another one.
    """
    running = stack_settings_path()
    if path.resolve() != running.resolve():
        raise BadInput(
            f"the stack runs configuration {describe_settings(running)}, not {describe_settings(path)}: wait for its "
            "runs to end, then ./aerie down and this command again"
        )


def describe_settings(path: Path) -> str:
    """A configuration for people: the preset's name, else its path."""
    preset = preset_of(path)
    return str(path) if preset is None else f"{preset} ({path})"


def missing_verifier(verifier: VerifierSettings) -> Iterator[str]:
    """What a person has to do where the verifier is not on this machine whole: one line, or none."""
    if problems := verify_checkpoint(verifier.path):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        yield f"the verifier is not here: {problems[0]}{more}; {verifier.where_from}"

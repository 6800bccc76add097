"""What imported responses were made with, as a person states it, held against what the edition is made with."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aerie.errors import BadInput
from aerie.settings.yaml_files import read_mapping

MUST_BE_STATED = ("verifier.dtype", "kv_cache_dtype", "quantisation", "end_of_turn", "sampling.", "max_new_tokens")
"""Settings that a prompt's ids do not prove; a dot stands for all below."""
STATES_WEIGHTS = ("verifier.weights_sha256", "verifier.revision")
"""Either says which weights answered."""
NOT_COMPARED = ("source.", "seed", "minimum_new_tokens", "context_length")
"""Settings that are about prompts and caps, which are held row by row."""


def read_statement(path: Path) -> Mapping[str, Any]:
    """What a person states that responses were made with: YAML or JSON in the form of an edition's ``generation.json``.

    Raises:
        BadInput: the file cannot be read.
    """
    document = read_mapping(path)
    settings = document.get("settings")
    return settings if isinstance(settings, Mapping) and "fingerprint" in document else document


def hold_statement(
    stated: Mapping[str, Any], generation: Mapping[str, Any], *, allow_unknown: bool, where: str
) -> list[str]:
    """Hold what is stated against the settings of the edition; returns what nobody knows.

    Raises:
        BadInput: something is stated that differs, or that is no setting; or something is not stated, and that is not
            allowed.
    """
    expected, given = dict(_leaves(generation)), dict(_leaves(stated))
    compared = {name: value for name, value in given.items() if not _named(name, NOT_COMPARED)}
    unknown_names = sorted(compared.keys() - expected.keys())
    if unknown_names:
        raise BadInput(f"{where}: {', '.join(unknown_names)}: no such setting; expected some of {', '.join(expected)}")
    different = [
        f"{name}: {value!r} stated, {expected[name]!r} here"
        for name, value in compared.items()
        if value != expected[name]
    ]
    if different:
        raise BadInput(
            f"{where}: the responses were made under other settings, and two populations are not mixed: "
            f"{'; '.join(different)}"
        )
    unknown = [name for name in expected if _named(name, MUST_BE_STATED) and name not in given]
    if all(given.get(name) is None for name in STATES_WEIGHTS):
        unknown.append(" or ".join(STATES_WEIGHTS))
    if unknown and not allow_unknown:
        raise BadInput(
            f"{where}: not stated what the responses were made with: {', '.join(unknown)}. State it with --made-with "
            "FILE (in the form of the edition's generation.json), or take them as they are with "
            "--allow-unknown-provenance"
        )
    return unknown


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _named(name: str, names: Sequence[str]) -> bool:
    return any(name.startswith(known) if known.endswith(".") else name == known for known in names)

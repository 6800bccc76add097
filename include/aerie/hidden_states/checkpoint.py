"""Identity of a checkpoint, cheap enough for one of a terabyte."""

import hashlib
from pathlib import Path

from aerie.artefacts.files import fingerprint_of, sha256_of
from aerie.errors import BadInput

TAIL_BYTES = 1 << 20


def checkpoint_fingerprint(folder: Path) -> str:
    """Fingerprint of configuration and weights: of each weight file its name, size and last MiB.

    Training changes every tensor, so the tail tells two trainings of one shape apart without reading the rest.

    Raises:
        BadInput: the folder holds no configuration or no weights.
    """
    configuration, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not configuration.is_file() or not weights:
        raise BadInput(f"{folder}: expected a checkpoint with config.json and *.safetensors")
    described = [(path.name, path.stat().st_size, _tail_sha256(path)) for path in weights]
    return fingerprint_of({"config": sha256_of(configuration), "weights": described})


def _tail_sha256(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return hashlib.sha256(file.read()).hexdigest()

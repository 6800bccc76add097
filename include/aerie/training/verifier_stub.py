"""A folder that stands for the verifier in speculators' trainer.

The trainer reads the verifier's configuration, its embedding, its output head and its final norm, and nothing else.
A folder with just these serves for verifiers that it cannot load itself: quantised ones, ones whose configuration needs
remote code (Kimi), ones of a terabyte.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from aerie.artefacts.files import atomic_folder
from aerie.hidden_states.verifier_ends import read_ends, text_configuration

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_verifier_stub(verifier: Path, folder: Path) -> Path:
    """Write the stub of the checkpoint ``verifier`` to ``folder``, atomically, and return ``folder``.

    ``folder`` then holds ``config.json``, ``model.safetensors`` (embedding [V, H], head [V, H], norm [H], in the
    checkpoint's dtype) and the tokenizer's files as far as the checkpoint has them.

    Raises:
        BadInput: the checkpoint lacks one of the three tensors, or one has another shape than its configuration says.
    """
    configuration = text_configuration(verifier)
    tensors = read_ends(verifier, configuration)
    with atomic_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for name in TOKENIZER_FILES:
            if (verifier / name).is_file():
                shutil.copyfile(verifier / name, temporary / name)
    return folder

"""A folder that stands for the verifier in speculators' trainer.

The trainer reads the verifier's configuration, its embedding, its output head and its final norm, and nothing else.
A folder with just these serves for verifiers that it cannot load itself: quantised ones, ones whose configuration needs
remote code (Kimi), ones of a terabyte.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.utils.loading import load_model_layers

from aerie.artefacts.files import atomic_folder
from aerie.errors import BadInput

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

# Configurations that transformers knows under another name and the same fields.
KNOWN_AS = {"kimi_k2": "deepseek_v3"}


def write_verifier_stub(verifier: Path, folder: Path) -> Path:
    """Write the stub of the checkpoint ``verifier`` to ``folder``, atomically, and return ``folder``.

    ``folder`` then holds ``config.json``, ``model.safetensors`` (embedding [V, H], head [V, H], norm [H], in the
    checkpoint's dtype) and the tokenizer's files as far as the checkpoint has them.

    Raises:
        BadInput: the checkpoint lacks one of the three tensors, or one has another shape than its configuration says.
    """
    configuration = stub_configuration(verifier)
    tensors = read_tensors(verifier, configuration)
    with atomic_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for name in TOKENIZER_FILES:
            if (verifier / name).is_file():
                shutil.copyfile(verifier / name, temporary / name)
    return folder


def stub_configuration(verifier: Path) -> dict[str, Any]:
    """The text model's configuration, without what makes transformers run the checkpoint's own code or dequantise."""
    path = verifier / "config.json"
    try:
        whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: cannot read the verifier's configuration: {error}") from error
    configuration: dict[str, Any] = dict(whole.get("text_config", whole))
    for name in ("auto_map", "quantization_config"):
        configuration.pop(name, None)
    model_type = configuration.get("model_type")
    if model_type is None:
        raise BadInput(f"{path}: expected a model_type")
    configuration["model_type"] = KNOWN_AS.get(model_type, model_type)
    configuration.setdefault("architectures", whole.get("architectures", []))
    return configuration


def read_tensors(verifier: Path, configuration: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The three tensors under their usual names; a tied head is the embedding."""
    try:
        found = load_model_layers([EMBEDDING, HEAD, NORM], str(verifier))
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(f"{verifier}: no weights that the trainer can read: {error}") from error
    if configuration.get("tie_word_embeddings") and HEAD not in found:
        found[HEAD] = found[EMBEDDING].clone()
    rows, width = configuration.get("vocab_size"), configuration.get("hidden_size")
    for name, shape in ((EMBEDDING, (rows, width)), (HEAD, (rows, width)), (NORM, (width,))):
        if name not in found:
            raise BadInput(f"{verifier}: the checkpoint has no tensor {name}")
        if tuple(found[name].shape) != shape or not found[name].is_floating_point():
            raise BadInput(
                f"{verifier}: tensor {name} is {found[name].dtype} {tuple(found[name].shape)}, expected unquantised "
                f"{shape} as config.json says"
            )
    return {name: tensor.contiguous() for name, tensor in found.items()}

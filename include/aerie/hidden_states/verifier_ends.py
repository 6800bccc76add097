"""The ends of a verifier, all that is needed of it besides hidden states: embedding, final norm, output head.

They serve for verifiers that nobody can load here: quantised ones, ones whose configuration needs remote code (Kimi),
ones of a terabyte.
"""

import json
from pathlib import Path
from typing import Any

import torch
from speculators.utils.loading import load_model_layers

from aerie.errors import BadInput

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"

# Configurations that transformers knows under another name and the same fields.
KNOWN_AS = {"kimi_k2": "deepseek_v3"}


def text_configuration(verifier: Path) -> dict[str, Any]:
    """The text model's configuration, without what makes transformers run the checkpoint's own code or dequantise.

    Raises:
        BadInput: it cannot be read, or names no model type.
    """
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


def read_ends(verifier: Path, configuration: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Embedding [V, H], head [V, H] and norm [H] under their usual names, in the checkpoint's dtype.

    A tied head is the embedding.

    Raises:
        BadInput: the checkpoint lacks one of them, or one has another shape than its configuration says.
    """
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

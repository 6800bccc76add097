"""speculators' EAGLE-3 checkpoint in the layout that SGLang 0.5.23 loads, compared tensor by tensor after writing.

SGLang (``srt/models/llama_eagle3.py``) reads ``norm_before_fc``, ``fc_norm`` and ``norm_output``, takes embeddings from
the verifier, and takes the residual before ``hidden_norm``. It has no ``norm_before_residual``, and applies a sliding
window only by a flag of the server: both are refused here rather than served wrongly.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from aerie.artefacts.files import atomic_folder
from aerie.errors import BadInput, Failed

EMBEDDING = "embed_tokens.weight"
VOCABULARY_TENSORS = ("t2d", "d2t")
DECODER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
    "vocab_size",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "initializer_range",
)

# SGLang numbers the outputs of layers and adds 1 to the ids of a drafter's configuration; for these verifiers (Kimi-K2
# and K2.5 among them) only when the first id is 1: srt/models/deepseek_v2.py and glm4_moe_lite.py.
SHIFTED_ONLY_FROM_ONE = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")


def export_drafter(checkpoint: Path, folder: Path, *, verifier_model_type: str) -> dict[str, Any]:
    """Write the drafter in ``checkpoint`` to ``folder`` in SGLang's layout, atomically; return its configuration.

    Args:
        checkpoint: a checkpoint folder of speculators' trainer.
        folder: the new folder: ``config.json`` and ``model.safetensors``.
        verifier_model_type: ``model_type`` of the verifier, which decides how SGLang reads layer ids.

    Raises:
        BadInput: the checkpoint cannot be read.
        Failed: SGLang would serve it wrongly, or what was written does not read back equal.
    """
    trained = read_configuration(checkpoint)
    refuse_what_sglang_lacks(trained, checkpoint)
    tensors = {serving_name(name): tensor for name, tensor in read_tensors(checkpoint).items() if name != EMBEDDING}
    configuration = serving_configuration(trained, verifier_model_type)
    require_tensors(tensors, configuration, checkpoint)
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
        compare(tensors, load_file(temporary / "model.safetensors"), folder)
    return configuration


def read_configuration(checkpoint: Path) -> dict[str, Any]:
    """Speculators' configuration of a checkpoint."""
    path = checkpoint / "config.json"
    try:
        configuration: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: cannot read the drafter's configuration: {error}") from error
    if configuration.get("speculators_model_type") != "eagle3":
        raise BadInput(
            f"{path}: expected speculators_model_type eagle3, found {configuration.get('speculators_model_type')!r}"
        )
    return configuration


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint."""
    path = checkpoint / "model.safetensors"
    if not path.is_file():
        raise BadInput(f"{path}: no weights here; run train first")
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def refuse_what_sglang_lacks(trained: dict[str, Any], checkpoint: Path) -> None:
    """Refuse a drafter that SGLang would load and serve wrongly.

    Raises:
        Failed: naming the option to train without.
    """
    decoder = trained["transformer_layer_config"]
    windowed = "sliding_attention" in (decoder.get("layer_types") or [])
    for present, what in (
        (trained.get("norm_before_residual"), "norm_before_residual: train with --no-norm-before-residual"),
        (windowed, f"a sliding window of {decoder.get('sliding_window')}: train with --full-attention-indices 0"),
        (trained.get("embed_requires_grad"), "embeddings of its own: train without --embed-requires-grad"),
        (decoder.get("model_type") != "llama", f"a {decoder.get('model_type')} decoder: train with --draft-arch llama"),
    ):
        if present:
            raise Failed(f"{checkpoint}: SGLang cannot serve a drafter with {what}")


def serving_name(name: str) -> str:
    """SGLang's name of a tensor: the usual EAGLE-3 checkpoints call the only layer ``midlayer``."""
    return name.replace("layers.0.", "midlayer.")


def serving_configuration(trained: dict[str, Any], verifier_model_type: str) -> dict[str, Any]:
    """The drafter's ``config.json`` for SGLang."""
    decoder = trained["transformer_layer_config"]
    rope = decoder.get("rope_parameters") or {}
    plain_rope = rope.get("rope_type", "default") == "default"
    layers = serving_layer_ids(trained["eagle_aux_hidden_state_layer_ids"], verifier_model_type)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: decoder[name] for name in DECODER_FIELDS if name in decoder},
        "draft_vocab_size": trained["draft_vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": trained["dtype"],
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if plain_rope else rope,
        "fc_norm": bool(trained.get("fc_norm")),
        "norm_output": bool(trained.get("norm_output")),
        "norm_before_fc": bool(trained.get("norm_before_fc")),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers,
            "norm_before_fc": bool(trained.get("norm_before_fc")),
        },
    }


def serving_layer_ids(layers: list[int], verifier_model_type: str) -> list[int]:
    """Ids that make SGLang capture the residual streams entering ``layers``.

    Raises:
        Failed: no ids do, for this family of verifiers.
    """
    shifted = [layer - 1 for layer in layers]
    if verifier_model_type not in SHIFTED_ONLY_FROM_ONE or shifted[0] == 1:
        return shifted
    if layers[0] == 1:
        raise Failed(
            f"layers {layers}: SGLang cannot capture layer 1 first for a {verifier_model_type} verifier; capture "
            "from layer 2, the default"
        )
    return list(layers)


def require_tensors(tensors: dict[str, torch.Tensor], configuration: dict[str, Any], checkpoint: Path) -> None:
    """Require exactly the tensors that SGLang's model has, in shape, and finite.

    Raises:
        Failed: naming what is missing, left over, of another shape or not finite. SGLang skips unknown names silently.
    """
    expected = expected_shapes(configuration)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        described = "; ".join(f"{name}: found {found.get(name)}, expected {expected.get(name)}" for name in wrong)
        raise Failed(f"{checkpoint}: not the tensors that SGLang loads: {described}")
    broken = sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor.float()).all())
    if broken:
        raise Failed(f"{checkpoint}: not finite: {', '.join(broken)}; train again from an earlier checkpoint")


def expected_shapes(configuration: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of SGLang's ``LlamaForCausalLMEagle3`` by name."""
    hidden, inner = configuration["hidden_size"], configuration["intermediate_size"]
    query = configuration["num_attention_heads"] * configuration["head_dim"]
    keys = configuration["num_key_value_heads"] * configuration["head_dim"]
    fused = len(configuration["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) * hidden
    drafted, vocabulary = configuration["draft_vocab_size"], configuration["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    if configuration["norm_before_fc"]:
        shapes["input_norm.weight"] = (fused,)
    if configuration["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(fused // hidden)}
    if drafted != vocabulary:
        shapes |= {"t2d": (vocabulary,), "d2t": (drafted,)}
    return shapes


def compare(written: dict[str, torch.Tensor], read: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare what was written with what reads back, tensor by tensor.

    Raises:
        Failed: a tensor is missing or differs.
    """
    differing = sorted(
        name
        for name in {*written, *read}
        if name not in read or name not in written or not torch.equal(written[name], read[name])
    )
    if differing:
        raise Failed(f"{folder}: written tensors do not read back equal: {', '.join(differing)}; check the disk")


def parameter_count(tensors: dict[str, torch.Tensor]) -> int:
    """Parameters of a drafter, its output head included and the verifier's embedding left out."""
    return sum(t.numel() for name, t in tensors.items() if name not in (*VOCABULARY_TENSORS, EMBEDDING))

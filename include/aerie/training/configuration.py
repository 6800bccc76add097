"""Our training settings as the ``run.yaml`` of ``speculators train``, validated by speculators' own ``TrainConfig``."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from speculators.train.cli import create_transformer_layer_config
from speculators.train.config import TrainConfig
from speculators.train.config.resolution import build_parser
from transformers import AutoConfig, LlamaConfig

from aerie.artefacts.corpus import train_data_ratio
from aerie.artefacts.files import write_json, write_text
from aerie.errors import BadInput
from aerie.settings.pipeline import TrainingSettings
from aerie.training.streamed_states import BACKEND as STREAMED

# A drafter for an MLA verifier is a plain Llama layer: these are the shapes of the public drafters for Kimi-K2.5,
# except for the KV heads, of which grouped attention needs fewer, so that the drafter's own KV cache stays small.
MLA_DRAFT_HEAD_DIM = 128
MLA_DRAFT_KV_HEADS = 8
MLA_DRAFT_ROPE_THETA = 1_000_000.0

# What binds the trainer to the stages before and after it; ``extra_arguments`` may not change these.
PROTECTED = frozenset(
    {
        "d2t_path",
        "data_path",
        "draft_config",
        "draft_vocab_size",
        "dry_run",
        "epochs",
        "from_pretrained",
        "fsdp_shard",
        "hidden_states_backend",
        "hidden_states_path",
        "log_dir",
        "logger",
        "lr",
        "max_steps",
        "no_resume_from_checkpoint",
        "norm_before_residual",
        "on_missing",
        "optimizer",
        "save_path",
        "seed",
        "speculator_type",
        "t2d_path",
        "target_layer_ids",
        "total_seq_len",
        "train_data_ratio",
        "verifier_name_or_path",
    }
)

UNDOING = {
    "checkpoint_freq": "the last epoch's checkpoint is how success is told, and a retry resumes from whole epochs",
    "config": "it would take the place of the file with everything that this configuration and the stages before say",
    "dump_config": "the trainer would print its configuration and train nothing",
    "embed_requires_grad": "SGLang serves a drafter with the verifier's embedding",
    "log_freq": "every step is looked at for loss 0, NaN and error_records, and only a step that is logged can be",
    "save_best": "the last epoch's checkpoint, by which success is told, would be removed or never written",
    "trust_remote_code": "the trainer reads a stand-in of the verifier, which needs no code of its own",
}
"""What else ``extra_arguments`` may not set, and why: it would undo a check, or a file that a stage relies on."""


@dataclass(frozen=True)
class TrainerInputs:
    """What the trainer reads and where it writes; every path is absolute.

    ``layers`` are the auxiliary layers whose incoming residual stream was captured. The first ``train_rows`` of
    ``rows`` are trained on, the rest validates. ``streamed`` says that states appear as they are trained on,
    ``fp8`` that their files are stored so.
    """

    verifier_stub: Path
    dataset: Path
    hidden_states: Path
    d2t: Path
    t2d: Path
    draft_vocabulary_size: int
    layers: tuple[int, ...]
    train_rows: int
    rows: int
    folder: Path
    streamed: bool = False
    fp8: bool = False

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, one a finished epoch."""
        return self.folder / "checkpoints"

    @property
    def configuration(self) -> Path:
        """The trainer's ``run.yaml``."""
        return self.folder / "run.yaml"

    @property
    def draft_decoder(self) -> Path:
        """Folder of the draft decoder's ``config.json``."""
        return self.folder / "draft_decoder"


def write_configuration(settings: TrainingSettings, inputs: TrainerInputs, *, accelerated: bool) -> TrainConfig:
    """Write ``run.yaml`` and the draft decoder's configuration, and return what speculators makes of them.

    Raises:
        BadInput: the corpus has no validation rows, speculators refuses a value, or ``extra_arguments`` touch what
            binds the stages together.
    """
    if not 0 < inputs.train_rows < inputs.rows:
        raise BadInput(
            f"{inputs.dataset}: {inputs.train_rows} of {inputs.rows} rows are for training; the trainer needs training "
            "and validation rows: raise splits.validation or the data sets' budgets, then run prepare and merge again"
        )
    decoder = draft_decoder(inputs.verifier_stub, settings.draft_intermediate_size)
    write_json(inputs.draft_decoder / "config.json", decoder.to_diff_dict())
    write_text(inputs.configuration, yaml.safe_dump(document(settings, inputs, accelerated=accelerated)))
    return resolve(inputs.configuration, settings.extra_arguments)


def document(settings: TrainingSettings, inputs: TrainerInputs, *, accelerated: bool) -> dict[str, Any]:
    """The ``run.yaml``, in speculators' groups."""
    train: dict[str, Any] = {
        "speculator_type": "eagle3",
        "seed": settings.seed,
        "verifier": {"verifier_name_or_path": str(inputs.verifier_stub)},
        "draft": {
            "draft_config": str(inputs.draft_decoder),
            "target_layer_ids": list(inputs.layers),
            "draft_vocab_size": inputs.draft_vocabulary_size,
            "d2t_path": str(inputs.d2t),
            "t2d_path": str(inputs.t2d),
            # EAGLE-3 masks nothing; a given id keeps speculators from loading a tokenizer, which may need remote code.
            "mask_token_id": 0,
            # SGLang takes the residual before the norm.
            "norm_before_residual": False,
        },
        "data": {
            "data_path": str(inputs.dataset),
            "hidden_states_backend": STREAMED if inputs.streamed else "fp8" if inputs.fp8 else "file",
            "total_seq_len": settings.sequence_length,
            "train_data_ratio": train_data_ratio(inputs.train_rows, inputs.rows),
        },
        "backend": {"hidden_states_path": str(inputs.hidden_states)},
        # The default would ask a vLLM on localhost for missing states.
        "generation": {"on_missing": "raise"},
        "optimizer": {"optimizer": settings.optimizer, "lr": settings.learning_rate},
        "trainer": {
            "epochs": settings.epochs,
            "save_path": str(inputs.checkpoints),
            "fsdp_shard": settings.fsdp,
        },
    }
    if settings.tensorboard is not None:
        train["logging"] = {"logger": "tensorboard", "log_dir": str(settings.tensorboard)}
    if not accelerated:
        # Why: aerie.training.cpu_launcher. Without workers nothing is copied between processes on a small machine.
        train["draft"]["draft_attn_impl"] = "sdpa"
        train["loss"] = {"loss_implementation": "eager"}
        train["data"] |= {"hidden_states_dtype": "float32", "num_workers": 0}
    return {"train": train}


def draft_decoder(verifier_stub: Path, intermediate_size: int | None) -> LlamaConfig:
    """The draft's decoder: one Llama layer with full attention, in the verifier's proportions.

    speculators' own default is a sliding window, which SGLang applies only by a flag. For an MLA verifier it would
    inherit the sizes of the compressed projections, which mean nothing in a Llama layer.
    """
    verifier = AutoConfig.from_pretrained(verifier_stub)
    if getattr(verifier, "kv_lora_rank", None):
        decoder = mla_draft_decoder(verifier)
    else:
        decoder = create_transformer_layer_config(
            verifier_name_or_path=str(verifier_stub),
            num_layers=1,
            draft_arch="llama",
            hidden_act="silu",
            sliding_window=None,
            full_attention_indices=[0],
        )
    if intermediate_size is not None:
        decoder.intermediate_size = intermediate_size
    return decoder


def mla_draft_decoder(verifier: Any) -> LlamaConfig:
    """A plain Llama layer for a verifier with multi-head latent attention."""
    return LlamaConfig(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=verifier.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=verifier.num_attention_heads,
        num_key_value_heads=min(MLA_DRAFT_KV_HEADS, verifier.num_attention_heads),
        head_dim=MLA_DRAFT_HEAD_DIM,
        hidden_act="silu",
        max_position_embeddings=verifier.max_position_embeddings,
        initializer_range=verifier.initializer_range,
        rms_norm_eps=verifier.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": MLA_DRAFT_ROPE_THETA},
        tie_word_embeddings=False,
        layer_types=["full_attention"],
    )


def resolve(configuration: Path, extra_arguments: tuple[str, ...]) -> TrainConfig:
    """Let speculators layer ``extra_arguments`` over the file and validate both.

    Raises:
        BadInput: it refuses them, or ``extra_arguments`` set a field of ``PROTECTED`` or ``UNDOING``.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            given = vars(build_parser().parse_args(extra_arguments))
            undoing = [name for name in sorted(UNDOING) if given.get(name) is not None and given[name] is not False]
            if undoing:
                why = "; ".join(f"{_flag(name)}: {UNDOING[name]}" for name in undoing)
                raise BadInput(f"training.extra_arguments may not set {why}; leave it out")
            config = TrainConfig.resolve(["--config", str(configuration), *extra_arguments])
    except SystemExit:
        message = complaint.getvalue().rpartition("error: ")[2].strip()
        raise BadInput(f"{configuration} with training.extra_arguments {list(extra_arguments)}: {message}") from None
    refused = sorted(name for name in PROTECTED if config.provenance.get(name) == "flag")
    if refused:
        flags = ", ".join(map(_flag, refused))
        raise BadInput(
            f"training.extra_arguments sets {flags}, which binds the trainer to the stages around it; use the "
            "configuration's own fields, or leave it out"
        )
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def trainer_command(settings: TrainingSettings, inputs: TrainerInputs, *, accelerated: bool) -> list[str]:
    """The command that trains: through ``aerie.training.launcher``, or under torchrun for several processes.

    Raises:
        BadInput: several processes without an accelerator.
    """
    module = ["-m", "aerie.training.launcher"]
    if settings.processes > 1:
        if not accelerated:
            raise BadInput(f"training.processes is {settings.processes}: without an accelerator it must be 1")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.processes}"]
        module = [*torchrun, "-m", "aerie.training.streamed_trainer" if inputs.streamed else "speculators.train"]
    return [sys.executable, *module, "--config", str(inputs.configuration), *settings.extra_arguments]

import json
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
from hs_connectors import HiddenStatesBackend
from transformers import DeepseekV3Config

from aerie.errors import BadInput
from aerie.settings.pipeline import TrainingSettings
from aerie.training.configuration import TrainerInputs, draft_decoder, trainer_command, write_configuration
from aerie.training.streamed_states import StreamedStates
from aerie.training.verifier_stub import write_verifier_stub


@pytest.fixture
def inputs(tmp_path: Path, verifier: Path) -> TrainerInputs:
    return TrainerInputs(
        verifier_stub=write_verifier_stub(verifier, tmp_path / "stub"),
        dataset=tmp_path / "corpus",
        hidden_states=tmp_path / "states",
        d2t=tmp_path / "d2t.npy",
        t2d=tmp_path / "t2d.npy",
        draft_vocabulary_size=32,
        layers=(2, 4, 5),
        train_rows=20,
        rows=24,
        folder=tmp_path / "training",
    )


def settings(**fields: object) -> TrainingSettings:
    return TrainingSettings.model_validate({"epochs": 3, "sequence_length": 128, "seed": 7, **fields})


def test_speculators_takes_every_value_and_ignores_none(inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # speculators only warns of keys that it does not know
        config = write_configuration(settings(optimizer="muon", learning_rate=2e-3), inputs, accelerated=False)
    assert (config.seed, config.trainer.epochs, config.optimizer.optimizer, config.optimizer.lr) == (7, 3, "muon", 2e-3)
    assert (config.data.total_seq_len, config.draft.draft_vocab_size) == (128, 32)
    assert config.draft.target_layer_ids == [2, 4, 5]
    assert config.backend_args["hidden_states_path"] == str(inputs.hidden_states)


def test_missing_states_raise_instead_of_asking_a_vllm_on_localhost(inputs):
    assert write_configuration(settings(), inputs, accelerated=True).generation.on_missing == "raise"


def test_the_drafter_is_one_that_sglang_serves(inputs):
    config = write_configuration(settings(), inputs, accelerated=True)
    decoder = json.loads((Path(config.draft.draft_config) / "config.json").read_text())
    assert config.draft.norm_before_residual is False
    assert decoder["layer_types"] == ["full_attention"]
    assert Path(config.verifier.verifier_name_or_path).is_absolute()


def test_a_cpu_gets_what_it_can_run_and_an_accelerator_speculators_own(inputs):
    cpu = write_configuration(settings(), inputs, accelerated=False)
    assert (cpu.draft.draft_attn_impl, cpu.loss.loss_implementation) == ("sdpa", "eager")
    assert (cpu.data.hidden_states_dtype, cpu.data.num_workers) == ("float32", 0)
    accelerated = write_configuration(settings(), inputs, accelerated=True)
    assert (accelerated.draft.draft_attn_impl, accelerated.loss.loss_implementation) == (
        "simple_flex_attention",
        "fused",
    )


@pytest.mark.parametrize("rows", [3, 7, 20, 333, 9_999, 1_000_003])
def test_the_trainer_validates_on_exactly_the_validation_rows(inputs, rows):
    train_rows = rows - 1
    changed = TrainerInputs(**{**vars(inputs), "rows": rows, "train_rows": train_rows})
    ratio = write_configuration(settings(), changed, accelerated=False).data.train_data_ratio
    assert int(rows * ratio) == train_rows


def test_a_corpus_without_validation_rows_is_refused_before_the_trainer_starts(inputs):
    with pytest.raises(BadInput, match=r"raise splits\.validation"):
        write_configuration(settings(), TrainerInputs(**{**vars(inputs), "train_rows": 24}), accelerated=False)


@pytest.mark.parametrize(
    "flags", [("--on-missing", "generate"), ("--norm-before-residual",), ("--max-steps", "5"), ("--epochs", "1")]
)
def test_extra_arguments_may_not_undo_what_binds_the_stages(inputs, flags):
    with pytest.raises(BadInput, match=flags[0]):
        write_configuration(settings(extra_arguments=flags), inputs, accelerated=False)


@pytest.mark.parametrize(
    "flags",
    [
        ("--log-freq", "50"),  # 49 of 50 steps could have loss 0 or rows of other tokens
        ("--log-f=50",),
        ("--log-freq", "0"),
        ("--checkpoint-freq", "2"),  # of 3 epochs the last is never saved
        ("--checkpoint-freq", "0.5"),
        ("--save-best",),
        ("--embed-requires-grad",),
        ("--trust-remote-code",),
        ("--dump-config",),
    ],
)
def test_extra_arguments_may_not_undo_a_check_or_a_file_that_a_stage_relies_on(inputs, flags):
    with pytest.raises(BadInput, match=rf"may not set {flags[0].partition('=')[0]}.*: .*; leave it out"):
        write_configuration(settings(extra_arguments=flags), inputs, accelerated=False)


def test_extra_arguments_may_not_put_another_file_in_the_place_of_the_trainers_configuration(inputs, tmp_path):
    (tmp_path / "mine.yaml").write_text("train: {verifier: {verifier_name_or_path: another}, trainer: {epochs: 9}}")
    with pytest.raises(BadInput, match="may not set --config"):
        write_configuration(
            settings(extra_arguments=("--config", str(tmp_path / "mine.yaml"))), inputs, accelerated=True
        )


def test_extra_arguments_reach_speculators_and_wrong_ones_are_named(inputs):
    config = write_configuration(settings(extra_arguments=("--ttt-steps", "4")), inputs, accelerated=False)
    assert config.loss.ttt_steps == 4
    with pytest.raises(BadInput, match="--no-such-flag"):
        write_configuration(settings(extra_arguments=("--no-such-flag",)), inputs, accelerated=False)


def test_an_mla_verifier_gets_a_plain_llama_drafter(tmp_path):
    DeepseekV3Config(hidden_size=512, num_attention_heads=16, num_hidden_layers=4, vocab_size=64).save_pretrained(
        tmp_path
    )
    decoder = draft_decoder(tmp_path, intermediate_size=1024)
    assert (decoder.model_type, decoder.head_dim, decoder.num_attention_heads) == ("llama", 128, 16)
    assert (decoder.num_key_value_heads, decoder.intermediate_size) == (8, 1024)


def test_one_process_is_started_by_the_launcher_and_several_by_torchrun(inputs):
    one = trainer_command(settings(), inputs, accelerated=True)
    assert one[1:] == ["-m", "aerie.training.launcher", "--config", str(inputs.configuration)]
    several = trainer_command(settings(processes=8, extra_arguments=("--fsdp-shard",)), inputs, accelerated=True)
    assert several[1:7] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"),
        *("-m", "speculators.train"),
    ]
    assert several[-1] == "--fsdp-shard"
    with pytest.raises(BadInput, match=r"training\.processes"):
        trainer_command(settings(processes=2), inputs, accelerated=False)


def test_streamed_states_are_known_to_every_process_of_the_trainer(inputs):
    streamed = TrainerInputs(**{**vars(inputs), "streamed": True})
    config = write_configuration(settings(), streamed, accelerated=False).flatten()
    backend = HiddenStatesBackend.registry[config["hidden_states_backend"]]
    transfer = backend.from_train_args(Namespace(**config), config["data_path"])
    assert isinstance(transfer, StreamedStates)
    several = trainer_command(settings(processes=8), streamed, accelerated=True)
    assert several[5:7] == ["-m", "aerie.training.streamed_trainer"]


def test_shards_are_asked_of_speculators_and_refused_of_one_process(inputs):
    sharded = write_configuration(settings(processes=8, fsdp=True), inputs, accelerated=True)
    assert sharded.trainer.fsdp_shard is True
    assert write_configuration(settings(processes=8), inputs, accelerated=True).trainer.fsdp_shard is False
    with pytest.raises(ValueError, match="processes is 1"):
        settings(fsdp=True)


def test_tensorboard_gets_its_files_where_it_is_asked_for(inputs, tmp_path):
    logging = write_configuration(settings(tensorboard=tmp_path / "board"), inputs, accelerated=True).logging
    assert (logging.logger, logging.log_dir) == ("tensorboard", str(tmp_path / "board"))
    assert write_configuration(settings(), inputs, accelerated=True).logging.logger == ""


@pytest.mark.parametrize("flag", ["--fsdp-shard", "--logger=wandb", "--log-dir=elsewhere"])
def test_flags_of_the_settings_own_fields_are_refused(inputs, flag):
    with pytest.raises(BadInput, match="use the configuration's own fields"):
        write_configuration(settings(extra_arguments=(flag,)), inputs, accelerated=True)

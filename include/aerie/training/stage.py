"""The stages ``train`` and ``export``."""

import gc
import json
import shutil
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from speculators.model import SpeculatorModel
from speculators.train.cli import build_draft_model, parse_vocab_mappings, set_seed
from speculators.train.config import TrainConfig

from aerie.artefacts.corpus import DATASET_FOLDER, iterate_batches
from aerie.artefacts.draft_vocabulary import mapping_paths, read_draft_vocabulary
from aerie.artefacts.files import atomic_folder, fingerprint_of, write_json
from aerie.artefacts.manifest import (
    InputFile,
    Manifest,
    answered_by,
    describe_input,
    describe_output,
    read_manifest,
    write_manifest,
)
from aerie.artefacts.state_index import INDEX_FILE
from aerie.benchmark.estimate import chain_length
from aerie.corpus.stage import read_corpus
from aerie.errors import BadInput, Failed, Retryable
from aerie.hidden_states.checkpoint import checkpoint_fingerprint
from aerie.hidden_states.identity import read_identity
from aerie.hidden_states.layers import CapturedLayers, resolve_layers
from aerie.hidden_states.streaming import is_streamed
from aerie.hidden_states.verify import verify
from aerie.serving.client import require_unused
from aerie.stages import Cadence, Events, StageRequest, StageResult
from aerie.training.checkpoints import (
    CHECKPOINT_FILES,
    INTERRUPTED,
    VALIDATION_METRICS,
    BatchPlan,
    adopt_interrupted,
    best_checkpoint,
    is_finished,
    latest_progress,
    remove_cut_off,
    repeat_cut_validation,
)
from aerie.training.configuration import TrainerInputs, trainer_command, write_configuration
from aerie.training.evidence import Evidence, look_again
from aerie.training.export import (
    export_drafter,
    parameter_count,
    read_configuration,
    read_tensors,
    refuse_what_sglang_lacks,
    serving_layer_ids,
)
from aerie.training.export_vllm import VLLM_LAYERS, export_for_vllm
from aerie.training.model_card import model_card
from aerie.training.publishing import describe_drafter
from aerie.training.record import exported_layouts, record_of, relative, verifier_model_type, versions
from aerie.training.stream_order import VALIDATION_SEED, StreamOrder
from aerie.training.streamed_run import StreamedTraining, streamed_states, trainer_gpus, visible_gpus
from aerie.training.streaming import StreamedSoFar
from aerie.training.trainer_log import Step, validated_epochs
from aerie.training.trainer_process import FedSince, TrainerReport, exclusive, run_trainer
from aerie.training.verifier_stub import write_verifier_stub

TRAINING_VERSION = 2
"""Raised when the same inputs and settings would train another drafter."""
EXPORT_VERSION = 3
AROUND_THE_TRAINING = ("tensorboard", "stall_minutes")
"""Settings that say how a training is watched, not what it learns."""

RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
LOG_FILE = "train.log"
LOCK_FILE = "trainer.lock"


@dataclass(frozen=True)
class Prepared:
    """What ``train`` established before it starts: where everything is, and what the result will answer to."""

    corpus: Manifest
    captured: Manifest
    layers: CapturedLayers
    trainer: TrainerInputs
    order: StreamOrder
    inputs: list[InputFile]
    fingerprint: str
    verifier_fingerprint: str


def train(request: StageRequest, events: Events) -> StageResult:
    """Train the drafter on the captured hidden states; a retry resumes.

    Raises:
        BadInput: an earlier stage has not run, or a setting is wrong.
        Failed: the hidden states or the vocabulary do not belong to the corpus, a step had loss 0, NaN or rows that do
            not match their states, or the trainer failed.
        Retryable: the trainer was interrupted, and has saved its state.
        Busy: another run's server has the GPUs, or a trainer of an earlier try still ends.
    """
    prepared = prepare_training(request)
    folder = prepared.trainer.folder
    manifest_path = request.files.manifest("train")
    answer = (
        None if request.force else answered_by(manifest_path, fingerprint=prepared.fingerprint, inputs=prepared.inputs)
    )
    if answer is not None:
        events.progress(f"nothing to do: checkpoint {answer.counts['checkpoint']} answers these hidden states")
        return StageResult(stage="train", reused=True, manifest=answer)
    verify_states(request, prepared, events)
    evidence = look_again(request, prepared.corpus.counts["rows"], prepared.captured, events)
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    local_gpus = request.settings.serving.backend == "local" and request.settings.serving.device == "cuda"
    if local_gpus and not prepared.trainer.streamed:
        require_unused(request.server_folder, by=request.run_id)
    with exclusive(folder.with_name(f".{folder.name}.{LOCK_FILE}")) as lock:
        manifest_path.unlink(missing_ok=True)
        begin_or_continue(prepared, events, force=request.force)
        resumed_from = resume_point(prepared, events)
        configure(request, prepared)
        streamed = None
        if not is_finished(prepared.trainer.checkpoints, request.settings.training.epochs):
            streamed = run(request, prepared, events, lock)
    manifest = write_train_manifest(
        request,
        prepared,
        seconds=time.monotonic() - started,
        resumed_from_step=resumed_from,
        evidence=evidence,
        streamed=streamed,
    )
    counts = manifest.counts
    events.progress(
        f"trained {counts['drafter_parameters']:,} parameters in {counts['steps']} steps: loss "
        f"{counts['first_loss']:.3f} to {counts['last_loss']:.3f}, validation {counts['validation']}"
    )
    return StageResult(stage="train", reused=False, manifest=manifest)


def verify_states(request: StageRequest, prepared: Prepared, events: Events) -> None:
    """Verify the state files; streamed ones were proved on a sample, and are checked one by one as they are captured.

    Raises:
        Failed: naming the files that are wrong.
    """
    if prepared.trainer.streamed:
        proved = prepared.captured.counts["files"]
        events.progress(f"hidden states are streamed: proved on {proved} rows, checked one by one as they are captured")
        return
    seconds = request.settings.generation.progress_seconds
    states = verify(request.files, prepared.layers, events, progress_seconds=seconds)
    events.progress(f"verified the hidden states of {states.rows} rows, {states.tokens} tokens, {states.bytes} bytes")


def prepare_training(request: StageRequest) -> Prepared:
    """Tie corpus, vocabulary and hidden states together.

    Raises:
        BadInput: one of them is missing, or a row is longer than the trainer's sequences.
        Failed: the vocabulary or the states were made from another corpus, or other layers were captured.
    """
    files, settings = request.files, request.settings
    corpus, corpus_files = read_corpus(files)
    corpus_fingerprint = corpus.counts["corpus_fingerprint"]
    vocabulary = read_draft_vocabulary(files.vocabulary, corpus_fingerprint=corpus_fingerprint)
    d2t, t2d = mapping_paths(files.vocabulary.resolve(), vocabulary.size, corpus_fingerprint)
    layers = resolve_layers(settings)
    captured = read_manifest(files.manifest("capture"))
    require_same_capture(captured, corpus_fingerprint=corpus_fingerprint, layers=layers)
    verifier_fingerprint = require_same_verifier(read_identity(files.hidden_states), settings.verifier.path)
    require_whole_rows(corpus, settings.training.sequence_length)
    lengths, validation_lengths = row_lengths(files.corpus / DATASET_FOLDER)
    streamed = is_streamed(captured)
    read = (d2t, t2d) if streamed else (d2t, t2d, files.hidden_states / INDEX_FILE)
    inputs = [*corpus_files, *map(describe_input, read)]
    folder = files.training.resolve()
    trainer = TrainerInputs(
        verifier_stub=folder / "verifier",
        dataset=(files.corpus / DATASET_FOLDER).resolve(),
        hidden_states=files.hidden_states.resolve(),
        d2t=d2t,
        t2d=t2d,
        draft_vocabulary_size=vocabulary.size,
        layers=layers.auxiliary,
        train_rows=len(lengths),
        rows=corpus.counts["rows"],
        folder=folder,
        streamed=streamed,
        fp8=layers.storage == "fp8",
    )
    sequence_length, processes = settings.training.sequence_length, settings.training.processes
    order = StreamOrder(
        train=BatchPlan(lengths, sequence_length, processes, settings.training.seed),
        validation=BatchPlan(validation_lengths, sequence_length, processes, VALIDATION_SEED),
        epochs=settings.training.epochs,
    )
    fingerprint = fingerprint_of(
        {
            "version": TRAINING_VERSION,
            "training": settings.training.model_dump(mode="json", exclude=set(AROUND_THE_TRAINING)),
            "capture": captured.fingerprint,
            "vocabulary_size": vocabulary.size,
        }
    )
    return Prepared(corpus, captured, layers, trainer, order, inputs, fingerprint, verifier_fingerprint)


def require_same_verifier(identity: Mapping[str, Any] | None, verifier: Path) -> str:
    """Refuse hidden states of another model than the one whose embedding and head are trained with.

    Returns:
        The verifier's fingerprint.

    Raises:
        BadInput: the checkpoint cannot be read, or the states do not say whose they are.
        Failed: they are another model's.
    """
    if identity is None:
        raise BadInput("the hidden states do not say which model they are of; run capture again")
    fingerprint = checkpoint_fingerprint(verifier)
    if identity["verifier"] != fingerprint:
        raise Failed(
            f"hidden states were captured from model {identity['verifier'][:12]}, but {verifier} is "
            f"{fingerprint[:12]}; set verifier.path to the model that was captured, or run capture again"
        )
    return fingerprint


def require_same_capture(captured: Manifest, *, corpus_fingerprint: str, layers: CapturedLayers) -> None:
    """Refuse hidden states of another corpus or of other layers.

    Raises:
        Failed: naming both.
    """
    counts = captured.counts
    if counts["corpus_fingerprint"] != corpus_fingerprint:
        raise Failed(
            f"hidden states were captured for corpus {counts['corpus_fingerprint'][:12]}, but the corpus is "
            f"{corpus_fingerprint[:12]}; run capture again"
        )
    if tuple(counts["layers"]) != layers.auxiliary:
        raise Failed(
            f"hidden states were captured at layers {counts['layers']}, but the configuration asks for "
            f"{list(layers.auxiliary)}; run capture again, or set hidden_states.layers"
        )


def require_captured_layers(drafter: dict[str, Any], captured: Sequence[int]) -> None:
    """Refuse a drafter whose configuration, from which the export takes the layers, names others than were captured.

    Raises:
        Failed: naming both.
    """
    named = drafter["eagle_aux_hidden_state_layer_ids"]
    if list(named) != list(captured):
        raise Failed(
            f"the drafter would be exported for states entering layers {named}, but those of {list(captured)} were "
            "captured: it would be served with others than it learned from; mend the trainer's target_layer_ids"
        )


def require_whole_rows(corpus: Manifest, sequence_length: int) -> None:
    """Refuse sequences that would cut rows: speculators drops what exceeds them, with a warning.

    Raises:
        BadInput: naming both lengths.
    """
    longest = corpus.counts["longest_row_tokens"]
    if longest > sequence_length:
        raise BadInput(
            f"the longest corpus row has {longest} tokens, but training.sequence_length is {sequence_length} and the "
            "trainer would cut its end off: raise it, or lower corpus.maximum_length and merge again"
        )


def row_lengths(dataset: Path) -> tuple[list[int], list[int]]:
    """Lengths in tokens of the training rows, which are the first, and of the validation rows behind them.

    Raises:
        Failed: a training row comes after a validation row, where the trainer would validate on it.
    """
    training: list[int] = []
    validation: list[int] = []
    for batch in iterate_batches(dataset):
        for split, length in zip(batch["split"].to_pylist(), batch["seq_len"].to_pylist(), strict=True):
            if split != "train":
                validation.append(length)
            elif validation:
                raise Failed(f"{dataset}: row {len(training)} is for training but follows validation rows; merge again")
            else:
                training.append(length)
    return training, validation


def begin_or_continue(prepared: Prepared, events: Events, *, force: bool) -> None:
    """Keep the folder of an earlier try of the same training, empty that of another."""
    folder, identity = prepared.trainer.folder, {"fingerprint": prepared.fingerprint}
    path = folder / RUN_FILE
    if not force and path.is_file() and json.loads(path.read_text(encoding="utf-8")) == identity:
        return
    if prepared.trainer.checkpoints.exists():
        events.progress("starting again: the checkpoints here are of another training")
    shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(path, identity)


def resume_point(prepared: Prepared, events: Events) -> int:
    """Make an interrupted run's state the one that the trainer resumes from; return the step it resumes from."""
    checkpoints = prepared.trainer.checkpoints
    for name in remove_cut_off(checkpoints):
        events.progress(f"checkpoint {name} was cut off while it was written: removed")
    interrupted = (checkpoints / INTERRUPTED).exists()
    adopted = adopt_interrupted(checkpoints, prepared.order.train)
    if interrupted and adopted is None:
        events.progress("the interrupted run's state holds nothing newer than the last checkpoint: removed")
    unvalidated = repeat_cut_validation(
        checkpoints, prepared.order.train, _validated(prepared.trainer.folder / LOG_FILE)
    )
    if unvalidated is not None:
        events.progress(f"epoch {unvalidated + 1} was ended before it was validated: validating it first")
    latest = latest_progress(checkpoints)
    if latest is None:
        return 0
    events.progress(f"resuming after step {latest.global_step}, in epoch {latest.epoch + 1}")
    return latest.global_step


def _validated(log: Path) -> set[int]:
    if not log.is_file():
        return set()
    with log.open(encoding="utf-8", errors="replace") as lines:
        return validated_epochs(lines)


def configure(request: StageRequest, prepared: Prepared) -> None:
    """Write the verifier stub and the trainer's configuration, and the drafter as initialised, before any step.

    Raises:
        BadInput: a setting is wrong.
        Failed: the drafter would be served with states of other layers than those that were captured.
    """
    settings, trainer = request.settings.training, prepared.trainer
    write_verifier_stub(request.settings.verifier.path, trainer.verifier_stub)
    config = write_configuration(settings, trainer, accelerated=torch.accelerator.is_available())
    write_untrained(config, untrained_folder(trainer.folder))
    require_captured_layers(read_configuration(untrained_folder(trainer.folder)), prepared.layers.auxiliary)


def untrained_folder(training: Path) -> Path:
    """Folder of the drafter as it was before the first step."""
    return training / "untrained"


def write_untrained(config: TrainConfig, folder: Path) -> None:
    """Save the drafter as speculators initialises it from the seed: the trainer's weights at step 0, in bfloat16."""
    arguments = Namespace(**config.flatten())
    set_seed(arguments.seed)
    d2t, t2d, size = parse_vocab_mappings(arguments)
    drafter = build_draft_model(arguments, SpeculatorModel.registry[arguments.speculator_type], t2d, d2t, size)
    with atomic_folder(folder) as temporary:
        drafter.to(torch.bfloat16).save_pretrained(temporary)
    del drafter
    gc.collect()


def run(request: StageRequest, prepared: Prepared, events: Events, lock: int) -> StreamedSoFar | None:
    """Run the trainer until the last epoch's checkpoint is there, with states streamed to it where they are not kept.

    Returns:
        What was streamed; None where the states are kept.

    Raises:
        Failed, Retryable: as ``train``.
    """
    trainer, streamed = prepared.trainer, None
    if not trainer.streamed:
        report = run_on(request, prepared, events, lock, gpus=None, fed_since=None)
    else:
        gpus = trainer_gpus(request, visible=visible_gpus())
        training = StreamedTraining(
            corpus=prepared.corpus,
            captured=prepared.captured,
            layers=prepared.layers,
            order=prepared.order,
            after=latest_progress(trainer.checkpoints),
        )
        with streamed_states(request, training, events) as stream:
            try:
                report = run_on(request, prepared, events, lock, gpus=gpus, fed_since=lambda: stream.waiting_since)
            except Failed as error:
                # The capture may be tried again, and a trainer that hangs as well says nothing of why it failed.
                if stream.failure is not None:
                    raise stream.failure from error
                raise
            if stream.failure is not None:
                raise stream.failure
        streamed = stream.so_far
    require_success(report, trainer, epochs=request.settings.training.epochs)
    return streamed


def run_on(
    request: StageRequest,
    prepared: Prepared,
    events: Events,
    lock: int,
    *,
    gpus: str | None,
    fed_since: FedSince | None,
) -> TrainerReport:
    """Run the trainer once, on ``gpus`` alone if given, and return what it said.

    Where states are streamed to it, ``fed_since`` keeps the time in which it waits for the capture, which gives up by
    itself, from counting as the trainer's.

    Raises:
        Failed: a step says that what it trains on is wrong, or it hangs; what the trainer saved then is removed.
        Retryable: this process was told to end.
    """
    settings, trainer = request.settings.training, prepared.trainer
    progress = Progress(request, prepared, events)
    try:
        return run_trainer(
            trainer_command(settings, trainer, accelerated=torch.accelerator.is_available()),
            log=trainer.folder / LOG_FILE,
            lock=lock,
            on_step=progress.step,
            on_validation=progress.validation,
            stall_seconds=settings.stall_minutes * 60,
            fed_since=fed_since,
            gpus=gpus,
        )
    except Failed:
        # What the trainer saved while it was ended has learned from the fault.
        shutil.rmtree(trainer.checkpoints / INTERRUPTED, ignore_errors=True)
        raise
    finally:
        progress.close()


def require_success(report: TrainerReport, trainer: TrainerInputs, *, epochs: int) -> None:
    """Success is the wanted epoch's checkpoint: an interrupted trainer exits with 0 as well.

    Raises:
        Failed: the trainer failed, or ended without the checkpoint.
        Retryable: it was interrupted or killed.
    """
    log = trainer.folder / LOG_FILE
    if report.interrupted or (report.exit_code or 0) < 0:
        raise Retryable(f"the trainer was ended by a signal (exit code {report.exit_code}); the next try resumes")
    if report.exit_code != 0:
        raise Failed(f"the trainer ended with exit code {report.exit_code}; {log} ends with:\n{report.evidence()}")
    if not is_finished(trainer.checkpoints, epochs):
        raise Failed(
            f"the trainer ended with exit code 0 but without the checkpoint of epoch {epochs} in {trainer.checkpoints}"
            f"; {log} ends with:\n{report.evidence()}"
        )


class Progress:
    """Steps as they are made: each in a file, and every few seconds a progress line and a metric."""

    def __init__(self, request: StageRequest, prepared: Prepared, events: Events) -> None:
        self._events = events
        self._epochs = request.settings.training.epochs
        self._of_steps = prepared.order.train.steps(0) * self._epochs
        self._cadence = Cadence(request.settings.generation.progress_seconds, at_once=True)
        self._last: Step | None = None
        self._file = (prepared.trainer.folder / STEPS_FILE).open("a", encoding="utf-8", buffering=1)

    def step(self, step: Step) -> None:
        """Note one step."""
        self._file.write(json.dumps({"time": time.time(), **vars(step)}) + "\n")
        self._last = step
        if self._cadence.is_due():
            self._report(step)

    def _report(self, step: Step) -> None:
        speed = f", {step.tokens_per_second:.0f} tokens/s" if step.tokens_per_second else ""
        self._events.progress(
            f"step {step.global_step + 1} of about {self._of_steps}, epoch {step.epoch + 1} of {self._epochs}: "
            f"loss {step.loss:.3f}{speed}",
            step=step.global_step + 1,
            of_steps=self._of_steps,
        )
        accuracies = {f"accuracy_{position}": value for position, value in enumerate(step.accuracies)}
        self._events.metric(
            step=step.global_step + 1,
            epoch=step.epoch + 1,
            loss=step.loss,
            learning_rate=step.learning_rate,
            tokens_per_second=step.tokens_per_second,
            **accuracies,
        )

    def validation(self, metrics: dict[str, float]) -> None:
        """Note one validation."""
        self._events.progress(
            f"validation: loss {metrics['loss_epoch']:.3f}, about "
            f"{estimated_acceptance_length(metrics):.2f} tokens a verify step if served"
        )
        self._events.metric(**{f"validation_{name.removesuffix('_epoch')}": value for name, value in metrics.items()})

    def close(self) -> None:
        """Report the last step and close the file."""
        if self._last is not None:
            self._report(self._last)
        self._file.close()


def estimated_acceptance_length(metrics: dict[str, float]) -> float:
    """Acceptance length that validation promises: 1 + a0 + a0 a1 + ..., from each position's accuracy given the last's.

    It is an estimate on rows made like the training rows, so it does not show what is wrong with both. Targets outside
    the draft vocabulary count as reached; the benchmark compares what is served with an estimate without them.
    """
    positions = takewhile(lambda name: name in metrics, (f"cond_acc_{position}_epoch" for position in count()))
    return chain_length(metrics[name] for name in positions)


def write_train_manifest(
    request: StageRequest,
    prepared: Prepared,
    *,
    seconds: float,
    resumed_from_step: int,
    evidence: Evidence,
    streamed: StreamedSoFar | None,
) -> Manifest:
    """Describe the best checkpoint."""
    trainer, settings = prepared.trainer, request.settings.training
    checkpoint = best_checkpoint(trainer.checkpoints, settings.epochs)
    refuse_what_sglang_lacks(read_configuration(checkpoint), checkpoint)
    first, last = first_and_last_step(trainer.folder / STEPS_FILE)
    folders = (checkpoint, untrained_folder(trainer.folder))
    return write_manifest(
        request.files.manifest("train"),
        stage="train",
        edition=request.edition,
        dataset=None,
        fingerprint=prepared.fingerprint,
        inputs=prepared.inputs,
        outputs=[describe_output(folder / name) for folder in folders for name in CHECKPOINT_FILES],
        counts={
            "steps": last["global_step"] + 1,
            "epochs": settings.epochs,
            "first_loss": first["loss"],
            "last_loss": last["loss"],
            "validation": validation_metrics(checkpoint),
            "seconds": round(seconds, 1),
            "resumed_from_step": resumed_from_step,
            "drafter_parameters": parameter_count(read_tensors(checkpoint)),
            "checkpoint": checkpoint.name,
            "layers": list(trainer.layers),
            "draft_vocabulary_size": trainer.draft_vocabulary_size,
            "corpus_fingerprint": prepared.corpus.counts["corpus_fingerprint"],
            **evidence.counts,
            "verifier_fingerprint": prepared.verifier_fingerprint,
            "streamed": vars(streamed) if streamed else None,
            "versions": versions(),
        },
    )


def first_and_last_step(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """First and last line of the file of steps.

    Raises:
        Failed: no step was made.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        raise Failed(f"{path}: the trainer reported no step; see {LOG_FILE} beside it")
    return json.loads(lines[0]), json.loads(lines[-1])


def validation_metrics(checkpoint: Path) -> dict[str, float] | None:
    """Validation metrics of a checkpoint with the acceptance length that they promise; None if it has none."""
    path = checkpoint / VALIDATION_METRICS
    if not path.is_file():
        return None
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return {
        "loss": metrics["loss_epoch"],
        **{name.removesuffix("_epoch"): value for name, value in metrics.items() if name.startswith("cond_acc_")},
        "estimated_acceptance_length": estimated_acceptance_length(metrics),
    }


def export(request: StageRequest, events: Events) -> StageResult:
    """Export the trained drafter for SGLang and for vLLM, and beside it the same one untrained, to compare with.

    Raises:
        BadInput: ``train`` has not finished.
        Failed: SGLang could not serve the drafter, or the checkpoint is not the one that was trained.
    """
    files, settings = request.files, request.settings
    trained = read_manifest(files.manifest("train"))
    checkpoint = files.training / "checkpoints" / trained.counts["checkpoint"]
    sources = {files.drafter: checkpoint, files.untrained_drafter: untrained_folder(files.training)}
    inputs = [describe_input(folder / name) for folder in sources.values() for name in CHECKPOINT_FILES]
    if {(i.uri, i.sha256) for i in inputs} != {(o.uri, o.sha256) for o in trained.outputs}:
        raise Failed(f"{files.training}: the checkpoints changed after training; run train again with --force")
    model_type = verifier_model_type(settings)
    fingerprint = fingerprint_of(
        {"version": EXPORT_VERSION, "verifier": model_type, "weights": [i.sha256 for i in inputs]}
    )
    manifest_path = files.manifest("export")
    answer = None if request.force else answered_by(manifest_path, fingerprint=fingerprint, inputs=inputs)
    if answer is not None:
        events.progress(f"nothing to do: {files.drafter} is the export of this checkpoint")
        return StageResult(stage="export", reused=True, manifest=answer)
    manifest_path.unlink(missing_ok=True)
    for folder, source in sources.items():
        require_captured_layers(read_configuration(source), trained.counts["layers"])
        configuration = export_drafter(source, folder, verifier_model_type=model_type)
        events.progress(f"exported {source} to {folder}, every tensor read back equal")
    folders = [*sources, *for_vllm(request, checkpoint, trained.counts["layers"], events)]
    layouts = exported_layouts(files, folders)
    record = record_of(settings, files, fingerprint=fingerprint, layouts=relative(layouts, files.drafter))
    describe_drafter(files.drafter, record, model_card(record, licence=settings.publish.licence))
    layers = list(trained.counts["layers"])
    manifest = write_manifest(
        manifest_path,
        stage="export",
        edition=request.edition,
        dataset=None,
        fingerprint=fingerprint,
        inputs=inputs,
        outputs=[describe_output(folder / name) for folder in folders for name in CHECKPOINT_FILES],
        counts={
            **trained.counts,
            "serving_layer_ids": serving_layer_ids(layers, model_type),
            "dtype": configuration["torch_dtype"],
            "verifier_model_type": model_type,
            "record": record.model_dump(mode="json"),
        },
    )
    return StageResult(stage="export", reused=False, manifest=manifest)


def for_vllm(request: StageRequest, checkpoint: Path, layers: Sequence[int], events: Events) -> list[Path]:
    """Export the drafter for vLLM too; return its folder, or nothing where vLLM cannot serve so many layers.

    Raises:
        Failed: what was written does not read back equal.
    """
    files = request.files
    if len(layers) != VLLM_LAYERS:
        shutil.rmtree(files.vllm_drafter, ignore_errors=True)
        events.progress(
            f"not exported for vLLM: it serves drafters of {VLLM_LAYERS} layers, this one has {len(layers)}"
        )
        return []
    stub = files.training / "verifier"
    export_for_vllm(checkpoint, files.vllm_drafter, verifier=request.settings.verifier.path, stub=stub)
    events.progress(f"exported {checkpoint} to {files.vllm_drafter} for vLLM, every tensor read back equal")
    return [files.vllm_drafter]

"""``./aerie trace``: where a sample is, and where and why its way ends."""

import re

import pytest
from typer.testing import CliRunner

from aerie.artefacts.manifest import InputFile, write_manifest
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.response_log import Response, ResponseLog
from aerie.artefacts.samples import VerdictRow, write_verdicts
from aerie.artefacts.state_index import INDEX_FILE, IndexedState, write_index
from aerie.cli import app
from aerie.corpus.stage import merge
from aerie.errors import BadInput
from aerie.prompts.identity import sample_id as identity_of
from aerie.prompts.importing import content_of
from aerie.prompts.preparing import candidates_of
from aerie.prompts.source_row import find_source_row
from aerie.settings.machine import PROJECT_ROOT
from aerie.settings.pipeline import load_settings
from aerie.sources import tokenised
from aerie.sources.readers import reader_of
from aerie.sources.rows import iterate_source
from aerie.tracing import trace

from .conftest import Edition, sample

KEPT, LONG, COPY, OVER, BAD, HELD_OUT, SKIPPED, WAITING = (
    f"B1_glaive-{name}" for name in ("kept", "long", "copy", "over", "bad", "held", "skipped", "waiting")
)
OTHER = "B2_opencodeinstruct-first"


def prompt(sample_id: str, split: str = "train", skip_reason: str | None = None) -> Prompt:
    return Prompt(sample_id, f"c-{sample_id}", 0, split, [1, 2], None, 0, skip_reason)


def verdict(sample_id: str, reasons: tuple[str, ...] = ()) -> VerdictRow:
    outcome = "quarantined" if reasons else "kept"
    return VerdictRow(sample_id, outcome, reasons, ["truncated"], {}, 2, 1, 0, 1, 0)


def manifest(path, stage, dataset=None, inputs=(), counts=None):
    write_manifest(
        path, stage=stage, edition="main", dataset=dataset, fingerprint="f", inputs=inputs, outputs=[],
        counts=counts or {},
    )  # fmt: skip


@pytest.fixture
def edition(tmp_path) -> Edition:
    made = Edition(tmp_path)
    made.validated("B2_opencodeinstruct", [sample(OTHER, [1], [9])])
    first = made.request().files.dataset("B1_glaive")
    made.validated(
        "B1_glaive",
        [
            sample(KEPT, [1], [2]),
            sample(LONG, [1] * 40, [2]),
            sample(COPY, [1], [2]),
            *(sample(f"{OVER}-{i}", [3], [i]) for i in range(3)),
        ],
    )
    held_out, skipped = prompt(HELD_OUT, "benchmark"), prompt(SKIPPED, skip_reason="prompt_too_long")
    others = [KEPT, LONG, COPY, BAD, WAITING, *(f"{OVER}-{i}" for i in range(3))]
    write_prompts(first.prompts, [*map(prompt, others), held_out, skipped])
    write_prompts(made.request().files.dataset("B2_opencodeinstruct").prompts, [prompt(OTHER)])
    source = InputFile(uri="file:///data/glaive.jsonl", sha256="5" * 64)
    manifest(first.manifest("prepare"), "prepare", "B1_glaive", [source])
    with ResponseLog(first.responses) as log:
        for sample_id in others:
            if sample_id != WAITING:
                log.append(
                    Response(
                        sample_id=sample_id, attempt=3, prompt_sha256="00", prompt_tokens=2, completion_tokens=1,
                        max_new_tokens=8, finish_reason={"type": "stop"}, launch_token="launch-7", meta_info={},
                        output_ids=(2,),
                    )
                )  # fmt: skip
        log.sync()
    write_verdicts(
        first.verdicts,
        [verdict(one, ("bad_end",) if one == BAD else ()) for one in others if one != WAITING],
    )
    return made


def way(edition, sample_id, dataset=None):
    key, steps = trace(edition.request().files, sample_id, dataset)
    assert key == "B1_glaive"
    assert all(step.found for step in steps[:-1])
    return steps


def merged(edition, **corpus):
    return merge(edition.request(corpus={"maximum_length": 32, **corpus}), edition.events).manifest


def test_a_kept_sample_is_followed_from_its_source_to_its_hidden_states(edition):
    merged(edition)
    files = edition.request().files
    corpus_row = next(step for step in way(edition, KEPT) if step.name == "corpus")
    row = int(corpus_row.text.split(", row ")[1].split()[0])
    manifest(files.manifest("capture"), "capture")
    (files.hidden_states / "states").mkdir(parents=True)
    state = files.states / f"{KEPT}.safetensors"
    state.write_bytes(b"states")
    write_index(files.hidden_states / INDEX_FILE, [IndexedState(row, KEPT, f"states/{state.name}", 6, 2, "00")])

    steps = way(edition, KEPT)

    assert [step.name for step in steps] == ["source", "prompt", "response", "sample", "corpus", "hidden states"]
    assert all(step.found for step in steps)
    told = "\n".join(step.text for step in steps)
    for part in (
        "file:///data/glaive.jsonl", "prompts.parquet, row 0: conversation c-B1_glaive-kept, turn 0, train, 2 tokens",
        "attempt 3: 1 tokens, finished by stop, server launch-7", "samples.parquet, row 0: kept, flags truncated",
        f"row {row} of the corpus: train, 2 tokens, 1 of them trained on", f"{state}, for row {row}",
    ):  # fmt: skip
        assert part in told

    state.unlink()
    assert "in the index, but not there" in way(edition, KEPT)[-1].text


def test_a_sample_whose_states_are_streamed_is_not_said_to_wait_for_its_capture(edition):
    merged(edition)
    manifest(edition.request().files.manifest("capture"), "capture", counts={"mode": "streamed"})
    step = way(edition, KEPT)[-1]
    assert (step.name, step.found) == ("hidden states", True)
    assert "streamed while training" in step.text


@pytest.mark.parametrize(
    ("sample_id", "last", "why"),
    [
        (LONG, "corpus", r"dropped \(too_long\): longer than corpus.maximum_length"),
        (COPY, "corpus", rf"dropped \(duplicate\): .*: sample {KEPT}, row "),
        (BAD, "sample", "quarantined: bad_end, flags truncated"),
        (HELD_OUT, "response", "held out for the benchmark"),
        (SKIPPED, "prompt", "skipped and never generated: prompt_too_long"),
        (WAITING, "response", "not generated yet"),
        (KEPT, "hidden states", "not captured yet"),
    ],
)
def test_where_a_way_ends_it_says_why(edition, sample_id, last, why):
    merged(edition)
    step = way(edition, sample_id)[-1]
    assert (step.name, step.found) == (last, False)
    assert re.search(why, step.text)


def test_a_sample_that_its_cap_left_out_says_so(edition):
    merged(edition, caps={"B1_glaive": {"rows": 2}})
    ends = [way(edition, f"{OVER}-{i}")[-1] for i in range(3)]
    assert [step for step in ends if "over its cap (corpus.caps" in step.text]


def test_before_the_merge_and_after_a_later_validation_it_says_what_to_run(edition):
    assert way(edition, KEPT)[-1].text == "not merged yet"
    merged(edition)
    files = edition.request().files.dataset("B1_glaive")
    edition.validated("B1_glaive", [sample(WAITING, [1], [2])])
    write_verdicts(files.verdicts, [verdict(WAITING)])
    with ResponseLog(files.responses) as log:
        log.append(
            Response(
                sample_id=WAITING, attempt=1, prompt_sha256="00", prompt_tokens=2, completion_tokens=1,
                max_new_tokens=8, finish_reason={"type": "stop"}, launch_token="l", meta_info={}, output_ids=(2,),
            )
        )  # fmt: skip
        log.sync()
    assert "run merge again" in way(edition, WAITING)[-1].text


def test_the_command_prints_the_way_and_a_sample_that_is_nowhere_is_refused(edition, monkeypatch):
    monkeypatch.setenv("AERIE_DATA_ROOT", str(edition.root / "data"))
    printed = CliRunner().invoke(app, ["trace", BAD]).output
    assert printed.splitlines()[0] == f"sample {BAD}: main/B1_glaive"
    assert "ends here: " in printed.splitlines()[-1]
    with pytest.raises(BadInput, match="no sample 'nobody': looked in B1_glaive, B2_opencodeinstruct"):
        trace(edition.request().files, "nobody")


@pytest.mark.parametrize(("dataset", "line"), [("B1_glaive", 3), ("A1", 2)])
def test_the_source_row_that_makes_a_sample_is_found_again(dataset, line):
    settings = load_settings(PROJECT_ROOT / "demo" / "config.yaml")
    where, made = sample_of_line(settings, dataset, line)
    assert find_source_row(settings, dataset, made) == where
    assert find_source_row(settings, dataset, f"{dataset}-{'0' * 20}") is None


def sample_of_line(settings, dataset, line):
    source = settings.datasets[dataset].source
    row = list(iterate_source(source))[line]
    if settings.datasets[dataset].kind == "tokenised":
        read = tokenised.read(row.value, vocabulary_size=1 << 40)
        return row.where, identity_of(dataset, read.source_id, 0, content_of(read))
    candidate = candidates_of(reader_of(source)(row.value), row.where, turns=source.turns, seed=settings.seed)[0]
    return row.where, identity_of(dataset, candidate.source_id, 5, candidate.content_hash)

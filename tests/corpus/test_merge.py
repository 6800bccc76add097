"""Merging: one training set that speculators loads unchanged, the same one every time, with nothing held out in it."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from hs_connectors import FileTransfer
from safetensors.torch import save_file
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import save_token_frequency_distribution

from aerie.artefacts.corpus import iterate_rows, train_data_ratio
from aerie.artefacts.files import sha256_of
from aerie.artefacts.manifest import path_of
from aerie.artefacts.prompt_hashes import prompt_hash_writer
from aerie.corpus import merge as merging
from aerie.corpus.stage import merge, read_corpus
from aerie.errors import BadInput, Failed
from aerie.prompts.identity import content_hash
from aerie.stage_display import share_done
from aerie.stages import StageResult

from .conftest import VERIFIER, VOCABULARY_SIZE, Edition, sample


def dataset_folder(edition):
    return edition.request().files.corpus / "dataset"


def sample_ids(edition: Edition) -> list[str]:
    return [row.sample_id for row in iterate_rows(dataset_folder(edition))]


def run(edition: Edition, **options) -> StageResult:
    return merge(edition.request(**options), edition.events)


def test_corpus_loads_in_speculators_unchanged_and_splits_where_the_validation_rows_begin(two_datasets):
    edition = two_datasets()
    counts = run(edition).manifest.counts
    assert (counts["rows"], counts["train_rows"], counts["validation_rows"]) == (80, 64, 16)

    ratio = train_data_ratio(64, 80)
    train = ArrowDataset(max_len=64, datapath=str(dataset_folder(edition)), train_ratio=ratio, split="train")
    validation = ArrowDataset(max_len=64, datapath=str(dataset_folder(edition)), train_ratio=ratio, split="val")
    assert (len(train), len(validation), validation.start_file_idx) == (64, 16, 64)
    assert {row["split"] for row in train.data} == {"train"}
    assert {row["split"] for row in validation.data} == {"validation"}
    row = train.data[0]
    assert row["input_ids"].dtype == row["loss_mask"].dtype == torch.int64
    assert train.approx_lengths[0] == len(row["input_ids"]) == len(row["loss_mask"])
    assert {"sample_id", "conversation_id", "dataset", "source_revision", "edition", "licence"} <= set(row)


def test_token_frequencies_equal_those_that_speculators_counts(two_datasets, tmp_path):
    edition = two_datasets()
    counts = run(edition).manifest.counts
    save_token_frequency_distribution(load_from_disk(str(dataset_folder(edition))), tmp_path / "theirs.pt")
    ours = torch.load(edition.request().files.corpus / "token_freq.pt", weights_only=True)
    assert ours == torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert (counts["response_tokens"], counts["distinct_tokens"]) == (sum(ours.values()), len(ours))


def test_order_depends_on_seed_and_samples_only_not_on_files_or_partitions(two_datasets, monkeypatch):
    edition = two_datasets()
    first = run(edition).manifest
    order = sample_ids(edition)
    assert order != sorted(order)
    mixed = [name.split("-")[0] for name in order[:20]]
    assert len(set(mixed)) == 2

    monkeypatch.setattr(merging, "TOKENS_PER_PARTITION", 30)
    again = run(edition, datasets=("B2_opencodeinstruct", "B1_glaive"), force=True).manifest
    assert len(again.outputs) > len(first.outputs)
    assert sample_ids(edition) == order
    assert again.counts["corpus_fingerprint"] == first.counts["corpus_fingerprint"]

    other = run(edition, seed=1).manifest
    assert sorted(sample_ids(edition)) == sorted(order) != sample_ids(edition)
    assert other.counts["corpus_fingerprint"] != first.counts["corpus_fingerprint"]


def test_batches_that_speculators_makes_are_those_of_the_wide_lists_that_it_writes_itself(two_datasets, tmp_path):
    edition = two_datasets()
    run(edition)
    compact = load_from_disk(str(dataset_folder(edition)))
    lists = {name: [row.tolist() for row in compact[name]] for name in ("input_ids", "loss_mask")}
    columns = {name: pa.array(rows, pa.list_(pa.int64())) for name, rows in lists.items()}
    wide = Dataset(pa.table({**columns, "seq_len": list(map(len, lists["input_ids"]))}))
    wide.set_format("torch")
    wide.save_to_disk(str(tmp_path / "wide"))
    assert {str(wide.features[name].feature.dtype) for name in ("input_ids", "loss_mask")} == {"int64"}
    states = tmp_path / "states"
    states.mkdir()
    for row, ids in enumerate(compact["input_ids"]):
        save_file({"token_ids": ids, "hidden_states": torch.ones(len(ids), 4, 8)}, states / f"hs_{row}.safetensors")

    def batches(path):
        data = ArrowDataset(max_len=64, datapath=str(path), transfer=FileTransfer(states), on_missing="raise")
        collate = CollateFn(max_len=64, hidden_size=8, dtype=torch.float32)
        return [collate([data[row] for row in range(first, first + 8)]) for first in range(0, len(data), 8)]

    pairs = list(zip(batches(dataset_folder(edition)), batches(tmp_path / "wide"), strict=True))
    assert len(pairs) == 10
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert ours["error_records"] == 0
        for name in ("input_ids", "loss_mask", "document_ids", "hidden_states", "position_ids"):
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name])


def test_shards_are_read_by_pyarrow_and_pandas_without_any_of_ours(two_datasets, monkeypatch):
    monkeypatch.setattr(merging, "TOKENS_PER_PARTITION", 100)
    edition = two_datasets()
    counts = run(edition).manifest.counts
    shards = sorted(dataset_folder(edition).glob("data-*.arrow"))
    assert len(shards) > 2
    table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in shards)
    frame = table.to_pandas()
    assert frame["sample_id"].tolist() == sample_ids(edition)
    assert frame["seq_len"].sum() == frame["input_ids"].map(len).sum() == counts["tokens"]
    assert frame["loss_mask"].map(sum).sum() == counts["response_tokens"]
    assert frame.groupby("dataset").size().to_dict() == {k: v["rows"] for k, v in counts["datasets"].items()}


def contents_of(edition):
    return {path.name: path.read_bytes() for path in sorted(dataset_folder(edition).glob("*.arrow"))}


def test_a_merge_that_is_cut_off_leaves_the_old_corpus_and_the_next_gives_the_same_bytes(two_datasets, monkeypatch):
    monkeypatch.setattr(merging, "TOKENS_PER_PARTITION", 100)
    edition = two_datasets()
    fingerprint = run(edition).manifest.counts["corpus_fingerprint"]
    whole = contents_of(edition)
    folder = dataset_folder(edition)
    written = []

    def cut_off(path, rows):
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return finish(path, rows)

    finish = merging._finish
    monkeypatch.setattr(merging, "_finish", cut_off)
    with pytest.raises(OSError, match="No space left"):
        run(edition, force=True)
    assert contents_of(edition) == whole
    assert not edition.request().files.manifest("merge").exists()
    corpus = folder.parent
    killed = corpus.with_name(".corpus.4711.partial")
    killed.mkdir()
    (killed / "data-00000.arrow").write_bytes(b"half")

    monkeypatch.setattr(merging, "_finish", finish)
    assert run(edition).manifest.counts["corpus_fingerprint"] == fingerprint
    assert contents_of(edition) == whole
    assert [path.name for path in corpus.parent.iterdir() if path.name.startswith(".")] == []


def test_the_manifest_has_the_hash_of_every_shard_and_the_seed_of_the_shuffle(two_datasets):
    edition = two_datasets()
    manifest = run(edition).manifest
    written = {path.name: sha256_of(path) for path in edition.request().files.corpus.rglob("*") if path.is_file()}
    assert {path_of(output.uri).name: output.sha256 for output in manifest.outputs} == written
    assert manifest.counts["seed"] == edition.request().settings.seed


def test_second_merge_of_the_same_samples_does_nothing_and_a_changed_sample_merges_again(two_datasets):
    edition = two_datasets()
    run(edition)
    assert run(edition).reused
    edition.validated("B1_glaive", [sample("only", [1], [2])])
    result = run(edition)
    assert not result.reused
    counts = result.manifest.counts["datasets"]["B1_glaive"]
    assert (counts["rows"], counts["tokens"], counts["response_tokens"], counts["longest_row_tokens"]) == (1, 2, 1, 2)


def test_which_of_equal_rows_stays_does_not_depend_on_the_order_in_which_a_configuration_names_data_sets(edition):
    datasets = ("C1_mine", "B2_opencodeinstruct", "A1", "B1_glaive", "C0_mine")
    for dataset in datasets:
        edition.validated(dataset, [sample(f"{dataset}-{i}", [1, i], [2]) for i in range(4)])
    first = run(edition, datasets=datasets).manifest.counts
    assert {row.dataset for row in iterate_rows(dataset_folder(edition))} == {"B1_glaive"}
    assert run(edition, datasets=datasets[::-1]).reused
    again = run(edition, datasets=datasets[::-1], force=True).manifest.counts
    assert again == first


def test_a_data_set_without_a_row_beside_another_such_is_merged_again_and_counted(edition):
    """Their samples are the same bytes, so that the hashes of the inputs do not tell that there is one more."""
    edition.validated("B1_glaive", [sample("a", [1], [2])])
    edition.validated("B2_opencodeinstruct", [])
    run(edition)
    edition.validated("B3_magicoder", [])
    result = run(edition, datasets=("B1_glaive", "B2_opencodeinstruct", "B3_magicoder"))
    assert list(result.manifest.counts["datasets"]) == ["B1_glaive", "B2_opencodeinstruct", "B3_magicoder"]


def test_a_long_merge_tells_how_many_rows_it_has_checked_and_written_of_how_many(two_datasets, monkeypatch):
    monkeypatch.setattr(merging, "TOKENS_PER_PARTITION", 100)
    edition = two_datasets()
    edition.validated("B1_glaive", [sample("long", [1] * 40, [2]), sample("only", [1], [2])])
    run(edition, generation={"progress_seconds": 1e-9})
    events = [json.loads(line) for line in (edition.root / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["type"] == "progress" and "rows" in event]
    assert [(event["message"], share_done(event)) for event in told[:2]] == [
        ("checked 2 of 42 rows", (2, 42)),
        ("checked 42 of 42 rows", (42, 42)),
    ]
    assert len(told) > 3
    assert told[-1]["message"] == "wrote 41 of 41 rows"
    written = [event["rows"] for event in told[2:]]
    assert written == sorted(set(written))


def test_repeated_overlong_and_held_out_rows_are_dropped_and_counted(edition):
    edition.validated(
        "B1_glaive",
        [
            sample("a", [1, 2], [3]),
            sample("long", [1] * 30, [2] * 3),
            sample("bench", [5, 5], [6], split="benchmark"),
            sample("val", [9, 9], [9], split="validation"),
        ],
    )
    edition.validated(
        "B2_opencodeinstruct",
        [
            sample("copy-of-a", [1, 2], [3]),
            sample("same-ids-other-mask", [1], [2, 3]),
            sample("copy-of-bench", [5, 5], [6]),
            sample("copy-of-val", [9, 9], [9]),
        ],
    )
    counts = run(edition).manifest.counts
    assert set(sample_ids(edition)) == {"a", "same-ids-other-mask", "val"}
    assert counts["dropped"] == {
        "held_out": 1, "too_long": 1, "prompt_of_generated": 0, "duplicate": 1, "copy_of_held_out": 2,
        "over_cap": 0, "over_weight": 0,
    }  # fmt: skip
    assert sample_ids(edition)[-1] == "val"


def with_ids(row, ids):
    return replace(row, input_ids=ids)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (replace(sample("x", [1], [2]), loss_mask=[0, 0]), "all zeros"),
        (replace(sample("x", [1], [2]), loss_mask=[0, 1, 1]), "differ in length"),
        (replace(sample("x", [1], [2]), loss_mask=[0, 2]), "other than 0 and 1"),
        (replace(sample("x", [], []), loss_mask=[]), "no tokens"),
        (with_ids(sample("x", [1], [2]), [1, VOCABULARY_SIZE]), f"outside the vocabulary of {VOCABULARY_SIZE}"),
        (with_ids(sample("x", [1], [2]), [-1, 2]), "outside the vocabulary"),
        (sample("x", [1], [2], split="test"), "unknown split"),
        (sample("x", [1], [2], split="validation", conversation_id="a"), "also in another split"),
    ],
)
def test_a_row_that_would_spoil_training_is_refused_with_file_row_and_sample(edition, broken, problem):
    edition.validated("B1_glaive", [sample("a", [1], [2]), sample("b", [1], [3]), broken])
    with pytest.raises(Failed, match=rf"samples.parquet, row 2 \(sample x\): .*{problem}"):
        run(edition, datasets=("B1_glaive",))
    assert not dataset_folder(edition).exists()


def test_two_rows_with_one_sample_id_are_refused_because_state_files_are_named_by_it(edition):
    edition.validated("B1_glaive", [sample("same", [1], [2])])
    edition.validated("B2_opencodeinstruct", [sample("same", [3], [4])])
    with pytest.raises(Failed, match=r"sample ids occur twice, first in .*B1_glaive.* and .*B2_opencodeinstruct"):
        run(edition)


def test_a_data_set_that_is_not_validated_blocks_the_merge_unless_some_are_enough(edition):
    edition.validated("B1_glaive", [sample("a", [1], [2])])
    with pytest.raises(Failed, match="not validated: B2_opencodeinstruct"):
        run(edition)
    result = run(edition, corpus={"maximum_length": 32, "require": "some"})
    assert list(result.manifest.counts["datasets"]) == ["B1_glaive"]


def test_a_run_of_some_data_sets_needs_those_and_whatever_the_edition_has_begun(edition):
    edition.validated("B1_glaive", [sample("a", [1], [2])])
    assert run(edition, selected=("B1_glaive",)).manifest.counts["rows"] == 1
    edition.request().files.dataset("B2_opencodeinstruct").folder.mkdir(parents=True)
    with pytest.raises(Failed, match="not validated: B2_opencodeinstruct"):
        run(edition, selected=("B1_glaive",))


def test_a_data_set_of_which_nothing_was_kept_is_counted_and_nothing_at_all_to_train_on_fails(edition):
    edition.validated("B1_glaive", [])
    edition.validated("B2_opencodeinstruct", [sample("a", [1], [2])])
    counts = run(edition).manifest.counts
    assert (counts["rows"], counts["datasets"]["B1_glaive"]["rows"]) == (1, 0)
    edition.validated("B2_opencodeinstruct", [])
    with pytest.raises(Failed, match="no row is left to train on"):
        run(edition)


def test_data_sets_prepared_with_different_tokenizers_are_not_merged(edition):
    edition.validated("B1_glaive", [sample("a", [1], [2])])
    edition.validated(
        "B2_opencodeinstruct", [sample("b", [1], [3])], VERIFIER.model_copy(update={"tokenizer_sha256": "1" * 64})
    )
    with pytest.raises(Failed, match="B1_glaive and B2_opencodeinstruct were prepared with different tokenizers"):
        run(edition)


def test_samples_that_changed_after_validation_are_refused(edition):
    edition.validated("B1_glaive", [sample("a", [1], [2])])
    manifest = edition.request().files.dataset("B1_glaive").manifest("validate")
    document = json.loads(manifest.read_text())
    document["outputs"][0]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(document))
    with pytest.raises(Failed, match="changed after it was validated"):
        run(edition, datasets=("B1_glaive",))


def test_a_corpus_that_changed_after_the_merge_is_refused_by_whoever_reads_it(two_datasets):
    edition = two_datasets()
    run(edition)
    shard = next(dataset_folder(edition).glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
    with pytest.raises(Failed, match="changed after it was merged"):
        read_corpus(edition.request().files)


@pytest.mark.parametrize("rows", [1, 3, 7, 64, 1000, 99_991])
def test_the_split_ratio_gives_back_every_possible_boundary(rows):
    for train_rows in {1, rows // 3 or 1, rows // 2 or 1, max(1, rows - 1), rows}:
        assert int(rows * train_data_ratio(train_rows, rows)) == train_rows


def prompts_of(edition: Edition, dataset: str, prompts: dict[str, tuple[str, str]]) -> None:
    """Write the hashes of a data set's prompts as ``prepare`` does: split and what is asked, by sample id."""
    with prompt_hash_writer(edition.request().files.dataset(dataset).prompt_hashes) as hashes:
        for sample_id, (split, asked) in prompts.items():
            hashes.add(sample_id, split, content_hash([asked]))


@pytest.mark.parametrize("datasets", [("B1_glaive", "B2_opencodeinstruct"), ("B2_opencodeinstruct", "B1_glaive")])
def test_a_prompt_that_two_data_sets_ask_is_trained_once_and_never_where_another_holds_it_out(edition, datasets):
    """Two answers to one prompt differ in their tokens: only what ``prepare`` knew of the prompts tells."""
    edition.validated("B1_glaive", [sample(name, [1, i], [3]) for i, name in enumerate("abc")])
    edition.validated(
        "B2_opencodeinstruct",
        [sample(f"{name}2", [2, i], [4, 5]) for i, name in enumerate("abcd")]
        + [sample("v2", [9], [9], split="validation")],
    )
    prompts_of(
        edition,
        "B1_glaive",
        {"a": ("train", "one"), "b": ("train", "two"), "c": ("train", "six"), "x": ("benchmark", "three")},
    )
    prompts_of(
        edition,
        "B2_opencodeinstruct",
        {
            "a2": ("train", "one"),
            "b2": ("train", "  two\n"),
            "c2": ("train", "three"),
            "d2": ("train", "four"),
            "v2": ("validation", "six"),
        },
    )

    result = run(edition, datasets=datasets)

    assert sorted(sample_ids(edition)) == ["a", "b", "d2", "v2"]
    dropped = result.manifest.counts["dropped"]
    assert (dropped["duplicate"], dropped["copy_of_held_out"]) == (2, 2)
    assert run(edition, datasets=datasets).reused
    prompts_of(edition, "B2_opencodeinstruct", {"a2": ("train", "now another")})
    assert not run(edition, datasets=datasets).reused
    assert "a2" in sample_ids(edition)


TOKENISED = ("B1_glaive", "A1")


def dropped_of(result: StageResult, dataset: str) -> dict[str, int]:
    """How many rows of a data set are not in the corpus, by reason."""
    return {reason: rows for reason, rows in result.manifest.counts["datasets"][dataset]["dropped"].items() if rows}


def test_a_tokenised_row_that_equals_a_generated_one_is_trained_once(edition):
    """``import`` knows no prompts: only ids and mask tell that it is the row which ``prepare`` knows by its prompt."""
    edition.validated("B1_glaive", [sample("b", [1, 2], [3])])
    prompts_of(edition, "B1_glaive", {"b": ("train", "one")})
    edition.validated("A1", [sample("copy", [1, 2], [3]), sample("other-mask", [1], [2, 3])])
    result = run(edition, datasets=TOKENISED)
    assert set(sample_ids(edition)) == {"b", "other-mask"}
    assert dropped_of(result, "A1") == {"prompt_of_generated": 1}
    assert dropped_of(result, "B1_glaive") == {}


@pytest.mark.parametrize("split", ["train", "validation", "benchmark"])
def test_a_prompt_that_is_held_out_of_a_generated_data_set_is_not_trained_on_through_a_tokenised_one(edition, split):
    """Prompts of the benchmark are never generated: they stand in the file of ``prepare`` and nowhere else."""
    edition.validated("B1_glaive", [sample("b", [1], [2])])
    edition.prepared("B1_glaive", {"b": ("train", [1]), "asked": (split, [5, 6]), "skipped": ("benchmark", [])})
    edition.validated(
        "A1",
        [
            sample("same", [5, 6], [7]),
            sample("validated", [5, 6], [8], split="validation"),
            sample("long", [5, 6], [9] * 40),
            sample("longer-prompt", [5, 6, 5], [7]),
            sample("shorter-prompt", [5], [6, 7]),
            sample("no-prompt", [], [5, 6, 7]),
        ],
    )
    result = run(edition, datasets=TOKENISED)
    assert set(sample_ids(edition)) == {"b", "longer-prompt", "shorter-prompt", "no-prompt"}
    assert dropped_of(result, "A1") == {"too_long": 1, "prompt_of_generated": 2}


def test_a_held_out_prompt_at_a_later_turn_of_a_tokenised_row_is_found(edition):
    edition.validated("B1_glaive", [sample("b", [1], [2])])
    edition.prepared("B1_glaive", {"b": ("train", [1]), "held": ("benchmark", [5, 6, 7])})
    turns = replace(sample("turns", [5, 6, 7, 8], []), loss_mask=[0, 1, 0, 1])
    edition.validated("A1", [sample("before", [4], [4]), turns, sample("after", [7], [8])])
    result = run(edition, datasets=TOKENISED)
    assert set(sample_ids(edition)) == {"b", "before", "after"}
    assert dropped_of(result, "A1") == {"prompt_of_generated": 1}


def test_prompts_of_a_data_set_that_is_prepared_and_not_merged_are_kept_from_tokenised_rows_too(edition):
    """The benchmark asks the prompts of all that is prepared."""
    some = {"datasets": (*TOKENISED, "B2_opencodeinstruct"), "corpus": {"maximum_length": 32, "require": "some"}}
    edition.validated("B1_glaive", [sample("b", [1], [2])])
    edition.validated("A1", [sample("a", [5], [6]), sample("other", [7], [8])])
    run(edition, **some)
    assert set(sample_ids(edition)) == {"b", "a", "other"}
    edition.prepared("B2_opencodeinstruct", {"held": ("benchmark", [5])})
    result = run(edition, **some)
    assert not result.reused
    assert set(sample_ids(edition)) == {"b", "other"}
    assert run(edition, **some).reused


def test_what_a_data_set_that_is_prepared_and_not_merged_holds_out_is_not_trained_on_through_another(edition):
    some = {"corpus": {"maximum_length": 32, "require": "some"}}
    edition.validated("B1_glaive", [sample("leak", [1], [2]), sample("waits", [3], [4]), sample("other", [5], [6])])
    prompts_of(edition, "B1_glaive", {name: ("train", name) for name in ("leak", "waits", "other")})
    run(edition, **some)
    edition.request().files.dataset("B2_opencodeinstruct").folder.mkdir()
    prompts_of(edition, "B2_opencodeinstruct", {"held": ("benchmark", "leak"), "later": ("train", "waits")})
    result = run(edition, **some)
    assert set(sample_ids(edition)) == {"waits", "other"}
    assert dropped_of(result, "B1_glaive") == {"copy_of_held_out": 1}


def test_a_generated_row_stays_where_its_tokenised_copy_that_is_left_out_is_of_a_more_precious_split(edition):
    edition.validated("B1_glaive", [sample("b", [1], [2])])
    edition.validated("A1", [sample("a", [1], [2], split="validation")])
    run(edition, datasets=TOKENISED)
    assert sample_ids(edition) == ["b"]


def test_a_batch_of_rows_none_of_which_can_stay_is_counted_and_does_not_end_the_merge(edition):
    edition.validated("B1_glaive", [sample("a", [1], [2])])
    edition.validated("B2_opencodeinstruct", [sample("long", [1] * 40, [2])])
    assert run(edition).manifest.counts["dropped"]["too_long"] == 1
    assert sample_ids(edition) == ["a"]


def test_rows_of_one_content_are_trained_once_though_their_prompts_differ_before_they_are_rendered(edition):
    edition.validated("B1_glaive", [sample("first", [1], [2]), sample("held", [3], [4], split="validation")])
    edition.validated("B2_opencodeinstruct", [sample("second", [1], [2]), sample("leak", [3], [4])])
    prompts_of(edition, "B1_glaive", {"first": ("train", "one"), "held": ("validation", "two")})
    prompts_of(edition, "B2_opencodeinstruct", {"second": ("train", "three"), "leak": ("train", "four")})
    result = run(edition)
    assert sample_ids(edition) == ["first", "held"]
    assert dropped_of(result, "B2_opencodeinstruct") == {"duplicate": 1, "copy_of_held_out": 1}


def test_tokenised_rows_are_not_merged_where_the_prompts_of_a_generated_data_set_are_gone(edition):
    edition.validated("B1_glaive", [sample("b", [1], [2])])
    edition.validated("A1", [sample("a", [3], [4])])
    edition.request().files.dataset("B1_glaive").prompts.unlink()
    with pytest.raises(BadInput, match=r"B1_glaive/prompts.parquet: expected a file written by an earlier stage"):
        run(edition, datasets=TOKENISED)

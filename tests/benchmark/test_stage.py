"""The stage against stand-in servers, one a variant."""

import json
import time
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

from aerie.artefacts.corpus import CORPUS_SCHEMA, DATASET_FOLDER
from aerie.artefacts.draft_vocabulary import DraftVocabulary, write_draft_vocabulary
from aerie.artefacts.manifest import describe_output, read_manifest, write_manifest
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.benchmark import bench as benches
from aerie.benchmark import stage
from aerie.errors import BadInput, Failed
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest
from tests.benchmark.stand_in import StandIn

CLOSE = 20
"""The token that closes the reasoning: neither the corpus nor an answer of the stand-in has it."""


class Bench:
    """An edition as ``export`` leaves it, and the servers that its benchmark meets."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.events = Events(root / "events.jsonl")
        self.started: list[str] = []
        self.servers: dict[str, StandIn] = {}
        self.info: dict[str, object] = {}
        self.change = lambda variant, reply: None
        self.drafters: list[dict[str, object]] | None = None
        self.likely = [(-0.7, 10, None), (-0.72, 30, None)]
        monkeypatch.setattr(benches, "benchmark_server", self.serve)
        monkeypatch.setattr(benches, "published_drafters", self.published)
        (root / "verifier").mkdir()
        (root / "verifier" / "config.json").write_text("{}")
        self.export()

    def published(self):
        if self.drafters is None:
            raise BadInput("AERIE_DATABASE_URL is not set")
        return self.drafters

    def request(self, *, force=False, dtype="float32", device="cpu", **benchmark):
        source = {"reader": "glaive", "path": "x", "licence": "mit"}
        document = {
            "name": "test",
            "verifier": {"path": self.root / "verifier", "profile": "demo", "dtype": dtype},
            "serving": {"device": device, "context_length": 128},
            "datasets": {"B1_glaive": {"source": source}, "B2_opencodeinstruct": {"source": source}},
            "generation": {"maximum_attempts": 1},
            "corpus": {"maximum_length": 64},
            "vocabulary": {"size": 4},
            "training": {"epochs": 1, "sequence_length": 64},
            "benchmark": {"prompts_per_dataset": 4, "max_new_tokens": 32, "concurrency": 2, **benchmark},
            "publish": {"folder": self.root / "published"},
        }
        return StageRequest(
            settings=PipelineSettings.model_validate(document),
            data_root=self.root / "data",
            server_folder=self.root / "server",
            edition="main",
            run_id="r",
            force=force,
        )

    @property
    def files(self):
        return self.request().files

    def export(self):
        files = self.files
        for folder in (files.drafter, files.untrained_drafter):
            folder.mkdir(parents=True)
            ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
            (folder / "config.json").write_text(json.dumps(ids))
            (folder / "model.safetensors").write_bytes(folder.name.encode())
        vocabulary = DraftVocabulary(
            d2t=np.array([1, 9, 9, 9]), t2d=np.isin(np.arange(32), [1, 10, 11, 12]), corpus_fingerprint="corpus"
        )
        write_draft_vocabulary(files.vocabulary, vocabulary, {})
        self.manifest("capture", [], {"parity": {"rows": 4, "maximum_relative": 3e-6, "tolerance": 5e-3}})
        self.manifest("vocabulary", [], {"coverage": 1.0})
        self.corpus()
        outputs = [
            folder / n
            for folder in (files.drafter, files.untrained_drafter)
            for n in ("config.json", "model.safetensors")
        ]
        counts = {
            "layers": [2, 4, 5],
            "serving_layer_ids": [1, 3, 4],
            "corpus_fingerprint": "corpus",
            "validation": {"cond_acc_0": 0.8, "cond_acc_1": 0.8, "cond_acc_2": 0.75},
            "first_loss": 4.0,
            "last_loss": 1.0,
        }
        self.manifest("export", outputs, counts)
        for key in ("B1_glaive", "B2_opencodeinstruct"):
            self.prompts(key)

    def corpus(self):
        rows = [
            {
                **dict.fromkeys(CORPUS_SCHEMA.names, ""), "dataset": "B1_glaive", "split": "train",
                "input_ids": [5, 6, *[10] * 18, 1], "loss_mask": [0, 0, *[1] * 19], "seq_len": 21,
            }
        ]  # fmt: skip
        # As save_to_disk of datasets lays it out, which this environment does not have.
        folder = self.files.corpus / DATASET_FOLDER
        folder.mkdir(parents=True)
        with pa.ipc.new_stream(folder / "data-00000.arrow", CORPUS_SCHEMA) as writer:
            writer.write_table(pa.Table.from_pylist(rows, CORPUS_SCHEMA))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000.arrow"}]}))

    def manifest(self, name, outputs, counts):
        write_manifest(
            self.files.manifest(name),
            stage=name,
            edition="main",
            dataset=None,
            fingerprint=name,
            inputs=[],
            outputs=[describe_output(path) for path in outputs],
            counts=counts,
        )

    def prompts(self, key):
        splits = ["train", "benchmark", "benchmark", "validation", *["benchmark"] * 6]
        prompts = [
            Prompt(
                f"{key}/{i}", f"c{i}", 0, split, [i, 2, 3] if i != 1 else [1] * 100, None, i, "no" if i == 2 else None
            )
            for i, split in enumerate(splits)
        ]
        write_prompts(self.files.dataset(key).prompts, prompts)
        tokens = VerifierTokens(
            token_ids={"<|im_end|>": 1, "</think>": CLOSE},
            vocabulary_size=32,
            eos_ids=(1,),
            tokenizer_sha256="0" * 64,
            model_type="llama",
        )
        write_verifier_tokens(self.files.dataset(key).verifier_tokens, tokens)

    @contextmanager
    def serve(self, request, drafter, drafting, events):
        names = {None: "without", "drafter": "trained", "drafter_untrained": "untrained"}
        variant = names.get(drafter and drafter.name, "production")
        self.started.append(variant)
        info = {
            "version": "0.5.23",
            "model_path": "verifier",
            "dtype": "float32",
            "max_total_num_tokens": 1000,
            "speculative_algorithm": "EAGLE3" if drafter else None,
            "speculative_draft_model_path": str(drafter) if drafter else None,
            "speculative_num_steps": drafting.num_steps if drafter else None,
            "speculative_eagle_topk": drafting.eagle_topk if drafter else None,
            "speculative_num_draft_tokens": drafting.num_draft_tokens if drafter else None,
            "speculative_draft_window_size": None,
            **(self.info if drafter else {}),
        }
        with StandIn(variant, info, lambda reply: self.change(variant, reply)) as server:
            server.likely = self.likely
            self.servers.setdefault(variant, server)
            server.drafting = drafting
            self.latest = server
            if drafter:
                self.latest_drafting = server
            yield server.url

    def told(self):
        return [json.loads(line) for line in (self.root / "events.jsonl").read_text().splitlines()]

    def results(self):
        return json.loads((self.files.benchmark / "results.json").read_text())


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def test_three_servers_measure_held_out_prompts_greedily_and_a_second_run_starts_none(bench):
    result = stage.benchmark(bench.request(), bench.events)
    counts = result.manifest.counts
    assert bench.started == ["untrained", "trained", "without"]
    assert (counts["acceptance_length"], counts["acceptance_length_untrained"], counts["lossless"]) == (2.5, 1.0, True)
    assert counts["per_dataset"].keys() == {"B1_glaive", "B2_opencodeinstruct"}
    assert counts["drafter_fingerprint"] == result.data["drafter_fingerprint"] == "export"
    assert bench.results()["servers"]["trained"]["speculative_algorithm"] == "EAGLE3"

    sent = bench.servers["trained"].requests[1:]  # after the warm-up
    # Sent side by side: in which order they arrive is nobody's promise.
    assert sorted(body["rid"].split(":")[2] for body in sent[:4]) == [f"B1_glaive/{i}" for i in (4, 5, 6, 7)]
    assert all(body["sampling_params"]["temperature"] == 0.0 for body in sent)
    assert all(body["sampling_params"]["stop_token_ids"] == [1] for body in sent)
    assert len(bench.servers["untrained"].requests) == 1 + 2  # one prompt of four, of each data set

    bench.started.clear()
    assert stage.benchmark(bench.request(), bench.events).reused
    assert bench.started == []


def test_a_retry_measures_only_what_an_earlier_try_did_not(bench):
    def die(variant, reply):
        if variant == "trained":
            del reply["meta_info"]["spec_verify_ct"]

    bench.change = die
    with pytest.raises(Failed, match=r"meta_info\.spec_verify_ct"):
        stage.benchmark(bench.request(), bench.events)
    bench.started.clear()
    bench.change = lambda variant, reply: None
    stage.benchmark(bench.request(), bench.events)
    assert bench.started == ["trained", "without"]


def test_a_failed_gate_leaves_results_and_no_manifest(bench):
    with pytest.raises(Failed, match="usual causes") as failure:
        stage.benchmark(bench.request(minimum_acceptance_length=3.0), bench.events)
    assert bench.results()["acceptance_length"] == 2.5
    assert not bench.files.manifest("benchmark").exists()
    assert "ok: boundary broken in the data: validation promised 2.92, served 2.50" in str(failure.value)
    gates = {gate["gate"]: gate["verdict"] for gate in bench.results()["gates"]}
    assert gates == {
        "accepts at all": "passed", "threshold": "failed", "against the drafter in production": "not judged",
        "lossless": "passed",
    }  # fmt: skip


def test_what_a_rejected_drafter_was_measured_at_is_handed_to_the_store_before_the_failure(bench):
    with pytest.raises(Failed, match="usual causes"):
        stage.benchmark(bench.request(minimum_acceptance_length=3.0), bench.events)
    (event,) = [one for one in bench.told() if one["type"] == "rejected"]
    assert event["counts"]["gates"] == bench.results()["gates"]
    assert event["counts"]["checklist"] == bench.results()["checklist"]
    exported = read_manifest(bench.files.manifest("export"))
    assert event["counts"]["drafter_fingerprint"] == exported.fingerprint
    assert "servers" not in event["counts"] and event["counts"]["by_concurrency"][0]["acceptance_length"] == 2.5


def test_a_drafter_that_passes_is_not_reported_as_rejected(bench):
    stage.benchmark(bench.request(), bench.events)
    assert "rejected" not in {one["type"] for one in bench.told()}


def part(variant, reply):
    if variant == "trained":
        reply["output_ids"][5] = 30


def test_output_that_the_drafter_changes_fails_in_float32(bench):
    bench.change = part
    with pytest.raises(Failed, match=r"8 of 8 outputs .* first at token 5 of sample B1_glaive/4"):
        stage.benchmark(bench.request(), bench.events)
    assert bench.results()["lossless"] is False


def test_in_bfloat16_outputs_that_part_at_ties_pass_only_where_batch_sizes_part_as_often(bench):
    seen = []

    def change(variant, reply):
        part(variant, reply)
        if variant == "without" and bench.latest.flushed == 2:  # the second load: one at a time
            seen.append(reply)
            reply["output_ids"][5] = 30 if parting else reply["output_ids"][5]

    bench.change, parting = change, False
    bench.likely = [(-0.7, token, None) for token in (10, 11, 12, 13, 14, 15, 16)] + [(-0.72, 30, None)]
    with pytest.raises(Failed, match=r"at ties, but more often than between batches of 1 and 8 .* \(0 of 8\);"):
        stage.benchmark(bench.request(dtype="bfloat16"), bench.events)
    assert seen, "the verifier's own outputs were not compared between batch sizes"

    parting = True
    result = stage.benchmark(bench.request(dtype="bfloat16", force=True), bench.events)
    found = result.manifest.counts["losslessness"]
    assert (found["verdict"], found["parted"], found["ties"]) == ("ties", 8, 8)
    assert '"alert"' in (bench.root / "events.jsonl").read_text()
    (asked, *_) = bench.latest.asked_likely
    assert len(asked) == 3 + 5, "the prompt and the output before it parts"

    bench.likely = [(-0.1, token, None) for token in (10, 11, 12, 13, 14, 15, 16)] + [(-0.2, 30, None)]
    with pytest.raises(Failed, match=r"without a tie, the furthest .* 0\.100 nats apart"):
        stage.benchmark(bench.request(dtype="bfloat16", force=True), bench.events)


def test_every_concurrency_is_measured_and_the_first_is_the_headline(bench):
    counts = stage.benchmark(bench.request(concurrency=[2, 1], compare_untrained=False), bench.events).manifest.counts
    assert bench.started == ["trained", "without"], "one server start for all of them"
    assert [row["concurrency"] for row in counts["by_concurrency"]] == [2, 1]
    assert counts["settings"]["concurrency"] == 2
    assert counts["tokens_per_second"] == counts["by_concurrency"][0]["tokens_per_second"]
    assert all(row["speed_up"] > 0 for row in counts["by_concurrency"])
    assert bench.servers["trained"].flushed == 2, "prompts that were sent before were answered from the prefix cache"


def test_of_several_draft_settings_the_one_that_drafts_fastest_is_recommended(bench):
    wide = {"num_steps": 2, "eagle_topk": 4, "num_draft_tokens": 8}

    def change(variant, reply):
        if variant == "trained" and bench.latest.drafting.eagle_topk == 1:
            time.sleep(0.05)

    bench.change = change
    request = bench.request(sweep=[wide], sweep_prompts_per_dataset=2, compare_untrained=False)
    counts = stage.benchmark(request, bench.events).manifest.counts
    assert bench.started == ["trained", "trained", "without"]
    assert counts["recommended"] == wide
    tried = counts["recommendation"]["tried"]
    assert [one["num_steps"] for one in tried] == [3, 2]
    assert len(bench.latest_drafting.requests) == 1 + 4, "not on the fewer prompts"


def test_in_bfloat16_a_swept_setting_that_parts_without_a_tie_is_not_recommended(bench):
    wide = {"num_steps": 2, "eagle_topk": 4, "num_draft_tokens": 8}

    def change(variant, reply):
        if variant == "trained" and bench.latest.drafting.eagle_topk == 1:
            time.sleep(0.05)
        elif variant == "trained":
            reply["output_ids"][5] = 30

    bench.change = change
    bench.likely = [(-0.1, token, None) for token in (10, 11, 12, 13, 14, 15, 16)] + [(-3.0, 30, None)]
    request = bench.request(dtype="bfloat16", sweep=[wide], sweep_prompts_per_dataset=2, compare_untrained=False)
    counts = stage.benchmark(request, bench.events).manifest.counts
    assert [one["different_outputs"] for one in counts["recommendation"]["tried"]] == [0, 4]
    assert counts["recommended"] == {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}


@pytest.mark.parametrize("sweep", [[], [{"num_steps": 2, "eagle_topk": 4, "num_draft_tokens": 8}]])
def test_where_every_setting_changes_the_output_none_is_recommended_the_configured_one_neither(bench, sweep):
    def change(variant, reply):
        if variant == "trained":
            reply["output_ids"][5] = 30

    bench.change = change
    with pytest.raises(Failed, match="in float32 they must be identical"):
        stage.benchmark(bench.request(sweep=sweep, compare_untrained=False), bench.events)
    results = bench.results()
    assert results["recommended"] is None
    assert "none is recommended" in results["recommendation"]["rule"]
    assert "recommended: no draft setting" in (bench.root / "events.jsonl").read_text()


def test_without_a_sweep_the_configured_setting_is_recommended_and_said_to_be_the_only_one(bench):
    counts = stage.benchmark(bench.request(), bench.events).manifest.counts
    assert counts["recommended"] == {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    assert "names no other" in counts["recommendation"]["rule"]


def test_acceptance_at_a_temperature_is_measured_on_gpus_and_refused_on_a_cpu_that_verifies_greedily(bench):
    counts = stage.benchmark(bench.request(), bench.events).manifest.counts
    assert counts["sampled"] is None and "greedily on a CPU" in counts["not_measured"]["sampled"]
    bench.started.clear()
    with pytest.raises(BadInput, match="greedily on a CPU, whatever the temperature"):
        stage.benchmark(bench.request(sampled=True), bench.events)
    assert bench.started == []

    counts = stage.benchmark(bench.request(device="cuda", force=True), bench.events).manifest.counts
    assert counts["sampled"]["acceptance_length"] == 2.5 and counts["sampled"]["sampling"]["temperature"] == 0.8
    temperatures = [body["sampling_params"]["temperature"] for body in bench.latest_drafting.requests]
    assert temperatures.count(0.0) == temperatures.count(0.8) == 1 + 8, "a warm-up and eight prompts of each"
    counts = stage.benchmark(bench.request(device="cuda", sampled=False), bench.events).manifest.counts
    assert counts["sampled"] is None


def test_prompts_of_ones_own_are_a_data_set_of_their_own(bench):
    mine = bench.root / "mine.jsonl"
    mine.write_text('{"prompt_ids": [7, 8, 9]}\n{"prompt_ids": [4, 5, 6]}\n')
    counts = stage.benchmark(bench.request(prompts_files=[mine]), bench.events).manifest.counts
    assert counts["per_dataset"]["mine"]["prompts"] == 2
    mine.write_text('{"prompt_ids": [7, 8, 9]}\n')
    assert not stage.benchmark(bench.request(prompts_files=[mine]), bench.events).reused

    taken = bench.root / "B1_glaive.jsonl"
    taken.write_text('{"prompt_ids": [1]}')
    with pytest.raises(BadInput, match="B1_glaive is a data set of the configuration"):
        stage.benchmark(bench.request(prompts_files=[taken]), bench.events)


def test_the_served_length_stands_beside_what_validation_promised_with_targets_outside_the_vocabulary(bench):
    bench.manifest("vocabulary", [], {"coverage": 0.9})
    found = stage.benchmark(bench.request(), bench.events).manifest.counts["estimate"]
    assert found["as_validated"] == pytest.approx(1 + 0.8 + 0.64 + 0.48)
    assert found["acceptance_length"] == pytest.approx(1 + 0.72 + 0.72**2 + 0.72**2 * 0.675, abs=1e-4)
    assert found["distance"] == pytest.approx(2.5 - found["acceptance_length"], abs=1e-4)


def published(bench, **benchmark):
    counts = stage.benchmark(bench.request(), bench.events).manifest.counts
    return {
        "drafter_id": "main-before", "uri": (bench.root / "before" / "main-before").as_uri(),
        "benchmark": {
            **{name: counts[name] for name in ("verifier", "measured_as", "acceptance_length")},
            "drafter_fingerprint": "before", **benchmark,
        },
    }  # fmt: skip


def test_a_drafter_worse_than_the_one_in_production_fails_on_the_same_prompts(bench):
    bench.drafters = [published(bench, acceptance_length=2.6)]
    with pytest.raises(Failed, match=r"2\.500 is 96\.2% of the 2\.600 of main-before on the same prompts"):
        stage.benchmark(bench.request(force=True), bench.events)
    stage.benchmark(bench.request(force=True, minimum_share_of_production=0.9), bench.events)


def test_the_drafter_in_production_is_measured_where_its_figure_is_of_other_prompts(bench):
    bench.drafters = [published(bench, acceptance_length=9.0, measured_as="other prompts")]
    with pytest.raises(Failed, match=r"main-before is in production, but it is no longer at .*, to be measured"):
        stage.benchmark(bench.request(force=True), bench.events)
    (bench.root / "before" / "main-before").mkdir(parents=True)
    (bench.root / "before" / "main-before" / "config.json").write_text("{}")
    bench.started.clear()
    results = stage.benchmark(bench.request(force=True), bench.events).manifest.counts
    assert bench.started == ["untrained", "trained", "production", "without"]
    said = {gate["gate"]: gate for gate in results["gates"]}["against the drafter in production"]
    assert said["verdict"] == "passed" and "125.0% of the 2.000 of main-before" in said["said"]

    bench.drafters = [published(bench, verifier="of another verifier")]
    results = stage.benchmark(bench.request(force=True), bench.events).manifest.counts
    assert "no drafter was published for this verifier" in str(results["gates"])


def test_a_server_that_runs_another_drafter_or_algorithm_is_not_measured(bench):
    bench.info = {"speculative_algorithm": "EAGLE"}
    with pytest.raises(Failed, match="speculative_algorithm is 'EAGLE', not 'EAGLE3'"):
        stage.benchmark(bench.request(), bench.events)
    assert bench.servers["untrained"].requests == []


def test_a_drafter_that_changed_after_its_export_is_refused(bench):
    (bench.files.drafter / "model.safetensors").write_bytes(b"other")
    with pytest.raises(Failed, match="run export again"):
        stage.benchmark(bench.request(), bench.events)


def test_a_verifier_that_is_served_otherwise_is_measured_anew(bench):
    stage.benchmark(bench.request(), bench.events)
    assert not stage.benchmark(bench.request(dtype="bfloat16"), bench.events).reused


def test_a_retrained_drafter_is_measured_anew(bench):
    stage.benchmark(bench.request(compare_untrained=False), bench.events)
    exported = read_manifest(bench.files.manifest("export"))
    (bench.files.manifest("export")).write_text(
        exported.model_copy(update={"fingerprint": "another"}).model_dump_json(by_alias=True)
    )
    bench.started.clear()
    stage.benchmark(bench.request(compare_untrained=False), bench.events)
    assert bench.started == ["trained"]  # the verifier alone has not changed


def test_an_edition_without_held_out_prompts_is_told_what_to_raise(bench):
    for key in ("B1_glaive", "B2_opencodeinstruct"):
        write_prompts(bench.files.dataset(key).prompts, [])
    with pytest.raises(BadInput, match=r"raise splits\.benchmark"):
        stage.benchmark(bench.request(), bench.events)


def test_a_drafter_that_was_never_exported_is_named_before_a_server_starts(tmp_path):
    from aerie.benchmark.server import drafter_plan
    from aerie.errors import BadInput
    from aerie.settings.pipeline import BenchmarkSettings

    with pytest.raises(BadInput, match=r"nowhere: the drafter cannot be read: .*; run stage export first"):
        drafter_plan(tmp_path / "nowhere", BenchmarkSettings())

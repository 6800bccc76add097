"""The stage against stand-in servers, one a variant."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from aerie.artefacts.draft_vocabulary import DraftVocabulary, write_draft_vocabulary
from aerie.artefacts.manifest import describe_output, read_manifest, write_manifest
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.verifier_tokens import VerifierTokens, write_verifier_tokens
from aerie.benchmark import stage
from aerie.errors import BadInput, Failed
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest
from tests.benchmark.stand_in import StandIn


class Bench:
    """An edition as ``export`` leaves it, and the servers that its benchmark meets."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.events = Events(root / "events.jsonl")
        self.started: list[str] = []
        self.servers: dict[str, StandIn] = {}
        self.info: dict[str, object] = {}
        self.change = lambda variant, reply: None
        monkeypatch.setattr(stage, "benchmark_server", self.serve)
        self.export()

    def request(self, *, force=False, dtype="float32", **benchmark):
        source = {"reader": "glaive", "path": "x", "licence": "mit"}
        document = {
            "name": "test",
            "verifier": {"path": self.root / "verifier", "profile": "demo", "dtype": dtype},
            "serving": {"device": "cpu", "context_length": 128},
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
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(folder.name.encode())
        vocabulary = DraftVocabulary(
            d2t=np.array([1, 9, 9, 9]), t2d=np.isin(np.arange(32), [1, 10, 11, 12]), corpus_fingerprint="corpus"
        )
        write_draft_vocabulary(files.vocabulary, vocabulary, {})
        self.manifest("capture", [], {"parity": {"maximum_relative": 3e-6}})
        outputs = [
            folder / n
            for folder in (files.drafter, files.untrained_drafter)
            for n in ("config.json", "model.safetensors")
        ]
        counts = {
            "layers": [2, 4, 5],
            "serving_layer_ids": [1, 3, 4],
            "corpus_fingerprint": "corpus",
            "validation": {"estimated_acceptance_length": 2.6},
        }
        self.manifest("export", outputs, counts)
        for key in ("B1_glaive", "B2_opencodeinstruct"):
            self.prompts(key)

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
            token_ids={"<|im_end|>": 1}, vocabulary_size=32, eos_ids=(1,), tokenizer_sha256="0" * 64, model_type="llama"
        )
        write_verifier_tokens(self.files.dataset(key).verifier_tokens, tokens)

    @contextmanager
    def serve(self, request, drafter, events):
        variant = {None: "without", "drafter": "trained", "drafter_untrained": "untrained"}[drafter and drafter.name]
        self.started.append(variant)
        info = {
            "version": "0.5.23",
            "model_path": "verifier",
            "dtype": "float32",
            "max_total_num_tokens": 1000,
            "speculative_algorithm": "EAGLE3" if drafter else None,
            "speculative_draft_model_path": str(drafter) if drafter else None,
            "speculative_num_steps": 3 if drafter else None,
            "speculative_eagle_topk": 1 if drafter else None,
            "speculative_num_draft_tokens": 4 if drafter else None,
            **(self.info if drafter else {}),
        }
        with StandIn(variant, info, lambda reply: self.change(variant, reply)) as server:
            self.servers[variant] = server
            yield server.url

    def results(self):
        return json.loads((self.files.benchmark / "results.json").read_text())


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def test_three_servers_measure_held_out_prompts_greedily_and_a_second_run_starts_none(bench):
    result = stage.benchmark(bench.request(), bench.events)
    counts = result.manifest.counts
    assert bench.started == ["without", "untrained", "trained"]
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
    assert bench.started == ["trained"]


def test_a_failed_gate_leaves_results_and_no_manifest(bench):
    with pytest.raises(Failed, match="usual causes") as failure:
        stage.benchmark(bench.request(minimum_acceptance_length=3.0), bench.events)
    assert bench.results()["acceptance_length"] == 2.5
    assert not bench.files.manifest("benchmark").exists()
    assert "promised 2.60, served 2.50" in str(failure.value)


def test_output_that_the_drafter_changes_fails_in_float32_and_is_an_alert_in_bfloat16(bench):
    def change(variant, reply):
        if variant == "trained":
            reply["output_ids"][5] = 30

    bench.change = change
    with pytest.raises(Failed, match="first at token 5"):
        stage.benchmark(bench.request(), bench.events)
    result = stage.benchmark(bench.request(dtype="bfloat16"), bench.events)
    assert result.manifest.counts["lossless"] is False
    assert '"alert"' in (bench.root / "events.jsonl").read_text()


def test_a_server_that_runs_another_drafter_or_algorithm_is_not_measured(bench):
    bench.info = {"speculative_algorithm": "EAGLE"}
    with pytest.raises(Failed, match="speculative_algorithm is 'EAGLE', not 'EAGLE3'"):
        stage.benchmark(bench.request(), bench.events)
    assert bench.servers["untrained"].requests == []


def test_a_drafter_that_changed_after_its_export_is_refused(bench):
    (bench.files.drafter / "model.safetensors").write_bytes(b"other")
    with pytest.raises(Failed, match="run export again"):
        stage.benchmark(bench.request(), bench.events)


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

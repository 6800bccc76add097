"""Any drafter, and servers of someone else's, against stand-in servers."""

import json
from contextlib import ExitStack, contextmanager

import pytest

from aerie.benchmark import any_drafter
from aerie.errors import BadInput
from aerie.recording import record_result
from aerie.settings.benchmark_target import BenchmarkTarget
from aerie.settings.pipeline import PipelineSettings
from aerie.stages import Events, StageRequest
from aerie.store.connection import connected
from aerie.store.queries.benchmarks import list_benchmarks
from tests.benchmark.stand_in import StandIn

FIVE_PROMPTS = [{"prompt_ids": [number, 2, 3]} for number in range(4)] + [{"prompt_ids": [9], "sample_id": "mine"}]


class Bench:
    """A drafter, a file of prompts, and servers with and without a drafter."""

    def __init__(self, root, monkeypatch, stack):
        self.root, self.stack = root, stack
        self.events = Events(root / "events.jsonl")
        self.started = []
        self.servers = {}
        self.change = lambda variant, reply: None
        self.drafter = root / "drafter"
        self.drafter.mkdir()
        (self.drafter / "config.json").write_text("{}")
        (self.drafter / "model-00001-of-00001.safetensors").write_bytes(b"weights")
        (root / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in FIVE_PROMPTS))
        monkeypatch.setattr(any_drafter, "benchmark_server", self.serve)

    def run(self, *, force=False, run_id="run 1", **target):
        request = self.request(force=force, run_id=run_id, **target)
        return any_drafter.benchmark_drafter(request, self.events)

    def request(self, *, force=False, run_id="run 1", **target):
        source = {"reader": "glaive", "path": "x", "licence": "mit"}
        document = {
            "name": "test",
            "verifier": {"path": self.root / "verifier", "profile": "demo", "dtype": "float32"},
            "serving": {"device": "cpu", "context_length": 128},
            "datasets": {"B1_glaive": {"source": source}},
            "generation": {"maximum_attempts": 1},
            "corpus": {"maximum_length": 64},
            "vocabulary": {"size": 4},
            "training": {"epochs": 1, "sequence_length": 64},
            "benchmark": {"prompts_per_dataset": 4, "max_new_tokens": 32},
            "publish": {"folder": self.root / "published"},
        }
        return StageRequest(
            settings=PipelineSettings.model_validate(document),
            data_root=self.root / "data",
            server_folder=self.root / "server",
            edition="main",
            run_id=run_id,
            force=force,
            target=BenchmarkTarget.model_validate(
                {"prompts_file": self.root / "mine.jsonl", "concurrency": [1, 2], **target}
            ),
        )

    def server(self, variant):
        """A server that runs: URL and what it was sent."""
        drafts = variant == "trained"
        info = {
            "version": "0.5.23",
            "model_path": "verifier",
            "dtype": "float32",
            "max_total_num_tokens": 1000,
            "speculative_algorithm": "EAGLE3" if drafts else None,
            "speculative_draft_model_path": str(self.drafter) if drafts else None,
            "speculative_num_steps": 3 if drafts else None,
            "speculative_eagle_topk": 1 if drafts else None,
            "speculative_num_draft_tokens": 4 if drafts else None,
            "speculative_draft_window_size": None,
        }
        made = self.stack.enter_context(StandIn(variant, info, lambda reply: self.change(variant, reply)))
        self.servers[variant] = made
        return made

    @contextmanager
    def serve(self, request, drafter, drafting, events):
        variant = "without" if drafter is None else "trained"
        self.started.append(variant)
        yield self.server(variant).url

    def told(self, kind):
        lines = (self.root / "events.jsonl").read_text().splitlines()
        return [event["message"] for event in map(json.loads, lines) if event["type"] == kind]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    with ExitStack() as stack:
        yield Bench(tmp_path, monkeypatch, stack)


def test_a_drafter_is_measured_with_and_without_it_at_each_concurrency(bench):
    result = bench.run(drafter=bench.drafter, drafter_id="main-abc")
    one, two = result.manifest.counts["measurements"]
    assert bench.started == ["without", "trained"]
    assert [server.flushed for server in bench.servers.values()] == [2, 2], (
        "prompts that were sent before were answered from the prefix cache"
    )
    assert (one["settings"]["concurrency"], two["settings"]["concurrency"]) == (1, 2)
    assert (one["acceptance_length"], one["lossless"], one["prompts"]) == (2.5, True, 4)
    assert one["speed_up"] > 0 and one["acceptance_by_position"] == [1.0, 1.0, 0.0]
    assert one["drafter"] == {"drafter_id": "main-abc", "folder": str(bench.drafter)}
    assert one["not_measured"].keys() == {"acceptance_length_untrained"}
    assert one["per_dataset"].keys() == {"mine"}
    assert "completion tokens / verify steps" in one["definition"]

    bench.started.clear()
    assert bench.run(drafter=bench.drafter, drafter_id="main-abc", run_id="run 2").reused
    assert bench.started == []


def test_a_retry_measures_only_what_an_earlier_try_did_not(bench):
    def die(variant, reply):
        if variant == "trained":
            del reply["meta_info"]["spec_verify_ct"]

    bench.change = die
    with pytest.raises(Exception, match="spec_verify_ct"):
        bench.run(drafter=bench.drafter)
    bench.started.clear()
    bench.change = lambda variant, reply: None
    bench.run(drafter=bench.drafter)
    assert bench.started == ["trained"]


def test_someone_elses_server_is_measured_as_it_is_and_the_result_says_what_is_missing(bench):
    url = bench.server("trained").url
    (row,) = bench.run(server_url=url, concurrency=[2]).manifest.counts["measurements"]
    assert (bench.started, bench.servers["trained"].flushed) == ([], 0)
    assert (row["acceptance_length"], row["acceptance_rate"]) == (2.5, 12 / 24)
    assert row["tokens_per_second"] > 0
    assert (row["lossless"], row["speed_up"], row["tokens_per_second_without"]) == (None, None, None)
    assert {"lossless", "speed_up", "tokens_per_second_without"} < row["not_measured"].keys()
    assert "someone else's" in row["caveats"][0]
    assert (row["server_url"], row["settings"]["num_steps"]) == (url, 3)
    assert any("not measured: no verifier_url" in message for message in bench.told("progress"))
    assert not bench.run(server_url=url, concurrency=[2], run_id="run 2").reused, "nobody knows what it serves by now"


def test_with_the_plain_verifier_beside_it_losslessness_and_speed_up_are_measured_too(bench):
    bench.change = lambda variant, reply: reply["output_ids"].__setitem__(5, 30 if variant == "trained" else 31)
    target = {"server_url": bench.server("trained").url, "verifier_url": bench.server("without").url}
    (row,) = bench.run(**target, concurrency=[2]).manifest.counts["measurements"]
    assert row["lossless"] is False and row["speed_up"] > 0
    assert row["divergences"][0] == {
        "dataset": "mine", "sample_id": "line-1", "position": 5, "own_token": 31, "other_token": 30,
    }  # fmt: skip
    assert bench.told("alert") == ["greedy output differs for 4 of 4 prompts"]


def test_servers_that_are_not_what_they_are_said_to_be_are_refused(bench):
    with_drafter, plain = bench.server("trained").url, bench.server("without").url
    with pytest.raises(BadInput, match="without a drafter: there is nothing to measure"):
        bench.run(server_url=plain)
    with pytest.raises(BadInput, match="must be the plain verifier"):
        bench.run(server_url=with_drafter, verifier_url=with_drafter)


def test_every_concurrency_is_a_row_of_the_drafters_history(bench, database_url):
    request = bench.request(drafter=bench.drafter, drafter_id="main-abc")
    with connected(database_url) as connection:
        for _ in range(2):
            record_result(connection, request, any_drafter.benchmark_drafter(request, bench.events))
        rows = list_benchmarks(connection, drafter_id="main-abc")
    assert sorted(row["concurrency"] for row in rows) == [1, 2]
    assert {row["document"]["acceptance_length"] for row in rows} == {2.5}


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"prompt_ids": []}', "prompt_ids"), ("hello", ":1: expected"), ('{"text": "hi"}', "prompt_ids: Field required")],
)
def test_a_line_that_is_no_prompt_is_named(bench, line, why):
    (bench.root / "mine.jsonl").write_text(line + "\n")
    with pytest.raises(BadInput, match=why):
        bench.run(drafter=bench.drafter)
    assert bench.started == []


def test_a_prompt_that_does_not_fit_the_server_is_named(bench):
    (bench.root / "mine.jsonl").write_text(json.dumps({"prompt_ids": [1] * 96}))
    with pytest.raises(BadInput, match="prompt line-1 has 96 tokens: expected less than 96"):
        bench.run(drafter=bench.drafter)


def test_a_folder_without_a_drafter_is_refused_before_a_server_starts(bench):
    (bench.drafter / "config.json").unlink()
    with pytest.raises(BadInput, match="no drafter there"):
        bench.run(drafter=bench.drafter)
    assert bench.started == []

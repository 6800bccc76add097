"""The back end ``vllm``: the command lines, and what its extraction leaves out, which it does with exit code 0.

vLLM itself needs a GPU: a stand-in answers as ``vllm serve`` does, and speculators' real extraction asks it.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from aerie.artefacts.state_files import read_states
from aerie.errors import Failed, Retryable
from aerie.hidden_states.backend_vllm import extraction_command, server_command
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify

from .conftest import random_rows


class StandIn(ThreadingHTTPServer):
    """Writes states of ones for each prompt, but for those that ``skips`` says, whose answer tells of no states."""

    def __init__(self, storage: Path, model: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        storage.mkdir()
        self.storage, self.model = storage, model
        self.skips = lambda _ids: False
        self.asked: list[list[int]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_):
        pass

    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": self.server.model, "object": "model"}]})

    def do_POST(self):
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.server.asked.append(ids)
        path = self.server.storage / f"{len(self.server.asked)}-{threading.get_ident()}.safetensors"
        save_file({"token_ids": torch.tensor(ids), "hidden_states": torch.ones(len(ids), 4, 64)}, path)
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_token_ids": ids}
        transfer = None if self.server.skips(ids) else {"hidden_states_path": str(path)}
        self.answer(
            {
                "id": "x", "object": "text_completion", "created": 0, "model": self.server.model, "choices": [choice],
                "kv_transfer_params": transfer,
            }
        )  # fmt: skip


@pytest.fixture
def server(tmp_path, verifier) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path / "storage", str(verifier))
    thread = threading.Thread(target=stand_in.serve_forever)
    thread.start()
    yield stand_in
    stand_in.shutdown()
    stand_in.server_close()
    thread.join()


def through(url):
    return {"backend": "vllm", "vllm": {"url": url}, "parity_rows": 0}


@pytest.mark.slow
def test_rows_that_the_extraction_skips_with_exit_code_0_are_named_and_the_next_try_takes_only_those(edition, server):
    rows = random_rows(9, longest=20)
    edition.merged(rows)
    request = edition.request(hidden_states=through(server.url))
    forecast(request, edition.events)
    server.skips = lambda ids: ids in (rows[2], rows[7])
    with pytest.raises(Retryable, match=r"exit code 0, but skipped 2 of 9 rows: samples B1/2, B1/7; (?s:.*)missing kv"):
        capture(request, edition.events)
    assert len(list(edition.states.glob("*.safetensors"))) == 7

    server.skips = lambda _ids: False
    server.asked.clear()
    assert capture(request, edition.events).manifest.counts["files"] == 9
    assert sorted(server.asked) == sorted([rows[2], rows[7]])
    assert verify(edition.files, resolve_layers(request.settings), edition.events, progress_seconds=60).rows == 9
    assert read_states(edition.states / "B1%2F7.safetensors").token_ids.tolist() == rows[7]
    assert not (edition.files.hidden_states / "vllm").exists()


@pytest.mark.slow
def test_a_server_that_is_not_there_fails_with_the_end_of_the_log(edition):
    edition.merged(random_rows(2, longest=8))
    request = edition.request(hidden_states=through("http://127.0.0.1:9"))
    forecast(request, edition.events)
    with pytest.raises(Failed, match=r"speculators ended with exit code 1; .*extraction.log ends with"):
        capture(request, edition.events)


def test_a_vllm_that_ends_while_it_starts_fails_with_its_log(edition, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named vllm\nexit 3\n")
    python.chmod(0o755)
    edition.merged(random_rows(2, longest=8))
    request = edition.request(hidden_states={"backend": "vllm", "vllm": {"python": python}, "parity_rows": 0})
    forecast(request, edition.events)
    with pytest.raises(Failed, match=r"vllm serve ended with exit code 3; (?s:.*)no module named vllm"):
        capture(request, edition.events)


def test_the_server_extracts_what_enters_the_layers_and_the_last_output_and_keeps_no_prefixes(edition, tmp_path):
    asked = {"backend": "vllm", "vllm": {"python": "/opt/vllm/bin/python", "arguments": ["--quantization", "fp8"]}}
    settings = edition.request(hidden_states=asked).settings
    command = server_command(settings, resolve_layers(settings), tmp_path, port=8123)
    options = dict(zip(command[5::2], command[6::2], strict=False))
    assert command[:5] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", str(edition.verifier)]
    assert (options["--port"], options["--dtype"], options["--max-model-len"]) == ("8123", "float32", "512")
    assert "--no-enable-prefix-caching" in command
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative["method"] == "extract_hidden_states"
    layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [2, 4, 5, 8]
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}
    assert command[-2:] == ["--quantization", "fp8"]


def test_speculators_takes_the_extraction_s_options(edition, tmp_path):
    import click
    from speculators.cli import app
    from typer.main import get_command

    settings = edition.request(hidden_states=through("http://gpu-7:8000")).settings
    command = extraction_command(settings, "http://gpu-7:8000", tmp_path / "dataset", tmp_path / "written")
    extraction = get_command(app).get_command(click.Context(get_command(app)), "generate-offline-data")
    options = extraction.make_context("generate-offline-data", command[4:]).params
    assert options["endpoint"] == "http://gpu-7:8000/v1"
    assert (options["model"], options["concurrency"]) == (str(edition.verifier), 32)
    assert (options["output"], options["fail_on_error"]) == (str(tmp_path / "written"), False)


@pytest.mark.parametrize(
    "hidden_states",
    [
        {"backend": "vllm"},
        {"backend": "vllm", "vllm": {"url": "http://x:1", "python": "/x"}},
        {"backend": "sglang", "vllm": {"url": "http://x:1"}},
        {"backend": "vllm", "vllm": {"url": "http://x:1"}, "disk_limit_gib": 1.0},
    ],
)
def test_a_vllm_that_cannot_be_reached_or_is_not_asked_is_refused_by_the_settings(edition, hidden_states):
    with pytest.raises(ValidationError, match=r"expected either vllm.url|vllm is for backend vllm|only sglang streams"):
        edition.request(hidden_states=hidden_states)

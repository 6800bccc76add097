"""Capture through a real SGLang server, as the pipeline starts it, against transformers and a naive forward pass."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from speculators.data_generation.offline import get_existing_hidden_state_indices

from aerie.artefacts.state_files import read_states, state_path
from aerie.errors import Failed
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.protocol import CapturedRequest
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify
from aerie.serving.client import status, stop

from . import naive_deepseek, naive_llama
from .conftest import Edition, random_rows

StreamsOf = Callable[[Path, list[int]], torch.Tensor]

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Of a slot's norm: what float32 rounding makes of other kernels, other chunks and other batches."""


@pytest.fixture
def served(edition: Edition, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edition]:
    """An edition whose server is ended after the test."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling the router of a tiny model takes minutes
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # every third step of decoding retracts a request
    # Random weights without a tokenizer answer no question: the server is asked for variety alone.
    monkeypatch.setattr("aerie.serving.configured.probing_of", lambda *_: None)
    yield edition
    stop(edition.request().server_folder)


def largest_difference(states: torch.Tensor, expected: torch.Tensor) -> float:
    """Over the slots of one row, the norm of the difference over the norm."""
    return float(((states - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))).max())


def states_of(edition: Edition) -> dict[str, torch.Tensor]:
    return {path.name: read_states(path).hidden_states for path in edition.states.glob("*.safetensors")}


def require_equal_to_transformers(served: Edition, rows: list[list[int]]) -> None:
    """Capture the same corpus with the other back end, in an edition of its own, and compare every file."""
    other = Edition(served.root / "other", served.verifier)
    other.merged(rows)
    asked = {"backend": "transformers", "parity_rows": 0}
    forecast(other.request(hidden_states=asked), other.events)
    capture(other.request(hidden_states=asked), other.events)
    ours, theirs = states_of(served), states_of(other)
    assert ours.keys() == theirs.keys()
    assert max(largest_difference(ours[name], theirs[name]) for name in ours) < TOLERANCE


def require_equal_to_a_naive_pass(served: Edition, rows: list[list[int]], streams_of: StreamsOf) -> None:
    """Compare every file with a float32 pass that is written out in the tests."""
    layers = resolve_layers(served.request().settings)
    wanted = [*layers.auxiliary, layers.decoder_layers]
    for number, row in enumerate(rows):
        naive = streams_of(served.verifier, row)[wanted].transpose(0, 1)
        ours = read_states(state_path(served.states, f"B1%2F{number}")).hidden_states
        assert largest_difference(ours, naive) < TOLERANCE


def require_the_same_when_retracted(served: Edition, rows: list[list[int]]) -> None:
    """Capture rows again while requests decode beside them and are retracted, and compare the files of both."""
    assert retracted(status(served.request().server_folder).url, rows) > 0
    for number, row in enumerate(rows):
        once, twice = (state_path(served.states, name) for name in (f"B1%2F{number}", f"again-{number}"))
        assert read_states(twice).token_ids.tolist() == row
        assert largest_difference(read_states(twice).hidden_states, read_states(once).hidden_states) < TOLERANCE


def retracted(url: str, rows: list[list[int]]) -> int:
    """Capture rows again under other names, generating so that the server retracts; return how often it did."""

    def ask(number: int) -> int:
        request = CapturedRequest(name=f"again-{number}", tokens=len(rows[number]))
        sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": rows[number], "sampling_params": sampling, "rid": request.request_id}
        answer = httpx.post(f"{url}/generate", json=body, timeout=500)
        answer.raise_for_status()
        return int(answer.json()["meta_info"]["num_retractions"])

    with ThreadPoolExecutor(len(rows)) as pool:
        return sum(pool.map(ask, range(len(rows))))


def test_states_of_a_latent_attention_model_with_experts_equal_transformers(served, latent_attention_verifier):
    served.verifier = latent_attention_verifier
    rows = random_rows(12, longest=120)
    served.merged(rows)
    forecast(served.request(), served.events)
    parity = capture(served.request(hidden_states={"parity_rows": len(rows)}), served.events).manifest.counts["parity"]
    assert parity["maximum_relative"] < TOLERANCE, parity
    require_equal_to_a_naive_pass(served, rows, naive_deepseek.residual_streams)
    require_equal_to_transformers(served, rows)
    require_the_same_when_retracted(served, rows[:8])


def test_states_of_chunked_mixed_and_retracted_prefills_equal_transformers_and_only_what_is_wrong_is_made_again(served):
    rows = random_rows(40, longest=120)
    served.merged(rows)
    forecast(served.request(), served.events)
    request = served.request(hidden_states={"parity_rows": len(rows)})
    manifest = capture(request, served.events).manifest
    assert (manifest.counts["files"], manifest.counts["tokens"]) == (len(rows), sum(map(len, rows)))
    assert manifest.counts["parity"]["maximum_relative"] < TOLERANCE, manifest.counts["parity"]
    lease = status(request.server_folder)
    assert lease.plan.phase == "capture"

    layers = resolve_layers(request.settings)
    assert layers.auxiliary == (2, 4, 5)
    require_equal_to_a_naive_pass(served, rows, naive_llama.residual_streams)
    require_equal_to_transformers(served, rows)

    assert verify(served.files, layers, served.events, progress_seconds=60).rows == len(rows)
    assert get_existing_hidden_state_indices(served.files.hidden_states) == list(range(len(rows)))

    assert capture(request, served.events).reused
    files = sorted(served.states.glob("*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in files}
    files[3].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-4])
    with pytest.raises(Failed, match="2 state files are wrong"):
        verify(served.files, layers, served.events, progress_seconds=60)
    assert not capture(request, served.events).reused
    assert verify(served.files, layers, served.events, progress_seconds=60).rows == len(rows)
    assert [path for path in files if path.stat().st_mtime_ns != before[path]] == [files[3], files[5]]
    assert any(message.startswith("captured 2 rows") for message in served.progress())
    assert status(request.server_folder).launch_token == lease.launch_token

    require_the_same_when_retracted(served, rows[:8])

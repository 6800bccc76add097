"""Capture through a real SGLang server, as the pipeline starts it, against transformers."""

from collections.abc import Iterator

import pytest
from speculators.data_generation.offline import get_existing_hidden_state_indices

from aerie.errors import Failed
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify
from aerie.serving.client import status, stop

from .conftest import Edition, random_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def served(edition: Edition, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edition]:
    """An edition whose server is ended after the test."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling the router of a tiny model takes minutes
    # Random weights without a tokenizer answer no question: the server is asked for variety alone.
    monkeypatch.setattr("aerie.serving.configured.probing_of", lambda *_: None)
    yield edition
    stop(edition.request().server_folder)


def test_states_of_a_latent_attention_model_with_experts_equal_transformers(served, latent_attention_verifier):
    served.verifier = latent_attention_verifier
    rows = random_rows(12, longest=120)
    served.merged(rows)
    forecast(served.request(), served.events)
    parity = capture(served.request(hidden_states={"parity_rows": len(rows)}), served.events).manifest.counts["parity"]
    assert parity["maximum_relative"] < 1e-5, parity


def test_states_of_chunked_and_mixed_prefills_equal_transformers_and_a_second_run_fills_only_what_is_wrong(served):
    rows = random_rows(40, longest=120)
    served.merged(rows)
    forecast(served.request(), served.events)
    request = served.request(hidden_states={"parity_rows": len(rows)})
    manifest = capture(request, served.events).manifest
    assert (manifest.counts["files"], manifest.counts["tokens"]) == (len(rows), sum(map(len, rows)))
    assert manifest.counts["parity"]["maximum_relative"] < 1e-5, manifest.counts["parity"]
    lease = status(request.server_folder)
    assert lease.plan.phase == "capture"

    layers = resolve_layers(request.settings)
    assert layers.auxiliary == (2, 4, 5)
    assert verify(served.files, layers).rows == len(rows)
    assert get_existing_hidden_state_indices(served.files.hidden_states) == list(range(len(rows)))

    assert capture(request, served.events).reused
    files = sorted(served.states.glob("*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in files}
    files[3].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-4])
    with pytest.raises(Failed, match="2 state files are wrong"):
        verify(served.files, layers)
    assert not capture(request, served.events).reused
    assert verify(served.files, layers).rows == len(rows)
    assert [path for path in files if path.stat().st_mtime_ns != before[path]] == [files[3], files[5]]
    assert any(message.startswith("captured 2 rows") for message in served.progress())
    assert status(request.server_folder).launch_token == lease.launch_token

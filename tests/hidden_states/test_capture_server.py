"""Capture through a real SGLang server, against transformers."""

from contextlib import contextmanager

import pytest
from speculators.data_generation.offline import get_existing_hidden_state_indices

from aerie.errors import Failed
from aerie.hidden_states import stage
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import CaptureServer, capture, forecast
from aerie.hidden_states.verify import verify

from .conftest import random_rows, sglang_server

pytestmark = pytest.mark.slow


def test_states_of_chunked_and_mixed_prefills_equal_transformers_and_a_second_run_fills_only_what_is_wrong(
    edition, tmp_path, monkeypatch
):
    rows = random_rows(40, longest=120)
    edition.merged(rows)
    forecast(edition.request(), edition.events)
    renewals = []
    with sglang_server(
        edition.verifier,
        edition.states,
        tmp_path / "server.log",
        "--chunked-prefill-size",
        "32",
        "--enable-mixed-chunk",
    ) as url:

        @contextmanager
        def running(*_arguments):
            yield CaptureServer(url=url, renew=lambda: renewals.append(1))

        monkeypatch.setattr(stage, "capture_server", running)
        parity = {"parity_rows": len(rows)}
        manifest = capture(edition.request(hidden_states=parity), edition.events).manifest
        assert manifest.counts["files"] == len(rows)
        assert manifest.counts["tokens"] == sum(map(len, rows))
        assert manifest.counts["parity"]["maximum_relative"] < 1e-5
        assert renewals

        layers = resolve_layers(edition.request().settings)
        assert layers.auxiliary == (2, 4, 5)
        assert verify(edition.files, layers).rows == len(rows)
        assert get_existing_hidden_state_indices(edition.files.hidden_states) == list(range(len(rows)))

        files = sorted(edition.states.glob("*.safetensors"))
        assert capture(edition.request(hidden_states=parity), edition.events).reused
        before = {path: path.stat().st_mtime_ns for path in files}
        files[3].unlink()
        files[5].write_bytes(files[5].read_bytes()[:-4])
        with pytest.raises(Failed, match="2 state files are wrong"):
            verify(edition.files, layers)
        again = capture(edition.request(hidden_states=parity), edition.events)
        assert not again.reused
        assert verify(edition.files, layers).rows == len(rows)
        changed = [path for path in files if path.stat().st_mtime_ns != before[path]]
        assert changed == [files[3], files[5]]
        assert "captured 2 rows" in next(m for m in reversed(edition.progress()) if m.startswith("captured 2 "))

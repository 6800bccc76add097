"""The stages around a server."""

import pytest

from aerie import servers
from aerie.serving import client
from aerie.stages import Events


@pytest.fixture
def external(make_request, settings):
    """A request whose server is somebody else's."""
    serving = settings.serving.model_copy(update={"backend": "external", "external_url": "http://gpu-7:30000"})
    return make_request(settings.model_copy(update={"serving": serving}), phase="generate")


def test_a_server_of_somebody_else_is_never_stopped(external, tmp_path, monkeypatch):
    def touched(*_):
        raise AssertionError("a server was touched")

    monkeypatch.setattr(client, "stop", touched)
    monkeypatch.setattr(client, "release", touched)
    result = servers.stop(external, Events(tmp_path / "events"))
    assert (result.reused, dict(result.data)) == (True, {})
    assert "http://gpu-7:30000 is someone else's server: it is left running" in (tmp_path / "events").read_text()


def test_no_capture_server_is_started_ahead_where_states_were_captured_while_generating(
    make_request, settings, tmp_path, monkeypatch
):
    def started(*_, **__):
        raise AssertionError("a server was started")

    monkeypatch.setattr(servers, "ensure_configured", started)
    captured = settings.hidden_states.model_copy(update={"capture": "generate"})
    request = make_request(settings.model_copy(update={"hidden_states": captured}), phase="capture")
    assert servers.start(request, Events(tmp_path / "events")).reused
    assert "capture starts a server where some are missing" in (tmp_path / "events").read_text()


def test_stopping_where_nothing_runs_is_no_failure(make_request, tmp_path):
    request = make_request(phase="generate").model_copy(update={"server_folder": tmp_path / "server"})
    assert servers.stop(request, Events(tmp_path / "events")).reused


def test_a_capture_that_needs_no_server_of_ours_has_none_started_or_planned(
    make_request, settings, tmp_path, monkeypatch
):
    def touched(*_, **__):
        raise AssertionError("a server was touched")

    monkeypatch.setattr(servers, "ensure_configured", touched)
    hidden_states = settings.hidden_states.model_copy(update={"backend": "transformers"})
    request = make_request(settings.model_copy(update={"hidden_states": hidden_states}), phase="capture")
    assert servers.start(request, Events(tmp_path / "events")).reused
    assert "hidden_states.backend is transformers, which captures without a server" in (tmp_path / "events").read_text()
    assert servers.phases_of(request.settings) == ("generate", "benchmark")

"""GPUs shared out between the server that captures and the trainer, and the rows that a capture is proved on."""

import pytest

from aerie.artefacts.manifest import write_manifest
from aerie.errors import BadInput
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.proof import sample_rows
from aerie.hidden_states.streaming import file_bytes
from aerie.settings.pipeline import PipelineSettings
from aerie.training.streamed_run import trainer_gpus, visible_gpus

LAYERS = CapturedLayers(auxiliary=(2, 4, 5), decoder_layers=8, hidden_size=8, dtype="float32")


def request_of(edition, *, serving, processes=2, **changes):
    write_manifest(
        edition.files.manifest("forecast"), stage="forecast", edition="main", dataset=None, fingerprint="f", inputs=[],
        outputs=[], counts={"layers": [2, 4, 5]},
    )  # fmt: skip
    request = edition.request(training={"processes": processes})
    settings = request.settings.model_dump()
    settings["serving"] |= {"device": "cuda", **serving}
    return request.model_copy(update={"settings": PipelineSettings.model_validate(settings), **changes})


def test_the_trainer_gets_the_gpus_behind_the_servers(edition):
    request = request_of(edition, serving={"tensor_parallel_size": 2})
    assert trainer_gpus(request, visible=["0", "1", "2", "3", "4"]) == "2,3"
    assert trainer_gpus(request, visible=["4", "5", "6", "7"]) == "6,7"


def test_a_trainer_that_would_share_the_servers_gpus_is_refused_with_the_sum(edition):
    request = request_of(edition, serving={"tensor_parallel_size": 2})
    with pytest.raises(BadInput, match="the server takes 2 GPUs and the trainer 2, but this host has 3"):
        trainer_gpus(request, visible=["0", "1", "2"])


def test_a_server_elsewhere_leaves_the_trainer_every_gpu(edition):
    assert trainer_gpus(request_of(edition, serving={"device": "cpu"}), visible=[]) is None
    assert trainer_gpus(request_of(edition, serving={}, keeper="elsewhere"), visible=["0"]) is None
    external = {"backend": "external", "external_url": "http://10.0.0.5:8000"}
    assert trainer_gpus(request_of(edition, serving=external), visible=["0"]) is None


def test_gpus_are_those_that_this_process_may_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_capture_is_proved_on_rows_of_the_whole_corpus_and_on_no_more_than_the_limit_holds(edition):
    ids = [[5, 6, 7, 8, 9]] * 640
    edition.merge(ids, train_rows=600)
    one = file_bytes(5, LAYERS)
    rows = [row.row for row in sample_rows(edition.files, LAYERS, rows=640, first=3, limit_bytes=100 * one)]
    assert rows == [0, 1, 2, *range(10, 640, 10)]
    few = [row.row for row in sample_rows(edition.files, LAYERS, rows=640, first=3, limit_bytes=5 * one)]
    assert few == [0, 1, 2, 10, 20]

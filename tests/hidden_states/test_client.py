"""The capturing client against a server that misbehaves: a stand-in, to inject what a real one does rarely."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch
from aiohttp import web

from aerie.artefacts.corpus import CorpusRow
from aerie.artefacts.files import write_json
from aerie.artefacts.state_files import read_states, state_path, write_states
from aerie.errors import Failed, Retryable
from aerie.hidden_states import client
from aerie.hidden_states.client import Capture, CaptureTarget
from aerie.hidden_states.layers import CapturedLayers
from aerie.hidden_states.protocol import failure_path, hook_failure_path, parse_request_id
from aerie.hidden_states.record import CaptureRecord

LAYERS = CapturedLayers(auxiliary=(1,), decoder_layers=3, hidden_size=4, dtype="bfloat16")
ROWS = 12


class StandIn:
    """Answers ``/generate`` as SGLang does, after ``misbehave(request number, name, body, answer)``."""

    def __init__(self, states):
        self.states = states
        self.requests: list[str] = []
        self.replaced: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.misbehave = lambda *_: None
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        captured = parse_request_id(body["rid"])
        assert captured.tokens == len(body["input_ids"])
        self.requests.append(captured.name)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.01)
        self.in_flight -= 1
        answer = {
            "output_ids": [1],
            "meta_info": {
                "finish_reason": {"type": "length"},
                "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": 0,
            },
        }
        response = self.misbehave(len(self.requests), captured.name, body, answer)
        if response is None:
            self.write(captured.name, body["input_ids"])
            response = answer
        return response if isinstance(response, web.Response) else web.json_response(response)

    def write(self, name, ids):
        states = torch.ones(len(ids), LAYERS.slots, LAYERS.hidden_size, dtype=torch.bfloat16)
        write_states(state_path(self.states, name), token_ids=torch.tensor(ids), hidden_states=states)


@pytest.fixture
def server(tmp_path) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path)
    loop, started, runner = asyncio.new_event_loop(), threading.Event(), None

    async def start():
        nonlocal runner
        app = web.Application()
        app.router.add_post("/generate", stand_in.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()

    def serve():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait()
    yield stand_in
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client, "FILE_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(client.Capture._prefill.retry, "wait", lambda _: 0)


def rows() -> Iterator[CorpusRow]:
    for row in range(ROWS):
        ids = np.arange(row, row + 3, dtype=np.int32)
        yield CorpusRow(row=row, sample_id=f"s{row}", dataset="B1", split="train", input_ids=ids, loss_mask=ids * 0 + 1)


def run(server, *, renew=lambda: None, every_seconds=60):
    target = CaptureTarget(url=server.url, concurrency=4, request_timeout_seconds=5)
    done: list[int] = []
    record = CaptureRecord(
        server.states,
        LAYERS,
        taken=lambda row, _: done.append(row.row),
        replaced=lambda problem: server.replaced.append(problem),
        report=lambda _: None,
        report_seconds=every_seconds,
    )
    Capture(target, record, renew).run(rows())
    return sorted(done), record.progress


def test_every_row_is_sent_once_with_no_more_in_flight_than_allowed(server):
    done, progress = run(server)
    assert done == list(range(ROWS))
    assert sorted(server.requests) == sorted(f"s{row}" for row in range(ROWS))
    assert 1 < server.most_in_flight <= 4
    assert (progress.captured_rows, progress.captured_tokens, progress.present_rows) == (ROWS, 3 * ROWS, 0)


def test_files_of_an_interrupted_run_are_kept_and_its_bad_ones_captured_again(server):
    run(server)
    server.requests.clear()
    state_path(server.states, "s2").unlink()
    server.write("s7", [1, 2])
    _, progress = run(server)
    assert sorted(server.requests) == ["s2", "s7"]
    assert (progress.captured_rows, progress.present_rows) == (2, ROWS - 2)
    assert server.replaced == ["s7.safetensors: states of 2 tokens; the corpus row has 3"]
    assert read_states(state_path(server.states, "s7")).token_ids.tolist() == [7, 8, 9]


def test_a_failure_inside_the_hook_is_passed_on_with_its_reason(server):
    def fail(_number, name, _body, answer):
        write_json(failure_path(server.states, name), {"reason": "slots [2] of 4 gave no residual"})
        return answer

    server.misbehave = fail
    with pytest.raises(Failed, match="could not capture it: slots"):
        run(server)


def test_a_model_that_cannot_be_hooked_is_passed_on_but_not_after_it_is_mended(server):
    def fail(_number, _name, _body, answer):
        write_json(hook_failure_path(server.states), {"reason": "without a ForwardBatch"})
        return answer

    server.misbehave = fail
    with pytest.raises(Failed, match="without a ForwardBatch"):
        run(server)
    server.misbehave = lambda *_: None
    assert run(server)[0] == list(range(ROWS))


def test_a_server_without_hooks_is_found_out_instead_of_waited_for(server):
    server.misbehave = lambda _number, _name, _body, answer: answer
    with pytest.raises(Failed, match=r"not written .* later: the server was not launched with Aerie's forward hooks"):
        run(server)


def test_a_prefix_from_the_cache_is_refused_because_its_rows_have_no_states(server):
    def cached(_number, _name, _body, answer):
        answer["meta_info"]["cached_tokens"] = 2
        return answer

    server.misbehave = cached
    with pytest.raises(Failed, match="2 of them from its cache; expected 3 and 0"):
        run(server)


@pytest.mark.parametrize("field", ["cached_tokens", "prompt_tokens", "finish_reason"])
def test_an_answer_that_says_nothing_of_its_cache_is_not_taken_for_one_without(server, field):
    def silent(_number, name, body, answer):
        server.write(name, body["input_ids"])
        del answer["meta_info"][field]
        return answer

    server.misbehave = silent
    with pytest.raises(Failed, match=rf"sample s\d+: the server's answer has no {field}"):
        run(server)


def test_states_of_other_tokens_are_refused_as_they_arrive(server):
    def confuse(_number, name, _body, answer):
        server.write(name, [90, 91, 92])
        return answer

    server.misbehave = confuse
    with pytest.raises(Failed, match="belongs to other tokens"):
        run(server)


def test_a_server_error_is_tried_again_and_only_a_lasting_one_ends_the_capture_as_retryable(server):
    failures = count()
    server.misbehave = lambda *_: web.Response(status=500, text="busy") if next(failures) < 2 else None
    assert run(server)[0] == list(range(ROWS))
    for path in server.states.glob("*.safetensors"):
        path.unlink()
    server.misbehave = lambda *_: web.Response(status=500, text="worn out")
    with pytest.raises(Retryable, match=r"status 500 for sample s.: worn out"):
        run(server)


def test_a_request_that_the_server_rejects_fails_for_good_with_its_message(server):
    server.misbehave = lambda *_: web.Response(status=400, text="input is longer than the context")
    with pytest.raises(Failed, match=r"status 400 for sample s.: input is longer"):
        run(server)
    assert len(server.requests) <= 4


def test_an_aborted_request_is_retryable(server):
    def abort(_number, _name, _body, answer):
        answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
        return answer

    server.misbehave = abort
    with pytest.raises(Retryable, match="out of memory"):
        run(server)


def test_a_server_that_is_gone_is_retryable(server):
    server.url = "http://127.0.0.1:9"
    with pytest.raises(Retryable, match="no answer while capturing sample"):
        run(server)


def test_a_lost_lease_ends_the_capture_at_once(server):
    def lost():
        raise Retryable("the server's lease is gone")

    server.misbehave = lambda _number, _name, _body, answer: answer
    with pytest.raises(Retryable, match="lease is gone"):
        run(server, renew=lost, every_seconds=0.01)

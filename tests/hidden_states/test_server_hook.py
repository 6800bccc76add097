"""The hook inside the server, on a small stack of modules that behave as SGLang's do on a GPU: norms work in place."""

import fnmatch
import json
from types import SimpleNamespace

import pytest
import torch

from aerie.artefacts.state_files import read_states, state_path
from aerie.hidden_states import server_hook
from aerie.hidden_states.protocol import (
    CapturedRequest,
    failure_path,
    forward_hooks,
    hook_failure_path,
    parse_request_id,
)

HIDDEN, DEPTH, VOCABULARY = 8, 5, 50
AUXILIARY = (1, 2, 4)


class InPlaceNorm(torch.nn.Module):
    """As ``fused_add_rmsnorm``: adds into the residual and normalises into the input, both in place."""

    def forward(self, x, residual=None):
        if residual is None:
            return x / 2
        residual.add_(x)
        x.copy_(residual / 2)
        return x, residual


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.input_layernorm = InPlaceNorm()
        self.number = number

    def forward(self, positions, hidden, batch, state):
        if state["residual"] is None:
            state["residual"] = hidden.clone()
            normed = self.input_layernorm(hidden)
        else:
            normed, state["residual"] = self.input_layernorm(hidden, state["residual"])
        return normed * (self.number + 1.5)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(i) for i in range(DEPTH))
        self.norm = InPlaceNorm()

    @torch.inference_mode()
    def forward(self, batch):
        hidden, state = self.embed(batch.input_ids), {"residual": None}
        for layer in self.layers:
            hidden = layer(batch.positions, hidden, batch, state)
        return self.norm(hidden, state["residual"])[0]

    @torch.inference_mode()
    def expected(self, ids):
        """Residual streams entering each captured layer and before the final norm, without anything in place."""
        residual = self.embed(torch.tensor(ids))
        update, streams = residual / 2 * 1.5, {}
        for i in range(1, DEPTH + 1):
            residual = residual + update
            streams[i] = residual
            update = residual / 2 * (i + 1.5)
        return torch.stack([streams[i] for i in (*AUXILIARY, DEPTH)], dim=1)


class Server:
    """A model with the hooks registered as SGLang does."""

    def __init__(self, states, *, module_prefix="model", layers=AUXILIARY, dtype="float32", generated_bytes=None):
        torch.manual_seed(0)
        self.states = states
        self.model = torch.nn.ModuleDict({"model": Decoder()})
        self.specs = json.loads(
            json.dumps(
                forward_hooks(
                    states=states, module_prefix=module_prefix, layers=layers, dtype=dtype,
                    generated_bytes=generated_bytes,
                )
            )
        )  # fmt: skip
        for spec in self.specs:
            hook = server_hook.factory(spec["config"])
            for name, module in self.model.named_modules():
                if any(fnmatch.fnmatch(name, pattern) for pattern in spec["target_modules"]):
                    module.register_forward_hook(hook)

    def extend(self, *chunks):
        """Run one forward pass over chunks (request id, ids, position of the first)."""
        self._forward(chunks, extends=True)

    def decode(self, *chunks):
        self._forward(chunks, extends=False)

    def _forward(self, chunks, extends):
        ids = [token for _, chunk, _ in chunks for token in chunk]
        batch = SimpleNamespace(
            rids=[rid for rid, _, _ in chunks],
            input_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.tensor([p + i for _, chunk, p in chunks for i in range(len(chunk))]),
            seq_lens_cpu=torch.tensor([p + len(chunk) for _, chunk, p in chunks]),
            extend_seq_lens_cpu=[len(chunk) for _, chunk, _ in chunks] if extends else None,
            extend_prefix_lens_cpu=[p for _, _, p in chunks] if extends else None,
        )
        self.model["model"](batch)
        server_hook.collector_of(self.specs[0]["config"]).drain()

    def written(self):
        return sorted(path.stem for path in self.states.glob("*.safetensors"))

    def check(self, name, ids):
        state = read_states(state_path(self.states, name))
        assert state.token_ids.tolist() == ids
        torch.testing.assert_close(state.hidden_states, self.model["model"].expected(ids), atol=1e-6, rtol=1e-6)


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


def rid(name, tokens):
    return CapturedRequest(name=name, tokens=tokens).request_id


def test_a_prompt_in_one_pass_is_written_with_every_layer_though_norms_overwrite_the_residual(server):
    server.extend((rid("a", 4), [3, 1, 4, 1], 0))
    server.check("a", [3, 1, 4, 1])


def test_a_prompt_cut_into_chunks_among_other_requests_is_written_once_whole(server):
    a, b = [3, 1, 4, 1, 5], [9, 2, 6]
    server.extend((rid("a", 5), a[:2], 0), ("warm-up", [7, 7, 7], 0))
    server.extend(("HEALTH_CHECK", [8], 0), (rid("b", 3), b, 0), (rid("a", 5), a[2:4], 2))
    assert server.written() == ["b"]
    server.extend((rid("a", 5), a[4:], 4))
    assert server.written() == ["a", "b"]
    server.check("a", a)
    server.check("b", b)


def test_a_retracted_request_that_emits_its_rows_again_is_written_once_and_right(server):
    ids = [3, 1, 4, 1, 5]
    server.extend((rid("a", 5), ids[:3], 0))
    server.extend((rid("a", 5), ids[:2], 0))
    server.extend((rid("a", 5), ids[2:], 2))
    server.check("a", ids)
    written = state_path(server.states, "a").stat().st_mtime_ns
    server.extend((rid("a", 5), ids, 0))
    assert state_path(server.states, "a").stat().st_mtime_ns == written


def test_decode_steps_and_decoded_rows_in_a_mixed_batch_are_not_taken_for_prompt_rows(server):
    server.extend((rid("a", 3), [3, 1, 4], 0))
    server.extend((rid("b", 2), [9, 2], 0), (rid("a", 3), [5], 3))
    server.decode((rid("a", 3), [6], 4), (rid("b", 2), [7], 2))
    assert server.written() == ["a", "b"]
    server.check("b", [9, 2])


def test_requests_of_others_leave_no_file(server):
    server.extend(("warm-up", [1, 2, 3], 0))
    server.decode(("warm-up", [1], 3))
    assert list(server.states.iterdir()) == []


def test_a_norm_that_never_fires_is_reported_for_the_request_instead_of_hanging_it(tmp_path):
    server = Server(tmp_path, layers=(1, 2, DEPTH + 3))
    server.extend((rid("a", 2), [3, 1], 0))
    assert server.written() == []
    assert "slots [2] of 4 gave no residual" in json.loads(failure_path(tmp_path, "a").read_text())["reason"]


def test_a_model_that_hides_its_batch_from_the_hook_is_reported(server):
    layer = server.model["model"].layers[0]
    hidden = torch.zeros(1, HIDDEN)
    layer(torch.tensor([0]), hidden, batch=SimpleNamespace(rids=["x"]), state={"residual": None})
    assert "without a ForwardBatch" in json.loads(hook_failure_path(server.states).read_text())["reason"]


def test_a_fault_that_nobody_foresaw_is_told_instead_of_blocking_the_server_after_some_passes(server, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room for the copy")

    with monkeypatch.context() as patched:
        patched.setattr(server_hook, "write_states", broken)
        for number in range(server_hook.PENDING_FORWARDS + 2):
            server.extend((rid(f"a{number}", 2), [3, 1], 0))
    told = json.loads(failure_path(server.states, "a0").read_text())["reason"]
    assert told.startswith("the writer of states failed: MemoryError: no room for the copy")
    server.extend((rid("b", 2), [3, 1], 0))
    assert server.written() == ["b"]
    assert not hook_failure_path(server.states).exists(), "one lost sample writes off all that come after it"


def test_only_the_first_rank_captures(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    spec = forward_hooks(states=tmp_path, module_prefix="model", layers=AUXILIARY, dtype="float32")[0]
    assert server_hook.factory(spec["config"]) is None


def test_request_ids_carry_any_name():
    request = CapturedRequest(name="B1-x%2Fy-3", tokens=17)
    assert parse_request_id(request.request_id) == request
    assert parse_request_id("HEALTH_CHECK_1") is None


def test_states_are_stored_in_the_type_asked_for(tmp_path):
    config = forward_hooks(states=tmp_path, module_prefix="model", layers=(1,), dtype="bfloat16")[0]["config"]
    collector = server_hook.collector_of(config)
    batch = SimpleNamespace(
        rids=[rid("a", 2)], input_ids=torch.tensor([1, 2]), extend_seq_lens_cpu=[2], extend_prefix_lens_cpu=[0]
    )
    collector.note_batch(None, (batch,), None)
    for slot in (0, 1):
        collector.collect(slot)(None, (), (torch.zeros(2, 3), torch.full((2, 3), 1.5)))
    collector.drain()
    assert read_states(state_path(tmp_path, "a")).hidden_states.dtype == torch.bfloat16

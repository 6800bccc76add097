"""States taken while a real SGLang server generates, against those of the separate pass over the same tokens."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from aerie.artefacts.response_log import Response
from aerie.artefacts.state_files import read_states
from aerie.generation.client import Answer, GenerateClient, GenerateRequest
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.server import ensure
from aerie.generation.states import MOST_ASKED_AT_ONCE, StateKeeper, open_states, request_id
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify
from aerie.serving.client import stop

from .conftest import Edition, random_rows

pytestmark = pytest.mark.slow

END, CAP, CONCURRENCY = 1, 80, 16
SAMPLES, DROPPED = 36, 4
SERVING = {
    "device": "cpu", "context_length": 512, "mem_fraction_static": 0.2, "max_total_tokens": 4096,
    "chunked_prefill_size": 32, "max_running_requests": CONCURRENCY, "start_timeout_seconds": 900,
    "extra_arguments": ["--skip-tokenizer-init", "--enable-mixed-chunk"],
}  # fmt: skip


@dataclass(frozen=True)
class Generated:
    """What a server generated: the kept rows by sample id, how they ended, and how often they were retracted."""

    edition: Edition
    rows: dict[str, list[int]]
    ended: Counter[str]
    retractions: int
    written: int
    left: int
    alerts: list[str]

    def request(self, **changes):
        return self.edition.request(hidden_states={"capture": "generate", **changes}, serving=SERVING)


async def generate(edition: Edition, request, url: str) -> Generated:
    """Generate and keep as the driver does, all but the last few samples, which nobody asks for."""
    ids = random_rows(SAMPLES, longest=90)
    prompts = [
        GenerationPrompt(f"B1/{number}", "train", number, ids[number], "", CAP, None) for number in range(SAMPLES)
    ]
    request = request.model_copy(update={"dataset": "B1_glaive"})
    folder = open_states(request, prompts, edition.events, mean_response_tokens=None)
    alerts: list[str] = []
    answers: dict[str, Answer] = {}
    few = asyncio.Semaphore(CONCURRENCY)
    async with GenerateClient.open(
        url, concurrency=CONCURRENCY + MOST_ASKED_AT_ONCE,
        sampling={"temperature": 1.0, "stop_token_ids": [END]}, request_timeout_seconds=600, maximum_attempts=1,
        first_backoff_seconds=1.0,
    ) as client:  # fmt: skip
        states = StateKeeper(client, folder, lambda reason, message: alerts.append(message))

        async def one(prompt: GenerationPrompt) -> None:
            async with few:
                answer = await client.generate(
                    GenerateRequest(
                        rid=request_id(prompt.sample_id, "main/B1:run"), input_ids=prompt.prompt_ids,
                        max_new_tokens=CAP, own_cache=True,
                    )
                )  # fmt: skip
            answers[prompt.sample_id] = answer
            if prompt.admission_rank < SAMPLES - DROPPED:
                meta = answer.reply.meta_info.model_dump()
                states.keep(prompt, Response.model_construct(output_ids=answer.reply.output_ids, meta_info=meta))

        await asyncio.gather(*map(one, prompts))
        await states.settle()
    metas = [answers[prompt.sample_id].reply.meta_info for prompt in prompts]
    return Generated(
        edition=edition,
        rows={
            prompt.sample_id: [*prompt.prompt_ids, *answers[prompt.sample_id].reply.output_ids]
            for prompt in prompts[: SAMPLES - DROPPED]
        },
        ended=Counter(meta.finish_reason.type for meta in metas),
        retractions=sum(meta.model_dump().get("num_retractions", 0) for meta in metas),
        written=states.written,
        left=states.left,
        alerts=alerts,
    )


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, verifier) -> Iterator[Generated]:
    edition = Edition(tmp_path_factory.mktemp("generated"), verifier)
    request = edition.request(hidden_states={"capture": "generate"}, serving=SERVING)
    with pytest.MonkeyPatch.context() as patch:
        # SGLang's own switch: some steps of decoding retract a request, whatever the pool has room for.
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
        # Random weights without a tokenizer answer no question: the server is asked for variety alone.
        patch.setattr("aerie.serving.configured.probing_of", lambda *_: None)
        try:
            server = ensure(request, edition.events)
            yield asyncio.run(generate(edition, request, server.url))
        finally:
            stop(request.server_folder)


def test_states_of_what_is_generated_equal_those_of_the_separate_pass_which_fills_only_what_is_missing(generated):
    edition, rows = generated.edition, list(generated.rows.values())
    assert generated.ended["stop"] and generated.ended["length"], generated.ended
    assert generated.retractions, "nothing was retracted: the test does not show what it says"
    assert (generated.written, generated.left) == (len(rows), 0), generated.alerts
    files = sorted(edition.states.iterdir())
    assert len(files) == len(rows), "a sample that nobody asked for has a file, or a kept one has none"
    found = {path: read_states(path) for path in files}
    # Copied: what is read is mapped from the file, and some files are broken below.
    while_generating = {path: (state.token_ids.clone(), state.hidden_states.clone()) for path, state in found.items()}

    edition.merged(rows)
    forecast(generated.request(), edition.events)
    files[3].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-4])
    files[7].write_bytes(files[8].read_bytes())
    before = {path: path.stat().st_mtime_ns for path in files if path != files[3]}
    manifest = capture(generated.request(parity_rows=len(rows)), edition.events).manifest
    assert any(message.startswith("captured 3 rows") for message in edition.progress())
    assert [path for path in files if path.stat().st_mtime_ns != before.get(path)] == [files[3], files[5], files[7]]
    assert manifest.counts["parity"]["maximum_relative"] < 1e-5, manifest.counts["parity"]
    assert verify(edition.files, resolve_layers(generated.request().settings)).rows == len(rows)

    for path in files:
        path.unlink()
    capture(generated.request(), edition.events)
    worst = 0.0
    for path in files:
        separate, (token_ids, hidden_states) = read_states(path), while_generating[path]
        assert torch.equal(separate.token_ids, token_ids)
        difference = (separate.hidden_states - hidden_states).norm() / separate.hidden_states.norm()
        worst = max(worst, float(difference))
    assert worst < 1e-5, worst

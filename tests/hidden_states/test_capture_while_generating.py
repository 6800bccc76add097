"""States taken while a real SGLang server generates, against those of the separate pass over the same tokens."""

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from aerie.artefacts.manifest import read_manifest, write_manifest
from aerie.artefacts.prompts import Prompt, write_prompts
from aerie.artefacts.response_log import Response, iterate_responses
from aerie.artefacts.state_files import read_states, state_name, state_path
from aerie.artefacts.verifier_tokens import write_verifier_tokens
from aerie.boundary import grammar_of_verifier, judge
from aerie.generation.client import Answer, GenerateClient, GenerateRequest
from aerie.generation.prompts import GenerationPrompt
from aerie.generation.server import ensure
from aerie.generation.states import MOST_ASKED_AT_ONCE, StateKeeper, open_states, request_id
from aerie.hidden_states.layers import resolve_layers
from aerie.hidden_states.stage import capture, forecast
from aerie.hidden_states.verify import verify
from aerie.serving.client import stop
from aerie.settings.machine import PROJECT_ROOT, python_of
from aerie.stages import StageRequest

from .conftest import DATASET, END, TOKENS, Edition, random_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # two servers start

CAP, CONCURRENCY = 80, 16
SAMPLES, DROPPED = 36, 4
PROMPTS, KILLS, FILES_BEFORE_A_KILL = 48, 2, 5
KILLED = "killed"
CANARY_SHARES = ("corrupt", "truncated", "empty_reasoning", "loop", "short_answer")
UNPROBED = (
    "from aerie.serving import configured; configured.probing_of = lambda *_: None; from aerie.cli import main; main()"
)
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
    request = request.model_copy(update={"dataset": DATASET})
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
def edition(tmp_path_factory: pytest.TempPathFactory, verifier) -> Iterator[Edition]:
    """An edition whose servers retract requests, and are asked no question."""
    made = Edition(tmp_path_factory.mktemp("generated"), verifier)
    with pytest.MonkeyPatch.context() as patch:
        # SGLang's own switch: some steps of decoding retract a request, whatever the pool has room for.
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
        # Random weights without a tokenizer answer no question: the server is asked for variety alone.
        patch.setattr("aerie.serving.configured.probing_of", lambda *_: None)
        try:
            yield made
        finally:
            stop(made.request().server_folder)


def serving(edition: Edition) -> str:
    """URL of the edition's generating server, which tests share until one captures."""
    return ensure(edition.request(hidden_states={"capture": "generate"}, serving=SERVING), edition.events).url


@pytest.fixture(scope="module")
def generated(edition: Edition, interrupted) -> Generated:
    request = edition.request(hidden_states={"capture": "generate"}, serving=SERVING)
    return asyncio.run(generate(edition, request, serving(edition)))


@dataclass(frozen=True)
class Interrupted:
    """A data set whose stage ``generate`` was killed while samples were captured, and then ran to its end.

    ``rows`` are the kept ones by sample id, ``durable`` the samples in the log when it was killed last; ``captured``
    are token ids and states of each state file, by sample id.
    """

    rows: dict[str, list[int]]
    durable: set[str]
    captured: dict[str, tuple[torch.Tensor, torch.Tensor]]


def stage_request(edition: Edition) -> StageRequest:
    anything = {"prompts": 1, **dict.fromkeys((f"maximum_{kind}_share" for kind in CANARY_SHARES), 1.0)}
    dataset = {
        "source": {"reader": "any", "path": "x", "licence": "mit"}, "budget_tokens": 0, "max_new_tokens": CAP,
        "concurrency": CONCURRENCY, "canary": anything,
    }  # fmt: skip
    request = edition.request(
        hidden_states={"capture": "generate"}, serving=SERVING, datasets={DATASET: dataset},
        generation={"progress_seconds": 0.5, "maximum_quarantine_share": 1.0},
        sampling={"temperature": 1.0, "top_p": 1.0},
    )  # fmt: skip
    return request.model_copy(update={"dataset": DATASET})


def prepare(edition: Edition) -> dict[str, list[int]]:
    """Leave what the stage ``prepare`` does; return the prompts by sample id."""
    prompts = {f"{KILLED}/{number}": ids for number, ids in enumerate(random_rows(PROMPTS, longest=90))}
    files = edition.files.dataset(DATASET)
    write_prompts(
        files.prompts,
        [
            Prompt(
                sample_id=name, conversation_id=name, turn=0, split="train", prompt_ids=ids, tools=None,
                admission_rank=number, skip_reason=None,
            )
            for number, (name, ids) in enumerate(prompts.items())
        ],
    )  # fmt: skip
    write_verifier_tokens(files.verifier_tokens, TOKENS)
    write_manifest(
        files.manifest("prepare"), stage="prepare", edition="main", dataset=DATASET, fingerprint="p", inputs=(),
        outputs=(), counts={},
    )  # fmt: skip
    return prompts


@contextmanager
def database() -> Iterator[str]:
    """URL of a database for the stage; this environment has none."""
    with subprocess.Popen(
        [python_of("airflow"), "-m", "tests.throwaway_postgres"], cwd=PROJECT_ROOT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PROJECT_ROOT / "include", PROJECT_ROOT)))},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "no database was started"
        yield url


def start_generate(edition: Edition, url: str) -> subprocess.Popen[bytes]:
    """Start the stage ``generate`` on the server that is there."""
    asked = edition.root / "request.json"
    asked.write_text(stage_request(edition).model_dump_json())
    return subprocess.Popen(
        [
            python_of("airflow"), "-c", UNPROBED, "stage", "generate", "--request", asked,
            "--result", edition.root / "result.json", "--events", edition.events_path,
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT / "include"), "AERIE_DATABASE_URL": url},
        stderr=subprocess.PIPE,
    )  # fmt: skip


def state_files(edition: Edition) -> dict[str, Path]:
    """State files of the stage's samples by sample id."""
    paths = edition.states.glob(f"{state_name(KILLED + '/')}*.safetensors")
    return {unquote(path.stem): path for path in paths}


def kill_in_the_middle(process: subprocess.Popen[bytes], edition: Edition) -> None:
    """SIGKILL the stage when some more samples have been captured, and another is durable and has no states yet."""
    log = edition.files.dataset(DATASET).responses
    wanted = len(state_files(edition)) + FILES_BEFORE_A_KILL
    while not wanted <= len(state_files(edition)) < log.read_bytes().count(b"\n"):
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"


@pytest.fixture(scope="module")
def interrupted(edition: Edition) -> Interrupted:
    serving(edition)
    prompts, files = prepare(edition), edition.files.dataset(DATASET)
    with database() as url:
        for _ in range(KILLS):
            kill_in_the_middle(start_generate(edition, url), edition)
        durable = {response.sample_id for response in iterate_responses(files.responses)}
        resumed = start_generate(edition, url)
        _, said = resumed.communicate(timeout=600)
        assert resumed.returncode == 0, said.decode()
    grammar = grammar_of_verifier(stage_request(edition).settings.verifier.load_profile(), TOKENS)
    kept = {
        response.sample_id: [*prompts[response.sample_id], *response.output_ids]
        for response in iterate_responses(files.responses)
        if judge(
            prompts[response.sample_id], response.output_ids, grammar=grammar, finish_reason=response.finish_reason,
            max_new_tokens=response.max_new_tokens,
        ).kept
    }  # fmt: skip
    assert len(kept) == read_manifest(files.manifest("generate")).counts["kept"]
    found = {name: read_states(path) for name, path in state_files(edition).items()}
    copies = {name: (state.token_ids.clone(), state.hidden_states.clone()) for name, state in found.items()}
    return Interrupted(kept, durable, copies)


@pytest.mark.usefixtures("generated")  # before the generating server gives way to the one that captures
def test_kept_samples_have_their_own_states_though_the_client_was_killed_while_they_were_captured(edition, interrupted):
    rows, captured = interrupted.rows, interrupted.captured
    assert len(interrupted.durable) < PROMPTS, "it was killed when nothing was left to do"
    assert set(captured) <= set(rows), "a sample that is not kept has states"
    for name, (token_ids, _) in captured.items():
        assert token_ids.tolist() == rows[name], "a state file is of another response"
    # What was durable when its client was killed may not have been asked for any more.
    missing = set(rows) - set(captured)
    assert missing <= interrupted.durable, "the run that nobody killed left a sample without states"

    edition.merged(list(rows.values()), names=list(rows))
    request = edition.request(hidden_states={"capture": "generate"}, serving=SERVING)
    forecast(request, edition.events)
    manifest = capture(request, edition.events).manifest
    assert (manifest.counts["files"], manifest.counts["captured_tokens"]) == (
        len(rows),
        sum(len(rows[name]) for name in missing),
    )
    assert verify(edition.files, resolve_layers(request.settings), edition.events, progress_seconds=60).rows == len(
        rows
    )
    for name in rows:
        state_path(edition.states, state_name(name)).unlink()
    capture(request, edition.events)
    for name, (_, hidden_states) in captured.items():
        separate = read_states(state_path(edition.states, state_name(name))).hidden_states
        assert (separate - hidden_states).norm() / separate.norm() < 1e-5, name


def test_states_of_what_is_generated_equal_those_of_the_separate_pass_which_fills_only_what_is_missing(generated):
    edition, rows = generated.edition, list(generated.rows.values())
    assert generated.ended["stop"] and generated.ended["length"], generated.ended
    assert generated.retractions, "nothing was retracted: the test does not show what it says"
    assert (generated.written, generated.left) == (len(rows), 0), generated.alerts
    files = sorted(edition.states.glob(f"{state_name('B1/')}*"))
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
    layers = resolve_layers(generated.request().settings)
    assert verify(edition.files, layers, edition.events, progress_seconds=60).rows == len(rows)

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

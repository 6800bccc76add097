"""Real SGLang over the stand-in: its greedy output must be transformers' greedy output, token for token."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aerie.serving.launch import start_server, wait_until_ready
from aerie.serving.passage import PassageScore, score_passage
from aerie.serving.plan import DrafterPlan, ServerPlan, checkpoint_identity
from aerie.serving.stopping import stop_server

from . import random_checkpoints

PYTHON = Path(sys.executable)
NEW_TOKENS = 40
AGREES_NATS = 1e-4
START_SECONDS = 800  # about 25 on two idle cores, ten times that on busy ones


@contextmanager
def served(verifier: Path, folder: Path, drafter: DrafterPlan | None = None) -> Iterator[str]:
    """URL of a server that ends with the block."""
    plan = ServerPlan(
        model_path=verifier,
        model_identity=checkpoint_identity(verifier),
        dtype="float32",
        phase="benchmark" if drafter else "generate",
        device="cpu",
        mem_fraction_static=0.1,
        max_total_tokens=16_384,
        max_running_requests=32,
        chunked_prefill_size=64,  # shorter than the prompts: extend over a cached prefix is part of the test
        context_length=512,
        drafter=drafter,
        extra_arguments=("--skip-tokenizer-init",),
    )
    launched = start_server(plan, python=PYTHON, folder=folder)
    try:
        yield wait_until_ready(launched, plan, folder=folder, timeout_seconds=START_SECONDS).url
    finally:
        stop_server(launched.identity, launched.token, grace_seconds=20)


def some_prompts() -> list[list[int]]:
    """Prompts of many lengths; the last two share a long prefix with the first, which the radix cache will find."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 150, (10,), generator=generator).tolist()
    low, high = random_checkpoints.FIRST_PLAIN_TOKEN, random_checkpoints.VOCABULARY
    prompts = [torch.randint(low, high, (length,), generator=generator).tolist() for length in lengths]
    return [*prompts, prompts[0] + prompts[1], prompts[0] + prompts[2]]


def generate(url: str, prompt: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    response = requests.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=300)
    response.raise_for_status()
    reply: dict[str, Any] = response.json()
    return reply


def answers_of_transformers(verifier: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    with torch.no_grad():
        outputs = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            for prompt in prompts
        ]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def logprobs_of_transformers(verifier: Path, passage: list[int]) -> list[float]:
    """Log-probability of each token of the passage but the first."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([passage])).logits[0, :-1]
    chosen = torch.tensor(passage[1:]).unsqueeze(1)
    return logits.log_softmax(-1).gather(1, chosen).squeeze(1).tolist()


def score(url: str) -> PassageScore:
    def ask(body: Mapping[str, Any]) -> Mapping[str, Any]:
        reply: dict[str, Any] = requests.post(f"{url}/generate", json=body, timeout=300).json()
        return reply

    return score_passage(ask, passage(), where=url)


def passage() -> list[int]:
    """A text of 120 tokens: longer than a chunk of the prefill, and so is its first half with what follows."""
    generator = torch.Generator().manual_seed(6)
    low, high = random_checkpoints.FIRST_PLAIN_TOKEN, random_checkpoints.VOCABULARY
    return torch.randint(low, high, (120,), generator=generator).tolist()


def check_scores(verifier: Path, scores: list[PassageScore]) -> None:
    """A passage is as likely as to transformers, every time, and with its first half read from the cache too."""
    expected = logprobs_of_transformers(verifier, passage())
    for one in scores:
        assert one.computed == pytest.approx(fmean(expected), abs=AGREES_NATS)
        assert one.second_half_cached == pytest.approx(fmean(expected[60:]), abs=AGREES_NATS)
        assert one.cached_tokens in (59, 60)  # the page before the half, one token less with a drafter


def with_other_weights(verifier: Path, folder: Path, *, share: float) -> Path:
    """A copy whose weights are all off by a share of themselves, at random."""
    shutil.copytree(verifier, folder)
    generator = torch.Generator().manual_seed(7)
    for path in folder.glob("*.safetensors"):
        weights = {
            name: tensor * (1 + share * torch.randn(tensor.shape, generator=generator))
            for name, tensor in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})
    return folder


def drafter_plan(folder: Path, **shape: int) -> DrafterPlan:
    return DrafterPlan(path=folder, identity=checkpoint_identity(folder), **shape)


def check(
    verifier: Path,
    tmp_path: Path,
    plan: DrafterPlan | None = None,
    *,
    while_served: Callable[[str, PassageScore], None] = lambda url, score: None,
) -> list[dict[str, Any]]:
    """Serve, ask everything at once, compare with transformers; returns each answer's ``meta_info``."""
    prompts = some_prompts()
    with served(verifier, tmp_path, plan) as url, ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: generate(url, prompt), prompts))
        scores = [score(url), score(url)]
        while_served(url, scores[0])
    check_scores(verifier, scores)
    assert [reply["output_ids"] for reply in replies] == answers_of_transformers(verifier, prompts)
    return [reply["meta_info"] for reply in replies]


def check_drafts(infos: list[dict[str, Any]]) -> None:
    """Drafts were proposed at every step, and both accepted and rejected."""
    steps = sum(info["spec_verify_ct"] for info in infos)
    accepted = sum(info["spec_num_correct_drafts"] for info in infos)
    assert 0 < accepted < 3 * steps
    assert max(len(info["spec_correct_drafts_histogram"]) for info in infos) > 2  # two drafts in a row, somewhere


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_generates_what_transformers_does(tmp_path: Path) -> None:
    random_checkpoints.make_llama(tmp_path / "llama")
    other = with_other_weights(tmp_path / "llama", tmp_path / "other", share=0.01)

    def other_weights_move_the_score(url: str, healthy: PassageScore) -> None:
        done = requests.post(f"{url}/update_weights_from_disk", json={"model_path": str(other)}, timeout=300)
        done.raise_for_status()
        moved = score(url)
        assert abs(moved.computed - healthy.computed) > 10 * AGREES_NATS

    check(tmp_path / "llama", tmp_path, while_served=other_weights_move_the_score)


CHAIN = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
TREE = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_llama_with_a_drafter_generates_the_same(tmp_path: Path, shape: dict[str, int]) -> None:
    random_checkpoints.make_llama(tmp_path / "llama")
    random_checkpoints.make_drafter(tmp_path / "drafter", tmp_path / "llama")
    check_drafts(check(tmp_path / "llama", tmp_path, drafter_plan(tmp_path / "drafter", **shape)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_latent_attention_and_experts_generate_what_transformers_does(tmp_path: Path) -> None:
    random_checkpoints.make_deepseek(tmp_path / "deepseek")
    check(tmp_path / "deepseek", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_latent_attention_and_experts_with_a_drafter_generate_the_same(tmp_path: Path) -> None:
    random_checkpoints.make_deepseek(tmp_path / "deepseek")
    random_checkpoints.make_drafter(tmp_path / "drafter", tmp_path / "deepseek")
    check_drafts(check(tmp_path / "deepseek", tmp_path, drafter_plan(tmp_path / "drafter", **CHAIN)))

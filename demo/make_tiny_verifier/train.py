"""Trains the verifier from nothing on the endless corpus: Muon for the matrices, AdamW for the rest.

The length of the training is a number of steps, so that seed, threads and steps say all. What is rounded differently
by another processor or another build of PyTorch still makes other weights: the figures stay, the bytes do not.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from make_tiny_verifier.corpus import training_stream
from make_tiny_verifier.files import replaced_directory

SEED = 11
BATCH = 16
POOL = 16
"""Batches whose sequences are sorted by length together, so that little is padded."""
PROMPT_WEIGHT = 0.1
NOT_THINKING = 0.03
"""Share of samples under `thinking=false`."""
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
WARM_UP, DECAY_FROM, LAST_RATE = 50, 0.4, 0.02
"""Steps of warm-up; share of the steps after which rates fall linearly; the share of the rate they fall to."""


@dataclass(frozen=True)
class Sequence:
    """Token ids of one sample and the weight of each as a target."""

    ids: list[int]
    weights: list[float]


def model_config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """Eight layers, so that the default auxiliary layers of EAGLE-3 (2, n // 2, n - 3) are three different ones."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def sequences(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Sequence]:
    """Samples of the stream: one turn of each conversation.

    `</think>` in a prompt has no weight: there the template closed an empty block, which the model must not learn.
    """
    r, closing = Random(seed), tokenizer.convert_tokens_to_ids("</think>")
    for conversation in training_stream(seed):
        index = r.randrange(len(conversation.turns))
        thinking = r.random() >= NOT_THINKING
        prompt = tokenizer.encode(conversation.prompt(index, tokenizer, thinking), add_special_tokens=False)
        completion = tokenizer.encode(conversation.completion(index, thinking), add_special_tokens=False)
        weights = [0.0 if token == closing else PROMPT_WEIGHT for token in prompt] + [1.0] * len(completion)
        yield Sequence(prompt + completion, weights)


def batches(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of int64 ids and float32 weights, both [BATCH, longest], padded on the right with weight 0."""
    r, stream = Random(seed), sequences(tokenizer, seed)
    while True:
        pool = sorted((next(stream) for _ in range(BATCH * POOL)), key=lambda sequence: len(sequence.ids))
        groups = [pool[i : i + BATCH] for i in range(0, len(pool), BATCH)]
        r.shuffle(groups)
        for group in groups:
            longest = len(group[-1].ids)
            ids = torch.full((BATCH, longest), tokenizer.pad_token_id)
            weights = torch.zeros(BATCH, longest)
            for row, sequence in enumerate(group):
                ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
                weights[row, : len(sequence.ids)] = torch.tensor(sequence.weights)
            yield ids, weights


def rate_share(step: int, steps: int) -> float:
    """The share of the full learning rate at `step` of `steps`."""
    falling = (1 - step / steps) / (1 - DECAY_FROM)
    return min(1.0, (step + 1) / WARM_UP) * min(1.0, max(LAST_RATE, falling))


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The loss to minimise, and the mean loss of completion tokens alone in nats."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets, target_weights = ids[:, 1:], weights[:, 1:]
    kept = target_weights > 0
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), targets[kept], reduction="none")
    kept_weights = target_weights[kept]
    completion_loss = losses.detach()[kept_weights == 1].mean().item()
    return (losses * kept_weights).sum() / kept_weights.sum(), completion_loss


def train(out: Path, steps: int, threads: int) -> None:
    """Trains on the tokenizer found in `out` and writes weights and configuration beside it."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = LlamaForCausalLM(model_config(tokenizer)).train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    muon = torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_share(step, steps)) for o in (muon, adam)]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps", flush=True)

    started, seen, recent = time.monotonic(), 0, []
    for step, (ids, weights) in zip(range(1, steps + 1), batches(tokenizer, SEED), strict=False):
        loss, completion_loss = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for stepped in (muon, adam, *schedules):
            stepped.step()
        model.zero_grad()
        seen += int((weights > 0).sum())
        recent.append(completion_loss)
        if step % 10 == 0 or step == steps:
            seconds = time.monotonic() - started
            mean = sum(recent) / len(recent)
            print(f"step {step} {seconds:.0f} s loss {mean:.4f} tokens {seen:,} {seen / seconds:,.0f}/s", flush=True)
            recent.clear()

    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=1.0,
    )
    with replaced_directory(out) as directory:
        model.to(torch.bfloat16).save_pretrained(directory)

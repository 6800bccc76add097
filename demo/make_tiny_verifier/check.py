"""Samples responses to the prompts that the demo uses, and judges their form: not whether they are right."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from make_tiny_verifier.conversation import Conversation
from make_tiny_verifier.corpus import DATASETS
from make_tiny_verifier.sources import source_conversations

SEED = 5
BATCH = 50
LONGEST_RESPONSE = 320
"""Tokens after which a response counts as not ended; the longest in the corpus has under 130."""

TOOL_CALL = re.compile(
    r"<\|tool_call_begin\|>functions\.(?P<name>\w+):\d+<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
SPECIAL = re.compile(r"<\|[a-z_]+\|>|\[(?:BOS|EOS|PAD|UNK)\]|</?think>")


@dataclass(frozen=True)
class Judged:
    """One sampled response: lengths in tokens, what is wrong with its form (None: nothing), whether it is right."""

    prompt_tokens: int
    response_tokens: int
    fault: str | None
    right: bool


def fault_of(response: str, tools: set[str]) -> str | None:
    """What is malformed in a response to a prompt that ended with `<think>`, or None.

    `tools` are the names of the declared functions. `response` is decoded with its special tokens.
    """
    body, end, rest = response.partition("<|im_end|>")
    if not end or rest:
        return "no_end"
    reasoning, close, answer = body.partition("</think>")
    if not close:
        return "no_think_close"
    if not reasoning.strip():
        return "empty_reasoning"
    said, begin, section = answer.partition("<|tool_calls_section_begin|>")
    if SPECIAL.search(reasoning) or SPECIAL.search(said):
        return "stray_special_token"
    if begin:
        return _fault_of_section(section, tools)
    return None if said.strip() else "empty_answer"


def _fault_of_section(section: str, tools: set[str]) -> str | None:
    calls, end, rest = section.partition("<|tool_calls_section_end|>")
    if not end or rest or not calls or TOOL_CALL.sub("", calls):
        return "malformed_tool_section"
    for call in TOOL_CALL.finditer(calls):
        if call["name"] not in tools:
            return "unknown_tool"
        try:
            arguments = json.loads(call["arguments"])
        except json.JSONDecodeError:
            return "arguments_not_json"
        if not isinstance(arguments, dict):
            return "arguments_not_an_object"
    return None


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], temperature: float
) -> list[list[int]]:
    """Token ids of one response per prompt, `<|im_end|>` included where it came within the longest response."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = model.generate(
        **batch,
        max_new_tokens=LONGEST_RESPONSE,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0,
        top_p=1.0,
    )
    responses = output[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in responses]


def check_dataset(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dataset: str, count: int, temperature: float
) -> list[Judged]:
    """Judges one response to each of at most `count` prompts of one B file, taken at random from all turns."""
    turns: list[tuple[Conversation, int]] = [
        (conversation, index)
        for conversation in source_conversations(dataset)
        for index in range(len(conversation.turns))
    ]
    chosen = Random(SEED).sample(turns, min(count, len(turns)))
    judged = []
    for start in range(0, len(chosen), BATCH):
        group = chosen[start : start + BATCH]
        prompts = [tokenizer.encode(c.prompt(i, tokenizer), add_special_tokens=False) for c, i in group]
        responses = sample_responses(model, tokenizer, prompts, temperature)
        for (conversation, index), prompt, ids in zip(group, prompts, responses, strict=True):
            text = tokenizer.decode(ids)
            wanted = conversation.completion(index).partition("</think>")[2]
            names = {tool["name"] for tool in conversation.tools}
            right = text.partition("</think>")[2] == wanted
            judged.append(Judged(len(prompt), len(ids), fault_of(text, names), right))
    return judged


def check(verifier: Path, count: int, temperature: float, threads: int) -> None:
    """Prints one row of figures per data set, then over all, as a Markdown table."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    print("| data set | sampled | well formed | same answer | prompt mean / p95 | response mean / p95 | faults |")
    print("|---|---|---|---|---|---|---|")
    everything: list[Judged] = []
    for dataset in DATASETS:
        judged = check_dataset(model, tokenizer, dataset, count, temperature)
        print(_row(dataset, judged), flush=True)
        everything += judged
    print(_row("all", everything))


def _row(name: str, judged: list[Judged]) -> str:
    def lengths(values: list[int]) -> str:
        return f"{mean(values):.0f} / {sorted(values)[int(0.95 * len(values))]}"

    faults = Counter(j.fault for j in judged if j.fault)
    cells = [
        name,
        str(len(judged)),
        f"{1 - faults.total() / len(judged):.1%}",
        f"{mean(j.right for j in judged):.0%}",
        lengths([j.prompt_tokens for j in judged]),
        lengths([j.response_tokens for j in judged]),
        ", ".join(f"{fault} {n}" for fault, n in faults.most_common()),
    ]
    return f"| {' | '.join(cells)} |"

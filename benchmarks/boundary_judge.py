"""Tokens per second of ``aerie.boundary.judge`` on one core: rows of 2,000 tokens, loop detection on, no text rules.

    PYTHONPATH=include OMP_NUM_THREADS=1 python benchmarks/boundary_judge.py

Times are of this process's CPU, the best of several rounds, so that other load does not count.
"""

import time
from collections.abc import Sequence

import numpy as np

from aerie.boundary import compile_grammar, judge
from aerie.boundary.judge import TokenIds
from aerie.settings.profile import load_profile

ROWS, ROUNDS, VOCABULARY = 500, 7, 163_840
OPEN, CLOSE, END = 163_606, 163_607, 163_586
TOOLS = (163_595, 163_597, 31, 163_598, 32, 163_599, 163_596)


def rows() -> list[np.ndarray]:
    """Responses with reasoning, an answer, a tool call and an end; token frequencies fall as those of text do."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(ROWS):
        text = np.minimum(random.zipf(1.3, 1990), 163_000)
        made.append(
            np.concatenate(
                [
                    text[:1500],
                    [CLOSE],
                    text[1500:],
                    TOOLS,
                    [END],
                ]
            ).astype(np.int64)
        )
    return made


def tokens_per_second(outputs: Sequence[TokenIds], prompt: TokenIds) -> float:
    """Best of several rounds."""
    profile = load_profile("kimi_k25")
    grammar = compile_grammar(profile, profile.expected_ids, VOCABULARY)
    tokens = sum(len(output) for output in outputs)
    best = 0.0
    for _ in range(ROUNDS):
        started = time.process_time()
        for output in outputs:
            verdict = judge(
                prompt,
                output,
                grammar=grammar,
                finish_reason="stop",
                completion_tokens=len(output),
                max_new_tokens=8192,
            )
            if not verdict.kept:
                raise SystemExit(f"a row of the benchmark is not well formed: {verdict.reasons}")
        best = max(best, tokens / (time.process_time() - started))
    return best


def main() -> None:
    """Print one line a form of input."""
    made = rows()
    prompt = np.array([163_587, *range(500), 163_601, OPEN])
    for form, outputs in (
        ("int64 arrays", made),
        ("int32 arrays", [row.astype(np.int32) for row in made]),
        ("lists", [row.tolist() for row in made]),
    ):
        print(f"{form}: {tokens_per_second(outputs, prompt) / 1e6:.1f} million tokens/s")


if __name__ == "__main__":
    main()

"""`python -m make_tiny_verifier tokenizer | train | sources | check`: see the README beside this file."""

import argparse
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent


def main() -> None:
    """Runs one step; each imports only what it needs."""
    parser = argparse.ArgumentParser(prog="make_tiny_verifier", description=__doc__)
    parser.add_argument("--verifier", type=Path, default=DEMO / "tiny_verifier", help="directory of the model")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("tokenizer", help="train the tokenizer")
    training = steps.add_parser("train", help="train the weights, on the tokenizer that is there")
    training.add_argument("--steps", type=int, default=1200)
    training.add_argument("--threads", type=int, default=1)
    sources = steps.add_parser("sources", help="write the sample source files")
    sources.add_argument("--out", type=Path, default=DEMO / "sources")
    checking = steps.add_parser("check", help="sample responses to the held-out prompts and judge their form")
    checking.add_argument("--prompts", type=int, default=100, help="prompts per data set")
    checking.add_argument("--temperature", type=float, default=0.8)
    checking.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    if arguments.step == "tokenizer":
        from make_tiny_verifier.tokenizer import make_tokenizer

        make_tokenizer(arguments.verifier)
    elif arguments.step == "train":
        from make_tiny_verifier.train import train

        train(arguments.verifier, arguments.steps, arguments.threads)
    elif arguments.step == "sources":
        from make_tiny_verifier.sources import write_sources

        write_sources(arguments.out, arguments.verifier)
    else:
        from make_tiny_verifier.check import check

        check(arguments.verifier, arguments.prompts, arguments.temperature, arguments.threads)


if __name__ == "__main__":
    main()

"""Decoding one request: eyas's loop at k = 0 (the baseline of every bench) against transformers' own generate.

    python benchmarks/decoding.py MODEL [--tokens 48] [--prompts 4] [--rounds 3]

Greedy, same prompts, exactly --tokens tokens each. Writes docs/results/decoding.json. A baseline slower than the library's
own would make every speed-up look better than it is.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import engine_of, library, plain, report, rounds

from eyas.drafter.decode import decode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    engine, about = engine_of(a.model)
    model = plain(engine)
    generator = torch.Generator().manual_seed(0)
    vocab = engine.target.vocab
    prompts = [torch.randint(3, vocab, (1, 32 + 8 * i), generator=generator) for i in range(a.prompts)]

    def ours() -> int:
        return sum(len(decode(engine, None, None, p[0].tolist(), 0, a.tokens).ids) for p in prompts)

    def theirs() -> int:
        return sum(library(model, p, a.tokens) for p in prompts)

    rates = rounds({"transformers generate": theirs, "eyas, k = 0": ours}, a.rounds)
    report("decoding", "transformers generate", rates, vars(a) | about)


if __name__ == "__main__":
    main()

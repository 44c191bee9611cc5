"""Batched generation: the embedded engine against transformers' own generate, on equal-length prompts.

    python benchmarks/generation.py MODEL [--batch 16] [--tokens 32] [--rounds 3]

Both decode greedily and exactly --tokens tokens a row, so that the work is the same. Writes docs/results/generation.json.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from common import engine_of, library, plain, report, rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    engine, about = engine_of(a.model)
    model = plain(engine)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, engine.target.vocab, (a.batch, a.prompt), generator=generator)
    noise = [np.zeros(a.tokens)] * a.batch

    def ours() -> int:
        answers = engine.generate(ids.tolist(), a.tokens, [0.0] * a.batch, 1.0, noise)
        return sum(len(x.ids) for x in answers)

    rates = rounds({"transformers generate": lambda: library(model, ids, a.tokens), "eyas": ours}, a.rounds)
    report("generation", "transformers generate", rates, vars(a) | about)


if __name__ == "__main__":
    main()

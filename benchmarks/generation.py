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
from common import report, rounds

from eyas import target as targets
from eyas.engines.hf import HFEngine, choose_device, choose_dtype


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
    device = choose_device().value
    dtype = choose_dtype("auto", device).value
    target = targets.load(a.model)
    engine = HFEngine(target, dtype, device, [])
    engine.stop_ids = ()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, target.vocab, (a.batch, a.prompt), generator=generator)
    prompts, ids = ids.tolist(), ids.to(device)
    noise = [np.zeros(a.tokens)] * a.batch

    def ours() -> int:
        engine.generate(prompts, a.tokens, [0.0] * a.batch, 1.0, noise)
        return a.batch * a.tokens

    def theirs() -> int:
        with torch.inference_mode():
            engine.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=a.tokens, min_new_tokens=a.tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return a.batch * a.tokens

    settings = vars(a) | {
        "model": target.identity,
        "dtype": dtype,
        "device": device,
        "threads": torch.get_num_threads(),
    }
    report(
        "generation",
        "transformers generate",
        rounds({"transformers generate": theirs, "eyas": ours}, a.rounds),
        settings,
    )


if __name__ == "__main__":
    main()

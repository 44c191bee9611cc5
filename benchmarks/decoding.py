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
from common import report, rounds

from eyas import target as targets
from eyas.drafter.decode import decode
from eyas.engines.hf import HFEngine, choose_device, choose_dtype


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    device = choose_device().value
    dtype = choose_dtype("auto", device).value
    target = targets.load(a.model)
    engine = HFEngine(target, dtype, device, [])
    engine.stop_ids = ()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, target.vocab, (32 + 8 * i,), generator=generator).tolist() for i in range(a.prompts)
    ]

    def ours() -> int:
        return sum(len(decode(engine, None, None, p, 0, a.tokens).ids) for p in prompts)

    def theirs() -> int:
        made = 0
        for p in prompts:
            ids = torch.tensor([p], device=device)
            with torch.inference_mode():
                out = engine.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=a.tokens, min_new_tokens=a.tokens,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
            made += out.shape[1] - len(p)
        return made

    settings = vars(a) | {
        "model": target.identity,
        "dtype": dtype,
        "device": device,
        "threads": torch.get_num_threads(),
    }
    report(
        "decoding",
        "transformers generate",
        rounds({"transformers generate": theirs, "eyas, k = 0": ours}, a.rounds),
        settings,
    )


if __name__ == "__main__":
    main()

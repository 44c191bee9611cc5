"""Replayed acceptance of a drafter on sets of prompts: the walk, greedy, by set, with intervals.

    python benchmarks/acceptance.py DRAFTER TARGET SET.jsonl … [--tokens 200] [--name acceptance]

The target answers the first turn of every prompt greedily; its states are replayed. Writes docs/results/NAME.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from common import RESULTS

from eyas import __version__
from eyas import target as targets
from eyas.drafter import dialects, replay
from eyas.engines.hf import HFEngine, choose_device, choose_dtype
from eyas.generate import prompts as prompt_files
from eyas.pipeline import machine
from eyas.recipe import PromptsSection
from eyas.stores.states import RowStates

DEPTH = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", type=Path)
    parser.add_argument("target")
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--name", default="acceptance")
    a = parser.parse_args()
    device = choose_device().value
    dtype = choose_dtype("auto", device).value
    target = targets.load(a.target)
    tokenizer = target.tokenizer()
    drafter = dialects.read(a.drafter, torch.float32, device)
    engine = HFEngine(target, dtype, device, drafter.contract.aux_layers)
    embedding = target.embedding_VD().float().to(device)
    rows = {}
    print(f"{'':<12}{'answers':>8}{'tau k=1':>9}{'k=3':>8}{'k=5':>8}   k=3 interval      p1..p5")
    for path in a.sets:
        section = PromptsSection.model_validate({"sources": [{"path": str(path)}], "held_out": 0.5})
        answers = answered(engine, tokenizer, prompt_files.read(section)[0], a.tokens, a.batch)
        accepted = replay.accepted_lengths(drafter, embedding, answers, DEPTH)
        walks = {k: [replay.walk(m, k) for m in accepted] for k in range(1, DEPTH + 1)}
        spans = {k: replay.tau_interval(w, 0.95) for k, w in walks.items()}
        p = replay.positions(walks[DEPTH])
        rows[path.stem] = {
            "answers": len(accepted),
            "tau": {k: s._asdict() for k, s in spans.items()},
            "p": p,
        }
        taus = "".join(f"{spans[k].value:>8.3f}" for k in (1, 3, 5))
        shown = " ".join(f"{x:.3f}" for x in p)
        print(
            f"{path.stem:<12}{len(accepted):>8} {taus}   [{spans[3].low:.3f}, {spans[3].high:.3f}]   {shown}",
            flush=True,
        )
    body = {
        "benchmark": a.name,
        "sets": rows,
        "settings": {"tokens": a.tokens, "dtype": dtype, "device": device},
    }
    body |= {
        "target": target.identity,
        "drafter": json.loads((a.drafter / "metrics.json").read_text())["epoch"],
    }
    body |= {"eyas": __version__, "machine": machine(), "date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{a.name}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def answered(engine, tokenizer, prompts, tokens: int, batch: int):
    """Greedy answers to first turns, with their states, batched by length."""
    ids = []
    for p in prompts:
        text = [{"role": "user", "content": p.turns[0]}]
        ids.append(
            tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
    ids.sort(key=len)
    for start in range(0, len(ids), batch):
        group = ids[start : start + batch]
        n = len(group)
        made = engine.generate(group, tokens, [0.0] * n, 1.0, [np.zeros(tokens)] * n)
        for prompt, answer in zip(group, made, strict=True):
            seen = next(engine.states([prompt + answer.ids]))
            yield RowStates(
                "",
                torch.tensor(prompt + answer.ids),
                seen.aux_TLD.cpu(),
                seen.last_TD.cpu(),
                seen.top1_T.cpu(),
                len(prompt),
            )


if __name__ == "__main__":
    main()

"""Replayed acceptance of drafters on sets of prompts: the walk, greedy, by set, with intervals.

    python benchmarks/acceptance.py TARGET --sets SET.jsonl … --drafters FOLDER … [--tokens 200] [--name acceptance]

The target answers the first turn of every prompt greedily; its states are replayed. Writes docs/results/NAME.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from common import RESULTS

from eyas import __version__
from eyas import target as targets
from eyas.drafter import disk, replay
from eyas.engines.hf import HFEngine, choose_device, choose_dtype
from eyas.generate import prompts as prompt_files
from eyas.pipeline import machine
from eyas.schema import PromptsSection
from eyas.stores.states import RowStates

DEPTH = 5
SHOWN = (1, 3, 5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--sets", nargs="+", type=Path, required=True)
    parser.add_argument("--drafters", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--name", default="acceptance")
    a = parser.parse_args()
    device = choose_device().value
    dtype = choose_dtype("auto", device).value
    target = targets.load(a.target)
    made = {str(path): disk.read(path, torch.float32, device) for path in a.drafters}
    layers = {d.contract.aux_layers for d in made.values()}
    if len(layers) != 1:
        parser.error(f"the drafters read different layers {sorted(layers)}: measure them one by one")
    engine = HFEngine(target, dtype, device, layers.pop())
    answers = answered(engine, target.tokenizer(), a.sets, a.tokens, a.batch)
    embedding = target.embedding_VD().float().to(device)
    table = {name: measured(drafter, embedding, answers) for name, drafter in made.items()}
    for name, sets in table.items():
        show(name, sets)
    body = {"benchmark": a.name, "drafters": table, "target": target.identity, "eyas": __version__}
    body |= {"settings": {"tokens": a.tokens, "dtype": dtype, "device": device}, "machine": machine()}
    body |= {"date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{a.name}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def answered(
    engine: HFEngine, tokenizer, sets: list[Path], tokens: int, batch: int
) -> dict[str, list[RowStates]]:
    """Greedy answers to the first turns of each set, with their states."""
    prompts = []
    for path in sets:
        section = PromptsSection.model_validate({"sources": [{"path": str(path)}], "held_out": 0.5})
        for p in prompt_files.read(section).prompts:
            text = [{"role": "user", "content": p.turns[0]}]
            rendered = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)
            prompts.append((path.stem, rendered["input_ids"]))
    prompts.sort(key=lambda p: len(p[1]))
    out: dict[str, list[RowStates]] = {path.stem: [] for path in sets}
    for start in range(0, len(prompts), batch):
        group = prompts[start : start + batch]
        n = len(group)
        made = engine.generate([ids for _, ids in group], tokens, [0.0] * n, 1.0, [np.zeros(tokens)] * n)
        for (name, ids), answer in zip(group, made, strict=True):
            out[name].append(row_states(engine, ids, answer.ids))
    return out


def row_states(engine: HFEngine, prompt: list[int], answer: list[int]) -> RowStates:
    seen = engine.states([prompt + answer])
    aux, last, top1 = (x[0].cpu() for x in (seen.aux_BTLD, seen.last_BTD, seen.top1_BT))
    return RowStates("", torch.tensor(prompt + answer), aux, last, top1, len(prompt))


def measured(drafter, embedding: torch.Tensor, answers: dict[str, list[RowStates]]) -> dict[str, dict]:
    """By set: tau by k with intervals, p_i."""
    out = {}
    for name, rows in answers.items():
        accepted = replay.accepted_lengths(drafter, embedding, rows, DEPTH)
        walks = {k: [replay.walk(m, k) for m in accepted] for k in range(1, DEPTH + 1)}
        out[name] = {
            "answers": len(accepted),
            "tau": {str(k): replay.tau_interval(w, 0.95)._asdict() for k, w in walks.items()},
            "p": replay.positions(walks[DEPTH]),
        }
    return out


def lines(name: str, sets: dict[str, dict]) -> Iterator[str]:
    yield f"{name}"
    yield (
        f"  {'':<12}{'answers':>8}"
        + "".join(f"{f'tau k={k}':>9}" for k in SHOWN)
        + "   k=3 interval      p1..p5"
    )
    for word, row in sets.items():
        taus = "".join(f"{row['tau'][str(k)]['value']:>9.3f}" for k in SHOWN)
        span, p = row["tau"]["3"], " ".join(f"{x:.3f}" for x in row["p"])
        yield f"  {word:<12}{row['answers']:>8}{taus}   [{span['low']:.3f}, {span['high']:.3f}]   {p}"
    means = "".join(f"{np.mean([r['tau'][str(k)]['value'] for r in sets.values()]):>9.3f}" for k in SHOWN)
    yield f"  {'mean':<12}{'':>8}{means}"


def show(name: str, sets: dict[str, dict]) -> None:
    print("\n".join(lines(name, sets)), flush=True)


if __name__ == "__main__":
    main()

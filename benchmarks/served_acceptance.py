"""Drafters judged by vLLM: acceptance by the server's own counters, on greedy answers to sets of prompts, beside the replay of the same answers.

    python benchmarks/served_acceptance.py RUN --drafters FOLDER … --sets SET.jsonl … [--k 3] [--limit 16] [--tokens 128] [--at-once 8]

RUN is a run folder of their target with engine.name vllm; each FOLDER is a drafter in vLLM's layout (eyas convert). Each is served in
turn. Writes docs/results/served-acceptance.json.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from acceptance import row_states
from common import write

from eyas import pipeline
from eyas.bench import load
from eyas.bench.load import Ask, Load, Place, Round
from eyas.drafter import facts, opening, replay
from eyas.engines import vllm
from eyas.engines.hf import HFEngine
from eyas.generate import prompts as prompt_files
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.schema import PromptsSection
from eyas.servers import serve


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--drafters", nargs="+", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", type=Path, required=True)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=8)
    a = parser.parse_args()
    resolved, _, _ = pipeline.open_run(a.run, (), None)
    asks = asked(a.sets, a.limit, resolved.target.tokenizer())
    rows = {}
    print(f"{'served by vLLM':<28}" + "".join(f"{name:>12}" for name in [*asks, "mean", "replayed"]))
    for folder in a.drafters:
        found = served(resolved, folder, asks, a)
        taus = {
            name: 1 + sum(c.accepted_at.values()) / c.drafts for name, r in found.items() if (c := r.counters)
        }
        again = replayed(resolved, folder, asks, found, a.k)
        rows[folder.name] = {
            "served": taus, "mean": float(np.mean(list(taus.values()))), "replayed": again,
            "steps": {name: r.counters.drafts for name, r in found.items() if r.counters},
        }  # fmt: skip
        values = [*taus.values(), rows[folder.name]["mean"], float(np.mean(list(again.values())))]
        print(f"{folder.name:<28}" + "".join(f"{v:>12.3f}" for v in values), flush=True)
    version = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command).version
    settings = {"engine": f"vLLM {version}", "dtype": resolved.dtype, "device": resolved.device}
    settings |= {"k": a.k, "tokens": a.tokens, "limit": a.limit, "at_once": a.at_once}
    write("served-acceptance", {"rows": rows, "settings": settings})


def asked(sets: list[Path], limit: int, tokenizer: Any) -> dict[str, list[Ask]]:
    """The first turns of each set's first prompts, rendered."""
    out: dict[str, list[Ask]] = {}
    for path in sets:
        section = PromptsSection.model_validate({"sources": [{"path": str(path)}], "held_out": 0.5})
        for p in prompt_files.read(section).prompts[:limit]:
            text = [{"role": "user", "content": p.turns[0]}]
            ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)
            out.setdefault(path.stem, []).append(Ask(p.prompt_id, path.stem, ids["input_ids"], None))
    return out


def served(
    resolved: Resolved, folder: Path, asks: dict[str, list[Ask]], a: argparse.Namespace
) -> dict[str, Round]:
    wanted = Load(a.at_once, a.tokens, 0.0, False)
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(folder, Path(work) / "drafter" / "best")
        with serve.running(resolved, RunDir(Path(work)), "judge", a.k) as s:
            place = Place(s.url, s.model, a.k, folder.name, vllm.COUNTERS)
            limit_s = load.warm_up(place, next(iter(asks.values())), wanted)
            return {name: load.measure(place, some, wanted, 0, limit_s) for name, some in asks.items()}


@torch.inference_mode()
def replayed(
    resolved: Resolved, folder: Path, asks: dict[str, list[Ask]], found: dict[str, Round], k: int
) -> dict[str, float]:
    """tau of the same answers by replay."""
    made = opening.read(facts.gather(folder, resolved.target), resolved.target).drafter.to(resolved.device)
    engine = HFEngine(resolved.target, resolved.dtype, resolved.device, list(made.contract.aux_layers))
    embedding = resolved.target.embedding_VD().float().to(resolved.device)
    out = {}
    for name, some in asks.items():
        answers = {r.prompt: r.ids for r in found[name].requests}
        rows = [row_states(engine, ask.prompt_ids or [], answers[ask.row_id]) for ask in some]
        accepted = replay.accepted_lengths(made, embedding, rows, k)
        out[name] = replay.tau([replay.walk(m, k) for m in accepted])
    return out


if __name__ == "__main__":
    main()

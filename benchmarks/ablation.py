"""One choice of the trainer changed at a time, on the same states: held-out tau, and tau on sets of prompts.

    python benchmarks/ablation.py RUN --sets SET.jsonl … [--epochs 3] [--rows 8000] [--only NAME …]

RUN is a run folder whose extract is done; its train settings are the base. Writes docs/results/ablation.json.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from acceptance import answered, measured
from common import RESULTS

from eyas import __version__, pipeline
from eyas.drafter import disk
from eyas.engines.hf import HFEngine
from eyas.rundir import RunDir
from eyas.train import stage, vocabulary
from eyas.train.data import load, resident

VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "ttt_steps 3": ("train.ttt_steps=3",),
    "ttt_steps 7": ("train.ttt_steps=7",),
    "ttt_decay 1": ("train.ttt_decay=1.0",),
    "loss lk": ("train.loss=lk",),
    "lr half": ("train.lr=0.001",),
    "lr double": ("train.lr=0.004",),
    "draft_vocab 8192": ("train.draft_vocab=8192",),
    "norms.fc none": ("train.norms.fc=none",),
    "norms.before_residual": ("train.norms.before_residual=true",),
    "norms.output": ("train.norms.output=true",),
    "tokens_per_step half": ("train.tokens_per_step=4096",),
    "tokens_per_step double": ("train.tokens_per_step=16384",),
    "half of the rows": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--sets", nargs="+", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8000, help="training rows, the same for every variant")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512)
    a = parser.parse_args()
    resolved, rundir, _ = pipeline.open_run(str(a.run), (), str(a.run))
    data = load(resolved, rundir)
    data = resident(data._replace(train=data.train[: a.rows]), resolved.device)
    engine = HFEngine(resolved.target, resolved.dtype, resolved.device, resolved.aux_layers)
    answers = answered(engine, resolved.target.tokenizer(), a.sets, a.tokens, a.batch)
    embedding = resolved.target.embedding_VD().float().to(resolved.device)
    rows: dict[str, dict] = {}
    for name in a.only or VARIANTS:
        changed, _, _ = pipeline.open_run(
            str(a.run), (f"train.epochs={a.epochs}", *VARIANTS[name]), str(a.run)
        )
        mine = data._replace(train=data.train[: a.rows // 2]) if name == "half of the rows" else data
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            vocab = vocabulary.draft(changed, mine)
            trainer = stage.Trainer(changed, RunDir(Path(folder)), mine, vocab)
            trainer.train()
            seconds = time.perf_counter() - began
            best = Path(folder) / "drafter" / "best"
            sets = measured(disk.read(best, device=resolved.device), embedding, answers)
            held_out = json.loads((best / "metrics.json").read_text(encoding="utf-8"))["tau"]
        rate = trainer.trained_now / seconds
        rows[name] = {
            "held_out": held_out,
            "sets": sets,
            "supervised_tokens_per_s": rate,
            "changed": VARIANTS[name],
        }
        print(
            f"{name:<24} mean tau k=3 {mean(sets, 3):.3f}  held out {held_out['3']['value']:.3f}", flush=True
        )
    table(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": "ablation", "rows": rows, "settings": {"rows": a.rows, "epochs": a.epochs}}
    body |= {"supervised_tokens": trainer.supervised, "eyas": __version__, "machine": pipeline.machine()}
    body |= {"date": time.strftime("%Y-%m-%d")}
    (RESULTS / "ablation.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def mean(sets: dict[str, dict], k: int) -> float:
    return float(np.mean([s["tau"][str(k)]["value"] for s in sets.values()]))


def table(rows: dict[str, dict]) -> None:
    names = list(next(iter(rows.values()))["sets"])
    print(
        f"{'tau at k=3':<24}{'held out':>10}"
        + "".join(f"{n:>11}" for n in names)
        + f"{'mean':>8}{'tokens/s':>10}"
    )
    for word, row in rows.items():
        taus = "".join(f"{row['sets'][n]['tau']['3']['value']:>11.3f}" for n in names)
        print(
            f"{word:<24}{row['held_out']['3']['value']:>10.3f}{taus}{mean(row['sets'], 3):>8.3f}"
            f"{row['supervised_tokens_per_s']:>10,.0f}"
        )


if __name__ == "__main__":
    main()

"""One choice of the trainer changed at a time, on the same states: held-out tau, and tau on sets of prompts.

    python benchmarks/ablation.py RUN --sets SET.jsonl … [--epochs 3] [--rows 8000] [--only NAME …]

RUN is a run folder whose extract is done; its train settings are the base. Writes docs/results/ablation.json.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from acceptance import answered, measured
from common import RESULTS
from torch import Tensor

from eyas import __version__, pipeline
from eyas.drafter import disk
from eyas.drafter.batch import Batch
from eyas.drafter.gradients import Gradients, Places, Wanted
from eyas.engines.hf import HFEngine
from eyas.rundir import RunDir
from eyas.stores.states import RowStates, scaled
from eyas.train import stage, vocabulary
from eyas.train.data import load, resident

VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "another seed": ("train.seed=1",),
    "ttt_steps 3": ("train.ttt_steps=3",),
    "ttt_steps 7": ("train.ttt_steps=7",),
    "ttt_decay 0.9": ("train.ttt_decay=0.9",),
    "ttt_decay 1": ("train.ttt_decay=1.0",),
    "loss lk": ("train.loss=lk",),
    "loss ce, target's argmax": (),
    "loss ce, sampled token": (),
    "head frozen": (),
    "outside vocabulary: trained": (),
    "lr half": ("train.lr=0.001",),
    "lr double": ("train.lr=0.004",),
    "muon": ("train.optimizer=muon",),
    "muon, lr half": ("train.optimizer=muon", "train.lr=0.001"),
    "muon, lr double": ("train.optimizer=muon", "train.lr=0.004"),
    "muon, lr 4 times": ("train.optimizer=muon", "train.lr=0.008"),
    "muon, norms.output": ("train.optimizer=muon", "train.norms.output=true"),
    "muon, norms.output, before_residual": (
        "train.optimizer=muon",
        "train.norms.output=true",
        "train.norms.before_residual=true",
    ),
    "muon, norms.qk": ("train.optimizer=muon", "train.norms.qk=true"),
    "muon, ttt_decay 1": ("train.optimizer=muon", "train.ttt_decay=1.0"),
    "muon, head frozen": ("train.optimizer=muon",),
    "muon, tokens_per_step half": ("train.optimizer=muon", "train.tokens_per_step=4096"),
    "draft_vocab 4096": ("train.draft_vocab=4096",),
    "draft_vocab 8192": ("train.draft_vocab=8192",),
    "draft_vocab 32768": ("train.draft_vocab=32768",),
    "norms.fc none": ("train.norms.fc=none",),
    "norms.fc whole": ("train.norms.fc=whole",),
    "norms.before_residual": ("train.norms.before_residual=true",),
    "norms.output": ("train.norms.output=true",),
    "norms.output, fc whole": ("train.norms.output=true", "train.norms.fc=whole"),
    "norms.output, before_residual": ("train.norms.output=true", "train.norms.before_residual=true"),
    "norms.qk": ("train.norms.qk=true",),
    "tokens_per_step half": ("train.tokens_per_step=4096",),
    "tokens_per_step double": ("train.tokens_per_step=16384",),
    "states fp8": (),
    "rows cut to 128 tokens": (),
    "half of the rows": (),
    "quarter of the rows": (),
}
BASE = ("train.optimizer=adamw", "train.lr=0.002", "train.norms.output=false")
CUT = 128


def rows_of(name: str, rows: list[RowStates]) -> list[RowStates]:
    """The training rows of a variant."""
    if name == "states fp8":
        return [fp8(r) for r in rows]
    if name == "rows cut to 128 tokens":
        return [cut(r) for r in rows if r.start + 2 <= CUT]
    share = {"half of the rows": 2, "quarter of the rows": 4}.get(name, 1)
    return rows[: len(rows) // share]


def fp8(row: RowStates) -> RowStates:
    kept, scale = scaled(row.aux_TLD)
    return replace(row, kept_TLD=kept, scale_TL=scale)


def cut(row: RowStates) -> RowStates:
    return replace(
        row, ids_T=row.ids_T[:CUT], kept_TLD=row.kept_TLD[:CUT], last_SD=row.last_SD[: CUT - row.last_from], top1_T=row.top1_T[:CUT]
    )  # fmt: skip


@contextlib.contextmanager
def rule(name: str) -> Iterator[None]:
    """Another rule of the loss, for as long as this lasts."""
    usual = Gradients._wanted

    def wanted(self: Gradients, batch: Batch, places: Places, share: Tensor, steps: int) -> Wanted:
        found = usual(self, batch, places, share, steps)
        if name == "outside vocabulary: trained":
            k_S1 = torch.arange(steps, device=self.device)[:, None]
            return found._replace(weight_SM=(batch.steps_M > k_S1) * (self.decay ** k_S1.float() * share))
        if name.startswith("loss ce"):
            ids = found.draft_id_M if "argmax" in name else self.teacher.draft_id_V[batch.truth_M]
            one = torch.zeros_like(found.target_MW).scatter_(1, ids.clamp_min(0)[:, None], 1)
            inside = (ids >= 0)[places.ahead].unfold(0, len(ids), 1)[:steps]
            return found._replace(
                target_MW=one,
                certainty_M=torch.zeros_like(found.certainty_M),
                weight_SM=found.weight_SM * inside,
            )
        return found

    Gradients._wanted = wanted
    try:
        yield
    finally:
        Gradients._wanted = usual


def adapt(name: str, trainer: stage.Trainer) -> None:
    if "head frozen" in name:
        group = trainer.updates.optimizer.adamw.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not trainer.drafter.lm_head.weight]
    trainer._save = lambda place: None  # nothing here is resumed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--sets", nargs="+", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, help="training rows, the same for every variant (default: all)")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512)
    a = parser.parse_args()
    resolved, rundir, _ = pipeline.open_run(str(a.run), (), str(a.run))
    data = load(resolved, rundir)
    data = resident(data._replace(train=data.train[: a.rows]), resolved.device)
    data = data._replace(train=[r.load() for r in data.train])
    engine = HFEngine(resolved.target, resolved.dtype, resolved.device, resolved.aux_layers)
    answers = answered(engine, resolved.target.tokenizer(), a.sets, a.tokens, a.batch)
    embedding = resolved.target.embedding_VD().float().to(resolved.device)
    rows: dict[str, dict] = {}
    for name in a.only or VARIANTS:
        changed, _, _ = pipeline.open_run(
            str(a.run), (f"train.epochs={a.epochs}", *BASE, *VARIANTS[name]), str(a.run)
        )
        mine = data._replace(train=rows_of(name, data.train))
        with tempfile.TemporaryDirectory() as folder, rule(name):
            vocab = vocabulary.draft(changed, mine)
            trainer = stage.Trainer(changed, RunDir(Path(folder)), mine, vocab)
            adapt(name, trainer)
            began = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - began
            best = Path(folder) / "drafter" / "best"
            sets = measured(disk.read(best, device=resolved.device), embedding, answers)
            held_out = json.loads((best / "metrics.json").read_text(encoding="utf-8"))["tau"]
        rate = trainer.trained_now / seconds
        rows[name] = {
            "held_out": held_out,
            "sets": sets,
            "supervised_tokens": trainer.supervised,
            "supervised_tokens_per_s": rate,
            "changed": VARIANTS[name],
        }
        write(rows, a)
        print(
            f"{name:<32} mean tau k=3 {mean(sets, 3):.3f}  held out {held_out['3']['value']:.3f}", flush=True
        )
    table(rows)


def write(rows: dict[str, dict], a: argparse.Namespace) -> None:
    """docs/results/ablation.json, after each variant."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": "ablation", "rows": rows, "settings": {"rows": a.rows, "epochs": a.epochs}}
    body |= {"eyas": __version__, "machine": pipeline.machine(), "date": time.strftime("%Y-%m-%d")}
    (RESULTS / "ablation.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def mean(sets: dict[str, dict], k: int) -> float:
    return float(np.mean([s["tau"][str(k)]["value"] for s in sets.values()]))


def table(rows: dict[str, dict]) -> None:
    names = list(next(iter(rows.values()))["sets"])
    print(
        f"{'tau at k=3':<32}{'held out':>10}"
        + "".join(f"{n:>11}" for n in names)
        + f"{'mean':>8}{'tokens/s':>10}"
    )
    for word, row in rows.items():
        taus = "".join(f"{row['sets'][n]['tau']['3']['value']:>11.3f}" for n in names)
        print(
            f"{word:<32}{row['held_out']['3']['value']:>10.3f}{taus}{mean(row['sets'], 3):>8.3f}"
            f"{row['supervised_tokens_per_s']:>10,.0f}"
        )


if __name__ == "__main__":
    main()

"""Training speed on one GPU: eyas, speculators and SpecForge, in one call, on the same documents.

    python benchmarks/training.py [--shapes 8B Kimi] [--ttt 3 7] [--cells all half fifth] [--peers] [--profile]

A step is 8,192 tokens on the GPU already, forward, backward, clipping and optimizer. "8B" is the drafter of Llama-3.1-8B, "Kimi" that
of Kimi-K2.5. Cells: every position supervised; half of them, in six documents of uneven length; a fifth (long histories). tokens/s
counts every token. The peers run their own trainers with their own defaults (benchmarks/peer_speculators.py, peer_specforge.py say how),
each in a process of its own. Writes docs/results/training.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import RESULTS

from eyas import __version__, pipeline
from eyas.contract import Contract, Norms
from eyas.drafter.batch import Batch, pack
from eyas.drafter.gradients import ROW_MULTIPLE, product_dtype
from eyas.drafter.loss import Teacher, ttt_loss
from eyas.drafter.network import Drafter
from eyas.engines.hf import choose_dtype
from eyas.stores.states import RowStates
from eyas.train import schedule
from eyas.train.stage import MICRO_TOKENS
from eyas.train.updates import TTT, Updates

SHAPES = {
    "8B": {"hidden": 4096, "mlp": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "draft_vocab": 32000},
    "Kimi": {"hidden": 7168, "mlp": 18432, "heads": 64, "kv_heads": 64, "vocab": 163840, "draft_vocab": 32000},
    "SmolLM2": {"hidden": 576, "mlp": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 49152, "draft_vocab": 16384},
    "tiny": {"hidden": 64, "mlp": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512, "draft_vocab": 256},
}  # fmt: skip
CELLS = {
    "all": [(2048, 1)] * 4,
    "half": [(3072, 1536), (2048, 1024), (1408, 704), (896, 448), (512, 256), (256, 128)],
    "fifth": [(4096, 3277), (2560, 2048), (1536, 1229)],
    "chat": [(40 + 7 * i % 61 + 60 + 29 * i % 201, 40 + 7 * i % 61) for i in range(36)],
}
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8B", "Kimi"])
    parser.add_argument("--ttt", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the documents' lengths")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peers", action="store_true", help="also run speculators and SpecForge, which must be installed")
    parser.add_argument("--plain", action="store_true", help="also run the specification, through autograd")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the products; else as training chooses")
    parser.add_argument("--profile", action="store_true", help="print where the time of the last cell goes")
    parser.add_argument("--out", type=Path, default=RESULTS / "training.json")
    a = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for shape in a.shapes:
        for name in a.cells:
            docs = [(int(n * a.scale), max(1, int(s * a.scale))) for n, s in CELLS[name]]
            for ttt in a.ttt:
                for plain in (False, True)[: 1 + a.plain]:
                    cells.append({"shape": shape, "cell": name, "ttt": ttt} | ours(shape, docs, ttt, a, plain))
                    print(json.dumps(cells[-1]), flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": "training", "cells": cells, "eyas": __version__, "machine": pipeline.machine()}
    if torch.cuda.is_available():
        body["gpu"] = torch.cuda.get_device_name()
    a.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def ours(shape: str, docs: list[tuple[int, int]], ttt: int, a: argparse.Namespace, plain: bool = False) -> dict[str, Any]:
    """plain: the specification, drafter/loss.py through autograd, instead of what training runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    updates, steps = prepared(contract_of(shape, ttt), docs, ttt, device, getattr(torch, a.dtype) if a.dtype else None)
    work = by_autograd(updates) if plain else lambda batches: updates.apply(batches, 1e-4).loss
    for i in range(WARM_UP):
        figures = work(steps[i % len(steps)])
    sync()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, apart = [], 1 if device == "cpu" else a.steps  # on a GPU, one wait at the end, as training does
    for _ in range(a.steps // apart):
        began = time.perf_counter()
        for i in range(apart):
            figures = work(steps[i % len(steps)])
        sync()
        times.append((time.perf_counter() - began) / apart)
    tokens, step = sum(n for n, _ in docs), statistics.median(times)
    pairs = sum(b.pairs for b in steps[0])
    found = {
        "tool": "plain" if plain else "eyas", "step_ms": step * 1e3, "tokens_per_s": tokens / step, "supervised_per_s": pairs / step,
        "loss": float(figures), "dtype": str(updates.gradients.dtype),
    }  # fmt: skip
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if a.profile:
        profile(lambda: work(steps[0]))
    del updates, steps, figures, work
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def by_autograd(updates: Updates) -> Callable[[list[Batch]], torch.Tensor]:
    drafter, teacher, ttt = updates.drafter, updates.gradients.teacher, updates.ttt
    teacher = teacher._replace(head_WD=teacher.head_WD.float(), embedding_VD=teacher.embedding_VD.float())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    device = teacher.norm_D.device.type

    def step(batches: list[Batch]) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total, pairs = torch.zeros((), device=device), sum(b.pairs for b in batches)
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
                loss = ttt_loss(drafter, teacher, batch, ttt.steps, ttt.decay).total / pairs
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def contract_of(shape: str, ttt: int) -> Contract:
    return Contract(
        target_model_type="llama", target_fingerprint="", target_identity=shape, target_layers=32, **{"head_dim": 128} | SHAPES[shape],
        eps=1e-5, rope_theta=500000.0, context=8192, trained_length=4096, aux_layers=(2, 16, 29),
        norms=Norms(False, "none", False), ttt_steps=ttt, stop_ids=(),
    )  # fmt: skip


def prepared(
    c: Contract, docs: list[tuple[int, int]], ttt: int, device: str, dtype: torch.dtype | None
) -> tuple[Updates, list[list[Batch]]]:
    """A drafter at random weights, and the batches of two steps."""
    dtype = dtype or product_dtype(device, choose_dtype("auto", device).value)
    g = torch.Generator(device=device).manual_seed(0)
    new = lambda *s: torch.randn(*s, device=device, dtype=dtype, generator=g)  # noqa: E731
    kept = torch.randperm(c.vocab, generator=torch.Generator().manual_seed(1))[: c.draft_vocab].sort().values
    draft_id = torch.full((c.vocab,), -1)
    draft_id[kept] = torch.arange(c.draft_vocab)
    teacher = Teacher(
        0.02 * new(c.draft_vocab, c.hidden), torch.ones(c.hidden, device=device), c.eps, draft_id.to(device),
        0.02 * new(c.vocab, c.hidden),
    )  # fmt: skip
    with torch.device(device):
        made = Drafter(c)
        with torch.no_grad():
            for p in made.parameters():
                if p.dim() == 2:
                    p.normal_(std=0.02, generator=g)
    ids = lambda n: kept[torch.randint(c.draft_vocab, (n,))].int()  # noqa: E731
    steps = []
    for _ in range(2):
        rows = [
            RowStates(str(i), ids(n), new(n, 3, c.hidden), new(n, c.hidden), ids(n), start)
            for i, (n, start) in enumerate(docs)
        ]
        groups = schedule.micro_batches(range(len(docs)), [n for n, _ in docs], MICRO_TOKENS[device], device == "cpu")
        steps.append([pack([rows[i] for i in g], device, ttt, ROW_MULTIPLE[device]) for g in groups])
    return Updates(made, teacher, dtype, TTT(ttt, 0.8), 1e-4), steps


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile(work: Callable[[], Any]) -> None:
    with torch.profiler.profile() as found:
        work()
        sync()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=60))


if __name__ == "__main__":
    main()

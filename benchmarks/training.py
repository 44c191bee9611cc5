"""Training speed on one GPU: eyas, speculators and SpecForge, in one call, on the same documents.

    python benchmarks/training.py [--shapes 8B Kimi] [--ttt 3 7] [--cells all half fifth] [--peers] [--plain] [--profile]

A step is forward, backward, clipping and optimizer over 8,192 tokens that are on the GPU already. "8B" is the drafter of Llama-3.1-8B,
"Kimi" that of Kimi-K2.5, with speculators' norms (one over the aux states, normed residual, normed state fed on). Cells:

    all      every position supervised, four documents of 2,048 tokens
    half     the second half of six documents of uneven length
    fifth    the last fifth of three documents: long histories, one row a turn
    chat     36 short chats, two thirds supervised

tokens/s counts every token. --peers runs speculators 0.9 (as it comes, and with AdamW) and SpecForge 0.2, where they are installed, by
their own trainers with their own defaults (peer_speculators.py and peer_specforge.py say how), in processes of their own, before eyas.
--plain also runs the specification, drafter/loss.py through autograd. Writes docs/results/training.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common import RESULTS
from peer_common import SHAPES, Shape

from eyas import __version__, pipeline
from eyas.contract import Contract, Norms
from eyas.drafter.batch import Batch, pack
from eyas.drafter.gradients import BATCH_TOKENS, product_dtype, row_multiple
from eyas.drafter.loss import Teacher, ttt_loss
from eyas.drafter.memory import of_training
from eyas.drafter.network import Drafter
from eyas.engines.hf import choose_dtype
from eyas.stores.states import RowStates
from eyas.train import schedule
from eyas.train.updates import TTT, Updates

Docs = list[tuple[int, int]]  # length, and where its supervised completion starts
CELLS: dict[str, Docs] = {
    "all": [(2048, 1)] * 4,
    "half": [(3072, 1536), (2048, 1024), (1408, 704), (896, 448), (512, 256), (256, 128)],
    "fifth": [(4096, 3277), (2560, 2048), (1536, 1229)],
    "chat": [(100 + 7 * i % 61 + 29 * i % 201, 40 + 7 * i % 61) for i in range(36)],
}
PEERS = {"speculators": ("peer_speculators.py", []), "speculators adamw": ("peer_speculators.py", ["--optimizer", "adamw"]),
         "specforge": ("peer_specforge.py", [])}  # fmt: skip
WARM_UP = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {  # of GPU kernels, by what their names hold
    "attention over step-0 keys": ("flash",), "products": ("nvjet", "gemm", "cutlass", "splitK"),
    "loss and target's distribution": ("_loss", "_distribution"), "own keys merged": ("_merge", "_own_backward"),
    "norms, SwiGLU, rope, sums": ("_rms", "_swiglu", "_turn", "_add_rows"),
    "weights folded and copied": ("_fold", "_unfold"), "optimizer and clipping": ("multi_tensor", "lpnorm"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8B", "Kimi"])
    parser.add_argument("--ttt", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["all", "half", "fifth"])
    parser.add_argument(
        "--repeat", type=int, default=1, help="so many times the documents of a cell in a step"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="of --steps each, every cell once in a round")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of the products; else as training chooses"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=[], help="also these; without names, all"
    )
    parser.add_argument("--plain", action="store_true", help="also the specification, through autograd")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--out", type=Path, default=RESULTS / "training.json")
    a = parser.parse_args()
    if "--peers" in sys.argv and not a.peers:
        a.peers = list(PEERS)
    found: list[dict[str, Any]] = []
    for shape in a.shapes:
        found += run_peers(shape, a)
        cells = [
            (name, ttt, plain) for name in a.cells for ttt in a.ttt for plain in (False, True)[: 1 + a.plain]
        ]
        rounds = [[ours(shape, *cell, a) for cell in cells] for _ in range(a.rounds)]
        found += [middle(of_cell) for of_cell in zip(*rounds, strict=True)]
    show(found)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "benchmark": "training",
        "cells": found,
        "eyas": __version__,
        "machine": pipeline.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if DEVICE == "cuda":
        body["gpu"] = torch.cuda.get_device_name()
    a.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def documents(name: str, repeat: int) -> Docs:
    return CELLS[name] * repeat


# ---- eyas, and its specification ----


def ours(shape: str, cell: str, ttt: int, plain: bool, a: argparse.Namespace) -> dict[str, Any]:
    docs = documents(cell, a.repeat)
    contract = contract_of(shape, ttt)
    updates, steps = prepared(contract, docs, ttt, getattr(torch, a.dtype) if a.dtype else None)
    work = by_autograd(updates) if plain else lambda batches: updates.apply(batches, 1e-4).loss
    for i in range(WARM_UP):
        figures = work(steps[i % len(steps)])
    sync()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for i in range(a.steps):  # waited for once, as training does
        figures = work(steps[i % len(steps)])
    sync()
    step = (time.perf_counter() - began) / a.steps
    operations = operations_of(SHAPES[shape], ttt, docs)
    tokens, pairs = sum(n for n, _ in docs), sum(b.pairs for b in steps[0])
    found = {
        "tool": "plain" if plain else "eyas", "shape": shape, "cell": cell, "ttt": ttt, "tokens": tokens, "step_ms": step * 1e3,
        "tokens_per_s": tokens / step, "supervised_per_s": pairs / step, "tflops": operations / step / 1e12,
        "loss": float(figures), "products": ("autocast" if DEVICE == "cuda" else "float32") if plain else str(updates.gradients.dtype).split(".")[1],
    }  # fmt: skip
    if DEVICE == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        first = steps[0][0]
        sizes = (len(first.key_pos_K), len(first.query_key_M), ttt, len(steps) * len(steps[0]))
        found["predicted_bytes"] = of_training(contract, *sizes).peak
    if a.profile and not plain:
        found["profile_ms"] = profile(lambda: work(steps[0]))
    return found


def middle(of_cell: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One cell's rounds as one: rates by the median step, and every round's step."""
    step = statistics.median(r["step_ms"] for r in of_cell)
    out = of_cell[-1] | {"step_ms": step, "rounds_ms": [r["step_ms"] for r in of_cell]}
    return out | {
        n: out[n] * of_cell[-1]["step_ms"] / step for n in ("tokens_per_s", "supervised_per_s", "tflops")
    }


def contract_of(shape: str, ttt: int) -> Contract:
    s = SHAPES[shape]
    return Contract(
        target_model_type="llama", target_fingerprint="", target_identity=shape, target_layers=s.target_layers, hidden=s.hidden, mlp=s.mlp,
        heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, vocab=s.vocab, draft_vocab=s.draft_vocab, eps=s.norm_eps,
        rope_theta=s.rope_theta, context=8192, trained_length=4096, aux_layers=(2, s.target_layers // 2, s.target_layers - 3),
        norms=Norms(True, "whole", True), ttt_steps=ttt, stop_ids=(),
    )  # fmt: skip


def prepared(
    c: Contract, docs: Docs, ttt: int, dtype: torch.dtype | None
) -> tuple[Updates, list[list[Batch]]]:
    """A drafter at random weights, and the batches of two steps."""
    dtype = dtype or product_dtype(DEVICE, choose_dtype("auto", DEVICE).value)
    g = torch.Generator(device=DEVICE).manual_seed(0)
    new = lambda *s: torch.randn(*s, device=DEVICE, dtype=dtype, generator=g)  # noqa: E731
    kept = torch.randperm(c.vocab, generator=torch.Generator().manual_seed(1))[: c.draft_vocab].sort().values
    draft_id = torch.full((c.vocab,), -1)
    draft_id[kept] = torch.arange(c.draft_vocab)
    teacher = Teacher(
        0.02 * new(c.draft_vocab, c.hidden), torch.ones(c.hidden, device=DEVICE), c.eps, draft_id.to(DEVICE),
        0.02 * new(c.vocab, c.hidden),
    )  # fmt: skip
    with torch.device(DEVICE):
        made = Drafter(c)
        with torch.no_grad():
            for p in made.parameters():
                if p.dim() == 2:
                    p.normal_(std=0.02, generator=g)
    ids = lambda n: kept[torch.randint(c.draft_vocab, (n,))].int()  # noqa: E731
    groups = schedule.micro_batches(
        range(len(docs)), [n for n, _ in docs], BATCH_TOKENS[DEVICE], DEVICE == "cpu"
    )
    steps = []
    for _ in range(2):
        rows = [
            RowStates(str(i), ids(n), new(n, 3, c.hidden), new(n, c.hidden), ids(n), start)
            for i, (n, start) in enumerate(docs)
        ]
        steps.append([pack([rows[i] for i in g], DEVICE, ttt, row_multiple(DEVICE, dtype)) for g in groups])
    return Updates(made, teacher, dtype, TTT(ttt, 0.8)), steps


def by_autograd(updates: Updates) -> Callable[[list[Batch]], torch.Tensor]:
    drafter, ttt, teacher = updates.drafter, updates.ttt, updates.gradients.teacher
    teacher = teacher._replace(head_WD=teacher.head_WD.float(), embedding_VD=teacher.embedding_VD.float())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)

    def step(batches: list[Batch]) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total, pairs = torch.zeros((), device=DEVICE), sum(b.pairs for b in batches)
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = ttt_loss(drafter, teacher, batch, ttt.steps, ttt.decay).total / pairs
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def operations_of(s: Shape, ttt: int, docs: Docs, peer: str | None = None) -> float:
    """Floating-point operations of the matrix products of a step, recomputed ones and the optimizer's apart.

    A product of T rows with an [X, Y] weight is 2 T X Y forward, and as much for each of its two gradients. peer: what that one computes:
    every position at every step; speculators freezes the head, SpecForge's target covers the whole vocabulary.
    """
    keys, live = sum(n - 2 for n, _ in docs), sum(n - start - 1 for n, start in docs)
    q, kv, d = s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim, s.hidden
    layer, head = q * d + 3 * d * s.mlp, d * s.draft_vocab
    seen = sum(
        (start + i) for n, start in docs for i in range(n - start - 1)
    )  # step-0 keys, over all live positions
    if peer is None:
        once = keys * (2 * 3 * d * d + 3 * d * kv + 2 * d * kv) + live * (2 * d * q + head)
        each = (
            3 * live * (d * q + layer + head) * ttt + 3 * live * d * kv * (ttt - 1) + 3 * 2 * q * seen * ttt
        )
        return 2 * (once + each)
    tokens = sum(n for n, _ in docs)
    seen = sum(n * (n + 1) // 2 for n, _ in docs)
    once = tokens * (3 * 3 * d * d + d * (s.draft_vocab if peer == "speculators" else s.vocab))
    of_head = (2 if peer == "speculators" else 3) * head
    return 2 * (once + ttt * (tokens * (3 * (2 * d * (q + kv) + layer) + of_head) + 3 * 2 * q * seen))


def sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def profile(work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step by kind of GPU kernel; on a CPU, the table of operators is printed instead."""
    with torch.profiler.profile() as found:
        work()
        sync()
    if DEVICE == "cpu":
        print(
            found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
        )
        return {}
    kinds = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for e in found.key_averages():
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.key.startswith("Optimizer.step"):
            kind = next(
                (k for k, names in KINDS.items() if any(n in e.key for n in names)), "everything else"
            )
            kinds[kind] += e.self_device_time_total / 1e3
    return kinds


# ---- peers ----


def run_peers(shape: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Each peer's lines. speculators as it comes runs the first cell only: what it computes does not depend on the cell."""
    found = []
    for tool in a.peers:
        script, options = PEERS[tool]
        names = a.cells[:1] if tool == "speculators" else a.cells
        cells = [{"name": n, "ttt": ttt, "docs": documents(n, a.repeat)} for n in names for ttt in a.ttt]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "lines.jsonl"
            argv = [
                sys.executable,
                str(Path(__file__).parent / script),
                "--shape",
                shape,
                "--cells",
                json.dumps(cells),
                "--out",
                str(out),
            ]
            ended = subprocess.run(
                [*argv, *options, "--steps", str(a.steps)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            lines = [json.loads(x) for x in out.read_text().splitlines()] if out.is_file() else []
        if not lines:
            last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SystemExit(f"{script} measured nothing (exit {ended.returncode}): {' '.join(last)}")
        for line in lines:
            line["tool"] = tool
            if "error" not in line:
                name = tool.split()[0]
                work = operations_of(SHAPES[shape], line["ttt"], documents(line["cell"], a.repeat), name)
                line["tflops"] = work / line["step_ms"] / 1e9
        found += lines
    return found


def show(found: list[dict[str, Any]]) -> None:
    print(
        f"\n{'shape':<9}{'cell':<7}{'TTT':>3}  {'tool':<18}{'tokens/s':>10}{'TFLOP/s':>9}{'peak GB':>9}{'eyas':>8}{'memory':>8}"
    )
    mine = {(r["shape"], r["cell"], r["ttt"]): r for r in found if r["tool"] == "eyas"}
    for r in sorted(found, key=lambda r: (r["shape"], r["cell"], r["ttt"], r["tool"])):
        head = f"{r['shape']:<9}{r['cell']:<7}{r['ttt']:>3}  {r['tool']:<18}"
        if "error" in r:
            print(f"{head}{r['error'][:70]}")
            continue
        own = mine[(r["shape"], r["cell"], r["ttt"])]
        peak = r.get("peak_bytes")
        ratios = f"{own['tokens_per_s'] / r['tokens_per_s']:>7.2f}x"
        if peak:
            ratios += f"{own['peak_bytes'] / peak:>8.2f}"
        print(f"{head}{r['tokens_per_s']:>10,.0f}{r['tflops']:>9,.0f}{(peak or 0) / 1e9:>9.1f}{ratios}")
    for r in found:
        if r.get("profile_ms"):
            whole = sum(r["profile_ms"].values())
            parts = ", ".join(f"{k} {ms:.1f} ms ({ms / whole:.0%})" for k, ms in r["profile_ms"].items())
            print(f"{r['shape']} {r['cell']} TTT {r['ttt']}: {parts}")


if __name__ == "__main__":
    main()

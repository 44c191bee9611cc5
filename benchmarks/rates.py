"""Rates of extract and train, on made-up conversations: what a GPU does when nothing but eyas limits it.

    python benchmarks/rates.py TARGET [--rows 6000] [--ttt 3 5] [--steps 150] [--launched] [--profile]

TARGET needs config.json and a tokenizer; without weights random ones are made (rates do not depend on them). Rows have some 70
prompt and 160 answer tokens, drawn from a skewed distribution. Writes docs/results/rates.json.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import yaml
from common import RESULTS
from transformers import AutoConfig, AutoModelForCausalLM

from eyas import __version__, pipeline
from eyas.extract import stage as extract
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.stores import conversations
from eyas.stores.conversations import Row
from eyas.train import stage as train
from eyas.train import vocabulary
from eyas.train.data import load, resident

WARM_UP = 60  # steps that are not counted: shapes of batches recur after some


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--ttt", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument(
        "--launched",
        action="store_true",
        help="also with every kernel launched by itself, without CUDA graphs",
    )
    parser.add_argument("--profile", action="store_true")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = a.target if list(a.target.glob("*.safetensors")) else randomised(a.target, root / "target")
        recipe = root / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(settings(target, a)), encoding="utf-8")
        resolved, rundir, values = pipeline.open_run(str(recipe), (), str(root / "run"))
        pipeline.prepare(resolved, rundir, values)
        made_up(resolved, rundir, a.rows)
        with rundir.lock():
            rates = {"extract, tokens/s": extract.run(resolved, rundir)["rates"]["tokens_per_s"]}
        data = resident(load(resolved, rundir), resolved.device)
        for ttt in a.ttt:
            resolved, _, _ = pipeline.open_run(str(recipe), (f"train.ttt_steps={ttt}",), str(root / "run"))
            for way in ("launched", "")[not a.launched :]:
                trainer = train.Trainer(
                    resolved, RunDir(root / f"t{ttt}{way}"), data, vocabulary.draft(resolved, data)
                )
                if way:
                    trainer.updates.gradients.replay = False
                rates[f"train TTT {ttt}{way and f', {way}'}, supervised tokens/s"] = steps(trainer, a)
    for name, rate in rates.items():
        print(f"{name:<36}{rate:>12,.0f}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = {k: str(v) if k == "target" else v for k, v in vars(a).items()} | {"target": a.target.name}
    body = {"benchmark": "rates", "rates": rates, "settings": about, "eyas": __version__}
    body |= {"machine": pipeline.machine(), "device": resolved.device, "date": time.strftime("%Y-%m-%d")}
    if resolved.device == "cuda":
        body["gpu"] = torch.cuda.get_device_name()
    (RESULTS / "rates.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def randomised(shape: Path, out: Path) -> Path:
    shutil.copytree(shape, out)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=torch.bfloat16).save_pretrained(
        out
    )
    return out


def settings(target: Path, a: argparse.Namespace) -> dict:
    return {
        "name": "rates",
        "target": {"model": str(target)},
        "prompts": {"held_out": 0.02},
        "train": {
            "draft_vocab": a.draft_vocab, "tokens_per_step": a.tokens_per_step, "epochs": 1000,
            "micro_tokens": 4 * a.tokens_per_step,
        },
    }  # fmt: skip


def made_up(resolved: Resolved, rundir: RunDir, count: int) -> None:
    """Conversations of random ids, as generate would leave them."""
    chance = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return (resolved.target.vocab * chance.random(n) ** 4).astype(int).tolist()

    rows = []
    for i in range(count):
        prompt, answer = ids(int(chance.integers(40, 100))), ids(min(200, 4 + int(chance.exponential(250))))
        side = "held_out" if i % 50 == 0 else "train"
        rows.append(
            Row(f"{i:016x}", f"p{i}", f"{i:016x}", "d", side, 0, 0, prompt, answer, "stop", 0.8, 1.0, "f")
        )
    (rundir / "conversations").mkdir()
    conversations.write_part(rundir / "conversations" / "part-00000.parquet", rows)
    for stage in ("generate", "extract"):
        rundir.update_record(stage, inputs={}, state="running")
    rundir.finish("generate", {"content": None})


def steps(trainer: train.Trainer, a: argparse.Namespace) -> float:
    """Supervised tokens a second over --steps optimizer steps, evaluation and checkpoints apart."""
    todo = [
        rows for epoch in trainer.plan[: 1 + (WARM_UP + a.steps) // len(trainer.plan[0])] for rows in epoch
    ]
    began, pairs = 0.0, 0
    waiting = []
    profiler = torch.profiler.profile() if a.profile else None
    for number, (rows, batches) in enumerate(zip(todo, trainer.prepared(todo), strict=True)):
        if number == WARM_UP:
            trainer._record(waiting[-1])
            began = time.perf_counter()
        if number == WARM_UP + a.steps:
            break
        if profiler and number == WARM_UP + a.steps - 10:
            profiler.start()
        waiting.append(trainer._step(rows, batches, number, 0))
        if number >= WARM_UP:
            pairs += waiting[-1].pairs
        if len(waiting) > 1:
            trainer._record(waiting[-2])
    trainer._record(waiting[-1])
    seconds = time.perf_counter() - began
    if profiler:
        profiler.stop()
        by = "self_cuda_time_total" if trainer.device == "cuda" else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=by, row_limit=14, max_name_column_width=40))
    return pairs / seconds


if __name__ == "__main__":
    main()

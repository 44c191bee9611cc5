"""Trainers on the same states of a run: acceptance by epoch and by seconds of training, judged by one replay.

    python benchmarks/quality.py RUN --with eyas|speculators|specforge --out FOLDER --sets SET.jsonl … [--epochs 5] [--lr 1e-3 3e-3]
    python benchmarks/quality.py RUN --table --out FOLDER          docs/results/quality.json of all that lie there

RUN is a run folder whose extract is done. Each trainer gets its training rows, its draft vocabulary and train.ttt_steps, and as many
tokens in an optimizer step as train.tokens_per_step. With several rates, each is tried for one epoch, and the one with the highest
held-out tau is trained. Seconds are of training alone: evaluation and writing are outside, and so is what a peer's compiler took (a
step counts five times the median at most; all seconds are noted beside). States lie on the GPU before the first step.

The peers run as in peer_speculators.py and peer_specforge.py, with the settings that they ship, learning rate and schedule length
apart; rows are packed (speculators) or padded (specforge) on the GPU as their own loaders do on the host. The last state of a prompt's
position, which no loss reads, is zero. Their drafters are written by their own save_pretrained, and read by eyas like anybody's.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import peer_common
import torch
import torch.nn.functional as F
from acceptance import answered, measured
from common import RESULTS
from torch import Tensor

from eyas import __version__, pipeline
from eyas.drafter import facts, opening
from eyas.engines.hf import HFEngine
from eyas.recipe import Resolved
from eyas.rundir import RunDir, read_json, write_json
from eyas.stores.states import RowStates
from eyas.train import evaluation, stage, vocabulary
from eyas.train.data import Data, load, resident

DEPTH = 5
COMPILING = 5  # times the median step: what lies above was not training
TRAINERS = ("eyas", "speculators", "specforge")
SPECFORGE_LENGTHS = 128  # rows are padded to a multiple, so that few shapes are compiled


class Task(NamedTuple):
    """What a trainer is given."""

    resolved: Resolved
    data: Data  # rows on the device
    vocab: vocabulary.Vocabulary
    epochs: int
    lr: float
    folder: Path  # for its drafters: epoch-1, epoch-2, …


class Clock:
    """Seconds of training: `step` after each one, `pause` around what is none."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.resume()

    def resume(self) -> None:
        peer_common.synchronize()
        self.last = time.perf_counter()

    def step(self) -> None:
        peer_common.synchronize()
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.last = now

    def seconds(self) -> dict[str, float]:
        most = COMPILING * statistics.median(self.steps)
        return {"all": sum(self.steps), "training": sum(min(s, most) for s in self.steps)}


Seconds = list[dict[str, float]]  # to the end of each epoch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--with", dest="trainer", choices=TRAINERS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", help="of the result in FOLDER (default: the trainer's)")
    parser.add_argument("--sets", nargs="*", type=Path, default=[])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", nargs="+", type=float, default=[])
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--rows", type=int, help="training rows (default: all)")
    parser.add_argument("--table", action="store_true")
    a = parser.parse_args()
    if a.table:
        table(a.out)
        return
    if a.trainer is None:
        parser.error("--with TRAINER, or --table")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        peer_common.prepare_process(dry=True)
    changes = (f"train.epochs={a.epochs}", *a.changes)
    resolved, rundir, _ = pipeline.open_run(str(a.run), changes, str(a.run))
    data = load(resolved, rundir)
    data = resident(data._replace(train=data.train[: a.rows]), resolved.device)
    data = data._replace(train=[r.load() for r in data.train])
    vocab = vocabulary.draft(resolved, data)
    train = {"eyas": eyas, "speculators": speculators, "specforge": specforge}[a.trainer]
    rates = a.lr or [resolved.recipe.train.lr]
    with tempfile.TemporaryDirectory() as work:
        tried = {}
        for lr in rates if len(rates) > 1 else ():
            short = Task(resolved, data, vocab, 1, lr, Path(work) / f"try-{lr}")
            train(short)
            tried[str(lr)] = judged(short)[-1]["tau"]["3"]["value"]
            print(f"{a.trainer}, one epoch at {lr}: held-out tau {tried[str(lr)]:.3f}", flush=True)
        lr = float(max(tried, key=lambda x: tried[x])) if tried else rates[0]
        task = Task(resolved, data, vocab, a.epochs, lr, a.out / (a.name or a.trainer))
        seconds, about = train(task)
        body = {
            "trainer": a.trainer, "lr": lr, "tried": tried, "epochs": a.epochs, "changes": a.changes, "rows": len(data.train),
            "supervised_tokens": sum(len(r) - r.start - 1 for r in data.train), "seconds": seconds, "held_out": judged(task), **about,
        }  # fmt: skip
        if a.sets:
            body["sets"] = on_sets(task, a.sets)
    body |= {"eyas": __version__, "machine": pipeline.machine(), "date": time.strftime("%Y-%m-%d")}
    write_json(a.out / f"{a.name or a.trainer}.json", body)
    table(a.out, write=False)


# ---- judging ----


def opened(task: Task, epoch: int) -> Any:
    target = task.resolved.target
    folder = task.folder / f"epoch-{epoch}"
    made = opening.read(facts.gather(folder, target), target).drafter
    return made.to(task.resolved.device)


def judged(task: Task) -> list[dict[str, Any]]:
    """Held-out acceptance of every epoch's drafter."""
    embedding = task.resolved.target.embedding_VD().float().to(task.resolved.device)
    out = []
    for epoch in range(1, task.epochs + 1):
        found = evaluation.evaluate(
            opened(task, epoch), embedding, task.data.held_out, task.data.domains, DEPTH
        )
        out.append({name: found[name] for name in ("tau", "p", "conversations")})
    return out


def on_sets(task: Task, sets: list[Path]) -> dict[str, Any]:
    """Acceptance of the last epoch's drafter on greedy answers to sets of prompts."""
    resolved = task.resolved
    engine = HFEngine(resolved.target, resolved.dtype, resolved.device, resolved.aux_layers)
    answers = answered(engine, resolved.target.tokenizer(), sets, 200, 512)
    embedding = resolved.target.embedding_VD().float().to(resolved.device)
    return measured(opened(task, task.epochs), embedding, answers)


def table(folder: Path, write: bool = True) -> None:
    found = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    print(
        f"{'':<24}{'lr':>8}{'epochs':>8}{'tau k=3':>9}{'k=1':>7}{'k=5':>7}{'sets':>7}{'seconds':>9}   tau by epoch"
    )
    for name, body in found.items():
        last, sets = body["held_out"][-1]["tau"], body.get("sets", {})
        mean = np.mean([s["tau"]["3"]["value"] for s in sets.values()]) if sets else float("nan")
        by_epoch = " ".join(f"{e['tau']['3']['value']:.3f}" for e in body["held_out"])
        print(
            f"{name:<24}{body['lr']:>8g}{body['epochs']:>8}{last['3']['value']:>9.3f}{last['1']['value']:>7.3f}{last['5']['value']:>7.3f}"
            f"{mean:>7.3f}{body['seconds'][-1]['training']:>9.1f}   {by_epoch}",
            flush=True,
        )
    if write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"benchmark": "quality", "rows": found}, indent=1)
        (RESULTS / "quality.json").write_text(text + "\n", encoding="utf-8")


# ---- eyas ----


class Timed(stage.Trainer):
    """Notes the seconds of training to the end of each epoch."""

    def train(self) -> None:
        self.clock, self.seconds = Clock(), []
        super().train()

    def _finish_epoch(self, epoch: int, best: float, found: dict[str, Any] | None = None) -> float:
        self.clock.step()
        self.seconds.append({"all": sum(self.clock.steps), "training": sum(self.clock.steps)})
        tau = super()._finish_epoch(epoch, best, found)
        self.clock.resume()
        return tau


def eyas(task: Task) -> tuple[Seconds, dict[str, Any]]:
    options = task.resolved.recipe.train.model_copy(update={"epochs": task.epochs, "lr": task.lr})
    recipe = task.resolved.recipe.model_copy(update={"train": options})
    with tempfile.TemporaryDirectory() as work:
        trainer = Timed(replace(task.resolved, recipe=recipe), RunDir(Path(work)), task.data, task.vocab)
        trainer.train()
        task.folder.parent.mkdir(parents=True, exist_ok=True)
        (Path(work) / "drafter").rename(task.folder)
    return trainer.seconds, {"optimizer": trainer.optimizer.value, "tokens_per_step": options.tokens_per_step}


# ---- the peers' data ----


def packs(lengths: list[int], most: int, epoch: int) -> Iterator[list[int]]:
    """Rows in a random order, as many as `most` tokens hold."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).tolist()
    group: list[int] = []
    for i in order:
        if group and sum(lengths[j] for j in group) + lengths[i] > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def last_of(row: RowStates) -> Tensor:
    """The last state of every position; zeros where none was stored."""
    return F.pad(row.last_SD, (0, 0, row.last_from, 0))


def supervised(row: RowStates) -> Tensor:
    return torch.arange(len(row)) >= row.start


# ---- speculators ----


def speculators(task: Task) -> tuple[Seconds, dict[str, Any]]:
    import peer_speculators as peer

    with peer.stubbed_imports():
        import speculators.train.cli
    assert speculators.train.cli
    device, options = task.resolved.device, task.resolved.recipe.train
    dry = device == "cpu"
    if dry:
        peer.run_on_cpu()
    peer.separate_autotune_lists()
    with tempfile.TemporaryDirectory() as work:
        arguments = speculators_arguments(task, Path(work), dry)
        model = peer.build_model(arguments, device)
        groups = [
            list(packs([len(r) - 1 for r in task.data.train], options.tokens_per_step, epoch))
            for epoch in range(task.epochs)
        ]
        loader = Loader(
            lambda group: speculators_batch(
                [task.data.train[i] for i in group], options.tokens_per_step, device
            )
        )
        loader.groups = groups[0]
        trainer = peer.make_trainer(model, arguments, arguments.optimizer, options.ttt_steps, loader)
        steps = max(map(len, groups))
        trainer.config = trainer.config._replace(
            num_epochs=task.epochs, scheduler_type=arguments.scheduler_type, log_freq=peer.NEVER,
            scheduler_total_steps=steps * task.epochs,
        )  # fmt: skip
        trainer.setup_optimizer()
        clock, seconds = Clock(), []
        for epoch in range(task.epochs):
            loader.groups = groups[epoch]
            clock.resume()
            trainer.train_epoch(epoch, step_callback=clock.step)
            seconds.append(clock.seconds())
            model.save_pretrained(task.folder / f"epoch-{epoch + 1}")
    names = (
        "lr",
        "muon_lr",
        "scheduler_type",
        "ttt_step_loss_decay",
        "fc_norm",
        "norm_before_residual",
        "norm_before_fc",
        "norm_output",
    )
    return seconds, {
        "version": importlib.metadata.version("speculators"),
        "optimizer": arguments.optimizer,
        "tokens_per_step": options.tokens_per_step,
        "settings": {n: getattr(arguments, n) for n in names},
    }


def speculators_arguments(task: Task, work: Path, dry: bool) -> argparse.Namespace:
    """What `speculators train` would have been given, from its own TrainConfig."""
    from speculators.train.config import TrainConfig

    target = task.resolved.target
    folder = work / "target"
    folder.mkdir()
    for path in target.folder.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        weights = {name: path.name for name, path in target.files.items()}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weights}), encoding="utf-8")
    kept = task.vocab.kept_W.cpu()
    t2d = torch.zeros(target.vocab, dtype=torch.bool)
    t2d[kept] = True
    np.save(work / "t2d.npy", t2d.numpy())
    np.save(work / "d2t.npy", (kept - torch.arange(len(kept))).numpy())
    command = [
        "--verifier-name-or-path", str(folder), "--t2d-path", str(work / "t2d.npy"), "--d2t-path", str(work / "d2t.npy"),
        "--mask-token-id", "0", "--total-seq-len", str(task.resolved.recipe.train.tokens_per_step), "--save-path", str(work / "unused"),
        "--full-attention-indices", "0", "--lr", str(task.lr),
    ]  # fmt: skip
    if dry:
        command += ["--draft-attn-impl", "eager", "--loss-implementation", "eager"]
    return argparse.Namespace(**TrainConfig.resolve(command).flatten())


class Loader:
    """Stands for the data loader: the epoch's batches, made as they are asked for."""

    def __init__(self, make: Callable[[list[int]], dict[str, Any]]) -> None:
        self.make, self.groups = make, []
        self.batch_sampler = self

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.make(group) for group in self.groups)


def speculators_batch(rows: list[RowStates], total: int, device: str) -> dict[str, Any]:
    """What its shift_batch and CollateFn make of rows: (x1, g0, y1, l1), packed into one of `total` tokens."""
    length = torch.tensor([len(r) - 1 for r in rows])
    more = total - int(length.sum())
    if more < 0:
        raise ValueError(f"a row of {length.max()} tokens does not fit train.tokens_per_step")
    number = torch.repeat_interleave(torch.arange(len(rows)), length)
    position = torch.cat([torch.arange(1, n + 1) for n in length.tolist()])
    small = {
        "input_ids": torch.cat([r.ids_T[1:].long() for r in rows]),
        "loss_mask": torch.cat([supervised(r)[1:] for r in rows]).long(),
        "position_ids": position,
    }
    out: dict[str, Any] = {name: F.pad(x, (0, more)).to(device)[None] for name, x in small.items()}
    out["document_ids"] = F.pad(number, (0, more), value=-1).to(device)[None]
    aux = torch.cat([r.aux_TLD[:-1].flatten(1) for r in rows])
    last = torch.cat([last_of(r)[1:] for r in rows])
    out["hidden_states"] = F.pad(aux, (0, 0, 0, more)).to(device, torch.bfloat16)[None]
    out["verifier_last_hidden_states"] = F.pad(last, (0, 0, 0, more)).to(device, torch.bfloat16)[None]
    return out | {"error_records": 0}


# ---- SpecForge ----


def specforge(task: Task) -> tuple[Seconds, dict[str, Any]]:
    import peer_specforge as peer
    from specforge.modeling.target.target_head import TargetHead

    target, device, options = task.resolved.target, task.resolved.device, task.resolved.recipe.train
    dry = device == "cpu"
    if dry:
        peer.run_on_cpu()
    shape = peer_common.Shape(
        target.hidden, target.mlp, target.heads, target.kv_heads, target.head_dim, target.vocab, len(task.vocab.kept_W),
        target.layers, target.eps, target.rope_theta,
    )  # fmt: skip
    config = peer.draft_config(shape, target.context)
    config.eagle_config = {
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in task.resolved.aux_layers],
        "use_aux_hidden_state": True,
    }
    kept = task.vocab.kept_W.cpu()
    t2d = torch.zeros(target.vocab, dtype=torch.bool)
    t2d[kept] = True
    torch.manual_seed(0)
    backend = "sdpa" if dry else "flex_attention"
    draft = peer.make_draft(config, (t2d, kept - torch.arange(len(kept))), backend, device)
    embedding = target.embedding_VD()
    draft.embed_tokens.weight.data.copy_(embedding)
    head = TargetHead.__new__(TargetHead)
    torch.nn.Module.__init__(head)
    head.config, head.hidden_size, head.vocab_size = config, target.hidden, target.vocab
    head.fc = torch.nn.Linear(target.hidden, target.vocab, bias=False, dtype=torch.bfloat16, device=device)
    head.fc.weight.data.copy_(target.head_VD())
    head.freeze_weights()
    lengths = [len(r) for r in task.data.train]
    mean = sum(lengths) / len(lengths)
    together = max(1, round(options.tokens_per_step / mean))
    steps = -(-len(lengths) // together)
    core = specforge_core(draft, head, backend, options.ttt_steps, steps * task.epochs, task.lr)
    norm = target.final_norm_D().to(device)
    clock, seconds = Clock(), []
    for epoch in range(task.epochs):
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).tolist()
        clock.resume()
        for i in range(0, len(order), together):
            rows = [task.data.train[j] for j in order[i : i + together]]
            core.train_step(specforge_batch(rows, together, norm, target.eps, device))
            clock.step()
        seconds.append(clock.seconds())
        specforge_save(draft, task.folder / f"epoch-{epoch + 1}")
    return seconds, {
        "version": importlib.metadata.version("specforge"),
        "optimizer": "adamw",
        "rows_per_step": together,
    }


def specforge_core(draft: Any, head: Any, backend: str, ttt: int, steps: int, lr: float) -> Any:
    """Its training core, with the defaults of its configuration schema but for the rate and the length of the schedule."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.optimizer import BF16Optimizer
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import Eagle3TrainStrategy

    model = OnlineEagle3Model(draft, length=ttt, attention_backend=backend)
    strategy = Eagle3TrainStrategy(model, target_head=head)
    made = FSDPTrainingBackend(
        ParallelConfig(),
        optimizer_factory=lambda m: BF16Optimizer(
            m, lr=lr, max_grad_norm=0.5, warmup_ratio=0.015, total_steps=steps
        ),
    )
    made.prepare_model(model, wrap=False, optimizer_target=draft)
    return TrainerCore(strategy, made, accumulation_steps=1)


def specforge_batch(rows: list[RowStates], together: int, norm_D: Tensor, eps: float, device: str) -> Any:
    """What its collate function makes of rows: each padded, the target's last state after the final norm. Rows are added that nothing
    supervises, where an epoch ends with fewer."""
    from specforge.runtime.contracts import TrainBatch

    longest = max(map(len, rows))
    longest += -longest % SPECFORGE_LENGTHS
    shape = (together, longest)
    width = rows[0].last_SD.shape[1]
    layers = rows[0].kept_TLD.shape[1]
    out = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.zeros(shape, dtype=torch.long),
    }
    aux = torch.zeros(*shape, layers * width, dtype=torch.bfloat16, device=device)
    last = torch.zeros(*shape, width, dtype=torch.bfloat16, device=device)
    for i, r in enumerate(rows):
        n = len(r)
        out["input_ids"][i, :n] = r.ids_T
        out["attention_mask"][i, :n] = 1
        out["loss_mask"][i, :n] = supervised(r)
        aux[i, :n] = r.aux_TLD.flatten(1).to(device)
        after = F.rms_norm(r.last_SD.to(device).float(), (width,), norm_D, eps)
        last[i, r.last_from : n] = after.to(torch.bfloat16)
    out["attention_mask"][len(rows) :, 0] = 1
    tensors = {name: x.to(device) for name, x in out.items()}
    return TrainBatch(
        sample_ids=[str(i) for i in range(together)], strategy="eagle3", metadata={"target_repr": "hidden_state"},
        tensors={**tensors, "hidden_state": aux, "target": last},
    )  # fmt: skip


def specforge_save(draft: Any, folder: Path) -> None:
    state = {name: x for name, x in draft.state_dict().items() if "embed" not in name.lower()}
    draft.save_pretrained(folder, state_dict=state)


if __name__ == "__main__":
    main()

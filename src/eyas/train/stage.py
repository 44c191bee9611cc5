"""train: states -> a drafter, by EAGLE-3 training-time test, and its replayed acceptance after each epoch.

Reads states/ and conversations/ (split and domain of each row). Writes

    train/steps.jsonl  evals.jsonl  state/state.safetensors  manifest.json
    drafter/epoch-N/  drafter/best/      config.json model.safetensors contract.json metrics.json

    eyas train RECIPE
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas import interrupt, warm
from eyas.drafter.architectures import build
from eyas.drafter.batch import Batch, pack
from eyas.drafter.gradients import BATCH_TOKENS, product_dtype, row_multiple
from eyas.drafter.loss import Teacher
from eyas.drafter.memory import Memory, of_training
from eyas.errors import SurroundingsError
from eyas.feed import DEPTH, Later, ahead
from eyas.progress import Progress, say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, file_hash, fingerprint, read_json, write_json
from eyas.train import checkpoint, evaluation, group, optimizer, parent, records, schedule, vocabulary
from eyas.train.data import Data, load, resident
from eyas.train.parent import Parent
from eyas.train.skips import Skips
from eyas.train.updates import TTT, Updates

EVAL_K = 5  # replay drafts this deep, or as deep as training went
SAVE_EVERY_S = 60.0
UNREAD = 1  # steps whose figures may still be on the GPU while the next is launched


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Train all epochs; returns the manifest. Resumes from train/state within a minute of a kill.

    Raises ContractError when there is nothing to train on or too many steps had to be skipped.
    """
    start = parent.read(resolved)
    data = load(resolved, rundir, (start and start.trained_on) or frozenset())
    with contextlib.closing(data.checksums):
        return _run(resolved, rundir, data, start)


def _run(resolved: Resolved, rundir: RunDir, data: Data, start: Parent | None) -> dict[str, Any]:
    begun = rundir / "train" / "parent.json"
    leads = group.current().leads
    if start and leads and not begun.is_file():
        write_json(begun, {"axes": parent.examine(start, resolved, data.held_out, data.train), "came": None})
    vocab = vocabulary.draft(resolved, data, start)
    trainer = Trainer(resolved, rundir, resident(data, resolved.device), vocab, start)
    products = str(trainer.teacher.head_WD.dtype).removeprefix("torch.")
    say(f"  products in {products}; weights, gradients, optimizer and loss in float32")
    say(f"  optimizer {trainer.optimizer.value}: {trainer.optimizer.reason}")
    began = time.perf_counter()
    trainer.train()
    data.checksums.wait()
    if not leads:
        return {}
    gained = parent.gained(rundir) | read_json(begun) if start else None
    best = json.loads((rundir / "drafter" / "best" / "metrics.json").read_text(encoding="utf-8"))
    return rundir.finish(
        "train",
        {
            "content": {"drafter/best": file_hash(rundir / "drafter" / "best" / "model.safetensors")},
            "best": best,
            "parent": gained,
            "held_out_left_out": data.left_out,
            "vocabulary": {
                "size": len(vocab.kept_W),
                "coverage": vocab.coverage,
                "distinct": vocab.distinct,
                "filled": vocab.filled,
            },
            "rows": {"train": len(data.train), "held_out": len(data.held_out)},
            "supervised_tokens": trainer.supervised,
            "skipped_steps": trainer.skips.state["count"],
            "products": products,
            "optimizer": trainer.optimizer.value,
            "parameters": sum(p.numel() for p in trainer.drafter.parameters()),
            "rates": {
                "supervised_tokens_per_s": trainer.trained_now / max(time.perf_counter() - began, 1e-9)
            },
        },
    )


def make_teacher(resolved: Resolved, kept_W: Tensor) -> Teacher:
    """Head rows of the kept ids and embedding in the type of training's products, final norm, on the training device."""
    target, device = resolved.target, resolved.device
    dtype = product_dtype(device, resolved.dtype)
    draft_id = torch.full((target.vocab,), -1, device=device)
    draft_id[kept_W.to(device)] = torch.arange(len(kept_W), device=device)
    return Teacher(
        head_WD=target.head_VD()[kept_W].to(device, dtype),
        norm_D=target.final_norm_D().to(device),
        eps=target.eps,
        draft_id_V=draft_id,
        embedding_VD=target.embedding_VD().to(device, dtype),
    )


class Started(NamedTuple):
    """An optimizer step that was launched, and what its record needs."""

    step: int
    epoch: int
    rows: list[int]
    rate: float
    pairs: int
    seen: list[int]  # pairs at each draft step
    figures: (
        Later  # loss, gradient norm, usual loss, skipped, processes that want to stop, hits by draft step
    )


class Trainer:
    """The training loop and what it needs between steps."""

    def __init__(
        self,
        resolved: Resolved,
        rundir: RunDir,
        data: Data,
        vocab: vocabulary.Vocabulary,
        start: Parent | None = None,
    ) -> None:
        self.options, self.rundir, self.data = resolved.recipe.train, rundir, data
        self.group = group.current()
        self.device, self.loggers = resolved.device, tuple(resolved.recipe.report.loggers)
        longest = max(len(r) for r in data.train)
        self.teacher = make_teacher(resolved, vocab.kept_W)
        self.contract = warm.contract(resolved, longest, len(vocab.kept_W))
        self.resolved, self.start = resolved, start
        self.changed: list[str] = []
        self.trained_on: frozenset[str] | None = data.keys
        if start:
            self.trained_on = None if start.trained_on is None else start.trained_on | data.keys
        if start:
            self.drafter, kept = parent.child(start, self.contract, vocab.kept_W, self.teacher.head_WD.cpu())
            same = torch.equal(vocab.kept_W, start.held.drafter.kept_W)
            self.changed = parent.changes(start, self.contract, None if same else (kept, len(vocab.kept_W)))
        else:
            self.drafter = build(self.contract)
            self.drafter.reset(
                self.options.seed, vocab.kept_W, self.teacher.head_WD.cpu(), self.teacher.norm_D.cpu()
            )
        self.drafter.to(self.device)
        ttt = TTT(self.options.ttt_steps, self.options.ttt_decay, self.options.loss)
        self.optimizer = optimizer.choose(self.options.optimizer, self.teacher.head_WD.dtype)
        self.updates = Updates(
            self.drafter, self.teacher, self.teacher.head_WD.dtype, ttt, self.optimizer.value
        )
        self.lengths = [len(r) for r in data.train]
        self.pairs = [len(r) - r.start - 1 for r in data.train]
        self.supervised = sum(self.pairs)
        self.micro = (
            BATCH_TOKENS[self.device] if self.options.micro_tokens == "auto" else self.options.micro_tokens
        )
        self.plan = [
            schedule.epoch_steps(self.lengths, self.options.tokens_per_step, self.options.seed, e)
            for e in range(self.options.epochs)
        ]
        self.total_steps = sum(map(len, self.plan))
        self.trained_now, self.stop_at = 0, 0
        self.state_file = rundir / "train" / "state" / "state.safetensors"
        self.steps_file = rundir / "train" / "steps.jsonl"
        self.skips = self._skips(None)

    def _skips(self, state: dict[str, int] | None) -> Skips:
        return Skips(self.steps_file, self.total_steps, min(map(len, self.plan)), state)

    def try_largest(self) -> None:
        """Compute the gradients of the batch that takes the most memory, and drop them: what does not fit fails now, not hours later.

        Raises SurroundingsError when it does not fit.
        """
        groups = [g for epoch in self.plan for rows in epoch for g in self._groups(rows)]
        largest = max(groups, key=self._peak)
        try:
            self.updates.gradients.add(self._pack(largest), 1)
            self.updates.gradients.refresh()
        except torch.OutOfMemoryError as e:
            tokens, peak = sum(self.lengths[i] for i in largest), self._memory(largest)
            raise SurroundingsError(
                f"train: the largest batch, {len(largest)} rows of {tokens:,} tokens, does not fit into the GPU's memory"
                f"{f' (it needs some {peak.peak / 1e9:.1f} GB)' if peak else ''}. Set train.micro_tokens below {tokens} (batches have at most {self.micro:,} now), or free the GPU."
            ) from e

    def _memory(self, group: list[int]) -> Memory | None:
        keys, live = sum(self.lengths[i] for i in group), sum(self.pairs[i] for i in group)
        size = self.updates.gradients.dtype.itemsize
        return of_training(self.contract, keys, live, self.options.ttt_steps, DEPTH + 2, size)

    def _peak(self, group: list[int]) -> int:
        """Bytes; or, where nobody counted them, what attention grows with."""
        found = self._memory(group)
        return found.peak if found else sum(self.lengths[i] * self.pairs[i] for i in group)

    def train(self) -> None:
        """All epochs from where train/state stands; nothing to do when it stands at the end."""
        place: dict[str, Any] = {"step": 0, "epoch": 0, "best": 0.0}
        if self.state_file.is_file():
            place = checkpoint.load(self.state_file, self.drafter, self.updates.optimizer)
            self.updates.gradients.refresh()
            self.updates.usual.fill_(place.get("usual", 0.0))
            self.updates.counted.fill_(place.get("counted", 0))
            self.skips = self._skips(place.get("skips"))
            say(f"  resuming at step {place['step']} of {self.total_steps}")
            if (before := place.get("processes", 1)) != self.group.world:
                say(
                    f"  {before} trained before, now {self.group.world}: the same steps, summed in another order"
                )
        self._agree(place)
        if self.start and not self.state_file.is_file():
            place["best"] = self._begin(self.start)
        if self.device == "cuda":
            self.try_largest()
        saved = time.monotonic()
        done_before = [sum(map(len, self.plan[:e])) for e in range(len(self.plan))]
        with (
            records.open_steps(self.steps_file, place["step"], self.group.leads) as log,
            records.board(self.rundir, self.loggers if self.group.leads else ()) as board,
            Progress("train", self.total_steps, "steps", "supervised tokens", place["step"]) as progress,
        ):
            unread: deque[Started] = deque()

            def settle(left: int) -> None:
                while len(unread) > left:
                    record = self._record(unread.popleft())
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                    if "skipped" in record:
                        progress.add(1, 0, "skipped")
                        continue
                    for name in ("loss", "accuracy_0", "lr"):
                        board.add_scalar(f"train/{name}", record[name], record["step"])
                    progress.add(1, record["pairs"], f"loss {record['loss']:.3f}")

            for epoch in range(place["epoch"], len(self.plan)):
                todo = self.plan[epoch][place["step"] - done_before[epoch] :]
                for rows, batches in zip(todo, self.prepared(todo), strict=True):
                    unread.append(self._step(rows, batches, place["step"], epoch))
                    place["step"] += 1
                    settle(UNREAD)
                    self.data.checksums.look()
                    if time.monotonic() - saved > SAVE_EVERY_S or self._stopping(place["step"]):
                        settle(0)
                        self._save(place)
                        saved = time.monotonic()
                        if self._stopping(place["step"]):
                            self.group.gather(None)  # one that ends has the others ended, who may be saving
                            raise KeyboardInterrupt
                settle(0)
                tau = self._finish_epoch(epoch, place["best"])
                board.add_scalar("held_out/tau", tau, epoch + 1)
                place |= {"epoch": epoch + 1, "best": max(place["best"], tau)}
                self._save(place)

    def _stopping(self, step: int) -> bool:
        """Whether to stop after this step; several processes stop after the same one: when all have read that one of them wants to."""
        return 0 < self.stop_at <= step if self.group.world > 1 else interrupt.asked()

    def _agree(self, place: dict[str, Any]) -> None:
        """Raises ContractError where processes would not train the same."""
        if self.group.world == 1:
            return
        say(f"  {self.group.world} processes, each with a part of every step")
        rows = fingerprint([r.row_id for r in self.data.train] + [r.row_id for r in self.data.held_out])
        weights = sum(float(p.detach().double().abs().sum()) for p in self.drafter.parameters())
        options = fingerprint(self.options.model_dump(mode="json"))
        self.group.agree(
            {"steps": place["step"], "rows": rows, "weights": weights, "training options": options}
        )

    def _save(self, place: dict[str, Any]) -> None:
        """The training state, of which no step is unread."""
        if not self.group.leads:
            return
        place |= {
            "processes": self.group.world,
            "usual": self.updates.usual.item(),
            "counted": int(self.updates.counted),
            "skips": self.skips.state,
        }
        checkpoint.save(self.state_file, self.drafter, self.updates.optimizer, place)

    def _begin(self, start: Parent) -> float:
        """Measure what training starts with; raises ContractError where it lost the parent's skill."""
        metrics = self._evaluate()
        came = parent.compare(start, self.resolved, self.data.held_out, metrics, self.changed)
        path = self.rundir / "train" / "parent.json"
        if self.group.leads:
            write_json(path, read_json(path) | {"came": came})
        return self._finish_epoch(-1, 0.0, metrics)

    def prepared(self, todo: list[list[int]]) -> Iterator[list[Batch]]:
        """The batches of each step, made ahead."""
        if self.device != "cuda":
            return ahead(todo, self._batches)
        return ahead(todo, self._batches, lambda batches: [t for b in batches for t in b.tensors()])

    def _batches(self, rows: list[int]) -> list[Batch]:
        return [self._pack(g) for g in self._groups(rows)]

    def _groups(self, rows: list[int]) -> list[list[int]]:
        mine = schedule.shares(rows, self.lengths, self.group.world)[self.group.rank]
        return schedule.micro_batches(mine, self.lengths, self.micro, padded=self.device == "cpu")

    def _pack(self, group: list[int]) -> Batch:
        loaded = [self.data.train[i].load() for i in group]
        multiple = row_multiple(self.device, self.updates.gradients.dtype)
        return pack(loaded, self.device, self.options.ttt_steps, multiple)

    def _step(self, rows: list[int], batches: list[Batch], step: int, epoch: int) -> "Started":
        """Launch one optimizer step over rows, accumulated over micro batches; its figures are read later."""
        rate = schedule.learning_rate(step, self.total_steps, self.options.lr)
        pairs = [self.pairs[i] for i in rows]
        done = self.updates.apply(batches, rate, sum(pairs), interrupt.asked())
        figures = torch.stack([done.loss, done.norm, done.usual, done.skipped, done.stop])
        seen = [sum(max(0, n - k) for n in pairs) for k in range(self.options.ttt_steps)]
        return Started(
            step + 1, epoch + 1, rows, rate, sum(pairs), seen, Later(torch.cat([figures, done.hits_S]))
        )

    def _record(self, started: "Started") -> dict[str, Any]:
        """The line of steps.jsonl. Raises ContractError when too many steps had to be skipped."""
        loss, norm, usual, skipped, stop, *hits = started.figures.read()[0].tolist()
        if stop and not self.stop_at:
            self.stop_at = started.step + UNREAD
        record = {
            "step": started.step, "epoch": started.epoch, "loss": loss, "lr": started.rate, "grad_norm": norm,
            "pairs": started.pairs,
        }  # fmt: skip
        if skipped:
            return self.skips.skipped(record, usual, [self.data.train[i].row_id for i in started.rows])
        self.skips.passed()
        self.trained_now += started.pairs
        accuracy = {
            f"accuracy_{k}": h / n for k, (h, n) in enumerate(zip(hits, started.seen, strict=True)) if n
        }
        return record | accuracy

    def _finish_epoch(self, epoch: int, best: float, found: dict[str, Any] | None = None) -> float:
        """Replay the held-out rows as a server would load the weights, write drafter/epoch-N, and best if it is. found: that replay, where
        it was done already."""
        metrics = {"epoch": epoch + 1, **(found or self._evaluate())}
        tau = metrics["tau"][str(metrics["select_k"])]["value"]
        if self.group.leads:
            self._write_epoch(epoch, metrics, tau > best)
        shown = metrics["tau"][str(metrics["select_k"])]
        p = " ".join(f"{x:.2f}" for x in metrics["p"][str(metrics["max_k"])])
        say(
            f"  {f'epoch {epoch + 1}' if epoch >= 0 else 'before any step'}: held-out tau at k={metrics['select_k']} is {shown['value']:.3f} "
            f"[{shown['low']:.3f}, {shown['high']:.3f}]; accepted at positions 1..{metrics['max_k']}: {p}"
        )
        return tau

    def _write_epoch(self, epoch: int, metrics: dict[str, Any], best: bool) -> None:
        folder = self.rundir / "drafter"
        records.append_eval(self.rundir / "train" / "evals.jsonl", metrics)
        kept = {name: value for name, value in metrics.items() if name != "walks"}
        records.replace_folder(folder / f"epoch-{epoch + 1}", self.drafter, kept, self.trained_on)
        if best or not (folder / "best").is_dir():
            records.replace_folder(folder / "best", self.drafter, kept, self.trained_on)

    def _evaluate(self) -> dict[str, Any]:
        rounded = build(self.contract)
        rounded.load_state_dict(self.drafter.state_dict())
        rounded.to(getattr(torch, self.contract.dtype)).float().to(self.device).eval()
        return evaluation.evaluate(
            rounded,
            self.teacher.embedding_VD,
            self.data.held_out,
            self.data.domains,
            max(EVAL_K, self.options.ttt_steps),
        )

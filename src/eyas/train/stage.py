"""train: states -> a drafter, by EAGLE-3 training-time test, and its replayed acceptance after each epoch.

Reads states/ and conversations/ (split and domain of each row). Writes

    train/steps.jsonl  evals.jsonl  state/state.safetensors  manifest.json
    drafter/epoch-N/  drafter/best/      config.json model.safetensors contract.json metrics.json

    eyas train RECIPE
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas import interrupt, warm
from eyas.drafter.batch import Batch, pack, usable
from eyas.drafter.gradients import BATCH_TOKENS, product_dtype, row_multiple
from eyas.drafter.loss import Teacher
from eyas.drafter.network import Drafter
from eyas.errors import ContractError
from eyas.feed import Later, ahead
from eyas.progress import Progress, say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, file_hash, read_json, write_json
from eyas.stores import conversations, states
from eyas.stores.states import RowRef, RowStates
from eyas.train import checkpoint, evaluation, parent, records, schedule, vocabulary
from eyas.train.parent import Parent
from eyas.train.updates import TTT, Updates

EVAL_K = 5  # replay drafts this deep, or as deep as training went
SAVE_EVERY_S = 60.0
RESIDENT_SHARE = 0.5  # of the free GPU memory: states that fit into it are moved there once
UNREAD = 1  # steps whose figures may still be on the GPU while the next is launched


class Data(NamedTuple):
    train: list[RowRef] | list[RowStates]
    held_out: list[RowRef] | list[RowStates]
    domains: list[str]  # of each held-out row
    keys: frozenset[str]  # of the training prompts
    left_out: list[str]  # held-out prompts that the parent was trained on


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Train all epochs; returns the manifest. Resumes from train/state within a minute of a kill.

    Raises ContractError when there is nothing to train on or the loss is not finite.
    """
    start = parent.read(resolved)
    data = load(resolved, rundir, (start and start.trained_on) or frozenset())
    begun = rundir / "train" / "parent.json"
    if start and not begun.is_file():
        write_json(begun, {"axes": parent.examine(start, resolved, data.held_out, data.train), "came": None})
    vocab = draft_vocabulary(resolved, data, start)
    trainer = Trainer(resolved, rundir, resident(data, resolved.device), vocab, start)
    products = str(trainer.teacher.head_WD.dtype).removeprefix("torch.")
    say(f"  products in {products}; weights, gradients, optimizer and loss in float32")
    began = time.perf_counter()
    trainer.train()
    gained = _gain(rundir) | read_json(begun) if start else None
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
            "products": products,
            "parameters": sum(p.numel() for p in trainer.drafter.parameters()),
            "rates": {
                "supervised_tokens_per_s": trainer.trained_now / max(time.perf_counter() - began, 1e-9)
            },
        },
    )


def _gain(rundir: RunDir) -> dict[str, Any]:
    """What training added to the drafter that it started from, on the same held-out answers."""
    by_epoch = {e["epoch"]: e for e in records.evals(rundir / "train" / "evals.jsonl")}
    best = json.loads((rundir / "drafter" / "best" / "metrics.json").read_text(encoding="utf-8"))["epoch"]
    k = by_epoch[0]["select_k"]
    before, after = by_epoch[0]["tau"][str(k)]["value"], by_epoch[best]["tau"][str(k)]["value"]
    added = evaluation.gain(by_epoch[0]["walks"], by_epoch[best]["walks"])
    if best == 0:
        say(
            f"  training added nothing: no epoch is above the {before:.3f} (k={k}) that it started from, which is kept"
        )
    else:
        sure = "" if added.low > 0 else "; the interval holds 0, so it may be chance"
        say(
            f"  training changed held-out tau at k={k} from {before:.3f} to {after:.3f} (epoch {best}): {added.value:+.3f} "
            f"[{added.low:+.3f}, {added.high:+.3f}]{sure}"
        )
    return {"k": k, "tau": before, "best_epoch": best, "gain": added._asdict()}


def load(resolved: Resolved, rundir: RunDir, known: frozenset[str] = frozenset()) -> Data:
    """The rows that can be trained on and those held out, without held-out prompts whose keys are known to the parent.

    Raises ContractError where one side is empty.
    """
    manifest = rundir.manifest("extract")
    rows = {r.row_id: r for r in conversations.read(rundir / "conversations")}
    train, held_out, domains = [], [], []
    keys, left_out = set(), dict[str, None]()
    for row in states.refs(rundir / "states", manifest["content"]):
        said = rows.get(row.row_id)
        if said is None or said.ids != row.slice("ids").tolist():
            raise ContractError(
                f"states row {row.row_id} is not in {rundir / 'conversations'} with these ids. Run extract again."
            )
        if not usable(row):
            continue
        if said.split == "train":
            train.append(row)
            keys.add(said.prompt_key)
        elif said.prompt_key in known:
            left_out[said.prompt_id] = None
        else:
            held_out.append(row)
            domains.append(said.domain)
    if left_out:
        named = ", ".join(list(left_out)[:5]) + (", …" if len(left_out) > 5 else "")
        say(f"  {len(left_out)} held-out prompts are left out, since the parent was trained on them: {named}")
    parent.refuse_nothing_left(list(left_out), len(held_out))
    if not train or not held_out:
        raise ContractError(
            f"{rundir / 'states'}: {len(train)} training and {len(held_out)} held-out rows with an answer of two tokens or "
            "more; both are needed."
        )
    return Data(train, held_out, domains, frozenset(keys), list(left_out))


def resident(data: Data, device: str) -> Data:
    """The rows with their states on the GPU, where they fit; as they are elsewhere."""
    if device != "cuda":
        return data
    size = states.bytes_of([*data.train, *data.held_out])
    if size > RESIDENT_SHARE * torch.cuda.mem_get_info()[0]:
        return data
    say(f"  {size / 1e9:.1f} GB of states fit into the GPU's memory: read once")
    rows = states.load_all([*data.train, *data.held_out], device)
    return data._replace(train=rows[: len(data.train)], held_out=rows[len(data.train) :])


def draft_vocabulary(resolved: Resolved, data: Data, start: Parent | None = None) -> vocabulary.Vocabulary:
    """The parent's where it has as many ids as the recipe asks for, or chosen from the training answers; printed with what it covers."""
    if start and start.contract.draft_vocab == min(resolved.recipe.train.draft_vocab, resolved.target.vocab):
        answers = (r.slice("ids")[r.start :] for r in data.train)
        vocab = vocabulary.measure(answers, start.held.drafter.kept_W, resolved.target.vocab)
        _print_vocabulary(vocab, data, "kept from the parent")
        return vocab
    always = {
        *resolved.target.stop_ids,
        *resolved.target.tokenizer(resolved.recipe.target.trust_remote_code).all_special_ids,
    }
    vocab = vocabulary.choose(
        (r.slice("ids")[r.start :] for r in data.train),
        (r.slice("ids")[: r.start] for r in data.train),
        always,
        resolved.recipe.train.draft_vocab,
        resolved.target.vocab,
    )
    _print_vocabulary(vocab, data)
    return vocab


def _print_vocabulary(vocab: vocabulary.Vocabulary, data: Data, origin: str = "") -> None:
    held = torch.cat([r.slice("ids")[r.start :].long() for r in data.held_out])
    inside = torch.isin(held, vocab.kept_W).float().mean().item()
    if not origin and vocab.filled:
        origin = f"{vocab.filled:,} places filled with ids that no answer had"
    notes = ", ".join(filter(None, [f"{vocab.distinct:,} distinct", origin]))
    say(
        f"  draft vocabulary: {len(vocab.kept_W):,} ids cover {vocab.coverage:.2%} of the supervised tokens ({notes}) "
        f"and {inside:.2%} of the held-out ones"
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
    figures: Later  # loss, gradient norm, hits at each draft step


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
            self.drafter = Drafter(self.contract)
            self.drafter.reset(
                self.options.seed, vocab.kept_W, self.teacher.head_WD.cpu(), self.teacher.norm_D.cpu()
            )
        self.drafter.to(self.device)
        ttt = TTT(self.options.ttt_steps, self.options.ttt_decay, self.options.loss)
        self.updates = Updates(self.drafter, self.teacher, self.teacher.head_WD.dtype, ttt, self.options.lr)
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
        self.trained_now = 0
        self.state_file = rundir / "train" / "state" / "state.safetensors"

    def train(self) -> None:
        """All epochs from where train/state stands; nothing to do when it stands at the end."""
        place: dict[str, Any] = {"step": 0, "epoch": 0, "best": 0.0}
        if self.state_file.is_file():
            place = checkpoint.load(self.state_file, self.drafter, self.updates.optimizer)
            self.updates.gradients.refresh()
            say(f"  resuming at step {place['step']} of {self.total_steps}")
        elif self.start:
            place["best"] = self._begin(self.start)
        saved = time.monotonic()
        done_before = [sum(map(len, self.plan[:e])) for e in range(len(self.plan))]
        with (
            records.open_steps(self.rundir / "train" / "steps.jsonl", place["step"]) as log,
            records.board(self.rundir, self.loggers) as board,
            Progress("train", self.total_steps, "steps", "supervised tokens", place["step"]) as progress,
        ):
            unread: deque[Started] = deque()

            def settle(left: int) -> None:
                while len(unread) > left:
                    record = self._record(unread.popleft())
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                    for name in ("loss", "accuracy_0", "lr"):
                        board.add_scalar(f"train/{name}", record[name], record["step"])
                    progress.add(1, record["pairs"], f"loss {record['loss']:.3f}")

            for epoch in range(place["epoch"], len(self.plan)):
                todo = self.plan[epoch][place["step"] - done_before[epoch] :]
                for rows, batches in zip(todo, self.prepared(todo), strict=True):
                    unread.append(self._step(rows, batches, place["step"], epoch))
                    place["step"] += 1
                    settle(UNREAD)
                    if time.monotonic() - saved > SAVE_EVERY_S or interrupt.asked():
                        settle(0)
                        checkpoint.save(self.state_file, self.drafter, self.updates.optimizer, place)
                        saved = time.monotonic()
                        interrupt.safe_place()
                settle(0)
                tau = self._finish_epoch(epoch, place["best"])
                board.add_scalar("held_out/tau", tau, epoch + 1)
                place |= {"epoch": epoch + 1, "best": max(place["best"], tau)}
                checkpoint.save(self.state_file, self.drafter, self.updates.optimizer, place)

    def _begin(self, start: Parent) -> float:
        """Measure what training starts with; raises ContractError where it lost the parent's skill."""
        metrics = self._evaluate()
        came = parent.compare(start, self.resolved, self.data.held_out, metrics, self.changed)
        path = self.rundir / "train" / "parent.json"
        write_json(path, read_json(path) | {"came": came})
        return self._finish_epoch(-1, 0.0, metrics)

    def prepared(self, todo: list[list[int]]) -> Iterator[list[Batch]]:
        """The batches of each step, made ahead."""
        if self.device != "cuda":
            return ahead(todo, self._batches)
        return ahead(todo, self._batches, lambda batches: [t for b in batches for t in b.tensors()])

    def _batches(self, rows: list[int]) -> list[Batch]:
        return [
            pack(
                [self.data.train[i].load() for i in group],
                self.device,
                self.options.ttt_steps,
                row_multiple(self.device, self.updates.gradients.dtype),
            )
            for group in schedule.micro_batches(rows, self.lengths, self.micro, padded=self.device == "cpu")
        ]

    def _step(self, rows: list[int], batches: list[Batch], step: int, epoch: int) -> "Started":
        """Launch one optimizer step over rows, accumulated over micro batches; its figures are read later."""
        rate = schedule.learning_rate(step, self.total_steps, self.options.lr)
        done = self.updates.apply(batches, rate)
        figures = Later(torch.cat([done.loss[None], done.norm[None], done.hits_S]))
        return Started(step + 1, epoch + 1, rows, rate, sum(b.pairs for b in batches), done.pairs_S, figures)

    def _record(self, started: "Started") -> dict[str, Any]:
        """The line of steps.jsonl. Raises ContractError when the loss or its gradient is not finite."""
        loss, norm, *hits = started.figures.read()[0].tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            names = ", ".join(self.data.train[i].row_id for i in started.rows[:5])
            raise ContractError(
                f"train: step {started.step}: the loss or its gradient is not finite (rows {names}, …). "
                "The last good state is kept; lower train.lr, or look at these rows."
            )
        self.trained_now += started.pairs
        accuracy = {
            f"accuracy_{k}": h / n for k, (h, n) in enumerate(zip(hits, started.seen, strict=True)) if n
        }
        return {
            "step": started.step,
            "epoch": started.epoch,
            "loss": loss,
            "lr": started.rate,
            "grad_norm": norm,
            "pairs": started.pairs,
            **accuracy,
        }

    def _finish_epoch(self, epoch: int, best: float, found: dict[str, Any] | None = None) -> float:
        """Replay the held-out rows as a server would load the weights, write drafter/epoch-N, and best if it is. found: that replay, where
        it was done already."""
        metrics = {"epoch": epoch + 1, **(found or self._evaluate())}
        tau = metrics["tau"][str(metrics["select_k"])]["value"]
        folder = self.rundir / "drafter"
        records.append_eval(self.rundir / "train" / "evals.jsonl", metrics)
        kept = {name: value for name, value in metrics.items() if name != "walks"}
        records.replace_folder(folder / f"epoch-{epoch + 1}", self.drafter, kept, self.trained_on)
        if tau > best or not (folder / "best").is_dir():
            records.replace_folder(folder / "best", self.drafter, kept, self.trained_on)
        shown = metrics["tau"][str(metrics["select_k"])]
        p = " ".join(f"{x:.2f}" for x in metrics["p"][str(metrics["max_k"])])
        say(
            f"  {f'epoch {epoch + 1}' if epoch >= 0 else 'before any step'}: held-out tau at k={metrics['select_k']} is {shown['value']:.3f} "
            f"[{shown['low']:.3f}, {shown['high']:.3f}]; accepted at positions 1..{metrics['max_k']}: {p}"
        )
        return tau

    def _evaluate(self) -> dict[str, Any]:
        rounded = Drafter(self.contract)
        rounded.load_state_dict(self.drafter.state_dict())
        rounded.to(getattr(torch, self.contract.dtype)).float().to(self.device).eval()
        return evaluation.evaluate(
            rounded,
            self.teacher.embedding_VD,
            (row.load() for row in self.data.held_out),
            self.data.domains,
            max(EVAL_K, self.options.ttt_steps),
        )

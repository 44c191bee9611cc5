"""States by one pass of the embedded engine over the stored ids.

Reads conversations/. Writes states/shard-*.safetensors. Each row is checked as it is written: finite, as many states as ids, and
head(norm(stored last state)), computed from the weights on disk, must have the argmax of the target's own logits. Greedy rows must
also repeat their stored tokens, near ties apart.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas import interrupt
from eyas.causes import NEAR_TIE
from eyas.engines.hf import HFEngine, Seen
from eyas.errors import ContractError
from eyas.extract.head import Checker, Extracted, described, own_logits
from eyas.feed import Later
from eyas.progress import Progress
from eyas.recipe import Resolved
from eyas.rundir import RunDir, atomic
from eyas.stores import states
from eyas.stores.conversations import Row
from eyas.stores.states import RowStates

PASS_TOKENS = {"cpu": 1024, "cuda": 16384}  # logits of a pass are tokens x vocabulary x 4 bytes
WRITERS = 4  # shards written and hashed while the next is computed; each holds extract.shard_bytes
COUNTS = (
    "positions", "head_agrees", "disk_differs", "disk_near_ties", "greedy_positions", "greedy_agrees", "greedy_near_ties",
)  # fmt: skip


def read(resolved: Resolved, rundir: RunDir, rows: list[Row], checker: Checker) -> Extracted:
    """Extract every row; resumes after the last complete shard. Raises ContractError when states are not finite."""
    recipe = resolved.recipe
    engine = HFEngine(
        resolved.target, resolved.dtype, resolved.device, resolved.aux_layers, recipe.target.trust_remote_code
    )
    total = sum(len(r.ids) for r in rows)
    folder = rundir / "states"
    counts: Counter[str] = Counter()
    shards: list[dict[str, Any]] = []
    made, began = 0, time.perf_counter()
    with Progress("extract", total, "tokens") as progress, ThreadPoolExecutor(WRITERS) as pool:
        writing: deque[Future[dict[str, Any]]] = deque()
        for number, group in enumerate(states.groups(rows, recipe.extract.shard_bytes, resolved.token_bytes)):
            interrupt.safe_place()
            path = folder / f"shard-{number:05d}.safetensors"
            tokens = sum(len(r.ids) for r in group)
            if path.is_file():
                counts.update(states.read_checks(path))
                progress.done += tokens
                progress.first += tokens
                writing.append(pool.submit(described, path))
            else:
                done, checks = _extract(engine, checker, group, resolved, progress)
                counts.update(checks)
                writing.append(pool.submit(_write, path, done, checks, resolved.fp8))
                made += tokens
            if len(writing) > WRITERS:
                shards.append(writing.popleft().result())
        shards += [w.result() for w in writing]
    return Extracted(shards, counts, {}, made, time.perf_counter() - began)


def _write(path: Path, done: list[RowStates], checks: dict[str, int], fp8: bool) -> dict[str, Any]:
    with atomic(path) as tmp:
        states.write_shard(tmp, done, checks, fp8)
    return described(path)


class Passed(NamedTuple):
    """A pass that was launched: the rows' places in their shard, and what comes back of it."""

    places: list[int]
    later: Later  # aux, last, top1, finite, counts


def _extract(
    engine: HFEngine, checker: Checker, group: list[Row], resolved: Resolved, progress: Progress
) -> tuple[list[RowStates], dict[str, int]]:
    """States of one shard's rows in their order, batched by length, and the counts of its checks. While the device computes
    a pass, the one before is taken apart."""
    out: list[RowStates | None] = [None] * len(group)
    counts: Counter[str] = Counter()
    waiting: Passed | None = None
    for places in [*_passes(group, PASS_TOKENS[resolved.device]), []]:
        launched = _launch(engine, checker, group, places, resolved) if places else None
        if waiting:
            aux, last, top1, finite, found = waiting.later.read()
            counts.update(dict(zip(COUNTS, found.tolist(), strict=True)))
            for i, j in enumerate(waiting.places):
                n = len(group[j].ids)
                _refuse_infinite(group[j], finite[i, :n], resolved)
                ids = torch.tensor(group[j].ids, dtype=torch.int32)
                start = len(group[j].prompt_ids)
                out[j] = RowStates(group[j].row_id, ids, aux[i, :n], last[i, :n], top1[i, :n], start)
            progress.add(sum(len(group[j].ids) for j in waiting.places))
        waiting = launched
    return [r for r in out if r is not None], dict(counts)


def _passes(group: list[Row], limit: int) -> Iterator[list[int]]:
    """Places of rows of similar length, at most `limit` tokens when padded to the longest."""
    batch: list[int] = []
    for i in sorted(range(len(group)), key=lambda i: len(group[i].ids)):
        if batch and (len(batch) + 1) * len(group[i].ids) > limit:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _launch(
    engine: HFEngine, checker: Checker, group: list[Row], places: list[int], resolved: Resolved
) -> Passed:
    rows = [group[i] for i in places]
    seen = engine.states([r.ids for r in rows], partial(own_logits, checker))
    aux = seen.aux_BTLD.to(getattr(torch, resolved.aux_dtype))
    return Passed(places, Later(aux, seen.last_BTD, seen.top1_BT, seen.finite_BT, _counts(rows, seen)))


def _refuse_infinite(row: Row, finite_T: Tensor, resolved: Resolved) -> None:
    if not bool(finite_T.all()):
        raise ContractError(
            f"row {row.row_id} (prompt {row.prompt_id}): its states are not finite. "
            f"The target computes in {resolved.dtype}; try --set target.dtype=float32."
        )


def _counts(rows: list[Row], seen: Seen) -> Tensor:
    """[COUNTS]: head(norm(last)) against the target's argmax, by its own modules and by the weights on disk, the latter
    near ties apart, since another order of sums rounds low-precision logits to another neighbour."""
    near = seen.gap_BT <= seen.ulp_BT.clamp_min(NEAR_TIE)
    differs = seen.outside_BT != seen.top1_BT
    longest, device = seen.top1_BT.shape[1], seen.top1_BT.device
    lengths = torch.tensor([len(r.ids) for r in rows], device=device)[:, None]
    starts = torch.tensor([len(r.prompt_ids) for r in rows], device=device)[:, None]
    greedy = torch.tensor([r.temperature == 0 for r in rows], device=device)[:, None]
    at = torch.arange(longest, device=device)[None]
    real = at < lengths
    answers = greedy & (at >= starts - 1) & (at < lengths - 1)  # where an answer's next token is decided
    following = torch.tensor([r.ids[1:] + [0] * (longest + 1 - len(r.ids)) for r in rows], device=device)
    same = seen.top1_BT == following
    masks = {
        "positions": real,
        "head_agrees": real & (seen.again_BT == seen.top1_BT),
        "disk_differs": real & differs & ~near,
        "disk_near_ties": real & differs & near,
        "greedy_positions": answers,
        "greedy_agrees": answers & same,
        "greedy_near_ties": answers & ~same & near,
    }
    return torch.stack([masks[name].sum() for name in COUNTS])

"""Replay: what a server would have accepted, computed from stored states.

Every live position drafts its own chain of K tokens (in parallel, as training-time test does, but reading its own
proposals), and is compared with the tokens that the target really wrote. The walk then goes through each completion as
a server does: from the first sampled token, draft k, accept m, jump m + 1.

    truth      b c d e f          chain at b: c d x     -> accepted 2, jump 3
    walk       b . . e .          chain at e: f         -> accepted 1 (the completion ends there)

Source of the definitions: DESIGN "Words" and arXiv 2503.01840; an average over all positions (p_all) is another number.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.batch import Batch, pack, usable
from eyas.drafter.network import Drafter, Step, unroll
from eyas.stores.states import RowStates

TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 32768}
FIRST_RANGE = 256  # tokens of context
FEWEST = 5  # conversations in a range of contexts, of which an interval says something


@dataclass(frozen=True)
class Walk:
    """One conversation walked with k drafts: how many steps, and in how many of them draft i was accepted."""

    steps: int
    accepted_at: tuple[int, ...]  # [k]

    @property
    def tau(self) -> float:
        """Acceptance length, bonus token included."""
        return 1 + sum(self.accepted_at) / self.steps


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def steps(accepted_M: Sequence[int], k: int) -> Iterator[tuple[int, int]]:
    """The steps of one completion's walk: the live position, and how many of k drafts are accepted there.

    accepted_M[m]: leading right drafts at live position m, however deep they were drafted. A position m has one token before the end
    for each place after it, so accepted_M[m] <= len - m always.
    """
    at = 0
    while at < len(accepted_M):
        accepted = min(accepted_M[at], k)
        yield at, accepted
        at += accepted + 1


def _tally(accepted: Iterable[int], k: int) -> Walk:
    counts = Counter(accepted)
    return Walk(counts.total(), tuple(sum(n for m, n in counts.items() if m > i) for i in range(k)))


def walk(accepted_M: Sequence[int], k: int) -> Walk:
    """Walk one completion; accepted_M as in `steps`."""
    return _tally((accepted for _, accepted in steps(accepted_M, k)), k)


def context_range(tokens: int) -> tuple[int, int]:
    """The range [from, below) of context lengths that `tokens` falls in: 0 to 256, then doubling."""
    below = max(FIRST_RANGE, 1 << tokens.bit_length())
    return (0 if below == FIRST_RANGE else below // 2), below


def by_context(accepted_M: Sequence[int], start: int, k: int) -> dict[tuple[int, int], Walk]:
    """One completion's walk by the tokens of context before each step; start: its prompt's tokens."""
    found: dict[tuple[int, int], list[int]] = {}
    for at, accepted in steps(accepted_M, k):
        found.setdefault(context_range(start + at + 1), []).append(accepted)
    return {span: _tally(values, k) for span, values in found.items()}


@torch.no_grad()
def accepted_lengths(
    drafter: Drafter, embedding_VD: Tensor, rows: Iterable[RowStates], k: int
) -> list[list[int]]:
    """For each usable row, the number of leading right drafts (0..k) at each of its live positions."""
    device = drafter.fc.weight.device
    kept_W = drafter.kept_W
    out: list[list[int]] = []
    for group in groups(rows, device.type):
        batch = pack(group, device, k)
        accepted = torch.zeros_like(batch.token_M)
        alive = torch.ones_like(batch.token_M, dtype=torch.bool)

        def choose(
            step: Step, batch: Batch = batch, accepted: Tensor = accepted, alive: Tensor = alive
        ) -> Tensor:
            drafted = kept_W[drafter.logits(step.h).argmax(-1)]
            right = drafted == batch.truth_M[step.live + step.k]
            alive[step.live] &= right
            accepted[step.live] += alive[step.live]
            return drafted

        for _ in unroll(drafter, embedding_VD, batch, k, choose):
            pass
        values = accepted.tolist()
        out += [values[a:b] for a, b in zip(batch.row_starts, batch.row_starts[1:], strict=False)]
    return out


def groups(rows: Iterable[RowStates], device: str) -> Iterator[list[RowStates]]:
    """Usable rows in their order, some thousand tokens at a time."""
    limit = TOKENS_AT_ONCE[device]
    group: list[RowStates] = []
    for row in rows:
        if not usable(row):
            continue
        if group and sum(map(len, group)) + len(row) > limit:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def tau(walks: Sequence[Walk]) -> float:
    """Acceptance length over all steps of all walks."""
    return 1 + sum(sum(w.accepted_at) for w in walks) / sum(w.steps for w in walks)


def positions(walks: Sequence[Walk]) -> list[float]:
    """p_i, cumulative acceptance at draft position i, averaged over the walk's steps."""
    steps = sum(w.steps for w in walks)
    return [sum(column) / steps for column in zip(*(w.accepted_at for w in walks), strict=True)]


def bootstrap(
    count: int, statistic: Callable[[np.ndarray], float], confidence: float, draws: int = 2000, seed: int = 0
) -> Interval:
    """Percentile interval of statistic(weights), resampling `count` clusters; weights [count] say how often each is in."""
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=draws)
    values = np.array([statistic(w) for w in weights])
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(float(statistic(np.ones(count))), float(low), float(high))


def tau_interval(walks: Sequence[Walk], confidence: float) -> Interval:
    """tau with its bootstrap interval over conversations."""
    accepted = np.array([sum(w.accepted_at) for w in walks], dtype=float)
    steps = np.array([w.steps for w in walks], dtype=float)
    return bootstrap(len(walks), lambda w: 1 + float((w * accepted).sum() / (w * steps).sum()), confidence)

"""Replayed acceptance of a drafter on held-out conversations: by k, by domain, by length of context, with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from eyas.drafter import replay
from eyas.drafter.network import Drafter
from eyas.stores.states import RowRef, RowStates
from eyas.train import group


def evaluate(
    drafter: Drafter, embedding_VD: Tensor, rows: Sequence[RowStates | RowRef], domains: list[str], max_k: int
) -> dict[str, Any]:
    """Replayed acceptance by k and domain, with 95 % bootstrap intervals over conversations. Several processes share the rows.

    `walks` holds steps and accepted drafts of each conversation at select_k, for paired comparisons.
    """
    mine = (row.load() for row in group.current().deal(rows))
    accepted = group.current().collect(replay.accepted_lengths(drafter, embedding_VD, mine, max_k))
    taus, ps, by_domain = {}, {}, {}
    for k in range(1, max_k + 1):
        walks = [replay.walk(a, k) for a in accepted]
        taus[str(k)] = replay.tau_interval(walks, 0.95)._asdict()
        ps[str(k)] = replay.positions(walks)
    select_k = min(3, max_k)
    for domain in sorted(set(domains)):
        walks = [replay.walk(a, select_k) for a, d in zip(accepted, domains, strict=True) if d == domain]
        by_domain[domain] = {
            "conversations": len(walks),
            "tau": replay.tau(walks),
            "p": replay.positions(walks),
        }
    starts = [row.start for row in rows]
    chosen = [replay.walk(a, select_k) for a in accepted]
    every = [m for a in accepted for m in a]
    p_all = [sum(m > i for m in every) / len(every) for i in range(max_k)]
    return {
        "max_k": max_k,
        "select_k": select_k,
        "tau": taus,
        "p": ps,
        "domains": by_domain,
        "contexts": contexts(accepted, starts, max_k, select_k),
        "p_all": p_all,
        "conversations": len(accepted),
        "walks": [[w.steps, sum(w.accepted_at)] for w in chosen],
    }


def contexts(
    accepted: Sequence[Sequence[int]], starts: Sequence[int], max_k: int, select_k: int
) -> list[dict[str, Any]]:
    """Replayed acceptance length by tokens of context, in ranges that at least replay.FEWEST conversations reach: `tau` by k, and its
    95 % interval at select_k. accepted: by conversation and live position; starts: tokens of each prompt."""
    out = []
    by_k = {
        k: [replay.by_context(a, s, k) for a, s in zip(accepted, starts, strict=True)]
        for k in range(1, max_k + 1)
    }
    for low, below in sorted({span for walks in by_k[select_k] for span in walks}):
        here = {k: [w[low, below] for w in walks if (low, below) in w] for k, walks in by_k.items()}
        if min(map(len, here.values())) >= replay.FEWEST:
            out.append({
                "from": low, "below": below, "conversations": len(here[select_k]), "steps": sum(w.steps for w in here[select_k]),
                "tau": {str(k): replay.tau(walks) for k, walks in here.items()},
                "interval": replay.tau_interval(here[select_k], 0.95)._asdict(),
            })  # fmt: skip
    return out


def gain(before: list[list[int]], after: list[list[int]]) -> replay.Interval:
    """Difference of tau, after minus before, on the same conversations, with its paired 95 % interval."""
    b, a = np.array(before, dtype=float), np.array(after, dtype=float)

    def difference(w: np.ndarray) -> float:
        taus = [1 + float((w * x[:, 1]).sum() / (w * x[:, 0]).sum()) for x in (b, a)]
        return taus[1] - taus[0]

    return replay.bootstrap(len(before), difference, 0.95)

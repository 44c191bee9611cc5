"""Which rows make which optimizer step, and at which rate: a function of the seed alone, so that a resumed run equals an
uninterrupted one."""

import math
from collections.abc import Sequence

import numpy as np

WARM_UP = 0.05
FLOOR = 0.02


def epoch_steps(lengths: Sequence[int], tokens_per_step: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of each step of an epoch: shuffled, then cut where a step is full."""
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()
    steps: list[list[int]] = []
    tokens = 0
    for i in order:
        if not steps or tokens + lengths[i] > tokens_per_step:
            steps.append([])
            tokens = 0
        steps[-1].append(i)
        tokens += lengths[i]
    return steps


def shares(rows: Sequence[int], lengths: Sequence[int], processes: int) -> list[list[int]]:
    """A step's rows dealt out so that each process has about as many tokens; one may have none."""
    dealt: list[list[int]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for i in sorted(rows, key=lambda r: -lengths[r]) if processes > 1 else rows:
        least = tokens.index(min(tokens))
        dealt[least].append(i)
        tokens[least] += lengths[i]
    return dealt


def micro_batches(
    rows: Sequence[int], lengths: Sequence[int], micro_tokens: int, padded: bool = True
) -> list[list[int]]:
    """A step's rows in batches of similar length, at most micro_tokens each; `padded`: when padded to the longest."""
    batches: list[list[int]] = []
    tokens = 0
    for i in sorted(
        rows, key=lambda r: -lengths[r]
    ):  # the longest first: memory runs out at once or not at all
        each = lengths[batches[-1][0]] if batches and padded else lengths[i]
        if not batches or tokens + each > micro_tokens:
            batches.append([])
            tokens, each = 0, lengths[i]
        batches[-1].append(i)
        tokens += each
    return batches


def learning_rate(step: int, total: int, peak: float) -> float:
    """Linear warm-up over the first 5 % of steps, then cosine to 2 % of the peak."""
    warm = max(1, round(total * WARM_UP))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))

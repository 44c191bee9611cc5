"""Measuring: the same prompts with k = 0 and with each k, interleaved, in rounds; and the figures of these rows.

Row = one answer: round, prompt, k, decode seconds without prefill and first token, tokens, target passes, acceptance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.drafter.replay import Interval, bootstrap


@dataclass(frozen=True)
class Request:
    round: int
    prompt: str  # row id of the conversation
    domain: str
    k: int
    prompt_tokens: int
    ids: list[int]
    finish_reason: str
    steps: int
    accepted_at: list[int]
    prefill_s: float
    decode_s: float

    @property
    def decoded(self) -> int:
        """Tokens that decode_s paid for: all but the first."""
        return len(self.ids) - 1


def order(ks: Sequence[int], turn: int) -> list[int]:
    """The k values of one prompt in one round, rotated so that none always comes first."""
    turn %= len(ks)
    return [*ks[turn:], *ks[:turn]]


def _sums(requests: Sequence[Request], prompts: list[str], k: int) -> dict[str, np.ndarray]:
    """Per prompt, summed over rounds: seconds, decoded tokens, target passes, accepted drafts."""
    out = {name: np.zeros(len(prompts)) for name in ("seconds", "tokens", "steps", "accepted")}
    place = {p: i for i, p in enumerate(prompts)}
    for r in requests:
        if r.k == k:
            i = place[r.prompt]
            out["seconds"][i] += r.decode_s
            out["tokens"][i] += r.decoded
            out["steps"][i] += r.steps
            out["accepted"][i] += sum(r.accepted_at)
    return out


def cells(requests: Sequence[Request], confidence: float) -> list[dict[str, Any]]:
    """One record per k > 0: speed-up S, cost ratio C, acceptance length tau and p_i, with bootstrap intervals over prompts.

    S = time per token at k = 0 over time per token at k. C = time per target pass at k over that at k = 0.
    A point estimate of S above tau is refused: one pass cannot give more than tau tokens in less than a plain pass's time.
    """
    prompts = sorted({r.prompt for r in requests if r.decoded > 0})
    requests = [r for r in requests if r.prompt in set(prompts)]
    base = _sums(requests, prompts, 0)
    out = []
    for k in sorted({r.k for r in requests} - {0}):
        mine = _sums(requests, prompts, k)

        def speedup(w: np.ndarray, mine: dict[str, np.ndarray] = mine) -> float:
            plain = (w * base["seconds"]).sum() / (w * base["tokens"]).sum()
            return float(plain / ((w * mine["seconds"]).sum() / (w * mine["tokens"]).sum()))

        def cost(w: np.ndarray, mine: dict[str, np.ndarray] = mine) -> float:
            plain = (w * base["seconds"]).sum() / (w * base["steps"]).sum()
            return float((w * mine["seconds"]).sum() / (w * mine["steps"]).sum() / plain)

        def tau(w: np.ndarray, mine: dict[str, np.ndarray] = mine) -> float:
            return 1 + float((w * mine["accepted"]).sum() / (w * mine["steps"]).sum())

        figures = {
            name: bootstrap(len(prompts), f, confidence)
            for name, f in (("S", speedup), ("C", cost), ("tau", tau))
        }
        steps = mine["steps"].sum()
        accepted = np.sum([r.accepted_at for r in requests if r.k == k], axis=0)
        out.append(
            {
                "k": k,
                **{name: interval._asdict() for name, interval in figures.items()},
                "p": [float(a / steps) for a in accepted],
                "tokens_per_s": float(mine["tokens"].sum() / mine["seconds"].sum()),
                "refused": refused(figures["S"], figures["tau"]),
            }
        )
    return out


def refused(speedup: Interval, tau: Interval) -> str | None:
    """Why a measurement cannot be true, or None."""
    if speedup.value <= tau.value:
        return None
    return (
        f"speed-up {speedup.value:.3f} is above the acceptance length {tau.value:.3f}: a draft-and-verify step cannot be "
        "cheaper than a plain step. The baseline was disturbed; measure again on an idle machine with more bench.rounds."
    )

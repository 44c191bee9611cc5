"""The figures of measured answers: speed-up, cost ratio, acceptance, latencies, by k and load.

Request = one answer: round, prompt, k, load, decode seconds without prefill and first token, tokens, target passes, acceptance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eyas.drafter.replay import FEWEST, Interval, bootstrap, context_range


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
    prefill_s: float  # to the first token
    decode_s: float  # from the first token to the last
    concurrency: int = 1
    began_s: float = 0.0  # since the round began
    times: tuple[float, ...] = ()  # of each chunk of a stream, since the request
    tokens: int = 0  # where there are no ids

    @property
    def decoded(self) -> int:
        """Tokens that decode_s paid for: all but the first."""
        return (len(self.ids) or self.tokens) - 1


class Counted(NamedTuple):
    """What a server's own counters say of all requests of a cell."""

    drafts: float
    accepted_at: list[float]  # by draft position
    foreign: float  # generated tokens that were not ours

    @property
    def tau(self) -> float:
        return 1 + sum(self.accepted_at) / self.drafts


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing id, or None; where one ends early, that is the difference."""
    if list(a) == list(b):
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def order(ks: Sequence[int], turn: int) -> list[int]:
    """The k values of one prompt in one round, rotated so that none always comes first."""
    turn %= len(ks)
    return [*ks[turn:], *ks[:turn]]


def _sums(requests: Sequence[Request], prompts: list[str]) -> dict[str, np.ndarray]:
    """Per prompt, summed over rounds: answers, seconds of decoding, of waiting for the first token, decoded tokens, target
    passes, accepted drafts; own_s, own_n: seconds and passes beside which no other request's prompt was read."""
    names = ("answers", "seconds", "first", "tokens", "steps", "accepted", "own_s", "own_n")
    out = {name: np.zeros(len(prompts)) for name in names}
    place = {p: i for i, p in enumerate(prompts)}
    for r, own in zip(requests, undisturbed(requests), strict=True):
        values = (1, r.decode_s, r.prefill_s, r.decoded, r.steps, sum(r.accepted_at), *own)
        for name, value in zip(names, values, strict=True):
            out[name][place[r.prompt]] += value
    return out


def undisturbed(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """Of each request, seconds and passes of the gaps between its chunks in which no other request of its round waited for its first
    token; all of them where the chunks have no times (one request at a time)."""
    waits: dict[int, np.ndarray] = {}
    for number in {r.round for r in requests}:
        waits[number] = np.array(
            [(r.began_s, r.began_s + r.prefill_s) for r in requests if r.round == number]
        )
    out = []
    for r in requests:
        if len(r.times) < 2:
            out.append((r.decode_s, float(r.steps)))
            continue
        at = r.began_s + np.array(r.times)
        begins, ends = waits[r.round].T  # [R]; the request's own wait ends where its first gap begins
        beside = ((begins < at[1:, None]) & (ends > at[:-1, None] + OWN_S)).any(1)
        clear = ~beside
        out.append((float(np.diff(at)[clear].sum()), r.steps * float(clear.mean())))
    return out


OWN_S = 2e-5  # times are rounded to 1e-5 s
Sums = dict[str, np.ndarray]
FIGURES: dict[str, Callable[[np.ndarray, Sums, Sums], float]] = {
    "S": lambda w, b, m: _rate(w, m, "tokens", "seconds") / _rate(w, b, "tokens", "seconds"),
    "S_answer": lambda w, b, m: _whole(w, m) / _whole(w, b),
    "C": lambda w, b, m: _rate(w, m, "seconds", "steps") / _rate(w, b, "seconds", "steps"),
    "C_decode": lambda w, b, m: _rate(w, m, "own_s", "own_n") / _rate(w, b, "own_s", "own_n"),
    "tau": lambda w, b, m: 1 + _rate(w, m, "accepted", "steps"),
    "ttft_s": lambda w, b, m: _rate(w, m, "first", "answers"),
    "tpot_s": lambda w, b, m: _rate(w, m, "seconds", "tokens"),
}
PLAIN = ("ttft_s", "tpot_s")


def _rate(w: np.ndarray, sums: Sums, above: str, below: str) -> float:
    return float((w * sums[above]).sum() / (w * sums[below]).sum())


def _whole(w: np.ndarray, sums: Sums) -> float:
    """Tokens a second of whole answers, the wait for the first token included."""
    seconds = sums["seconds"] + sums["first"]
    return float((w * (sums["tokens"] + sums["answers"])).sum() / (w * seconds).sum())


def _interval(name: str, prompts: list[str], base: Sums, of: Sums, confidence: float) -> Interval:
    return bootstrap(len(prompts), lambda w: FIGURES[name](w, base, of), confidence)


def cells(
    requests: Sequence[Request],
    confidence: float,
    walls: Mapping[tuple[int, int], float] | None = None,
    counted: Mapping[tuple[int, int], Counted] | None = None,
) -> list[dict[str, Any]]:
    """One record per load and k > 0, with bootstrap intervals over prompts.

    S = time per token at k = 0 over time per token at k, after the first token; S_answer: the same of whole answers, their
    wait for the first token included. C = time per target pass at k over that at k = 0; C_decode: of the passes beside which no other
    request's prompt was read, which is what breaks even (others' prompts fall on fewer passes, the more a drafter gives). tau and p_i: from the answers, or from
    the server's own counters. ttft_s: mean time to the first token; tpot_s: time per output token after it.
    walls: seconds that all rounds of (load, k) took; counted: what the server counted in them.
    contexts: S, C and tau by tokens of context in the middle of an answer, in ranges that at least FEWEST prompts fall in.
    A point estimate of S above tau is refused: one pass cannot give more than tau tokens in less than a plain pass's time.
    """
    out = []
    for load in sorted({r.concurrency for r in requests}):
        here = [r for r in requests if r.concurrency == load and r.decoded > 0]
        ks = sorted({r.k for r in here} - {0})
        plain = [r for r in here if r.k == 0]
        for k in ks:
            mine = [r for r in here if r.k == k]
            prompts = sorted({r.prompt for r in plain} & {r.prompt for r in mine})
            both = [[r for r in side if r.prompt in set(prompts)] for side in (plain, mine)]
            if prompts:
                out.append(
                    _cell(load, k, both, prompts, confidence, walls or {}, (counted or {}).get((load, k)))
                )
    return out


def _cell(
    load: int,
    k: int,
    both: list[list[Request]],
    prompts: list[str],
    confidence: float,
    walls: Mapping[tuple[int, int], float],
    counted: Counted | None,
) -> dict[str, Any]:
    base, mine = (_sums(side, prompts) for side in both)
    stepped = mine["steps"].sum() > 0
    known = {
        "C": stepped,
        "tau": stepped,
        "C_decode": stepped and bool((mine["own_n"] > 0).all() and (base["own_n"] > 0).all()),
    }
    figures = {
        name: _interval(name, prompts, base, mine, confidence) for name in FIGURES if known.get(name, True)
    }
    p = None
    if stepped:
        p = [float(a / mine["steps"].sum()) for a in np.sum([r.accepted_at for r in both[1]], axis=0)]
    if counted and counted.drafts and not counted.foreign:
        figures["tau"] = _moved(figures.get("tau"), counted.tau)
        p = [n / counted.drafts for n in counted.accepted_at]
    throughput = {
        name: sum(r.decoded + 1 for r in side) / walls[load, n]
        for name, side, n in (("baseline", both[0], 0), ("drafter", both[1], k))
        if walls.get((load, n))
    }
    return {
        "k": k,
        "concurrency": load,
        "C": None,
        "C_decode": None,
        "tau": None,
        **{name: f._asdict() for name, f in figures.items()},
        "contexts": _by_context(both, prompts, confidence),
        "baseline": {name: _interval(name, prompts, base, base, confidence)._asdict() for name in PLAIN},
        "p": p,
        "tokens_per_s": float(mine["tokens"].sum() / mine["seconds"].sum()),
        "throughput_tokens_per_s": throughput or None,
        "refused": refused(figures["S"], figures.get("tau")),
    }


def _by_context(both: list[list[Request]], prompts: list[str], confidence: float) -> list[dict[str, Any]]:
    ranges: dict[tuple[int, int], set[str]] = {}
    for r in both[0]:
        ranges.setdefault(context_range(r.prompt_tokens + r.decoded // 2), set()).add(r.prompt)
    out = []
    for (low, below), here in sorted(ranges.items()):
        names = [p for p in prompts if p in here]
        if len(names) < FEWEST:
            continue
        base, mine = (_sums([r for r in side if r.prompt in here], names) for side in both)
        known = ("S", "C", "tau") if mine["steps"].sum() > 0 else ("S",)
        found = {n: _interval(n, names, base, mine, confidence) for n in known}
        figures = {name: f._asdict() for name, f in found.items()}
        out.append({"from": low, "below": below, "prompts": len(names), "C": None, "tau": None, **figures})
    return out


def alone(requests: Sequence[Request], confidence: float) -> dict[str, Any]:
    """ttft_s, tpot_s and tau (None where steps are unknown) of one server's answers, with intervals over prompts."""
    requests = [r for r in requests if r.decoded > 0]
    prompts = sorted({r.prompt for r in requests})
    sums = _sums(requests, prompts)
    names = (*PLAIN, "tau") if sums["steps"].sum() else PLAIN
    made = {n: _interval(n, prompts, sums, sums, confidence) for n in names}
    return {"tau": None, **{n: f._asdict() for n, f in made.items()}}


def _moved(interval: Interval | None, value: float) -> Interval:
    """The server's count, with the relative width that resampling the prompts gives."""
    if interval is None:
        return Interval(value, value, value)
    scale = (value - 1) / (interval.value - 1) if interval.value > 1 else 1.0
    return Interval(value, 1 + (interval.low - 1) * scale, 1 + (interval.high - 1) * scale)


def refused(speedup: Interval, tau: Interval | None) -> str | None:
    """Why a measurement cannot be true, or None."""
    if tau is None or speedup.value <= tau.value:
        return None
    return (
        f"speed-up {speedup.value:.3f} is above the acceptance length {tau.value:.3f}: a draft-and-verify step cannot be "
        "cheaper than a plain step. The baseline was disturbed; measure again on an idle machine with more bench.rounds."
    )

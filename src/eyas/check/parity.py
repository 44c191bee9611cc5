"""Served parity: does a running engine accept what the replay of the same answers says it should, step by step?

    eyas check DRAFTER --target T --probe --url U

The server answers greedily, alone and beside other requests, to short prompts and to long ones. What came in each chunk of a stream is a
step of the engine: how many drafts it accepted there. The target's states of these very answers are computed here, and the drafter is
replayed at the positions where the engine drafted. So the two are compared pair by pair, in some ten kinds of steps, and where one kind falls
off alone, that names the cause (causes.py).
"""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from eyas.causes import Finding, error, info, ranked, unknown
from eyas.check.probing import Place, Prompt, render
from eyas.drafter import facts, opening, replay
from eyas.drafter.replay import Interval
from eyas.engines import hf, reading, vllm
from eyas.engines.reading import Said
from eyas.errors import UsageError
from eyas.progress import say, table
from eyas.servers import client, metrics
from eyas.servers.client import COMPLETIONS, Client, Reply
from eyas.servers.metrics import Counters
from eyas.stores.states import RowStates
from eyas.target import Target

ALONE, BATCHED, LONG = 12, 32, 12  # prompts: one at a time, AT_ONCE at a time, and with a history
AT_ONCE, TOKENS, LONG_TOKENS = 8, 48, 1024
MOST_K = 16
CONFIDENCE = 0.99
APART = 0.03  # of the drafts, below which a difference is numerics
LEAST = 12  # steps of a kind, below which it says nothing
ROOM = 8  # tokens that a request leaves free


class Kind(NamedTuple):
    """A kind of steps."""

    place: str  # alone | batched | cached (alone, the prompt found in the prefix cache)
    length: str  # short | long
    step: str  # first | later

    def __str__(self) -> str:
        return f"{self.place}, {self.length}, {'first step' if self.step == 'first' else 'later steps'}"


class Step(NamedTuple):
    """A step of the engine: at which live position of its row, and how many drafts were accepted."""

    at: int
    accepted: int


class Answer(NamedTuple):
    """A request that was answered: where, of which length, and its steps."""

    place: str
    length: str
    said: Said
    steps: list[Step]


class Cell(NamedTuple):
    """A kind of steps, measured: shares of first drafts that were accepted, served and replayed at the same positions, and of deeper
    drafts, of those whose predecessor was right."""

    kind: Kind
    steps: int
    served: float
    replayed: float
    apart: Interval  # served minus replayed, over answers
    deep: Interval | None  # the same of deeper drafts

    @property
    def lower(self) -> bool:
        return self.steps >= LEAST and self.apart.high < 0 and self.apart.value < -APART

    @property
    def higher(self) -> bool:
        return self.steps >= LEAST and self.apart.low > 0 and self.apart.value > APART

    @property
    def falls(self) -> bool:
        """Deeper drafts fall off."""
        return (
            self.deep is not None and self.steps >= LEAST and self.deep.high < 0 and self.deep.value < -APART
        )

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {
            "kind": self.kind._asdict(),
            "apart": self.apart._asdict(),
            "deep": self.deep and self.deep._asdict(),
        }


def look(
    folder: Path, target: Target, url: str, prompts: Sequence[Prompt], place: Place
) -> tuple[list[Finding], dict[str, Any]]:
    """Compare a running server with the replay of its own answers; prints the cells, and returns findings and the parity part of probe.json.

    Raises UsageError where the server drafts nothing or returns no token ids, ContractError where the drafter cannot be computed here.
    """
    url = url.rstrip("/")
    f = facts.gather(folder, target)
    held = opening.read(f, target)
    device = hf.choose_device().value
    dtype = hf.choose_dtype(place.dtype, device).value
    if why := reading.too_large(target, dtype, device):
        raise UsageError(
            f"served parity: {why}: the server's answers cannot be replayed without the target's states"
        )
    say(f"  served parity: asking {url} alone and {AT_ONCE} at once, short and long prompts …")
    answers, counted, k = ask(url, target, prompts, place)
    say(f"  {len(answers)} answers of {url}, k={k}")
    layers = held.drafter.contract.aux_layers
    engine = hf.HFEngine(target, dtype, device, layers, place.remote_code)
    unique, of = shared([a.said for a in answers])
    rows = reading.states_of(engine, unique, None)
    say(f"  read by the target here: {sum(map(len, rows)):,} tokens of {len(rows)} different answers")
    accepted = replayed(held.drafter.to(device), held.embedding_VD.to(device), rows, k)
    cells = compare(answers, [accepted[i] for i in of], k)
    show(cells)
    found = list(findings(cells))
    return found, {"url": url, "k": k, "cells": [c.as_json() for c in cells], "counters": counted}


def shared(said: Sequence[Said]) -> tuple[list[Said], list[int]]:
    """The conversations that no other one begins with, and of each conversation the one that begins with it."""
    unique: list[Said] = []
    of = [0] * len(said)
    for i in sorted(range(len(said)), key=lambda i: -len(said[i].ids)):
        n = len(said[i].ids)
        same = (j for j, u in enumerate(unique) if u.start == said[i].start and u.ids[:n] == said[i].ids)
        of[i] = next(same, len(unique))
        if of[i] == len(unique):
            unique.append(said[i])
    return unique, of


# ---- asking ----


def ask(
    url: str, target: Target, prompts: Sequence[Prompt], place: Place
) -> tuple[list[Answer], list[float] | None, int]:
    """Answers with their steps; what the server counted at each draft position, as shares; k.

    Raises UsageError where the server returns no ids or drafts nothing."""
    model = client.served(url)
    room = (model.longest or target.context) - TOKENS - ROOM
    tokenizer = target.tokenizer(place.remote_code)
    ids = {p.name: found for p in prompts if (found := render(tokenizer, p.messages, room))}
    short = list(ids)
    if not short:
        raise UsageError(
            f"served parity: no prompt fits into {url}, whose requests have {room:,} tokens at most"
        )
    before = metrics.read(url, vllm.COUNTERS)
    asked = [(name, ids[name]) for name in short]
    alone = _wave(url, model.name, asked[:ALONE], TOKENS, 1)
    batched = _wave(url, model.name, asked[:BATCHED], TOKENS, AT_ONCE)
    wanted = min(LONG_TOKENS, room // 2)
    texts = [ids[name] + (r.ids or []) for name, r in zip(short, batched, strict=False)]
    long = [(name, _history(texts, ids[name], number, wanted)) for number, name in enumerate(short[-LONG:])]
    salt = uuid.uuid4().hex  # what is asked with it once is found in the prefix cache afterwards
    long_alone = _wave(url, model.name, long, TOKENS, 1, salt)
    long_batched = _wave(url, model.name, long, TOKENS, AT_ONCE)
    after = metrics.read(url, vllm.COUNTERS)
    shares, k = _counted(before, after, url)
    one = k + 2  # tokens: the prompt's own, and one whole step
    firsts = [_wave(url, model.name, asked, one, n, salt if n == 1 else None) for n in (1, AT_ONCE)]
    cached = _wave(url, model.name, [*asked, *long], one, 1, salt)
    parts = [
        ("alone", "short", alone, asked), ("batched", "short", batched, asked), ("alone", "long", long_alone, long),
        ("batched", "long", long_batched, long), ("alone", "short", firsts[0], asked), ("batched", "short", firsts[1], asked),
        ("cached", "short", cached[: len(asked)], asked), ("cached", "long", cached[len(asked) :], long),
    ]  # fmt: skip
    out = []
    for where, length, replies, names in parts:
        for (name, prompt), reply in zip(names, replies, strict=False):
            steps = steps_of(reply.chunks, k, reply.finish_reason)
            if steps and reply.ids:
                out.append(Answer(where, length, Said(name, [*prompt, *reply.ids], len(prompt)), steps))
    if not out:
        raise UsageError(f"served parity: {url} gave no answer with a step that could be told")
    return out, shares, k


def _wave(
    url: str, model: str, asked: Sequence[tuple[str, list[int]]], tokens: int, at_once: int, salt: str | None = None
) -> list[Reply]:  # fmt: skip
    """Streamed greedy answers. salt: of the prefix cache; without one, nothing is found in it."""
    common = {"model": model, "max_tokens": tokens, "temperature": 0.0}
    bodies = [common | {"prompt": ids, "cache_salt": salt or uuid.uuid4().hex} for _, ids in asked]

    async def work() -> list[Reply]:
        async with Client(url) as asking:
            return await client.gather(asking.stream, COMPLETIONS, bodies, at_once)

    replies: list[Reply] = client.run(work())
    if all(r.ids is None for r in replies):  # an empty answer alone has none either
        raise UsageError(
            f"served parity: {url} returns no token ids (return_token_ids, which vLLM answers since 0.10.2): its steps cannot be told"
        )
    return replies


def _history(texts: Sequence[list[int]], prompt: list[int], number: int, wanted: int) -> list[int]:
    """A prompt after other conversations, ids end to end, from another one on each time."""
    out: list[int] = []
    for at in range(len(texts)):
        if len(out) + len(prompt) >= wanted:
            break
        out += texts[(number * 5 + at) % len(texts)]
    return [*out[: max(0, wanted - len(prompt))], *prompt]


def _counted(before: Counters | None, after: Counters | None, url: str) -> tuple[list[float] | None, int]:
    """Shares of drafts that the server counted as accepted, by position, and k."""
    if before is None or after is None:
        raise UsageError(
            f"served parity: {url}/metrics does not count drafts: is it vLLM, with its statistics on?"
        )
    since = after.since(before)
    if not since.drafts or not since.drafted:
        raise UsageError(
            f"served parity: {url} drafts nothing: its speculation is off. Look at its command line."
        )
    k = min(MOST_K, round(since.drafted / since.drafts))
    return [since.accepted_at.get(i, 0.0) / since.drafts for i in range(k)], k


def steps_of(chunks: Sequence[int], k: int, finish: str) -> list[Step]:
    """The steps of a stream: the first chunk is the prompt's own token, each later one a step. The last one is left out where the end of
    the answer may have cut it, and all from a chunk on that holds more than one step."""
    if not chunks or chunks[0] != 1:
        return []
    out = []
    emitted = 1
    for number, n in enumerate(chunks[1:], start=1):
        last = number == len(chunks) - 1
        if not 1 <= n <= k + 1:
            break
        if not last or (finish == "length" and n == k + 1):
            out.append(Step(emitted - 1, n - 1))
        emitted += n
    return out


# ---- comparing ----


@torch.no_grad()
def replayed(drafter: Any, embedding_VD: torch.Tensor, rows: Sequence[RowStates], k: int) -> list[list[int]]:
    """Accepted drafts at each live position of each row; empty for a row of one token."""
    out: list[list[int]] = [[] for _ in rows]
    usable = [i for i, r in enumerate(rows) if len(r) - r.start >= 2]
    found = replay.accepted_lengths(drafter, embedding_VD, [rows[i] for i in usable], k)
    for i, accepted in zip(usable, found, strict=True):
        out[i] = accepted
    return out


def compare(answers: Sequence[Answer], accepted: Sequence[list[int]], k: int) -> list[Cell]:
    """Cells of the kinds that have steps. accepted: of each answer, by live position."""
    pairs: dict[Kind, list[list[tuple[int, int]]]] = {}
    for a, row in zip(answers, accepted, strict=True):
        by_step: dict[str, list[tuple[int, int]]] = {"first": [], "later": []}
        for step in a.steps:
            if step.at < len(row):
                by_step["later" if step.at else "first"].append((step.accepted, row[step.at]))
        for name, found in by_step.items():
            if found:
                pairs.setdefault(Kind(a.place, a.length, name), []).append(found)
    return [_cell(kind, found, k) for kind, found in sorted(pairs.items(), reverse=True)]


def _cell(kind: Kind, answers: list[list[tuple[int, int]]], k: int) -> Cell:
    served = np.array([sum(s > 0 for s, _ in a) for a in answers], dtype=float)
    ours = np.array([sum(r > 0 for _, r in a) for a in answers], dtype=float)
    counts = np.array([len(a) for a in answers], dtype=float)
    apart = replay.bootstrap(
        len(answers), lambda w: float((w * (served - ours)).sum() / max((w * counts).sum(), 1e-9)), CONFIDENCE
    )
    deep = None
    both = [
        [(s, r) for s, r in a if s > 0 and r > 0] for a in answers
    ]  # where the first draft was right in both
    if k > 1 and sum(map(len, both)) >= LEAST:
        more = np.array([sum((s > 1) - (r > 1) for s, r in a) for a in both], dtype=float)
        of = np.array([len(a) for a in both], dtype=float)
        deep = replay.bootstrap(
            len(both), lambda w: float((w * more).sum() / max((w * of).sum(), 1e-9)), CONFIDENCE
        )
    total = counts.sum()
    return Cell(kind, int(total), float(served.sum() / total), float(ours.sum() / total), apart, deep)


def signs(cells: Sequence[Cell]) -> set[str]:
    """What the cells that fall off have in common, and the others have not."""
    low = [c for c in cells if c.lower]
    if not low:
        others = {"deep": any(c.falls for c in cells), "more": any(c.higher for c in cells)}
        return {sign for sign, there in others.items() if there}
    out: set[str] = set()
    effect = sum(c.apart.value * c.steps for c in low) / sum(c.steps for c in low)
    sound = [
        c for c in cells if c.steps >= LEAST and c.apart.low > effect / 2
    ]  # these surely do not fall off so
    told = {
        "place": {"batched": "batched", "cached": "cached"},
        "length": {"long": "long"},
        "step": {"first": "prompt", "later": "later"},
    }
    for field, names in told.items():
        where = {getattr(c.kind, field) for c in low}
        fine = {getattr(c.kind, field) for c in sound}
        out |= {sign for value, sign in names.items() if where == {value} and fine - {value}}
    return out or {"everywhere"}


def findings(cells: Sequence[Cell]) -> list[Finding]:
    """Agreement, or the causes in their order."""
    if all(c.steps < LEAST for c in cells):
        return [
            unknown(
                "parity",
                f"no kind of step was seen {LEAST} times: nothing can be said",
                "let the server answer longer",
            )
        ]
    found = signs(cells)
    off = [c for c in cells if c.lower or c.higher or c.falls]
    if not found:
        total = sum(c.steps for c in cells)
        share = [sum(getattr(c, n) * c.steps for c in cells) / total for n in ("served", "replayed")]
        return [
            info(
                "parity",
                f"the engine runs this drafter as the replay does: first drafts accepted {share[0]:.1%}, replayed {share[1]:.1%} at the same "
                f"{total:,} steps, and no kind of step falls off",
            )
        ]
    causes = ranked(found)
    deep = found == {"deep"}
    ordered = sorted(off, key=lambda c: c.deep.value if deep and c.deep else c.apart.value)
    where = "; ".join(_where(c, deep) for c in ordered[:4])
    said = "; ".join(f"({i}) {c.what}" for i, c in enumerate(causes[:3], start=1))
    steps = "; then ".join(dict.fromkeys(c.experiment for c in causes[:3]))
    what = "deeper drafts" if deep else "first drafts"
    return [
        error(
            "parity",
            f"the engine accepts other {what} than the replay at the same positions ({where}). Likeliest: {said}",
            steps,
        )
    ]


def _where(c: Cell, deep: bool) -> str:
    """A kind of steps with how it is apart."""
    if deep and c.deep:
        return f"{c.kind}: {c.deep.value:+.1%} of {c.steps:,} steps' deeper drafts"
    return f"{c.kind}: {c.served:.1%} against {c.replayed:.1%} of {c.steps:,} steps"


def show(cells: Sequence[Cell]) -> None:
    rows = [["steps of the engine", "number", "served", "replayed", "apart", "deeper drafts apart"]]
    for c in cells:
        a, d = c.apart, c.deep
        rows.append([
            str(c.kind), f"{c.steps:,}", f"{c.served:.1%}", f"{c.replayed:.1%}", f"{a.value:+.3f} [{a.low:+.3f}, {a.high:+.3f}]",
            f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" if d else "",
        ])  # fmt: skip
    table(rows)

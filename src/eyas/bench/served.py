"""bench on servers that eyas starts: the target without a drafter, and with each k, side by side where they fit.

Reads drafter/best and the held-out conversations. Writes what session.py keeps, bench/requests.parquet and bench.json.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from eyas.bench import session as sessions
from eyas.bench import shown
from eyas.bench.load import Ask, Place, end_to_end
from eyas.bench.measure import Request
from eyas.bench.session import Session
from eyas.drafter import disk, replay
from eyas.engines import vllm
from eyas.engines.hf import HFEngine
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.servers import serve
from eyas.stores.conversations import Row
from eyas.stores.states import RowStates


def run(resolved: Resolved, rundir: RunDir, rows: list[Row]) -> dict[str, Any]:
    """Measure every k against the plain server at every load; returns the manifest's body."""
    options, temperature = resolved.recipe.bench, resolved.recipe.generate.temperature
    asks = [Ask(r.row_id, r.domain, r.prompt_ids, None) for r in rows]
    whole = [r.ids for r in rows]
    session = Session(rundir / "bench", options, asks, lambda tokens: end_to_end(whole, tokens), temperature)
    how = _visits(resolved, rundir, session)
    cells = session.cells(options.k, resolved.recipe.verdict.confidence)
    replayed = replays(resolved, rundir, session, asks)
    for cell in cells:
        found = replayed.get(cell["k"])
        cell |= {"tau_replayed": found and found["tau"], "p_replayed": found and found["p"]}
        shown.cell(cell)
    sessions.warn(cells)
    requests = session.requests(options.k)
    shown.write_parquet(rundir, requests)
    plain = [r for r in requests if r.k == 0 and r.concurrency == session.lowest]
    return {
        "content": len(requests),
        "engine": how["engine"],
        "side_by_side": how["together"],
        "lengths": options.lengths,
        "concurrency": options.concurrency,
        "dtype": resolved.dtype,
        "device": resolved.device,
        "prompts": len(rows),
        "baseline_tokens_per_s": sum(r.decoded for r in plain) / sum(r.decode_s for r in plain),
        "cells": cells,
    }


def _visits(resolved: Resolved, rundir: RunDir, session: Session) -> dict[str, Any]:
    """Start what is needed, measure, stop. Side by side: all servers up, each load on each in turn. Otherwise one after
    another, the plain one before and after the others, so that a drift of the machine shows in both halves."""
    ks, rounds = session.options.k, range(session.options.rounds)
    found = vllm.find(resolved.recipe.engine.python, resolved.recipe.engine.command)
    name = found.label
    if note := vllm.untested(found.version):
        say(f"  note: {note}")
    room = serve.fit_together(resolved, 1 + len(ks))
    if room.value:
        say(f"  {1 + len(ks)} servers side by side: {room.reason}")
        if not session.judged() or any(session.missing(k, rounds) for k in (0, *ks)):
            _visit(resolved, rundir, session, [0, *ks], rounds, last=True)
    else:
        say(f"  servers one after another: {room.reason}")
        half = len(rounds) // 2
        if half and session.missing(0, rounds[:half]):
            _visit(resolved, rundir, session, [0], rounds[:half])
        for k in ks:
            if session.missing(k, rounds):
                _visit(resolved, rundir, session, [k], rounds)
        if session.missing(0, rounds) or not session.judged():
            _visit(resolved, rundir, session, [0], rounds[half:], last=True)
    return {"engine": name, "together": bool(room.value)}


def _visit(
    resolved: Resolved, rundir: RunDir, session: Session, ks: list[int], rounds: range, last: bool = False
) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve.running(resolved, rundir, f"bench-k{k}", k)) for k in ks]
        places = [
            Place(
                s.url,
                s.model,
                k,
                f"{s.engine} with k={k}" if k else f"{s.engine} without drafter",
                vllm.COUNTERS,
            )
            for s, k in zip(servers, ks, strict=True)
        ]
        session.measure(places, rounds)
        if last:
            session.judge(places[0], session.options.k)


@torch.inference_mode()
def replays(
    resolved: Resolved, rundir: RunDir, session: Session, asks: Sequence[Ask]
) -> dict[int, dict[str, Any]]:
    """Replayed tau and p_i of each k on the plain server's own greedy answers; nothing where answers were sampled."""
    if session.options.temperature > 0:
        return {}
    answers: dict[str, Request] = {r.prompt: r for r in reversed(session.read(0, session.lowest)[0].requests)}
    engine = HFEngine(
        resolved.target, resolved.dtype, resolved.device, resolved.aux_layers,
        resolved.recipe.target.trust_remote_code,
    )  # fmt: skip
    drafter = disk.read(rundir / "drafter" / "best", getattr(torch, resolved.dtype), resolved.device)
    rows = [_states(engine, a.row_id, a.prompt_ids or [], answers[a.row_id].ids) for a in asks]
    embedding = engine.model.get_input_embeddings().weight
    accepted = replay.accepted_lengths(drafter, embedding, rows, max(session.options.k))
    out = {}
    for k in session.options.k:
        walks = [replay.walk(a, k) for a in accepted]
        out[k] = {"tau": replay.tau(walks), "p": replay.positions(walks)}
    return out


def _states(engine: HFEngine, name: str, prompt: list[int], answer: list[int]) -> RowStates:
    ids = [*prompt, *answer]
    seen = engine.states([ids])
    return RowStates(
        name, torch.tensor(ids, dtype=torch.int32), seen.aux_BTLD[0].cpu(), seen.last_BTD[0].cpu(),
        seen.top1_BT[0].int().cpu(), len(prompt),
    )  # fmt: skip

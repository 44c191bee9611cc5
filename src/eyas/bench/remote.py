"""bench of servers that run already: eyas starts and stops nothing.

    eyas bench --url http://host:8000 [--baseline http://host:8001] [RECIPE]

Prompts are sent as chat once, and from then on as the ids that the servers say they have read; servers that return no ids are
measured by chat, and nothing is known of their steps.
"""

import math
from collections.abc import Sequence
from typing import Any

from eyas import __version__
from eyas.bench import measure, session, shown
from eyas.bench.load import Ask, Place, end_to_end
from eyas.bench.session import Session
from eyas.engines import vllm
from eyas.errors import UsageError
from eyas.progress import say
from eyas.recipe import Recipe
from eyas.rundir import RunDir, write_json
from eyas.servers import client, metrics
from eyas.servers.client import CHAT, Client, Reply

TRY_TOKENS = 16  # of the answers from which k is learned


def run(
    url: str, baseline: str | None, prompts: Sequence[Any], options: Recipe, rundir: RunDir
) -> dict[str, Any]:
    """Measure a drafting server, against a plain one where there is one; returns bench.json.

    Raises UsageError where the two do not serve the same target, or the one that should draft does not.
    """
    url, baseline = url.rstrip("/"), baseline.rstrip("/") if baseline else None
    asks, other = _tokenised(url, prompts), _tokenised(baseline, prompts) if baseline else None
    _refuse_unlike(url, asks, baseline, other)
    if other and any(a.prompt_ids is None for a in other):
        asks = other  # as chat on both
    drafting = _place(url, _drafts(url, asks), f"the server at {url}")
    places = [drafting]
    if baseline:
        if _drafts(baseline, asks):
            raise UsageError(
                f"{baseline} drafts too: the baseline must serve the target without speculation."
            )
        if not drafting.k:
            raise UsageError(
                f"{url} drafts nothing: its speculation is off, or its counters are hidden. Look at its command line."
            )
        places.insert(0, _place(baseline, 0, f"the server at {baseline}"))
    made = Session(
        rundir / "bench", options.bench, asks, lambda n: _long(asks, n), options.generate.temperature
    )
    made.measure(places, range(options.bench.rounds))
    body: dict[str, Any] = {
        "stage": "bench", "url": url, "baseline": baseline, "engine": url, "dtype": "", "device": "", "side_by_side": True,
        "lengths": options.bench.lengths, "concurrency": options.bench.concurrency, "prompts": len(asks), "cells": [],
        "eyas": __version__,
    }  # fmt: skip
    if baseline:
        made.judge(places[0], [drafting.k])
        body["cells"] = made.cells([drafting.k], options.verdict.confidence)
        for cell in body["cells"]:
            cell |= {"tau_replayed": None, "p_replayed": None}
            shown.cell(cell)
        session.warn(body["cells"])
    body["alone"] = _alone(made, drafting, options)
    shown.write_parquet(rundir, made.requests([drafting.k] if drafting.k else []))
    write_json(rundir / "bench.json", body)
    say(f"  written: {rundir / 'bench.json'}")
    return body


def _place(url: str, k: int, label: str) -> Place:
    return Place(url, client.served(url).name, k, label, vllm.COUNTERS)


def _chat(url: str, prompts: Sequence[list[dict[str, str]]], tokens: int) -> list[Reply]:
    model = client.served(url).name
    bodies = [{"model": model, "messages": m, "max_tokens": tokens, "temperature": 0.0} for m in prompts]

    async def work() -> list[Reply]:
        async with Client(url) as asking:
            return await client.gather(asking.whole, CHAT, bodies, 4)

    return client.run(work())


def _tokenised(url: str, prompts: Sequence[Any]) -> list[Ask]:
    """The prompts as a server reads them."""
    messages = [
        [{"role": "system", "content": p.system}] * (p.system is not None)
        + [{"role": "user", "content": p.turns[0]}]
        for p in prompts
    ]
    replies = _chat(url, messages, 1)
    return [
        Ask(p.prompt_id, p.domain, r.prompt_ids, m)
        for p, m, r in zip(prompts, messages, replies, strict=True)
    ]


def _refuse_unlike(url: str, asks: Sequence[Ask], baseline: str | None, other: Sequence[Ask] | None) -> None:
    for a, b in zip(asks, other or [], strict=False):
        if a.prompt_ids and b.prompt_ids and a.prompt_ids != b.prompt_ids:
            raise UsageError(
                f"{url} and {baseline} read the same prompt as other ids ({a.prompt_ids[:8]} …, {b.prompt_ids[:8]} …): they do not "
                "serve the same target with the same template, so nothing can be compared."
            )


def _drafts(url: str, asks: Sequence[Ask]) -> int:
    """Drafted tokens a step, by the counters over some short answers; 0 where nothing is drafted or counted."""
    before = metrics.read(url, vllm.COUNTERS)
    _chat(url, [a.messages or [] for a in asks[:4]], TRY_TOKENS)
    after = metrics.read(url, vllm.COUNTERS)
    if before is None or after is None:
        return 0
    since = after.since(before)
    return math.ceil(since.drafted / since.drafts) if since.drafts else 0


def _long(asks: Sequence[Ask], tokens: int) -> Ask:
    if any(a.prompt_ids is None for a in asks):
        text = " ".join(str((a.messages or [])[-1]["content"]) for a in asks)
        words = (text.split() * (1 + tokens // max(1, len(text.split()))))[
            : tokens // 2
        ]  # a word is mostly less than two tokens
        return Ask("long", "long", None, [{"role": "user", "content": " ".join(words)}])
    return end_to_end([a.prompt_ids or [] for a in asks], tokens)


def _alone(made: Session, place: Place, options: Recipe) -> list[dict[str, Any]]:
    """The drafting server by itself, load by load."""
    out = []
    for load in options.bench.concurrency:
        rounds = made.read(place.k, load)
        requests = [r for round_ in rounds for r in round_.requests]
        figures = measure.alone(requests, options.verdict.confidence)
        total = sum(r.decoded + 1 for r in requests) / sum(r.wall_s for r in rounds)
        out.append({"concurrency": load, "k": place.k, "throughput_tokens_per_s": total, **figures})
        tau = f", tau {figures['tau']['value']:.3f}" if figures["tau"] else ""
        say(
            f"  {load} at once: first token {figures['ttft_s']['value']:.2f} s, {1 / figures['tpot_s']['value']:.1f} tokens/s a user, "
            f"{total:.1f} in all{tau}"
        )
    return out

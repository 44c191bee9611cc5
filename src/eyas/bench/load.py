"""A load on one server: so many requests in flight until all prompts are answered, each answer streamed and timed.

Every request carries its own cache salt, so that no prompt is found in a prefix cache; what a server's counters say is
read before and after, so that traffic which is not ours shows.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from eyas.bench.measure import Request
from eyas.errors import SurroundingsError
from eyas.servers import client, metrics
from eyas.servers.client import CHAT, COMPLETIONS, Client, Reply
from eyas.servers.metrics import Counters

WAVES = 3  # at least this many requests a place, so that a load lasts beyond its start and end
WARM_TOKENS = 16
WARM_LIMIT_S = 600.0
CRAWL = 10.0  # times what the warm-up took for each token
CRAWL_FLOOR_S = 60.0
SETTLE_S = 3.0  # counters may lag behind the last answer


class Place(NamedTuple):
    """A server to measure."""

    url: str
    model: str
    k: int
    label: str
    counters: Mapping[str, str]  # its names of them


class Ask(NamedTuple):
    """One prompt: as exact ids, or as messages where no tokenizer is known."""

    row_id: str
    domain: str
    prompt_ids: list[int] | None
    messages: list[dict[str, str]] | None

    def request(self, place: Place, **options: Any) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body = {"model": place.model, "cache_salt": uuid.uuid4().hex, **options}
        if self.prompt_ids is not None:
            return COMPLETIONS, body | {"prompt": self.prompt_ids}
        return CHAT, body | {"messages": self.messages}


def end_to_end(parts: Sequence[list[int]], tokens: int) -> Ask:
    """A long prompt: ids of conversations one after another, again from the first, cut at `tokens`."""
    ids = [i for part in parts for i in part]
    return Ask("long", "long", (ids * (1 + tokens // len(ids)))[:tokens], None)


class Load(NamedTuple):
    concurrency: int
    max_tokens: int
    temperature: float
    fixed: bool  # all answers have max_tokens

    def options(self) -> dict[str, Any]:
        fixed = {"ignore_eos": True, "min_tokens": self.max_tokens} if self.fixed else {}
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, **fixed}


class Round(NamedTuple):
    """A load, measured once."""

    requests: list[Request]
    wall_s: float
    counters: Counters | None  # differences over the round
    prompt_tokens: int

    @property
    def foreign(self) -> float:
        """Generated tokens that were not ours."""
        ours = sum(r.decoded + 1 for r in self.requests)
        return max(0.0, self.counters.generated - ours) if self.counters else 0.0

    def as_json(self) -> dict[str, Any]:
        counters = self.counters and self.counters._asdict()
        body = {"wall_s": self.wall_s, "counters": counters, "prompt_tokens": self.prompt_tokens}
        return body | {"requests": [asdict(r) for r in self.requests]}


def read_round(body: dict[str, Any]) -> Round:
    """A round as `as_json` wrote it."""
    counters = body["counters"]
    if counters:
        at = {int(i): n for i, n in counters["accepted_at"].items()}
        counters = Counters(**(counters | {"accepted_at": at}))
    requests = [Request(**(r | {"times": tuple(r["times"])})) for r in body["requests"]]
    return Round(requests, body["wall_s"], counters, body["prompt_tokens"])


def warm_up(place: Place, asks: Sequence[Ask], load: Load) -> float:
    """Short answers at this load, then the seconds that an answer of max_tokens may take before the server counts as
    crawling."""
    short = load._replace(max_tokens=min(WARM_TOKENS, load.max_tokens))
    made = measure(place, list(asks)[: load.concurrency], short, -1, WARM_LIMIT_S)
    each = max((r.prefill_s + r.decode_s) / (r.decoded + 1) for r in made.requests)
    return max(CRAWL_FLOOR_S, CRAWL * each * load.max_tokens)


def wanted(asks: Sequence[Ask], concurrency: int) -> list[Ask]:
    """All prompts, and again from the first where they are too few for the load."""
    count = max(len(asks), WAVES * concurrency if concurrency > 1 else 0)
    return [asks[i % len(asks)] for i in range(count)]


def measure(place: Place, asks: Sequence[Ask], load: Load, number: int, limit_s: float) -> Round:
    """Answer all asks, `concurrency` at a time.

    Raises SurroundingsError where the server dies, stalls, breaks off or crawls (an answer takes more than limit_s).
    """
    before = metrics.read(place.url, place.counters)
    began = time.perf_counter()
    try:
        requests = client.run(_wave(place, asks, load, number, limit_s))
    except SurroundingsError as e:
        raise SurroundingsError(
            f"bench: {place.label} failed at {load.concurrency} request(s) at once, in round {number + 1}: {e}. "
            + (f"(Its warm-up allowed {limit_s:.0f} s an answer.) " if "took more than" in str(e) else "")
            + "The rounds that were finished are kept: type the same command again."
        ) from e
    wall = time.perf_counter() - began
    counters = _settled(place, before, sum(r.decoded + 1 for r in requests)) if before else None
    return Round(requests, wall, counters, sum(r.prompt_tokens for r in requests))


def _settled(place: Place, before: Counters, tokens: int) -> Counters | None:
    deadline = time.monotonic() + SETTLE_S
    while (now := metrics.read(place.url, place.counters)) is not None:
        since = now.since(before)
        if since.generated >= tokens or time.monotonic() > deadline:
            return since
        time.sleep(0.1)
    return None


async def _wave(place: Place, asks: Sequence[Ask], load: Load, number: int, limit_s: float) -> list[Request]:
    waiting = list(enumerate(asks))[::-1]
    out: list[Request | None] = [None] * len(asks)
    began = time.perf_counter()

    async def worker(client_: Client) -> None:
        while waiting:
            i, ask = waiting.pop()
            start = time.perf_counter() - began
            path, body = ask.request(place, **load.options())
            out[i] = _request(await client_.stream(path, body), ask, place.k, load, number, start)

    async with Client(place.url, limit_s) as client_, asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, len(asks))):
            group.create_task(worker(client_))
    return [r for r in out if r is not None]


def _request(reply: Reply, ask: Ask, k: int, load: Load, number: int, start: float) -> Request:
    """A chunk is a step of the engine, and its tokens beyond the first are accepted drafts; without the drafter a step
    gives one token, whatever the chunks. Without ids nothing is known of steps."""
    after = reply.chunks[1:]
    stepped = reply.ids is not None
    return Request(
        round=number,
        prompt=ask.row_id,
        domain=ask.domain,
        k=k,
        prompt_tokens=len(reply.prompt_ids or []),
        ids=reply.ids or [],
        finish_reason=reply.finish_reason,
        steps=(len(after) if k else len(reply.ids or []) - 1) if stepped else 0,
        accepted_at=[sum(n > i + 1 for n in after) for i in range(k)] if stepped else [0] * k,
        prefill_s=reply.times[0] if reply.times else 0.0,
        decode_s=reply.times[-1] - reply.times[0] if reply.times else 0.0,
        concurrency=load.concurrency,
        began_s=start,
        times=tuple(round(t, 5) for t in reply.times),
        tokens=reply.tokens,
    )

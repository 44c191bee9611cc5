"""Asks any number of OpenAI-compatible servers at once: the least busy first, again where that can help, and never for ever.

    async with Pool(endpoints) as pool:
        reply = await pool.ask("/v1/chat/completions", lambda number_of_try: body)

    408 409 425 429 5xx, a broken or refused connection, an answer that is not JSON, no answer in time    asked again, elsewhere if possible,
                                                                                     after a random wait or as long as Retry-After says
    400 404 413 422 and the like                                                      RequestError: this request cannot be answered
    401 403                                                                           SurroundingsError: nothing can be
    an answer of another model                                                        ContractError

A server that fails several times in a row is set aside, and tried again later with one request; one that goes silent is pinged, and what
it owes is asked elsewhere. A request is given up after `tries` that were its own fault: that a server is down, or full, is not. Where no
server answers anything for `give_up_s`, or several requests are given up with no answer in between, everything stops with what each
server said last.
"""

import asyncio
import email.utils
import json
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp

from eyas.errors import ContractError, RequestError, SurroundingsError
from eyas.progress import duration, say
from eyas.servers import client
from eyas.servers.client import Reply

AGAIN = {408, 409, 425, 429}
PINGS = 2  # without a reply, until a server counts as hung
LOOK_S = 0.5  # between two looks at the processes of servers that are ours
LARGEST = 64 * 2**20  # bytes of an answer: a million ids with their text


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds."""

    connect_s: float = 10.0
    answer_s: float = 1800.0  # one answer from first to last byte
    ping_s: float = 30.0  # without any answer from a server, before it is asked whether it lives
    pong_s: float = 10.0  # for its reply
    tries: int = 8  # of one request
    wait_s: float = 0.5  # before the second try at most; doubled each time
    longest_s: float = 30.0  # between two tries, unless the server names a time
    in_a_row: int = 3  # failures, before a server is set aside
    give_up_s: float = 300.0  # without an answer from anywhere


class Endpoint(NamedTuple):
    """A server that can be asked: its address without /v1, and the name under which it offers the target."""

    url: str
    model: str
    lives: Callable[[], bool] | None = None  # of a server that is ours: whether its process does


@dataclass
class _Server:
    endpoint: Endpoint
    in_flight: dict[int, float] = field(default_factory=dict)  # request -> since when
    failed: int = 0  # in a row
    away_until: float = 0.0
    away_s: float = 0.0
    heard: float = 0.0  # when it last answered anything
    missed: int = 0  # pings in a row
    last: str = "not asked yet"
    hung: asyncio.Event = field(default_factory=asyncio.Event)


class _Again(Exception):
    """A failure that another try may mend. after_s: what the server asked for; own: the request's own fault, as far as can be seen."""

    def __init__(self, why: str, after_s: float | None = None, own: bool = False) -> None:
        super().__init__(why)
        self.why, self.after_s, self.own = why, after_s, own


class Pool:
    """Servers of one model. Used as `async with Pool(endpoints) as pool`."""

    def __init__(self, endpoints: list[Endpoint], patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.servers = [_Server(e) for e in endpoints]
        self.retries: dict[str, int] = {}  # reason -> how often
        self.asked = self.given_up = 0
        self.looked = 0.0
        self.random = random.Random()

    async def __aenter__(self) -> "Pool":
        p = self.patience
        limits = aiohttp.ClientTimeout(total=p.answer_s, sock_connect=p.connect_s)
        self.session = aiohttp.ClientSession(
            timeout=limits,
            connector=aiohttp.TCPConnector(limit=0),
            headers=client.headers(),
            read_bufsize=2**20,
        )
        now = time.monotonic()
        for server in self.servers:
            server.heard = now
        self.answered = now
        self.watch = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.watch.cancel()
        await self.session.close()

    async def ask(self, path: str, body: Callable[[int], dict[str, Any]]) -> Reply:
        """The answer to a request, whichever server gives it. body: of the n-th try, without the model's name.

        Raises RequestError where it is refused, or failed on every try while others were answered; SurroundingsError where no server
        answers at all; ContractError where a server answers as another model.
        """
        tries = tried = 0
        while True:
            server = await self._free()
            self.asked += 1
            number, began = self.asked, time.monotonic()
            server.in_flight[number] = began
            try:
                reply = await self._while_alive(
                    server, self._post(server, path, body(tried) | {"return_token_ids": True})
                )
            except _Again as e:
                self._failed(server, e)
                tries, tried = tries + (e.own or self.answered > began), tried + 1
                if tries >= self.patience.tries:
                    self._give_up(f"{server.endpoint.url}: {e.why}", tries)
                p = self.patience
                await asyncio.sleep(self.random.uniform(0, min(p.longest_s, p.wait_s * 2 ** min(tried, 9))))
                continue
            finally:
                del server.in_flight[number]
            server.failed, server.away_s, self.given_up = 0, 0.0, 0
            self.answered = server.heard = time.monotonic()
            return reply

    def _give_up(self, why: str, tries: int) -> None:
        """Raises RequestError, or SurroundingsError where it is not the first in a row."""
        self.given_up += 1
        if self.given_up >= self.patience.in_a_row:
            self._stop(f"{self.given_up} requests in a row got no answer in {tries} tries each")
        raise RequestError(f"no answer in {tries} tries; the last: {why}")

    async def _free(self) -> _Server:
        """The least busy server that is not set aside, or, where it was, has nothing in hand; waits until there is one. Raises
        SurroundingsError when that lasts too long."""
        while True:
            now = time.monotonic()
            here = [
                s
                for s in self.servers
                if s.away_until <= now and (s.failed < self.patience.in_a_row or not s.in_flight)
            ]
            if here:
                return min(here, key=lambda s: len(s.in_flight))
            self._stop_if_nobody_answers()
            await asyncio.sleep(min(1.0, self.patience.wait_s))

    def _stop_if_nobody_answers(self) -> None:
        now, p = time.monotonic(), self.patience
        if now - self.looked > LOOK_S:
            self.looked = now
            if all(s.endpoint.lives and not s.endpoint.lives() for s in self.servers):
                self._stop("the server has died")
        at_work = any(now - began > p.pong_s for s in self.servers for began in s.in_flight.values())
        if now - self.answered > p.give_up_s and not at_work:
            self._stop(f"no server has answered for {duration(now - self.answered)}")

    def _stop(self, what: str) -> None:
        said = "; ".join(f"{s.endpoint.url}: {s.last}" for s in self.servers)
        raise SurroundingsError(
            f"{what}: {said}. What was answered before is kept: mend the server, and type the same command again."
        )

    def _failed(self, server: _Server, e: _Again) -> None:
        """Count a failure; set the server aside where it has failed too often, or asks for it."""
        now, p = time.monotonic(), self.patience
        self.retries[e.why] = self.retries.get(e.why, 0) + 1
        server.last = e.why
        if e.after_s:
            server.away_until = max(server.away_until, now + e.after_s)
        server.failed += 1
        if server.failed >= p.in_a_row and server.away_until <= now:
            if not server.away_s:
                say(f"  {server.endpoint.url}: {e.why}: set aside for a while")
            server.away_s = min(p.longest_s, max(p.wait_s, 2 * server.away_s))
            server.away_until = now + server.away_s
        self._stop_if_nobody_answers()

    async def _while_alive(self, server: _Server, work: Coroutine[Any, Any, Reply]) -> Reply:
        """The work's result, unless its server stops living meanwhile."""
        task, hung = asyncio.ensure_future(work), server.hung
        dead = asyncio.ensure_future(hung.wait())
        try:
            await asyncio.wait((task, dead), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Again("it no longer answers, not even to a ping")
        finally:
            dead.cancel()
            if not task.done():
                task.cancel()

    async def _watch(self) -> None:
        """Ping servers that owe answers and have been silent; one that does not reply loses what it owes to the others."""
        p = self.patience
        while True:
            await asyncio.sleep(p.ping_s / 3)
            now = time.monotonic()
            silent = [s for s in self.servers if s.in_flight and now - s.heard > p.ping_s]
            for server, lives in zip(
                silent, await asyncio.gather(*(self._ping(s) for s in silent)), strict=True
            ):
                server.missed = 0 if lives else server.missed + 1
                if lives:
                    server.heard = time.monotonic()
                elif server.missed == PINGS:
                    server.hung.set()
                    server.hung, server.missed = asyncio.Event(), 0

    async def _ping(self, server: _Server) -> bool:
        limits = aiohttp.ClientTimeout(total=self.patience.pong_s)
        try:
            async with self.session.get(f"{server.endpoint.url}/v1/models", timeout=limits) as reply:
                await reply.read()
                return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _post(self, server: _Server, path: str, body: dict[str, Any]) -> Reply:
        """One try. Raises _Again, RequestError, SurroundingsError, or ContractError."""
        url, model, _ = server.endpoint
        try:
            async with self.session.post(f"{url}{path}", json=body | {"model": model}) as answer:
                data = await _read(answer, url)
                if answer.status != 200:
                    _refuse(url, answer.status, data, answer.headers.get("Retry-After"))
        except aiohttp.ClientConnectorError as e:
            raise _Again(f"nobody answers ({e.strerror or e})") from e
        except aiohttp.ConnectionTimeoutError as e:
            raise _Again(f"nobody answers (no connection within {duration(self.patience.connect_s)})") from e
        except TimeoutError as e:
            raise _Again(f"no answer within {duration(self.patience.answer_s)}") from e
        except (aiohttp.ClientError, OSError) as e:
            raise _Again(f"it broke off in the middle of an answer ({type(e).__name__})") from e
        try:
            reply = client.read_whole(json.loads(data), url)
        except (ValueError, SurroundingsError) as e:
            raise _Again("its answer is not what an OpenAI-compatible server sends", own=True) from e
        if reply.model and reply.model != model:
            raise ContractError(
                f'{url} was asked for the model "{model}" and answers as "{reply.model}": what it writes is not the target\'s. '
                "Ask the server of the target itself."
            )
        return reply


async def _read(answer: aiohttp.ClientResponse, url: str) -> bytes:
    parts, size = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise RequestError(f"{url} sent an answer of more than {LARGEST // 2**20} MiB")
    return b"".join(parts)


def _refuse(url: str, status: int, data: bytes, after: str | None) -> None:
    words = client.words(data.decode("utf-8", "replace"))
    if status in AGAIN or status >= 500:
        full = status in (429, 503) or after is not None
        raise _Again(f"it answers {status} ({words})", retry_after(after, time.time()), own=not full)
    if status in (401, 403):
        raise SurroundingsError(
            f"{url} refuses the key ({status}: {words}). Set EYAS_API_KEY to one that it takes."
        )
    raise RequestError(f"{url} refuses the request ({status}): {words}")


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3); None where it says nothing that can be read. At most an hour."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    return min(max(seconds, 0.0), 3600.0) if seconds == seconds else None

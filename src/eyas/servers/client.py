"""A client of OpenAI-compatible servers: answers as token ids, whole or streamed chunk by chunk.

    POST /v1/chat/completions, /v1/completions      with return_token_ids, which vLLM answers
    GET  /v1/models                                 the model's name and its longest request

A key, where a server wants one, is taken from EYAS_API_KEY and never written anywhere.
"""

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import aiohttp

from eyas.errors import RequestError, SurroundingsError

CONNECT_S = 10.0
STALL_S = 120.0  # without a byte
WORDS = 300  # characters of a server's own message that are shown
T = TypeVar("T")
B = TypeVar("B")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Served(NamedTuple):
    """A model that a server offers."""

    name: str
    longest: int | None  # tokens of prompt and answer together, where the server says it


class Reply(NamedTuple):
    """An answer. ids are None where the server returns none."""

    prompt_ids: list[int] | None
    ids: list[int] | None
    text: str
    reasoning: str
    finish_reason: str
    tokens: int
    chunks: list[int]  # tokens that came in each chunk; empty for an answer that came whole
    times: list[float]  # seconds from the request to each of these chunks
    calls: Sequence[dict[str, Any]] = ()  # tool calls, in OpenAI's form
    model: str = ""  # that the server says it is
    prompt_tokens: int | None = None


def headers() -> dict[str, str]:
    key = os.environ.get("EYAS_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def get(url: str, timeout_s: float = CONNECT_S) -> str:
    """Raises SurroundingsError where nobody answers, or answers with an error."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers()), timeout=timeout_s
        ) as reply:
            return str(reply.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as e:
        raise SurroundingsError(f"{url} answers {e.code} ({e.reason})") from e
    except (OSError, ValueError) as e:
        raise SurroundingsError(
            f"{url}: nobody answers ({getattr(e, 'reason', e)}). Is the server up, and the address right?"
        ) from e


def served(url: str) -> Served:
    """The first model that a server lists. Raises SurroundingsError where it lists none."""
    try:
        first = json.loads(get(f"{url}/v1/models"))["data"][0]
        return Served(str(first["id"]), first.get("max_model_len"))
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise SurroundingsError(f"{url}/v1/models is not what an OpenAI-compatible server answers") from e


class Client:
    """One server; used as `async with Client(url) as client`. limit_s bounds a whole answer, stall_s the wait for its next
    part."""

    def __init__(self, url: str, limit_s: float | None = None, stall_s: float = STALL_S) -> None:
        self.url, self.limit_s, self.stall_s = url, limit_s, stall_s

    async def __aenter__(self) -> "Client":
        limits = aiohttp.ClientTimeout(total=self.limit_s, sock_connect=CONNECT_S, sock_read=self.stall_s)
        self.session = aiohttp.ClientSession(
            timeout=limits, connector=aiohttp.TCPConnector(limit=0), headers=headers(), read_bufsize=2**20
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.session.close()

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer as the server's JSON.

        Raises RequestError where the server refuses the request, SurroundingsError where it fails, stalls or breaks off.
        """
        parts = [part async for part in self._parts(path, body)]
        return _json(b"".join(parts), self.url)

    async def whole(self, path: str, body: dict[str, Any]) -> Reply:
        """The answer, in one piece."""
        return read_whole(await self.ask(path, body | {"return_token_ids": True}), self.url)

    async def stream(self, path: str, body: dict[str, Any]) -> Reply:
        """The answer, with the time of each chunk."""
        wanted = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        began = time.perf_counter()
        out = Streamed()
        rest = b""
        async for part in self._parts(path, body | wanted):
            now = time.perf_counter() - began
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]"):
                    out.take(_json(line[5:], self.url), now)
        return out.reply(self.url)

    async def _parts(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            async with self.session.post(f"{self.url}{path}", json=body) as reply:
                if reply.status != 200:
                    _refuse(self.url, reply.status, await reply.text(errors="replace"))
                async for part in reply.content.iter_any():
                    yield part
        except aiohttp.ClientConnectorError as e:
            raise SurroundingsError(
                f"{self.url}: nobody answers ({e.strerror or e}). Is the server up?"
            ) from e
        except aiohttp.SocketTimeoutError as e:
            raise SurroundingsError(f"{self.url}: the server sent nothing for {self.stall_s:.0f} s") from e
        except TimeoutError as e:
            raise SurroundingsError(f"{self.url}: an answer took more than {self.limit_s or 0:.0f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise SurroundingsError(
                f"{self.url}: the server broke off in the middle of an answer ({str(e)[:WORDS] or type(e).__name__})"
            ) from e


class Streamed:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self.prompt_ids: list[int] | None = None
        self.ids: list[int] = []
        self.text, self.reasoning, self.finish, self.tokens = "", "", "", 0
        self.chunks: list[int] = []
        self.times: list[float] = []

    def take(self, event: dict[str, Any], now: float) -> None:
        """One event. Raises SurroundingsError where it is an error of the server."""
        if "error" in event:
            raise SurroundingsError(f"the server ended an answer with an error: {_words(event['error'])}")
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event.get("choices") or []:
            self.prompt_ids = (
                event.get("prompt_token_ids") or choice.get("prompt_token_ids") or self.prompt_ids
            )
            delta = choice.get("delta") or {}
            text, thought = (
                choice.get("text") or delta.get("content") or "",
                delta.get("reasoning") or delta.get("reasoning_content") or "",
            )
            ids = choice.get("token_ids") or []
            self.text, self.reasoning = self.text + text, self.reasoning + thought
            self.ids += ids
            self.finish = choice.get("finish_reason") or self.finish
            if ids or text or thought:
                self.chunks.append(len(ids))
                self.times.append(now)

    def reply(self, url: str) -> Reply:
        """Raises SurroundingsError where the answer has no end."""
        if not self.finish:
            raise SurroundingsError(
                f"{url}: the server broke off in the middle of an answer (no finish_reason)"
            )
        return Reply(
            self.prompt_ids, self.ids or None, self.text, self.reasoning, self.finish, self.tokens or len(self.ids),
            self.chunks, self.times,
        )  # fmt: skip


def read_whole(answer: dict[str, Any], url: str) -> Reply:
    """Raises SurroundingsError where the JSON is not an answer."""
    try:
        choice = answer["choices"][0]
        message = choice.get("message") or {}
        return Reply(
            prompt_ids=answer.get("prompt_token_ids") or choice.get("prompt_token_ids"),
            ids=choice.get("token_ids"),
            text=choice.get("text") or message.get("content") or "",
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            finish_reason=str(choice.get("finish_reason")),
            tokens=(answer.get("usage") or {}).get("completion_tokens", 0),
            chunks=[],
            times=[],
            calls=message.get("tool_calls") or [],
            model=str(answer.get("model") or ""),
            prompt_tokens=(answer.get("usage") or {}).get("prompt_tokens"),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as e:
        raise SurroundingsError(f"{url}: the answer is not what an OpenAI-compatible server sends") from e


def _refuse(url: str, status: int, text: str) -> None:
    if 400 <= status < 500 and status not in (408, 429):
        raise RequestError(f"{url} refuses the request ({status}): {words(text)}")
    raise SurroundingsError(f"{url} failed ({status}): {words(text)}")


def words(text: str) -> str:
    """What a server says is wrong, in one line."""
    try:
        return _words(json.loads(text).get("error", text))
    except (ValueError, AttributeError):
        return " ".join(text.split())[:WORDS]


def _words(error: Any) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:WORDS]


def _json(data: bytes, url: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as e:
        raise SurroundingsError(f"{url}: the answer is not JSON: {data[:80]!r}") from e
    if not isinstance(value, dict):
        raise SurroundingsError(f"{url}: the answer is a JSON {type(value).__name__}, not an object")
    return value


async def gather(ask: Callable[[str, B], Awaitable[T]], path: str, bodies: list[B], at_once: int) -> list[T]:
    """Answers to all, in order, at most `at_once` in flight; ask is a client's `whole` or `ask`. The first failure ends them all."""
    gate = asyncio.Semaphore(at_once)

    async def one(body: B) -> T:
        async with gate:
            return await ask(path, body)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(body)) for body in bodies]
    return [t.result() for t in tasks]


def run(work: Any) -> Any:
    """asyncio.run, of a group's several failures raising the first."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as e:
        first = e.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from e

"""Who answers: the embedded engine, batch by batch, or a server, many requests at once. Both give exact token ids.

What a server says it read and wrote is the truth: its prompt ids replace ours, and an answer without ids is refused.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from eyas.drafter.sampling import row_uniforms
from eyas.engines.hf import HFEngine
from eyas.errors import ContractError, UsageError
from eyas.generate.prompts import Prompt
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.servers import client, serve
from eyas.servers.client import CHAT, COMPLETIONS, Client, Reply
from eyas.servers.reading import tag
from eyas.stores.steps import Steps

CACHE_BYTES = {
    "cpu": 4 * 2**30,
    "cuda": 40 * 2**30,
}  # keys and values of one batch; twice that while it is compacted
WAVES = (
    4  # a server's part holds this many times generate.concurrency rows: it is full but for the part's end
)


@dataclass(frozen=True)
class Job:
    """One assistant turn to be answered."""

    row_id: str
    prompt: Prompt
    turn: int
    sample: int
    messages: list[dict[str, str]]
    ids: list[int]
    temperature: float
    top_p: float

    @property
    def split(self) -> str:
        return "held_out" if self.prompt.held_out else "train"


class Answered(NamedTuple):
    prompt_ids: list[int]
    ids: list[int]
    finish_reason: str  # "stop" or "length"
    text: str  # without thoughts


class Answering(Protocol):
    """The target, whoever runs it."""

    engine: str
    stop_ids: tuple[int, ...]
    longest: int  # tokens of prompt and answer together
    steps: Steps | None  # where the states of what is answered are kept, if they are

    def batches(self, jobs: list[Job]) -> Iterator[list[Job]]: ...

    def answer(self, jobs: list[Job]) -> list[Answered]: ...

    def write(
        self, prefix: list[int], names: list[str], max_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[Answered]:
        """Go on from a prefix at temperature 1, once per name (the embedded engine's seed), up to one of the stop ids."""
        ...


@contextlib.contextmanager
def answering(resolved: Resolved, rundir: RunDir) -> Iterator[Answering]:
    """The recipe's engine: loaded, started, or found at engine.url; what was started is stopped at the end."""
    options = resolved.recipe.engine
    if options.name == "hf":
        yield Embedded(resolved)
    elif options.url:
        url = options.url.rstrip("/")
        offered = client.served(url)
        say(f"  asking {url} (model {offered.name})")
        yield Server(resolved, url, offered.name, f"the server at {url}")
    else:
        keeps = serve.keeps(resolved)
        say(
            f"  states: {'kept while generating' if keeps.value else 'not kept while generating'}: {keeps.reason}"
        )
        folder = rundir / "conversations" / "steps" if keeps.value else None
        with serve.running(resolved, rundir, "generate", keep=folder) as server:
            steps = Steps.opened(folder) if folder else None
            yield Server(resolved, server.url, server.model, server.engine, steps)


class Embedded:
    """engines/hf.py: similar lengths together, each row with its own random numbers."""

    engine = "hf"
    steps: Steps | None = None

    def __init__(self, resolved: Resolved) -> None:
        self.resolved, self.options = resolved, resolved.recipe.generate
        code = resolved.recipe.target.trust_remote_code
        self.model = HFEngine(resolved.target, resolved.dtype, resolved.device, resolved.aux_layers, code)
        self.tokenizer, self.stop_ids = resolved.target.tokenizer(code), resolved.target.stop_ids
        self.longest = resolved.target.context

    def batches(self, jobs: list[Job]) -> Iterator[list[Job]]:
        """At most `concurrency` jobs, fewer where their keys and values would exceed a fixed share of a GPU's memory."""
        room = CACHE_BYTES[self.resolved.device] // self.resolved.target.cache_bytes(
            2 if self.resolved.dtype == "bfloat16" else 4
        )
        batch: list[Job] = []
        for job in jobs:
            longest = len(job.ids) + self.options.max_tokens
            if batch and (len(batch) == self.options.concurrency or (len(batch) + 1) * longest > room):
                yield batch
                batch = []
            batch.append(job)
        if batch:
            yield batch

    def answer(self, jobs: list[Job]) -> list[Answered]:
        answers = self.model.generate(
            [j.ids for j in jobs],
            self.options.max_tokens,
            [j.temperature for j in jobs],
            self.options.top_p,
            [row_uniforms(j.row_id, self.options.max_tokens) for j in jobs],
        )
        return [
            Answered(j.ids, a.ids, a.finish_reason, self.tokenizer.decode(a.ids, skip_special_tokens=True))
            for j, a in zip(jobs, answers, strict=True)
        ]

    def write(
        self, prefix: list[int], names: list[str], max_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[Answered]:
        answers = self.model.generate(
            [prefix] * len(names),
            max_tokens,
            [1.0] * len(names),
            1.0,
            [row_uniforms(name, max_tokens) for name in names],
            stop_ids=stop_ids,
        )
        return [Answered(prefix, a.ids, a.finish_reason, "") for a in answers]


class Server:
    """An OpenAI-compatible server that returns token ids. No seeds are sent: vLLM's CPU build (0.32.0) dies when a prompt
    with a seed is read in parts."""

    def __init__(
        self, resolved: Resolved, url: str, model: str, engine: str, steps: Steps | None = None
    ) -> None:
        self.options, self.target = resolved.recipe.generate, resolved.target
        self.url, self.model, self.engine, self.stop_ids = url, model, engine, resolved.target.stop_ids
        self.longest = min(self.target.context, client.served(url).longest or self.target.context)
        self.checked, self.steps = False, steps

    def batches(self, jobs: list[Job]) -> Iterator[list[Job]]:
        step = WAVES * self.options.concurrency
        yield from (jobs[i : i + step] for i in range(0, len(jobs), step))

    def answer(self, jobs: list[Job]) -> list[Answered]:
        """Raises ContractError where the server's model or template cannot be the recipe's target."""
        bodies = [
            {
                "model": self.model, "messages": j.messages, "max_tokens": self.options.max_tokens,
                "temperature": j.temperature, "top_p": j.top_p, **(tag(j.row_id) if self.steps else {}),
            }
            for j in jobs
        ]  # fmt: skip
        replies = self._ask(CHAT, bodies)
        self._check(jobs, replies)
        return [self._answered(r) for r in replies]

    def write(
        self, prefix: list[int], names: list[str], max_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[Answered]:
        bodies = [
            {
                "model": self.model, "prompt": prefix, "max_tokens": max_tokens, "temperature": 1.0,
                "stop_token_ids": list(stop_ids),
            }
            for _ in names
        ]  # fmt: skip
        return [self._answered(r) for r in self._ask(COMPLETIONS, bodies)]

    def _ask(self, path: str, bodies: list[dict[str, Any]]) -> list[Reply]:
        async def work() -> list[Reply]:
            async with Client(self.url) as asking:
                return await client.gather(asking.whole, path, bodies, self.options.concurrency)

        return client.run(work())

    def _answered(self, reply: Reply) -> Answered:
        if not reply.ids or not reply.prompt_ids:
            raise UsageError(
                f"{self.url} returns no token ids (return_token_ids, which vLLM answers since 0.10.2). A drafter must learn exact "
                "ids; use a server that returns them, or leave engine.url out and let eyas start one."
            )
        if max(reply.ids) >= self.target.vocab:
            raise ContractError(
                f"{self.url} answered with token id {max(reply.ids)}, and the target has {self.target.vocab:,}: it serves another model."
            )
        return Answered(
            reply.prompt_ids, reply.ids, "stop" if reply.finish_reason == "stop" else "length", reply.text
        )

    def _check(self, jobs: list[Job], replies: list[Reply]) -> None:
        """The first part tells whether this is our target at all: not one prompt read as our tokenizer and template write it
        means another model or another template."""
        if self.checked:
            return
        self.checked = True
        same = sum(j.ids == r.prompt_ids for j, r in zip(jobs, replies, strict=True) if r.prompt_ids)
        if same == 0 and any(r.prompt_ids for r in replies):
            theirs = next(r.prompt_ids for r in replies if r.prompt_ids) or []
            raise ContractError(
                f"{self.url} reads none of our prompts as the target's tokenizer and template write them (ours begins "
                f"{jobs[0].ids[:8]}, theirs {theirs[:8]}): it serves another model, or with another chat template."
            )

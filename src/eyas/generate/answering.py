"""Who answers: the embedded engine, batch by batch, or servers, many requests at once. Both give exact token ids.

What a server says it read and wrote is the truth: its prompt ids replace ours. Where it says neither, its text is tokenised again, and a
row is left out unless the server counted as many tokens as that gives.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from eyas import interrupt
from eyas.drafter.sampling import row_uniforms
from eyas.engines.hf import HFEngine
from eyas.errors import ContractError, RequestError, SurroundingsError, UsageError
from eyas.generate.chat import Chat, NotSpelled
from eyas.generate.client import Endpoint, Patience, Pool
from eyas.generate.conversing import Answered, Conversation, Job, Said, Sink
from eyas.generate.prompts import Quarantined
from eyas.generate.trial import Trial
from eyas.progress import say
from eyas.recipe import Resolved
from eyas.rundir import RunDir
from eyas.servers import client, serve
from eyas.servers.client import CHAT, COMPLETIONS, Reply
from eyas.servers.reading import tag
from eyas.stores.steps import Steps

CACHE_BYTES = {
    "cpu": 4 * 2**30,
    "cuda": 40 * 2**30,
}  # keys and values of one batch; twice that while it is compacted


class Answering(Protocol):
    """The target, whoever runs it."""

    engine: str
    stop_ids: tuple[int, ...]
    longest: int  # tokens of prompt and answer together
    steps: Steps | None  # where the states of what is answered are kept, if they are

    def converse(self, conversations: Iterator[Conversation], sink: Sink) -> None:
        """Answer every turn that is not known yet."""
        ...

    def write(
        self, prefix: list[int], names: list[str], max_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[Answered]:
        """Go on from a prefix at temperature 1, once per name (the embedded engine's seed), up to one of the stop ids."""
        ...

    def agreement(self, rows: list[tuple[list[int], int]]) -> list[tuple[int, int]] | None:
        """Of each (ids, start of the answer): at how many of its positions the target's own argmax is the answer's id, of how many. None
        where it cannot be asked."""
        ...


@contextlib.contextmanager
def answering(resolved: Resolved, rundir: RunDir, chat: Chat) -> Iterator[Answering]:
    """The recipe's engine: loaded, started, or found at engine.url and generate.endpoints; what was started is stopped at the end."""
    options = resolved.recipe.engine
    urls = [u.rstrip("/") for u in (options.url, *resolved.recipe.generate.endpoints) if u]
    if options.name == "hf":
        yield Embedded(resolved, chat)
    elif urls:
        yield Server(resolved, chat, *_found(urls))
    else:
        keeps = serve.keeps(resolved)
        say(
            f"  states: {'kept while generating' if keeps.value else 'not kept while generating'}: {keeps.reason}"
        )
        folder = rundir / "conversations" / "steps" if keeps.value else None
        with serve.running(resolved, rundir, "generate", keep=folder) as server:
            steps = Steps.opened(folder) if folder else None
            longest = client.served(server.url).longest
            yield Server(
                resolved,
                chat,
                [Endpoint(server.url, server.model, server.lives)],
                longest,
                server.engine,
                steps,
            )


def _found(urls: list[str]) -> tuple[list[Endpoint], int | None, str]:
    """Those of the addresses that answer now, their shortest context, and their name. Raises SurroundingsError where none does."""
    found: list[Endpoint] = []
    lengths: list[int] = []
    for url in dict.fromkeys(urls):
        try:
            offered = client.served(url)
        except SurroundingsError as e:
            if len(urls) == 1:
                raise
            say(f"  {e}: not asked")
            continue
        found.append(Endpoint(url, offered.name))
        lengths += [offered.longest] if offered.longest else []
        say(f"  asking {url} (model {offered.name})")
    if not found:
        raise SurroundingsError(f"none of the {len(urls)} servers answers: {', '.join(urls)}")
    name = f"the server at {found[0].url}" if len(found) == 1 else f"{len(found)} servers"
    return found, min(lengths, default=None), name


def _step(conversation: Conversation, sink: Sink) -> Job | None:
    """The conversation's next turn, if it must be asked; one that is known is taken as it is."""
    job = conversation.next()
    if isinstance(job, Quarantined):
        sink.refused(job, conversation.left)
        return None
    known = sink.known(conversation, job) if job else None
    if job and known:
        _take(conversation, job, known.said, known.results, sink)
        return None
    return job


def _take(
    conversation: Conversation, job: Job, said: Said, results: list[dict[str, Any]], sink: Sink
) -> None:
    lost = conversation.take(said, results)
    if lost:
        sink.refused(lost, conversation.left)
    elif len(results) < len(said.calls):
        sink.unanswered(job, str((said.calls[len(results)].get("function") or {}).get("name")))


class Embedded:
    """engines/hf.py: similar lengths together, each row with its own random numbers."""

    engine = "hf"
    steps: Steps | None = None

    def __init__(self, resolved: Resolved, chat: Chat) -> None:
        self.resolved, self.options, self.chat = resolved, resolved.recipe.generate, chat
        code = resolved.recipe.target.trust_remote_code
        self.model = HFEngine(resolved.target, resolved.dtype, resolved.device, resolved.aux_layers, code)
        self.tokenizer, self.stop_ids = resolved.target.tokenizer(code), resolved.target.stop_ids
        self.longest = resolved.target.context

    def converse(self, conversations: Iterator[Conversation], sink: Sink) -> None:
        """All first turns, then all second ones, also those of a run that goes on: batches hold similar lengths, and the same rows."""
        open_ = list(conversations)
        while open_:
            asked = [(c, job) for c in open_ if (job := _step(c, sink))]
            asked.sort(key=lambda pair: len(pair[1].ids))
            for batch in self._batches(asked):
                interrupt.safe_place()
                for (conversation, job), answer in zip(
                    batch, self._answer([job for _, job in batch]), strict=True
                ):
                    sink.row(job, answer, [])
                    _take(conversation, job, answer.said, [], sink)
                sink.flush()
            open_ = [c for c in open_ if not c.over]

    def _batches(self, asked: list[tuple[Conversation, Job]]) -> Iterator[list[tuple[Conversation, Job]]]:
        """At most `concurrency` jobs, fewer where their keys and values would exceed a fixed share of a GPU's memory."""
        room = CACHE_BYTES[self.resolved.device] // self.resolved.target.cache_bytes(
            2 if self.resolved.dtype == "bfloat16" else 4
        )
        batch: list[tuple[Conversation, Job]] = []
        for pair in asked:
            longest = len(pair[1].ids) + self.options.max_tokens
            if batch and (len(batch) == self.options.concurrency or (len(batch) + 1) * longest > room):
                yield batch
                batch = []
            batch.append(pair)
        if batch:
            yield batch

    def _answer(self, jobs: list[Job]) -> list[Answered]:
        answers = self.model.generate(
            [j.ids for j in jobs],
            self.options.max_tokens,
            [j.temperature for j in jobs],
            self.options.top_p,
            [row_uniforms(j.row_id, self.options.max_tokens) for j in jobs],
        )
        return [
            Answered(j.ids, a.ids, a.finish_reason, self._said(a.ids))
            for j, a in zip(jobs, answers, strict=True)
        ]

    def _said(self, ids: list[int]) -> Said:
        """Its words; without marks of thoughts as the tokenizer decodes them."""
        if not self.chat.marks:
            return Said(self.tokenizer.decode(ids, skip_special_tokens=True))
        found = self.chat.split(self.tokenizer.decode(ids, skip_special_tokens=False))
        return Said(found.content, found.thought or "")

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
        return [Answered(prefix, a.ids, a.finish_reason, Said("")) for a in answers]

    def agreement(self, rows: list[tuple[list[int], int]]) -> list[tuple[int, int]] | None:
        out = []
        for ids, start in rows:
            top1 = self.model.states([ids]).top1_BT[0].tolist()
            out.append((sum(top1[i - 1] == ids[i] for i in range(start, len(ids))), len(ids) - start))
        return out


class Server:
    """OpenAI-compatible servers of the target. No seeds are sent: vLLM's CPU build (0.32.0) dies when a prompt with a seed is read in
    parts."""

    def __init__(
        self, resolved: Resolved, chat: Chat, endpoints: list[Endpoint], longest: int | None, engine: str, steps: Steps | None = None,
    ) -> None:  # fmt: skip
        self.options, self.target, self.chat = resolved.recipe.generate, resolved.target, chat
        self.endpoints, self.engine, self.steps = endpoints, engine, steps
        self.url, self.model, _ = endpoints[0]
        self.where = ", ".join(e.url for e in endpoints)
        self.stop_ids = resolved.target.stop_ids
        self.longest = min(resolved.target.context, longest or resolved.target.context)
        self.tokenizer = chat.tokenizer
        self.tries: dict[str, int] = {}  # row id -> number of its last try, where it was not the first
        self.retries: dict[str, int] = {}

    # ---- conversations ----

    def converse(self, conversations: Iterator[Conversation], sink: Sink) -> None:
        """As many at once as generate.concurrency; each goes on as soon as its turn is answered.

        Raises ContractError where the servers cannot be the target, RequestError where they refuse everything, UsageError where thoughts
        are missing, SurroundingsError where nobody answers any more.
        """
        trial = Trial(self.where, self.chat, self.options.thinking, sink)

        async def work() -> None:
            async with Pool(self.endpoints, self._patience()) as pool:
                self.retries = pool.retries

                async def worker() -> None:
                    for conversation in conversations:
                        await self._walk(conversation, pool, trial)
                        if interrupt.asked():
                            return

                async with asyncio.TaskGroup() as group:
                    for _ in range(self.options.concurrency):
                        group.create_task(worker())

        try:
            client.run(work())
        except (SurroundingsError, KeyboardInterrupt):
            trial.end()  # what was answered before is kept
            raise
        trial.end()
        interrupt.safe_place()
        if self.retries:
            often = ", ".join(f"{why}: {n:,}" for why, n in sorted(self.retries.items()))
            say(f"  asked again: {often}")

    def _patience(self) -> Patience:
        return Patience(answer_s=self.options.answer_s)

    async def _walk(self, conversation: Conversation, pool: Pool, trial: Trial) -> None:
        while not conversation.over:
            job = _step(conversation, trial.sink)
            if job is None:
                continue
            if interrupt.asked():  # answers that are on their way are waited for
                return
            try:
                reply = await pool.ask(CHAT, self._body(job))
            except RequestError as e:
                trial.refused(conversation.end(str(e)), conversation.left, e)
                return
            answered = self._answered(job, reply)
            results: list[dict[str, Any]] = []
            if answered.said.calls:
                results = await asyncio.to_thread(conversation.results, answered.said)
            trial.row(job, answered, results)
            _take(conversation, job, answered.said, results, trial.sink)

    def _body(self, job: Job) -> Callable[[int], dict[str, Any]]:
        body = {
            "messages": [_sent(m) for m in job.messages], "max_tokens": self.options.max_tokens,
            "temperature": job.temperature, "top_p": job.top_p,
        }  # fmt: skip
        if job.tools:
            body["tools"] = job.tools
        if self.options.template:
            body["chat_template_kwargs"] = self.options.template

        def of(number: int) -> dict[str, Any]:
            if number:
                self.tries[job.row_id] = number
            return body | tag(try_name(job.row_id, number)) if self.steps else body

        return of

    def _answered(self, job: Job, reply: Reply) -> Answered:
        said, finish = self._said(reply), self._finish(reply)
        if reply.ids and reply.prompt_ids:
            flag = self._wrong(reply, said)
            return Answered(reply.prompt_ids, reply.ids, finish, said, "ids", flag)
        return self._tokenised(job, reply, said, finish)

    def _finish(self, reply: Reply) -> str:
        return reply.finish_reason if reply.finish_reason in ("stop", "tool_calls") else "length"

    def _said(self, reply: Reply) -> Said:
        """Content and thought, wherever the server put the thought."""
        if reply.reasoning or not self.chat.marks:
            return Said(reply.text, reply.reasoning, list(reply.calls))
        opens, closes = self.chat.marks
        text = reply.text
        if closes not in text and reply.ids and self.chat.closes_id in reply.ids:
            text = self.tokenizer.decode(reply.ids, skip_special_tokens=False)
        if closes not in text and opens not in text:
            return Said(text, "", list(reply.calls))
        found = self.chat.split(text)
        return Said(found.content, found.thought or "", list(reply.calls))

    def _wrong(self, reply: Reply, said: Said) -> str:
        """Why an answer's ids cannot be believed, or nothing."""
        ids = reply.ids or []
        if max(max(ids), max(reply.prompt_ids or [0])) >= self.target.vocab or min(ids) < 0:
            raise ContractError(
                f"{self.where} answered with token id {max(max(ids), max(reply.prompt_ids or [0]))}, and the target has {self.target.vocab:,}: "
                "it serves another model."
            )
        if len(ids) > self.options.max_tokens:
            return "more ids than were asked for"
        if said.text and not said.calls:
            spelled = _letters(self.tokenizer.decode(ids, skip_special_tokens=True))
            if _letters(said.text) not in spelled:
                return "its ids do not spell its text"
        return ""

    def _tokenised(self, job: Job, reply: Reply, said: Said, finish: str) -> Answered:
        """An answer that came as text alone: its ids as the template would have them, believed where the server counted as many."""
        ended = finish != "length"
        try:
            ids = self.chat.answer(job.messages, said.message, job.tools, ended)
        except NotSpelled as e:
            return Answered(job.ids, self._plain(said), finish, said, "text", f"its ids are not known: {e}")
        flag = ""
        if reply.tokens != len(ids) or (reply.prompt_tokens or 0) != len(job.ids):
            flag = "tokenised again, it has another length than the server counted"
        if not ids:
            return Answered(job.ids, self._plain(said), finish, said, "text", "it is empty")
        if self.options.retokenised == "keep":
            flag = ""
        return Answered(job.ids, ids, finish, said, "text", flag)

    def _plain(self, said: Said) -> list[int]:
        return list(self.tokenizer(said.text or "?", add_special_tokens=False)["input_ids"]) or [0]

    # ---- other requests ----

    def write(
        self, prefix: list[int], names: list[str], max_tokens: int, stop_ids: tuple[int, ...]
    ) -> list[Answered]:
        body = {
            "prompt": prefix, "max_tokens": max_tokens, "temperature": 1.0, "stop_token_ids": list(stop_ids),
        }  # fmt: skip
        replies = self._all(COMPLETIONS, [body] * len(names))
        if any(not r.ids or not r.prompt_ids for r in replies):
            raise UsageError(
                f"{self.url} returns no token ids (return_token_ids, which vLLM answers since 0.10.2), and self-prompts need them. Use a "
                "server that returns them, leave engine.url out and let eyas start one, or give prompts (prompts.sources)."
            )
        return [Answered(prefix, r.ids or [], self._finish(r), Said("")) for r in replies]

    def _all(self, path: str, bodies: list[dict[str, Any]]) -> list[Reply]:
        async def work() -> list[Reply]:
            async with Pool(self.endpoints, self._patience()) as pool:
                asked = [(lambda _, body=body: body) for body in bodies]
                return await client.gather(pool.ask, path, asked, self.options.concurrency)

        return list(client.run(work()))

    def agreement(self, rows: list[tuple[list[int], int]]) -> list[tuple[int, int]] | None:
        """By prompt_logprobs, which vLLM answers with the rank of each id."""
        out = []
        try:
            for ids, start in rows:
                body = {
                    "model": self.model,
                    "prompt": ids,
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "prompt_logprobs": 0,
                }
                answer = client.run(self._once(body))
                known = answer["choices"][0]["prompt_logprobs"]
                ranks = [known[i][str(ids[i])]["rank"] for i in range(start, len(ids))]
                out.append((sum(r == 1 for r in ranks), len(ranks)))
        except (RequestError, SurroundingsError, KeyError, TypeError, IndexError) as e:
            say(
                f"  agreement with the target is not measured here: {self.url} gives no ranks of prompts ({type(e).__name__}: {str(e)[:200]})"
            )
            return None
        return out

    async def _once(self, body: dict[str, Any]) -> dict[str, Any]:
        async with client.Client(self.url) as asking:
            return await asking.ask(COMPLETIONS, body)


def try_name(row_id: str, number: int) -> str:
    """Under which an engine keeps the states of a row's n-th try: an answer that broke off must not be mixed with the one that came."""
    return f"{row_id}~{number}" if number else row_id


def _letters(text: str) -> str:
    """A text without what servers trim or cannot decode."""
    return "".join(text.replace("\ufffd", "").split())


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as servers take it: a thought under both of its names."""
    thought = message.get("reasoning_content")
    return message | {"reasoning": thought} if thought else message

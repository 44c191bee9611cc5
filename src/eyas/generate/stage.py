"""generate: prompts -> conversations, answered by the target itself, as exact token ids.

Reads the recipe's prompt sources and the target. Writes conversations/part-*.parquet (one batch each),
quarantine.jsonl and manifest.json. Training answers are sampled, held-out ones greedy, since acceptance is replayed on them.

    eyas generate RECIPE
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from eyas import interrupt
from eyas.errors import UsageError
from eyas.generate import prompts as prompt_files
from eyas.generate import selfprompt
from eyas.generate.answering import Answering, Job, Server, answering
from eyas.generate.keeping import Keeper
from eyas.generate.prompts import Prompt, Quarantined
from eyas.progress import Progress, say
from eyas.recipe import Resolved
from eyas.rundir import RunDir, atomic, file_hash, fingerprint, write_text
from eyas.schema import GenerateSection
from eyas.stores import conversations
from eyas.stores.conversations import Row


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Answer every prompt; returns the manifest. Resumes after the last complete part."""
    prompts, bad = prompt_files.read(resolved.recipe.prompts)
    with answering(resolved, rundir) as engine:
        return _run(resolved, rundir, engine, prompts, bad)


def _run(
    resolved: Resolved, rundir: RunDir, engine: Answering, prompts: list[Prompt], bad: list[Quarantined]
) -> dict[str, Any]:
    recipe, options = resolved.recipe, resolved.recipe.generate
    tokenizer = resolved.target.tokenizer(recipe.target.trust_remote_code)
    folder = rundir / "conversations"
    written, dropped = _self_prompts(engine, tokenizer, folder, resolved)
    prompts += written
    prompt_files.need_both_sides(prompts, recipe.prompts.held_out)
    turns = max(len(p.turns) for p in prompts)
    total = sum(len(p.turns) * (1 if p.held_out else options.samples) for p in prompts)
    part = made = otherwise = 0
    seconds = 0.0
    answers: dict[str, str] = {}
    keeper = Keeper(resolved, rundir, engine) if isinstance(engine, Server) and engine.steps else None
    with Progress("generate", total, "answers", "tokens") as progress, _OneBehind() as behind:
        for turn in range(turns):
            jobs, refused = _jobs(prompts, turn, answers, tokenizer, resolved, engine.longest)
            bad += refused
            progress.total -= len(refused)
            for batch in engine.batches(jobs):
                interrupt.safe_place()
                path = folder / f"part-{part:05d}.parquet"
                part += 1
                if path.is_file():
                    rows = conversations.read_part(path)
                    progress.done += len(rows)
                    progress.first += len(rows)
                else:
                    began = time.perf_counter()
                    rows = _answer(engine, batch, resolved.target.fingerprint)
                    seconds += time.perf_counter() - began
                    behind(partial(_write, path, part - 1, rows, keeper))
                    made += sum(len(r.completion_ids) for r in rows)
                    progress.add(len(rows), sum(len(r.completion_ids) for r in rows))
                otherwise += sum(j.ids != r.prompt_ids for j, r in zip(batch, rows, strict=True))
                answers |= {r.row_id: r.text for r in rows}
    if keeper:
        keeper.finish(part)
    write_text(
        folder / "quarantine.jsonl",
        "".join(json.dumps({"where": q.where, "reason": q.reason}) + "\n" for q in bad),
    )
    if bad:
        say(
            f"  {len(bad)} prompt(s) left out, listed in {folder / 'quarantine.jsonl'}; the first: {bad[0].where}: {bad[0].reason}"
        )
    if otherwise:
        say(
            f"  {otherwise:,} of {total:,} prompts were read by {engine.engine} as other ids than the target's template writes here; "
            "its own are kept, since they are what it answered"
        )
    return rundir.finish(
        "generate",
        _figures(rundir, len(bad), made, seconds)
        | {"self_prompts_dropped": dropped, "engine": engine.engine, "read_otherwise": otherwise},
    )


def _write(path: Path, number: int, rows: list[Row], keeper: Keeper | None) -> None:
    """A part, its states first: a part that is there has them."""
    if keeper:
        keeper.part(number, rows)
    with atomic(path) as tmp:
        conversations.write_part(tmp, rows)


class _OneBehind:
    """Does a part's writing while the next part is answered; an error of it comes at the next call, or at the end."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.last: Future[None] | None = None

    def __enter__(self) -> "_OneBehind":
        return self

    def __call__(self, work: Callable[[], None]) -> None:
        if self.last:
            self.last.result()
        self.last = self.pool.submit(work)

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        self.pool.shutdown()
        if self.last and kind is None:
            self.last.result()


def _self_prompts(
    engine: Answering, tokenizer: Any, folder: Path, resolved: Resolved
) -> tuple[list[Prompt], dict[str, int]]:
    """The user turns that the recipe asks the target to write, those that overlap keep_out left out."""
    section = resolved.recipe.prompts
    count = sum(s.self_ or 0 for s in section.sources)
    if not count:
        return [], {}
    batch = resolved.recipe.generate.concurrency
    key = f"{resolved.target.fingerprint} {resolved.dtype}"
    written, dropped = selfprompt.write(engine, tokenizer, folder, count, batch, section.held_out, key)
    guarded = prompt_files.KeepOut.read(section.keep_out)
    kept = [p for p in written if not guarded.overlap(p.turns)]
    return kept, dropped | {"kept out": len(written) - len(kept)}


def _jobs(
    prompts: list[Prompt],
    turn: int,
    answers: dict[str, str],
    tokenizer: Any,
    resolved: Resolved,
    longest: int,
) -> tuple[list[Job], list[Quarantined]]:
    """The jobs of one turn, shortest prompt first, so that a batch holds similar lengths."""
    options = resolved.recipe.generate
    jobs, refused = [], []
    for prompt in prompts:
        if turn >= len(prompt.turns):
            continue
        for sample in range(1 if prompt.held_out else options.samples):
            messages = _messages(prompt, turn, sample, answers, resolved)
            if messages is None:
                refused.append(
                    Quarantined(
                        prompt.prompt_id,
                        f"turn {turn + 1}: the turn before it was left out, or its answer is empty",
                    )
                )
                continue
            try:
                ids = _render(messages, tokenizer)
            except (TemplateError, ValueError, TypeError) as e:
                refused.append(
                    Quarantined(prompt.prompt_id, f"turn {turn + 1}: the chat template refuses it: {e}")
                )
                continue
            if len(ids) + options.max_tokens > longest:
                reason = f"turn {turn + 1}: {len(ids)} prompt tokens + {options.max_tokens} exceed the context of {longest}"
                refused.append(Quarantined(prompt.prompt_id, reason))
            else:
                row_id, sampling = _row_id(prompt, turn, sample, resolved), _sampling(prompt, options)
                jobs.append(Job(row_id, prompt, turn, sample, messages, ids, *sampling))
    if turn == 0 and not jobs:
        raise UsageError(f"prompts: none can be answered; the first: {refused[0].where}: {refused[0].reason}")
    return sorted(jobs, key=lambda j: len(j.ids)), refused


def _row_id(prompt: Prompt, turn: int, sample: int, resolved: Resolved) -> str:
    sampling = _sampling(prompt, resolved.recipe.generate)
    key = [prompt.system, prompt.turns, turn, sample, sampling, resolved.recipe.generate.max_tokens]
    return fingerprint([key, resolved.target.fingerprint, resolved.dtype])


def _sampling(prompt: Prompt, options: GenerateSection) -> tuple[float, float]:
    return (0.0, 1.0) if prompt.held_out else (options.temperature, options.top_p)


def _messages(
    prompt: Prompt, turn: int, sample: int, answers: dict[str, str], resolved: Resolved
) -> list[dict[str, str]] | None:
    """What is sent at a turn, the history answered by the target; None if an answer is missing or empty."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    for i, text in enumerate(prompt.turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        if i < turn:
            answer = answers.get(_row_id(prompt, i, sample, resolved))
            if not answer:
                return None
            messages.append({"role": "assistant", "content": answer})
    return messages


def _render(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """Prompt ids as a server renders them."""
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    return list(ids)


def _answer(engine: Answering, jobs: list[Job], target: str) -> list[Row]:
    return [
        Row(
            row_id=job.row_id,
            prompt_id=job.prompt.prompt_id,
            prompt_key=prompt_files.prompt_key(job.prompt.turns[0]),
            domain=job.prompt.domain,
            split=job.split,
            turn=job.turn,
            sample=job.sample,
            prompt_ids=answer.prompt_ids,
            completion_ids=answer.ids,
            finish_reason=answer.finish_reason,
            temperature=job.temperature,
            top_p=job.top_p,
            target=target,
            text=answer.text,
        )
        for job, answer in zip(jobs, engine.answer(jobs), strict=True)
    ]


def _figures(rundir: RunDir, bad: int, made: int, seconds: float) -> dict[str, Any]:
    folder = rundir / "conversations"
    rows = list(conversations.read(folder))
    tokens: Counter[str] = Counter()
    for r in rows:
        tokens["prompt"] += len(r.prompt_ids)
        tokens[f"completion_{r.split}"] += len(r.completion_ids)
    return {
        "content": {p.name: file_hash(p) for p in conversations.parts(folder)},
        "rows": dict(Counter(r.split for r in rows)),
        "domains": dict(Counter(r.domain for r in rows)),
        "finish": dict(Counter(r.finish_reason for r in rows)),
        "tokens": dict(tokens),
        "longest_row": max(len(r.ids) for r in rows),
        "quarantined": bad,
        "rates": {"completion_tokens_per_s": made / seconds if seconds else None},
    }

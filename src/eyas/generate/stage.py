"""generate: prompts -> conversations, answered by the target itself, as exact token ids.

Reads the recipe's prompt sources and the target. Writes conversations/part-*.parquet (one batch each),
quarantine.jsonl and manifest.json. Training answers are sampled, held-out ones greedy, since acceptance is replayed on them.

    eyas generate RECIPE
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from eyas import interrupt
from eyas.drafter.sampling import row_uniforms
from eyas.engines.hf import HFEngine
from eyas.errors import UsageError
from eyas.generate import prompts as prompt_files
from eyas.generate import selfprompt
from eyas.generate.prompts import Prompt, Quarantined
from eyas.progress import Progress, say
from eyas.recipe import GenerateSection, Resolved
from eyas.rundir import RunDir, atomic, file_hash, fingerprint, write_text
from eyas.stores import conversations
from eyas.stores.conversations import Row

CACHE_BYTES = {
    "cpu": 4 * 2**30,
    "cuda": 40 * 2**30,
}  # keys and values of one batch; twice that while it is compacted


@dataclass(frozen=True)
class Job:
    """One assistant turn to be answered."""

    row_id: str
    prompt: Prompt
    turn: int
    sample: int
    ids: list[int]

    @property
    def split(self) -> str:
        return "held_out" if self.prompt.held_out else "train"


def run(resolved: Resolved, rundir: RunDir) -> dict[str, Any]:
    """Answer every prompt; returns the manifest. Resumes after the last complete part."""
    recipe, target = resolved.recipe, resolved.target
    options = recipe.generate
    prompts, bad = prompt_files.read(recipe.prompts)
    tokenizer = target.tokenizer(recipe.target.trust_remote_code)
    engine = HFEngine(
        target, resolved.dtype, resolved.device, resolved.aux_layers, recipe.target.trust_remote_code
    )
    folder = rundir / "conversations"
    written, dropped = _self_prompts(engine, tokenizer, folder, resolved)
    prompts += written
    prompt_files.need_both_sides(prompts, recipe.prompts.held_out)
    turns = max(len(p.turns) for p in prompts)
    total = sum(len(p.turns) * (1 if p.held_out else options.samples) for p in prompts)
    part = made = 0
    seconds = 0.0
    answers: dict[str, list[int]] = {}
    with Progress("generate", total, "answers", "tokens") as progress:
        for turn in range(turns):
            jobs, refused = _jobs(prompts, turn, answers, tokenizer, resolved)
            bad += refused
            progress.total -= len(refused)
            for batch in _batches(jobs, options, resolved):
                interrupt.safe_place()
                path = folder / f"part-{part:05d}.parquet"
                part += 1
                if path.is_file():
                    rows = conversations.read_part(path)
                    progress.done += len(rows)
                    progress.first += len(rows)
                else:
                    began = time.perf_counter()
                    rows = _answer(engine, batch, options, target.fingerprint)
                    seconds += time.perf_counter() - began
                    with atomic(path) as tmp:
                        conversations.write_part(tmp, rows)
                    made += sum(len(r.completion_ids) for r in rows)
                    progress.add(len(rows), sum(len(r.completion_ids) for r in rows))
                answers |= {r.row_id: r.completion_ids for r in rows}
    write_text(
        folder / "quarantine.jsonl",
        "".join(json.dumps({"where": q.where, "reason": q.reason}) + "\n" for q in bad),
    )
    if bad:
        say(
            f"  {len(bad)} prompt(s) left out, listed in {folder / 'quarantine.jsonl'}; the first: {bad[0].where}: {bad[0].reason}"
        )
    return rundir.finish(
        "generate", _figures(rundir, len(bad), made, seconds) | {"self_prompts_dropped": dropped}
    )


def _batches(jobs: list[Job], options: GenerateSection, resolved: Resolved) -> Iterator[list[Job]]:
    """At most `concurrency` jobs, fewer where their keys and values would exceed a fixed share of a GPU's memory."""
    room = CACHE_BYTES[resolved.device] // resolved.target.cache_bytes(
        2 if resolved.dtype == "bfloat16" else 4
    )
    batch: list[Job] = []
    for job in jobs:
        if batch and (
            len(batch) == options.concurrency or (len(batch) + 1) * (len(job.ids) + options.max_tokens) > room
        ):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _self_prompts(
    engine: HFEngine, tokenizer: Any, folder: Path, resolved: Resolved
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
    prompts: list[Prompt], turn: int, answers: dict[str, list[int]], tokenizer: Any, resolved: Resolved
) -> tuple[list[Job], list[Quarantined]]:
    """The jobs of one turn, shortest prompt first, so that a batch holds similar lengths."""
    options = resolved.recipe.generate
    jobs, refused = [], []
    for prompt in prompts:
        if turn >= len(prompt.turns):
            continue
        for sample in range(1 if prompt.held_out else options.samples):
            try:
                ids = _render(prompt, turn, sample, answers, tokenizer, resolved)
            except (TemplateError, ValueError, TypeError) as e:
                refused.append(
                    Quarantined(prompt.prompt_id, f"turn {turn + 1}: the chat template refuses it: {e}")
                )
                continue
            if ids is None:
                refused.append(
                    Quarantined(prompt.prompt_id, f"turn {turn + 1}: the turn before it was left out")
                )
            elif len(ids) + options.max_tokens > resolved.target.context:
                reason = f"turn {turn + 1}: {len(ids)} prompt tokens + {options.max_tokens} exceed the context of {resolved.target.context}"
                refused.append(Quarantined(prompt.prompt_id, reason))
            else:
                jobs.append(Job(_row_id(prompt, turn, sample, resolved), prompt, turn, sample, ids))
    if turn == 0 and not jobs:
        raise UsageError(f"prompts: none can be answered; the first: {refused[0].where}: {refused[0].reason}")
    return sorted(jobs, key=lambda j: len(j.ids)), refused


def _row_id(prompt: Prompt, turn: int, sample: int, resolved: Resolved) -> str:
    sampling = _sampling(prompt, resolved.recipe.generate)
    key = [prompt.system, prompt.turns, turn, sample, sampling, resolved.recipe.generate.max_tokens]
    return fingerprint([key, resolved.target.fingerprint, resolved.dtype])


def _sampling(prompt: Prompt, options: GenerateSection) -> tuple[float, float]:
    return (0.0, 1.0) if prompt.held_out else (options.temperature, options.top_p)


def _render(
    prompt: Prompt, turn: int, sample: int, answers: dict[str, list[int]], tokenizer: Any, resolved: Resolved
) -> list[int] | None:
    """Prompt ids of a turn as a server renders them, history answered by the target; None if an answer is missing."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    for i, text in enumerate(prompt.turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        if i < turn:
            answer = answers.get(_row_id(prompt, i, sample, resolved))
            if answer is None:
                return None
            messages.append(
                {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
            )
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    return list(ids)


def _answer(engine: HFEngine, jobs: list[Job], options: GenerateSection, target: str) -> list[Row]:
    sampling = [_sampling(j.prompt, options) for j in jobs]
    answers = engine.generate(
        [j.ids for j in jobs],
        options.max_tokens,
        [temperature for temperature, _ in sampling],
        options.top_p,
        [row_uniforms(j.row_id, options.max_tokens) for j in jobs],
    )
    return [
        Row(
            row_id=job.row_id,
            prompt_id=job.prompt.prompt_id,
            prompt_key=prompt_files.prompt_key(job.prompt.turns[0]),
            domain=job.prompt.domain,
            split=job.split,
            turn=job.turn,
            sample=job.sample,
            prompt_ids=job.ids,
            completion_ids=answer.ids,
            finish_reason=answer.finish_reason,
            temperature=temperature,
            top_p=top_p,
            target=target,
        )
        for job, answer, (temperature, top_p) in zip(jobs, answers, sampling, strict=True)
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
